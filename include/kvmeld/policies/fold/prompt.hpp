// SPDX-License-Identifier: MIT
/// fold after a prompt: clusters of slots, fitted to the full cache on reference queries.
#pragma once

#include <algorithm>  // std::ranges::count
#include <cmath>      // std::sqrt

#include "kvmeld/merge/fit.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/search/cluster.hpp"

namespace kvmeld::inline v0 {

/// The slots that are not marked become clusters, `target` rows in all. Seeds keep away from what
/// is marked.
struct fold_prompt {
  index_t pool = 5;
  float outlier = 1.6F;
  index_t rounds = 4;
  float floor = 0.1F;
  float ridge = 0.002F;
  index_t refine = 0;
  float rate = 0.01F;

  /// What becomes of a slot.
  enum mark : char { clustered, pinned, evicted };

  /// Marks as evicted a `share` of the slots that are not pinned: the best by `score [slots]` of
  /// those that hold one token, but no more than leave a slot for every cluster of `target` rows.
  static void mark_evicted(float share, index_t target, std::span<const float> tokens,
                           std::span<const float> score, std::span<char> marks) {
    const auto n = static_cast<index_t>(marks.size());
    const auto stays = [&](index_t s) {
      const auto i = as_size(s);
      return marks[i] != clustered || tokens[i] != 1.0F;
    };
    const auto beside = static_cast<index_t>(std::ranges::count(marks, clustered));
    index_t single = 0;
    for (index_t s = 0; s < n; ++s) {
      single += stays(s) ? 0 : 1;
    }
    const index_t most =
        std::min({static_cast<index_t>(share * static_cast<float>(beside)), single, n - target});
    if (most <= 0) {
      return;
    }
    const auto of_slot = [&](index_t s) { return rank(score[as_size(s)]); };
    const search::kth_score last = search::kth_largest(n, most, stays, of_slot);
    for (index_t s = 0; s < n; ++s) {
      if (!stays(s) && !last.below(of_slot(s), s)) {
        marks[as_size(s)] = evicted;
      }
    }
  }

  /// `queries [queries, dim]`; `work.marks` says which slots are pinned, so keep their bytes, and
  /// which are evicted. `log_mass_of_pin(slot)`: the ridge of the clusters' values is fitted to it.
  void plan(const kv_head auto& head, const dense::stored auto& queries, index_t target,
            const auto& log_mass_of_pin, slot_scratch& work, merge_plan& out) const {
    const index_t n = head.length();
    // Types that depend on the head's: what is made of them is compiled where it is used.
    const auto keys = dense::keys(head), values = dense::values(head);
    const score::logit_terms terms(head);
    const auto full = dense::attend(queries, keys, values, dense::log_mass(head), terms);
    const auto count = static_cast<float>(queries.rows());
    const auto m = (full.mass.array() / count + 1e-6F).matrix().eval();
    const std::vector<char> marks = work.marks;
    const auto alone = static_cast<index_t>(std::ranges::count(marks, pinned));
    const dense::vector pull = m.array() + floor / static_cast<float>(n);
    const search::clusters c =
        search::cluster(space(head, queries, keys, values), marks, pull, target - alone, rounds);

    // Members' sums: of m, and of what the rows stand for.
    const auto size = c.seeds.size();
    std::vector<float> weight(size), mass(size);
    std::vector<std::vector<index_t>> members(size);
    for (index_t s = 0; s < n; ++s) {
      if (const index_t i = c.cluster[as_size(s)]; i >= 0) {
        weight[as_size(i)] += m[s];
        mass[as_size(i)] += full.mass[s];
        members[as_size(i)].push_back(s);
      }
    }
    // The rows in slot order, a cluster at its seed: keys, values, mass, anchors.
    dense::matrix key(target, head.dim()), value(target, head.value_dim());
    dense::vector row_mass(target);
    std::vector<index_t> cluster_of;  // [rows], −1: pinned
    work.order.clear();               // [rows] anchors
    for (index_t s = 0; s < n; ++s) {
      const index_t i = c.cluster[as_size(s)];
      if (marks[as_size(s)] == evicted || (i >= 0 && c.seeds[as_size(i)] != s)) {
        continue;
      }
      const auto r = static_cast<Eigen::Index>(cluster_of.size());
      cluster_of.push_back(i);
      work.order.push_back(s);
      if (i < 0) {
        key.row(r) = keys.row(s), value.row(r) = values.row(s), row_mass[r] = full.mass[s];
        continue;
      }
      key.row(r).setZero(), value.row(r).setZero();
      for (const index_t j : members[as_size(i)]) {
        const float w = m[j] / weight[as_size(i)];
        key.row(r) += w * keys.row(j), value.row(r) += w * values.row(j);
      }
      row_mass[r] = mass[as_size(i)];
    }
    auto beta = merge::fit_log_mass(key, row_mass, queries, full.log_sum_exp, terms);
    for (Eigen::Index r = 0; r < target; ++r) {
      if (cluster_of[as_size(r)] < 0) {
        beta[r] = log_mass_of_pin(work.order[r]);
      }
    }
    std::vector<char> fixed;  // [rows]
    fixed.reserve(cluster_of.size());
    for (const index_t i : cluster_of) {
      fixed.push_back(static_cast<char>(i < 0));
    }
    merge::fitted_slots fitted{key, value, beta};
    if (ridge > 0) {
      const auto p = merge::probabilities(queries, key, beta, terms);
      auto missing = full.output;
      dense::add_product(-1, p, value, missing);
      std::vector<Eigen::Index> merged;  // rows
      for (Eigen::Index r = 0; r < target; ++r) {
        if (fixed[as_size(r)] == 0) {
          merged.push_back(r);
        }
      }
      fitted.value(merged, Eigen::all) +=
          merge::ridge_values(p(Eigen::all, merged).eval(), missing, ridge);
    }
    if (refine > 0) {
      merge::refine({queries, full, terms}, fixed, refine, rate, fitted);
    }

    out.reset(n);
    for (Eigen::Index r = 0; r < target; ++r) {
      const index_t anchor = work.order[r];
      const index_t i = cluster_of[as_size(r)];
      if (i < 0) {
        out.keep(anchor, beta[r]);
        continue;
      }
      const auto add = [&](index_t s) {
        const float w = m[s] / weight[as_size(i)];
        out.add({s, w, w});
      };
      add(anchor);
      for (const index_t s : members[as_size(i)]) {
        if (s != anchor) {
          add(s);
        }
      }
      out.end_row(fitted.log_mass[r]);
    }
    if (ridge > 0 || refine > 0) {
      fitted.value -= value;
      out.correct_values({fitted.value.data(), as_size(fitted.value.size())}, head.value_dim());
    }
    if (refine > 0) {
      fitted.key -= key;
      out.correct_keys({fitted.key.data(), as_size(fitted.key.size())}, head.dim());
    }
  }

 private:
  /// The space in which squared distance is D²: `[scale · (k − mean k) L | v / mean‖v‖]`, `L Lᵀ`
  /// the queries' covariance, in numbers that a half holds: what tensor cores multiply, exactly.
  static dense::matrix space(const kv_head auto& head, const dense::stored auto& queries,
                             const dense::stored auto& keys, const dense::stored auto& values) {
    using matrix = std::remove_cvref_t<decltype(keys)>;
    const matrix centred = queries.rowwise() - queries.colwise().mean();
    matrix covariance = matrix::Zero(queries.cols(), queries.cols());
    dense::add_transposed_product(1 / static_cast<float>(queries.rows()), centred, centred,
                                  covariance);
    covariance.diagonal().array() += 1e-3F;
    dense::cholesky(covariance);
    for (Eigen::Index r = 0; r < covariance.rows(); ++r) {
      covariance.row(r).head(r).setZero();  // Lᵀ
    }
    const float norm = std::max(values.rowwise().norm().mean(), 1e-20F);
    matrix x(keys.rows(), keys.cols() + values.cols()), centre(1, keys.cols());
    const matrix mean = keys.colwise().mean();
    dense::set_product_transposed(-head.scale(), mean, covariance, centre);
    x.leftCols(keys.cols()).rowwise() = centre.row(0);
    dense::add_product_transposed(head.scale(), keys, covariance, x.leftCols(keys.cols()));
    x.rightCols(values.cols()) = values / norm;
    constexpr float most = 65504;  // of halfs
    x = x.cwiseMin(most).cwiseMax(-most).template cast<Eigen::half>().template cast<float>();
    return x;
  }
};

}  // namespace kvmeld::inline v0
