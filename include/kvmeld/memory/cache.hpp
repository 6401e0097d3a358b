/// Models of `kv_cache`: one that owns its memory, and one over an engine's.
#pragma once

#include <algorithm>  // std::ranges::sort
#include <cstddef>    // std::size_t
#include <limits>     // std::numeric_limits
#include <memory>     // std::shared_ptr
#include <span>
#include <vector>

#include "kvmeld/memory/layout.hpp"
#include "kvmeld/memory/view.hpp"

namespace kvmeld {
inline namespace v0 {

/// The shape of a cache, in one place.
struct cache_shape {
  index_t heads = 0;          ///< batch × layer × KV head, flattened
  index_t group = 1;          ///< query heads per KV head (GQA); 1: multi-head attention
  index_t dim = 0;            ///< of a head
  index_t capacity = 0;       ///< slots per head
  float scale = 0;            ///< of the logits; 0: 1/sqrt(dim)
  rotary rope = {};           ///< of keys and queries; none by default
  bool check_finite = false;  ///< refuse NaN and Inf in queries, keys and values; costs a pass
};

namespace detail {

/// `shape`, if its rows are a whole number of `Scalar`s.
template <storage_scalar Scalar>
const cache_shape& in_whole_blocks(const cache_shape& shape) {
  expects(shape.dim % numbers_in<Scalar> == 0, "cache: expected a dim that is a multiple of ",
          numbers_in<Scalar>, ", got ", shape.dim);
  return shape;
}

}  // namespace detail

/// The parts of a cache that an engine has no place for: log-mass, position, lengths.
class cache_metadata {
 public:
  explicit cache_metadata(const cache_shape& shape)
      : shape_(checked(shape)), spec_(spec_of(shape_)) {
    shape_.scale = spec_->scale;
    const auto heads = static_cast<std::size_t>(shape.heads);
    const std::size_t slots = heads * static_cast<std::size_t>(shape.capacity);
    log_mass_.resize(slots);
    position_.resize(slots);
    length_.resize(heads);
    seen_.resize(heads);
  }

  const cache_shape& shape() const { return shape_; }

  slot_metadata of(index_t h) {
    expects(h >= 0 && h < shape_.heads, "head: expected 0 to ", shape_.heads - 1, ", got ", h);
    const auto first = static_cast<std::size_t>(h) * static_cast<std::size_t>(shape_.capacity);
    return {log_mass_.data() + first, position_.data() + first,
            &length_[static_cast<std::size_t>(h)], &seen_[static_cast<std::size_t>(h)]};
  }

  /// Slots for `tokens` rows that head `h`'s engine wrote behind those in use.
  void adopt(index_t h, index_t tokens) {
    const auto slots = of(h);
    expects(tokens >= 0, "adopt: expected at least 0 tokens, got ", tokens);
    expects(errc::no_capacity, tokens <= shape_.capacity - *slots.length,
            "adopt: expected at most ", shape_.capacity - *slots.length, " tokens, got ", tokens);
    expects(errc::no_capacity, tokens <= std::numeric_limits<index_t>::max() - *slots.tokens_total,
            "adopt: expected at most ", std::numeric_limits<index_t>::max(),
            " tokens in total, got ", std::int64_t{*slots.tokens_total} + tokens);
    for (index_t i = 0; i < tokens; ++i) {
      slots.log_mass[*slots.length] = 0.0F;
      slots.position[(*slots.length)++] = (*slots.tokens_total)++;
    }
  }

  /// What the model computes in the layers of these heads; stays where it is when this moves.
  const attention_spec& spec() const { return *spec_; }

 private:
  static cache_shape checked(const cache_shape& s) {
    expects(s.capacity > 0, "cache: expected a capacity of at least 1 slot, got ", s.capacity);
    return s;
  }
  static std::shared_ptr<const attention_spec> spec_of(const cache_shape& s) {
    return std::make_shared<const attention_spec>(attention_spec{.kv_heads = s.heads,
                                                                 .group = s.group,
                                                                 .key_dim = s.dim,
                                                                 .scale = s.scale,
                                                                 .rope = s.rope,
                                                                 .check_finite = s.check_finite}
                                                      .checked());
  }

  cache_shape shape_;
  std::shared_ptr<const attention_spec> spec_;
  std::vector<float> log_mass_;
  std::vector<index_t> position_, length_, seen_;
};

/// Keys and values of all heads, `[heads, capacity, dim]`, owned.
///
///     kvmeld::cache<float> kv{{.heads = 8, .group = 4, .dim = 128, .capacity = 4096}};
///     kv.append(h, keys, values);   // [tokens, dim] each
template <storage_scalar Scalar>
class cache {
 public:
  using scalar = Scalar;

  explicit cache(const cache_shape& shape)
      : slots_(detail::in_whole_blocks<Scalar>(shape)), keys_(elements()), values_(elements()) {}

  const cache_shape& shape() const { return slots_.shape(); }
  index_t heads() const { return shape().heads; }

  head_view<Scalar> head(index_t h) {
    const auto slots = slots_.of(h);
    return {rows_of(keys_, h), rows_of(values_, h), slots, shape().capacity, slots_.spec()};
  }

  /// Appends tokens `[tokens, dim]` to head `h` at its next positions.
  template <class T>
  void append(index_t h, std::span<const T> keys, std::span<const T> values) {
    append_rows(head(h), keys, values);
  }
  template <class T>
  void append(index_t h, const std::vector<T>& keys, const std::vector<T>& values) {
    append(h, std::span<const T>(keys), std::span<const T>(values));
  }

  /// Moves all heads to memory of `capacity` slots each and frees the old: views of heads are
  /// invalid afterwards. `kvmeld::shrink` does it together with the state.
  /// Refused, with nothing changed: more slots than there are, fewer than a head holds.
  void shrink(index_t capacity) {
    expects(capacity > 0 && capacity <= shape().capacity, "shrink: expected a capacity of 1 to ",
            shape().capacity, " slots, got ", capacity);
    for (index_t h = 0; h < heads(); ++h) {
      expects(errc::no_capacity, head(h).length() <= capacity,
              "shrink: expected a capacity of at least ", head(h).length(), " slots, got ",
              capacity);
    }
    cache_shape smaller = shape();
    smaller.capacity = capacity;
    cache to(smaller);
    for (index_t h = 0; h < heads(); ++h) {
      detail::copy_slots(head(h), to.head(h));
    }
    *this = std::move(to);
  }

  /// Bytes of the slots in use: keys, values, log-mass, positions.
  std::size_t bytes() {
    std::size_t sum = 0;
    for (index_t h = 0; h < heads(); ++h) {
      const auto slot =
          2 * sizeof(Scalar) * static_cast<std::size_t>(row_size<Scalar>(shape().dim)) +
          sizeof(float) + sizeof(index_t);
      sum += static_cast<std::size_t>(head(h).length()) * slot;
    }
    return sum;
  }

 private:
  std::size_t elements() const {
    return static_cast<std::size_t>(shape().heads) * static_cast<std::size_t>(shape().capacity) *
           static_cast<std::size_t>(row_size<Scalar>(shape().dim));
  }
  layout<Scalar> rows_of(std::vector<Scalar>& all, index_t h) const {
    return layout<Scalar>::head_token_dim(all.data(), shape().capacity, shape().dim).of(h);
  }

  cache_metadata slots_;
  std::vector<Scalar> keys_, values_;
};

/// A `kv_cache` over an engine's own keys and values; log-mass, positions and lengths are kept
/// here. Tokens that are already in the engine's memory are taken in with `adopt`.
/// Movable, not copyable: two views of the same rows would each count their own slots.
template <storage_scalar Scalar>
class strided_view {
 public:
  using scalar = Scalar;

  strided_view(const cache_shape& shape, layout<Scalar> keys, layout<Scalar> values)
      : slots_(detail::in_whole_blocks<Scalar>(shape)),
        keys_(checked("keys", keys)),
        values_(checked("values", values)) {}

  strided_view(const strided_view&) = delete;
  strided_view& operator=(const strided_view&) = delete;
  strided_view(strided_view&&) noexcept = default;
  strided_view& operator=(strided_view&&) noexcept = default;
  ~strided_view() = default;

  const cache_shape& shape() const { return slots_.shape(); }
  index_t heads() const { return shape().heads; }

  head_view<Scalar> head(index_t h) {
    const auto slots = slots_.of(h);
    return {keys_.of(h), values_.of(h), slots, shape().capacity, slots_.spec()};
  }

  template <class T>
  void append(index_t h, std::span<const T> keys, std::span<const T> values) {
    append_rows(head(h), keys, values);
  }

  /// Takes in the `tokens` rows that follow the slots in use of head `h`: the engine wrote them.
  void adopt(index_t h, index_t tokens) { slots_.adopt(h, tokens); }

 private:
  layout<Scalar> checked(const char* what, layout<Scalar> l) const {
    expects(l.data != nullptr, "strided_view: expected ", what, ", got null");
    expects(l.element == 1 || plain_scalar<Scalar>, "strided_view: expected ", what,
            " of blocks with an element stride of 1, got ", l.element);
    // From the shortest stride to the longest, each must step over all that the shorter ones reach.
    struct axis {
      std::ptrdiff_t stride;
      index_t count;
    };
    const index_t size = row_size<Scalar>(shape().dim);
    axis axes[] = {{l.element, size}, {l.row, shape().capacity}, {l.head, shape().heads}};
    std::ranges::sort(axes, {}, &axis::stride);
    std::ptrdiff_t reach = 1;
    for (const axis& a : axes) {
      expects(a.count == 1 || a.stride >= reach, "strided_view: expected ", what,
              " that do not overlap, got [heads, slots, dim] = [", shape().heads, ", ",
              shape().capacity, ", ", shape().dim, "], head stride ", l.head, ", row stride ",
              l.row, " and element stride ", l.element);
      reach += (a.count - 1) * a.stride;
    }
    return l;
  }

  cache_metadata slots_;
  layout<Scalar> keys_, values_;
};

/// Appends tokens `[tokens, dim]` to one head; refused whole when they do not fit.
template <class T>
void append_rows(const kv_head auto& head, std::span<const T> keys, std::span<const T> values) {
  const auto dim = static_cast<std::size_t>(head.dim());
  expects(keys.size() == values.size() && keys.size() % dim == 0,
          "append: expected keys and values [tokens, ", dim, "], got ", keys.size(), " and ",
          values.size(), " numbers");
  expects(keys.empty() || (keys.data() != nullptr && values.data() != nullptr),
          "append: expected keys and values, got null");
  const std::size_t tokens = keys.size() / dim;
  expects(errc::no_capacity, tokens <= static_cast<std::size_t>(head.capacity() - head.length()),
          "append: expected at most ", head.capacity() - head.length(), " tokens, got ", tokens);
  detail::expect_pages(head, head.length(), head.length() + static_cast<index_t>(tokens));
  expects(
      errc::no_capacity,
      tokens <= static_cast<std::size_t>(std::numeric_limits<index_t>::max() - head.tokens_total()),
      "append: expected at most ", std::numeric_limits<index_t>::max(), " tokens in total, got ",
      tokens + static_cast<std::size_t>(head.tokens_total()));
  if (head.check_finite()) {
    expect_finite("append: expected finite keys", keys.data(),
                  static_cast<std::ptrdiff_t>(keys.size()));
    expect_finite("append: expected finite values", values.data(),
                  static_cast<std::ptrdiff_t>(values.size()));
  }
  for (std::size_t t = 0; t < tokens; ++t) {
    head.push(keys.data() + t * dim, values.data() + t * dim);
  }
}

}  // namespace v0
}  // namespace kvmeld
