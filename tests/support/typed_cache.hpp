// SPDX-License-Identifier: MIT
// Caches whose scalar is a type, as most tests write them, of a model that rotates its keys.
#pragma once

#include <vector>

#include "kvmeld/memory/cache.hpp"

namespace fixtures {

using kvmeld::index_t;

/// The rotation that the oracles have too, where a test names no other.
inline const kvmeld::rotary default_rope = kvmeld::rotary::halves(10'000);

/// The shape of a cache of one layer and one request.
struct cache_shape {
  index_t heads = 0;
  index_t group = 1;
  index_t dim = 0;
  index_t capacity = 0;
  float scale = 0;
  kvmeld::rotary rope = {};  ///< none: `default_rope`
  bool check_finite = false;
  index_t value_dim = 0;  ///< 0: `dim`
  float soft_cap = 0;
  std::vector<float> sink_logits = {};   ///< [heads · group]
  std::vector<float> alibi_slopes = {};  ///< [heads · group]
  index_t window = 0;

  kvmeld::attention_spec spec() const {
    return {.kv_heads = heads,
            .group = group,
            .key_dim = dim,
            .value_dim = value_dim,
            .scale = scale,
            .rope = rope.rotates() ? rope : default_rope,
            .soft_cap = soft_cap,
            .sink_logits = sink_logits,
            .alibi_slopes = alibi_slopes,
            .window = window,
            .check_finite = check_finite};
  }
  kvmeld::cache_extents extents() const { return {.capacity = capacity}; }
};

/// A head whose rows have a scalar that is known when compiled.
template <class Scalar>
class head_view : public kvmeld::head_ref {
 public:
  using scalar = Scalar;

  explicit head_view(const kvmeld::head_ref& head) : head_ref(head) {}
  kvmeld::row<Scalar> key(index_t s) const { return head_ref::key(s).template as<Scalar>(); }
  kvmeld::row<Scalar> value(index_t s) const { return head_ref::value(s).template as<Scalar>(); }
};

/// What `Cache` gives, with rows of `Scalar`, and `[tokens, dim]` appended to one head.
template <class Cache, class Scalar>
class typed : public Cache {
 public:
  using scalar = Scalar;

  template <class... Args>
  explicit typed(const cache_shape& shape, const Args&... args)
      : Cache(shape.spec(), args...), shape_(shape) {
    shape_.rope = this->spec().rope, shape_.scale = this->spec().scale;
  }

  cache_shape shape() const {
    cache_shape now = shape_;
    now.capacity = this->capacity();
    return now;
  }
  head_view<Scalar> head(index_t h) { return head_view<Scalar>(Cache::head(h)); }
  using Cache::append;
  template <class T>
  void append(index_t h, std::span<const T> keys, std::span<const T> values) {
    const auto dim = static_cast<std::size_t>(shape_.dim);
    Cache::append(kvmeld::head_range{h, 1}, keys, values,
                  static_cast<index_t>((keys.size() + dim - 1) / dim));
  }
  template <class T>
  void append(index_t h, const std::vector<T>& keys, const std::vector<T>& values) {
    append(h, std::span<const T>(keys), std::span<const T>(values));
  }
  using Cache::commit;
  void commit(index_t h, index_t tokens) { Cache::commit(kvmeld::head_range{h, 1}, tokens); }

 private:
  cache_shape shape_;
};

template <class Scalar>
struct cache : typed<kvmeld::cache, Scalar> {
  explicit cache(const cache_shape& shape)
      : typed<kvmeld::cache, Scalar>(shape,
                                     kvmeld::cache_options{.capacity = shape.capacity,
                                                           .keys = kvmeld::storage_of<Scalar>,
                                                           .values = kvmeld::storage_of<Scalar>}) {}
};

/// Strides of rows of `Scalar`, in elements: `data` is those of the first head.
template <class Scalar>
struct layout {
  Scalar* data = nullptr;
  std::ptrdiff_t head = 0;
  std::ptrdiff_t row = 0;
  std::ptrdiff_t element = 1;
  std::ptrdiff_t page = 0;

  static layout token_head_dim(Scalar* data, index_t heads, index_t dim) {
    const index_t size = kvmeld::row_size<Scalar>(dim);
    return {data, size, std::ptrdiff_t{heads} * size};
  }
  static layout head_token_dim(Scalar* data, index_t capacity, index_t dim) {
    const index_t size = kvmeld::row_size<Scalar>(dim);
    return {data, std::ptrdiff_t{capacity} * size, size};
  }
  static layout head_dim_token(Scalar* data, index_t capacity, index_t dim) {
    return {data, std::ptrdiff_t{capacity} * dim, 1, capacity};
  }
  static layout page_slot_head_dim(Scalar* data, index_t slots, index_t heads, index_t dim) {
    const index_t size = kvmeld::row_size<Scalar>(dim);
    const std::ptrdiff_t row = std::ptrdiff_t{heads} * size;
    return {data, size, row, 1, slots * row};
  }
  static layout page_head_slot_dim(Scalar* data, index_t slots, index_t heads, index_t dim) {
    const index_t size = kvmeld::row_size<Scalar>(dim);
    const std::ptrdiff_t head = std::ptrdiff_t{slots} * size;
    return {data, head, size, 1, heads * head};
  }

  /// How much memory there is these tests do not say: `cache_test` does.
  kvmeld::rows rows() const {
    return {std::span<Scalar>(data, std::size_t{1} << (page == 0 ? 40 : 20)),
            kvmeld::strides{.head = head, .row = row, .element = element, .page = page}};
  }
};

template <class Scalar>
struct strided_view : typed<kvmeld::strided_cache, Scalar> {
  strided_view(const cache_shape& shape, const layout<Scalar>& keys, const layout<Scalar>& values)
      : typed<kvmeld::strided_cache, Scalar>(shape, shape.extents(), keys.rows(), values.rows()) {}
};

struct page_table {
  index_t* pages = nullptr;
  index_t slots = 0;
  std::ptrdiff_t head = 0;  ///< stride, head to head; 0: all heads share one table

  static constexpr index_t no_page = kvmeld::page_table::no_page;
};

template <class Scalar>
struct paged_view : typed<kvmeld::paged_cache, Scalar> {
  paged_view(const cache_shape& shape, const layout<Scalar>& keys, const layout<Scalar>& values,
             const page_table& table)
      : typed<kvmeld::paged_cache, Scalar>(shape, shape.extents(), keys.rows(), values.rows(),
                                           tables(shape, table)) {}

 private:
  static kvmeld::page_tables tables(const cache_shape& shape, const page_table& t) {
    const std::ptrdiff_t one = t.slots > 0 ? shape.capacity / t.slots : 0;
    const auto size = static_cast<std::size_t>(t.head == 0 ? one : t.head * shape.heads);
    return {std::span<index_t>(t.pages, size), t.slots, t.head};
  }
};

}  // namespace fixtures
