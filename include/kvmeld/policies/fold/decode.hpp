// SPDX-License-Identifier: MIT
/// fold while decoding: the cheapest pairs of slots, on queries shifted to future positions.
#pragma once

#include <algorithm>  // std::ranges::fill
#include <cmath>      // std::exp

#include "kvmeld/detail/product.hpp"
#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/merge/fit.hpp"
#include "kvmeld/policies/fold/layout.hpp"
#include "kvmeld/policies/fold/memory.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"
#include "kvmeld/score/softmax.hpp"
#include "kvmeld/search/ward.hpp"

namespace kvmeld::inline v0 {

/// Everything is computed in the plan's own scratch, so that nothing is allocated after its first
/// use.
struct fold_decode {
  future_positions ahead = {};
  index_t queries = 16;
  index_t stride = 4;
  index_t period = 0;

  index_t freed(index_t slots) const { return detail::fold_freed(period, slots); }

  /// `work.marks` says which slots keep their bytes; of the others, the cheapest to fold go.
  template <class Memory>
  void plan(const kv_head auto& head, const Memory& memory, index_t target, slot_scratch& work,
            merge_plan& out) const {
    // Types that depend on the head's: what is made of them is compiled where it is used.
    const auto n = head.length(), dim = head.dim(), count = memory.count() * head.group();
    const auto size = as_size(n), d = as_size(dim), q = as_size(count);
    detail::arena scratch(
        work.numbers, 2 * size + 2 * q + (q + 1) * d +
                          std::max(some_queries * (size + score::whole_vectors) + tile_slots * d,
                                   2 * search::ward_slots::floats(n, dim)));
    auto sum = scratch.column(n), cost = scratch.column(n), log_sum_exp = scratch.column(count),
         logit = scratch.column(count), key = scratch.column(dim);
    auto foreseen = scratch.rows(count, dim);
    foresee(head, memory, foreseen);
    measure(head, foreseen, scratch, sum, log_sum_exp);
    const auto mass = [&sum, each = static_cast<float>(std::max(count, 1))](index_t s) {
      return sum[s] / each + 1e-6F;
    };

    // Removed are the slots cheapest to merge into one of no less mass. In descending order of
    // mass, these are before it, or next to it where masses are equal.
    auto& order = work.order;
    order.clear();
    for (index_t s = 0; s < n; ++s) {
      if (work.marks[s] == 0) {
        order.push_back(s);
      }
    }
    const index_t freed_now = n - target;
    expects(static_cast<index_t>(order.size()) > freed_now,
            "fold: expected fewer pinned slots than the target of ", target, ", got ",
            n - static_cast<index_t>(order.size()));
    detail::sort_slots(
        order, [&](index_t s) { return detail::descending(rank(mass(s))); }, work.keyed);
    auto& heavier = work.row_of;  // [order] how many weigh no less
    heavier.resize(order.size());
    for (std::size_t i = order.size(); i-- > 0;) {
      const bool last = i + 1 == order.size() || rank(mass(order[i + 1])) < rank(mass(order[i]));
      heavier[i] = last ? static_cast<index_t>(i) + 1 : heavier[i + 1];
    }
    {
      detail::arena pass = scratch;
      const search::ward_slots all(head, order, mass, pass);
      search::cheapest_partners(
          all, all, [&](index_t i) { return heavier[as_size(i)]; },
          [&](index_t i, const search::ward_partner& to) {
            // A key that holds NaN is evicted before others are merged.
            cost[order[as_size(i)]] = std::isnan(all.square[i]) ? -1 : to.cost;
          });
    }
    detail::select_slots(
        order, freed_now, [&](index_t s) { return detail::ascending(cost[s]); }, work.keyed);
    // Into: the cheapest of those that are kept and not pinned.
    const auto removed = std::span(order).first(as_size(freed_now));
    auto& into = work.row_of;
    into.resize(size);
    {
      detail::arena pass = scratch;
      const search::ward_slots to(head, std::span(order).subspan(removed.size()), mass, pass),
          from(head, removed, mass, pass);
      search::cheapest_partners(
          from, to, [&](index_t) { return static_cast<index_t>(to.slot.size()); },
          [&](index_t i, const search::ward_partner& partner) {
            into[as_size(removed[as_size(i)])] =
                std::isnan(from.square[i]) ? evicted : partner.slot;
          });
    }
    write(head, removed, {foreseen, log_sum_exp}, mass, sum, key, logit, work, out);
  }

 private:
  static constexpr index_t some_queries = 32, tile_slots = 128, evicted = -1;
  static constexpr float infinity = std::numeric_limits<float>::infinity();

  /// A logit that is no finite number is that of a slot without mass.
  static float of_number(float logit) { return logit < infinity ? logit : -infinity; }

  /// The remembered queries at future positions, `[group · count, dim]`.
  template <class Memory>
  void foresee(const kv_head auto& head, const Memory& memory,
               Eigen::Map<dense::matrix>& foreseen) const {
    const index_t count = memory.count();
    rotation turn(head.spec().rope, head.dim());
    for (index_t i = 0; i < count; ++i) {
      turn.by(head.next_position() + ahead(i, count) - memory.position(i));
      for (index_t g = 0; g < head.group(); ++g) {
        float* q = &foreseen(Eigen::Index{g} * count + i, 0);
        memory.query(g, i, q);
        turn(q);
        if (!Eigen::Map<const dense::vector>(q, head.dim()).allFinite()) {
          std::fill_n(q, head.dim(), 0.0F);  // it tells nothing: masses are those of log-mass
        }
      }
    }
  }

  /// Every slot's mass: probabilities summed over the queries, a few at a time. Without queries,
  /// what log-mass says.
  static void measure(const kv_head auto& head, const Eigen::Map<dense::matrix>& queries,
                      detail::arena scratch, Eigen::Map<dense::vector>& sum,
                      Eigen::Map<dense::vector>& log_sum_exp) {
    const auto n = head.length(), width = score::padded(n);
    auto logits = scratch.rows(some_queries, width);
    float* const buffer = scratch.rows(tile_slots, head.dim()).data();
    const score::logit_terms terms(head);
    sum.setZero();
    for (Eigen::Index first = 0; first < queries.rows(); first += some_queries) {
      const Eigen::Index rows = std::min<Eigen::Index>(some_queries, queries.rows() - first);
      score::multiply_keys(head, queries.middleRows(first, rows), tile_slots, buffer,
                           logits.topLeftCorner(rows, n));
      for (Eigen::Index r = 0; r < rows; ++r) {
        auto logit = logits.row(r).array();
        terms.replace_products(head, 0, head.next_position(), 0, n, logit.data());
        logit = logit.unaryExpr(&of_number);
        score::softmax<> all = terms.sink_of_row(first + r, queries.rows());
        all.take(logit);
        if (all.sum > 0) {
          sum += logits.row(r).head(n).transpose() / all.sum;
        }
        log_sum_exp[first + r] = all.sum > 0 ? all.log_sum_exp() : infinity;
      }
    }
    for (index_t s = 0; queries.rows() == 0 && s < n; ++s) {
      sum[s] = std::exp(std::min(head.log_mass(s), 80.0F));
    }
  }

  /// The queries, and the log-sum-exp of each over the head.
  struct reference {
    const Eigen::Map<dense::matrix>& queries;
    const Eigen::Map<dense::vector>& log_sum_exp;
  };

  /// Rows at the tangent: members weighted by their mass, log-mass fitted on the same queries. The
  /// mass of a prompt's pin includes its gain: the ridge has fitted the values of all other rows to
  /// the share of attention that the gain gives, which would fall at this step without it.
  /// `removed` is sorted by the slots that they go into; `key`, `logit`: scratch.
  template <class MassOf>
  static void write(const kv_head auto& head, std::span<index_t> removed, const reference& on,
                    MassOf mass, const dense::stored auto& sum, dense::stored auto& key,
                    dense::stored auto& logit, slot_scratch& work, merge_plan& out) {
    const index_t n = head.length(), dim = head.dim();
    const score::logit_terms terms(head);
    const auto& into = work.row_of;
    const auto destination = [&](index_t s) { return into[as_size(s)]; };
    auto& is_removed = work.marks;
    std::ranges::fill(is_removed, 0);
    for (const index_t s : removed) {
      is_removed[as_size(s)] = 1;
    }
    detail::sort_slots(
        removed, [&](index_t s) { return detail::ascending(destination(s)); }, work.keyed);
    out.reset(n);
    std::size_t begin = 0;  // of the next row's members in `removed`
    while (begin < removed.size() && destination(removed[begin]) == evicted) {
      ++begin;
    }
    for (index_t r = 0; r < n; ++r) {
      if (is_removed[as_size(r)] != 0) {
        continue;
      }
      std::size_t end = begin;
      float weight = mass(r), true_mass = sum[r];
      for (; end < removed.size() && destination(removed[end]) == r; ++end) {
        weight += mass(removed[end]), true_mass += sum[removed[end]];
      }
      if (end == begin) {
        out.keep(r, head.log_mass(r));
        continue;
      }
      key.setZero();
      const auto add = [&](index_t s) {
        const float w = mass(s) / weight;
        out.add({s, w, w});
        constexpr index_t chunk = 64;  // of a row, on the stack
        float own[chunk];
        for (index_t first = 0; first < dim; first += chunk) {
          const index_t width = std::min(chunk, dim - first);
          to_floats(head.key(s).from(first), width, own);
          for (index_t i = 0; i < width; ++i) {
            key[first + i] += w * own[i];
          }
        }
      };
      add(r);
      for (; begin < end; ++begin) {
        add(removed[begin]);
      }
      float alone = 1;
      if (on.queries.rows() > 0) {
        logit.noalias() = on.queries * key;
        logit *= terms.scale();
        terms.cap_logits(logit.array());
        logit = (logit - on.log_sum_exp).array().exp();
        alone = std::isnan(logit.sum()) ? true_mass : logit.sum();
      }
      out.end_row(merge::log_ratio(true_mass, alone));
    }
  }
};

}  // namespace kvmeld::inline v0
