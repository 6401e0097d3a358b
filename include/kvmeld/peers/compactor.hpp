// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::binary_search
#include <cmath>      // std::sqrt
#include <cstdint>    // std::int64_t

#include "kvmeld/detail/product.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/leverage.hpp"
#include "kvmeld/search/match.hpp"

namespace kvmeld::inline v0 {

/// Compactor (arXiv 2507.08143): outliers among keys, and attention within chunks of the prompt.
///   score   prompt: s_j = blend · l_j + a_j, each of mean 0 and standard deviation 1; decode: l_j.
///           l_j: leverage of the un-rotated key (exact; the paper sketches it). a_j: non-causal
///           attention that j receives from the queries of its own chunk, times ‖v_j‖, averaged
///           with both neighbours (zeros beyond the ends). It is kept when another prompt follows
///   select  sinks and the last W, then the top of the rest by s
///   match   none: the others are evicted
/// Leverage is of the slots that may be evicted, in position order. Queries that are not the slots'
/// own (lookahead) measure nothing here: give the prompt's.
struct compactor {
  index_t sinks = 4;
  index_t window = 4;
  index_t chunk = 256;
  float blend = -1;

  static constexpr std::string_view name() { return "compactor"; }
  static constexpr attention_support supports() {
    return {.alibi = false, .why = "it attends within chunks without positions"};
  }
  static constexpr std::tuple options{
      option("sinks", &compactor::sinks, 0, any_count, "first tokens, never evicted"),
      option("window", &compactor::window, 0, any_count, "latest tokens, never evicted"),
      option("chunk", &compactor::chunk, 1, any_count, "slots that attend to each other"),
      option("blend", &compactor::blend, any_negative, any_number,
             "weight of leverage; negative: the share of slots that are evicted")};
  static constexpr column received{0, "received"};  // a_j
  static constexpr std::array columns{received};
  static constexpr std::size_t memory(index_t, index_t, index_t) { return 1; }  // 1: a prompt
  protection protects(const kv_head auto&, index_t) const {
    return {.sinks = sinks, .recent = window};
  }
  index_t eviction_batch(index_t slots) const { return slots / 16; }
  static constexpr observation_needs needs() { return {}; }
  kvmeld::prompt_use prompt_use() const { return {.observes = true, .reach = chunk + window}; }

  static constexpr bool shares() { return true; }
  void shared_scores(const kv_head auto& head, const head_state& state,
                     std::span<float> out) const {
    score::write_shares(state.column(received), group_combine::sum, head.group(),
                        std::min(chunk, head.length()), out);
  }

  void observe(const kv_head auto&, head_state& state, const observation&) const {
    state.memory()[0] = 0;
  }
  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    state.memory()[0] = 1;
    const auto from_queries = state.column(received);
    // The part of a prompt before it has received what it will, but for the last of it, which was
    // in the window or shares its chunk with new tokens.
    const auto before = std::min(std::int64_t{queries.before}, std::int64_t{chunk} + window);
    const auto reach = queries.reference(queries.count + static_cast<index_t>(before));
    const index_t open =
        queries.position == nullptr ? head.next_position() - queries.count - window : 0;
    const auto keys = dense::keys(head), all = dense::queries(reach, head.group(), head.dim());
    const auto log_mass = dense::log_mass(head);
    std::vector<index_t> others;
    std::vector<detail::keyed_slot> keyed;
    list_candidates(head, others, keyed);
    const auto size = as_size(chunk);
    for (std::size_t begin = 0; begin < others.size(); begin += size) {
      const auto slots = std::span(others).subspan(begin, std::min(size, others.size() - begin));
      if (head.position(slots.back()) < open) {
        continue;
      }
      std::vector<Eigen::Index> own;  // one query head's after another's
      for (index_t g = 0; g < head.group(); ++g) {
        for (index_t i = 0; i < reach.count; ++i) {
          const index_t at = reach.position_of(i, head.next_position());
          if (std::ranges::binary_search(slots, at, {},
                                         [&](index_t s) { return head.position(s); })) {
            own.push_back(Eigen::Index{g} * reach.count + i);
          }
        }
      }
      const auto q = all(own, Eigen::all).eval(), k = keys(slots, Eigen::all).eval();
      const dense::matrix nothing(k.rows(), 0);
      const auto beta = log_mass(slots).eval();
      const auto a = dense::attend(q, k, nothing, beta, score::logit_terms(head));
      for (std::size_t j = 0; j < slots.size(); ++j) {
        from_queries[as_size(slots[j])] = a.mass[static_cast<Eigen::Index>(j)];
      }
    }
  }

  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    list_candidates(head, work.order, work.keyed);
    const auto& others = work.order;
    // Types that depend on the head's: what is made of them is compiled where it is used.
    const auto n = head.length(), dim = head.dim(), m = static_cast<decltype(n)>(others.size());
    const auto d = as_size(dim), rows = as_size(m);
    detail::arena scratch(work.numbers, as_size(n) + rows * (2 + d) + score::leverage_floats(dim));
    auto score = scratch.column(n), leverage = scratch.column(m), attended = scratch.column(m);
    auto x = scratch.rows(m, dim);
    rotation turn(head.spec().rope, dim);
    for (index_t j = 0; j < m; ++j) {
      score::unrotated_key(head, others[as_size(j)], turn, &x(j, 0));
    }
    score::leverage(x, 0.01F, scratch, leverage);
    if (state.memory()[0] != 0) {
      for (index_t j = 0; j < m; ++j) {
        const index_t s = others[as_size(j)];
        attended[j] = state.column(received)[as_size(s)] * norm(head.value(s), head.value_dim());
      }
      float before = 0;
      for (index_t j = 0; j < m; ++j) {
        const float own = attended[j];
        attended[j] = (before + own + (j + 1 < m ? attended[j + 1] : 0.0F)) / 3;
        before = own;
      }
      standardise(attended), standardise(leverage);
      const float share = static_cast<float>(target) / static_cast<float>(n);
      leverage = (blend < 0 ? 1 - share : blend) * leverage + attended;
    }
    score.setZero();
    for (index_t j = 0; j < m; ++j) {
      score[others[as_size(j)]] = leverage[j];
    }
    evict(head, target, protected_slots(head, sinks, window),
          search::column_score({score.data(), as_size(n)}), work, out);
  }

 private:
  /// The slots that may be evicted, in position order.
  void list_candidates(const kv_head auto& head, std::vector<index_t>& others,
                       std::vector<detail::keyed_slot>& keyed) const {
    const auto is_protected = protected_slots(head, sinks, window);
    others.clear();
    for (index_t s = 0; s < head.length(); ++s) {
      if (!is_protected(s)) {
        others.push_back(s);
      }
    }
    detail::sort_by_position(head, others, keyed);
  }
  static void standardise(dense::stored auto& x) {
    x.array() -= x.mean();
    const auto n = static_cast<float>(std::max(x.size() - 1, Eigen::Index{1}));
    x /= std::max(std::sqrt(x.squaredNorm() / n), 1e-6F);
  }
};

}  // namespace kvmeld::inline v0
