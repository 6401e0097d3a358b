// SPDX-License-Identifier: MIT
/// What a decode step's attention computes for a policy, as it reads every key and value anyway.
#pragma once

#include <algorithm>  // std::max
#include <cstddef>    // std::size_t
#include <span>
#include <vector>

#include "kvmeld/memory/view.hpp"
#include "kvmeld/score/tile_compare.hpp"

namespace kvmeld {
inline namespace v0 {

/// A comparison of one slot with all others, computed while attention reads the keys. The slot to
/// remove is known only after attention, when comparing would read the keys a second time. So the
/// policy predicts it (`request`), and attention compares it with every tile of keys in the nearest
/// cache. After a wrong prediction (`is_about`) the policy reads the keys again: the same bits.
class fused_similarity {
 public:
  static constexpr index_t npos = -1;

  /// Products of one row with all others, and their norms, `[length]` each.
  struct products {
    std::vector<float> row, dot, norm;
  };

  /// Requests the comparison of slot `s` with all slots: by key, and by value too.
  void request(const kv_head auto& head, index_t s, bool values_too = false) {
    reset();
    if (s == npos) {
      return;
    }
    slot_ = s;
    prepare(keys_, head.key(s), head);
    with_values_ = values_too;
    if (values_too) {
      prepare(values_, head.value(s), head);
    }
  }
  /// Requests the comparison of any `row [dim]` with all keys, under slot `s`; `directions [dim]`
  /// += the sum of all k/‖k‖.
  void request(const kv_head auto& head, index_t s, std::span<const float> row,
               std::span<float> directions) {
    request(head, s);
    std::ranges::copy(row, keys_.row.begin());
    directions_ = directions.data();
  }
  void reset() { slot_ = npos, compared_ = 0, with_values_ = false, directions_ = nullptr; }

  bool requested() const { return slot_ != npos; }
  bool values_requested() const { return slot_ != npos && with_values_; }
  /// Is the comparison with all `length` slots done, for any slot? Then all norms are known.
  bool complete(index_t length) const { return requested() && compared_ == length; }
  /// ... for slot `s`?
  bool is_about(index_t s, index_t length) const { return s == slot_ && complete(length); }
  const products& keys() const { return keys_; }
  const products& values() const { return values_; }

  /// Called by attention with its tiles, in order.
  void add_keys(index_t first, const detail::tile& tile) {
    compare(tile, first, keys_);
    if (directions_ != nullptr) {
      score::add_directions(tile, keys_.norm.data() + first, directions_);
    }
    compared_ += static_cast<index_t>(tile.rows());
  }
  void add_values(index_t first, const detail::tile& tile) { compare(tile, first, values_); }

 private:
  /// While a tile is compared memory would wait: the rows behind it are prefetched meanwhile.
  static void compare(const detail::tile& tile, index_t first, products& a) {
    score::row_dots_and_norms(tile, a.row.data(), a.dot.data() + first, a.norm.data() + first,
                              tile.data() + tile.rows() * tile.outerStride());
  }
  /// Grows at first use.
  template <class Row>
  static void prepare(products& a, Row row, const kv_head auto& head) {
    const auto grow = [](std::vector<float>& x, index_t n) {
      x.resize(std::max(x.size(), static_cast<std::size_t>(n)));
    };
    grow(a.row, head.dim()), grow(a.dot, head.capacity()), grow(a.norm, head.capacity());
    to_floats(row, head.dim(), a.row.data());
  }

  index_t slot_ = npos;
  index_t compared_ = 0;
  bool with_values_ = false;
  float* directions_ = nullptr;
  products keys_, values_;
};

}  // namespace v0
}  // namespace kvmeld
