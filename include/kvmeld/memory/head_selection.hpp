// SPDX-License-Identifier: MIT
/// Which heads of a cache a call is for: of one layer, or of the requests that are active.
#pragma once

#include <array>
#include <atomic>
#include <span>
#include <vector>

#include "kvmeld/memory/view.hpp"

namespace kvmeld::inline v0 {

/// Heads `first` to `first + count − 1`: `head_range{h, 1}` is head `h` alone, and
/// `head_range{kv.heads(layer, request)[0], 2}` the first two of a layer and request.
struct head_range {
  index_t first = 0;
  index_t count = 0;
};

/// A range of heads, a list of them in any order, or the heads of one layer of some requests
/// (`cache.heads(layer, requests)`). A view, as an argument is: the list must live as long.
///
/// Rows of a call's input and output are those of the heads chosen, in their order; policies,
/// budgets and states stay those of the whole cache. `heads[i]` is the number of the `i`-th;
/// `for (const index_t h : kv.heads(layer, request))` is over all of them.
class head_selection {
 public:
  head_selection(head_range range)
      : first_(range.first), count_(range.count) {}  // NOLINT: it is one
  head_selection(std::span<const index_t> list)      // NOLINT: so is a list
      : count_(static_cast<index_t>(list.size())), list_(list), listed_(true) {}
  head_selection(const std::vector<index_t>& list)  // NOLINT
      : head_selection(std::span<const index_t>(list)) {}
  /// The `each` heads of every request listed, in the layer that begins with head `first`.
  head_selection(index_t first, index_t each, std::span<const index_t> requests)
      : first_(first),
        count_(static_cast<index_t>(requests.size()) * each),
        each_(each),
        list_(requests),
        listed_(true) {}

  index_t count() const { return count_; }
  /// The `i`-th head chosen.
  index_t operator[](index_t i) const {
    return listed_ ? first_ + list_[as_size(i / each_)] * each_ + i % each_ : first_ + i;
  }

  class iterator {
   public:
    using value_type = index_t;
    using difference_type = std::ptrdiff_t;

    iterator() = default;
    iterator(const head_selection& heads, index_t i) : heads_(&heads), i_(i) {}
    index_t operator*() const { return (*heads_)[i_]; }
    iterator& operator++() {
      ++i_;
      return *this;
    }
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
  iterator begin() const { return {*this, 0}; }
  iterator end() const { return {*this, count()}; }

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
