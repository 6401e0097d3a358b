// SPDX-License-Identifier: MIT
/// What caches count, for which an engine has no place: of heads what they keep beside their rows,
/// of pages how many tables have each in use.
#pragma once

#include <algorithm>  // std::min, std::max
#include <atomic>
#include <cstring>  // std::memcpy
#include <memory>   // std::unique_ptr
#include <mutex>
#include <vector>

#include "kvmeld/memory/layout.hpp"
#include "kvmeld/memory/reserved.hpp"
#include "kvmeld/memory/view.hpp"

namespace kvmeld::inline v0 {

/// What heads keep beside their rows: log-mass, position, lengths. With `requests`, of layers of
/// `kv_heads` heads each, also which have a draft open.
class head_records {
 public:
  head_records(index_t heads, index_t capacity, index_t requests = 0, index_t kv_heads = 1)
      : heads_(heads),
        capacity_(capacity),
        kv_heads_(kv_heads),
        log_mass_(as_size(heads, capacity) * sizeof(float)),
        position_(as_size(heads, capacity) * sizeof(index_t)),
        length_(as_size(heads)),
        next_position_(as_size(heads)),
        kept_(as_size(heads)),
        drafts_(as_size(requests)) {}
  /// A copy has the slots in use alone, no drafts, and nothing that a compressor knows of.
  head_records(const head_records& from)
      : head_records(from.heads_, from.capacity_, static_cast<index_t>(from.drafts_.size()),
                     from.kv_heads_) {
    length_ = from.length_, next_position_ = from.next_position_;
    copy_rows(from.log_mass_, log_mass_, sizeof(float));
    copy_rows(from.position_, position_, sizeof(index_t));
  }
  head_records(head_records&&) noexcept = default;
  head_records& operator=(head_records&&) noexcept = default;
  ~head_records() = default;

  /// Copies what heads have in memory of `row` bytes per slot, `[heads, capacity]`.
  void copy_rows(const detail::reserved& from, detail::reserved& to, std::size_t row) const {
    for (index_t h = 0; h < heads_; ++h) {
      const std::size_t first = as_size(h, capacity_) * row;
      std::memcpy(to.data() + first, from.data() + first, as_size(length(h)) * row);
    }
  }

  index_t heads() const { return heads_; }
  index_t capacity() const { return capacity_; }
  /// Slots in use of a head that is there.
  index_t length(index_t h) const { return length_[as_size(h)]; }
  /// Refused: a head that is not there.
  slot_metadata of(index_t h) {
    expects(h >= 0 && h < heads_, "head: expected 0 to ", heads_ - 1, ", got ", h);
    const auto i = as_size(h), first = i * as_size(capacity_);
    std::atomic<index_t>* const drafts =
        drafts_.empty() ? nullptr : &drafts_[as_size(h / kv_heads_) % drafts_.size()];
    return {reinterpret_cast<float*>(log_mass_.data()) + first,
            reinterpret_cast<index_t*>(position_.data()) + first,
            &length_[i],
            &next_position_[i],
            &kept_[i],
            drafts};
  }

  /// Gives back what such memory holds of head `h` beyond `slots` slots, and those in use.
  void give_back(index_t h, index_t slots, detail::reserved& rows, std::size_t row) const {
    const auto used = std::min(capacity_, std::max(slots, length(h)));
    rows.release((as_size(h, capacity_) + as_size(used)) * row, as_size(h + 1, capacity_) * row);
  }
  void give_back(index_t h, index_t slots) {
    give_back(h, slots, log_mass_, sizeof(float));
    give_back(h, slots, position_, sizeof(index_t));
  }
  /// Bytes that are held, lengths aside.
  std::size_t held() const { return log_mass_.held() + position_.held(); }

 private:
  index_t heads_, capacity_, kv_heads_;
  detail::reserved log_mass_, position_;  // [heads, capacity]
  std::vector<index_t> length_, next_position_, kept_;
  std::vector<std::atomic<index_t>> drafts_;  // [requests]
};

/// How many tables have each page in use, by which a cache refuses changes. Calls of several
/// threads may count at the same time, each those of its own heads, which may share a table.
class page_counts {
 public:
  page_counts() = default;
  /// Pages of one number are counted apart where they are other rows, in heads of several layers or
  /// in several heads of one. Nothing is counted where there is one table for such rows.
  page_counts(const placed_tables& tables, const cache_extents& e, index_t kv_heads,
              bool layers_apart, bool heads_apart)
      : all_(tables), requests_(e.requests), kv_heads_(kv_heads) {
    layers_apart = layers_apart && tables.count > e.requests;
    of_head_ = heads_apart ? 1 : 0;
    of_layer_ = layers_apart ? (heads_apart ? kv_heads : 1) : 0;
    const index_t places = (layers_apart ? e.layers : 1) * (heads_apart ? kv_heads : 1);
    if (tables.count > places) {
      tables_ = std::vector<std::atomic<index_t>>(as_size(places, tables.first.limit));
      counted_.resize(as_size(tables.count) * as_size(tables.stride), page_table::no_page);
      used_.resize(as_size(e.layers * e.requests * kv_heads));
      locks_ = std::make_unique<std::mutex[]>(as_size(tables.count));
    }
  }

  bool empty() const { return tables_.empty(); }
  /// Do several tables have this page of head `h` in use?
  bool shared(index_t h, index_t page) {
    return is_page(page) && tables_with(h, page).load(std::memory_order_relaxed) > 1;
  }
  /// Head `h` has the first `used` entries of its table in use, whatever the table lists there by
  /// now. What is in use before and after is counted at any time.
  void take(index_t h, index_t used) {
    if (!empty()) {
      const std::lock_guard lock(lock_of(h));
      used_[as_size(h)] = used;
      count(h, 0, used, true);
    }
  }
  /// The same, and of its table's entries no others than those that some head has in use.
  void take_only(index_t h, index_t used, index_t entries) {
    if (!empty()) {
      const std::lock_guard lock(lock_of(h));
      used_[as_size(h)] = used;
      all_.each_sharing(h, static_cast<index_t>(used_.size()),
                        [&](index_t i) { used = std::max(used, used_[as_size(i)]); });
      count(h, 0, used, true);
      count(h, used, entries, false);
    }
  }

 private:
  std::mutex& lock_of(index_t h) { return locks_[as_size(h / all_.heads_each % all_.count)]; }
  void count(index_t h, index_t first, index_t last, bool in_use) {
    const page_table own = all_.of(h);
    index_t* const counted = counted_.data() + (own.pages - all_.first.pages);
    for (const bool comes : {true, false}) {
      for (index_t i = first; i < last; ++i) {
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
  bool is_page(index_t page) const { return page >= 0 && page < all_.first.limit; }
  std::atomic<index_t>& tables_with(index_t h, index_t page) {
    const index_t place = h / kv_heads_ / requests_ * of_layer_ + h % kv_heads_ * of_head_;
    return tables_[as_size(place, all_.first.limit) + as_size(page)];
  }

  placed_tables all_;
  index_t requests_ = 1, kv_heads_ = 1, of_layer_ = 0, of_head_ = 0;
  std::vector<std::atomic<index_t>> tables_;  // [places, pages]
  std::vector<index_t> counted_;              // as the tables were when last counted
  std::vector<index_t> used_;                 // [heads] entries of its table, as last counted
  std::unique_ptr<std::mutex[]> locks_;       // [tables] for these two
};

}  // namespace kvmeld::inline v0
