/// Views of key-value memory: one KV head as policies read it, wherever the engine keeps it.
#pragma once

#include <algorithm>    // std::max
#include <cmath>        // std::isfinite
#include <concepts>     // std::same_as
#include <cstddef>      // std::ptrdiff_t
#include <type_traits>  // std::is_trivially_copyable_v
#include <utility>      // std::declval

#include "kvmeld/config.hpp"
#include "kvmeld/memory/head_ref.hpp"
#include "kvmeld/memory/layout.hpp"
#include "kvmeld/memory/row.hpp"

namespace kvmeld {
inline namespace v0 {

/// One KV head's slots. `[capacity]` rows of keys and values, a log-mass and a position per slot;
/// the first `length()` are in use. The order of slots means nothing to attention.
///
/// A view: trivially copyable, does not own, and shallow const as std::span is.
template <storage_scalar Scalar>
class head_view : public head_base {
 public:
  using scalar = Scalar;

  /// `keys`, `values`: of this head alone.
  head_view(const layout<Scalar>& keys, const layout<Scalar>& values, const slot_metadata& slots,
            index_t capacity, const attention_spec& spec)
      : head_base(slots, capacity, spec), keys_(keys), values_(values) {}

  row<Scalar> key(index_t s) const { return at(keys_, s); }
  row<Scalar> value(index_t s) const { return at(values_, s); }

  /// Appends one token `[dim]` at the next position, with log-mass 0.
  template <class T>
  void push(const T* key, const T* value) const {
    const index_t s = push_metadata();
    detail::store_row(key, this->key(s), dim());
    detail::store_row(value, this->value(s), dim());
  }

  using own_type = head_view;
  head_ref ref() const { return {*this, scalar_type_of<Scalar>, keys_.bytes(), values_.bytes()}; }

 private:
  static row<Scalar> at(const layout<Scalar>& l, index_t s) { return {l.slot(s), l.element}; }

  layout<Scalar> keys_, values_;
};

static_assert(std::is_trivially_copyable_v<head_view<float>>);

/// One KV head, as policies see it. `head_view` models it; a paged view may too.
template <class H>
concept kv_head = (storage_scalar<typename H::scalar> ||
                   std::same_as<typename H::scalar, any_scalar>)&&requires(const H& head,
                                                                           index_t s) {
  { head.length() } -> std::same_as<index_t>;
  { head.capacity() } -> std::same_as<index_t>;
  { head.dim() } -> std::same_as<index_t>;
  { head.group() } -> std::same_as<index_t>;
  { head.tokens_total() } -> std::same_as<index_t>;
  { head.scale() } -> std::same_as<float>;
  { head.check_finite() } -> std::same_as<bool>;
  { head.spec() } -> std::same_as<const attention_spec&>;
  { head.key(s) } -> std::same_as<row<typename H::scalar>>;
  { head.value(s) } -> std::same_as<row<typename H::scalar>>;
  { head.log_mass(s) } -> std::same_as<float&>;
  { head.position(s) } -> std::same_as<index_t&>;
  head.truncate(s);
};

static_assert(kv_head<head_ref>);

namespace detail {

/// The head as a `head_ref` where its type says how (`ref`), else, as an engine's own type, as it
/// is. What inherits from a view may have rows of its own: `own_type` tells.
template <class H>
decltype(auto) erased(const H& head) {
  if constexpr (requires { requires std::same_as<typename H::own_type, H>; }) {
    return head.ref();
  } else {
    return (head);
  }
}
template <class H>
using erased_head = std::remove_cvref_t<decltype(erased(std::declval<const H&>()))>;

/// Is it a view that `erased` makes another type of?
template <class H>
concept erasable = !std::same_as<erased_head<H>, H>;

}  // namespace detail

/// What a plan can be carried out on: rows of any storage that `merge_rows` and `copy_row` know, a
/// log-mass and a position for each. Every `kv_head` is one; so is a second cache in int8.
template <class H>
concept slot_rows = requires(const H& head, index_t s) {
  { head.length() } -> std::same_as<index_t>;
  { head.dim() } -> std::same_as<index_t>;
  { head.key(s) } -> std::same_as<decltype(head.value(s))>;
  { head.log_mass(s) } -> std::same_as<float&>;
  { head.position(s) } -> std::same_as<index_t&>;
  head.truncate(s);
};

/// All KV heads (batch × layer × KV head, flattened) of one shape, each with its own length.
template <class C>
concept kv_cache = requires(C& cache, index_t h) {
  { cache.heads() } -> std::same_as<index_t>;
  { cache.head(h) } -> kv_head;
};

/// The latest position a head holds; -1 when it is empty. Recency is measured from here.
index_t newest_position(const kv_head auto& head) {
  index_t newest = -1;
  for (index_t s = 0; s < head.length(); ++s) {
    newest = std::max(newest, head.position(s));
  }
  return newest;
}

namespace detail {

/// `from` in the storage of `to`: rounded once, to the nearest.
template <class To, class From>
void convert_row(row<To> to, row<From> from, index_t dim) {
  constexpr index_t chunk = 64;  // whole blocks
  float x[chunk];
  for (index_t begin = 0; begin < dim; begin += chunk) {
    const index_t n = std::min(chunk, dim - begin);
    to_floats(from.from(begin), n, x);
    store_row(x, to.from(begin), n);
  }
}

/// All that `from` holds, and its lengths, to a head that has room for it. Rows that both have at
/// the same place stay where they are.
void copy_slots(const kv_head auto& from, const kv_head auto& to) {
  const auto copy_or_convert = [dim = from.dim()]<class To, class From>(row<To> x, row<From> y) {
    if constexpr (std::same_as<To, From>) {
      if (x.data != y.data) {
        copy_row(x, y, dim);
      }
    } else {
      convert_row(x, y, dim);
    }
  };
  to.restore(from.length(), from.tokens_total());
  for (index_t s = 0; s < from.length(); ++s) {
    copy_or_convert(to.key(s), from.key(s));
    copy_or_convert(to.value(s), from.value(s));
    to.log_mass(s) = from.log_mass(s);
    to.position(s) = from.position(s);
  }
}

/// Refuses slots `from` to `to` − 1 of a head in pages that has no pages for them.
void expect_pages(const kv_head auto& head, index_t from, index_t to) {
  if constexpr (requires { head.expect_pages(from, to); }) {
    head.expect_pages(from, to);
  }
}

}  // namespace detail

/// Refuses NaN and Inf, naming the first: an option of the cache (`check_finite`), one pass.
/// `expected`: "call: expected finite name".
template <class T>
void expect_finite(const char* expected, const T* data, std::ptrdiff_t count) {
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    const auto x = static_cast<float>(data[i]);
    expects(errc::not_finite, std::isfinite(x), expected, ", got ", x, " at element ", i);
  }
}

}  // namespace v0
}  // namespace kvmeld
