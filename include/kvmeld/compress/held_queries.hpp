// SPDX-License-Identifier: MIT
/// Queries of one head that are kept until its prompt ends: no more than its policy will need.
#pragma once

#include <algorithm>  // std::transform
#include <cstddef>    // std::size_t
#include <vector>

#include "kvmeld/compress/one_head.hpp"
#include "kvmeld/memory/reserved.hpp"
#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/score/observation.hpp"
#include "kvmeld/score/queries.hpp"

namespace kvmeld::inline v0 {

/// Of a prompt in chunks: the latest queries, which the next chunk is measured with, and
/// those spread over the prompt, which it is planned on. In floats, `[queries, group, dim]`.
/// `observe_prompt` fills it, `planned_queries` reads it.
class held_queries {
 public:
  /// Any query of a prompt that has begun?
  bool begun() const { return tokens_ > 0; }
  /// How many there were.
  index_t tokens() const { return tokens_; }

  /// A chunk's queries with those before it that `use` wants: calls `f(view)`.
  template <class T, class F>
  void with_earlier(const query_view<T>& chunk, index_t group, index_t dim, const prompt_use& use,
                    F f) {
    const index_t before = std::min(use.reach, latest_count(group, dim));
    if (before == 0) {
      return f(chunk);
    }
    const std::ptrdiff_t row = std::ptrdiff_t{group} * dim;
    std::vector<float> both(latest_.end() - before * row, latest_.end());
    add_rows(chunk, 0, chunk.count, group, dim, both);
    f(query_view<float>{.data = both.data() + before * row,
                        .count = chunk.count,
                        .head = 0,
                        .group = dim,
                        .row = row,
                        .before = before});
  }

  /// Keeps of a chunk what `use` will want later. The chunk's first query is at position `first`.
  template <class T>
  void keep(const query_view<T>& chunk, index_t first, index_t group, index_t dim,
            const prompt_use& use) {
    const bool latest = use.plans == prompt_use::planned::latest;
    if (const index_t reach = std::max(use.reach, latest ? use.count : 0); reach > 0) {
      const index_t now = std::min(reach, chunk.count);
      add_rows(chunk, chunk.count - now, now, group, dim, latest_);
      const std::size_t most = as_size(reach, group, dim);
      if (latest_.size() > 2 * most || now == reach) {
        latest_.erase(latest_.begin(), latest_.end() - static_cast<std::ptrdiff_t>(most));
      }
    }
    if (!latest && use.plans != prompt_use::planned::none) {
      spread(chunk, first, group, dim, use.count);
    }
    tokens_ += chunk.count;
  }

  /// What the head is planned on, `count` at most, at the queries' own positions or, with
  /// lookahead, shifted from `next_position` on (a query's content repeats, its rotation does not).
  query_view<float> planned(const rotary& rope, index_t group, index_t dim, const prompt_use& use,
                            index_t next_position) {
    const std::ptrdiff_t row = std::ptrdiff_t{group} * dim;
    if (use.plans == prompt_use::planned::latest) {
      const index_t held = latest_count(group, dim), n = std::min(use.count, held);
      return {.data = latest_.data() + (held - n) * row,
              .count = n,
              .head = 0,
              .group = dim,
              .row = row};
    }
    thin(tokens_, group, dim, use.count);
    const auto n = static_cast<index_t>(position_.size());
    if (use.plans == prompt_use::planned::lookahead) {
      rotation turn(rope, dim);
      for (index_t i = 0; i < n; ++i) {
        index_t& position = position_[as_size(i)];
        const index_t to = next_position + use.positions(i, n);
        turn.by(to - position);
        position = to;
        for (index_t g = 0; g < group; ++g) {
          turn(spread_.data() + (std::ptrdiff_t{i} * group + g) * dim);
        }
      }
    }
    return {.data = spread_.data(),
            .count = n,
            .head = 0,
            .group = dim,
            .row = row,
            .position = position_.data()};
  }

  /// Memory held, in bytes.
  std::size_t bytes() const {
    return sizeof(float) * (latest_.capacity() + spread_.capacity()) +
           sizeof(index_t) * position_.capacity();
  }
  /// Forgets the prompt, and gives the memory back.
  void release() { *this = held_queries(); }

 private:
  index_t latest_count(index_t group, index_t dim) const {
    return static_cast<index_t>(latest_.size() / as_size(group, dim));
  }

  template <class T>
  static void add_rows(const query_view<T>& from, index_t first, index_t count, index_t group,
                       index_t dim, auto& to) {
    if (to.empty()) {
      to.reserve(as_size(count, group, dim));
    }
    for (index_t i = first; i < first + count; ++i) {
      for (index_t g = 0; g < group; ++g) {
        const T* const q = from.at(g, i);
        std::transform(q, q + dim, std::back_inserter(to),
                       [](T x) { return static_cast<float>(x); });
      }
    }
  }

  /// Adds at most `count` of a chunk's queries, evenly spread. A prompt of one chunk has just those
  /// of `score::spread_query`; its first ones see next to nothing and are left out.
  template <class T>
  void spread(const query_view<T>& chunk, index_t first, index_t group, index_t dim,
              index_t count) {
    const index_t blind = tokens_ == 0 ? std::min(score::blind_queries, chunk.count - 1) : 0,
                  n = std::min(count, chunk.count - blind);
    start_ = tokens_ == 0 ? first : start_;
    spread_.reserve(tokens_ == 0 ? as_size(n, group, dim) : 0);
    for (index_t i = 0; i < n; ++i) {
      const index_t own = score::spread_query(i, n, chunk.count, blind);
      add_rows(chunk, own, 1, group, dim, spread_);
      position_.push_back(first + own);
    }
    if (position_.size() > 2 * as_size(count)) {
      thin(tokens_ + chunk.count, group, dim, count);
    }
  }

  /// Of those held the `count` that are nearest to an even spread over `all` tokens.
  void thin(index_t all, index_t group, index_t dim, index_t count) {
    const std::size_t row = as_size(group, dim), wanted = as_size(count);
    if (position_.size() <= wanted) {
      return;
    }
    const index_t blind = std::min(score::blind_queries, all - 1);
    std::size_t next = 0;
    for (std::size_t i = 0; i < wanted; ++i) {
      const index_t at = start_ + score::spread_query(static_cast<index_t>(i), count, all, blind);
      const auto distance = [&](std::size_t j) { return std::abs(position_[j] - at); };
      const std::size_t last = position_.size() - (wanted - i);  // leaves enough for the others
      while (next < last && distance(next + 1) <= distance(next)) {
        ++next;
      }
      std::copy_n(spread_.begin() + static_cast<std::ptrdiff_t>(next * row), row,
                  spread_.begin() + static_cast<std::ptrdiff_t>(i * row));
      position_[i] = position_[next++];
    }
    spread_.resize(wanted * row), position_.resize(wanted);
  }

  index_t tokens_ = 0, start_ = 0;
  // Of all heads until a prompt ends: the system has these back then.
  detail::reserved_vector<float> latest_, spread_;
  std::vector<index_t> position_;
};

/// Measures one head on a prompt's own queries, or on its next chunk's, whose rows were appended
/// before: `queries.count` of the latest tokens. `held` keeps what the policy will plan on.
/// Refused, with nothing changed: as by `observe`.
template <policy P, class Query>
void observe_prompt(const P& p, const head_ref& head, head_state& state, held_queries& held,
                    const query_view<Query>& queries) {
  const prompt_use use = declared(p).prompt_use();
  expects(queries.count >= 0, "observe_prompt: expected at least 0 queries, got ", queries.count);
  detail::expect_state(p, head, state);
  detail::expect_queries("observe_prompt: expected finite queries", p, head, queries);
  if (use.observes) {
    held.with_earlier(queries, head.group(), head.dim(), use,
                      [&](const auto& view) { observe(p, head, state, view); });
  } else {
    state.extend(head.length());
  }
  held.keep(queries, head.next_position() - queries.count, head.group(), head.dim(), use);
}

/// The queries that `compress` takes after a prompt, rows of `held`; none where the policy plans on
/// none. Those that are spread over the prompt are observed too: to be called once a prompt.
template <policy P>
query_view<float> planned_queries(const P& p, const head_ref& head, head_state& state,
                                  held_queries& held) {
  const prompt_use use = declared(p).prompt_use();
  if (!held.begun() || use.plans == prompt_use::planned::none) {
    return {};
  }
  const query_view<float> planned =
      held.planned(head.spec().rope, head.group(), head.dim(), use, head.next_position());
  if (use.plans != prompt_use::planned::latest) {
    observe(p, head, state, planned);
  }
  return planned;
}

}  // namespace kvmeld::inline v0
