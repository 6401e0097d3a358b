// SPDX-License-Identifier: MIT
/// A prompt's attention, block after block of its queries, in memory `O(length)`.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::min
#include <limits>     // std::numeric_limits
#include <span>
#include <vector>

#include "kvmeld/detail/product.hpp"
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
  using row_map = Eigen::Map<Eigen::ArrayXf>;

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
  index_t rows() const { return count_ * head_.group(); }
  index_t most_rows() const { return static_cast<index_t>(q_.rows()); }
  index_t columns() const { return static_cast<index_t>(logits_.cols()); }
  /// The query of row `r`, its position, and its row `[dim]`, which may be changed.
  index_t query(index_t r) const { return first_ + r / head_.group(); }
  index_t position(index_t r) const {
    return queries_.position_of(query(r), head_.next_position());
  }
  float* q(index_t r) { return &q_(r, 0); }
  /// The log-sum-exp of row `r` from the prefill's own attention, if it is known.
  bool knows_log_sums() const { return queries_.log_sum_exp != nullptr; }
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
  auto products(index_t slots) { return logits_.block(0, 0, rows(), slots); }

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
/// `attention` ends behind the last slot that a query of its block sees.
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

}  // namespace score
}  // namespace kvmeld::inline v0
