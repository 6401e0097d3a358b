// SPDX-License-Identifier: MIT
/// A prompt that the full model has read, and going on from it through a compressed cache.
#pragma once

#include <memory>  // std::shared_ptr
#include <span>
#include <utility>
#include <vector>

#include "engine/decoder.hpp"
#include "engine/prefill.hpp"
#include "evaluate/budget_allocation.hpp"
#include "evaluate/stored_cache.hpp"

namespace evaluate {

using engine::row_major_matrix;

/// So many of a prompt's own queries are kept; no window is longer.
inline constexpr index_t own_queries = 256;

/// Keys and values of a prompt's beginning, which several prompts may share.
struct prompt_body {
  std::vector<kvmeld::cache> layers;
  index_t tokens = 0;

  /// The first `length` tokens of `r`, with room for `capacity`.
  prompt_body(const engine::config& shape, const engine::record& r, index_t length,
              index_t capacity);
};

/// A prompt as all budgets share it: keys and values, and what each policy measured, which does
/// not depend on the budget.
struct prompt {
  std::shared_ptr<const prompt_body> body;
  std::vector<engine::layer_record> tail;  ///< keys and values behind the body
  /// [policies][layers][KV heads]
  std::vector<std::vector<std::vector<kvmeld::head_state>>> measured;
  /// [policies][layers] for those that plan on them; none otherwise
  std::vector<std::vector<std::shared_ptr<const kvmeld::reference_queries>>> references;
  /// [layers] the last of the prompt's own queries, [own_queries, heads · dim], for policies that
  /// plan on the queries of their window
  std::vector<row_major_matrix> own;
  row_major_matrix logits;  ///< [1, vocab] after the last token
  index_t tokens = 0;

  kvmeld::cache layer(std::size_t l) const;
};

/// The prompt's own queries of one layer.
inline kvmeld::query_view<float> queries_of(const engine::config& shape,
                                            const engine::layer_record& r) {
  return kvmeld::prompt_queries(r.q.data(), static_cast<index_t>(r.q.rows()), shape.kv_heads,
                                shape.group(), shape.dim);
}

/// A second reading of a prompt, part by part; empty: there was none.
struct replayed_prompt {
  std::vector<engine::layer_record> layers;  ///< of all parts, the words before each included
  std::vector<index_t> positions;            ///< [rows]; every part begins behind the prompt
  std::vector<index_t> parts;                ///< rows of each
  double seconds = 0;                        ///< that it took

  /// All queries of a layer.
  kvmeld::query_view<float> queries(const engine::config& shape, std::size_t layer) const;
};

/// The second readings of a prompt that policies measure on.
struct second_readings {
  replayed_prompt repeated;  ///< as KVzip has it, all of which is observed
  replayed_prompt behind;    ///< right behind the prompt, for some of its queries

  const replayed_prompt& of(const named_policy& p) const {
    return p.observes_replay() ? repeated : behind;
  }
};

/// What a policy measured of a layer.
struct measured_layer {
  std::vector<kvmeld::head_state> heads;
  /// The queries that it measured on; null: the prompt's own, or all of a second reading.
  std::shared_ptr<const kvmeld::reference_queries> chosen;
};

/// Layer `l` of a prompt as `p` measures it: `kv` is its cache, `r` its record.
measured_layer measure_layer(const named_policy& p, const engine::config& shape, kvmeld::cache& kv,
                             const engine::record& r, const second_readings& again, std::size_t l);

/// All of `r`, which begins with `body`, measured by every policy.
prompt measure(const engine::config& shape, const engine::record& r,
               std::span<const named_policy> policies, std::shared_ptr<const prompt_body> body,
               const second_readings& again = {});

/// Goes on where `r` ends, through the full cache; `r.logits` are the last token's, or those of
/// all `tokens`. `streams`: takes what each layer's attention is added to, `[tokens, hidden]`.
void extend(const engine::decoder& model, engine::record& r, std::span<const int> tokens,
            engine::logits_of kept = engine::logits_of::last,
            std::vector<row_major_matrix>* streams = nullptr);

/// One layer's cache, compressed in floats, and how it goes on in the contender's storage.
struct compressed_layer {
  kvmeld::cache kv;
  kvmeld::state state;
  std::vector<budget> limits;        ///< [KV heads] in decode
  std::vector<any_policy> decoding;  ///< [KV heads]

  compressed_layer(const contender& c, const prompt& p, std::size_t layer);
  /// An empty one, for at most `capacity` tokens.
  compressed_layer(const contender& c, const engine::config& shape, std::size_t layer,
                   index_t capacity);

  std::size_t bytes() { return kv.bytes() + state.bytes(); }

 private:
  compressed_layer(const contender& c, const engine::config& shape, std::size_t layer,
                   index_t capacity, const std::vector<budget>& budgets);
};

/// The model over a compressed cache: one token in, the next one's logits out.
class compressed_decoder {
 public:
  compressed_decoder(const engine::decoder& model, const contender& c, const prompt& p);
  /// From an empty cache, for at most `capacity` tokens.
  compressed_decoder(const engine::decoder& model, const contender& c, index_t capacity);

  /// `[1, vocab]`, overwritten by the next call.
  const row_major_matrix& next(int token);

  /// Several at once, all of one model: the weights are read once for all. `logits [decoders,
  /// vocab]`.
  static void next(std::span<compressed_decoder* const> decoders, std::span<const int> tokens,
                   engine::decoder::scratch& work, row_major_matrix& logits);

 private:
  const engine::decoder& model_;
  index_t position_;
  std::vector<compressed_layer> layers_;
  engine::decoder::scratch scratch_;
  row_major_matrix logits_;
};

}  // namespace evaluate
