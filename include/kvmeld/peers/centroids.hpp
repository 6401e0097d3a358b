// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>  // std::log

#include "kvmeld/memory/fields.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/softmax.hpp"
#include "kvmeld/search/cluster.hpp"
#include "kvmeld/search/match.hpp"

namespace kvmeld::inline v0 {

/// Centroids: k-means of keys as the whole cache (Multipole Attention's centroids).
///   score   none
///   select  sinks and the last W are kept as they are
///   match   prompt: k-means of the others' stored keys, seeds evenly spread over them;
///           decode: the token that has passed the window joins the nearest of the others, by
///           Euclidean distance
///   merge   means by n = exp(β), the tokens that a slot stands for; β = ln Σ n
/// A cluster lies at its seed. When more tokens were appended since the head was last within its
/// budget than half of that budget, they are a prompt, or a chunk of one, and all are clustered
/// anew.
struct centroids {
  index_t sinks = 4;
  index_t window = 32;
  index_t rounds = 10;

  static constexpr std::string_view name() { return "centroids"; }
  static constexpr attention_support supports() { return {.alibi = false}; }
  static constexpr std::tuple options{
      option("sinks", &centroids::sinks, 0, any_count, "first tokens, kept as they are"),
      option("window", &centroids::window, 0, any_count, "latest tokens, kept as they are"),
      option("rounds", &centroids::rounds, 1, any_count, "of k-means (Lloyd)")};
  /// Of `after_compress`.
  static constexpr std::size_t memory(index_t, index_t, index_t) { return 1; }
  protection protects(const kv_head auto&, index_t) const {
    return {.sinks = sinks, .recent = window};
  }

  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    const auto is_protected = protected_slots(head, sinks, window);
    auto& into = work.row_of;
    auto& others = work.order;
    into.clear(), others.clear();
    for (index_t s = 0; s < head.length(); ++s) {
      into.push_back(s);
      if (!is_protected(s)) {
        others.push_back(s);
      }
    }
    const index_t count = target - head.length() + static_cast<index_t>(others.size());
    expects(count > 0, "centroids: expected a budget of more than ", target - count,
            " slots (protected), got ", target);
    if (prompt(head, state, target)) {
      detail::sort_by_position(head, others, work.keyed);
      cluster_prompt(head, count, others, into);
    } else {
      detail::select_slots(
          others, count, [&](index_t s) { return detail::ascending(head.position(s)); },
          work.keyed);
      const auto staying = std::span(others).first(as_size(count));
      auto& marks = work.marks;
      marks.assign(into.size(), 0);
      for (const index_t s : staying) {
        marks[as_size(s)] = 1;
      }
      for (const index_t s : std::span(others).subspan(staying.size())) {
        into[as_size(s)] =
            search::nearest_by_distance(head, s, [&](index_t r) { return marks[as_size(r)] != 0; });
      }
    }
    write(head, work, out);
  }

  /// Remembers how many tokens had been appended when the head was last within its budget.
  void after_compress(const kv_head auto& head, head_state& state, index_t) const {
    integer_field().set(state.memory().data(), head.next_position());
  }

 private:
  static bool prompt(const kv_head auto& head, const head_state& state, index_t target) {
    return head.next_position() - integer_field().get(state.memory().data()) > target / 2;
  }

  void cluster_prompt(const kv_head auto& head, index_t count, const std::vector<index_t>& others,
                      std::vector<index_t>& into) const {
    // Types that depend on the head's: what is made of them is compiled where it is used.
    const auto x = dense::keys(head)(others, Eigen::all).eval();
    const auto beta = dense::log_mass(head)(others).eval();
    const dense::vector tokens = (beta.array() - beta.maxCoeff()).exp();  // up to a factor
    std::vector<index_t> seeds, cluster(others.size());
    for (index_t c = 0; c < count; ++c) {
      seeds.push_back(static_cast<index_t>(std::int64_t{c} * x.rows() / count));
    }
    auto centres = x(seeds, Eigen::all).eval();
    search::nearest(x, centres, cluster);
    search::lloyd<float>(x, tokens, rounds - 1, centres, cluster);
    for (index_t c = 0; c < count; ++c) {
      cluster[as_size(seeds[as_size(c)])] = c;
    }
    for (std::size_t i = 0; i < others.size(); ++i) {
      const auto seed = as_size(seeds[as_size(cluster[i])]);
      into[as_size(others[i])] = others[seed];
    }
  }

  /// The weights of a row's members: the tokens they stand for.
  struct weights {
    score::softmax<> all;

    weights(const kv_head auto& head, std::span<const index_t> members) {
      for (const index_t s : members) {
        all.add(head.log_mass(s));
      }
    }
    float of(const kv_head auto& head, index_t s) const {
      return std::exp(head.log_mass(s) - all.max) / all.sum;
    }
    float log_mass() const { return all.log_sum_exp(); }
  };

  static void write(const kv_head auto& head, slot_scratch& work, merge_plan& out) {
    merge::write_rows(head, work, out, [&](std::span<const index_t> members) {
      const weights made(head, members);
      for (const index_t s : members) {
        const float w = made.of(head, s);
        out.add({s, w, w});
      }
      return made.log_mass();
    });
  }
};

}  // namespace kvmeld::inline v0
