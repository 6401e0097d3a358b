// SPDX-License-Identifier: MIT
// The small engine driven as the llama.cpp adapter says it drives llama.cpp: what that is held to.
#pragma once

#include <string>
#include <vector>

#include "engine/decoder.hpp"
#include "evaluate/policies.hpp"

namespace test {

using kvmeld::index_t;

/// A model of random weights: 2 layers, 4 query heads on 2 KV heads.
inline engine::config small_shape() {
  return {.hidden = 64,
          .intermediate = 96,
          .layers = 2,
          .heads = 4,
          .kv_heads = 2,
          .dim = 16,
          .vocab = 2048,
          .max_positions = 4096,
          .norm_epsilon = 1e-5F};
}

/// The policies of the tests: every one, with windows that 96 slots hold.
std::vector<std::string> every_policy_name();

/// By its name on the command line.
evaluate::any_policy policy_named(const std::string& name);

/// StreamingLLM that turns kept keys to the positions of their slots: by more, the longer the text.
evaluate::any_policy by_slots();

/// The full cache's `[tokens, vocab]`.
engine::row_major_matrix full_logits(const engine::decoder& model, std::span<const int> tokens);

/// Whose angles turn queries and keys. Our engine multiplies a position with each pair's frequency;
/// llama.cpp multiplies the last pair's angle on, and rounds to a float pair by pair: up to 2e-4
/// apart at position 2,000 (base 10,000).
enum class angles { ours, llama_cpp };

/// Chunks of tokens through a cache of all layers, compressed by the library's own object: several
/// tokens are a prompt, one is a step.
class chunked_engine {
 public:
  using policy = evaluate::any_policy;

  /// `limits`: one, or `[layers]`; `whole [layers]`: left alone.
  chunked_engine(const engine::decoder& model, const policy& p, std::vector<kvmeld::budget> limits,
                 index_t capacity, std::vector<char> whole = {}, angles turned = angles::ours,
                 const kvmeld::storage_pair& rows = kvmeld::storage::f32);

  /// `[tokens, vocab]`. Equal budgets are returned to behind it, shared ones by `end_prompt`.
  engine::row_major_matrix decode(std::span<const int> tokens);
  void end_prompt() { meld_.end_prompt(0); }

  kvmeld::head_ref head(index_t layer, index_t h) { return kv_.head(layer * kv_.kv_heads() + h); }

 private:
  static std::vector<policy> each_head(const engine::config& c, const policy& p,
                                       std::vector<char> whole);
  static std::vector<kvmeld::budget> each_head(const engine::config& c,
                                               const std::vector<kvmeld::budget>& limits);
  void attend(index_t layer, const engine::row_major_matrix& q, const engine::row_major_matrix& k,
              const engine::row_major_matrix& v, engine::row_major_matrix& out);

  const engine::decoder& model_;
  policy policy_;
  bool shared_;
  angles turned_;
  kvmeld::cache kv_;
  kvmeld::compressor<policy> meld_;
  index_t position_ = 0;
};

}  // namespace test
