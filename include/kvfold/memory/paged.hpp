/// A cache in pages: a head's slots lie in blocks of the engine's memory that a table lists.
#pragma once

#include <algorithm>   // std::rotate
#include <cstddef>     // std::ptrdiff_t
#include <functional>  // std::greater
#include <numeric>     // std::iota
#include <span>
#include <tuple>

#include "kvfold/memory/cache.hpp"
#include "kvfold/state.hpp"

namespace kvfold {

/// Which pages a head's slots are in: slot `s` of head `h` is in page
/// `pages[h * head + s / slots]`; −1 until the engine has entered one.
struct page_table {
  index_t* pages = nullptr;  ///< [capacity / slots], or `[heads, capacity / slots]`; −1: none yet
  index_t slots = 0;         ///< a page holds
  std::ptrdiff_t head = 0;   ///< stride, head to head; 0: all heads share one table

  static constexpr index_t no_page = -1;

  /// Pages that `length` slots take.
  index_t taken_by(index_t length) const { return length / slots + (length % slots != 0 ? 1 : 0); }
};

/// Where pages lie, strides in elements: element `i` of slot `s` of head `h` is
/// `data[page_of(s) * page + h * head + (s % slots) * row + i * element]`.
template <storage_scalar Scalar>
struct paged_layout {
  Scalar* data = nullptr;
  std::ptrdiff_t page = 0;
  std::ptrdiff_t head = 0;
  std::ptrdiff_t row = 0;
  std::ptrdiff_t element = 1;

  /// `[page, slot, head, dim]`, as vLLM's FlashAttention backend keeps keys and values.
  static paged_layout page_slot_head_dim(Scalar* data, index_t slots, index_t heads, index_t dim) {
    const std::ptrdiff_t row = std::ptrdiff_t{heads} * dim;
    return {data, slots * row, dim, row, 1};
  }
  /// `[page, head, slot, dim]`
  static paged_layout page_head_slot_dim(Scalar* data, index_t slots, index_t heads, index_t dim) {
    const std::ptrdiff_t head = std::ptrdiff_t{slots} * dim;
    return {data, heads * head, head, dim, 1};
  }
};

/// One KV head in pages: a `kv_head`. A view, as `head_view` is.
template <storage_scalar Scalar>
class paged_head : public head_base {
 public:
  using scalar = Scalar;

  paged_head(const paged_layout<Scalar>& keys, const paged_layout<Scalar>& values,
             const page_table& table, const slot_metadata& slots, const head_shape& shape)
      : head_base(slots, shape), keys_(keys), values_(values), table_(table) {}

  row<Scalar> key(index_t s) const { return at(keys_, s); }
  row<Scalar> value(index_t s) const { return at(values_, s); }

  /// Refused: slots `from` to `to` − 1 that the table has no pages for.
  void expect_pages(index_t from, index_t to) const {
    for (index_t i = from / table_.slots; i < table_.taken_by(to); ++i) {
      expects(errc::no_page, table_.pages[i] >= 0, "paged_view: a page for slot ",
              std::max(from, i * table_.slots), " expected, ", table_.pages[i], " came");
    }
  }

  /// Appends one token `[dim]`. Refused: no page for it in the table.
  template <class T>
  void push(const T* key, const T* value) const {
    expect_pages(length(), std::min(length() + 1, capacity()));
    const index_t s = push_metadata();
    detail::store_row(key, this->key(s), dim());
    detail::store_row(value, this->value(s), dim());
  }

 private:
  row<Scalar> at(const paged_layout<Scalar>& l, index_t s) const {
    const std::ptrdiff_t page = table_.pages[s / table_.slots];
    return {l.data + page * l.page + s % table_.slots * l.row, l.element};
  }

  paged_layout<Scalar> keys_, values_;
  page_table table_;
};

static_assert(kv_head<paged_head<float>>);

/// Does row `r` of a plan leave its slot's key and value as they are?
inline bool keeps(const merge_plan& plan, index_t r) {
  return plan.row(r).size() == 1 && plan.row(r).front() == merge_source{plan.anchor(r)} &&
         !plan.has_correction();
}

/// A `kv_cache` over an engine's pages; log-mass, positions and lengths are kept here. The engine
/// enters a page in the table before a slot needs it. Movable, not copyable, as `strided_view`.
template <storage_scalar Scalar>
class paged_view {
 public:
  using scalar = Scalar;

  paged_view(const cache_shape& shape, paged_layout<Scalar> keys, paged_layout<Scalar> values,
             page_table table)
      : slots_(shape), keys_(keys), values_(values), table_(table) {
    expects(keys.data != nullptr && values.data != nullptr && table.pages != nullptr,
            "paged_view: keys, values and a table expected, null came");
    expects(table.slots > 0 && shape.capacity % table.slots == 0,
            "paged_view: a capacity of whole pages expected, ", shape.capacity,
            " slots in pages of ", table.slots, " came");
    expects(table.head == 0 || table.head >= shape.capacity / table.slots,
            "paged_view: tables of at least ", shape.capacity / table.slots,
            " pages (or one for all heads, stride 0) expected, a stride of ", table.head, " came");
  }

  paged_view(const paged_view&) = delete;
  paged_view& operator=(const paged_view&) = delete;
  paged_view(paged_view&&) = default;
  paged_view& operator=(paged_view&&) = default;
  ~paged_view() = default;

  const cache_shape& shape() const { return slots_.shape(); }
  index_t heads() const { return shape().heads; }

  paged_head<Scalar> head(index_t h) {
    auto keys = keys_, values = values_;
    keys.data += h * keys.head, values.data += h * values.head;
    return {keys, values, table_of(h), slots_.of(h), slots_.extent()};
  }

  template <class T>
  void append(index_t h, std::span<const T> keys, std::span<const T> values) {
    append_rows(head(h), keys, values);
  }

  /// Takes in the `tokens` rows that follow the slots in use of head `h`: the engine wrote them.
  void adopt(index_t h, index_t tokens) {
    const auto own = head(h);
    if (tokens > 0 && tokens <= own.capacity() - own.length()) {
      own.expect_pages(own.length(), own.length() + tokens);
    }
    slots_.adopt(h, tokens);
  }

  /// Pages that the table of head `h` has for slots in use, of this head and of those that share
  /// it.
  index_t pages(index_t h) {
    index_t most = 0;
    for (index_t i = 0; i < heads(); ++i) {
      most = std::max(most, i == h || table_.head == 0 ? table_.taken_by(head(i).length()) : 0);
    }
    return most;
  }
  /// The table's entries behind those: after a compression, the pages that it has freed, and what
  /// was −1 before.
  std::span<const index_t> free_pages(index_t h) {
    const std::span<const index_t> all(table_of(h).pages,
                                       static_cast<std::size_t>(shape().capacity / table_.slots));
    return all.subspan(static_cast<std::size_t>(pages(h)));
  }

  /// Carries out a plan of whole pages (`whole_pages`) for head `h`, or for all heads when they
  /// share a table, by changing the table alone: kept pages move to its front, the others behind
  /// them, and no key or value is touched. Refused, with nothing changed: a plan that breaks a
  /// page.
  void keep_pages(index_t h, const merge_plan& plan, state& state) {
    const index_t slots = table_.slots, first = table_.head == 0 ? 0 : h,
                  last = table_.head == 0 ? heads() - 1 : h;
    check(plan);
    for (index_t i = first; i <= last; ++i) {
      expects(plan.length() == head(i).length(), "keep_pages: a plan of ", head(i).length(),
              " slots expected, ", plan.length(), " came");
    }
    for (index_t r = 0; r < plan.rows(); ++r) {
      const index_t s = plan.anchor(r);
      expects(keeps(plan, r) && s % slots == r % slots &&
                  (r % slots == 0 || s == plan.anchor(r - 1) + 1),
              "keep_pages: whole pages of ", slots, " slots, unchanged, expected, row ", r,
              " is of slot ", s);
    }
    expects(plan.rows() % slots == 0 || plan.anchor(plan.rows() - 1) == plan.length() - 1,
            "keep_pages: whole pages of ", slots, " slots expected, ", plan.rows(), " rows came");
    for (index_t i = first; i <= last; ++i) {
      move_records(plan, head(i), state[i]);
    }
    const page_table table = table_of(h);
    for (index_t r = 0; r < plan.rows(); r += slots) {  // anchors ascend: never forward
      index_t* const from = table.pages + plan.anchor(r) / slots;
      std::rotate(table.pages + r / slots, from, from + 1);
    }
  }

 private:
  page_table table_of(index_t h) const {
    auto table = table_;
    table.pages += h * table.head;
    return table;
  }
  static void move_records(const merge_plan& plan, const paged_head<Scalar>& head,
                           head_state& state) {
    state.extend(head.length());
    for (index_t r = 0; r < plan.rows(); ++r) {
      const auto to = static_cast<std::size_t>(r), from = static_cast<std::size_t>(plan.anchor(r));
      head.log_mass(r) = head.log_mass(plan.anchor(r));  // of heads that share a table, each's own
      head.position(r) = head.position(plan.anchor(r));
      for (index_t c = 0; c < state.columns(); ++c) {
        state.column(c)[to] = state.column(c)[from];
      }
    }
    head.truncate(plan.rows());
    state.truncate(plan.rows());
  }

  cache_metadata slots_;
  paged_layout<Scalar> keys_, values_;
  page_table table_;
};

/// `plan`, rounded to whole pages of `slots` slots: the pages in which it keeps most slots stay as
/// they are, all their slots, as many pages as its rows would take; of pages with as many the later
/// one, and the last page, which is being filled, in any case: so fewer slots than rows may stay,
/// and sinks whose page is kept for their sake alone may go. For plans that evict. Refused: merges,
/// weights and corrections, which a page cannot keep.
void whole_pages(const merge_plan& plan, const kv_head auto& head, index_t slots, merge_plan& out) {
  expects(slots > 0, "whole_pages: pages of at least 1 slot expected, ", slots, " came");
  expects(plan.length() == head.length(), "whole_pages: a plan of ", head.length(),
          " slots expected, ", plan.length(), " came");
  check(plan);
  const page_table pages{.slots = slots};
  auto& kept = out.row_of();
  kept.assign(static_cast<std::size_t>(pages.taken_by(plan.length())), 0);
  for (index_t r = 0; r < plan.rows(); ++r) {
    expects(keeps(plan, r), "whole_pages: a plan that evicts expected, row ", r,
            " merges or corrects");
    ++kept[static_cast<std::size_t>(plan.anchor(r) / slots)];
  }
  auto& order = out.order();
  order.resize(kept.size());
  std::iota(order.begin(), order.end(), index_t{0});
  const auto last = static_cast<index_t>(kept.size()) - 1;
  std::ranges::stable_sort(order, std::greater<>{}, [&](index_t p) {
    return std::tuple(p == last, kept[static_cast<std::size_t>(p)], p);
  });
  order.resize(static_cast<std::size_t>(pages.taken_by(plan.rows())));
  std::ranges::sort(order);
  out.reset(plan.length());
  for (const index_t p : order) {
    for (index_t s = p * slots; s < std::min((p + 1) * slots, plan.length()); ++s) {
      out.keep(s, head.log_mass(s));
    }
  }
}

}  // namespace kvfold
