/* SPDX-License-Identifier: MIT */
/* Every function of kvmeld.h from C99: what it does, what it refuses, from two threads, and on an
 * executor. */
#define _POSIX_C_SOURCE 200809L
#include <kvmeld.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  LAYERS = 2,
  REQUESTS = 3,
  HEADS = 2,
  GROUP = 2,
  DIM = 8,
  TOKENS = 60,
  SLOTS = 24,
  CAPACITY = 96
};
enum { ROW = HEADS * DIM, QUERY = HEADS * GROUP * DIM };

static int failures = 0;
static kvmeld_error error;

#define CHECK(what)                                              \
  do {                                                           \
    if (!(what)) {                                               \
      printf("%s:%d: expected %s\n", __FILE__, __LINE__, #what); \
      ++failures;                                                \
    }                                                            \
  } while (0)
#define OK(call)                                                            \
  do {                                                                      \
    if ((call) != KVMELD_OK || error.code != KVMELD_OK || *error.message) { \
      printf("%s:%d: %s\n", __FILE__, __LINE__, error.message);             \
      ++failures;                                                           \
    }                                                                       \
  } while (0)
#define SAYS(wanted, text)                                                               \
  do {                                                                                   \
    if (error.code != (wanted) || strstr(error.message, text) == NULL) {                 \
      printf("%s:%d: expected %d `%s`, got %d `%s`\n", __FILE__, __LINE__, wanted, text, \
             error.code, error.message);                                                 \
      ++failures;                                                                        \
    }                                                                                    \
  } while (0)
#define REFUSED(wanted, text, call) \
  do {                              \
    CHECK((call) == (wanted));      \
    SAYS(wanted, text);             \
  } while (0)
#define INVALID(text, call) REFUSED(KVMELD_INVALID_ARGUMENT, text, call)
#define NO_HANDLE(wanted, text, call) \
  do {                                \
    CHECK((call) == NULL);            \
    SAYS(wanted, text);               \
  } while (0)

static uint32_t bits = 1;
static float* fill(float* x, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    bits = bits * 1664525U + 1013904223U;
    x[i] = (float)(bits >> 8) / 8388608.0F - 1.0F;
  }
  return x;
}

static kvmeld_numbers floats(const float* x, size_t n) {
  kvmeld_numbers all = {0};
  all.data = x, all.count = n, all.type = KVMELD_F32;
  return all;
}

static kvmeld_attention_spec model(void) {
  kvmeld_attention_spec spec = {0};
  spec.size = sizeof spec;
  spec.kv_heads = HEADS, spec.group = GROUP, spec.key_dim = DIM;
  spec.rope = KVMELD_HALVES, spec.rope_base = 10000;
  return spec;
}

static kvmeld_cache_options extents(void) {
  kvmeld_cache_options options = {0};
  options.size = sizeof options;
  options.layers = LAYERS, options.requests = REQUESTS, options.capacity = CAPACITY;
  return options;
}

static kvmeld_budget slots(int32_t n) {
  kvmeld_budget budget = {0};
  budget.size = sizeof budget, budget.slots = n;
  return budget;
}

static kvmeld_cache* new_cache(void) {
  const kvmeld_attention_spec spec = model();
  const kvmeld_cache_options options = extents();
  kvmeld_cache* const kv = kvmeld_cache_new(&spec, 1, &options, &error);
  CHECK(kv != NULL && error.code == KVMELD_OK);
  return kv;
}

static kvmeld_compressor* new_compressor(kvmeld_cache* kv, const char* policy) {
  const kvmeld_budget budget = slots(SLOTS);
  kvmeld_compressor* const meld =
      kvmeld_compressor_new(kv, policy, &budget, KVMELD_STEP_ATTENDS, &error);
  CHECK(meld != NULL && error.code == KVMELD_OK);
  return meld;
}

/* Rows of `tokens` tokens of one request's layer. */
typedef struct rows {
  float q[TOKENS * QUERY], k[TOKENS * ROW], v[TOKENS * ROW], out[TOKENS * QUERY];
  kvmeld_step_input in;
  kvmeld_queries queries;
} rows;
static rows* set_rows(rows* x, int32_t tokens) {
  const size_t n = (size_t)tokens;
  memset(x, 0, sizeof *x);
  x->in.size = sizeof x->in, x->queries.size = sizeof x->queries;
  x->in.q = floats(x->q, n * QUERY), x->in.k = floats(x->k, n * ROW),
  x->in.v = floats(x->v, n * ROW);
  x->queries.q = x->in.q, x->queries.tokens = tokens;
  return x;
}
static rows* new_rows(int32_t tokens) {
  rows* const x = set_rows((rows*)malloc(sizeof(rows)), tokens);
  fill(x->q, x->in.q.count), fill(x->k, x->in.k.count), fill(x->v, x->in.v.count);
  return x;
}

static void read_prompt(kvmeld_cache* kv, kvmeld_compressor* meld, int32_t request,
                        const kvmeld_executor* on, kvmeld_error* e) {
  for (int32_t layer = 0; layer < LAYERS; ++layer) {
    rows* const x = new_rows(TOKENS);
    CHECK(!kvmeld_append(kv, layer, &request, 1, x->in.k, x->in.v, TOKENS, e));
    CHECK(!kvmeld_prompt(meld, layer, request, &x->queries, on, e));
    free(x);
  }
  CHECK(!kvmeld_end_prompt(meld, request, on, e));
}

static int32_t length_of(kvmeld_cache* kv, int32_t layer, int32_t request) {
  int32_t lengths[HEADS] = {0};
  OK(kvmeld_lengths(kv, layer, &request, 1, lengths, HEADS, &error));
  CHECK(lengths[0] == lengths[1]);
  return lengths[0];
}

/* Steps of one request; the last outputs. */
static void decode(kvmeld_compressor* meld, int32_t request, int steps, float* out,
                   const kvmeld_executor* on, kvmeld_error* e) {
  for (int t = 0; t < steps; ++t) {
    for (int32_t layer = 0; layer < LAYERS; ++layer) {
      rows* const x = new_rows(1);
      CHECK(!kvmeld_step(meld, layer, &request, 1, &x->in, out + layer * QUERY, QUERY, on, e));
      free(x);
    }
  }
}

static void compresses_and_decodes(void) {
  kvmeld_cache* const kv = new_cache();
  kvmeld_compressor* const meld = new_compressor(kv, "fold");
  size_t bytes = 0, reserved = 0, before = 0;
  float out[LAYERS * QUERY];
  CHECK(strcmp(kvmeld_version(), "0.1.0") == 0);
  read_prompt(kv, meld, 1, NULL, &error);
  CHECK(length_of(kv, 0, 1) == SLOTS);
  CHECK(length_of(kv, 0, 0) == 0);
  OK(kvmeld_cache_bytes(kv, &before, NULL, &error));
  decode(meld, 1, 20, out, NULL, &error);
  OK(kvmeld_cache_bytes(kv, &bytes, &reserved, &error));
  CHECK(bytes <= before && reserved >= bytes);
  OK(kvmeld_compressor_bytes(meld, &bytes, &reserved, &error));
  CHECK(bytes > 0 && reserved >= bytes);
  OK(kvmeld_compressor_bytes(meld, NULL, NULL, NULL));
  for (int i = 0; i < LAYERS * QUERY; ++i) {
    CHECK(isfinite(out[i]));
  }
  kvmeld_cache_free(kv); /* the compressor keeps it */
  OK(kvmeld_clear(meld, 1, &error));
  kvmeld_compressor_free(meld);
  kvmeld_cache_free(NULL), kvmeld_compressor_free(NULL);
}

/* One request over the caller's memory, attended by the caller. */
static void observes(void) {
  enum { CELLS = 64 };
  static float keys[CELLS * ROW], values[CELLS * ROW];
  const kvmeld_attention_spec spec = model();
  kvmeld_cache_options options = extents();
  options.layers = options.requests = 1, options.capacity = CELLS;
  kvmeld_memory k = {0};
  k.size = sizeof k, k.data = keys, k.count = CELLS * ROW;
  kvmeld_memory v = k;
  v.data = values, v.layout = KVMELD_STRIDES;
  v.request = CELLS * ROW, v.layer = v.request, v.head = DIM, v.row = ROW, v.element = 1;
  kvmeld_cache* const kv = kvmeld_strided_cache_new(&spec, 1, &options, &k, &v, 1, &error);
  CHECK(kv != NULL);
  const int32_t request = 0;
  rows* const x = new_rows(TOKENS);
  memcpy(keys, x->k, sizeof x->k), memcpy(values, x->v, sizeof x->v);
  OK(kvmeld_commit(kv, 0, &request, 1, TOKENS, &error));
  const kvmeld_budget budget = slots(SLOTS);
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "probabilities",
            kvmeld_compressor_new(kv, "h2o", &budget, KVMELD_QUERY, &error));
  kvmeld_compressor* const meld =
      kvmeld_compressor_new(kv, "h2o:recent=0.25", &budget, KVMELD_PROBABILITIES, &error);
  CHECK(meld != NULL);
  OK(kvmeld_prompt(meld, 0, 0, &x->queries, NULL, &error));
  int32_t lengths[HEADS] = {0};
  OK(kvmeld_compress(meld, 0, &request, 1, lengths, HEADS, NULL, &error));
  CHECK(lengths[0] == SLOTS && lengths[1] == SLOTS);
  for (int t = 0; t < 10; ++t) {
    static float weights[HEADS * GROUP * CELLS];
    rows* const token = new_rows(1);
    OK(kvmeld_append(kv, 0, &request, 1, token->in.k, token->in.v, 1, &error));
    for (int h = 0; h < HEADS; ++h) {
      kvmeld_head head = {0};
      head.size = sizeof head;
      OK(kvmeld_head_of(kv, 0, 0, h, &head, &error));
      CHECK(head.length == SLOTS + 1 && head.next_position == TOKENS + t + 1 &&
            head.capacity == CELLS);
      CHECK(head.keys == keys + h * DIM && head.key_row == ROW * (ptrdiff_t)sizeof(float));
      CHECK(head.values == values + h * DIM && head.value_row == head.key_row);
      for (int g = 0; g < GROUP; ++g) {
        float sum = 0, *const row = weights + (h * GROUP + g) * CELLS;
        for (int s = 0; s < head.length; ++s) {
          float dot = head.log_mass[s];
          for (int i = 0; i < DIM; ++i) {
            dot += token->q[(h * GROUP + g) * DIM + i] * keys[s * ROW + h * DIM + i] / sqrtf(DIM);
          }
          CHECK(head.positions[s] < head.next_position);
          sum += row[s] = expf(dot);
        }
        for (int s = 0; s < head.length; ++s) {
          row[s] /= sum;
        }
      }
    }
    kvmeld_step_attention seen = {0};
    seen.size = sizeof seen;
    INVALID("probabilities", kvmeld_observe(meld, 0, &request, 1, &seen, NULL, &error));
    seen.probabilities = weights, seen.probability_count = HEADS * GROUP * CELLS,
    seen.stride = CELLS;
    seen.query = floats(token->q, QUERY - 1);
    INVALID("query", kvmeld_observe(meld, 0, &request, 1, &seen, NULL, &error));
    seen.query = floats(NULL, 0), seen.log_sum_exp_count = 1;
    INVALID("log_sum_exp", kvmeld_observe(meld, 0, &request, 1, &seen, NULL, &error));
    seen.log_sum_exp_count = 0;
    OK(kvmeld_observe(meld, 0, &request, 1, &seen, NULL, &error));
    OK(kvmeld_compress(meld, 0, &request, 1, NULL, 0, NULL, &error));
    CHECK(length_of(kv, 0, 0) == SLOTS);
    free(token);
  }
  REFUSED(KVMELD_UNSUPPORTED, "owns its rows", kvmeld_shrink(meld, SLOTS + 1, &error));
  int32_t* entries = NULL;
  size_t count = 0;
  REFUSED(KVMELD_UNSUPPORTED, "in pages", kvmeld_free_pages(kv, 0, 0, 0, &entries, &count, &error));
  kvmeld_compressor_free(meld), kvmeld_cache_free(kv), free(x);

  /* What memory may not be. */
  kvmeld_memory wrong = k;
  wrong.data = (char*)keys + 1;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "aligned",
            kvmeld_strided_cache_new(&spec, 1, &options, &wrong, &v, 1, &error));
  wrong = k, wrong.count = 3;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "at least",
            kvmeld_strided_cache_new(&spec, 1, &options, &wrong, &v, 1, &error));
  wrong = k, wrong.row = 5;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "KVMELD_STRIDES alone",
            kvmeld_strided_cache_new(&spec, 1, &options, &wrong, &v, 1, &error));
  wrong = k, wrong.type = KVMELD_K8;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "a type of memory of 0 to 5",
            kvmeld_strided_cache_new(&spec, 1, &options, &k, &wrong, 1, &error));
  wrong = k, wrong.layout = 6;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "a layout",
            kvmeld_strided_cache_new(&spec, 1, &options, &wrong, &v, 1, &error));
  wrong = k, wrong.size = 8;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "with a size",
            kvmeld_strided_cache_new(&spec, 1, &options, &wrong, &v, 1, &error));
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "null",
            kvmeld_strided_cache_new(&spec, 1, &options, NULL, &v, 1, &error));
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "got 0",
            kvmeld_strided_cache_new(&spec, 1, &options, &k, &v, 0, &error));
  kvmeld_cache_options typed = options;
  typed.keys = KVMELD_F16;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "no keys",
            kvmeld_strided_cache_new(&spec, 1, &typed, &k, &v, 1, &error));
}

static void takes_pages_back(void) {
  enum { PAGE = 8, PAGES = CAPACITY / PAGE };
  static float keys[PAGES * PAGE * ROW], values[PAGES * PAGE * ROW];
  static int32_t table[PAGES];
  for (int32_t i = 0; i < PAGES; ++i) {
    table[i] = PAGES - 1 - i;
  }
  const kvmeld_attention_spec spec = model();
  kvmeld_cache_options options = extents();
  options.layers = options.requests = 0; /* 1 */
  kvmeld_memory k = {0};
  k.size = sizeof k, k.data = keys, k.count = PAGES * PAGE * ROW, k.layout = KVMELD_PAGES_NHD;
  kvmeld_memory v = k;
  v.data = values;
  kvmeld_page_tables tables = {0};
  tables.size = sizeof tables, tables.pages = table, tables.count = PAGES, tables.slots = PAGE;
  kvmeld_page_tables wrong = tables;
  wrong.size = 0;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "with a size",
            kvmeld_paged_cache_new(&spec, 1, &options, &k, &v, 1, &wrong, &error));
  wrong = tables, wrong.slots = 7;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "whole pages",
            kvmeld_paged_cache_new(&spec, 1, &options, &k, &v, 1, &wrong, &error));
  kvmeld_cache* const kv = kvmeld_paged_cache_new(&spec, 1, &options, &k, &v, 1, &tables, &error);
  CHECK(kv != NULL);
  kvmeld_compressor* const meld = new_compressor(kv, "snapkv:window=8");
  const int32_t request = 0;
  rows* const x = new_rows(TOKENS);
  OK(kvmeld_append(kv, 0, &request, 1, x->in.k, x->in.v, TOKENS, &error));
  OK(kvmeld_prompt(meld, 0, 0, &x->queries, NULL, &error));
  OK(kvmeld_end_prompt(meld, 0, NULL, &error));
  int32_t* entries = NULL;
  size_t count = 0;
  OK(kvmeld_free_pages(kv, 0, 0, 1, &entries, &count, &error));
  CHECK(entries == table + SLOTS / PAGE && count == PAGES - SLOTS / PAGE);
  *entries = -1;
  rows* const token = new_rows(1);
  REFUSED(KVMELD_NO_PAGE, "a page for slot",
          kvmeld_append(kv, 0, &request, 1, token->in.k, token->in.v, 1, &error));
  kvmeld_head head = {0};
  head.size = sizeof head;
  OK(kvmeld_head_of(kv, 0, 0, 0, &head, &error));
  CHECK(head.length == SLOTS && head.keys == NULL && head.key_row == 0);
  INVALID("a KV head of 0 to 1", kvmeld_free_pages(kv, 0, 0, 2, &entries, &count, &error));
  INVALID("entries", kvmeld_free_pages(kv, 0, 0, 0, NULL, &count, &error));
  kvmeld_compressor_free(meld), kvmeld_cache_free(kv), free(x), free(token);
}

/* Drafted tokens that are accepted are what steps would have made of them. */
static void drafts(void) {
  kvmeld_cache* const kv = new_cache();
  kvmeld_compressor* const meld = new_compressor(kv, "h2o");
  read_prompt(kv, meld, 0, NULL, &error);
  OK(kvmeld_copy(meld, 1, meld, 0, &error));
  rows* const x[LAYERS] = {new_rows(3), new_rows(3)};
  int32_t room = -1;
  OK(kvmeld_draft_room(meld, 0, &room, &error));
  CHECK(room >= 1);
  for (int32_t layer = 0; layer < LAYERS; ++layer) {
    OK(kvmeld_draft(meld, layer, 0, &x[layer]->in, 3, x[layer]->out, 3 * QUERY, &error));
  }
  INVALID("accept first", kvmeld_end_prompt(meld, 0, NULL, &error));
  INVALID("accept", kvmeld_accept(meld, 0, 4, &error));
  OK(kvmeld_accept(meld, 0, 2, &error));
  for (int t = 0; t < 2; ++t) {
    for (int32_t layer = 0; layer < LAYERS; ++layer) {
      const int32_t request = 1;
      rows one;
      set_rows(&one, 1);
      one.in.q = floats(x[layer]->q + t * QUERY, QUERY),
      one.in.k = floats(x[layer]->k + t * ROW, ROW);
      one.in.v = floats(x[layer]->v + t * ROW, ROW);
      const int32_t position = TOKENS + t, other = 7;
      one.in.positions = &other, one.in.position_count = 1;
      INVALID("position",
              kvmeld_step(meld, layer, &request, 1, &one.in, one.out, QUERY, NULL, &error));
      one.in.positions = &position;
      OK(kvmeld_step(meld, layer, &request, 1, &one.in, one.out, QUERY, NULL, &error));
      CHECK(t > 0 || memcmp(one.out, x[layer]->out, QUERY * sizeof(float)) == 0);
    }
  }
  float next[2][LAYERS * QUERY];
  for (int32_t request = 0; request < 2; ++request) {
    bits = 77;
    decode(meld, request, 5, next[request], NULL, &error);
  }
  CHECK(memcmp(next[0], next[1], sizeof next[0]) == 0);
  free(x[0]), free(x[1]);
  kvmeld_compressor_free(meld), kvmeld_cache_free(kv);
}

/* Bytes in memory as a stream. */
typedef struct stream {
  char* data;
  size_t size, at, most;
} stream;
static size_t write_to(void* context, const void* data, size_t n) {
  stream* const s = (stream*)context;
  if (s->size + n > s->most) {
    return 0;
  }
  memcpy(s->data + s->size, data, n);
  s->size += n;
  return n;
}
static size_t read_from(void* context, void* data, size_t n) {
  stream* const s = (stream*)context;
  n = n < s->size - s->at ? n : s->size - s->at;
  n = n < 7 ? n : 7; /* in small parts */
  memcpy(data, s->data + s->at, n);
  s->at += n;
  return n;
}

/* As a function that returns read()'s -1. */
static size_t fails_to_read(void* context, void* data, size_t n) {
  stream* const s = (stream*)context;
  return s->at < 100 ? read_from(context, data, n) : (size_t)-1;
}

static void saves_and_loads(void) {
  kvmeld_cache* const kv = new_cache();
  kvmeld_compressor* const meld = new_compressor(kv, "d2o");
  read_prompt(kv, meld, 0, NULL, &error);
  stream file = {0};
  file.most = 1 << 20, file.data = (char*)malloc(file.most);
  OK(kvmeld_save(meld, 0, write_to, &file, &error));
  const size_t first = file.size;
  OK(kvmeld_save(meld, 0, write_to, &file, &error));
  CHECK(file.size == 2 * first);
  OK(kvmeld_load(meld, 2, read_from, &file, &error));
  CHECK(file.at == first); /* what follows is the next one's */
  OK(kvmeld_load(meld, 1, read_from, &file, &error));
  float next[REQUESTS][LAYERS * QUERY];
  for (int32_t request = 0; request < REQUESTS; ++request) {
    bits = 77;
    decode(meld, request, 5, next[request], NULL, &error);
    CHECK(memcmp(next[request], next[0], sizeof next[0]) == 0);
  }
  REFUSED(KVMELD_CORRUPT_FILE, "truncated", kvmeld_load(meld, 1, read_from, &file, &error));
  file.at = 0;
  REFUSED(KVMELD_CORRUPT_FILE, "truncated", kvmeld_load(meld, 1, fails_to_read, &file, &error));
  file.at = 0, file.data[first / 2] ^= 1;
  CHECK(kvmeld_load(meld, 1, read_from, &file, &error) == KVMELD_CORRUPT_FILE);
  CHECK(length_of(kv, 1, 1) == SLOTS);
  file.most = file.size;
  REFUSED(KVMELD_CORRUPT_FILE, "stream", kvmeld_save(meld, 0, write_to, &file, &error));
  INVALID("writes", kvmeld_save(meld, 0, NULL, &file, &error));
  INVALID("reads", kvmeld_load(meld, 0, NULL, &file, &error));

  OK(kvmeld_shrink(meld, CAPACITY / 2, &error));
  REFUSED(KVMELD_NO_CAPACITY, "at least", kvmeld_shrink(meld, SLOTS / 2, &error));
  OK(kvmeld_clear(meld, 0, &error));
  CHECK(length_of(kv, 0, 0) == 0);
  free(file.data);
  kvmeld_compressor_free(meld), kvmeld_cache_free(kv);
}

static void keeps_tokens(void) {
  kvmeld_cache* const kv = new_cache();
  kvmeld_compressor* const meld = new_compressor(kv, "h2o");
  OK(kvmeld_pin(meld, 0, 20, 4, &error));
  read_prompt(kv, meld, 0, NULL, &error);
  kvmeld_head head = {0};
  head.size = sizeof head;
  OK(kvmeld_head_of(kv, 1, 0, 1, &head, &error));
  for (int32_t i = 0; i < 4; ++i) {
    CHECK(head.positions[i] == 20 + i);
  }
  INVALID("pin", kvmeld_pin(meld, 0, 3, 1, &error));
  const int32_t request = 1;
  for (int32_t layer = 0; layer < LAYERS; ++layer) {
    rows* const x = new_rows(10);
    OK(kvmeld_attend(meld, layer, request, &x->in, 10, x->out, 10 * QUERY, &error));
    OK(kvmeld_prompt(meld, layer, request, &x->queries, NULL, &error));
    free(x);
  }
  OK(kvmeld_end_prompt(meld, request, NULL, &error));
  OK(kvmeld_seal(meld, request, 10, &error));
  INVALID("seal", kvmeld_seal(meld, request, 11, &error));
  kvmeld_compressor_free(meld), kvmeld_cache_free(kv);
}

/* -------------------------------------------------------------------------------- executors */

enum { WORKERS = 2 };
typedef struct job {
  kvmeld_work f;
  void* work;
  int32_t count, worker;
} job;
static void* run_job(void* x) {
  const job* const j = (const job*)x;
  for (int32_t i = j->worker; i < j->count; i += WORKERS) {
    j->f(j->work, i, j->worker);
  }
  return NULL;
}
static void on_threads(void* context, int32_t count, kvmeld_work f, void* work) {
  pthread_t threads[WORKERS];
  job jobs[WORKERS];
  ++*(int*)context;
  for (int32_t w = 0; w < WORKERS; ++w) {
    jobs[w].f = f, jobs[w].work = work, jobs[w].count = count, jobs[w].worker = w;
    CHECK(pthread_create(&threads[w], NULL, run_job, &jobs[w]) == 0);
  }
  for (int32_t w = 0; w < WORKERS; ++w) {
    pthread_join(threads[w], NULL);
  }
}
static void forgets_one(void* context, int32_t count, kvmeld_work f, void* work) {
  (void)context;
  for (int32_t i = 1; i < count; ++i) {
    f(work, i, 0);
  }
}
static void one_twice(void* context, int32_t count, kvmeld_work f, void* work) {
  (void)context;
  for (int32_t i = 0; i < count; ++i) {
    f(work, i == 1 ? 0 : i, 0);
  }
}
static void of_other_workers(void* context, int32_t count, kvmeld_work f, void* work) {
  (void)context;
  for (int32_t i = 0; i <= count; ++i) {
    f(work, i, 1);
  }
}

static void runs_on_executors(void) {
  float serial[LAYERS * QUERY], threaded[LAYERS * QUERY];
  int calls = 0;
  kvmeld_executor on = {0};
  on.size = sizeof on, on.workers = WORKERS, on.run = on_threads, on.context = &calls;
  for (int i = 0; i < 2; ++i) {
    kvmeld_cache* const kv = new_cache();
    kvmeld_compressor* const meld = new_compressor(kv, "keepkv");
    bits = 5;
    read_prompt(kv, meld, 2, i ? &on : NULL, &error);
    decode(meld, 2, 8, i ? threaded : serial, i ? &on : NULL, &error);
    if (i) {
      CHECK(calls == LAYERS + 1 + 8 * LAYERS);
      const int32_t request = 2;
      rows* const x = new_rows(1);
      kvmeld_executor wrong = on;
      wrong.size = 1;
      INVALID("with a size",
              kvmeld_step(meld, 0, &request, 1, &x->in, x->out, QUERY, &wrong, &error));
      wrong = on, wrong.workers = 0;
      INVALID("at least 1 worker",
              kvmeld_step(meld, 0, &request, 1, &x->in, x->out, QUERY, &wrong, &error));
      wrong = on, wrong.run = NULL;
      INVALID("run", kvmeld_end_prompt(meld, 2, &wrong, &error));
      wrong = on, wrong.run = forgets_one;
      INVALID("each of 2 items once, on workers 0 to 1, got 1 such calls",
              kvmeld_step(meld, 0, &request, 1, &x->in, x->out, QUERY, &wrong, &error));
      wrong.run = one_twice;
      INVALID("got 2 such calls, of some items twice",
              kvmeld_compress(meld, 1, &request, 1, NULL, 0, &wrong, &error));
      wrong = on, wrong.run = of_other_workers, wrong.workers = 1;
      INVALID("got 0 such calls", kvmeld_compress(meld, 1, &request, 1, NULL, 0, &wrong, &error));
      /* What is thrown on a worker comes out of the call: here of a plan for spoiled slots. */
      OK(kvmeld_clear(meld, request, &error));
      read_prompt(kv, meld, request, &on, &error);
      kvmeld_head head = {0};
      head.size = sizeof head;
      OK(kvmeld_head_of(kv, 0, request, 1, &head, &error));
      for (int32_t slot = 0; slot < head.length; ++slot) {
        ((float*)head.log_mass)[slot] = -(float)INFINITY;
      }
      REFUSED(KVMELD_NOT_FINITE, "log-mass",
              kvmeld_step(meld, 0, &request, 1, &x->in, x->out, QUERY, &on, &error));
      free(x);
    }
    kvmeld_compressor_free(meld), kvmeld_cache_free(kv);
  }
  CHECK(memcmp(serial, threaded, sizeof serial) == 0);
}

/* --------------------------------------------------------------------------------- threads */

typedef struct lane {
  kvmeld_cache* kv;
  kvmeld_compressor* meld;
  rows *prompt[LAYERS], *token;
  int32_t request;
  float out[QUERY];
  int failed;
} lane;
static void* serve(void* x) {
  lane* const l = (lane*)x;
  kvmeld_error own;
  for (int32_t layer = 0; layer < LAYERS; ++layer) {
    rows* const p = l->prompt[layer];
    l->failed +=
        kvmeld_append(l->kv, layer, &l->request, 1, p->in.k, p->in.v, TOKENS, &own) != KVMELD_OK;
    l->failed += kvmeld_prompt(l->meld, layer, l->request, &p->queries, NULL, &own) != KVMELD_OK;
  }
  l->failed += kvmeld_end_prompt(l->meld, l->request, NULL, &own) != KVMELD_OK;
  for (int t = 0; t < 30; ++t) {
    for (int32_t layer = 0; layer < LAYERS; ++layer) {
      l->failed += kvmeld_step(l->meld, layer, &l->request, 1, &l->token->in, l->out, QUERY, NULL,
                               &own) != KVMELD_OK;
      /* each thread's errors are its own */
      l->failed += kvmeld_step(l->meld, 9 + l->request, &l->request, 1, &l->token->in, l->out,
                               QUERY, NULL, &own) != KVMELD_INVALID_ARGUMENT;
      l->failed += strstr(own.message, l->request ? "got 10" : "got 9") == NULL;
    }
  }
  return NULL;
}

static void serves_on_threads(void) {
  rows *prompt[LAYERS] = {new_rows(TOKENS), new_rows(TOKENS)}, *const token = new_rows(1);
  kvmeld_cache *const one = new_cache(), *const other = new_cache();
  kvmeld_compressor *const a = new_compressor(one, "fold"), *const b =
                                                                new_compressor(other, "fold");
  /* Two compressors, then two requests of one. */
  lane lanes[4] = {{0}};
  for (int i = 0; i < 4; ++i) {
    lane* const l = &lanes[i];
    l->kv = i == 1 ? other : one, l->meld = i == 1 ? b : a, l->request = i % 2 ? 1 : 0;
    l->prompt[0] = prompt[0], l->prompt[1] = prompt[1], l->token = token;
  }
  for (int i = 0; i < 4; i += 2) {
    pthread_t threads[2];
    OK(kvmeld_clear(a, 0, &error));
    for (int j = 0; j < 2; ++j) {
      CHECK(pthread_create(&threads[j], NULL, serve, &lanes[i + j]) == 0);
    }
    pthread_join(threads[0], NULL), pthread_join(threads[1], NULL);
  }
  for (int i = 0; i < 4; ++i) {
    CHECK(lanes[i].failed == 0);
    CHECK(memcmp(lanes[i].out, lanes[0].out, sizeof lanes[0].out) == 0);
  }
  free(prompt[0]), free(prompt[1]), free(token);
  kvmeld_compressor_free(a), kvmeld_cache_free(one), kvmeld_compressor_free(b),
      kvmeld_cache_free(other);
}

/* --------------------------------------------------------------------------------- refusals */

static void refuses_specs(void) {
  kvmeld_cache_options options = extents();
  kvmeld_attention_spec spec = model();
#define SPEC(text, ...)                                                                     \
  do {                                                                                      \
    spec = model();                                                                         \
    __VA_ARGS__;                                                                            \
    NO_HANDLE(KVMELD_INVALID_ARGUMENT, text, kvmeld_cache_new(&spec, 1, &options, &error)); \
  } while (0)
  SPEC("attention_spec with a size", spec.size = 0);
  SPEC("at least 1 KV head, got -1", spec.kv_heads = -1);
  SPEC("key_dim", spec.key_dim = 0);
  SPEC("rope of 0 to 2, got 3", spec.rope = 3);
  SPEC("got KVMELD_NO_ROPE", spec.rope = KVMELD_NO_ROPE);
  SPEC("got KVMELD_NO_ROPE", spec.rope = KVMELD_NO_ROPE; spec.rope_base = 0; spec.rope_dims = 4);
  SPEC("got KVMELD_NO_ROPE", spec.rope = KVMELD_NO_ROPE; spec.rope_base = 0; spec.rope_last = 1);
  SPEC("got KVMELD_NO_ROPE", spec.rope = KVMELD_NO_ROPE; spec.rope_base = 0;
       spec.rope_scaling = KVMELD_LINEAR);
  SPEC("got KVMELD_NO_ROPE", spec.rope = KVMELD_NO_ROPE; spec.rope_base = 0; spec.rope_factor = 4);
  SPEC("no count of a rope_table (NULL), got 4", spec.rope_table_count = 4);
  SPEC("above 1", spec.rope_base = 0);
  SPEC("rope_scaling of 0 to 3", spec.rope_scaling = 4);
  SPEC("rope_scaling with its factor", spec.rope_factor = 2);
  SPEC("factor above 0", spec.rope_scaling = KVMELD_LINEAR);
  SPEC("even", spec.rope_dims = 3);
  SPEC("soft_cap", spec.soft_cap = -1);
  const double table[] = {1, 0.5};
  SPEC("got both", spec.rope_table = table; spec.rope_table_count = 2);
  float sinks[HEADS * GROUP] = {0};
  sinks[3] = (float)NAN;
  SPEC("finite sink_logits", spec.sink_logits = sinks);
  spec = model();
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "got 0", kvmeld_cache_new(&spec, 0, &options, &error));
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "attention_spec of all layers (1), or of each of 2, got 3",
            kvmeld_cache_new(&spec, 3, &options, &error));
  options.layers = -1; /* one variable for both */
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "attention_spec of all layers (1), or of each of -1, got",
            kvmeld_cache_new(&spec, (size_t)-1, &options, &error));
  options = extents();
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "got null", kvmeld_cache_new(NULL, 1, &options, &error));
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "options, got null", kvmeld_cache_new(&spec, 1, NULL, &error));
  CHECK(kvmeld_cache_new(&spec, 1, NULL, NULL) == NULL); /* without an error */
  options.size = 4;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "options with a size",
            kvmeld_cache_new(&spec, 1, &options, &error));
  options = extents(), options.capacity = 0;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "a capacity", kvmeld_cache_new(&spec, 1, &options, &error));
  options = extents(), options.keys = 9;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "keys of 0 to 8, got 9",
            kvmeld_cache_new(&spec, 1, &options, &error));
  options = extents(), options.values = KVMELD_K8;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "values", kvmeld_cache_new(&spec, 1, &options, &error));
}

/* A later version's member makes a struct longer: it does not fall into padding, which programs of
 * this one do not set. */
static void ends_without_padding(void) {
#define ENDS_WITH(type, last) \
  CHECK(sizeof(type) == offsetof(type, last) + sizeof(((const type*)0)->last))
  ENDS_WITH(kvmeld_attention_spec, rope_parts_of_pairs);
  ENDS_WITH(kvmeld_cache_options, newest);
  ENDS_WITH(kvmeld_memory, page);
  ENDS_WITH(kvmeld_page_tables, stride);
  ENDS_WITH(kvmeld_head, value_row);
  ENDS_WITH(kvmeld_policy_needs, unused);
  ENDS_WITH(kvmeld_budget, bytes);
  ENDS_WITH(kvmeld_executor, context);
  ENDS_WITH(kvmeld_queries, hidden_norm_count);
  ENDS_WITH(kvmeld_step_input, position_count);
  ENDS_WITH(kvmeld_step_attention, query);
}

/* A program of a header in which kvmeld_budget had no `bytes`: what follows its budget is not read.
 */
static void takes_earlier_sizes(void) {
  kvmeld_cache* const kv = new_cache();
  kvmeld_budget budget = slots(SLOTS);
  budget.size = offsetof(kvmeld_budget, bytes), budget.bytes = -1;
  kvmeld_compressor* const meld = kvmeld_compressor_new(kv, "h2o", &budget, 7, &error);
  CHECK(meld != NULL);
  budget.size = sizeof budget;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "bytes", kvmeld_compressor_new(kv, "h2o", &budget, 7, &error));
  ++budget.size;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "a budget with a size",
            kvmeld_compressor_new(kv, "h2o", &budget, 7, &error));
  kvmeld_compressor_free(meld), kvmeld_cache_free(kv);
}

static void refuses_calls(void) {
  kvmeld_cache* const kv = new_cache();
  kvmeld_budget budget = slots(SLOTS);
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "expected one of full_cache, ",
            kvmeld_compressor_new(kv, "h20", &budget, KVMELD_STEP_ATTENDS, &error));
  SAYS(KVMELD_INVALID_ARGUMENT, "got 'h20'");
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "recent, sinks",
            kvmeld_compressor_new(kv, "h2o:resent=2", &budget, KVMELD_STEP_ATTENDS, &error));
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "null", kvmeld_compressor_new(kv, NULL, &budget, 7, &error));
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "a cache, got null",
            kvmeld_compressor_new(NULL, "h2o", &budget, 7, &error));
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "null", kvmeld_compressor_new(kv, "h2o", NULL, 7, &error));
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "0 to 7",
            kvmeld_compressor_new(kv, "h2o", &budget, 8, &error));
  budget.unused = 1;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "`unused` of 0",
            kvmeld_compressor_new(kv, "h2o", &budget, 7, &error));
  budget = slots(SLOTS), budget.sharing = 4;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "sharing of 0 to 3",
            kvmeld_compressor_new(kv, "h2o", &budget, 7, &error));
  budget = slots(CAPACITY + 1);
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "capacity",
            kvmeld_compressor_new(kv, "h2o", &budget, 7, &error));
  budget = slots(CAPACITY);
  NO_HANDLE(KVMELD_NO_CAPACITY, "capacity", kvmeld_compressor_new(kv, "h2o", &budget, 7, &error));
  budget.size = 8;
  NO_HANDLE(KVMELD_INVALID_ARGUMENT, "a budget with a size",
            kvmeld_compressor_new(kv, "h2o", &budget, 7, &error));
  budget = slots(SLOTS), budget.slack = 4;
  NO_HANDLE(KVMELD_UNSUPPORTED, "kvzip", kvmeld_compressor_new(kv, "kvzip", &budget, 7, &error));

  kvmeld_policy_needs needs = {0};
  INVALID("needs with a size", kvmeld_needs_of("fold", &needs, &error));
  needs.size = sizeof needs;
  OK(kvmeld_needs_of("fold", &needs, &error));
  CHECK(needs.queries && needs.step == KVMELD_QUERY && needs.decodes && needs.shares &&
        needs.seals);
  OK(kvmeld_needs_of("keepkv", &needs, &error));
  CHECK(needs.step == (KVMELD_PROBABILITIES | KVMELD_LOG_SUM_EXP | KVMELD_QUERY));
  OK(kvmeld_needs_of("roco", &needs, &error)); /* a peer */
  OK(kvmeld_needs_of("kvzip", &needs, &error));
  CHECK(!needs.decodes && needs.step == 0);
  INVALID("got 'x'", kvmeld_needs_of("x", &needs, &error));
  INVALID("text, got null", kvmeld_needs_of(NULL, &needs, &error));

  kvmeld_compressor* const meld = new_compressor(kv, "h2o");
  kvmeld_compressor* const shared = new_compressor(kv, "fold");
  read_prompt(kv, meld, 0, NULL, &error);
  const int32_t request = 0, twice[] = {0, 0};
  rows *const x = new_rows(1), *const y = new_rows(1);
  int32_t lengths[HEADS], room = 0;
  kvmeld_head head = {0};
  const kvmeld_numbers none = {0};
  /* No handle, in any call. */
  kvmeld_step_attention seen = {0};
  seen.size = sizeof seen;
  INVALID("a cache, got null", kvmeld_append(NULL, 0, &request, 1, x->in.k, x->in.v, 1, &error));
  INVALID("a cache, got null", kvmeld_commit(NULL, 0, &request, 1, 1, &error));
  INVALID("a cache, got null", kvmeld_lengths(NULL, 0, &request, 1, lengths, HEADS, &error));
  INVALID("a cache, got null", kvmeld_head_of(NULL, 0, 0, 0, &head, &error));
  INVALID("a cache, got null", kvmeld_free_pages(NULL, 0, 0, 0, NULL, NULL, &error));
  INVALID("a cache, got null", kvmeld_cache_bytes(NULL, NULL, NULL, &error));
  INVALID("a compressor, got null", kvmeld_compressor_bytes(NULL, NULL, NULL, &error));
  INVALID("a compressor, got null", kvmeld_prompt(NULL, 0, 0, &x->queries, NULL, &error));
  INVALID("a compressor, got null", kvmeld_end_prompt(NULL, 0, NULL, &error));
  INVALID("a compressor, got null", kvmeld_compress(NULL, 0, &request, 1, NULL, 0, NULL, &error));
  INVALID("a compressor, got null",
          kvmeld_step(NULL, 0, &request, 1, &x->in, x->out, QUERY, NULL, &error));
  INVALID("a compressor, got null", kvmeld_attend(NULL, 0, 0, &x->in, 1, x->out, QUERY, &error));
  INVALID("a compressor, got null", kvmeld_observe(NULL, 0, &request, 1, &seen, NULL, &error));
  INVALID("a compressor, got null", kvmeld_draft(NULL, 0, 0, &x->in, 1, x->out, QUERY, &error));
  INVALID("a compressor, got null", kvmeld_accept(NULL, 0, 0, &error));
  INVALID("a compressor, got null", kvmeld_draft_room(NULL, 0, &room, &error));
  INVALID("a compressor, got null", kvmeld_clear(NULL, 0, &error));
  INVALID("a compressor, got null", kvmeld_copy(NULL, 0, meld, 1, &error));
  INVALID("another compressor, got null", kvmeld_copy(meld, 0, NULL, 1, &error));
  INVALID("a compressor, got null", kvmeld_seal(NULL, 0, 1, &error));
  INVALID("a compressor, got null", kvmeld_pin(NULL, 0, 0, 1, &error));
  INVALID("a compressor, got null", kvmeld_shrink(NULL, 1, &error));
  INVALID("a compressor, got null", kvmeld_save(NULL, 0, write_to, NULL, &error));
  INVALID("a compressor, got null", kvmeld_load(NULL, 0, read_from, NULL, &error));
  /* Structs of other sizes, and null. */
  INVALID("head with a size", kvmeld_head_of(kv, 0, 0, 0, &head, &error));
  INVALID("head, got null", kvmeld_head_of(kv, 0, 0, 0, NULL, &error));
  INVALID("tokens, got null", kvmeld_draft_room(meld, 0, NULL, &error));
  INVALID("lengths", kvmeld_lengths(kv, 0, &request, 1, NULL, HEADS, &error));
  INVALID("lengths [2], got 1", kvmeld_lengths(kv, 0, &request, 1, lengths, 1, &error));
  INVALID("requests, got null", kvmeld_lengths(kv, 0, NULL, 1, lengths, HEADS, &error));
  INVALID("in, got null", kvmeld_step(meld, 0, &request, 1, NULL, x->out, QUERY, NULL, &error));
  x->in.size = 1;
  INVALID("in with a size", kvmeld_step(meld, 0, &request, 1, &x->in, x->out, QUERY, NULL, &error));
  INVALID("in with a size", kvmeld_draft(meld, 0, 0, &x->in, 1, x->out, QUERY, &error));
  INVALID("in with a size", kvmeld_attend(meld, 0, 0, &x->in, 1, x->out, QUERY, &error));
  x->in.size = sizeof x->in, x->queries.size = 1, seen.size = 1;
  INVALID("queries with a size", kvmeld_prompt(meld, 0, 0, &x->queries, NULL, &error));
  INVALID("in with a size", kvmeld_observe(meld, 0, &request, 1, &seen, NULL, &error));
  x->queries.size = sizeof x->queries;
  /* What does not fit. */
  INVALID("a layer of 0 to 1, got 2",
          kvmeld_append(kv, 2, &request, 1, x->in.k, x->in.v, 1, &error));
  INVALID("keys [1, 2, 8] (16 numbers), got 0",
          kvmeld_append(kv, 0, &request, 1, none, x->in.v, 1, &error));
  REFUSED(KVMELD_NO_CAPACITY, "at most 72 tokens", kvmeld_commit(kv, 0, &request, 1, 100, &error));
  y->in.k.type = KVMELD_Q8_0;
  INVALID("keys in KVMELD_F32, F16 or BF16",
          kvmeld_append(kv, 0, &request, 1, y->in.k, y->in.v, 1, &error));
  y->in.k.type = KVMELD_F32, y->in.k.data = (const char*)y->k + 1;
  INVALID("k aligned to 4 bytes",
          kvmeld_step(meld, 0, &request, 1, &y->in, y->out, QUERY, NULL, &error));
  y->in.k.data = NULL;
  INVALID("null", kvmeld_step(meld, 0, &request, 1, &y->in, y->out, QUERY, NULL, &error));
  INVALID("out", kvmeld_step(meld, 0, &request, 1, &x->in, x->out, QUERY - 1, NULL, &error));
  INVALID("out", kvmeld_step(meld, 0, &request, 1, &x->in, NULL, QUERY, NULL, &error));
  INVALID("twice", kvmeld_commit(kv, 0, twice, 2, 1, &error));
  INVALID("at most 3 requests, got 4", kvmeld_commit(kv, 0, twice, 4, 1, &error));
  INVALID("a request of 0 to 2", kvmeld_clear(meld, 3, &error));
  x->in.position_count = 1;
  INVALID("positions", kvmeld_step(meld, 0, &request, 1, &x->in, x->out, QUERY, NULL, &error));
  x->in.position_count = 0;
  x->queries.log_sum_exp_count = 4;
  INVALID("log_sum_exp", kvmeld_prompt(meld, 0, 0, &x->queries, NULL, &error));
  x->queries.log_sum_exp_count = 0, x->queries.hidden_norm = x->q, x->queries.hidden_norm_count = 2;
  INVALID("hidden_norm [1], got 2", kvmeld_prompt(meld, 0, 0, &x->queries, NULL, &error));
  CHECK(length_of(kv, 0, 0) == SLOTS && length_of(kv, 1, 0) == SLOTS);
  /* NaN in one request; the other made its step. */
  const int32_t both[] = {0, 1};
  read_prompt(kv, meld, 1, NULL, &error);
  rows* const z = new_rows(2);
  z->k[0] = (float)NAN;
  REFUSED(KVMELD_NOT_FINITE, "in head 0 ",
          kvmeld_step(meld, 0, both, 2, &z->in, z->out, 2 * QUERY, NULL, &error));
  kvmeld_head of_other = {0};
  of_other.size = sizeof of_other;
  OK(kvmeld_head_of(kv, 0, 1, 0, &of_other, &error));
  CHECK(of_other.next_position == TOKENS + 1);
  /* A long text is cut, and ends. */
  static char name[3000];
  memset(name, 'x', sizeof name - 1);
  CHECK(kvmeld_needs_of(name, &needs, &error) == KVMELD_INVALID_ARGUMENT);
  CHECK(strlen(error.message) == sizeof error.message - 1);
  CHECK(strcmp(error.message + sizeof error.message - 4, "...") == 0);
  /* ... between two characters: wherever these begin, the last one before the dots is whole. */
  for (size_t first = 0; first < 2; ++first) {
    name[0] = 'x';
    for (size_t i = first; i + 2 < sizeof name; i += 2) {
      memcpy(name + i, "\xC3\xA9", 2);
    }
    CHECK(kvmeld_needs_of(name, &needs, &error) == KVMELD_INVALID_ARGUMENT);
    CHECK(strcmp(error.message + strlen(error.message) - 4, "\xA9...") == 0);
  }
  CHECK(kvmeld_clear(NULL, 0, NULL) == KVMELD_INVALID_ARGUMENT);
  free(x), free(y), free(z);
  kvmeld_compressor_free(shared), kvmeld_compressor_free(meld), kvmeld_cache_free(kv);
}

int main(void) {
  compresses_and_decodes();
  observes();
  takes_pages_back();
  drafts();
  saves_and_loads();
  keeps_tokens();
  runs_on_executors();
  serves_on_threads();
  ends_without_padding();
  takes_earlier_sizes();
  refuses_specs();
  refuses_calls();
  printf("%d checks failed\n", failures);
  return failures > 0;
}
