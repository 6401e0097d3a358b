// SPDX-License-Identifier: MIT
/// The waist: every policy makes a `merge_plan`; everything after it uses one and knows no policy.
#pragma once

#include <algorithm>  // std::max, std::ranges::all_of
#include <cmath>      // std::isfinite
#include <cstddef>    // std::size_t
#include <optional>
#include <span>
#include <utility>  // std::exchange, std::pair
#include <vector>

#include "kvmeld/memory/view.hpp"
#include "kvmeld/merge/source.hpp"

namespace kvmeld::inline v0 {

/// What a head becomes: a sparse row matrix `W` with one row per surviving slot,
///
///     K' = W_k K + Δ_k      V' = W_v V + Δ_v      log_mass'[r] given
///
/// The first source of a row is its anchor: its position survives. Laws (`check`): sources are
/// unique, anchors ascend, so that `apply` needs no scratch. A slot that is no source is evicted.
/// Rows are in no slot yet: `apply` leaves those whose anchor lies below `rows()` where they are.
///
///     slots 0 1 2 3 4 5 → rows {0} {2, 1, 3} {5}      W = | 1 . . . . . |
///                                                         | . ⅓ ⅓ ⅓ . . |   (anchor 2)
///                                                         | . . . . . 1 |   (4 is evicted)
class merge_plan {
 public:
  index_t length() const { return length_; }                               ///< slots before
  index_t rows() const { return static_cast<index_t>(log_mass_.size()); }  ///< slots after

  /// The sources of row `r`, its anchor first.
  std::span<const merge_source> row(index_t r) const {
    const auto i = as_size(r);
    return std::span(sources_).subspan(begin_[i], begin_[i + 1] - begin_[i]);
  }
  /// The slot whose place row `r` takes.
  index_t anchor(index_t r) const { return row(r).front().source; }
  float log_mass(index_t r) const { return log_mass_[as_size(r)]; }  ///< of row `r`

  /// Does row `r` change its anchor's key or value?
  bool changes_row(index_t r) const {
    return !is_one_slot(row(r)) || !key_correction(r).empty() || !value_correction(r).empty();
  }
  /// Calls `use(r)` for each row that does, ascending; the others are not visited.
  template <class Use>
  void each_changed_row(Use use) const {
    const bool all = keys_.dim + values_.dim > 0;
    const index_t count = all ? rows() : static_cast<index_t>(merged_.size());
    for (index_t i = 0; i < count; ++i) {
      if (const index_t r = all ? i : merged_[as_size(i)]; changes_row(r)) {
        use(r);
      }
    }
  }

  /// Row `r` of `Δ_k [key_dim]` and of `Δ_v [value_dim]`, or empty: nothing is added.
  std::span<const float> key_correction(index_t r) const { return keys_.row(r); }
  /// The same of values.
  std::span<const float> value_correction(index_t r) const { return values_.row(r); }
  /// `Δ_k [rows, key_dim]`, `Δ_v [rows, value_dim]`, or empty.
  std::span<const float> key_corrections() const { return keys_.all; }
  std::span<const float> value_corrections() const { return values_.all; }  ///< of values
  /// Numbers in a row of `Δ_k`, of `Δ_v`; 0: there is none.
  index_t key_dim() const { return static_cast<index_t>(keys_.dim); }
  index_t value_dim() const { return static_cast<index_t>(values_.dim); }  ///< of `Δ_v`

  /// Room for `capacity` slots, so that making a plan allocates nothing.
  void reserve(index_t capacity) {
    const auto n = as_size(capacity);
    sources_.reserve(n), begin_.reserve(n + 1), log_mass_.reserve(n);
    is_source_.reserve(n), merged_.reserve(n);
  }

  /// Starts anew, for a head of `length` slots.
  void reset(index_t length) {
    length_ = length;
    sources_.clear(), log_mass_.clear(), merged_.clear();
    clear_corrections();
    measured_.reset();
    begin_.assign(1, 0);
    is_source_.assign(as_size(std::max(length, index_t{0})), 0);
    lawful_ = true, last_anchor_ = -1;
  }

  /// Adds a source to the row being made; the first one is the anchor.
  void add(merge_source e) {
    lawful_ =
        lawful_ && std::isfinite(e.key_weight) && std::isfinite(e.value_weight) && take(e.source);
    sources_.push_back(e);
  }
  /// Ends the row being made.
  void end_row(float log_mass) {
    const auto made = std::span<const merge_source>(sources_).subspan(begin_.back());
    lawful_ = lawful_ && std::isfinite(log_mass) && !made.empty() && made[0].source > last_anchor_;
    if (!is_one_slot(made)) {
      merged_.push_back(rows());
    }
    last_anchor_ = made.empty() ? last_anchor_ : made[0].source;
    begin_.push_back(sources_.size());
    log_mass_.push_back(log_mass);
  }
  /// A row of one slot, unchanged.
  void keep(index_t s, float log_mass) {
    add({s});
    end_row(log_mass);
  }
  /// Rows of the slots from `first` on, one for each of `log_mass`, unchanged. Refused: a row that
  /// was not ended.
  void keep(index_t first, std::span<const float> log_mass) {
    const std::size_t before = sources_.size(), ended = begin_.size();
    expects(begin_.back() == before, "merge_plan: expected end_row first, got a row being made");
    lawful_ = lawful_ && first > last_anchor_;
    sources_.resize(before + log_mass.size()), begin_.resize(ended + log_mass.size());
    for (std::size_t i = 0; i < log_mass.size(); ++i) {
      last_anchor_ = first + static_cast<index_t>(i);
      lawful_ = lawful_ && std::isfinite(log_mass[i]) && take(last_anchor_);
      sources_[before + i].source = last_anchor_;
      begin_[ended + i] = before + i + 1;
    }
    log_mass_.insert(log_mass_.end(), log_mass.begin(), log_mass.end());
  }

  /// `Δ_v [rows, dim]`, added to the values of the finished rows.
  void correct_values(std::span<const float> delta, index_t dim) {
    correct(values_, "value", delta, dim);
  }
  /// `Δ_k [rows, dim]`, added to the keys.
  void correct_keys(std::span<const float> delta, index_t dim) {
    correct(keys_, "key", delta, dim);
  }

  /// Removes the corrections: for a cache that they were not measured on, such as another
  /// model's.
  void clear_corrections() {
    for (correction* delta : {&keys_, &values_}) {
      delta->all.clear(), delta->dim = 0, delta->finite = true;
    }
    for_rotated_values_.reset();
  }
  /// Are the corrections of values for a head that holds them rotated (`rotates_values`)? `plan`
  /// says; none: not known, as of a plan made by hand.
  std::optional<bool> for_rotated_values() const { return for_rotated_values_; }
  /// None: not known.
  void set_for_rotated_values(std::optional<bool> rotated) { for_rotated_values_ = rotated; }

  /// Nothing is added to row `r`.
  void clear_corrections(index_t r) {
    for (correction* delta : {&keys_, &values_}) {
      std::fill_n(delta->all.data() + as_size(r) * delta->dim, delta->dim, 0.0F);
    }
  }
  /// Row `r` becomes its anchor, unchanged but for what is added to it; its other sources are
  /// evicted.
  void evict_others(index_t r, float log_mass) {
    const auto i = as_size(r), others = row(r).size() - 1;
    const auto first = sources_.begin() + static_cast<std::ptrdiff_t>(begin_[i]);
    *first = {first->source};
    sources_.erase(first + 1, first + 1 + static_cast<std::ptrdiff_t>(others));
    for (std::size_t later = i + 1; later < begin_.size(); ++later) {
      begin_[later] -= others;
    }
    log_mass_[i] = log_mass;
  }

  /// A number that the policy measured in making the plan, for its own `update_memory`; none: it
  /// measured nothing.
  std::optional<float> measured() const { return measured_; }
  void set_measured(std::optional<float> measured) { measured_ = measured; }  ///< none: nothing

  /// Is it known that no law is broken? Else `check` finds out which, if any.
  bool lawful() const { return lawful_ && keys_.lawful(rows()) && values_.lawful(rows()); }
  friend void check(const merge_plan& plan);

 private:
  /// Numbers added to the keys, or values, of all rows.
  struct correction {
    std::vector<float> all;  // [rows, dim] or empty
    std::size_t dim = 0;
    bool finite = true;

    bool lawful(index_t rows) const { return finite && all.size() == as_size(rows) * dim; }
    std::span<const float> row(index_t r) const {
      return std::span(all).subspan(as_size(r) * dim, dim);
    }
  };

  static bool is_one_slot(std::span<const merge_source> row) {
    return row.size() == 1 && row.front() == merge_source{row.front().source};
  }
  /// Is slot `s` in the head, and no source yet? Now it is.
  bool take(index_t s) {
    return s >= 0 && s < length_ && std::exchange(is_source_[as_size(s)], 1) == 0;
  }

  void correct(correction& to, const char* what, std::span<const float> delta, index_t dim) {
    expects(dim > 0 && delta.size() == log_mass_.size() * as_size(dim), "merge_plan: expected a ",
            what, " correction [", rows(), ", ", dim, "], got ", delta.size(), " numbers");
    to.dim = delta.empty() ? 0 : as_size(dim);
    to.all.assign(delta.begin(), delta.end());
    to.finite = std::ranges::all_of(delta, [](float x) { return std::isfinite(x); });
  }

  index_t length_ = 0;
  std::vector<merge_source> sources_;
  std::vector<std::size_t> begin_ = {0};  // [rows + 1] into sources_
  std::vector<float> log_mass_;           // [rows]
  correction keys_, values_;
  std::optional<float> measured_;
  std::optional<bool> for_rotated_values_;
  std::vector<index_t> merged_;  // rows that are not one slot, unchanged
  // Faults are noted as they are added, so that `check` walks a plan only where there may be one.
  bool lawful_ = true;
  index_t last_anchor_ = -1;
  std::vector<char> is_source_;  // [length]
};

/// Throws unless the plan obeys its laws. It only reads, so that threads may share a plan.
inline void check(const merge_plan& plan) {
  expects(plan.length() >= 0, "merge_plan: expected at least 0 slots, got ", plan.length());
  std::vector<char> is_source(plan.lawful() ? 0 : as_size(plan.length()));
  index_t before = -1;
  for (index_t r = 0; !plan.lawful() && r < plan.rows(); ++r) {
    const auto sources = plan.row(r);
    expects(!sources.empty(), "merge_plan: expected at least 1 source in row ", r, ", got 0");
    const index_t anchor = sources.front().source;
    expects(anchor > before, "merge_plan: expected ascending anchors, got ", anchor, " after ",
            before, " in row ", r);
    before = anchor;
    for (const merge_source& e : sources) {
      expects(e.source >= 0 && e.source < plan.length(), "merge_plan: expected sources 0 to ",
              plan.length() - 1, ", got ", e.source, " in row ", r);
      expects(std::exchange(is_source[as_size(e.source)], 1) == 0,
              "merge_plan: expected each source once, got ", e.source, " again in row ", r);
      expects(errc::not_finite, std::isfinite(e.key_weight) && std::isfinite(e.value_weight),
              "merge_plan: expected finite weights, got ", e.key_weight, " and ", e.value_weight,
              " for source ", e.source, " of row ", r);
    }
    expects(errc::not_finite, std::isfinite(plan.log_mass(r)),
            "merge_plan: expected a finite log-mass, got ", plan.log_mass(r), " in row ", r);
  }
  expects(plan.sources_.size() == plan.begin_.back(),
          "merge_plan: expected end_row after the sources of row ", plan.rows());
  for (const auto& [delta, dim] : {std::pair{plan.key_corrections(), plan.key_dim()},
                                   std::pair{plan.value_corrections(), plan.value_dim()}}) {
    expects(delta.empty() || delta.size() == as_size(plan.rows(), dim),
            "merge_plan: expected a correction [", plan.rows(), ", ", dim, "], got ", delta.size(),
            " numbers");
    for (const float x : plan.lawful() ? std::span<const float>() : delta) {
      expects(errc::not_finite, std::isfinite(x), "merge_plan: expected a finite correction, got ",
              x);
    }
  }
}

/// Makes `out` the plan that changes nothing.
void keep_all(const kv_head auto& head, merge_plan& out) {
  out.reset(head.length());
  out.keep(0, {head.metadata().log_mass, as_size(head.length())});
}
/// The plan that keeps all slots as they are.
merge_plan identity(const kv_head auto& head) {
  merge_plan plan;
  keep_all(head, plan);
  return plan;
}

}  // namespace kvmeld::inline v0
