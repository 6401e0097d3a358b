// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::copy
#include <cmath>      // std::isfinite

#include "kvmeld/detail/product.hpp"
#include "kvmeld/memory/fields.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/softmax.hpp"
#include "kvmeld/score/tile_products.hpp"

namespace kvmeld::inline v0 {

/// R-KV (arXiv 2505.24133): what the latest queries attend to, less what other keys say as well.
///   score   λ I_j − (1 − λ) R_j
///           I_j is an attention: the group's largest logit, softmax over the slots outside the
///           window, mean over the last W queries, largest of `kernel` neighbours.
///           R_j is a redundancy: the mean cosine of k_j with all other keys, softmax over all
///           slots. Of the keys whose cosine with a key is above .5, the latest is left out.
///   select  sinks (the paper: 0) and the last W tokens, then the top of the rest by s
///   match   none: the others are evicted
/// O(length² · dim) a plan: the paper makes one for 128 of 1,024 slots.
struct r_kv {
  index_t sinks = 4;
  index_t window = 8;
  index_t kernel = 7;
  float lambda = 0.07F;

  static constexpr std::string_view name() { return "r_kv"; }
  static constexpr attention_support supports() { return {}; }
  static constexpr std::tuple options{
      option("sinks", &r_kv::sinks, 0, any_count, "first tokens, never evicted (the paper: 0)"),
      option("window", &r_kv::window, 1, any_count,
             "latest queries, whose tokens are never evicted"),
      option("kernel", &r_kv::kernel, 1, any_count,
             "neighbours that an importance is the largest of, an odd number"),
      option("lambda", &r_kv::lambda, 0, 1, "weight of importance; the rest is of redundancy")};
  std::size_t memory(index_t dim, index_t group, index_t) const {
    return as_size(window_queries{window, group, dim}.all.size);
  }
  protection protects(const kv_head auto&, index_t) const {
    return {.sinks = sinks, .recent = window};
  }
  index_t eviction_batch(index_t slots) const { return slots / 8; }
  static constexpr observation_needs needs() { return {.query = true}; }
  kvmeld::prompt_use prompt_use() const { return {.observes = true, .latest = window}; }
  void validate() const { expects(kernel % 2 == 1, "r_kv: expected an odd kernel, got ", kernel); }

  void observe(const kv_head auto& head, head_state& state, const observation& observed) const {
    observe(head, state, query_of_step(name(), observed, head.dim()));
  }
  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    const query_view<float> latest = queries.last(window);  // of those that a caller chose
    for (index_t i = 0; i < latest.count; ++i) {
      hold(head, state, latest, i);
    }
  }

  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    const index_t n = head.length(), dim = head.dim();
    detail::arena scratch(work.numbers, 3 * as_size(n) +
                                            as_size(head.group(), detail::max_tile_slots) +
                                            as_size(n, dim) + as_size(keys_at_once, n));
    auto importance = scratch.column(n), redundancy = scratch.column(n), row = scratch.column(n);
    auto logits = scratch.rows(head.group(), detail::max_tile_slots);
    attended(head, state, importance, row, logits);
    pool(head, importance, row, work);
    auto directions = scratch.rows(n, dim), cosines = scratch.rows(keys_at_once, n);
    said_by_others(head, directions, cosines, redundancy);
    row = lambda * row - (1 - lambda) * redundancy;
    evict(head, target, protected_slots(head, sinks, window),
          search::column_score({row.data(), as_size(n)}), work, out);
  }

 private:
  /// The latest queries, the oldest first.
  struct window_queries {
    index_t window, group, dim;
    memory_layout all = {};
    row_field count = all.f32();
    integer_field position = all.i32(window);
    row_field query = all.f32(std::ptrdiff_t{group} * dim, window);
  };
  static constexpr index_t keys_at_once = 32;
  static constexpr float alike = 0.5F;  ///< the cosine above which two keys say the same

  auto outside(const kv_head auto& head) const {
    return [&head, inside = search::protect(head, 0, window)](index_t s) {
      return !inside(head.position(s));
    };
  }

  void hold(const kv_head auto& head, head_state& state, const query_view<float>& queries,
            index_t i) const {
    const window_queries at{window, head.group(), head.dim()};
    float* const own = state.memory().data();
    auto held = static_cast<index_t>(*at.count.row(own));
    if (held == window) {  // the oldest goes
      --held;
      std::copy_n(own + at.position.at + 1, held, own + at.position.at);
      std::copy_n(at.query.row(own, 1), held * at.query.floats, at.query.row(own));
    }
    at.position.set(own, queries.position_of(i, head.next_position()), held);
    for (index_t g = 0; g < head.group(); ++g) {
      std::copy_n(queries.at(g, i), head.dim(),
                  at.query.row(own, held) + std::ptrdiff_t{g} * head.dim());
    }
    *at.count.row(own) = static_cast<float>(held + 1);
  }

  /// `mean [length]`: the attention of the queries held, 0 in the window. `mass [length]`, `logits
  /// [group, max_tile_slots]`: scratch.
  template <class Column, class Rows>
  void attended(const kv_head auto& head, const head_state& state, Column& mean, Column& mass,
                Rows& logits) const {
    const score::logit_terms terms(head);
    const auto competes = outside(head);
    const window_queries queries{window, head.group(), head.dim()};
    const float* const own = state.memory().data();
    const auto held = static_cast<index_t>(*queries.count.row(own));
    mean.setZero();
    for (index_t i = 0; i < held; ++i) {
      const index_t at = queries.position.get(own, i);
      const float* const query = queries.query.row(own, i);
      mass.setConstant(lowest_score);
      detail::each_tile_of_keys(head, [&](index_t first, const detail::tile& keys) {
        const auto count = static_cast<index_t>(keys.rows());
        score::qk_tile(query, head.group(), keys, logits.data(), detail::max_tile_slots);
        for (index_t g = 0; g < head.group(); ++g) {
          float* const logit = &logits(g, 0);
          terms.replace_products(head, g, at, first, count, logit);
          for (index_t s = 0; s < count; ++s) {
            mass[first + s] =
                competes(first + s) ? std::max(mass[first + s], logit[s]) : lowest_score;
          }
        }
      });
      score::softmax<> sum;  // a sink is left out, as the window is
      sum.take(mass.array());
      if (sum.max != sum.nothing) {
        mean += mass / (sum.sum * static_cast<float>(held));
      }
    }
  }

  /// `pooled [length]`: the largest `score` of `kernel` neighbours in position, 0 in the window.
  template <class Column>
  void pool(const kv_head auto& head, const Column& score, Column& pooled,
            slot_scratch& work) const {
    const auto competes = outside(head);
    work.order.clear();
    for (index_t s = 0; s < head.length(); ++s) {
      if (competes(s)) {
        work.order.push_back(s);
      }
    }
    detail::sort_by_position(head, work.order, work.keyed);
    const auto n = static_cast<index_t>(work.order.size());
    pooled.setZero();
    for (index_t i = 0; i < n; ++i) {
      float& most = pooled[work.order[i]];
      for (index_t t = std::max(index_t{0}, i - kernel / 2); t < n && t <= i + kernel / 2; ++t) {
        most = std::max(most, score[work.order[t]]);
      }
    }
  }

  /// `redundancy [length]`; `directions [length, dim]`, `cosines [keys_at_once, length]`: scratch.
  /// A zero or broken key is like none.
  template <class Rows, class Column>
  static void said_by_others(const kv_head auto& head, Rows& directions, Rows& cosines,
                             Column& redundancy) {
    const index_t n = head.length(), dim = head.dim();
    for (index_t s = 0; s < n; ++s) {
      to_floats(head.key(s), dim, &directions(s, 0));
      const float length = norm(row<const float>{&directions(s, 0)}, dim);
      if (length > 0 && std::isfinite(length)) {
        directions.row(s) /= length;
      } else {
        directions.row(s).setZero();
      }
    }
    redundancy.setZero();
    for (index_t first = 0; first < n; first += keys_at_once) {
      const index_t count = std::min(keys_at_once, n - first);
      score::qk_tile(&directions(first, 0), count,
                     {directions.data(), n, dim, Eigen::OuterStride<>(dim)}, cosines.data(), n);
      for (index_t i = 0; i < count; ++i) {
        auto with = cosines.row(i);
        with[first + i] = 0;
        index_t latest = first + i;
        for (index_t s = 0; s < n; ++s) {
          if (with[s] > alike &&
              (latest == first + i || head.position(s) > head.position(latest))) {
            latest = s;
          }
        }
        with[latest] = 0;
        redundancy += with.transpose();
      }
    }
    redundancy /= static_cast<float>(n);
    score::softmax<> all;
    all.take(redundancy.array());
    redundancy /= all.sum;
  }
};

}  // namespace kvmeld::inline v0
