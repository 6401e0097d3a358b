// SPDX-License-Identifier: MIT
/// A prompt's queries as an engine has them, with their extents.
#pragma once

#include <cstddef>  // std::size_t
#include <span>

#include "kvmeld/memory/attention_spec.hpp"
#include "kvmeld/memory/convert.hpp"
#include "kvmeld/score/queries.hpp"

namespace kvmeld::inline v0 {

/// The queries of one request in one layer, `[tokens, kv_heads · group, key_dim]`, rotated as
/// attention used them, in float, half or bfloat16. A view: the rows must live as long as the call.
///
///     meld.prompt(kv.heads(layer, request), kvmeld::queries(q, tokens, spec));
class queries {
 public:
  /// Refused: another number of numbers than the extents say, null, less than no tokens.
  queries(const any_span& rows, index_t tokens, const attention_spec& spec)
      : rows_(rows),
        tokens_(tokens),
        heads_(spec.kv_heads),
        group_(spec.group),
        dim_(spec.key_dim) {
    expects(tokens >= 0, "queries: expected at least 0 tokens, got ", tokens);
    const auto wanted = static_cast<std::size_t>(tokens) * row_size();
    expects(rows.size() == wanted, "queries: expected [", tokens, ", ", heads_ * group_, ", ", dim_,
            "] (", wanted, " numbers), got ", rows.size());
    expects(wanted == 0 || rows.data() != nullptr, "queries: expected rows, got null");
  }

  /// The same with each row's log-sum-exp of its logits, natural logarithm, `[query heads, tokens]`
  /// from the engine's prefill: half of a score's work is saved. Refused: another number of floats.
  queries with_log_sum_exp(std::span<const float> log_sum_exp) const {
    const auto wanted =
        static_cast<std::size_t>(heads_ * group_) * static_cast<std::size_t>(tokens_);
    expects(log_sum_exp.size() == wanted, "queries: expected log_sum_exp [", heads_ * group_, ", ",
            tokens_, "] (", wanted, " floats), got ", log_sum_exp.size());
    queries q = *this;
    q.log_sum_exp_ = log_sum_exp;
    return q;
  }

  /// Tokens that there are queries of, and the shape of one token's: `[kv_heads, group, dim]`.
  /// @{
  index_t tokens() const { return tokens_; }
  index_t kv_heads() const { return heads_; }
  index_t group() const { return group_; }
  index_t dim() const { return dim_; }
  /// @}
  /// All numbers, `[tokens, kv_heads, group, dim]`.
  const any_span& rows() const { return rows_; }

  /// Calls `f` with the `query_view` of KV head `h` of the layer.
  template <class F>
  decltype(auto) of_head(index_t h, F&& f) const {
    return rows_.visit([&]<class Scalar>(std::span<const Scalar> all) {
      query_view<Scalar> view{.data = all.data() + std::ptrdiff_t{h} * group_ * dim_,
                              .count = tokens_,
                              .head = std::ptrdiff_t{group_} * dim_,
                              .group = dim_,
                              .row = static_cast<std::ptrdiff_t>(row_size())};
      if (!log_sum_exp_.empty()) {
        view.log_sum_exp = log_sum_exp_.data() + std::ptrdiff_t{h} * group_ * tokens_;
      }
      return f(view);
    });
  }

 private:
  std::size_t row_size() const {
    return static_cast<std::size_t>(heads_ * group_) * static_cast<std::size_t>(dim_);
  }

  any_span rows_;
  index_t tokens_, heads_, group_, dim_;
  std::span<const float> log_sum_exp_;
};

}  // namespace kvmeld::inline v0
