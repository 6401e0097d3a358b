// SPDX-License-Identifier: MIT
/// A prompt that the full model has read, and what policies measured of it.
#pragma once

#include <memory>  // std::shared_ptr
#include <span>
#include <vector>

#include "engine/prefill.hpp"
#include "engine/tokenizer.hpp"
#include "evaluate/policies.hpp"
#include "evaluate/reference_queries.hpp"

namespace evaluate {

using engine::row_major_matrix;

/// So many of a prompt's own queries are kept; no window is longer.
inline constexpr index_t own_queries = 256;

/// Appends rows `first` and on of one layer's record to layer `layer` of `kv`, before row `last`.
void append(kvmeld::cache& kv, index_t layer, const engine::layer_record& r, index_t first,
            index_t last);

/// Keys and values of a prompt's beginning, which several prompts may share.
struct prompt_body {
  kvmeld::cache kv;  ///< all layers
  index_t tokens = 0;

  /// The first `length` tokens of `r`, with room for `capacity`.
  prompt_body(const engine::config& shape, const engine::record& r, index_t length,
              index_t capacity);
};

/// What a policy measured of a prompt, which does not depend on the budget.
struct measured_prompt {
  std::vector<kvmeld::head_state> heads;  ///< [full layers · KV heads]
  /// [full layers] the queries that it measured on; null: the prompt's own, or all of a second
  /// reading.
  std::vector<std::shared_ptr<const reference_queries>> chosen;
};

/// A prompt as all budgets share it.
struct prompt {
  std::shared_ptr<const prompt_body> body;
  std::vector<engine::layer_record> tail = {};  ///< keys and values behind the body
  std::vector<measured_prompt> measured = {};   ///< [policies]
  /// [full layers] the last of the prompt's own queries, [own_queries, heads · dim], for policies
  /// that plan on the queries of their window
  std::vector<row_major_matrix> own = {};
  row_major_matrix logits;  ///< [1, vocab] after the last token
  index_t tokens = 0;

  /// All of its keys and values.
  kvmeld::cache cache() const;
};

/// The prompt's own queries of one layer, `[tokens, heads · dim]`.
inline kvmeld::query_view<float> queries_of(const engine::config& shape,
                                            const row_major_matrix& q) {
  return kvmeld::prompt_queries(q.data(), static_cast<index_t>(q.rows()), shape.kv_heads,
                                shape.group(), shape.dim);
}

/// A second reading of a prompt, part by part; empty: there was none.
struct replayed_prompt {
  std::vector<engine::layer_record> layers;  ///< of all parts, the words before each included
  std::vector<index_t> positions;            ///< [rows]; every part begins after the prompt
  std::vector<index_t> parts;                ///< rows of each
  double seconds = 0;                        ///< that it took

  /// All queries of a layer.
  kvmeld::query_view<float> queries(const engine::config& shape, std::size_t layer) const;
};

/// The second readings of a prompt that policies measure on.
struct second_readings {
  replayed_prompt repeated;                ///< as KVzip has it, all of which is observed
  replayed_prompt behind;                  ///< right after the prompt, for some of its queries
  const engine::weights* model = nullptr;  ///< that has read

  const replayed_prompt& of(const named_policy& p) const {
    return p.observes_replay() ? repeated : behind;
  }
};

/// `r` as `p` measures it, for heads of `capacity` slots.
measured_prompt measure(const named_policy& p, const engine::config& shape, const engine::record& r,
                        const second_readings& again, index_t capacity);

/// All of `r`, which begins with `body`, measured by every policy.
prompt measure(const engine::config& shape, const engine::record& r,
               std::span<const named_policy> policies, std::shared_ptr<const prompt_body> body,
               const second_readings& again = {});

/// KVzip's words; `turn`: what the model's chat template has around them, or nothing.
replay_words replay_words_of(const engine::tokenizer& tokens, const engine::chat_turn& turn);

/// Tokens of the prompt that are read again at a time, as in KVzip's code; and for reference
/// queries, so that they stay near what is to come and within the model's context.
inline constexpr index_t repeated_chunk = 2048, behind_chunk = 256;

/// Reads `tokens`, of which `r` is the record, once more, `chunk` at a time: every part begins
/// right after the prompt, with `words` if there are any.
replayed_prompt replay(const engine::decoder& model, const engine::record& r,
                       std::span<const int> tokens, const replay_words& words, index_t chunk);

/// The second readings that some of the policies measure on.
second_readings replay_for(std::span<const named_policy> policies, const engine::decoder& model,
                           const engine::record& r, std::span<const int> tokens);

}  // namespace evaluate
