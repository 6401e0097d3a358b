// Caches whose scalar is a type, as most tests write them, of a model that rotates its keys.
#pragma once

#include "kvmeld/memory/cache.hpp"
#include "kvmeld/memory/paged.hpp"

namespace fixtures {

/// The rotation that the oracles have too, where a test names no other.
inline const kvmeld::rotary default_rope = kvmeld::rotary::halves(10'000);

/// `shape`, of a model that rotates.
inline kvmeld::cache_shape rotated(kvmeld::cache_shape shape) {
  shape.rope = shape.rope.rotates() ? shape.rope : default_rope;
  return shape;
}

template <class Scalar>
struct cache : kvmeld::cache<Scalar> {
  explicit cache(const kvmeld::cache_shape& shape) : kvmeld::cache<Scalar>(rotated(shape)) {}
};

template <class Scalar>
struct strided_view : kvmeld::strided_view<Scalar> {
  strided_view(const kvmeld::cache_shape& shape, const kvmeld::layout<Scalar>& keys,
               const kvmeld::layout<Scalar>& values)
      : kvmeld::strided_view<Scalar>(rotated(shape), keys, values) {}
};

template <class Scalar>
struct paged_view : kvmeld::paged_view<Scalar> {
  paged_view(const kvmeld::cache_shape& shape, const kvmeld::layout<Scalar>& keys,
             const kvmeld::layout<Scalar>& values, const kvmeld::page_table& table)
      : kvmeld::paged_view<Scalar>(rotated(shape), keys, values, table) {}
};

}  // namespace fixtures
