/* SPDX-License-Identifier: MIT */
/**
 * @file
 * kvmeld for C, and for whatever calls C: KV-cache compression for LLM inference engines.
 *
 *     kvmeld_attention_spec spec = {.size = sizeof spec, .kv_heads = 8, .group = 4, .key_dim = 128,
 *                                   .rope = KVMELD_HALVES, .rope_base = 500000};
 *     kvmeld_error e;
 *     kvmeld_cache* kv = kvmeld_cache_new(&spec, 1, &options, &e);
 *     kvmeld_compressor* meld =
 *         kvmeld_compressor_new(kv, "fold", &budget, KVMELD_STEP_ATTENDS, &e);
 *     ...
 *     if (kvmeld_step(meld, layer, &request, 1, &in, out, out_count, NULL, &e) != KVMELD_OK) {
 *       fprintf(stderr, "%s\n", e.message);
 *     }
 *
 * Functions are those of the C++ interface (kvmeld/compressor.hpp), under their names. Left to C++:
 * a policy or budget of its own for each head, budgets over several processes, policies of one's
 * own.
 *
 * Structs. The first member of most is `size`, which the caller sets to `sizeof`, of what is
 * written to as well; what is left out is 0, which is the default. Later versions add members at
 * the end, where 0 is what there was before, and take the sizes of earlier ones; any other is
 * refused. `kvmeld_error` and `kvmeld_numbers` never change.
 *
 * Errors. A function returns its code, KVMELD_OK (0) or why it was refused, and the call's
 * `kvmeld_error`, which may be NULL, has the text: "kvmeld: step: expected X, got Y". Functions
 * that make a handle return NULL instead. A refused call has changed nothing, but for what
 * KVMELD_NOT_FINITE of `kvmeld_step`, KVMELD_NO_MEMORY and executors say. Every pointer may be
 * NULL: it is refused, or the function says what NULL means. No C++ exception leaves the library.
 *
 * Memory. What the caller passes must live as long as the call; memory of
 * `kvmeld_strided_cache_new` and `kvmeld_paged_cache_new` as long as the cache and its compressors.
 * Handles may be freed in any order: a compressor keeps its cache.
 *
 * Threads. Calls over different requests may run at the same time, on one compressor or on several.
 * Alone: `kvmeld_shrink`, `kvmeld_cache_bytes`, `kvmeld_compressor_bytes`, and freeing.
 *
 * Shapes. Arrays lie without gaps, the last axis closest. `heads`: those of the requests listed, in
 * their order, `kv_heads` each. Numbers of rows come in float, half or bfloat16; outputs are
 * floats.
 */
#ifndef KVMELD_H
#define KVMELD_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KVMELD_API __attribute__((visibility("default")))
#else
#define KVMELD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** Why a call was refused. */
typedef int32_t kvmeld_code;
enum {
  KVMELD_OK = 0,
  KVMELD_INVALID_ARGUMENT = 1, /**< a mistake of the caller's: sizes, parameters, budgets, NULL */
  KVMELD_NO_CAPACITY = 2,      /**< a head's slots, or its positions, are all in use */
  KVMELD_NO_PAGE = 3,          /**< a page table has no page for a slot */
  KVMELD_NOT_FINITE = 4,       /**< NaN or Inf in what comes in, or in a plan */
  KVMELD_UNSUPPORTED = 5,      /**< a policy or a cache cannot do it */
  KVMELD_CORRUPT_FILE = 6,     /**< `kvmeld_load` read something else, or a callback failed */
  KVMELD_NO_MEMORY = 7,        /**< none left: a request may be half changed, `kvmeld_clear` it */
  KVMELD_FAILED = 8            /**< anything else: a defect of the library's */
};

/** What a call says. On success the code is KVMELD_OK and the text empty. */
typedef struct kvmeld_error {
  kvmeld_code code;   /**< why, or KVMELD_OK */
  char message[1020]; /**< ends with 0; longer ones are cut */
} kvmeld_error;

/** What numbers are held as. */
typedef int32_t kvmeld_storage;
enum {
  KVMELD_F32 = 0,
  KVMELD_F16 = 1,  /**< IEEE binary16 */
  KVMELD_BF16 = 2, /**< bfloat16 */
  KVMELD_Q8_0 = 3, /**< blocks of 32 numbers in 8 bits, as ggml's */
  KVMELD_Q4_0 = 4, /**< ... in 4 bits, as ggml's; values are rotated */
  KVMELD_Q6_0 = 5, /**< ... in 6 bits */
  KVMELD_K8 = 6, /**< keys of a cache with memory of its own: less their mean, rotated, in 8 bits */
  KVMELD_K6 = 7, /**< ... in 6 bits */
  KVMELD_K4 = 8  /**< ... in 4 bits */
};

/** `count` numbers of a plain type, read only; all 0: none. */
typedef struct kvmeld_numbers {
  const void* data;    /**< aligned as they are */
  size_t count;        /**< how many */
  kvmeld_storage type; /**< KVMELD_F32, KVMELD_F16 or KVMELD_BF16 */
} kvmeld_numbers;

/** Which numbers of a row RoPE pairs. */
enum {
  KVMELD_NO_ROPE = 0,
  KVMELD_HALVES = 1,     /**< (i, i + dims/2), as Hugging Face */
  KVMELD_INTERLEAVED = 2 /**< (2i, 2i + 1), as llama2.c and GGUF files of the Llama family */
};
/** How RoPE's frequencies are scaled. */
enum { KVMELD_NO_SCALING = 0, KVMELD_LINEAR = 1, KVMELD_LLAMA3 = 2, KVMELD_YARN = 3 };

/**
 * One layer's attention as the model computes it:
 *
 *     logit_s = cap(scale * q.k_s) + slope * (position_s - position) + log_mass_s
 *     p_s = exp(logit_s) / (exp(sink) + sum of exp(logit))
 *     cap(x) = soft_cap * tanh(x / soft_cap)
 */
typedef struct kvmeld_attention_spec {
  size_t size;               /**< sizeof of the struct */
  int32_t kv_heads;          /**< of the layer, at least 1 */
  int32_t group;             /**< query heads per KV head (GQA); 0: 1 */
  int32_t key_dim;           /**< numbers of a key and of a query, 1 to 4096 */
  int32_t value_dim;         /**< of a value and of an output; 0: key_dim */
  float scale;               /**< 0: 1/sqrt(key_dim) */
  float soft_cap;            /**< 0: none */
  const float* sink_logits;  /**< [kv_heads * group] a learned mass that no slot has; NULL: none */
  const float* alibi_slopes; /**< [kv_heads * group]; NULL: none */
  int32_t window;            /**< tokens seen, the query's own among them; 0: all */
  int32_t check_finite;      /**< 1: refuse NaN and Inf in rows, for a pass over them */
  int32_t rope;              /**< KVMELD_NO_ROPE, KVMELD_HALVES or KVMELD_INTERLEAVED */
  int32_t rope_dims;         /**< numbers of a row that are rotated, even; 0: all */
  int32_t rope_last;         /**< 1: these are a row's last, else its first */
  int32_t rope_scaling;      /**< KVMELD_NO_SCALING, KVMELD_LINEAR, KVMELD_LLAMA3 or KVMELD_YARN */
  double rope_base;          /**< frequencies base^(-2p/dims); above 1, or 0 with a table */
  const double* rope_table;  /**< [rope_table_count] radians per position; NULL: none */
  size_t rope_table_count;   /**< half of the numbers rotated */
  double rope_factor;        /**< of the scaling, above 0 */
  double rope_low;           /**< llama3: low_freq_factor; 0: 1 */
  double rope_high;          /**< llama3: high_freq_factor; 0: 4 */
  double rope_fast;          /**< yarn: beta_fast, turns; 0: 32 */
  double rope_slow;          /**< yarn: beta_slow, turns; 0: 1 */
  int32_t rope_context;      /**< llama3, yarn: original context; 0: 8192 and 4096 */
  int32_t rope_parts_of_pairs; /**< yarn: 1: the ramp is not cut to whole pairs, as in gpt-oss */
} kvmeld_attention_spec;

/** How large a cache is, and what a cache with memory of its own holds. */
typedef struct kvmeld_cache_options {
  size_t size;           /**< sizeof of the struct */
  int32_t layers;        /**< 0: 1 */
  int32_t requests;      /**< 0: 1 */
  int32_t capacity;      /**< slots per head, at least 1 */
  kvmeld_storage keys;   /**< any; over memory of the caller's 0, its type says it */
  kvmeld_storage values; /**< KVMELD_F32 to KVMELD_Q6_0; likewise */
  int32_t newest;        /**< rows of each head, 0 to 64, held in half while they are the newest */
} kvmeld_cache_options;

/** How keys (or values) lie: n slots, h KV heads, d numbers of a head. */
enum {
  KVMELD_NHD = 0,       /**< [layers, requests, capacity, kv_heads, dim], as llama.cpp */
  KVMELD_HND = 1,       /**< [layers, requests, kv_heads, capacity, dim] */
  KVMELD_HDN = 2,       /**< [layers, requests, kv_heads, dim, capacity]: transposed; no blocks */
  KVMELD_PAGES_NHD = 3, /**< [layers, pages, slots, kv_heads, dim], as vLLM's FlashAttention */
  KVMELD_PAGES_HND = 4, /**< [layers, pages, kv_heads, slots, dim] */
  KVMELD_STRIDES = 5    /**< by the strides of kvmeld_memory */
};

/** Keys (or values) in memory of the caller's: of all layers, or of one. */
typedef struct kvmeld_memory {
  size_t size;         /**< sizeof of the struct */
  void* data;          /**< aligned as its numbers are */
  size_t count;        /**< elements: numbers, or blocks of 32 numbers */
  kvmeld_storage type; /**< KVMELD_F32 to KVMELD_Q6_0 */
  int32_t layout;      /**< KVMELD_NHD ... KVMELD_STRIDES */
  ptrdiff_t layer;   /**< KVMELD_STRIDES: elements from a layer to the next; else 0, as all below */
  ptrdiff_t request; /**< ... from a request; not in pages */
  ptrdiff_t head;    /**< ... from a KV head */
  ptrdiff_t row;     /**< ... from a slot (of a page) */
  ptrdiff_t element; /**< ... from an element of a row */
  ptrdiff_t page;    /**< ... from a page; in pages only */
} kvmeld_memory;

/** Page tables: one for each request, [requests, capacity / slots], or [layers, requests, ...], or
 *  [layers, requests, kv_heads, ...]. The caller enters a page before a slot needs it. */
typedef struct kvmeld_page_tables {
  size_t size;      /**< sizeof of the struct */
  int32_t* pages;   /**< numbers of pages; -1 until one is entered */
  size_t count;     /**< entries in all */
  int32_t slots;    /**< a page holds */
  ptrdiff_t stride; /**< from one table to the next; 0: capacity / slots */
} kvmeld_page_tables;

/** A cache: keys, values, log-mass and position of each head's slots. Heads are numbered
 *  (layer * requests + request) * kv_heads + k. */
typedef struct kvmeld_cache kvmeld_cache;
/** Policy, budget, states and scratch over a cache. */
typedef struct kvmeld_compressor kvmeld_compressor;

/** The library's version, "0.1.0". */
KVMELD_API const char* kvmeld_version(void);

/* ------------------------------------------------------------------------------------- caches */

/**
 * A cache with memory of its own, which it takes as slots come into use. `specs [spec_count]`: one,
 * or one for each layer, alike but for scale, RoPE, cap, sinks, slopes and window.
 * NULL: refused, as shapes that cannot be are.
 */
KVMELD_API kvmeld_cache* kvmeld_cache_new(const kvmeld_attention_spec* specs, size_t spec_count,
                                          const kvmeld_cache_options* options, kvmeld_error* error);
/**
 * A cache over the caller's keys and values, `[memories]` of each: 1 of all layers, or one of each
 * layer. Rows that lie there already are taken in by `kvmeld_commit`. With the same memory for
 * both, values are the first `value_dim` numbers of the keys, as in latent attention (MLA). NULL:
 * refused, as memory that is too small, not aligned, or in which rows overlap is.
 */
KVMELD_API kvmeld_cache* kvmeld_strided_cache_new(
    const kvmeld_attention_spec* specs, size_t spec_count, const kvmeld_cache_options* options,
    const kvmeld_memory* keys, const kvmeld_memory* values, size_t memories, kvmeld_error* error);
/** The same over the caller's pages. NULL: refused, as a capacity of no whole pages is. */
KVMELD_API kvmeld_cache* kvmeld_paged_cache_new(
    const kvmeld_attention_spec* specs, size_t spec_count, const kvmeld_cache_options* options,
    const kvmeld_memory* keys, const kvmeld_memory* values, size_t memories,
    const kvmeld_page_tables* tables, kvmeld_error* error);
/** Frees a handle; its compressors live on. NULL: nothing. */
KVMELD_API void kvmeld_cache_free(kvmeld_cache* cache);

/**
 * Appends tokens of a layer's requests at their next positions: `k [tokens, heads, key_dim]`,
 * rotated, `v [tokens, heads, value_dim]` (none in one memory). Refused: other counts, no room
 * (KVMELD_NO_CAPACITY, KVMELD_NO_PAGE), a request listed twice.
 */
KVMELD_API kvmeld_code kvmeld_append(kvmeld_cache* cache, int32_t layer, const int32_t* requests,
                                     size_t request_count, kvmeld_numbers k, kvmeld_numbers v,
                                     int32_t tokens, kvmeld_error* error);
/** Takes in `tokens` rows of each head that follow its slots in use: the caller wrote them.
 *  Refused: as of `kvmeld_append`; KVMELD_K8 to KVMELD_K4 and newest rows in half. */
KVMELD_API kvmeld_code kvmeld_commit(kvmeld_cache* cache, int32_t layer, const int32_t* requests,
                                     size_t request_count, int32_t tokens, kvmeld_error* error);

/** Slots in use, `lengths [length_count = heads]`. */
KVMELD_API kvmeld_code kvmeld_lengths(const kvmeld_cache* cache, int32_t layer,
                                      const int32_t* requests, size_t request_count,
                                      int32_t* lengths, size_t length_count, kvmeld_error* error);

/** What one head holds, for attention of the caller's own. Valid until the next call that changes
 *  the head. Add log_mass[s] to the logit of slot s; the order of slots means nothing. */
typedef struct kvmeld_head {
  size_t size;              /**< sizeof of the struct */
  int32_t length;           /**< slots in use */
  int32_t capacity;         /**< slots */
  int32_t next_position;    /**< that the next token's rows are to be rotated to */
  const float* log_mass;    /**< [length] */
  const int32_t* positions; /**< [length] of the slots' tokens */
  const void* keys;    /**< of slot 0, as they lie (docs/reference/formats.md); in pages NULL */
  const void* values;  /**< likewise */
  ptrdiff_t key_row;   /**< bytes from a slot's key to the next; in pages 0 */
  ptrdiff_t value_row; /**< likewise */
} kvmeld_head;
/** Reads KV head `kv_head` of a layer and request into `head`, whose `size` is set. */
KVMELD_API kvmeld_code kvmeld_head_of(const kvmeld_cache* cache, int32_t layer, int32_t request,
                                      int32_t kv_head, kvmeld_head* head, kvmeld_error* error);

/** The entries of a head's page table after those in use: pages that may be taken back, as after a
 *  compression, and -1. The caller may write to them. Refused: a cache without pages. */
KVMELD_API kvmeld_code kvmeld_free_pages(kvmeld_cache* cache, int32_t layer, int32_t request,
                                         int32_t kv_head, int32_t** entries, size_t* count,
                                         kvmeld_error* error);

/** Bytes of the slots in use, and what the cache holds at present, without memory of the caller's.
 *  Either pointer may be NULL. */
KVMELD_API kvmeld_code kvmeld_cache_bytes(const kvmeld_cache* cache, size_t* bytes,
                                          size_t* reserved, kvmeld_error* error);

/* -------------------------------------------------------------------------- policies, budgets */

/** What a decode step's attention may give, to be combined: see `kvmeld_observe`. */
enum {
  KVMELD_PROBABILITIES = 1,
  KVMELD_LOG_SUM_EXP = 2,
  KVMELD_QUERY = 4,
  KVMELD_STEP_ATTENDS = 7 /**< all: `kvmeld_step` computes attention */
};

/** What a policy needs, and can do. */
typedef struct kvmeld_policy_needs {
  size_t size;        /**< sizeof of the struct */
  int32_t queries;    /**< 1: a prompt's queries (`kvmeld_prompt`) */
  uint32_t step;      /**< of KVMELD_PROBABILITIES ... KVMELD_QUERY, where the caller attends */
  int32_t decodes;    /**< 1: it takes steps; 0: it compresses prompts only */
  int32_t shares;     /**< 1: heads can share a budget */
  int32_t soft_cap;   /**< 1: it goes with a model's soft_cap */
  int32_t sinks;      /**< ... sink_logits */
  int32_t alibi;      /**< ... alibi_slopes */
  int32_t one_memory; /**< ... values in the memory of keys */
  int32_t seals;      /**< ... `kvmeld_seal` and `kvmeld_pin` */
  int32_t unused;     /**< 0; a later version's */
} kvmeld_policy_needs;
/** Of the policy that `policy` names, into `needs`, whose `size` is set. Refused: an unknown name
 * or option, with those that there are. */
KVMELD_API kvmeld_code kvmeld_needs_of(const char* policy, kvmeld_policy_needs* needs,
                                       kvmeld_error* error);

/** Who has the slots of a budget. */
enum {
  KVMELD_EACH = 0,            /**< every head so many */
  KVMELD_SHARED = 1,          /**< so many on average, divided over the model by scores */
  KVMELD_SHARED_BY_LAYER = 2, /**< the same, with equal slots for a layer's heads */
  KVMELD_SAME_TOKENS = 3      /**< the same, with the same tokens in a layer's heads */
};
/** How many slots a head may hold. */
typedef struct kvmeld_budget {
  size_t size;     /**< sizeof of the struct */
  int32_t slots;   /**< of a head after the prompt, at least 1 */
  int32_t trigger; /**< decoding returns to `slots` at so many; 0: in the policy's own batches */
  int32_t slack;   /**< slots in addition that decoding may fill before it evicts */
  int32_t most;    /**< shared: no head gets more; 0: what leaves it room in the cache */
  int32_t sharing; /**< KVMELD_EACH ... KVMELD_SAME_TOKENS */
  int32_t unused;  /**< 0; a later version's, which would otherwise lie in padding, never set */
  /** In place of `slots` (0 then): bytes that the heads of a request, but those of layers with a
   *  window, take at most between steps, with their states. */
  int64_t bytes;
} kvmeld_budget;

/**
 * A compressor over a cache. `policy`: "name" or "name:option=value,..."
 * (docs/reference/policies.md), such as "fold" or "h2o:recent=0.25". `given`: KVMELD_STEP_ATTENDS,
 * or what the caller's own attention will hand to `kvmeld_observe` (0: nothing). NULL: refused, as
 * are an unknown policy or option, a budget that the policy cannot hold or the capacity has no room
 * for, a policy without what it needs, or for other attention than a layer's (KVMELD_UNSUPPORTED).
 */
KVMELD_API kvmeld_compressor* kvmeld_compressor_new(kvmeld_cache* cache, const char* policy,
                                                    const kvmeld_budget* budget, uint32_t given,
                                                    kvmeld_error* error);
/** Frees a handle. NULL: nothing. */
KVMELD_API void kvmeld_compressor_free(kvmeld_compressor* compressor);

/** Bytes of the states of the slots in use, and what states hold at present. Either may be NULL. */
KVMELD_API kvmeld_code kvmeld_compressor_bytes(const kvmeld_compressor* compressor, size_t* bytes,
                                               size_t* reserved, kvmeld_error* error);

/* ---------------------------------------------------------------------------------- executors */

/** One item of a call's work: `i` of its count, by one of the workers. It never fails: what goes
 *  wrong comes out of the call. */
typedef void (*kvmeld_work)(void* work, int32_t i, int32_t worker);
/**
 * Where calls run their heads; NULL in place of it: on the calling thread. `run` calls
 * `f(work, i, worker)` once for each i of 0 to count - 1, in any order or at the same time, and
 * returns when all are done; no two calls at a time have one worker of 0 to workers - 1. The
 * results are the same, to the bit, for any number of workers. Refused: no workers. An executor
 * that leaves items out for others, or has other workers, makes the call fail with part of its
 * heads done.
 */
typedef struct kvmeld_executor {
  size_t size;     /**< sizeof of the struct */
  int32_t workers; /**< at least 1 */
  /** See above. */
  void (*run)(void* context, int32_t count, kvmeld_work f, void* work);
  void* context; /**< handed to `run` */
} kvmeld_executor;

/* ----------------------------------------------------------------------------------- a prompt */

/** A prompt's queries of one layer and request, or of its next chunk. */
typedef struct kvmeld_queries {
  size_t size;      /**< sizeof of the struct */
  kvmeld_numbers q; /**< [tokens, kv_heads * group, key_dim], rotated */
  int32_t tokens;   /**< at most those appended that are not measured yet */
  const float*
      log_sum_exp; /**< [log_sum_exp_count = query heads * tokens], natural log; NULL: not known */
  size_t log_sum_exp_count; /**< 0 for NULL, as of all counts */
  const float*
      hidden_norm; /**< [hidden_norm_count = tokens], for "kvzip:plus=1"; NULL: not known */
  size_t hidden_norm_count; /**< see above */
} kvmeld_queries;
/** Measures a prompt, or its next chunk, whose rows were appended before. */
KVMELD_API kvmeld_code kvmeld_prompt(kvmeld_compressor* compressor, int32_t layer, int32_t request,
                                     const kvmeld_queries* queries, const kvmeld_executor* executor,
                                     kvmeld_error* error);
/** Ends a request's prompt, once every layer has all of it: its heads are brought to their budgets.
 */
KVMELD_API kvmeld_code kvmeld_end_prompt(kvmeld_compressor* compressor, int32_t request,
                                         const kvmeld_executor* executor, kvmeld_error* error);
/** Brings heads that are at their trigger, or whose prompt has begun, to their budgets: after
 *  `kvmeld_observe`, or after a layer's prompt if the budget is not shared. `lengths
 *  [length_count = heads]`: slots that each has then; NULL and 0: not asked for. */
KVMELD_API kvmeld_code kvmeld_compress(kvmeld_compressor* compressor, int32_t layer,
                                       const int32_t* requests, size_t request_count,
                                       int32_t* lengths, size_t length_count,
                                       const kvmeld_executor* executor, kvmeld_error* error);

/* ------------------------------------------------------------------------------------- tokens */

/** Rows of tokens of a layer's requests. */
typedef struct kvmeld_step_input {
  size_t size;      /**< sizeof of the struct */
  kvmeld_numbers q; /**< [tokens, heads, group, key_dim], rotated; a step has 1 token */
  kvmeld_numbers k; /**< [tokens, heads, key_dim], rotated */
  kvmeld_numbers v; /**< [tokens, heads, value_dim]; none in one memory */
  const int32_t*
      positions; /**< [position_count = tokens * requests] to be compared; NULL: not known */
  size_t position_count; /**< 0 for NULL */
} kvmeld_step_input;
/**
 * One token of each request: append, attend, observe, return to the budget. `out [out_count]`:
 * `[heads, group, value_dim]`. Layers take each token in their order, once. Allocates nothing.
 * KVMELD_NOT_FINITE: the heads that the text names are as they were, all others made their step.
 */
KVMELD_API kvmeld_code kvmeld_step(kvmeld_compressor* compressor, int32_t layer,
                                   const int32_t* requests, size_t request_count,
                                   const kvmeld_step_input* in, float* out, size_t out_count,
                                   const kvmeld_executor* executor, kvmeld_error* error);
/** Appends `tokens` tokens of one request's prompt and attends, each to itself and all before it:
 *  `out [tokens, heads, group, value_dim]`. `kvmeld_prompt` measures them next. */
KVMELD_API kvmeld_code kvmeld_attend(kvmeld_compressor* compressor, int32_t layer, int32_t request,
                                     const kvmeld_step_input* in, int32_t tokens, float* out,
                                     size_t out_count, kvmeld_error* error);

/** One step's attention, from the caller's own kernels. */
typedef struct kvmeld_step_attention {
  size_t size; /**< sizeof of the struct */
  const float*
      probabilities; /**< [heads, group, stride] of a softmax with the newest token; or NULL */
  size_t probability_count; /**< 0 for NULL, as of all counts */
  int32_t stride; /**< the first `length` of a row are read; 0: the longest of the lengths */
  const float* log_sum_exp; /**< [log_sum_exp_count = heads * group], natural log; or NULL */
  size_t log_sum_exp_count; /**< 0 for NULL, as of all counts */
  kvmeld_numbers query;     /**< [heads, group, key_dim], rotated; or none */
} kvmeld_step_attention;
/** Takes in one token's attention, after its row was appended. `kvmeld_compress` comes next. */
KVMELD_API kvmeld_code kvmeld_observe(kvmeld_compressor* compressor, int32_t layer,
                                      const int32_t* requests, size_t request_count,
                                      const kvmeld_step_attention* in,
                                      const kvmeld_executor* executor, kvmeld_error* error);

/* ------------------------------------------------------------------------------------- drafts */

/** `tokens` drafted tokens of one request, layer by layer: each attends to those before it. Until
 *  `kvmeld_accept`, other calls on the request are refused. `out [tokens, heads, group,
 * value_dim]`. */
KVMELD_API kvmeld_code kvmeld_draft(kvmeld_compressor* compressor, int32_t layer, int32_t request,
                                    const kvmeld_step_input* in, int32_t tokens, float* out,
                                    size_t out_count, kvmeld_error* error);
/** The first `tokens` drafted count, as so many steps would, to the bit; the others never were.
 * This is how tokens are taken back: of what is not a draft none is, but all by `kvmeld_clear`. */
KVMELD_API kvmeld_code kvmeld_accept(kvmeld_compressor* compressor, int32_t request, int32_t tokens,
                                     kvmeld_error* error);
/** How many drafted tokens attend to just what they would as steps. */
KVMELD_API kvmeld_code kvmeld_draft_room(const kvmeld_compressor* compressor, int32_t request,
                                         int32_t* tokens, kvmeld_error* error);

/* ----------------------------------------------------------------------------------- requests */

/** Empties a request: the next token is at position 0. Ends a prompt or a draft. */
KVMELD_API kvmeld_code kvmeld_clear(kvmeld_compressor* compressor, int32_t request,
                                    kvmeld_error* error);
/** Makes request `to` of `compressor` what request `from` of `other` is: the same compressor, or
 * one over a cache of another storage, capacity or layout, of the same model and policy. */
KVMELD_API kvmeld_code kvmeld_copy(kvmeld_compressor* compressor, int32_t to,
                                   const kvmeld_compressor* other, int32_t from,
                                   kvmeld_error* error);
/** Seals the slots of a request's first `tokens` tokens: no call changes them until
 *  `kvmeld_clear`, so that page tables of several requests may share them. */
KVMELD_API kvmeld_code kvmeld_seal(kvmeld_compressor* compressor, int32_t request, int32_t tokens,
                                   kvmeld_error* error);
/** Pins `count` tokens from token `first` on, before they are compressed: no policy evicts or
 * merges them, and the budget counts them. */
KVMELD_API kvmeld_code kvmeld_pin(kvmeld_compressor* compressor, int32_t request, int32_t first,
                                  int32_t count, kvmeld_error* error);
/** `capacity` slots a head from here on. Refused: a cache over memory of the caller's
 *  (KVMELD_UNSUPPORTED), fewer slots than a head or its budget needs (KVMELD_NO_CAPACITY). */
KVMELD_API kvmeld_code kvmeld_shrink(kvmeld_compressor* compressor, int32_t capacity,
                                     kvmeld_error* error);

/** Writes `bytes` bytes; returns how many were written. Fewer: `kvmeld_save` fails. */
typedef size_t (*kvmeld_write)(void* context, const void* data, size_t bytes);
/** Reads up to `bytes` bytes; returns how many were read, 0 at the end. */
typedef size_t (*kvmeld_read)(void* context, void* data, size_t bytes);
/** Saves a request: rows, states, what its heads are held to. Policy and budget are the program's.
 *  Several may follow one another. */
KVMELD_API kvmeld_code kvmeld_save(kvmeld_compressor* compressor, int32_t request,
                                   kvmeld_write write, void* context, kvmeld_error* error);
/** Loads what `kvmeld_save` saved into a request of the same shape, policy and storage; decoding
 * goes on bit for bit. Refused: anything else (KVMELD_CORRUPT_FILE). It reads no byte after its
 * own. */
KVMELD_API kvmeld_code kvmeld_load(kvmeld_compressor* compressor, int32_t request, kvmeld_read read,
                                   void* context, kvmeld_error* error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVMELD_H */
