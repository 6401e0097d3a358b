/// A layer's keys and values in a storage that is chosen at run time.
#pragma once

#include <cstddef>  // std::size_t
#include <utility>  // std::move
#include <variant>

#include "kvmeld/kvmeld.hpp"

namespace evaluate {

using kvmeld::index_t;
using kvmeld::scalar_type;

/// A head of it: it has the rows of a `head_ref`, and takes tokens.
class stored_head : public kvmeld::head_ref {
 public:
  explicit stored_head(const kvmeld::head_ref& rows) : head_ref(rows) {}

  template <class T>
  void push(const T* key, const T* value) const {
    const index_t s = push_metadata();
    kvmeld::detail::store_row(key, this->key(s), dim());
    kvmeld::detail::store_row(value, this->value(s), dim());
  }

  using own_type = stored_head;
  const kvmeld::head_ref& ref() const { return *this; }
};

/// A `kv_cache`.
class stored_cache {
 public:
  /// Empty. Refused: a dim that is no whole blocks of the storage.
  stored_cache(const kvmeld::cache_shape& shape, scalar_type storage) : kv_(make(shape, storage)) {}
  explicit stored_cache(kvmeld::cache<float> kv) : kv_(std::move(kv)) {}

  kvmeld::cache_shape shape() const {
    return std::visit([](const auto& kv) { return kv.shape(); }, kv_);
  }
  index_t heads() const { return shape().heads; }
  stored_head head(index_t h) {
    return std::visit([&](auto& kv) { return stored_head(kv.head(h).ref()); }, kv_);
  }
  /// Of the slots in use.
  std::size_t bytes() {
    return std::visit([](auto& kv) { return kv.bytes(); }, kv_);
  }
  /// The same slots, each number rounded once.
  stored_cache in(scalar_type storage) {
    stored_cache to(shape(), storage);
    const auto copy = [](auto& from, auto& other) {
      for (index_t h = 0; h < from.heads(); ++h) {
        kvmeld::detail::copy_slots(from.head(h), other.head(h));
      }
    };
    std::visit(copy, kv_, to.kv_);
    return to;
  }

 private:
  using any = std::variant<kvmeld::cache<float>, kvmeld::cache<Eigen::half>,
                           kvmeld::cache<Eigen::bfloat16>, kvmeld::cache<kvmeld::q8_0>>;

  static any make(const kvmeld::cache_shape& shape, scalar_type storage) {
    switch (storage) {
      case scalar_type::float32:
        return kvmeld::cache<float>(shape);
      case scalar_type::half:
        return kvmeld::cache<Eigen::half>(shape);
      case scalar_type::bfloat16:
        return kvmeld::cache<Eigen::bfloat16>(shape);
      default:
        return kvmeld::cache<kvmeld::q8_0>(shape);
    }
  }

  any kv_;
};

static_assert(kvmeld::kv_cache<stored_cache>);

}  // namespace evaluate
