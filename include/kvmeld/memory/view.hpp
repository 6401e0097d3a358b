// SPDX-License-Identifier: MIT
/// Views of key-value memory, wherever the engine keeps it: one KV head as policies read it, and
/// which heads of a cache a call is for: of one layer, or of the requests that are active.
#pragma once

#include <algorithm>  // std::min, std::max, std::clamp, std::ranges::copy
#include <array>
#include <atomic>
#include <bit>       // std::bit_cast
#include <cmath>     // std::isfinite
#include <concepts>  // std::derived_from
#include <limits>    // std::numeric_limits
#include <span>
#include <type_traits>  // std::is_trivially_copyable_v
#include <vector>

#include "kvmeld/config.hpp"
#include "kvmeld/memory/attention_spec.hpp"
#include "kvmeld/memory/layout.hpp"
#include "kvmeld/memory/row.hpp"

namespace kvmeld::inline v0 {

/// Metadata of a KV head's slots. A view of memory that the engine or a cache owns.
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

/// The newest rows of a head whose storage is of blocks, in half, after those of its first tokens:
/// the token at position `p` has row `p`, or after these row `p % count`, until newer ones need it.
/// They stay there while their slots move.
struct newest_rows {
  /// [rows_in_half(count), dim of each]; null: not in blocks
  std::byte *keys = nullptr, *values = nullptr;
  index_t count = 0;           ///< newest tokens in half; 0: none
  index_t* rounded = nullptr;  ///< tokens before this position, but the first, lie in their slots

  /// The row of a token.
  index_t row_of(index_t position) const {
    return position < first_in_half ? position : first_in_half + position % count;
  }
  /// Is it in half?
  bool holds(index_t position) const {
    return count > 0 && (position < first_in_half || position >= *rounded);
  }
};

/// What a head has beside its slots: the newest rows, and the mean that keys are held less.
struct rows_beside {
  newest_rows newest;               ///< in half, where rows are in blocks
  Eigen::half* key_mean = nullptr;  ///< [dim]; null: keys are held as they are
};

/// What a head is before tokens that may be taken back.
struct head_mark {
  index_t length = 0, next_position = 0, rounded = 0;   ///< slots; positions
  std::vector<Eigen::half> newest_keys, newest_values;  ///< as they were
};

/// One KV head's slots: `[capacity]` rows of keys and values, a log-mass and a position per slot;
/// the first `length()` are in use. The order of slots means nothing to attention. Rows lie by
/// strides in bytes, or in pages that a table lists, and their storage is known at run time: all
/// that reads a head is compiled once.
///
/// A view: trivially copyable, does not own, and shallow const as std::span is.
class head_ref {
 public:
  using scalar = any_scalar;  ///< of its rows

  /// `spec`: of the head's layer, checked. It is not copied and must outlive the view. `kv_head`:
  /// which of the layer's KV heads this is. `keys`, `values`: of this head alone. A table without
  /// pages: rows are strided.
  head_ref(const slot_metadata& slots, index_t capacity, const attention_spec& spec,
           index_t kv_head, storage_pair type, const head_rows& keys, const head_rows& values,
           const page_table& table = {}, const rows_beside& beside = {})
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
        newest_(beside.newest),
        key_mean_(beside.key_mean),
        type_(type) {}

  /// What the model computes in this head's layer.
  const attention_spec& spec() const { return *spec_; }
  index_t length() const { return *slots_.length; }  ///< slots in use
  /// Of the token after all so far.
  index_t next_position() const { return *slots_.next_position; }
  /// How many tokens were ever appended to it: after a seal, those that follow the sealed ones.
  index_t tokens() const { return next_position() - tokens_before_; }
  index_t capacity() const { return capacity_; }                  ///< slots
  index_t dim() const { return dim_; }                            ///< of keys, and queries
  index_t value_dim() const { return value_dim_; }                ///< of values, and outputs
  index_t row_dim() const { return std::max(dim_, value_dim_); }  ///< of the longer of the two
  index_t group() const { return group_; }                        ///< query heads
  float scale() const { return scale_; }                          ///< of products q·k
  /// Of numbers that the layer has one of for each query head, those of this head: `[group]`. Null:
  /// the layer has none.
  const float* of_group(const std::vector<float>& of_query_heads) const {
    return of_query_heads.empty() ? nullptr : of_query_heads.data() + as_size(kv_head_, group_);
  }
  /// Does a query at `position` see slot `s`?
  bool sees(index_t s, index_t position) const { return spec_->sees(position, this->position(s)); }
  bool check_finite() const { return spec_->check_finite; }  ///< are NaN and Inf refused?
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

  /// The key of slot `s`, `[dim]`, rotated to its position.
  row<any_scalar> key(index_t s) const {
    return newest_.keys == nullptr ? held_key(s) : read_key(s);
  }
  /// The value of slot `s`, `[value_dim]`.
  row<any_scalar> value(index_t s) const {
    return newest_.values == nullptr ? held_value(s) : read_value(s);
  }
  /// The memory of slot `s` for its rows; of one of the newest, what it is not read from.
  /// @{
  row<any_scalar> held_key(index_t s) const {
    return {address(keys_, s), keys_.element, type_.keys, static_cast<std::int16_t>(dim_), 0,
            key_mean_};
  }
  row<any_scalar> held_value(index_t s) const {
    return {address(values_, s), values_.element, type_.values};
  }
  /// @}
  /// Is the token of slot `s` among the newest, or the first, whose rows are in half?
  bool is_newest(index_t s) const { return s < length() && newest_.holds(position(s)); }
  /// Which of the rows in half a token has that is among these.
  index_t newest_row(index_t position) const { return newest_.row_of(position); }
  /// Tokens before this position, but the first, are rounded to what the head is held as.
  index_t rounded() const { return newest_.count > 0 ? *newest_.rounded : next_position(); }
  /// The newest rows' memory, `[rows_in_half(type().newest)]` keys in half and as many values; none
  /// of those that are not in blocks.
  /// @{
  std::span<Eigen::half> newest_keys() const { return newest(newest_.keys, dim_); }
  std::span<Eigen::half> newest_values() const { return newest(newest_.values, value_dim_); }
  /// @}
  /// The mean that keys are held less, `[dim]`; empty where they are held as they are.
  std::span<Eigen::half> key_mean() const {
    return {key_mean_, key_mean_ == nullptr ? 0 : as_size(dim_)};
  }
  /// Makes it that of `count` keys, `read(i, float* [dim])` each, of tokens `position(i)`, and of
  /// the newest rows; 0 where it is not finite in half. The first tokens, unlike all others, are
  /// left out where there are others. No slot's key may be held less it. Without a mean: nothing.
  template <class Position, class Read>
  void set_key_mean(index_t count, Position position, Read read) const {
    if (key_mean_ != nullptr) [[unlikely]] {
      average_keys(count, position, read);
    }
  }
  /// The same before `count` keys are appended, if they are the first with which one is rounded.
  template <class Read>
  void before_keys(index_t count, Read read) const {
    const index_t in_half = rows_in_half(newest_.count);
    const auto none_is_rounded = [&] {
      return first_ + length() == 0 || (in_half > 0 && *newest_.rounded <= first_in_half);
    };
    if (key_mean_ != nullptr && none_is_rounded() && next_position() + count > in_half)
        [[unlikely]] {
      average_keys(
          count, [&](index_t i) { return next_position() + i; }, read);
    }
  }
  float& log_mass(index_t s) const { return slots_.log_mass[s]; }  ///< natural logarithm
  /// By `renumber` where it is to change and the slot's rows are to stay.
  index_t& position(index_t s) const { return slots_.position[s]; }
  /// Slot `s`, its rows as they are, is the token at `position` from here on.
  void renumber(index_t s, index_t position) const {
    const row<any_scalar> key = this->key(s), value = this->value(s);
    this->position(s) = position;
    if (newest_.count > 0) {
      move_row(key, this->key(s), dim_), move_row(value, this->value(s), value_dim_);
    }
  }

  /// Slots of a page; 1 where rows are strided.
  index_t page_slots() const { return table_.pages == nullptr ? 1 : table_.slots; }
  /// The slots from `first` on as a head of its own, which counts them in `length`: the caller
  /// tells this head. Its tokens are those after the first `sealed` slots'.
  head_ref behind(index_t first, index_t sealed, index_t& length) const {
    head_ref own = *this;
    own.first_ += first;
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
  const slot_metadata& metadata() const { return slots_; }  ///< of all slots
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
    before_keys(1, [&](index_t, float* x) {
      std::transform(key, key + dim(), x, [](T e) { return static_cast<float>(e); });
    });
    push_row(key, value);
  }
  /// The same for one of several tokens, all of which `before_keys` has read: alone, each would
  /// decide the mean anew until a key is held less it. Pages are not checked.
  template <class T>
  void push_row(const T* key, const T* value) const {
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
  /// The next slots, at the next positions, with log-mass 0; their rows are the caller's to write.
  /// Rows that are no longer among the newest are rounded. Returns the first.
  index_t push_metadata(index_t tokens = 1) const {
    expect_no_draft("push");
    expects(errc::no_capacity, tokens <= capacity() - length(),
            "push: expected a free slot, got all ", capacity(), " slots in use");
    expects(errc::no_capacity, tokens <= std::numeric_limits<index_t>::max() - next_position(),
            "push: expected fewer than ", std::numeric_limits<index_t>::max(),
            " tokens in total, got ", next_position());
    if (newest_.count > 0) {
      round(next_position() + tokens - newest_.count);
    }
    const index_t first = length();
    for (index_t s = first; s < first + tokens; ++s) {
      log_mass(s) = 0.0F;
      position(s) = (*slots_.next_position)++;
    }
    *slots_.length += tokens;
    return first;
  }

  /// Keeps the first `length` slots. Only ever shortens; `push` lengthens.
  void truncate(index_t length) const {
    expects(length >= 0 && length <= *slots_.length, "truncate: expected 0 to ", *slots_.length,
            " slots, got ", length);
    set_length(length);
  }
  /// Sets both lengths: back to what they were some tokens ago, or for slots that are filled next,
  /// of which tokens before `rounded` are no longer among the newest. What was rounded meanwhile
  /// stays so. Refused, with nothing changed: slots in use that hold tokens from `next_position`
  /// on, as after a compression, which moves slots.
  void restore(index_t length, index_t next_position, index_t rounded) const {
    expects(length >= 0 && length <= capacity() && length <= next_position,
            "restore: expected 0 to ", std::min(capacity(), next_position), " slots, got ", length);
    for (index_t s = 0; s < std::min(length, *slots_.length); ++s) {
      expects(position(s) < next_position, "restore: expected slots of tokens before ",
              next_position, ", got token ", position(s), " in slot ", s);
    }
    if (newest_.count > 0 && next_position > this->next_position()) {
      round(std::min(next_position - newest_.count, this->next_position()));
    }
    set_length(length);
    *slots_.next_position = next_position;
    if (newest_.count > 0) {
      *newest_.rounded =
          std::clamp(rounded, std::max(next_position - newest_.count, 0), next_position);
    }
  }
  /// The same, with as many rows rounded as are now.
  void restore(index_t length, index_t next_position) const {
    restore(length, next_position, rounded());
  }
  /// What `restore` needs to take back all that is pushed from here on, to the bit.
  head_mark mark() const {
    const auto keys = newest_keys(), values = newest_values();
    return {length(),
            next_position(),
            rounded(),
            {keys.begin(), keys.end()},
            {values.begin(), values.end()}};
  }
  /// Takes back all that was pushed since `mark`. Refused: another head's mark.
  void restore(const head_mark& mark) const {
    expects(mark.newest_keys.size() == newest_keys().size() &&
                mark.newest_values.size() == newest_values().size(),
            "restore: expected a mark of this head, got another's");
    restore(mark.length, mark.next_position, mark.rounded);
    std::ranges::copy(mark.newest_keys, newest_keys().begin());
    std::ranges::copy(mark.newest_values, newest_values().begin());
  }

  /// Refused: rows appended while a draft of the request is open.
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
  KVMELD_NOINLINE row<any_scalar> read_key(index_t s) const {
    return is_newest(s) ? newest(newest_.keys, position(s), dim_) : held_key(s);
  }
  KVMELD_NOINLINE row<any_scalar> read_value(index_t s) const {
    return is_newest(s) ? newest(newest_.values, position(s), value_dim_) : held_value(s);
  }
  row<any_scalar> newest(std::byte* rows, index_t position, index_t dim) const {
    return {rows + as_size(newest_.row_of(position)) * row_bytes(storage::f16, dim),
            sizeof(Eigen::half), storage::f16};
  }
  std::span<Eigen::half> newest(std::byte* rows, index_t dim) const {
    return {reinterpret_cast<Eigen::half*>(rows),
            rows == nullptr ? 0 : as_size(rows_in_half(newest_.count), dim)};
  }
  static void move_row(row<any_scalar> from, row<any_scalar> to, index_t dim) {
    if (from.data != to.data) {
      float x[longest_row];
      from.visit([&](auto typed) {
        for (index_t i = 0; i < dim; ++i) {
          x[i] = static_cast<float>(typed[i]);
        }
      });
      detail::store_row(x, to, dim);
    }
  }
  template <class Position, class Read>
  KVMELD_NOINLINE void average_keys(index_t count, Position position, Read read) const {
    float x[longest_row], sum[longest_row];
    std::fill_n(sum, dim_, 0.0F);
    index_t keys = 0;
    bool others = false;  // than the first tokens'
    const auto add = [&](index_t at) {
      if (!others && at >= first_in_half) {
        others = true, keys = 0;
        std::fill_n(sum, dim_, 0.0F);
      }
      if (others == (at >= first_in_half)) {
        ++keys;
        for (index_t i = 0; i < dim_; ++i) {
          sum[i] += x[i];
        }
      }
    };
    for (index_t s = -first_; s < length() && newest_.count > 0; ++s) {
      if (is_newest(s)) {
        key(s).visit([&](auto typed) {
          for (index_t i = 0; i < dim_; ++i) {
            x[i] = static_cast<float>(typed[i]);
          }
        });
        add(this->position(s));
      }
    }
    for (index_t i = 0; i < count; ++i) {
      read(i, x);
      add(position(i));
    }
    for (index_t i = 0; i < dim_; ++i) {
      const auto mean = static_cast<Eigen::half>(sum[i] / static_cast<float>(std::max(keys, 1)));
      key_mean_[i] = (mean.x & 0x7C00) == 0x7C00 ? Eigen::half{} : mean;
    }
  }
  /// Rounds the newest rows of tokens before `position` into their slots, kept ones among them.
  void round(index_t position) const {
    index_t left = std::min(position, next_position()) - *newest_.rounded;
    for (index_t s = length() - 1; left > 0 && s >= -first_; --s) {
      if (this->position(s) >= *newest_.rounded && this->position(s) < position) {
        if (this->position(s) >= first_in_half) {
          move_row(key(s), held_key(s), dim_), move_row(value(s), held_value(s), value_dim_);
        }
        --left;
      }
    }
    *newest_.rounded = std::max(*newest_.rounded, position);
  }

  void set_length(index_t length) const {
    *slots_.length = length;
    if (slots_.kept != nullptr) {
      *slots_.kept = std::min(*slots_.kept, length);
    }
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
  // Copies of the spec's, for loops that store through bytes.
  index_t kv_head_, capacity_, dim_, value_dim_, group_, tokens_before_ = 0;
  index_t first_ = 0;  // slots of the whole head before this one's
  float scale_;
  head_rows keys_, values_;
  page_table table_;
  newest_rows newest_;
  Eigen::half* key_mean_;
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

/// Heads `first` to `first + count − 1`: `head_range{h, 1}` is head `h` alone, and
/// `head_range{kv.heads(layer, request)[0], 2}` the first two of a layer and request.
struct head_range {
  index_t first = 0;  ///< of the range
  index_t count = 0;  ///< heads
};

/// A range of heads, a list of them in any order, or the heads of one layer of some requests
/// (`cache.heads(layer, requests)`). A view, as an argument is: the list must live as long.
///
/// Rows of a call's input and output are those of the heads chosen, in their order; policies,
/// budgets and states stay those of the whole cache. `heads[i]` is the number of the `i`-th;
/// `for (const index_t h : kv.heads(layer, request))` is over all of them.
class head_selection {
 public:
  /// A range.
  head_selection(head_range range)
      : first_(range.first), count_(range.count) {}  // NOLINT: it is one
  /// A list, in its order.
  head_selection(std::span<const index_t> list)  // NOLINT: so is a list
      : count_(static_cast<index_t>(list.size())), list_(list), listed_(true) {}
  /// A list, in its order.
  head_selection(const std::vector<index_t>& list)  // NOLINT
      : head_selection(std::span<const index_t>(list)) {}
  /// The `each` heads of every request listed, in the layer that begins with head `first`.
  head_selection(index_t first, index_t each, std::span<const index_t> requests)
      : first_(first),
        count_(static_cast<index_t>(requests.size()) * each),
        each_(each),
        list_(requests),
        listed_(true) {}

  index_t count() const { return count_; }  ///< heads chosen
  /// The `i`-th head chosen.
  index_t operator[](index_t i) const {
    return listed_ ? first_ + list_[as_size(i / each_)] * each_ + i % each_ : first_ + i;
  }

  /// Over the numbers of the heads.
  class iterator {
   public:
    using value_type = index_t;              ///< a head's number
    using difference_type = std::ptrdiff_t;  ///< as iterators have

    iterator() = default;
    /// At the `i`-th.
    iterator(const head_selection& heads, index_t i) : heads_(&heads), i_(i) {}
    index_t operator*() const { return (*heads_)[i_]; }  ///< the head
    /// The next one.
    iterator& operator++() {
      ++i_;
      return *this;
    }
    /// The next one; returns this one.
    iterator operator++(int) {
      const iterator was = *this;
      ++i_;
      return was;
    }
    bool operator==(const iterator&) const = default;

   private:
    const head_selection* heads_ = nullptr;
    index_t i_ = 0;
  };
  iterator begin() const { return {*this, 0}; }      ///< the first head
  iterator end() const { return {*this, count()}; }  ///< after the last

  /// Refuses heads that are not among `heads`, and a list that has one twice.
  void check(const char* what, index_t heads) const {
    if (!listed_) {
      expects(first_ >= 0 && count_ >= 0 && first_ <= heads && count_ <= heads - first_, what,
              ": expected a range of heads within 0 to ", heads - 1, ", got ", count_,
              " heads from ", first_);
      return;
    }
    expects(list_.empty() || list_.data() != nullptr, what, ": expected a list of heads, got null");
    const index_t all = (heads - first_) / each_;
    constexpr index_t on_the_stack = 4096;
    std::array<std::uint64_t, on_the_stack / 64> few{};
    std::vector<std::uint64_t> many(all > on_the_stack ? as_size(all) / 64 + 1 : 0);
    std::uint64_t* const named = many.empty() ? few.data() : many.data();
    const char* const thing = each_ == 1 ? "head" : "request";
    for (const index_t x : list_) {
      expects(x >= 0 && x < all, what, ": expected ", thing, "s 0 to ", all - 1, ", got ", x);
      const std::uint64_t bit = std::uint64_t{1} << (x % 64);
      expects((named[x / 64] & bit) == 0, what, ": expected each ", thing, " once, got ", thing,
              " ", x, " twice");
      named[x / 64] |= bit;
    }
  }

 private:
  index_t first_ = 0;
  index_t count_ = 0;
  index_t each_ = 1;
  std::span<const index_t> list_;
  bool listed_ = false;
};

namespace detail {

/// Heads in the order `(layer · requests + request) · kv_heads + head`. A reference: the cache must
/// outlive it.
class cache_ref {
 public:
  template <class Cache>
  explicit cache_ref(Cache& kv)
      : kv_(&kv),
        head_(
            [](void* cache, index_t h) -> head_ref { return static_cast<Cache*>(cache)->head(h); }),
        layers_(kv.layers()),
        requests_(kv.requests()),
        kv_heads_(kv.kv_heads()) {
    if constexpr (requires { kv.give_back(0, 0); }) {
      give_back_ = [](void* cache, index_t h, index_t slots) {
        static_cast<Cache*>(cache)->give_back(h, slots);
      };
    }
    if constexpr (requires { kv.expect_own_pages("", 0, 0, 0, -1); }) {
      expect_own_pages_ = [](void* cache, const char* call, index_t h, index_t from, index_t to,
                             index_t like) {
        static_cast<Cache*>(cache)->expect_own_pages(call, h, from, to, like);
      };
      pages_ = [](void* cache, index_t h) { static_cast<Cache*>(cache)->count_pages(h); };
    }
  }

  /// Is it this cache?
  bool is(const void* cache) const { return kv_ == cache; }
  head_ref head(index_t h) const { return head_(kv_, h).for_compressor(); }
  /// Tells the cache that a head has a draft more, or one less: rows are refused meanwhile.
  void count_drafts(index_t h, index_t more) const {
    if (auto* const drafts = head_(kv_, h).metadata().drafts; drafts != nullptr) {
      drafts->fetch_add(more, std::memory_order_relaxed);
    }
  }
  index_t requests() const { return requests_; }
  index_t heads() const { return layers_ * requests_ * kv_heads_; }

  /// Gives back what head `h` holds beyond `slots` slots, where the cache can.
  void give_back(index_t h, index_t slots) const {
    if (give_back_ != nullptr) {
      give_back_(kv_, h, slots);
    }
  }

  /// Are its rows in pages?
  bool in_pages() const { return pages_ != nullptr; }
  /// As of a `paged_cache`; of others nothing is refused.
  void expect_own_pages(const char* call, index_t h, index_t from, index_t to,
                        index_t like = -1) const {
    if (in_pages()) {
      expect_own_pages_(kv_, call, h, from, to, like);
    }
  }
  /// Counts the pages that the table of head `h` has in use.
  void count_pages(index_t h) const {
    if (in_pages()) {
      pages_(kv_, h);
    }
  }

  /// Heads of one request, over all layers.
  index_t per_request() const { return layers_ * kv_heads_; }
  /// The `i`-th of them, `[layers, kv_heads]`.
  index_t of_request(index_t request, index_t i) const {
    return (i / kv_heads_ * requests_ + request) * kv_heads_ + i % kv_heads_;
  }
  /// Which of its request's heads `h` is, and which request that is.
  index_t in_request(index_t h) const {
    return h / (requests_ * kv_heads_) * kv_heads_ + h % kv_heads_;
  }
  index_t request_of(index_t h) const { return h / kv_heads_ % requests_; }
  /// The same KV head of the layer before it, or for the first layer of the last one.
  index_t in_layer_before(index_t h) const {
    const index_t layer = requests_ * kv_heads_;
    return h >= layer ? h - layer : h + (layers_ - 1) * layer;
  }
  bool in_first_layer(index_t h) const { return h < requests_ * kv_heads_; }
  /// Are the two of one layer and request?
  bool together(index_t a, index_t b) const { return a / kv_heads_ == b / kv_heads_; }

 private:
  void* kv_;
  head_ref (*head_)(void*, index_t);
  void (*expect_own_pages_)(void*, const char*, index_t, index_t, index_t, index_t) = nullptr;
  void (*pages_)(void*, index_t) = nullptr;
  void (*give_back_)(void*, index_t, index_t) = nullptr;
  index_t layers_, requests_, kv_heads_;
};

}  // namespace detail

}  // namespace kvmeld::inline v0
