// SPDX-License-Identifier: MIT
/// All that the tasks measure on: made once, shared by every policy and budget.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/tokenizer.hpp"
#include "evaluate/heads.hpp"
#include "evaluate/needle_text.hpp"
#include "evaluate/parallel.hpp"
#include "evaluate/plan.hpp"
#include "evaluate/prompt.hpp"
#include "evaluate/random.hpp"

namespace evaluate {

/// The attention of the first tokens after a prompt, in one layer of the full model.
struct future_attention {
  engine::layer_record tokens;  ///< their queries, keys and values
  row_major_matrix of_prompt;   ///< [future, heads · dim] attention over the prompt alone
  row_major_matrix of_all;      ///< ... over the prompt and the tokens behind it, up to each
  Eigen::VectorXf stream;       ///< [future] norm of the residual stream that comes out
};

/// A prompt of plain text and what comes after it.
struct text_prompt {
  prompt read;
  std::vector<int> next;                      ///< [decoded_tokens]
  std::vector<future_attention> future = {};  ///< [layers]
  /// [decoded_tokens − 1, vocab] the full cache's logits behind each token of `next` but the last;
  /// empty: not asked for
  row_major_matrix predicted = {};
};

/// A needle case, asked after compression and before it.
struct needle_case {
  prompt without, with = {};  ///< the question; both of as many tokens
  std::vector<int> question;
  std::string value;
  index_t bin = 0;
  std::vector<head_stats> stats = {};  ///< [full layers · query heads] while the answer is written
};

/// A text decoded by the full model from an empty cache, and its attention's output.
struct stream_record {
  std::vector<engine::layer_record> layers;
  std::vector<row_major_matrix> attended = {};  ///< [tokens, heads · dim]
};

struct dataset {
  std::vector<text_prompt> prompts;
  std::vector<needle_case> cases;                ///< those in memory
  std::vector<std::vector<head_stats>> looking;  ///< [cases] of all that were read
  std::vector<stream_record> streams;
  engine::record timed;        ///< the first prompt's, with its queries
  double prefill_seconds = 0;  ///< that the full model takes to read it
  second_readings again;       ///< of the first prompt, for policies that measure on them
};

/// `count` tokens of the text, from a place drawn for piece `i` of kind `what`. The first is what
/// the model's sequences begin with, if there is such a token.
inline std::vector<int> draw_text(std::span<const int> text, std::optional<int> begin,
                                  std::uint64_t seed, std::uint64_t what, index_t i,
                                  index_t count) {
  random_source random(seed, what, i);
  const auto drawn =
      text.subspan(as_size(random.below(count_of(text) - count + 1)), as_size(count));
  std::vector<int> tokens(drawn.begin(), drawn.end());
  tokens.front() = begin.value_or(tokens.front());
  return tokens;
}

/// Attention of tokens `[count, heads · dim]` over a layer of the cache; `behind`: they are
/// appended one by one, and each sees those before it.
row_major_matrix attended(kvmeld::cache& kv, index_t layer, const engine::layer_record& tokens,
                          bool behind);

/// All of `tokens`, measured by every policy, in a cache of `capacity` slots per head.
prompt read_whole(const engine::decoder& model, std::span<const named_policy> policies,
                  std::span<const int> tokens, index_t capacity);

/// A prompt of `length` tokens, and the next `future` ones' queries; `predicts`: and logits.
text_prompt read_prompt(const engine::decoder& model, std::span<const named_policy> policies,
                        std::span<const int> tokens, index_t length, index_t future,
                        index_t capacity, bool predicts, engine::record* keep);

needle_case read_needle(const engine::decoder& model, std::span<const named_policy> policies,
                        const engine::tokenizer& tokens, needle_text text, index_t capacity);

stream_record read_stream(const engine::decoder& model, std::span<const int> tokens);

}  // namespace evaluate
