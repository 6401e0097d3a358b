// SPDX-License-Identifier: MIT
// A policy on all heads of a cache, one head after the other, for tests that look into its states.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "kvmeld/compress/one_head.hpp"
#include "kvmeld/compress/saved_heads.hpp"

namespace fixtures {

using kvmeld::clear, kvmeld::compress, kvmeld::copy, kvmeld::observe, kvmeld::step;  // of one head
using kvmeld::index_t;

/// The states of all heads, and memory to work in.
class state {
 public:
  explicit state(std::vector<kvmeld::head_state> heads) : heads_(std::move(heads)) {}

  kvmeld::head_state& operator[](index_t h) { return heads_[static_cast<std::size_t>(h)]; }
  const kvmeld::head_state& operator[](index_t h) const {
    return heads_[static_cast<std::size_t>(h)];
  }
  kvmeld::workspace& workspace() { return work_; }

 private:
  std::vector<kvmeld::head_state> heads_;
  kvmeld::workspace work_;
};

/// A policy or budget for all heads, or a span with one per head.
const auto& of_head(const auto& one_or_each, index_t h) {
  if constexpr (requires { one_or_each[0]; }) {
    return one_or_each[static_cast<std::size_t>(h)];
  } else {
    return one_or_each;
  }
}

state make_state(const auto& policy, kvmeld::kv_cache auto& kv) {
  std::vector<kvmeld::head_state> heads;
  for (index_t h = 0; h < kv.heads(); ++h) {
    heads.push_back(kvmeld::make_head_state(of_head(policy, h), kv.head(h)));
  }
  state all(std::move(heads));
  all.workspace().reserve(kv.head(0));
  return all;
}

template <class T>
void observe(const auto& policy, kvmeld::kv_cache auto& kv, state& all,
             const kvmeld::query_view<T>& queries) {
  for (index_t h = 0; h < kv.heads(); ++h) {
    if (kv.head(h).length() > 0) {
      kvmeld::observe(of_head(policy, h), kv.head(h), all[h], queries.of(h));
    }
  }
}

/// Measures every head on its queries, and brings it to its budget.
template <class T>
void compress(const auto& policy, kvmeld::kv_cache auto& kv, state& all,
              const kvmeld::query_view<T>& queries, const auto& budget) {
  for (index_t h = 0; h < kv.heads(); ++h) {
    if (kv.head(h).length() > 0) {
      kvmeld::check(of_head(policy, h), of_head(budget, h), kv.head(h).capacity());
      kvmeld::observe(of_head(policy, h), kv.head(h), all[h], queries.of(h));
      kvmeld::compress(of_head(policy, h), kv.head(h), all[h], all.workspace(), of_head(budget, h),
                       queries.of(h));
    }
  }
}

/// One token of every head.
void step(const auto& policy, kvmeld::kv_cache auto& kv, state& all, const kvmeld::step_input& in,
          const auto& budget, std::span<float> out) {
  const index_t group = kv.head(0).group(), dim = kv.head(0).dim(), rows = group * dim,
                of_v = kv.head(0).value_dim();
  float* const buffer = all.workspace().input.data();
  for (std::ptrdiff_t h = 0; h < kv.heads(); ++h) {
    const auto head = static_cast<index_t>(h);
    kvmeld::check_step(of_head(policy, head), kv.head(head), of_head(budget, head));
    kvmeld::step(of_head(policy, head), kv.head(head), all[head], all.workspace(),
                 in.q.floats(h * rows, rows, buffer), in.k.floats(h * dim, dim, buffer + rows),
                 in.v.floats(h * of_v, of_v, buffer + rows + dim), of_head(budget, head),
                 out.data() + h * group * of_v);
  }
}

/// As a compressor saves the heads of a request.
template <class Policy, class Cache>
struct all_heads {
  const Policy& policies;
  Cache& kv;
  fixtures::state& states;

  index_t count() const { return kv.heads(); }
  const auto& policy(index_t h) const { return of_head(policies, h); }
  kvmeld::head_ref head(index_t h) const { return kv.head(h); }
  void expect_fits(index_t h, index_t length, index_t) const { kv.head(h).expect_pages(0, length); }
  static index_t like(index_t h) { return h; }
  kvmeld::head_state& state(index_t h) const { return states[h]; }
};

template <class Policy, class Cache>
void save(std::ostream& out, const Policy& policy, Cache& kv, state& all) {
  all_heads<Policy, Cache> heads{policy, kv, all};
  kvmeld::detail::save_heads(out, heads);
}
template <class Policy, class Cache>
void load(std::istream& in, const Policy& policy, Cache& kv, state& all) {
  all_heads<Policy, Cache> heads{policy, kv, all};
  kvmeld::detail::load_heads(in, heads);
}

}  // namespace fixtures
