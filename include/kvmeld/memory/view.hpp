// SPDX-License-Identifier: MIT
/// Views of key-value memory: one KV head as policies read it, wherever the engine keeps it.
#pragma once

#include <algorithm>  // std::min, std::max
#include <atomic>
#include <bit>          // std::bit_cast
#include <cmath>        // std::isfinite
#include <concepts>     // std::derived_from
#include <limits>       // std::numeric_limits
#include <type_traits>  // std::is_trivially_copyable_v

#include "kvmeld/config.hpp"
#include "kvmeld/memory/attention_spec.hpp"
#include "kvmeld/memory/layout.hpp"
#include "kvmeld/memory/row.hpp"

namespace kvmeld::inline v0 {

/// What a KV head keeps beside its rows. A view of memory that the engine or a cache owns.
struct slot_metadata {
  float* log_mass = nullptr;         ///< [capacity]
  index_t* position = nullptr;       ///< [capacity]
  index_t* length = nullptr;         ///< slots in use
  index_t* next_position = nullptr;  ///< the next token's: how many were ever appended
  /// Its first slots, none removed since the last call of a compressor; null: not counted.
  index_t* kept = nullptr;
  /// Heads of its request with a draft that was not accepted; null: not counted. Threads may draft
  /// for heads of one request at the same time: read and written atomically.
  std::atomic<index_t>* drafts = nullptr;
};

/// One KV head's slots: `[capacity]` rows of keys and values, a log-mass and a position per slot;
/// the first `length()` are in use. The order of slots means nothing to attention. Rows lie by
/// strides in bytes, or in pages that a table lists, and their storage is known at run time: all
/// that reads a head is compiled once.
///
/// A view: trivially copyable, does not own, and shallow const as std::span is.
class head_ref {
 public:
  using scalar = any_scalar;

  /// `spec`: of the head's layer, checked. It is not copied and must outlive the view. `kv_head`:
  /// which of the layer's KV heads this is. `keys`, `values`: of this head alone. A table without
  /// pages: rows are strided.
  head_ref(const slot_metadata& slots, index_t capacity, const attention_spec& spec,
           index_t kv_head, storage_pair type, const head_rows& keys, const head_rows& values,
           const page_table& table = {})
      : slots_(slots),
        spec_(&spec),
        kv_head_(kv_head),
        capacity_(capacity),
        dim_(spec.key_dim),
        value_dim_(spec.dim_of_values()),
        group_(spec.group),
        scale_(spec.scale),
        keys_(keys),
        values_(values),
        table_(table),
        type_(type) {}

  /// What the model computes in this head's layer.
  const attention_spec& spec() const { return *spec_; }
  index_t length() const { return *slots_.length; }
  index_t next_position() const { return *slots_.next_position; }
  /// How many tokens were ever appended to it: behind a seal, those after the sealed ones.
  index_t tokens() const { return next_position() - tokens_before_; }
  index_t capacity() const { return capacity_; }
  index_t dim() const { return dim_; }                            ///< of keys, and queries
  index_t value_dim() const { return value_dim_; }                ///< of values, and outputs
  index_t row_dim() const { return std::max(dim_, value_dim_); }  ///< of the longer of the two
  index_t group() const { return group_; }
  float scale() const { return scale_; }
  /// Of numbers that the layer has one of for each query head, those of this head: `[group]`. Null:
  /// the layer has none.
  const float* of_group(const std::vector<float>& of_query_heads) const {
    return of_query_heads.empty() ? nullptr : of_query_heads.data() + as_size(kv_head_, group_);
  }
  /// Does a query at `position` see slot `s`?
  bool sees(index_t s, index_t position) const { return spec_->sees(position, this->position(s)); }
  bool check_finite() const { return spec_->check_finite; }
  /// Are values the first numbers of the keys, in their memory, as of latent attention?
  bool one_memory() const {
    return keys_.data != nullptr && keys_.data == values_.data && keys_.row == values_.row &&
           keys_.element == values_.element && keys_.page == values_.page &&
           type_.keys == type_.values && value_dim_ <= dim_;
  }
  /// Numbers of a value that are not its key's: 0 in one memory.
  index_t own_value_dim() const { return one_memory() ? 0 : value_dim_; }
  /// What its rows are held as.
  storage_pair type() const { return type_; }
  /// Are values held rotated, each by `detail::hadamard`? Merges and fits of values are linear and
  /// do as without; attention rotates its outputs back.
  bool rotates_values() const { return rotates_values_of(type_.values) && !one_memory(); }

  row<any_scalar> key(index_t s) const { return at(keys_, type_.keys, s); }
  row<any_scalar> value(index_t s) const { return at(values_, type_.values, s); }
  float& log_mass(index_t s) const { return slots_.log_mass[s]; }
  index_t& position(index_t s) const { return slots_.position[s]; }

  /// Slots of a page; 1 where rows are strided.
  index_t page_slots() const { return table_.pages == nullptr ? 1 : table_.slots; }
  /// The slots from `first` on as a head of its own, which counts them in `length`: the caller
  /// tells this head. Its tokens are those after the first `sealed` slots'.
  head_ref behind(index_t first, index_t sealed, index_t& length) const {
    head_ref own = *this;
    for (index_t s = 0; s < sealed; ++s) {
      own.tokens_before_ = std::max(own.tokens_before_, position(s) + 1);
    }
    own.slots_.log_mass += first, own.slots_.position += first, own.slots_.length = &length;
    own.capacity_ -= first;
    if (table_.pages != nullptr) {
      own.table_.pages += (table_.skipped + first) / table_.slots;
      own.table_.skipped = (table_.skipped + first) % table_.slots;
    } else {
      own.keys_.data += first * keys_.row, own.values_.data += first * values_.row;
    }
    return own;
  }
  const slot_metadata& metadata() const { return slots_; }
  /// The head for who has drafted, and may append.
  head_ref for_compressor() const {
    head_ref own = *this;
    own.slots_.drafts = nullptr;
    return own;
  }

  /// How many slots there are from `s` on, in use or not: to the end of its page, or in all.
  index_t rows_from(index_t s) const {
    return table_.pages == nullptr ? capacity_ - s
                                   : table_.slots - (table_.skipped + s) % table_.slots;
  }
  /// The keys of these, the first at slot `s`.
  head_rows keys_from(index_t s) const { return from(keys_, s); }
  /// ... values.
  head_rows values_from(index_t s) const { return from(values_, s); }

  /// Are the keys evenly spaced, in pages of 8 slots and more within each, and the numbers of each
  /// side by side?
  bool even_keys() const { return even(keys_, type_.keys, dim_); }
  /// ... the values?
  bool even_values() const { return even(values_, type_.values, value_dim_); }

  /// Appends one token, `key [dim]` and `value [value_dim]`, at the next position, with log-mass 0;
  /// in one memory `value` is not read. Refused: no slot left (`no_capacity`), no page for it in
  /// the table (`no_page`).
  template <class T>
  void push(const T* key, const T* value) const {
    expect_pages(length(), std::min(length() + 1, capacity()));
    const index_t s = push_metadata();
    detail::store_row(key, this->key(s), dim());
    store_value(value, s);
  }
  /// Writes `value [own_value_dim()]`, the model's, as slot `s` holds it.
  template <class T>
  void store_value(const T* value, index_t s) const {
    if (rotates_values()) [[unlikely]] {
      detail::store_rotated(value, this->value(s), value_dim());
    } else {
      detail::store_row(value, this->value(s), own_value_dim());
    }
  }
  /// The next slot, at the next position, with log-mass 0; its rows are the caller's to write.
  index_t push_metadata() const {
    expect_no_draft("push");
    expects(errc::no_capacity, length() < capacity(), "push: expected a free slot, got all ",
            capacity(), " slots in use");
    expects(errc::no_capacity, next_position() < std::numeric_limits<index_t>::max(),
            "push: expected fewer than ", std::numeric_limits<index_t>::max(),
            " tokens in total, got ", next_position());
    const index_t s = (*slots_.length)++;
    log_mass(s) = 0.0F;
    position(s) = (*slots_.next_position)++;
    return s;
  }

  /// Keeps the first `length` slots. Only ever shortens; `push` lengthens.
  void truncate(index_t length) const {
    expects(length >= 0 && length <= *slots_.length, "truncate: expected 0 to ", *slots_.length,
            " slots, got ", length);
    set_length(length);
  }
  /// Sets both lengths: back to what they were some tokens ago, or for slots whose contents come
  /// from outside (`load` writes them next). Refused, with nothing changed: slots in use that hold
  /// tokens from `next_position` on, as after a compression, which moves slots.
  void restore(index_t length, index_t next_position) const {
    expects(length >= 0 && length <= capacity() && length <= next_position,
            "restore: expected 0 to ", std::min(capacity(), next_position), " slots, got ", length);
    for (index_t s = 0; s < std::min(length, *slots_.length); ++s) {
      expects(position(s) < next_position, "restore: expected slots of tokens before ",
              next_position, ", got token ", position(s), " in slot ", s);
    }
    set_length(length);
    *slots_.next_position = next_position;
  }

  /// Refused: rows appended while a draft of the request is open, whose tokens come first.
  void expect_no_draft(const char* call) const {
    expects(slots_.drafts == nullptr || slots_.drafts->load(std::memory_order_relaxed) <= 0, call,
            ": expected accept first, got a draft");
  }

  /// Refused: slots `from` to `to` − 1 of a head in pages that its table has no pages for.
  void expect_pages(index_t from, index_t to) const {
    from += table_.skipped, to += table_.skipped;
    for (index_t i = table_.pages == nullptr ? 0 : from / table_.slots;
         table_.pages != nullptr && i < table_.taken_by(to); ++i) {
      const index_t page = table_.pages[i], slot = std::max(from, i * table_.slots);
      expects(errc::no_page, page >= 0, "head: expected a page for slot ", slot - table_.skipped,
              ", got ", page);
      expects(page < table_.limit, "head: expected a page of 0 to ", table_.limit - 1, " for slot ",
              slot - table_.skipped, ", got ", page);
    }
  }

 private:
  void set_length(index_t length) const {
    *slots_.length = length;
    if (slots_.kept != nullptr) {
      *slots_.kept = std::min(*slots_.kept, length);
    }
  }

  row<any_scalar> at(const head_rows& l, storage type, index_t s) const {
    return {address(l, s), l.element, type};
  }

  head_rows from(head_rows l, index_t s) const {
    l.data = address(l, s);
    return l;
  }
  std::byte* address(const head_rows& l, index_t s) const {
    return table_.pages == nullptr ? l.slot(s) : l.slot(s, table_);
  }
  bool even(const head_rows& l, storage type, index_t dim) const {
    const auto size = static_cast<std::ptrdiff_t>(element_bytes(type));
    return (table_.pages == nullptr || table_.slots >= 8) && l.element == size &&
           l.row >= row_size(type, dim) * size;
  }

  slot_metadata slots_;
  const attention_spec* spec_;
  // Beside `spec_`, for loops that store through bytes.
  index_t kv_head_, capacity_, dim_, value_dim_, group_, tokens_before_ = 0;
  float scale_;
  head_rows keys_, values_;
  page_table table_;
  storage_pair type_;
};

static_assert(std::is_trivially_copyable_v<head_ref>);

/// One KV head, as policies are written for: a `head_ref`, or what is made of one.
template <class H>
concept kv_head = std::derived_from<H, head_ref>;

/// All KV heads (layer × request × KV head, flattened) of one shape, each with its own length:
/// whatever gives a `head_ref` for each of them.
template <class C>
concept kv_cache = requires(C& cache, index_t h) {
  { cache.heads() } -> std::same_as<index_t>;
  { cache.head(h) } -> std::convertible_to<head_ref>;
};

/// The latest position a head holds; -1 when it is empty. Recency is measured from here.
inline index_t newest_position(const head_ref& head) {
  index_t newest = -1;
  for (index_t s = 0; s < head.length(); ++s) {
    newest = std::max(newest, head.position(s));
  }
  return newest;
}

/// Slots that a query at `position` sees.
inline index_t visible_slots(const head_ref& head, index_t position) {
  index_t visible = 0;
  for (index_t s = 0; s < head.length(); ++s) {
    visible += head.sees(s, position) ? 1 : 0;
  }
  return visible;
}

namespace detail {

/// Are the numbers `x [count]` neither NaN nor Inf? By their bits, at the width of a vector.
inline bool all_finite(const float* x, index_t count) {
  constexpr std::uint32_t exponent = 0x7F800000U;
  std::uint32_t found = 0;
  for (index_t i = 0; i < count; ++i) {
    found |=
        static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(x[i]) & exponent) == exponent);
  }
  return found == 0;
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

}  // namespace kvmeld::inline v0
