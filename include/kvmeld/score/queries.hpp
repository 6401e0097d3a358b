// SPDX-License-Identifier: MIT
/// Queries that a policy measures slots on: views of an engine's own.
#pragma once

#include <algorithm>  // std::min
#include <cmath>      // std::isfinite
#include <cstddef>    // std::ptrdiff_t
#include <limits>     // std::numeric_limits
#include <span>
#include <string_view>
#include <vector>

#include "kvmeld/memory/convert.hpp"
#include "kvmeld/score/observation.hpp"

namespace kvmeld::inline v0 {

/// Queries of all heads, rotated, over an engine's own memory: query `i` of group member `g` of KV
/// head `h` starts at `data[h * head + g * group + i * row]` and is contiguous `[dim]`.
template <plain_scalar Scalar>
struct query_view {
  const Scalar* data = nullptr;  ///< null: there are none
  index_t count = 0;             ///< queries per query head
  std::ptrdiff_t head = 0;       ///< stride in elements, KV head to KV head
  std::ptrdiff_t group = 0;      ///< query head to query head of one KV head
  std::ptrdiff_t row = 0;        ///< query to query
  /// `[count]`, for causality. Null: a prompt's own, at the last `count` positions; given:
  /// reference queries that the caller chose, which policies take whole.
  const index_t* position = nullptr;
  /// Of a prompt in chunks: queries of the same prompt that lie right before these, which windows
  /// reach back to. Not counted again.
  index_t before = 0;
  /// `[group, count]` of one head's logits, natural logarithm, from the prefill's own attention, a
  /// sink's among them; null: not known. Not of those before.
  const float* log_sum_exp = nullptr;
  /// `[count]` the Euclidean norm of what the layer's attention was given for each query's token;
  /// null: not known. Not of those before.
  const float* hidden_norm = nullptr;
  index_t log_sum_row = 0;  ///< query head to query head in `log_sum_exp`; 0: `count`

  const Scalar* at(index_t g, index_t i) const { return data + g * group + i * row; }  ///< `[dim]`
  /// Of query `i` of member `g`, natural. Only where `log_sum_exp` is given.
  float log_sum(index_t g, index_t i) const {
    return log_sum_exp[std::ptrdiff_t{g} * (log_sum_row > 0 ? log_sum_row : count) + i];
  }
  /// The queries of KV head `h` alone.
  query_view of(index_t h) const {
    const Scalar* const own = data == nullptr ? nullptr : data + h * head;  // null: there are none
    return {own, count, 0, group, row, position, before, nullptr, hidden_norm};
  }
  /// The last `n`, of a prompt's own with those before them: where a view is to end at its first
  /// query, its `before` is set to 0.
  query_view last(index_t n) const {
    const index_t earlier = position != nullptr ? 0 : before, all = count + earlier,
                  skip = all > n ? all - n : 0, first = skip - earlier;
    query_view latest{
        data == nullptr ? nullptr : data + first * row,   all - skip, head, group, row,
        position != nullptr ? position + first : nullptr, skip};
    if (log_sum_exp != nullptr && first >= 0) {
      latest.log_sum_exp = log_sum_exp + first;
      latest.log_sum_row = log_sum_row > 0 ? log_sum_row : count;
    }
    return latest;
  }
  /// What a policy with a window measures on: the last `window` of a prompt's own, or all that was
  /// chosen.
  query_view reference(index_t window) const { return position != nullptr ? *this : last(window); }
  /// Position of query `i`, for a head that has seen `next_position` tokens.
  index_t position_of(index_t i, index_t next_position) const {
    return position != nullptr ? position[i] : next_position - count + i;
  }
};

/// For policies that need none.
inline constexpr query_view<float> no_queries{};

/// A decode step's query as the last of a prompt's. `what` begins the message where it is missing.
inline query_view<float> query_of_step(std::string_view what, const observation& seen,
                                       index_t dim) {
  expects(seen.query != nullptr, what, ": expected the step's query");
  return {.data = seen.query, .count = 1, .group = dim};
}

/// Calls `use` with the queries of one KV head, those before them too, in float: in place, or from
/// 16 bits as a copy. So what measures them is compiled once.
template <class T, class Use>
void in_floats(const query_view<T>& q, index_t group, index_t dim, const Use& use) {
  if constexpr (std::same_as<T, float>) {
    use(q);
  } else {
    const std::ptrdiff_t size = std::ptrdiff_t{group} * dim;
    std::vector<float> all(as_size(q.before + q.count, size));
    float* const first = all.data() + q.before * size;
    for (index_t i = -q.before; i < q.count; ++i) {
      for (index_t g = 0; g < group; ++g) {
        to_floats(row<const T>{q.at(g, i)}, dim, first + i * size + std::ptrdiff_t{g} * dim);
      }
    }
    use(query_view<float>{first, q.count, 0, dim, size, q.position, q.before, q.log_sum_exp,
                          q.hidden_norm, q.log_sum_row});
  }
}

/// A prompt's own queries, rotated (after RoPE): `[queries, heads · group, dim]`.
template <plain_scalar Scalar>
query_view<Scalar> prompt_queries(const Scalar* data, index_t count, index_t heads, index_t group,
                                  index_t dim) {
  return {data, count, std::ptrdiff_t{group} * dim, dim, std::ptrdiff_t{heads} * group * dim};
}

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
    const auto wanted = as_size(tokens) * row_size();
    expects(rows.size() == wanted, "queries: expected [", tokens, ", ", heads_ * group_, ", ", dim_,
            "] (", wanted, " numbers), got ", rows.size());
    expects(wanted == 0 || rows.data() != nullptr, "queries: expected rows, got null");
  }

  /// The same with each row's log-sum-exp of its logits, natural logarithm, `[query heads, tokens]`
  /// from the engine's prefill over the slots that the heads hold, a sink's among them: scores by
  /// column sums save half of their work. What is sealed or was compressed before is scored without
  /// it. Refused: another number of floats, NaN, +Inf; by `prompt`, numbers that the last row's
  /// keys do not give.
  queries with_log_sum_exp(std::span<const float> log_sum_exp) const {
    const auto wanted = as_size(heads_ * group_, tokens_);
    expects(log_sum_exp.size() == wanted, "queries: expected log_sum_exp [", heads_ * group_, ", ",
            tokens_, "] (", wanted, " floats), got ", log_sum_exp.size());
    expects(wanted == 0 || log_sum_exp.data() != nullptr,
            "queries: expected log_sum_exp, got null");
    expects(errc::not_finite,
            std::ranges::all_of(log_sum_exp,
                                [](float x) { return x < std::numeric_limits<float>::infinity(); }),
            "queries: expected log_sum_exp below infinity, got NaN or Inf");
    queries q = *this;
    q.log_sum_exp_ = log_sum_exp;
    return q;
  }

  /// The same with the Euclidean norm of each token's input to the layer's attention, `[tokens]`,
  /// which `kvzip` with `plus` divides by. Refused: another number of floats, any not above 0.
  queries with_hidden_norm(std::span<const float> hidden_norm) const {
    expects(hidden_norm.size() == as_size(tokens_), "queries: expected hidden_norm [", tokens_,
            "], got ", hidden_norm.size(), " floats");
    expects(tokens_ == 0 || hidden_norm.data() != nullptr,
            "queries: expected hidden_norm, got null");
    expects(std::ranges::all_of(hidden_norm, [](float x) { return x > 0 && std::isfinite(x); }),
            "queries: expected finite hidden_norm above 0, got others");
    queries q = *this;
    q.hidden_norm_ = hidden_norm;
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
      view.hidden_norm = hidden_norm_.data();
      return f(view);
    });
  }

 private:
  std::size_t row_size() const { return as_size(heads_ * group_, dim_); }

  any_span rows_;
  index_t tokens_, heads_, group_, dim_;
  std::span<const float> log_sum_exp_, hidden_norm_;
};

}  // namespace kvmeld::inline v0
