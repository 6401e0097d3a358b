// SPDX-License-Identifier: MIT
/// A prompt's attention, block after block of its queries, in memory `O(length)`, and how it enters
/// a slot's score: one query's, or column sums, without ever holding it.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::min, std::copy
#include <cmath>      // std::pow
#include <limits>     // std::numeric_limits
#include <span>
#include <vector>

#include "kvmeld/detail/order.hpp"
#include "kvmeld/detail/product.hpp"
#include "kvmeld/memory/view.hpp"
#include "kvmeld/score/observation.hpp"
#include "kvmeld/score/queries.hpp"
#include "kvmeld/score/softmax.hpp"
#include "kvmeld/score/tile_products.hpp"

namespace kvmeld::inline v0 {
namespace score {

/// `out [rows, slots] = q [rows, dim] · keysᵀ` over a head's first slots, so many at a time.
/// `buffer [at_once, dim]`.
template <class Q, class Out>
void multiply_keys(const kv_head auto& head, const Q& q, index_t at_once, float* buffer,
                   Out&& out) {
  const auto slots = static_cast<index_t>(out.cols());
  for (index_t first = 0; first < slots; first += at_once) {
    const index_t count = std::min(at_once, slots - first);
    const auto keys = detail::load_keys(head, first, count, buffer);
    dense::set_product_transposed(1, q, keys, out.middleCols(first, count));
  }
}

/// Blocks of a prompt's queries over a head's slots. A block has a row for each query head of each
/// query, those of one query together; logits (`attention_spec`) become their exp in place.
/// Rows are padded with −∞ to whole vectors, so that no number's bits depend on where it stands.
template <kv_head Head, class Query>
class query_blocks {
 public:
  using row_map = Eigen::Map<Eigen::ArrayXf>;  ///< logits of a row

  /// Of one KV head; both have to live as long.
  query_blocks(const Head& head, const query_view<Query>& queries)
      : head_(head),
        queries_(queries),
        terms_(head),
        queries_at_once_(std::max(index_t{1}, 64 / head.group())),
        q_(queries_at_once_ * head.group(), head.dim()),
        logits_(q_.rows(), padded(head.length())),
        buffer_(as_size(slots_at_once, head.dim())) {}

  /// Calls `use()` for every block in turn; what follows is about that block.
  template <class Use>
  void each(Use use) {
    for (first_ = 0; first_ < queries_.count; first_ += queries_at_once_) {
      count_ = std::min(queries_at_once_, queries_.count - first_);
      for (index_t r = 0; r < rows(); ++r) {
        to_floats(row<const Query>{queries_.at(r % head_.group(), query(r))}, head_.dim(), q(r));
      }
      use();
    }
  }
  index_t rows() const { return count_ * head_.group(); }                   ///< of this block
  index_t most_rows() const { return static_cast<index_t>(q_.rows()); }     ///< of a block
  index_t columns() const { return static_cast<index_t>(logits_.cols()); }  ///< padded slots
  /// The query of row `r`, its position, and its row `[dim]`, which may be changed.
  index_t query(index_t r) const { return first_ + r / head_.group(); }
  /// The position of row `r`'s query.
  index_t position(index_t r) const {
    return queries_.position_of(query(r), head_.next_position());
  }
  float* q(index_t r) { return &q_(r, 0); }  ///< of row `r`, `[dim]`
  /// The log-sum-exp of row `r` from the prefill's own attention, if it is known.
  bool knows_log_sums() const { return queries_.log_sum_exp != nullptr; }
  /// The log-sum-exp of row `r`.
  float log_sum(index_t r) const { return queries_.log_sum(r % head_.group(), query(r)); }

  /// Slots up to the last one that any of the queries sees.
  index_t visible() const {
    index_t latest = -1, slots = head_.length();
    for (index_t r = 0; r < rows(); r += head_.group()) {
      latest = std::max(latest, position(r));
    }
    while (slots > 0 && head_.position(slots - 1) > latest) {
      --slots;
    }
    return slots;
  }
  /// The products of all rows with the first `slots` slots.
  void multiply(index_t slots) {
    multiply_keys(head_, q_.topRows(rows()), slots_at_once, buffer_.data(), products(slots));
  }
  auto products(index_t slots) { return logits_.block(0, 0, rows(), slots); }  ///< `[rows, slots]`

  /// Makes the products of row `r` the logits of a query at `position`, −∞ of slots that it does
  /// not see. `[slots, padded]`.
  row_map logits(index_t r, index_t slots, index_t position) {
    terms_.replace_products(head_, r % head_.group(), position, 0, slots, &logits_(r, 0));
    return row_of(r, slots);
  }
  /// ... and their exp below the largest of these and of the logits in `all`.
  softmax<> exponentials(index_t r, index_t slots, index_t position, softmax<> all = {}) {
    all.take(logits(r, slots, position));
    return all;
  }
  /// What the softmax of row `r` begins with.
  softmax<> sink(index_t r) const { return terms_.sink(r % head_.group()); }
  /// Row `r` as it is now, padded.
  row_map row_of(index_t r, index_t slots) { return {&logits_(r, 0), padded(slots)}; }

 private:
  static constexpr index_t slots_at_once = 512;

  const Head& head_;
  const query_view<Query>& queries_;
  logit_terms terms_;
  index_t queries_at_once_, first_ = 0, count_ = 0;
  dense::matrix_of<float> q_, logits_;
  std::vector<float> buffer_;
};

/// Calls `see(attention, position, visible)` for every query in turn: its softmax over the
/// `visible` slots that it sees, 0 elsewhere, the group's heads combined (`sum` or `mean`).
/// `attention` ends after the last slot that a query of its block sees.
template <kv_head Head, class Query, class See>
void for_each_query(const Head& head, const query_view<Query>& queries, group_combine combine,
                    See see) {
  query_blocks<Head, Query> block(head, queries);
  block.each([&] {
    const index_t slots = block.visible(), group = head.group();
    block.multiply(slots);
    for (index_t first = 0; first < block.rows(); first += group) {
      const index_t position = block.position(first);
      const index_t visible = visible_slots(head, position);
      auto combined = block.row_of(first, slots);
      for (index_t r = first; visible > 0 && r < first + group; ++r) {
        const softmax<> all = block.exponentials(r, slots, position, block.sink(r));
        auto mass = block.row_of(r, slots);
        mass /= all.sum;
        if (r > first) {
          combined += mass;
        }
      }
      if (visible == 0) {
        combined.setZero();
      } else if (combine == group_combine::mean) {
        combined /= static_cast<float>(group);
      }
      see(std::span<const float>(combined.data(), as_size(slots)), position, visible);
    }
  });
}

/// `s_j ← λ s_j + a_j`; λ = 1: cumulative attention.
inline void accumulate(std::span<float> score, std::span<const float> attention, float decay = 1) {
  for (std::size_t j = 0; j < attention.size(); ++j) {
    score[j] = accumulated(score[j], attention[j], decay);
  }
}

/// Of scores over the last `window` to 2 `window` queries, kept as a past and a current column: one
/// query more is in `current`, which becomes the past when it holds `window` of them.
inline void count_in_window(float& queries, index_t window, std::span<float> current,
                            std::span<float> past) {
  if (++queries >= static_cast<float>(window)) {
    std::copy(current.begin(), current.end(), past.begin());
    std::fill(current.begin(), current.end(), queries = 0);
  }
}

/// Means over `kernel` neighbours in `order`, in place. At the borders over those that are there,
/// or, with `count_border`, as if zeros stood outside.
inline void average_pool(std::span<const index_t> order, index_t kernel, bool count_border,
                         std::span<float> score) {
  const std::vector<float> raw(score.begin(), score.end());
  const auto n = static_cast<index_t>(order.size());
  const auto at = [&](index_t i) { return as_size(order[as_size(i)]); };
  for (index_t i = 0; i < n; ++i) {
    const index_t begin = std::max(index_t{0}, i - kernel / 2);
    const index_t end = std::min(n, i + kernel / 2 + 1);
    float sum = 0;
    for (index_t j = begin; j < end; ++j) {
      sum += raw[at(j)];
    }
    score[at(i)] = sum / static_cast<float>(count_border ? kernel : end - begin);
  }
}

/// The same over neighbours in position, among the slots for which `takes_part(s)`.
template <class TakesPart>
void average_pool(const kv_head auto& head, TakesPart takes_part, index_t kernel, bool count_border,
                  std::span<float> score) {
  std::vector<index_t> order;
  for (index_t s = 0; s < head.length(); ++s) {
    if (takes_part(s)) {
      order.push_back(s);
    }
  }
  std::vector<detail::keyed_slot> keyed;
  detail::sort_by_position(head, order, keyed);
  average_pool(order, kernel, count_border, score);
}

}  // namespace score

/// What to sum, and over which queries.
struct column_options {
  index_t window = 0;                          ///< last queries that `window` sums over
  float decay = 1;                             ///< λ of `decayed`
  group_combine combine = group_combine::sum;  ///< of the group's query heads, per query
};

/// Where the sums go: each `[length]` is overwritten, or empty: not wanted.
struct column_sums {
  std::span<float> total = {};    ///< Σ_i a_ij
  std::span<float> window = {};   ///< the same over the last `window` queries
  std::span<float> decayed = {};  ///< Σ_i λ^(n−1−i) a_ij
  std::span<float> largest = {};  ///< the largest a_ij of all queries and query heads, not combined
};

/// `a_ij = softmax_j(ℓ_ij)`, the model's logits (`attention_spec`), over the slots that query
/// `i` sees; the group's heads combined; summed over queries `i = 0 … n−1` of one KV head, or the
/// largest of them. Blocked: memory `O(length)`. The softmax's sum is the queries' `log_sum_exp`
/// where they have it, at half of the work. A query that sees no slot adds nothing. Refused:
/// an empty head, spans of another size, a decay outside (0, 1].
template <kv_head Head, class Query>
void column_scores(const Head& head, const query_view<Query>& queries,
                   const column_options& options, const column_sums& out) {
  using matrix = dense::matrix_of<float>;
  const index_t n = head.length(), group = head.group(), count = queries.count;
  expects(n > 0, "column_scores: expected at least 1 slot, got an empty head");
  expects(count > 0 && queries.data != nullptr, "column_scores: expected at least 1 query, got ",
          queries.data == nullptr ? 0 : count);
  for (const auto& [what, sums] :
       {std::pair{"total", out.total}, std::pair{"window", out.window},
        std::pair{"decayed", out.decayed}, std::pair{"largest", out.largest}}) {
    expects(sums.empty() || sums.size() == as_size(n), "column_scores: expected ", what, " [", n,
            "], got ", sums.size(), " floats");
  }
  expects(options.decay > 0 && options.decay <= 1,
          "column_scores: expected a decay in (0, 1], got ", options.decay);
  expects(options.window >= 0, "column_scores: expected a window of at least 0 queries, got ",
          options.window);

  score::query_blocks<Head, Query> block(head, queries);
  matrix weight(3, block.most_rows()), sums = matrix::Zero(3, n);
  Eigen::ArrayXf largest = Eigen::ArrayXf::Zero(out.largest.empty() ? 0 : block.columns());
  const auto weight_of = [&](index_t i, float inverse) -> Eigen::Vector3f {
    const auto age = static_cast<float>(std::pow(double{options.decay}, count - 1 - i));
    return {inverse, i >= count - options.window ? inverse : 0.0F, inverse * age};
  };
  block.each([&] {
    const index_t visible = block.visible(), rows = block.rows();
    if (visible == 0) {
      return;
    }
    block.multiply(visible);
    for (index_t r = 0; r < rows; ++r) {
      auto mass = block.logits(r, visible, block.position(r));
      score::softmax<> all = block.sink(r);
      if (!block.knows_log_sums()) {
        all.take(mass);
      } else {
        all = {block.log_sum(r), 1};
        if (all.max != all.nothing) {
          mass = (mass - all.max).exp();
        } else {
          mass.setZero();
        }
      }
      float inverse = all.max != all.nothing ? 1.0F / all.sum : 0.0F;
      if (largest.size() > 0) {
        largest.head(mass.size()) = largest.head(mass.size()).max(mass * inverse);
      }
      if (options.combine == group_combine::mean) {
        inverse /= static_cast<float>(group);
      }
      weight.col(r) = weight_of(block.query(r), inverse);
    }
    for (index_t first = 0; options.combine == group_combine::max && first < rows; first += group) {
      auto largest_of_group = block.row_of(first, visible);  // it stands for all of the group
      largest_of_group *= weight(0, first);
      for (index_t r = first + 1; r < first + group; ++r) {
        largest_of_group = largest_of_group.max(block.row_of(r, visible) * weight(0, r));
        weight.col(r).setZero();
      }
      weight.col(first) = weight_of(block.query(first), 1);
    }
    dense::add_product(1, weight.leftCols(rows), block.products(visible), sums.leftCols(visible));
  });
  const auto give = [&](index_t r, std::span<float> to) {
    std::copy_n(sums.row(r).data(), to.size(), to.begin());
  };
  give(0, out.total), give(1, out.window), give(2, out.decayed);
  std::copy_n(largest.data(), out.largest.size(), out.largest.begin());
}

namespace score {

/// Cumulative attention: `score_j ← score_j + Σ_i a_ij`.
template <class Query>
void accumulate(std::span<float> score, const kv_head auto& head, const query_view<Query>& queries,
                group_combine combine = group_combine::sum) {
  std::vector<float> total(as_size(head.length()));
  column_scores(head, queries, {.combine = combine}, {.total = total});
  accumulate(score, total);
}

}  // namespace score
}  // namespace kvmeld::inline v0
