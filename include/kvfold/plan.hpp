/// The waist: every policy makes a `merge_plan`; everything after it uses one and knows no policy.
#pragma once

#include <algorithm>  // std::max
#include <cmath>      // std::isfinite
#include <cstddef>    // std::size_t
#include <span>
#include <utility>  // std::pair
#include <vector>

#include "kvfold/view.hpp"

namespace kvfold {

/// One source of a row: `key_weight · k_source` goes into the row's key, `value_weight · v_source`
/// into its value.
struct edge {
  index_t source;
  float key_weight = 1;
  float value_weight = 1;

  friend bool operator==(const edge&, const edge&) = default;
};

/// What a head becomes: a sparse row matrix `W` with one row per surviving slot,
///
///     K' = W_k K      V' = W_v V + Δ      log_mass'[r] given
///
/// The first edge of a row is its anchor: its position survives. Laws (`check`): sources are
/// unique, anchors ascend, so that `apply` needs no scratch. A slot that is no source is dropped.
///
///     slots 0 1 2 3 4 5 → rows {0} {2: 1, 3} {5}      W = | 1 . . . . . |
///                                                         | . ⅓ ⅔ . . . |   (anchor 2, 1 into it)
///                                                         | . . . . . 1 |   (4 is gone)
class merge_plan {
 public:
  index_t length() const { return length_; }                               ///< slots before
  index_t rows() const { return static_cast<index_t>(log_mass_.size()); }  ///< slots after

  std::span<const edge> row(index_t r) const {
    const auto i = static_cast<std::size_t>(r);
    return std::span(edges_).subspan(begin_[i], begin_[i + 1] - begin_[i]);
  }
  index_t anchor(index_t r) const { return row(r).front().source; }
  float log_mass(index_t r) const { return log_mass_[static_cast<std::size_t>(r)]; }

  /// Row `r` of `Δ [dim]`, or empty: nothing is added.
  std::span<const float> value_correction(index_t r) const {
    return correction_.empty()
               ? std::span<const float>()
               : std::span(correction_).subspan(static_cast<std::size_t>(r) * dim_, dim_);
  }
  bool has_correction() const { return !correction_.empty(); }
  /// `Δ` of all rows `[rows, dim]`, or empty.
  std::span<const float> value_corrections() const { return correction_; }
  /// Were edges added to a row that was not ended?
  bool unfinished() const { return edges_.size() != begin_.back(); }
  index_t dim() const { return static_cast<index_t>(dim_); }

  /// Room for `capacity` slots, so that making a plan allocates nothing.
  void reserve(index_t capacity) {
    const auto n = static_cast<std::size_t>(capacity);
    edges_.reserve(n), begin_.reserve(n + 1), log_mass_.reserve(n);
    order_.reserve(n), row_of_.reserve(n), marks_.reserve(n);
  }

  /// Starts anew, for a head of `length` slots.
  void reset(index_t length) {
    length_ = length;
    edges_.clear(), log_mass_.clear(), correction_.clear();
    begin_.assign(1, 0);
  }

  /// Adds an edge to the row being made; the first one is the anchor.
  void add(edge e) { edges_.push_back(e); }
  /// Ends the row being made.
  void end_row(float log_mass) {
    begin_.push_back(edges_.size());
    log_mass_.push_back(log_mass);
  }
  /// A row of one slot, unchanged.
  void keep(index_t s, float log_mass) {
    add({s});
    end_row(log_mass);
  }

  /// `Δ [rows, dim]`, added to the values of the finished rows.
  void correct_values(std::vector<float> correction, index_t dim) {
    expects(dim > 0 && correction.size() == log_mass_.size() * static_cast<std::size_t>(dim),
            "merge_plan: a value correction [", rows(), ", ", dim, "] expected, ",
            correction.size(), " numbers came");
    dim_ = static_cast<std::size_t>(dim);
    correction_ = std::move(correction);
  }

  /// Scratch for planners, so that a plan is all the memory that planning takes.
  std::vector<index_t>& order() { return order_; }     ///< slots, in some order
  std::vector<index_t>& row_of() { return row_of_; }   ///< slot → anchor of its row, or −1
  std::vector<char>& marks() const { return marks_; }  ///< slot → stays?

 private:
  index_t length_ = 0;
  std::vector<edge> edges_;
  std::vector<std::size_t> begin_ = {0};  // [rows + 1] into edges_
  std::vector<float> log_mass_;           // [rows]
  std::vector<float> correction_;         // [rows, dim_] or empty
  std::size_t dim_ = 0;
  std::vector<index_t> order_, row_of_;
  mutable std::vector<char> marks_;  // `check` uses it too
};

/// Throws unless the plan obeys its laws. O(length), in the plan's own scratch.
inline void check(const merge_plan& plan) {
  auto& used = plan.marks();
  used.assign(static_cast<std::size_t>(plan.length()), 0);
  index_t before = -1;
  for (index_t r = 0; r < plan.rows(); ++r) {
    expects(!plan.row(r).empty(), "merge_plan: row ", r, " has no source");
    expects(plan.anchor(r) > before, "merge_plan: ascending anchors expected, row ", r,
            " has anchor ", plan.anchor(r), " after ", before);
    before = plan.anchor(r);
    for (const edge& e : plan.row(r)) {
      expects(e.source >= 0 && e.source < plan.length(), "merge_plan: sources 0 to ",
              plan.length() - 1, " expected, row ", r, " names ", e.source);
      char& seen = used[static_cast<std::size_t>(e.source)];
      expects(seen == 0, "merge_plan: each source once expected, row ", r, " repeats ", e.source);
      seen = 1;
      expects(std::isfinite(e.key_weight) && std::isfinite(e.value_weight),
              "merge_plan: finite weights expected, row ", r, " gives source ", e.source, " ",
              e.key_weight, " and ", e.value_weight);
    }
    expects(std::isfinite(plan.log_mass(r)), "merge_plan: a finite log-mass expected, row ", r,
            " has ", plan.log_mass(r));
  }
  expects(!plan.unfinished(), "merge_plan: row ", plan.rows(), " has sources but was not ended");
  const auto delta = plan.value_corrections();
  expects(delta.empty() || delta.size() == static_cast<std::size_t>(plan.rows()) *
                                               static_cast<std::size_t>(plan.dim()),
          "merge_plan: a value correction [", plan.rows(), ", ", plan.dim(), "] expected, ",
          delta.size(), " numbers came");
  for (const float x : delta) {
    expects(std::isfinite(x), "merge_plan: a finite value correction expected, ", x, " came");
  }
}

/// The plan that changes nothing.
merge_plan identity(const kv_head auto& head) {
  merge_plan plan;
  plan.reset(head.length());
  for (index_t s = 0; s < head.length(); ++s) {
    plan.keep(s, head.log_mass(s));
  }
  return plan;
}

/// First `first`, then `second`, as one plan: `W = W₂ W₁`, `Δ = W₂ Δ₁ + Δ₂`.
/// Refused when the product's anchors would not ascend, or when the row counts do not fit.
inline merge_plan compose(const merge_plan& second, const merge_plan& first) {
  expects(second.length() == first.rows(), "compose: a second plan of ", first.rows(),
          " slots expected, ", second.length(), " came");
  expects(!first.has_correction() || !second.has_correction() || first.dim() == second.dim(),
          "compose: value corrections of one dim expected, ", first.dim(), " and ", second.dim(),
          " came");
  check(first), check(second);
  merge_plan product;
  product.reset(first.length());
  const auto dim = static_cast<std::size_t>(first.has_correction() ? first.dim() : second.dim());
  const bool corrected = first.has_correction() || second.has_correction();
  std::vector<float> delta(corrected ? static_cast<std::size_t>(second.rows()) * dim : 0);
  for (index_t r = 0; r < second.rows(); ++r) {
    float* d = delta.data() + static_cast<std::size_t>(r) * dim;
    for (const edge& outer : second.row(r)) {
      for (const edge& inner : first.row(outer.source)) {
        product.add({inner.source, outer.key_weight * inner.key_weight,
                     outer.value_weight * inner.value_weight});
      }
      const auto inner = first.value_correction(outer.source);
      for (std::size_t i = 0; i < inner.size(); ++i) {
        d[i] += outer.value_weight * inner[i];
      }
    }
    const auto own = second.value_correction(r);
    for (std::size_t i = 0; i < own.size(); ++i) {
      d[i] += own[i];
    }
    product.end_row(second.log_mass(r));
  }
  if (corrected) {
    product.correct_values(std::move(delta), static_cast<index_t>(dim));
  }
  check(product);
  return product;
}

}  // namespace kvfold
