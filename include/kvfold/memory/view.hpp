/// Views of key-value memory: one KV head as policies read it, wherever the engine keeps it.
#pragma once

#include <Eigen/Core>   // Eigen::half, Eigen::bfloat16
#include <algorithm>    // std::copy_n, std::min, std::transform
#include <cmath>        // std::isfinite
#include <concepts>     // std::same_as
#include <cstddef>      // std::ptrdiff_t
#include <limits>       // std::numeric_limits
#include <type_traits>  // std::is_trivially_copyable_v

#include "kvfold/config.hpp"

namespace kvfold {
inline namespace v0 {

/// Element types of keys and values. Arithmetic is done in float whatever the storage.
template <class T>
concept storage_scalar =
    std::same_as<T, float> || std::same_as<T, Eigen::half> || std::same_as<T, Eigen::bfloat16>;

/// One key or one value: `dim` elements, `step` apart.
template <class Scalar>
struct row {
  Scalar* data;
  std::ptrdiff_t step = 1;

  constexpr Scalar& operator[](index_t i) const { return data[i * step]; }
};

namespace detail {

/// Writes `from [dim]`; contiguous rows, the usual ones, at the width of a vector.
template <class T, class Scalar>
void store_row(const T* from, row<Scalar> to, index_t dim) {
  const auto convert = [](T x) { return static_cast<Scalar>(x); };
  if (to.step == 1) {
    std::transform(from, from + dim, to.data, convert);
  } else {
    for (index_t i = 0; i < dim; ++i) {
      to[i] = convert(from[i]);
    }
  }
}

template <class Scalar>
void copy_row(row<Scalar> to, row<Scalar> from, index_t dim) {
  if (to.step == 1 && from.step == 1) {
    std::copy_n(from.data, dim, to.data);
    return;
  }
  for (index_t i = 0; i < dim; ++i) {
    to[i] = from[i];
  }
}

}  // namespace detail

/// What a KV head keeps beside its rows. A view of memory that the engine or a cache owns.
struct slot_metadata {
  float* log_mass = nullptr;        ///< [capacity]
  index_t* position = nullptr;      ///< [capacity]
  index_t* length = nullptr;        ///< slots in use
  index_t* tokens_total = nullptr;  ///< tokens ever appended: the next token's position
};

struct head_shape {
  index_t capacity = 0;
  index_t dim = 0;
  index_t group = 1;          ///< query heads that share this KV head
  float scale = 1;            ///< logit = scale · q·k + log-mass
  bool check_finite = false;  ///< refuse NaN and Inf in what comes in, for one more pass over it
};

/// A KV head without its rows, wherever these lie: a log-mass and a position per slot, lengths, and
/// its shape. A view, as those of heads are that start from it.
class head_base {
 public:
  head_base(const slot_metadata& slots, const head_shape& shape) : slots_(slots), shape_(shape) {}

  index_t length() const { return *slots_.length; }
  index_t tokens_total() const { return *slots_.tokens_total; }
  index_t capacity() const { return shape_.capacity; }
  index_t dim() const { return shape_.dim; }
  index_t group() const { return shape_.group; }
  float scale() const { return shape_.scale; }
  bool check_finite() const { return shape_.check_finite; }

  float& log_mass(index_t s) const { return slots_.log_mass[s]; }
  index_t& position(index_t s) const { return slots_.position[s]; }

  /// Keeps the first `length` slots. Only ever shortens; `push` lengthens.
  void truncate(index_t length) const {
    expects(length >= 0 && length <= *slots_.length, "truncate: 0 to ", *slots_.length,
            " slots expected, ", length, " came");
    *slots_.length = length;
  }

  /// Sets both lengths, for slots whose contents come from outside: `load` writes them next.
  void restore(index_t length, index_t tokens_total) const {
    expects(length >= 0 && length <= capacity() && length <= tokens_total, "restore: 0 to ",
            std::min(capacity(), tokens_total), " slots expected, ", length, " came");
    *slots_.length = length;
    *slots_.tokens_total = tokens_total;
  }

  /// The next slot, at the next position, with log-mass 0; its rows are the caller's to write.
  index_t push_metadata() const {
    expects(errc::no_capacity, length() < capacity(), "push: all ", capacity(),
            " slots are in use");
    expects(errc::no_capacity, tokens_total() < std::numeric_limits<index_t>::max(),
            "push: positions end at int32");
    const index_t s = (*slots_.length)++;
    log_mass(s) = 0.0F;
    position(s) = (*slots_.tokens_total)++;
    return s;
  }

 private:
  slot_metadata slots_;
  head_shape shape_;
};

/// One KV head's slots. `[capacity]` rows of keys and values, a log-mass and a position per slot;
/// the first `length()` are in use. The order of slots means nothing to attention.
///
/// A view: trivially copyable, does not own, and shallow const as std::span is.
template <storage_scalar Scalar>
class head_view : public head_base {
 public:
  using scalar = Scalar;

  /// Where rows lie, in elements: slot `s`, element `i` at `data[s * row + i * element]`.
  struct plane {
    Scalar* data = nullptr;
    std::ptrdiff_t row = 0;
    std::ptrdiff_t element = 1;
  };

  head_view(plane keys, plane values, const slot_metadata& slots, const head_shape& shape)
      : head_base(slots, shape), keys_(keys), values_(values) {}

  row<Scalar> key(index_t s) const { return at(keys_, s); }
  row<Scalar> value(index_t s) const { return at(values_, s); }

  /// Appends one token `[dim]` at the next position, with log-mass 0.
  template <class T>
  void push(const T* key, const T* value) const {
    const index_t s = push_metadata();
    detail::store_row(key, this->key(s), dim());
    detail::store_row(value, this->value(s), dim());
  }

 private:
  static row<Scalar> at(const plane& p, index_t s) { return {p.data + s * p.row, p.element}; }

  plane keys_, values_;
};

static_assert(std::is_trivially_copyable_v<head_view<float>>);

/// One KV head, as policies see it. `head_view` models it; a paged view may too.
template <class H>
concept kv_head = storage_scalar<typename H::scalar> && requires(const H& head, index_t s) {
  { head.length() } -> std::same_as<index_t>;
  { head.capacity() } -> std::same_as<index_t>;
  { head.dim() } -> std::same_as<index_t>;
  { head.group() } -> std::same_as<index_t>;
  { head.tokens_total() } -> std::same_as<index_t>;
  { head.scale() } -> std::same_as<float>;
  { head.check_finite() } -> std::same_as<bool>;
  { head.key(s) } -> std::same_as<row<typename H::scalar>>;
  { head.value(s) } -> std::same_as<row<typename H::scalar>>;
  { head.log_mass(s) } -> std::same_as<float&>;
  { head.position(s) } -> std::same_as<index_t&>;
  head.truncate(s);
};

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

/// All that `from` holds, and its lengths, to a head that has room for it. Rows that both have at
/// the same place stay where they are.
void copy_slots(const kv_head auto& from, const kv_head auto& to) {
  to.restore(from.length(), from.tokens_total());
  for (index_t s = 0; s < from.length(); ++s) {
    if (to.key(s).data != from.key(s).data) {
      copy_row(to.key(s), from.key(s), from.dim());
    }
    if (to.value(s).data != from.value(s).data) {
      copy_row(to.value(s), from.value(s), from.dim());
    }
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
template <class T>
void expect_finite(const char* what, const T* data, std::ptrdiff_t count) {
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    const auto x = static_cast<float>(data[i]);
    expects(std::isfinite(x), what, ": finite numbers expected, ", x, " came at element ", i);
  }
}

}  // namespace v0
}  // namespace kvfold
