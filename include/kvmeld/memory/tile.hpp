// SPDX-License-Identifier: MIT
/// Rows of a cache as float matrices: in place where they are already so, converted otherwise.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::clamp

#include "kvmeld/memory/convert.hpp"
#include "kvmeld/memory/widen.hpp"

namespace kvmeld::inline v0::detail {

/// Slots `[rows, dim]` in float.
using tile = Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>,
                        Eigen::Unaligned, Eigen::OuterStride<>>;

/// Rows between two prefetches.
inline constexpr index_t prefetch_distance = 8;

/// Prefetches the first lines of the row `prefetch_distance` behind `row`: processors follow what
/// is read in order by themselves, but start anew at every page of memory.
template <class T>
void prefetch_row(const T* row, std::ptrdiff_t stride) {
  constexpr std::ptrdiff_t line = 64, lines = 4;
  for (std::ptrdiff_t i = 0; i < lines; ++i) {
    Eigen::internal::prefetch(behind(row, prefetch_distance * stride + i * line));
  }
}

inline namespace KVMELD_INSTRUCTIONS {

/// Fetches what is `ahead` bytes behind `x` into the second cache. Called with the loads of a
/// sweep, one line at a time: many at once would wait for one another.
template <class Scalar>
EIGEN_ALWAYS_INLINE void fetch([[maybe_unused]] const Scalar* x,
                               [[maybe_unused]] std::ptrdiff_t ahead) {
#if defined(__GNUC__) && !defined(__CUDACC__)
  if constexpr (lanes > 1) {
    __builtin_prefetch(behind(x, ahead), 0, 2);
  }
#endif
}

/// Bytes from what a loop over rows, `stride` apart, reads to what it fetches meanwhile: processors
/// follow what is read no further than a page of memory. `follows`: how many bytes behind the first
/// row lie those that are read after the last; 0: they lie behind it, evenly spaced.
inline std::ptrdiff_t fetched_ahead(std::ptrdiff_t stride, std::ptrdiff_t follows) {
  constexpr std::ptrdiff_t far = 8192;
  return follows != 0 ? follows
                      : std::max(far / stride, std::ptrdiff_t{prefetch_distance}) * stride;
}

}  // namespace KVMELD_INSTRUCTIONS

/// Bytes from one row of a tile to the next.
inline std::ptrdiff_t bytes_apart(const tile& of) {
  return of.outerStride() * std::ptrdiff_t{sizeof(float)};
}

/// `count` rows `row_of(first) ...` of a cache; `buffer [count, dim]` is used when they are not
/// evenly spaced floats.
template <class RowOf>
tile load_tile(RowOf row_of, index_t first, index_t count, index_t dim, float* buffer) {
  if (const float* const base = floats_in(row_of(first))) {
    const std::ptrdiff_t stride = count > 1 ? floats_in(row_of(first + 1)) - base : dim;
    bool even = stride >= dim;
    for (index_t i = 2; even && i < count; ++i) {
      even = floats_in(row_of(first + i)) == base + i * stride;  // a paged view may jump
    }
    if (even) {
      return {base, count, dim, Eigen::OuterStride<>(stride)};
    }
  }
  const std::ptrdiff_t stride = count > 1 ? row_of(first + 1).data - row_of(first).data : 0;
  for (index_t i = 0; i < count; ++i) {
    const auto row = row_of(first + i);
    prefetch_row(row.data, stride);
    to_floats(row, dim, buffer + std::ptrdiff_t{i} * dim);
  }
  return {buffer, count, dim, Eigen::OuterStride<>(dim)};
}

inline tile even_tile(const head_rows& l, index_t count, index_t dim) {
  return {reinterpret_cast<const float*>(l.data), count, dim,
          Eigen::OuterStride<>(l.row / std::ptrdiff_t{sizeof(float)})};
}

/// Keys `first` to `first + count` − 1; `buffer [count, dim]` as above.
inline tile load_keys(const head_ref& head, index_t first, index_t count, float* buffer) {
  const bool even = head.even_keys() && count <= head.rows_from(first);
  return head.type().keys == storage::f32 && even  // known without every address
             ? even_tile(head.keys_from(first), count, head.dim())
             : load_tile([&](index_t s) { return head.key(s); }, first, count, head.dim(), buffer);
}

/// ... values; `buffer [count, value_dim]`.
inline tile load_values(const head_ref& head, index_t first, index_t count, float* buffer) {
  const index_t dim = head.value_dim();
  const bool even = head.even_values() && count <= head.rows_from(first);
  return head.type().values == storage::f32 && even
             ? even_tile(head.values_from(first), count, dim)
             : load_tile([&](index_t s) { return head.value(s); }, first, count, dim, buffer);
}

inline namespace KVMELD_INSTRUCTIONS {

/// Slots `[rows, cols]` as a cache holds them, evenly spaced; as `tile` is for floats.
template <widens Scalar>
class held_tile {
 public:
  held_tile(const head_rows& l, index_t rows, index_t cols)
      : data_(reinterpret_cast<const Scalar*>(l.data)), row_(l.row), rows_(rows), cols_(cols) {}
  const Scalar* data() const { return data_; }
  Eigen::Index rows() const { return rows_; }
  Eigen::Index cols() const { return cols_; }
  friend std::ptrdiff_t bytes_apart(const held_tile& of) { return of.row_; }

 private:
  const Scalar* data_;
  std::ptrdiff_t row_;
  index_t rows_, cols_;
};

/// What rows are read as: what they are held as where they are evenly spaced, one by one floats
/// otherwise.
inline storage read_as(storage type, bool even) {
  const bool wide = (type == storage::f16 && widens<Eigen::half>) ||
                    (type == storage::bf16 && widens<Eigen::bfloat16>);
  return even && wide ? type : storage::f32;
}

/// Calls `use` with the first `count` rows of a head's keys or values: a `held_tile` of the storage
/// that they are read as, or for floats what `load` gives.
template <class Load, class Use>
void use_rows(storage read, const head_rows& l, index_t count, index_t dim, Load load, Use use) {
  const auto held = [&]<class Scalar>(Scalar) {
    if constexpr (widens<Scalar>) {
      use(held_tile<Scalar>(l, count, dim));
    } else {
      use(load());
    }
  };
  if (read == storage::f32) [[likely]] {
    use(load());
  } else if (read == storage::f16) {
    held(Eigen::half{});
  } else {
    held(Eigen::bfloat16{});
  }
}

}  // namespace KVMELD_INSTRUCTIONS

/// Floats of the longest row, the most that one buffer on the stack holds: no frame is larger than
/// 40 KiB.
inline constexpr index_t row_floats = 4096;
/// Slots at a time where a head's keys are read tile by tile, and the floats that these have.
inline constexpr index_t max_tile_slots = 64, tile_floats = row_floats;

/// Calls `use(first, tile)` for the keys of all slots, at most `max_tile_slots` at a time. Nothing
/// is allocated.
template <class Use>
KVMELD_NOINLINE void each_tile_of_keys(const head_ref& head, Use use) {
  float buffer[tile_floats];
  const index_t n = head.length(), dim = head.dim(),
                rows = std::clamp(tile_floats / dim, index_t{1}, max_tile_slots);
  for (index_t first = 0; first < n; first += rows) {
    use(first, load_keys(head, first, std::min(rows, n - first), buffer));
  }
}

}  // namespace kvmeld::inline v0::detail
