/// Which heads of a cache a call is for: those of a layer, or of the requests that are active.
#pragma once

#include <span>
#include <vector>

#include "kvmeld/config.hpp"

namespace kvmeld {
inline namespace v0 {

/// Heads `first` to `first + count − 1`.
struct head_range {
  index_t first = 0;
  index_t count = 0;
};

/// A range of heads, or a list of them in any order. A view, as an argument is: the list must live
/// as long.
///
/// Rows of a call's input and output are those of the heads chosen, in their order; policies,
/// budgets and states stay those of the whole cache.
class head_selection {
 public:
  head_selection(head_range range) : range_(range) {}  // NOLINT: a range is a selection
  head_selection(std::span<const index_t> list)        // NOLINT: so is a list
      : range_{0, static_cast<index_t>(list.size())}, list_(list), listed_(true) {}
  head_selection(const std::vector<index_t>& list)  // NOLINT
      : head_selection(std::span<const index_t>(list)) {}

  index_t count() const { return range_.count; }
  /// The `i`-th head chosen.
  index_t operator[](index_t i) const {
    return listed_ ? list_[static_cast<std::size_t>(i)] : range_.first + i;
  }

  /// Refuses heads that are not among `heads`, and a list that has one twice. `marks [heads]`: all
  /// 0, before and after.
  void check(const char* what, index_t heads, std::span<char> marks) const {
    if (!listed_) {
      expects(range_.first >= 0 && range_.count >= 0 && range_.first <= heads &&
                  range_.count <= heads - range_.first,
              what, ": expected a range of heads within 0 to ", heads - 1, ", got ", range_.count,
              " heads from ", range_.first);
      return;
    }
    expects(list_.empty() || list_.data() != nullptr, what, ": expected a list of heads, got null");
    for (const index_t h : list_) {
      expects(h >= 0 && h < heads, what, ": expected heads 0 to ", heads - 1, ", got ", h);
    }
    index_t twice = -1;
    for (const index_t h : list_) {
      char& mark = marks[static_cast<std::size_t>(h)];
      twice = mark != 0 ? h : twice;
      mark = 1;
    }
    for (const index_t h : list_) {
      marks[static_cast<std::size_t>(h)] = 0;
    }
    expects(twice < 0, what, ": expected each head once, got head ", twice, " twice");
  }

 private:
  head_range range_;
  std::span<const index_t> list_;
  bool listed_ = false;
};

}  // namespace v0
}  // namespace kvmeld
