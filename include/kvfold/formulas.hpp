/// Formulas of policies that the host and the device both evaluate: numbers in, numbers out.
#pragma once

#include <cmath>    // std::pow
#include <cstddef>  // std::ptrdiff_t
#include <cstdint>  // std::int64_t

#include "kvfold/functors.hpp"

namespace kvfold::detail {

/// The group's number `a` of the query heads so far, with that of one more.
KVFOLD_HD inline float with_query_head(group_combine how, float a, float p) {
  return how == group_combine::max ? (a < p ? p : a) : a + p;
}
/// ... of all `group`.
KVFOLD_HD inline float of_group(group_combine how, float a, index_t group) {
  return how == group_combine::mean ? a / static_cast<float>(group) : a;
}

/// `future_positions`: query `i` of `n` goes so many positions beyond the next one.
KVFOLD_HD inline index_t future_position(index_t i, index_t n, index_t horizon, double fade) {
  if (fade - fade != 0) {  // infinite
    return static_cast<index_t>(std::int64_t{i} * horizon / n);
  }
  const double share = static_cast<double>(i) / n;
  return static_cast<index_t>(fade * (std::pow(horizon / fade + 1, share) - 1));
}

/// D2O, eq. 10: `τ_t = β m_t + (1 − β) τ_{t−1}`; the first `m_t` is the first τ. `multiply_add` is
/// the host's or the device's.
template <class MultiplyAdd>
KVFOLD_HD float d2o_threshold(float beta, float m, bool has_last, float last,
                              MultiplyAdd multiply_add) {
  return has_last ? multiply_add(beta, m, (1 - beta) * last) : m;
}

/// fold: slots that one plan of a step frees.
KVFOLD_HD inline index_t fold_freed(index_t period, index_t slots) {
  return period > 0 ? period : slots / 16 > 1 ? slots / 16 : 1;
}
/// fold: latest tokens that stay alone, of so many slots.
KVFOLD_HD inline index_t fold_recent(index_t recent, float recent_share, index_t slots) {
  const index_t share = share_of(recent_share, slots);
  return share < recent ? share : recent;
}

/// fold's memory of a head, in floats: integers by their bits, the positions of the remembered
/// queries `[queries]`, the queries `[queries, group, dim]`, the moments of un-rotated keys.
struct fold_layout {
  enum field : index_t { counted, keys, held, newest, next, steps, header };

  index_t queries, group, dim;

  /// Query `i` in order of age lies in this slot, `held` of them being there.
  KVFOLD_HD index_t slot_of(index_t i, index_t held_now, index_t newest_slot) const {
    return held_now < queries ? i : (newest_slot + 1 + i) % queries;
  }
  KVFOLD_HD std::ptrdiff_t query(index_t g, index_t slot) const {
    return std::ptrdiff_t{header} + queries + (std::ptrdiff_t{slot} * group + g) * dim;
  }
  KVFOLD_HD std::ptrdiff_t moments() const { return query(0, queries); }
  /// The slot after one that a step's query was written to: every `stride`-th query is held.
  KVFOLD_HD index_t next_slot(index_t slot, index_t step, index_t stride) const {
    return step % stride == 0 ? (slot + 1) % queries : slot;
  }
};

}  // namespace kvfold::detail
