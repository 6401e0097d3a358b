// SPDX-License-Identifier: MIT
// Batches of several sequences, announced to the adapter, beside the same batches without it.
#pragma once

#include "llama_cpp/families.hpp"

namespace test {

using kvmeld::llama::mode;

/// A token of a sequence.
struct token_at {
  llama_seq_id sequence;
  index_t position;
  int token;
};

/// Tokens `first` to `first + count − 1` of a text, of one sequence.
inline std::vector<token_at> tokens_of(std::span<const int> text, index_t first, index_t count,
                                       llama_seq_id sequence = 0) {
  std::vector<token_at> all;
  for (index_t i = first; i < first + count; ++i) {
    all.push_back({sequence, i, text[static_cast<std::size_t>(i)]});
  }
  return all;
}

/// Contexts of `count` sequences in `cells` unified cells.
inline llama_context_params parameters_for(llama_seq_id count, index_t cells = 1024,
                                           index_t chunk = 64) {
  auto p = exact_parameters(cells, chunk);
  p.n_seq_max = static_cast<std::uint32_t>(count);
  p.kv_unified = true;
  return p;
}

/// Decodes a batch; `before` sees it first. `[tokens, vocab]`, or nothing where it failed.
inline engine::row_major_matrix decode(llama_context* context, std::span<const token_at> tokens,
                                       int* code,
                                       const std::function<void(const llama_batch&)>& before = {}) {
  llama_batch batch = llama_batch_init(static_cast<int>(tokens.size()), 0, 1);
  batch.n_tokens = static_cast<int>(tokens.size());
  for (int i = 0; i < batch.n_tokens; ++i) {
    const token_at& t = tokens[static_cast<std::size_t>(i)];
    batch.token[i] = t.token, batch.pos[i] = t.position;
    batch.n_seq_id[i] = 1, batch.seq_id[i][0] = t.sequence;
    batch.logits[i] = 1;
  }
  if (before) {
    before(batch);
  }
  *code = llama_decode(context, batch);
  llama_batch_free(batch);
  engine::row_major_matrix logits;
  if (*code == 0) {
    const auto vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
    logits.resize(static_cast<Eigen::Index>(tokens.size()), vocab);
    for (Eigen::Index i = 0; i < logits.rows(); ++i) {
      std::copy_n(llama_get_logits_ith(context, static_cast<int>(i)), vocab, logits.row(i).data());
    }
  }
  return logits;
}

/// llama.cpp behind the adapter, whose batches are announced.
struct announced_llama : compressed_llama {
  using compressed_llama::compressed_llama;

  engine::row_major_matrix decode(std::span<const token_at> tokens, bool draft = false) {
    int code = 0;
    auto logits = test::decode(context.get(), tokens, &code,
                               [&](const llama_batch& b) { kv.announce(b, draft); });
    kv.check();
    REQUIRE(code == 0);
    return logits;
  }
  llama_memory_t memory() const { return llama_get_memory(context.get()); }

  /// What a head holds, slot by slot.
  std::vector<index_t> positions(index_t layer, index_t h, index_t sequence = 0) {
    const auto head = kv.held().head(layer, h, sequence);
    std::vector<index_t> all;
    for (index_t s = 0; s < head.length(); ++s) {
      all.push_back(head.position(s));
    }
    return all;
  }
};

/// The policies that make decode steps.
inline std::vector<std::string> every_decoding_policy() {
  std::vector<std::string> all;
  for (const std::string& name : every_policy_name()) {
    if (kvmeld::declared(policy_named(name)).supports_decode()) {
      all.push_back(name);
    }
  }
  return all;
}

}  // namespace test
