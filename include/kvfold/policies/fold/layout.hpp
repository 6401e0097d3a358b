/// What fold frees, keeps, and remembers of a head, for host and device.
#pragma once

#include <cstddef>  // std::ptrdiff_t

#include "kvfold/search/protection.hpp"

namespace kvfold {
inline namespace v0 {
namespace detail {

/// fold: slots that one plan of a step frees.
KVFOLD_HD inline index_t fold_freed(index_t period, index_t slots) {
  return period > 0 ? period : slots / 16 > 1 ? slots / 16 : 1;
}
/// fold: latest tokens that stay unmerged, of so many slots.
KVFOLD_HD inline index_t fold_recent(index_t recent, float recent_share, index_t slots) {
  const index_t share = share_of(recent_share, slots);
  return share < recent ? share : recent;
}

/// fold's memory of a head, in floats: integers by their bits, the positions of the remembered
/// queries `[queries]`, the queries `[queries, group, dim]` in bfloat16 (two in the place of a
/// float), which has float's range.
struct fold_layout {
  enum field : index_t { held, newest, next, steps, prompt_begin, prompt_end, header };

  index_t queries, group, dim;

  /// Query `i` in order of age lies in this slot, `held` of them being there.
  KVFOLD_HD index_t slot_of(index_t i, index_t held_now, index_t newest_slot) const {
    return held_now < queries ? i : (newest_slot + 1 + i) % queries;
  }
  KVFOLD_HD std::ptrdiff_t query(index_t g, index_t slot) const {
    const std::ptrdiff_t row = (dim + 1) / 2;
    return std::ptrdiff_t{header} + queries + (std::ptrdiff_t{slot} * group + g) * row;
  }
  KVFOLD_HD std::ptrdiff_t size() const { return query(0, queries); }
  /// The slot after one that a step's query was written to: every `stride`-th query is held.
  KVFOLD_HD index_t next_slot(index_t slot, index_t step, index_t stride) const {
    return step % stride == 0 ? (slot + 1) % queries : slot;
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace kvfold
