// SPDX-License-Identifier: MIT
/// What a model computes in an attention layer: all of it, said once.
#pragma once

#include <cmath>  // std::sqrt
#include <vector>

#include "kvmeld/memory/rotation.hpp"

namespace kvmeld::inline v0 {

/// One layer's attention as the model computes it:
///
///     logit_s = cap(scale · q·k_s) + slope · (position_s − position) + log-mass_s
///     p_s = exp(logit_s) / (exp(sink) + Σ exp(logit))     cap(x) = soft_cap · tanh(x / soft_cap)
///
/// of a query at `position`, over the slots that it sees (`sees`); without a cap, slopes and sinks
/// `softmax(scale · q·k + log-mass)`. A log-sum-exp, wherever one is given or taken, is that of the
/// denominator: the sink is in it. Policies ask the spec and own nothing of the model. A cache
/// checks it when it is made (`checked`).
struct attention_spec {
  index_t kv_heads = 0;                  ///< of the layer
  index_t group = 1;                     ///< query heads per KV head (GQA); 1: multi-head attention
  index_t key_dim = 0;                   ///< of a head
  index_t value_dim = 0;                 ///< 0: key_dim
  float scale = 0;                       ///< 0: 1/sqrt(key_dim)
  rotary rope = {};                      ///< none by default
  float soft_cap = 0;                    ///< 0: none
  std::vector<float> sink_logits = {};   ///< [kv_heads · group]; none: no mass but the slots'
  std::vector<float> alibi_slopes = {};  ///< [kv_heads · group], as 2^(−8i/n) above 0; none: 0
  index_t window = 0;                    ///< tokens seen, the query's own among them; 0: all
  bool check_finite = false;  ///< refuse NaN and Inf in queries, keys and values; costs a pass

  bool operator==(const attention_spec&) const = default;

  index_t query_heads() const { return kv_heads * group; }  ///< of the layer
  /// `value_dim` with its default.
  index_t dim_of_values() const { return value_dim == 0 ? key_dim : value_dim; }

  /// Does a query at position `query` see a slot at position `slot`?
  bool sees(index_t query, index_t slot) const {
    return slot >= first_seen(query) && slot <= query;
  }
  /// The earliest position that a query at position `query` sees.
  index_t first_seen(index_t query) const {
    return window == 0 || query < window ? 0 : query - window + 1;
  }

  /// The group size for `query_heads` on `kv_heads`. Refused: heads that do not divide.
  static index_t group_of(index_t query_heads, index_t kv_heads) {
    expects(kv_heads > 0 && query_heads > 0 && query_heads % kv_heads == 0,
            "group_of: expected query heads in a multiple of the KV heads, got ", query_heads,
            " on ", kv_heads);
    return query_heads / kv_heads;
  }

  /// This, with every default filled in. Refused: shapes that cannot be.
  attention_spec checked() const {
    expects(kv_heads > 0, "attention_spec: expected at least 1 KV head, got ", kv_heads);
    expects(group > 0, "attention_spec: expected a group of at least 1 query head, got ", group);
    expects(key_dim > 0 && key_dim <= longest_row, "attention_spec: expected a key_dim of 1 to ",
            longest_row, ", got ", key_dim);
    expects(value_dim >= 0 && value_dim <= longest_row,
            "attention_spec: expected a value_dim of 1 to ", longest_row, " (0: key_dim), got ",
            value_dim);
    expects(scale >= 0 && std::isfinite(scale),
            "attention_spec: expected a finite scale above 0 (0: 1/sqrt(key_dim)), got ", scale);
    expects(window >= 0, "attention_spec: expected a window of at least 1 token (0: all), got ",
            window);
    rope.check(key_dim);
    expects(soft_cap >= 0 && std::isfinite(soft_cap),
            "attention_spec: expected a finite soft_cap above 0 (0: none), got ", soft_cap);
    expect_of_heads("sink_logits", sink_logits);
    expect_of_heads("alibi_slopes", alibi_slopes);
    attention_spec s = *this;
    s.value_dim = dim_of_values();
    s.scale = scale == 0 ? 1.0F / std::sqrt(static_cast<float>(key_dim)) : scale;
    return s;
  }

 private:
  void expect_of_heads(const char* what, const std::vector<float>& numbers) const {
    expects(numbers.empty() || numbers.size() == as_size(kv_heads, group),
            "attention_spec: expected ", what, " [", query_heads(), "] or none, got ",
            numbers.size());
    for (const float x : numbers) {
      expects(std::isfinite(x), "attention_spec: expected finite ", what, ", got ", x);
    }
  }
};

namespace detail {

/// Refuses models whose values cannot be the first numbers of the keys, as of latent attention
/// (MLA): longer ones, those that end within a block, those that are rotated with the keys.
inline void expect_latent(const char* call, const std::vector<attention_spec>& specs,
                          storage type) {
  constexpr const char* where =
      " where keys and values have one memory (values are the keys' first numbers, as of latent "
      "attention; else give them memory of their own), got ";
  for (const attention_spec& s : specs) {
    const index_t values = s.value_dim, dim = s.key_dim, first = s.rope.first(dim);
    expects(values <= dim, call, ": expected a value_dim of at most ", dim, where, values);
    expects(values % numbers_of(type) == 0, call, ": expected a value_dim of whole blocks", where,
            values);
    expects(s.rope.rotated(dim) == 0 || first >= values, call,
            ": expected a rope that turns none of the first ", values, " numbers (rotary::last)",
            where, "one that turns number ", first);
  }
}

}  // namespace detail
}  // namespace kvmeld::inline v0
