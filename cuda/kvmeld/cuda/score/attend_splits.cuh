// SPDX-License-Identifier: MIT
/// Decode attention with log-mass, split over the sequence: the first launch of a step.
#pragma once

#include "kvmeld/cuda/score/attend_rows.cuh"
#include "kvmeld/cuda/score/attend_tiles.cuh"

namespace kvmeld::cuda::detail {

/// Can the tensor cores take these rows?
template <class Scalar>
bool fits_tiles(const cache_view<Scalar>& cache) {
  return sizeof(Scalar) == 2 && cache.dim % 8 == 0 && cache.aligned();
}
template <class Scalar, class Masses>
bool fits_tiles(const attention_call<Scalar, Masses>& call) {
  const auto at = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p); };
  return fits_tiles(call.cache) && at(call.fresh.keys) % 16 == 0 &&
         at(call.fresh.values) % 16 == 0 && at(call.queries) % 4 == 0;
}

template <template <class, index_t> class Compared, class Scalar, class Masses>
void attend_on_tiles(const attention_call<Scalar, Masses>& call, stream stream) {
  const extent blocks{call.cache.blocks(), blocks_of(call.to.splits)};
  with_depth<64, 128, 256>(call.cache.dim, [&](auto depth) {
    if (call.cache.group <= 8) {
      launch(attend_tiles<Scalar, decltype(depth)::value, 1, Masses, Compared>{call}, blocks,
             stream);
    } else {
      launch(attend_tiles<Scalar, decltype(depth)::value, 2, Masses, Compared>{call}, blocks,
             stream);
    }
  });
}

template <index_t Packs, index_t Heads, class Scalar, class Masses>
void attend_sweeps(const attention_call<Scalar, Masses>& call, stream stream) {
  const auto sweeps = blocks_of(call.cache.group, Heads);
  launch(attend_rows<Scalar, Packs, Heads, Masses>{call, lanes_of<Scalar>(call.cache.dim, Packs),
                                                   call.cache.aligned()},
         {call.cache.blocks(), blocks_of(call.to.splits), sweeps}, stream);
}

/// `Compared`: what is most like each of `call.to.predicted` too, where that is not null; the
/// tensor cores must be able to take the rows then.
template <template <class, index_t> class Compared, class Scalar, class Masses>
void attend_splits(const attention_call<Scalar, Masses>& call, stream stream) {
  const index_t dim = call.cache.dim;
  if constexpr (sizeof(Scalar) == 2) {
    if constexpr (Compared<Scalar, 64>::compares) {
      if (call.to.predicted != nullptr) {
        return attend_on_tiles<Compared>(call, stream);
      }
    }
    if (fits_tiles(call)) {
      return attend_on_tiles<nothing_compared>(call, stream);
    }
  } else if (dim > 128) {
    return attend_sweeps<2, 4>(call, stream);
  }
  attend_sweeps<1, 4>(call, stream);
}

}  // namespace kvmeld::cuda::detail
