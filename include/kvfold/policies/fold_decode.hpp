/// fold while decoding: the cheapest pairs of slots, on queries moved to the positions to come.
#pragma once

#include <algorithm>  // std::nth_element
#include <cmath>      // std::exp

#include "kvfold/arena.hpp"
#include "kvfold/fit.hpp"
#include "kvfold/policies/fold_memory.hpp"
#include "kvfold/select.hpp"
#include "kvfold/ward.hpp"

namespace kvfold {

/// Everything is computed in the plan's own scratch, so that nothing is allocated after its first
/// use.
struct fold_decode {
  index_t horizon = 64;  ///< positions to come that the queries are moved to
  index_t queries = 64;  ///< remembered, per query head
  index_t stride = 4;    ///< every so many steps one is remembered
  index_t period = 0;    ///< slots freed at once; 0: a sixteenth of the budget

  index_t freed(index_t slots) const { return period > 0 ? period : std::max(slots / 16, 1); }
  void validate() const {
    expect_count("fold", "positions in the horizon", horizon, 1);
    expect_count("fold", "remembered queries", queries, 1);
    expect_count("fold", "steps in the stride", stride, 1);
    expect_count("fold", "slots freed at once", period, 0);
  }

  /// Leverage `[length]` of un-rotated keys under the moments of all that came.
  template <class Memory>
  std::span<const float> leverage(const kv_head auto& head, const Memory& memory, const rope& rope,
                                  merge_plan& out) const {
    const index_t n = head.length(), dim = head.dim();
    arena scratch(out.numbers(), floats(n, dim, memory.count() * head.group()));
    auto lever = scratch.column(n);
    auto x = scratch.rows(n, dim), covariance = scratch.rows(dim, dim);
    const auto [mean, second] = memory.moments();
    for (index_t s = 0; s < n; ++s) {
      for (index_t i = 0; i < dim; ++i) {
        x(s, i) = static_cast<float>(head.key(s)[i]);
      }
      rope.rotate(row<float>{&x(s, 0)}, dim, -head.position(s));
      x.row(s) -= mean.transpose();
    }
    for (index_t i = 0; i < dim; ++i) {
      covariance.row(i) = second.row(i) - mean[i] * mean.transpose();
    }
    kvfold::leverage(x, covariance, 0.01F, lever);
    return {lever.data(), static_cast<std::size_t>(n)};
  }

  /// `out.marks()` says which slots keep their bytes; of the others, the cheapest to fold go.
  template <class Memory>
  void plan(const kv_head auto& head, const Memory& memory, const rope& rope, index_t target,
            merge_plan& out) const {
    const index_t n = head.length(), dim = head.dim(), count = memory.count() * head.group();
    arena scratch(out.numbers(), floats(n, dim, count));
    auto sum = scratch.column(n), square = scratch.column(n), mass = scratch.column(n),
         cost = scratch.column(n), log_sum_exp = scratch.column(count), key = scratch.column(dim);
    auto keys = scratch.rows(n, dim), foreseen = scratch.rows(count, dim);
    for (index_t s = 0; s < n; ++s) {
      for (index_t i = 0; i < dim; ++i) {
        keys(s, i) = static_cast<float>(head.key(s)[i]);
      }
      square[s] = keys.row(s).squaredNorm();
    }
    foresee(head, memory, rope, foreseen);
    measure(head, keys, foreseen, cost, sum, log_sum_exp);
    mass = sum.array() / static_cast<float>(std::max(count, 1)) + 1e-6F;

    // Who leaves: the cheapest to fold into a slot of no less mass.
    auto& marks = out.marks();
    auto& into = out.row_of();
    const auto pinned = [&](index_t s) { return marks[static_cast<std::size_t>(s)] == 1; };
    cheapest_partner(
        keys, mass, square,
        [&](index_t i, index_t j) { return !pinned(i) && !pinned(j) && mass[i] <= mass[j]; }, into,
        cost.data());
    auto& order = out.order();
    order.clear();
    for (index_t s = 0; s < n; ++s) {
      if (!pinned(s)) {
        order.push_back(s);
      }
    }
    const index_t leave = n - target;
    std::nth_element(order.begin(), order.begin() + leave, order.end(), [&](index_t a, index_t b) {
      return cost[a] < cost[b] || (cost[a] == cost[b] && a < b);
    });
    constexpr char leaving = 2;
    for (index_t i = 0; i < leave; ++i) {
      marks[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])] = leaving;
    }
    // Where to: the cheapest of those that stay and are not pinned.
    cheapest_partner(
        keys, mass, square,
        [&](index_t i, index_t j) {
          return marks[static_cast<std::size_t>(i)] == leaving &&
                 marks[static_cast<std::size_t>(j)] == 0;
        },
        into, cost.data());
    write(head, keys, foreseen, log_sum_exp, sum, mass, key, out);
  }

 private:
  static std::size_t floats(index_t n, index_t dim, index_t queries) {
    const auto s = static_cast<std::size_t>(n), d = static_cast<std::size_t>(dim),
               q = static_cast<std::size_t>(queries);
    return 4 * s + q + d + s * d + std::max(q, d) * d;
  }

  /// The remembered queries at the positions to come, `[group · count, dim]`.
  template <class Memory>
  void foresee(const kv_head auto& head, const Memory& memory, const rope& rope,
               Eigen::Map<dense::matrix>& foreseen) const {
    const index_t count = memory.count();
    for (index_t i = 0; i < count; ++i) {
      const index_t to = head.seen() + static_cast<index_t>(std::int64_t{i} * horizon / count);
      for (index_t g = 0; g < head.group(); ++g) {
        float* q = &foreseen(Eigen::Index{g} * count + i, 0);
        std::copy_n(memory.query(g, i), head.dim(), q);
        rope.rotate(row<float>{q}, head.dim(), to - memory.position(i));
      }
    }
  }

  /// Every slot's mass: probabilities summed over the queries. Without queries, what log-mass says.
  static void measure(const kv_head auto& head, const Eigen::Map<dense::matrix>& keys,
                      const Eigen::Map<dense::matrix>& queries, Eigen::Map<dense::vector>& logit,
                      Eigen::Map<dense::vector>& sum, Eigen::Map<dense::vector>& log_sum_exp) {
    sum.setZero();
    for (Eigen::Index r = 0; r < queries.rows(); ++r) {
      logit.noalias() = keys * queries.row(r).transpose();
      for (index_t s = 0; s < head.length(); ++s) {
        logit[s] = head.scale() * logit[s] + head.log_mass(s);
      }
      const float most = logit.maxCoeff();
      logit = (logit.array() - most).exp();
      const float all = logit.sum();
      sum += logit / all;
      log_sum_exp[r] = most + std::log(all);
    }
    if (queries.rows() == 0) {
      for (index_t s = 0; s < head.length(); ++s) {
        sum[s] = std::exp(std::min(head.log_mass(s), 80.0F));
      }
    }
  }

  /// Rows at the tangent: members weighted by their mass, log-mass fitted on the same queries.
  static void write(const kv_head auto& head, const Eigen::Map<dense::matrix>& keys,
                    const Eigen::Map<dense::matrix>& queries,
                    const Eigen::Map<dense::vector>& log_sum_exp,
                    const Eigen::Map<dense::vector>& sum, const Eigen::Map<dense::vector>& mass,
                    Eigen::Map<dense::vector>& key, merge_plan& out) {
    const index_t n = head.length();
    const auto& into = out.row_of();
    out.reset(n);
    for (index_t r = 0; r < n; ++r) {
      if (out.marks()[static_cast<std::size_t>(r)] == 2) {
        continue;
      }
      float weight = mass[r], true_mass = sum[r];
      index_t members = 1;
      for (index_t s = 0; s < n; ++s) {
        if (into[static_cast<std::size_t>(s)] == r) {
          weight += mass[s], true_mass += sum[s], ++members;
        }
      }
      if (members == 1) {
        out.keep(r, head.log_mass(r));
        continue;
      }
      const auto add = [&](index_t s) {
        const float w = mass[s] / weight;
        out.add({s, w, w});
        key += w * keys.row(s).transpose();
      };
      key.setZero();
      add(r);
      for (index_t s = 0; s < n; ++s) {
        if (into[static_cast<std::size_t>(s)] == r) {
          add(s);
        }
      }
      float alone = queries.rows() > 0 ? 0.0F : 1.0F;
      for (Eigen::Index q = 0; q < queries.rows(); ++q) {
        alone += std::exp(head.scale() * queries.row(q).dot(key) - log_sum_exp[q]);
      }
      out.end_row(log_ratio(true_mass, alone));
    }
  }
};

}  // namespace kvfold
