// SPDX-License-Identifier: MIT
/// What a call refuses first: sizes, states and budgets that do not fit together.
#pragma once

#include <cstdint>  // std::int64_t
#include <limits>   // std::numeric_limits

#include "kvmeld/memory/convert.hpp"
#include "kvmeld/policies/policy.hpp"

namespace kvmeld::inline v0 {
namespace detail {

/// Refuses rows of another size than `shape` says, and null. `expected`: "step: expected q".
inline void expect_size(const char* expected, const any_span& x,
                        std::initializer_list<index_t> shape) {
  std::size_t wanted = 1;
  for (const index_t n : shape) {
    wanted *= static_cast<std::size_t>(n);
  }
  if (x.size() == wanted && (wanted == 0 || x.data() != nullptr)) [[likely]] {
    return;
  }
  std::string axes;
  for (const index_t n : shape) {
    axes += (axes.empty() ? "" : ", ") + std::to_string(n);
  }
  expects(x.size() == wanted, expected, " [", axes, "] (", wanted, " numbers), got ", x.size());
  expects(false, expected, " [", axes, "] (", wanted, " numbers), got null");
}

/// A state that `make_head_state` would make for this policy and head.
template <policy P>
void expect_state(const P& p, const head_ref& head, const head_state& state) {
  expects(state.capacity() >= head.capacity(), p.name(), ": expected a state for ", head.capacity(),
          " slots, got one for ", state.capacity());
  expect_policy(p, state);
  const index_t columns = traits::slot_stat_count(p);
  const std::size_t memory = traits::memory(p, head.dim(), head.group(), state.memory_capacity());
  expects(state.slot_stats() == columns && state.memory().size() == memory, p.name(),
          ": expected a state of ", columns, " columns and ", memory, " floats, got ",
          state.slot_stats(), " columns and ", state.memory().size(), " floats");
}

/// Queries of one head as a policy gets them: finite, where the cache checks for it. Of heads of
/// several lengths that are given equally many, the first lie before position 0 and see nothing;
/// `compressor::prompt` refuses more than there are tokens.
template <policy P, class Query>
void expect_queries(const char* expected, const P& p, const head_ref& head,
                    const query_view<Query>& queries) {
  if (queries.count == 0 || !(traits::uses_attention(p) || traits::uses_queries(p))) {
    return;
  }
  expects(queries.data != nullptr, expected, ", got null");
  if (head.check_finite()) {
    const auto all = queries.reference(queries.count + queries.before);
    for (index_t i = 0; i < all.count; ++i) {
      for (index_t g = 0; g < head.group(); ++g) {
        kvmeld::expect_finite(expected, all.at(g, i), head.dim());
      }
    }
  }
}

/// Takes back what a call counted before the policy refused it.
class undo {
 public:
  explicit undo(head_state& state)
      : state_(&state), length_(state.length()), observed_(state.observed()) {}
  undo(const undo&) = delete;
  undo& operator=(const undo&) = delete;
  ~undo() {
    if (state_ != nullptr) {
      state_->truncate(length_);
      state_->count_queries(observed_ - state_->observed());
    }
  }
  /// Nothing is to be taken back.
  void release() { state_ = nullptr; }

 private:
  head_state* state_;
  index_t length_;
  std::int64_t observed_;
};

/// Policies that measure need attention or queries before they decide.
template <policy P>
void expect_measured(const P& p, const head_ref& head, const head_state& state, bool queries,
                     const budget& b) {
  if (head.length() > b.slots && traits::evicts(p)) {
    expects(!traits::uses_attention(p) || queries || state.observed() > 0, p.name(),
            ": expected reference queries or observed attention");
    expects(!traits::uses_queries(p) || traits::supports_decode(p) || queries, p.name(),
            ": expected reference queries");
  }
}

}  // namespace detail

/// Throws unless one more token fits into `head`, under a budget that was checked before.
template <policy P>
void check_token(const P& p, const head_ref& head) {
  expects(errc::unsupported, traits::supports_decode(p), p.name(),
          ": expected a policy that decodes (full_cache or another), got one for prompts only");
  expects(errc::no_capacity, head.length() < head.capacity(), p.name(),
          ": expected a free slot for the token, got all ", head.capacity(), " slots in use");
  head.expect_pages(head.length(), head.length() + 1);
  expects(errc::no_capacity, head.next_position() < std::numeric_limits<index_t>::max(), p.name(),
          ": expected fewer than ", std::numeric_limits<index_t>::max(), " tokens in total, got ",
          head.next_position());
}

/// Throws unless one more token fits into `head` under `b`.
template <policy P>
void check_step(const P& p, const head_ref& head, const budget& b) {
  check(p, b, head.capacity());
  check_token(p, head);
  expects(!traits::evicts(p) || b.trigger_length() <= head.capacity(), p.name(),
          ": expected a capacity of at least ", b.trigger_length(),
          " slots (budget and new token), got ", head.capacity());
}

}  // namespace kvmeld::inline v0
