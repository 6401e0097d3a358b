// SPDX-License-Identifier: MIT
/// Which heads of a cache a call is for: of one layer, or of the requests that are active.
#pragma once

#include <array>
#include <cstdint>  // std::uint64_t
#include <span>
#include <vector>

#include "kvmeld/config.hpp"
#include "kvmeld/error.hpp"

namespace kvmeld {
inline namespace v0 {

/// Heads `first` to `first + count − 1`.
struct head_range {
  index_t first = 0;
  index_t count = 0;
};

/// A range of heads, a list of them in any order, or the heads of one layer of some requests
/// (`cache.heads(layer, requests)`). A view, as an argument is: the list must live as long.
///
/// Rows of a call's input and output are those of the heads chosen, in their order; policies,
/// budgets and states stay those of the whole cache.
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
    return listed_ ? first_ + list_[static_cast<std::size_t>(i / each_)] * each_ + i % each_
                   : first_ + i;
  }

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
    std::vector<std::uint64_t> many(all > on_the_stack ? static_cast<std::size_t>(all) / 64 + 1
                                                       : 0);
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

}  // namespace v0
}  // namespace kvmeld
