// SPDX-License-Identifier: MIT
/// Models of `kv_cache`: one that owns its memory, and one over an engine's.
#pragma once

#include <span>
#include <vector>

#include "kvmeld/memory/cache_base.hpp"

namespace kvmeld {
inline namespace v0 {

/// How large a cache with memory of its own is, and what it holds keys and values as.
struct cache_options {
  index_t layers = 1;
  index_t requests = 1;
  index_t capacity = 0;  ///< slots per head
  storage keys = storage::f32;
  storage values = storage::f32;
};

/// Keys and values of all heads, `[heads, capacity, dim]`, owned.
///
///     kvmeld::cache kv(spec, {.layers = 32, .requests = 8, .capacity = 4096});
///     kv.append(kv.heads(layer, request), k, v, tokens);   // [tokens, kv_heads, dim] each
///
/// `spec`: of all layers, or a span with one for each, of which rope and scale may differ.
/// Refused: shapes that cannot be, keys and values of different storage (`unsupported`), a dim that
/// is no whole blocks.
class cache : public cache_base {
 public:
  cache(const attention_spec& spec, const cache_options& o) : cache(std::span(&spec, 1), o) {}
  cache(std::span<const attention_spec> specs, const cache_options& o)
      : cache_base(checked(specs, {o.layers, o.requests, o.capacity}),
                   {o.layers, o.requests, o.capacity}, o.keys) {
    expects(errc::unsupported, o.keys == o.values,
            "cache: expected keys and values of one storage (not carried out by this version), got "
            "two");
    expects(spec().key_dim % numbers_of(o.keys) == 0,
            "cache: expected a key_dim that is a "
            "multiple of ",
            numbers_of(o.keys), ", got ", spec().key_dim);
    memory_.resize(2 * one_side());
    place();
  }
  cache(const cache& other) : cache_base(other), memory_(other.memory_) { place(); }
  cache(cache&&) noexcept = default;
  cache& operator=(const cache& other) {
    cache copy = other;
    return *this = std::move(copy);
  }
  cache& operator=(cache&&) noexcept = default;
  ~cache() = default;

  /// Moves all heads to memory of `capacity` slots each and frees the old: views of heads are
  /// invalid afterwards. Of a cache that a compressor has, that one's states shrink with it.
  /// Refused, with nothing changed: more slots than there are, fewer than a head holds.
  void shrink(index_t capacity) {
    expects(capacity > 0 && capacity <= this->capacity(), "shrink: expected a capacity of 1 to ",
            this->capacity(), " slots, got ", capacity);
    for (index_t h = 0; h < heads(); ++h) {
      expects(errc::no_capacity, head(h).length() <= capacity,
              "shrink: expected a capacity of at least ", head(h).length(), " slots, got ",
              capacity);
    }
    std::vector<attention_spec> specs;
    specs.reserve(static_cast<std::size_t>(layers()));
    for (index_t l = 0; l < layers(); ++l) {
      specs.push_back(spec(l));
    }
    cache to(specs, {layers(), requests(), capacity, type(), type()});
    for (index_t h = 0; h < heads(); ++h) {
      detail::copy_slots(head(h), to.head(h));
    }
    *this = std::move(to);
  }
  /// The same for a cache that `meld` compresses, as after a prompt that it has compressed:
  /// `kv.shrink(meld, 96)`.
  template <class Compressor>
  void shrink(Compressor& meld, index_t capacity) {
    meld.shrink(*this, capacity);
  }

 private:
  std::size_t one_side() const {
    return static_cast<std::size_t>(heads()) * static_cast<std::size_t>(capacity()) *
           row_bytes(type(), spec().key_dim);
  }
  void place() {
    const auto row = static_cast<std::ptrdiff_t>(row_bytes(type(), spec().key_dim)),
               element = static_cast<std::ptrdiff_t>(element_bytes(type())),
               head = capacity() * row, request = kv_heads() * head;
    const auto at = [&](std::byte* data) {
      return placed_rows{data, requests() * request, request, head, {data, row, element}};
    };
    set_rows(at(memory_.data()), at(memory_.data() + one_side()));
  }

  std::vector<std::byte> memory_;  // keys, then values
};

/// A `kv_cache` over an engine's own keys and values; log-mass, positions and lengths are kept
/// here. Tokens that are already in the engine's memory are taken in with `commit`.
///
///     kvmeld::strided_cache over(spec, {.layers = 1, .requests = 1, .capacity = cells},
///                                kvmeld::rows(k, kvmeld::layout::nhd),
///                                kvmeld::rows(v, kvmeld::layout::nhd));
///
/// Movable, not copyable: two views of the same rows would each count their own slots. Refused: as
/// of `cache`, and memory that is too small for the layout, or in which rows overlap.
class strided_cache : public cache_base {
 public:
  strided_cache(const attention_spec& spec, const cache_extents& extents, const rows& keys,
                const rows& values)
      : strided_cache(std::span(&spec, 1), extents, keys, values) {}
  strided_cache(std::span<const attention_spec> specs, const cache_extents& extents,
                const rows& keys, const rows& values)
      : cache_base(checked(specs, extents), extents, keys.type()) {
    expects(errc::unsupported, keys.type() == values.type(),
            "strided_cache: expected keys and values of one storage (not carried out by this "
            "version), got two");
    index_t pages = 0;
    const placed_rows of_keys =
        detail::place_rows("strided_cache", "keys", keys, spec(), extents, 0, pages);
    set_rows(of_keys,
             detail::place_rows("strided_cache", "values", values, spec(), extents, 0, pages));
  }

  strided_cache(const strided_cache&) = delete;
  strided_cache& operator=(const strided_cache&) = delete;
  strided_cache(strided_cache&&) noexcept = default;
  strided_cache& operator=(strided_cache&&) noexcept = default;
  ~strided_cache() = default;
};

}  // namespace v0
}  // namespace kvmeld
