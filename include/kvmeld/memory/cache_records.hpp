// SPDX-License-Identifier: MIT
/// What caches count, for which an engine has no place: of heads what they keep beside their rows,
/// of pages how many tables have each in use.
#pragma once

#include <atomic>
#include <vector>

#include "kvmeld/memory/layout.hpp"
#include "kvmeld/memory/view.hpp"

namespace kvmeld::inline v0 {

/// What heads keep beside their rows: log-mass, position, lengths.
class head_records {
 public:
  head_records(index_t heads, index_t capacity) : heads_(heads), capacity_(capacity) {
    const auto n = as_size(heads);
    const std::size_t slots = n * as_size(capacity);
    log_mass_.resize(slots), position_.resize(slots);
    length_.resize(n), next_position_.resize(n);
  }

  index_t heads() const { return heads_; }
  index_t capacity() const { return capacity_; }
  /// Slots in use of a head that is there.
  index_t length(index_t h) const { return length_[as_size(h)]; }
  /// Refused: a head that is not there.
  slot_metadata of(index_t h) {
    expects(h >= 0 && h < heads_, "head: expected 0 to ", heads_ - 1, ", got ", h);
    const auto i = as_size(h), first = i * as_size(capacity_);
    return {log_mass_.data() + first, position_.data() + first, &length_[i], &next_position_[i]};
  }

 private:
  index_t heads_, capacity_;
  std::vector<float> log_mass_;
  std::vector<index_t> position_, length_, next_position_;
};

/// How many tables have each page in use, by which a cache refuses changes. Calls of several
/// threads may count at the same time, each those of its own tables.
class page_counts {
 public:
  page_counts() = default;
  /// Pages of one number are counted apart where they are other rows, in heads of several layers or
  /// in several heads of one. Nothing is counted where there is one table for such rows.
  page_counts(const placed_tables& tables, const cache_extents& e, index_t kv_heads,
              bool layers_apart, bool heads_apart)
      : first_(tables.first), requests_(e.requests), kv_heads_(kv_heads) {
    layers_apart = layers_apart && tables.count > e.requests;
    of_head_ = heads_apart ? 1 : 0;
    of_layer_ = layers_apart ? (heads_apart ? kv_heads : 1) : 0;
    const index_t places = (layers_apart ? e.layers : 1) * (heads_apart ? kv_heads : 1);
    if (tables.count > places) {
      tables_ = std::vector<std::atomic<index_t>>(as_size(places, first_.limit));
      counted_.resize(as_size(tables.count) * as_size(tables.stride), page_table::no_page);
    }
  }

  bool empty() const { return tables_.empty(); }
  /// Do several tables have this page of head `h` in use?
  bool shared(index_t h, index_t page) {
    return is_page(page) && tables_with(h, page).load(std::memory_order_relaxed) > 1;
  }
  /// Counts what entries `first` to `last` − 1 of head `h`'s table list as in use, or nothing
  /// there. What is in use before and after is counted at any time.
  void count(index_t h, const page_table& own, index_t first, index_t last, bool in_use) {
    index_t* const counted = empty() ? nullptr : counted_.data() + (own.pages - first_.pages);
    for (const bool comes : {true, false}) {
      for (index_t i = first; i < last && counted != nullptr; ++i) {
        const index_t page = in_use && is_page(own.pages[i]) ? own.pages[i] : page_table::no_page;
        index_t& was = counted[i];
        if (comes && page != was && page != page_table::no_page) {
          tables_with(h, page).fetch_add(1, std::memory_order_relaxed);
        } else if (!comes && page != was) {
          if (was != page_table::no_page) {
            tables_with(h, was).fetch_sub(1, std::memory_order_relaxed);
          }
          was = page;
        }
      }
    }
  }

 private:
  bool is_page(index_t page) const { return page >= 0 && page < first_.limit; }
  std::atomic<index_t>& tables_with(index_t h, index_t page) {
    const index_t place = h / kv_heads_ / requests_ * of_layer_ + h % kv_heads_ * of_head_;
    return tables_[as_size(place, first_.limit) + as_size(page)];
  }

  page_table first_ = {};
  index_t requests_ = 1, kv_heads_ = 1, of_layer_ = 0, of_head_ = 0;
  std::vector<std::atomic<index_t>> tables_;  // [places, pages]
  std::vector<index_t> counted_;              // as the tables were when last counted
};

}  // namespace kvmeld::inline v0
