// SPDX-License-Identifier: MIT
// A program as any other: it links to a shared libllama, and knows nothing of kvmeld. Under
// kvmeld-run its contexts are compressed, but for those whose callback it sets itself, which are
// refused: llama.cpp's own cache is the oracle.
//
//     program MODEL.gguf full   a budget of all tokens, rows in half: what llama.cpp answers
//     program MODEL.gguf tenth  a tenth, rows in half: bounded, the same however tokens come
//     program MODEL.gguf bits   a tenth, rows in few bits: by the parts that a prompt comes in,
//                               other tokens of it attend to rounded rows
#include <llama-cpp.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

int failures = 0;
void check(bool ok, const std::string& what) {
  if (!ok) {
    std::printf("expected: %s\n", what.c_str());
    ++failures;
  }
}

using tokens = std::vector<llama_token>;
using row = std::vector<float>;

// Bytes that repeat with a difference, so that there is something to attend to.
tokens text(int count, int seed) {
  tokens t;
  for (int i = 0; i < count; ++i) {
    t.push_back(97 + (i * (seed + 3) + i * i / 7 + (i / 40) * seed) % 26);
  }
  return t;
}

bool decline(ggml_tensor*, bool, void*) { return false; }

llama_context_ptr make(llama_model* model, bool compressed, bool unified = true) {
  auto p = llama_context_default_params();
  p.n_ctx = 4096, p.n_batch = 512, p.n_ubatch = 256, p.n_seq_max = 4, p.kv_unified = unified;
  p.n_threads = p.n_threads_batch = 1;
  if (!compressed) {
    p.cb_eval = decline;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  }
  return llama_context_ptr(llama_init_from_model(model, p));
}

struct entry {
  llama_seq_id sequence;
  llama_token token;
  llama_pos at;
  bool output;
};

int decode(llama_context* c, const std::vector<entry>& all, bool extended) {
  if (extended) {
    llama_batch_ext_ptr batch(llama_batch_ext_init(c));
    for (const entry& e : all) {
      const int i = llama_batch_ext_add_token(batch.get(), e.sequence, e.token);
      llama_batch_ext_set_pos(batch.get(), i, &e.at);
      llama_batch_ext_set_output_logits(batch.get(), i, e.output);
    }
    return llama_process(c, LLAMA_PROCESS_TYPE_DECODE, batch.get());
  }
  llama_batch batch = llama_batch_init(static_cast<int>(all.size()), 0, 1);
  for (const entry& e : all) {
    const int i = batch.n_tokens++;
    batch.token[i] = e.token, batch.pos[i] = e.at, batch.logits[i] = e.output ? 1 : 0;
    batch.n_seq_id[i] = 1, batch.seq_id[i][0] = e.sequence;
  }
  const int code = llama_decode(c, batch);
  llama_batch_free(batch);
  return code;
}

row logits(llama_context* c, int i) {
  const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(c)));
  const float* const at = llama_get_logits_ith(c, i);
  return {at, at + vocab};
}
double distance(const row& a, const row& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    most = std::max(most, std::abs(static_cast<double>(a[i]) - b[i]));
  }
  return most;
}

// Reads a prompt in batches of 500, then goes on token by token; all rows after the prompt.
std::vector<row> run(llama_context* c, llama_seq_id s, const tokens& prompt, const tokens& next,
                     bool extended = false) {
  std::vector<row> rows;
  for (std::size_t at = 0; at < prompt.size();) {
    std::vector<entry> batch;
    for (; at < prompt.size() && batch.size() < 500; ++at) {
      batch.push_back({s, prompt[at], static_cast<llama_pos>(at), at + 1 == prompt.size()});
    }
    check(decode(c, batch, extended) == 0, "a prompt's batch is decoded");
    if (at == prompt.size()) {
      rows.push_back(logits(c, static_cast<int>(batch.size()) - 1));
    }
  }
  for (std::size_t i = 0; i < next.size(); ++i) {
    const auto at = static_cast<llama_pos>(prompt.size() + i);
    check(decode(c, {{s, next[i], at, true}}, extended) == 0, "a token is decoded");
    rows.push_back(logits(c, 0));
  }
  return rows;
}
double distance(const std::vector<row>& a, const std::vector<row>& b) {
  double most = a.size() == b.size() ? 0 : 1e9;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    most = std::max(most, distance(a[i], b[i]));
  }
  return most;
}
bool same(const std::vector<row>& a, const std::vector<row>& b) { return distance(a, b) == 0; }

}  // namespace

int main(int count, char** arguments) {
  setvbuf(stdout, nullptr, _IONBF, 0);
  if (count != 3) {
    return 2;
  }
  const bool full = std::strcmp(arguments[2], "full") == 0,
             bits = std::strcmp(arguments[2], "bits") == 0;
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  auto mp = llama_model_default_params();
  mp.n_gpu_layers = 0;
  const llama_model_ptr model(llama_model_load_from_file(arguments[1], mp));
  check(model != nullptr, "a model");
  const auto ours = make(model.get(), true);
  llama_context* const c = ours.get();
  llama_memory_t const m = llama_get_memory(c);
  check(llama_n_ctx(c) == 4096 && llama_n_ctx_seq(c) == 4096, "the context that was asked for");
  check(!llama_memory_can_shift(m), "no shift");
  const auto apart = make(model.get(), true, false);
  check(llama_n_ctx(apart.get()) == 4096 && llama_n_ctx_seq(apart.get()) == 1024,
        "a quarter of the context for each of four sequences");

  // One sequence: prompt and steps, by both kinds of batches.
  const tokens prompt = text(700, 1), next = text(40, 5);
  const auto alone = run(c, 0, prompt, next);
  check(llama_memory_seq_pos_max(m, 0) == 739 && llama_memory_seq_pos_min(m, 0) == 739,
        "no position but the newest to go back to");
  check(!llama_memory_seq_rm(m, 0, 100, -1) && !llama_memory_seq_rm(m, 0, 0, 500),
        "a part is not removed");
  check(llama_memory_seq_rm(m, 0, 740, -1) && llama_memory_seq_rm(m, 1, 5, -1),
        "nothing is removed");
  check(llama_memory_seq_rm(m, 0, -1, -1) && llama_memory_seq_pos_max(m, 0) == -1,
        "a sequence is removed");
  check(same(run(c, 3, prompt, next, true), alone),
        "the same in another sequence by llama_process");
  llama_memory_clear(m, true);
  const auto plain = make(model.get(), false);
  // Read as a prompt: a step of llama.cpp's flash attention adds up in 16 bits, which moves logits
  // by .2.
  std::vector<row> reference;
  tokens whole = prompt;
  whole.insert(whole.end(), next.begin(), next.end());
  for (std::size_t at = 0; at < whole.size();) {
    std::vector<entry> part;
    std::vector<int> wanted;
    for (; at < whole.size() && part.size() < 500; ++at) {
      const bool output = at + 1 >= prompt.size();
      if (output) {
        wanted.push_back(static_cast<int>(part.size()));
      }
      part.push_back({0, whole[at], static_cast<llama_pos>(at), output});
    }
    check(decode(plain.get(), part, false) == 0, "llama.cpp's own cache decodes");
    for (const int i : wanted) {
      reference.push_back(logits(plain.get(), i));
    }
  }
  const double error = distance(alone, reference);
  std::printf("largest difference of a logit to llama.cpp's own: %.4f\n", error);
  check(full ? error < 0.02 : error > 0.05, full ? "llama.cpp's logits" : "compression");

  // Four at once, of other lengths: prompts in one batch, then a token of each.
  std::vector<std::vector<row>> each(4), together(4);
  std::vector<tokens> prompts, nexts;
  for (int s = 0; s < 4; ++s) {
    prompts.push_back(text(60 + 35 * s, 2 + s)), nexts.push_back(text(30, 9 + s));
    each[static_cast<std::size_t>(s)] = run(c, s, prompts.back(), nexts.back());
  }
  llama_memory_clear(m, true);
  std::vector<entry> batch;
  std::vector<int> last;
  for (int s = 0; s < 4; ++s) {
    const tokens& t = prompts[static_cast<std::size_t>(s)];
    for (std::size_t i = 0; i < t.size(); ++i) {
      batch.push_back({s, t[i], static_cast<llama_pos>(i), i + 1 == t.size()});
    }
    last.push_back(static_cast<int>(batch.size()) - 1);
  }
  check(decode(c, batch, true) == 0, "four prompts are decoded");
  for (std::size_t s = 0; s < 4; ++s) {
    together[s].push_back(logits(c, last[s]));
  }
  for (std::size_t i = 0; i < 30; ++i) {
    batch.clear();
    for (std::size_t s = 0; s < 4; ++s) {
      batch.push_back({static_cast<llama_seq_id>(s), nexts[s][i],
                       static_cast<llama_pos>(prompts[s].size() + i), true});
    }
    check(decode(c, batch, true) == 0, "a token of each is decoded");
    for (std::size_t s = 0; s < 4; ++s) {
      together[s].push_back(logits(c, static_cast<int>(s)));
    }
  }
  for (std::size_t s = 0; s < 4; ++s) {
    const double d = distance(each[s], together[s]);
    std::printf("sequence %zu, alone and with three others: %.6f\n", s, d);
    check(d < (bits ? 0.5 : 0.02), "a sequence's logits do not depend on the others'");
  }

  // Copies and states: what follows is the same to the bit.
  llama_memory_clear(m, true);
  run(c, 0, prompt, {});
  llama_memory_seq_cp(m, 0, 1, -1, -1);
  const std::size_t size = llama_state_seq_get_size(c, 0);
  std::printf("bytes of a sequence of 700 tokens: %zu\n", size);
  std::vector<std::uint8_t> state(size);
  check(llama_state_seq_get_data(c, state.data(), size, 0) == size, "a state of that size");
  const std::string file = std::string(arguments[0]) + "." + arguments[2] + ".state";
  check(llama_state_seq_save_file(c, file.c_str(), 0, prompt.data(), prompt.size()) > size,
        "a file of a sequence");
  const auto after = [&](llama_context* of, llama_seq_id s) {
    std::vector<row> rows;
    for (std::size_t i = 0; i < next.size(); ++i) {
      check(decode(of, {{s, next[i], static_cast<llama_pos>(prompt.size() + i), true}}, true) == 0,
            "a token is decoded");
      rows.push_back(logits(of, 0));
    }
    return rows;
  };
  const auto first = after(c, 0);
  check(same(after(c, 1), first), "a copy goes on as the first");
  check(llama_state_seq_set_data(c, state.data(), size, 2) == size, "a state is taken");
  check(same(after(c, 2), first), "a state goes on as the first");
  std::vector<std::uint8_t> longer = state;
  longer.resize(size + 10);
  check(llama_state_seq_set_data(c, longer.data(), longer.size(), 3) == size,
        "a state with more bytes behind it is taken, and says its own size");
  state[size / 2] ^= 1;
  check(llama_state_seq_set_data(c, state.data(), size, 2) == 0, "changed bytes are refused");
  tokens read(prompt.size());
  std::size_t number = 0;
  const auto fresh = make(model.get(), true);
  check(llama_state_seq_load_file(fresh.get(), file.c_str(), 1, read.data(), read.size(), &number) >
                size &&
            number == prompt.size() && read == prompt,
        "a file is loaded into another context");
  check(same(after(fresh.get(), 1), first), "a file goes on as the first");
  std::remove(file.c_str());

  llama_memory_seq_keep(m, 1);
  check(llama_memory_seq_pos_max(m, 0) == -1 && llama_memory_seq_pos_max(m, 1) == 739,
        "one sequence is kept");
  std::vector<std::uint8_t> all(llama_state_get_size(c));
  check(llama_state_get_data(c, all.data(), all.size()) == all.size(), "a state of all");
  llama_memory_clear(m, true);
  check(llama_state_set_data(c, all.data(), all.size()) == all.size() &&
            llama_memory_seq_pos_max(m, 1) == 739,
        "a state of all is taken");
  check(llama_state_save_file(c, file.c_str(), nullptr, 0), "a file of the context");
  check(llama_state_load_file(fresh.get(), file.c_str(), nullptr, 0, &number) && number == 0 &&
            llama_memory_seq_pos_max(llama_get_memory(fresh.get()), 1) == 739,
        "a file of the context without tokens is loaded");
  std::remove(file.c_str());

  // What cannot be is refused, and changes nothing.
  check(decode(c, {{1, 97, 500, true}}, false) != 0, "a position that was is refused");
  check(decode(c, {{1, 97, 740, true}}, false) == 0, "the text goes on");

  // An error within a graph empties the context, which goes on.
  llama_memory_clear(m, true);
  llama_set_causal_attn(c, false);
  check(decode(c, {{0, 97, 0, true}, {0, 98, 1, true}}, false) != 0,
        "a batch without a causal mask is refused");
  llama_set_causal_attn(c, true);
  check(llama_memory_seq_rm(m, 0, 0, -1) && llama_memory_seq_pos_max(m, 0) == -1,
        "nothing is left of it");
  check(same(run(c, 0, prompt, next), alone), "a text is read as ever");
  std::printf("%s\n", failures == 0 ? "all as expected" : "failed");
  return failures == 0 ? 0 : 1;
}
