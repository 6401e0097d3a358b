// One head, its policy and its state: what tests send through several steps.
#pragma once

#include <set>
#include <vector>

#include "support/fixtures.hpp"
#include "support/policies.hpp"

namespace fixtures {

struct one_head {
  static constexpr index_t dim = 8, group = 2;

  kvfold::any_policy policy;
  kvfold::cache<float> kv{{.heads = 1, .group = group, .dim = dim, .capacity = 200}};
  kvfold::state state = kvfold::make_state(policy, kv);
  std::vector<float> out = std::vector<float>(group * dim);

  kvfold::head_view<float> head() { return kv.head(0); }
  index_t length() { return head().length(); }
  std::set<index_t> positions() {
    std::set<index_t> all;
    for (index_t s = 0; s < length(); ++s) {
      all.insert(head().position(s));
    }
    return all;
  }
  /// All positions of `[from, to)`.
  bool holds(index_t from, index_t to) {
    const auto all = positions();
    for (index_t p = from; p < to; ++p) {
      if (!all.contains(p)) {
        return false;
      }
    }
    return true;
  }
};

}  // namespace fixtures
