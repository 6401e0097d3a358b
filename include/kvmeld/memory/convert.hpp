// SPDX-License-Identifier: MIT
/// Rows as floats, at the width of a vector: one by one, as matrices (tiles), and numbers of any
/// scalar as engines hand them in.
#pragma once

#include <Eigen/Core>
#include <algorithm>   // std::copy_n, std::min, std::clamp
#include <bit>         // std::bit_cast
#include <concepts>    // std::same_as
#include <functional>  // std::less
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "kvmeld/memory/row.hpp"
#include "kvmeld/memory/view.hpp"

namespace kvmeld::inline v0::detail {
inline namespace KVMELD_INSTRUCTIONS {

using packet = Eigen::internal::packet_traits<float>::type;
inline constexpr index_t lanes = Eigen::internal::packet_traits<float>::size;

/// Number `i` of a row.
template <class Scalar>
float number(const Scalar* row, index_t i) {
  if constexpr (std::same_as<Scalar, float>) {
    return row[i];
  } else if constexpr (std::same_as<Scalar, Eigen::half>) {
    return half_bits_to_float(row[i].x);
  } else {
    return std::bit_cast<float>(std::uint32_t{row[i].value} << 16);  // of an Eigen::bfloat16
  }
}

// `[lanes]` numbers of a storage. Without an instruction for them there is none here.
EIGEN_ALWAYS_INLINE packet widened(const float* x) { return Eigen::internal::ploadu<packet>(x); }
#if defined(EIGEN_VECTORIZE_AVX512)
EIGEN_ALWAYS_INLINE packet widened(const Eigen::half* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
EIGEN_ALWAYS_INLINE packet widened(const Eigen::bfloat16* x) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
#elif defined(EIGEN_VECTORIZE_AVX2) && defined(__F16C__)
EIGEN_ALWAYS_INLINE packet widened(const Eigen::half* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
EIGEN_ALWAYS_INLINE packet widened(const Eigen::bfloat16* x) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
#elif defined(EIGEN_VECTORIZE_AVX) && defined(__F16C__)
EIGEN_ALWAYS_INLINE packet widened(const Eigen::half* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
#elif defined(EIGEN_VECTORIZE_SSE) && !defined(EIGEN_VECTORIZE_AVX)
EIGEN_ALWAYS_INLINE packet widened(const Eigen::bfloat16* x) {
  const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
  return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), bits));
}
#elif defined(EIGEN_VECTORIZE_NEON) && defined(__aarch64__)
EIGEN_ALWAYS_INLINE packet widened(const Eigen::half* x) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(x))));
}
EIGEN_ALWAYS_INLINE packet widened(const Eigen::bfloat16* x) {
  const uint16x4_t bits = vld1_u16(reinterpret_cast<const std::uint16_t*>(x));
  return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(bits), 16));
}
#endif

/// Storages whose numbers an instruction widens; others are converted one by one.
template <class Scalar>
concept widens = requires(const Scalar* x) {
  widened(x);
};

/// The element `bytes` after `x`: rows of any storage lie at any distance.
template <class T>
const T* behind(const T* x, std::ptrdiff_t bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<const std::byte*>(x) + bytes);
}

}  // namespace KVMELD_INSTRUCTIONS
}  // namespace kvmeld::inline v0::detail

namespace kvmeld::inline v0 {

inline namespace KVMELD_INSTRUCTIONS {

/// Copies `x [dim]` into `out` as floats: exact, whatever the storage.
template <class Scalar>
requires plain_scalar<std::remove_const_t<Scalar>>
void to_floats(row<Scalar> x, index_t dim, float* out) {
  using scalar = std::remove_const_t<Scalar>;
  if (x.step != 1) {
    for (index_t i = 0; i < dim; ++i) {
      out[i] = static_cast<float>(x[i]);
    }
  } else if constexpr (std::same_as<scalar, float>) {
    std::copy_n(x.data, dim, out);
  } else {
    index_t i = 0;
    if constexpr (detail::widens<scalar>) {
      for (; i + detail::lanes <= dim; i += detail::lanes) {
        Eigen::internal::pstoreu(out + i, detail::widened(x.data + i));
      }
    }
    for (; i < dim; ++i) {
      out[i] = detail::number(x.data, i);
    }
  }
}

/// Of a row in blocks, `x [dim]`, into `out [dim]`.
template <block_scalar Block>
void to_floats(row<Block> x, index_t dim, float* out) {
  for (index_t begin = 0; begin < dim; begin += Block::size) {
    float numbers[Block::size];  // local: bytes may alias what `out` points to
    x.data[begin / Block::size].to_floats(numbers);
    std::copy_n(numbers, std::min(dim - begin, Block::size), out + begin);
  }
}

/// ... of a row that is not floats side by side.
KVMELD_NOINLINE inline void convert_to_floats(const row<any_scalar>& x, index_t dim, float* out) {
  if (is_centred(x.type) && x.first == 0 && dim == x.dim) {
    detail::centred_to_floats(x, out);
  } else {
    x.visit([&](auto typed) { to_floats(typed, dim, out); });
  }
}
/// Of a row of any storage, `x [dim]`, into `out [dim]`.
inline void to_floats(row<any_scalar> x, index_t dim, float* out) {
  if (const float* const floats = detail::floats_in(x)) [[likely]] {
    std::copy_n(floats, dim, out);
  } else {
    convert_to_floats(x, dim, out);
  }
}

}  // namespace KVMELD_INSTRUCTIONS

/// The value of slot `s` as the model has it, `out [value_dim]`: rotated back where it is held
/// rotated.
inline void value_to_floats(const head_ref& head, index_t s, float* out) {
  to_floats(head.value(s), head.value_dim(), out);
  if (head.rotates_values()) {
    detail::hadamard(out, head.value_dim());
  }
}

namespace detail {

/// `from` in the storage of `to`: rounded once, to the nearest.
inline void convert_row(row<any_scalar> to, row<any_scalar> from, index_t dim) {
  float x[longest_row];
  to_floats(from, dim, x);
  store_row(x, to, dim);
}

/// All that `from` holds, and its lengths, to a head that has room for it. Rows that both have at
/// the same place stay where they are.
inline void copy_slots(const head_ref& from, const head_ref& to) {
  const auto copy = [](row<any_scalar> x, row<any_scalar> y, index_t dim) {
    if (x.type != y.type) {
      convert_row(x, y, dim);
    } else if (x.data != y.data) {
      copy_row(x, y, dim);
    }
  };
  const index_t length = from.length();
  if (to.metadata().length != from.metadata().length) {  // else the same head, by another table
    to.truncate(0);
    const index_t in_half = from.type().newest > 0 ? first_in_half : 0;  // whatever is rounded
    if (from.type().keys == to.type().keys && from.rounded() > in_half) {
      std::ranges::copy(from.key_mean(), to.key_mean().begin());
    } else {
      to.set_key_mean(
          length, [&](index_t s) { return from.position(s); },
          [&](index_t s, float* key) { to_floats(from.key(s), from.dim(), key); });
    }
    // Blocks that are copied as they are stay blocks.
    const bool rounded =
        from.type().newest > 0 || from.type() == storage_pair(to.type().keys, to.type().values);
    to.restore(length, from.next_position(), rounded ? from.rounded() : 0);
  }
  for (index_t s = 0; s < length; ++s) {
    to.log_mass(s) = from.log_mass(s), to.position(s) = from.position(s);
    copy(to.key(s), from.key(s), from.dim());
    if (from.rotates_values() == to.rotates_values() || to.one_memory()) {
      copy(to.value(s), from.value(s), to.own_value_dim());
    } else {
      float x[longest_row];
      value_to_floats(from, s, x);
      to.store_value(x, s);
    }
  }
}

}  // namespace detail

/// Numbers in float, half or bfloat16, read only; made of a `std::span` or a `std::vector` of them.
class any_span {
 public:
  any_span() = default;
  /// A view of `numbers`, which have to live as long.
  template <class R>
  requires plain_scalar<detail::element_of<const R>> any_span(
      const R& numbers)  // NOLINT: as std::span is made
      : data_(std::as_bytes(std::span(numbers)).data()),
        size_(std::span(numbers).size()),
        type_(storage_of<detail::element_of<const R>>) {}

  const std::byte* data() const { return data_; }                     ///< the first number's
  std::size_t size() const { return size_; }                          ///< numbers
  std::size_t bytes() const { return size_ * element_bytes(type_); }  ///< of all numbers

  /// Have the two a byte in common?
  bool overlaps(const any_span& other) const {
    const std::less<> before;
    return before(data_, other.data_ + other.bytes()) && before(other.data_, data_ + bytes());
  }

  /// Calls `f` with the span as what it is.
  template <class F>
  decltype(auto) visit(F&& f) const {
    if (type_ == storage::f32) {
      return f(as<float>());
    }
    return type_ == storage::f16 ? f(as<Eigen::half>()) : f(as<Eigen::bfloat16>());
  }

  /// Numbers `first` to `first + count` − 1 as floats: in place where they are, in `buffer [count]`
  /// otherwise.
  const float* floats(std::ptrdiff_t first, index_t count, float* buffer) const {
    return visit([&]<class Scalar>(std::span<const Scalar> all) -> const float* {
      if constexpr (std::same_as<Scalar, float>) {
        return all.data() + first;
      } else {
        to_floats(row<const Scalar>{all.data() + first}, count, buffer);
        return buffer;
      }
    });
  }

  /// ... in `out [count]`.
  void copy_floats(std::ptrdiff_t first, index_t count, float* out) const {
    visit([&]<class Scalar>(std::span<const Scalar> all) {
      to_floats(row<const Scalar>{all.data() + first}, count, out);
    });
  }

  /// All of them as floats.
  std::vector<float> all() const {
    return visit([](auto numbers) {
      std::vector<float> x(numbers.size());
      to_floats(row<const typename decltype(numbers)::value_type>{numbers.data()},
                static_cast<index_t>(x.size()), x.data());
      return x;
    });
  }

 private:
  template <plain_scalar Scalar>
  std::span<const Scalar> as() const {
    return {reinterpret_cast<const Scalar*>(data_), size_};
  }

  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  storage type_ = storage::f32;
};

namespace detail {

/// Refuses rows of another size than `shape` says, and null: "call: expected what [shape]".
inline void expect_size(const char* call, const char* what, const any_span& x,
                        std::initializer_list<index_t> shape) {
  std::size_t wanted = 1;
  for (const index_t n : shape) {
    wanted *= as_size(n);
  }
  if (x.size() == wanted && (wanted == 0 || x.data() != nullptr)) [[likely]] {
    return;
  }
  std::string axes;
  for (const index_t n : shape) {
    axes += (axes.empty() ? "" : ", ") + std::to_string(n);
  }
  expects(false, call, ": expected ", what, " [", axes, "] (", wanted, " numbers), got ",
          x.size() == wanted ? "null" : std::to_string(x.size()));
}

/// Refuses values where they are in the keys: there they are not given. `dim`: of values.
inline void expect_no_values(const char* call, bool one_memory, index_t dim, const any_span& v) {
  expects(!one_memory || v.size() == 0, call, ": expected no values (they are the first ", dim,
          " numbers of keys), got ", v.size(), " numbers");
}

}  // namespace detail

/// Refuses NaN and Inf, naming the first: an option of the cache (`check_finite`), one pass.
/// `expected`: "call: expected finite name".
inline void expect_finite(const char* expected, const any_span& x) {
  x.visit([&](auto numbers) {
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const auto number = static_cast<float>(numbers[i]);
      expects(errc::not_finite, std::isfinite(number), expected, ", got ", number, " at element ",
              i);
    }
  });
}

}  // namespace kvmeld::inline v0

namespace kvmeld::inline v0::detail {

/// Slots `[rows, dim]` in float.
using tile = Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>,
                        Eigen::Unaligned, Eigen::OuterStride<>>;

/// Rows between two prefetches.
inline constexpr index_t prefetch_distance = 8;

/// Prefetches the first lines of the row `prefetch_distance` rows after `row`: processors follow
/// sequential reads by themselves, but start anew at every page of memory.
template <class T>
void prefetch_row(const T* row, std::ptrdiff_t stride) {
  constexpr std::ptrdiff_t line = 64, lines = 4;
  for (std::ptrdiff_t i = 0; i < lines; ++i) {
    Eigen::internal::prefetch(behind(row, prefetch_distance * stride + i * line));
  }
}

inline namespace KVMELD_INSTRUCTIONS {

/// Fetches the line `ahead` bytes after `x` into the second cache. Called with the loads of a
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

/// Bytes from the row that a loop reads, of rows `stride` apart, to the one that it fetches
/// meanwhile: processors prefetch no further than a page of memory. `follows`: bytes from the first
/// row to the one that is read after the last; 0: that one follows the last, evenly spaced.
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

/// Are the two held alike, and so in one memory?
template <class Scalar>
bool same_storage(row<Scalar> a, row<Scalar> b) {
  if constexpr (std::same_as<Scalar, any_scalar>) {
    return a.type == b.type;
  } else {
    return true;
  }
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
  const bool alike = count > 1 && same_storage(row_of(first), row_of(first + 1));
  const std::ptrdiff_t stride = alike ? row_of(first + 1).data - row_of(first).data : 0;
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
EIGEN_ALWAYS_INLINE void use_rows(storage read, const head_rows& l, index_t count, index_t dim,
                                  Load load, Use use) {
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

/// The most floats that one buffer on the stack holds: no frame is larger than 40 KiB.
inline constexpr index_t row_floats = longest_row;
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
