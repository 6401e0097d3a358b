// SPDX-License-Identifier: MIT
/// KVMerger: what a run weighs, and what its members weigh in it.
#pragma once

#include "kvmeld/cuda/score/rule.cuh"

namespace kvmeld::cuda::detail {

/// A row's total score, by its anchor. For `weigh_rows`.
struct row_scores {
  float* total;  // [heads, capacity]

  KVMELD_DEVICE bool alone(const head_context&, index_t, bool) const { return true; }
  template <class Scalar>
  KVMELD_DEVICE void operator()(const cache_view<Scalar>& cache, index_t h,
                                const head_context& head, merge_source* row, index_t size, float&,
                                const auto& team) const {
    float sum = 0;
    for (index_t i = team.index(); i < size; i += team.size) {
      sum += head.column(0, row[i].source);
    }
    sum = team.sum(sum);
    if (team.index() == 0) {
      total[cache.slot(h, row[0].source)] = sum;
    }
  }
};

/// Algorithm 2, eqs. 6–8: Gaussian weights about the pivot, of every token that a member holds; the
/// tokens together are the log-mass, or (`scale_values`) the members times the values. A warp has
/// four members' keys in flight.
struct gaussian_weights {
  static constexpr index_t own = 4;  // members of a warp at once
  float sigma;
  bool scale_values;
  bool aligned;

  KVMELD_DEVICE bool alone(const head_context&, index_t, bool) const { return false; }
  template <class Scalar>
  KVMELD_DEVICE void operator()(const cache_view<Scalar>& cache, index_t h,
                                const head_context& head, merge_source* row, index_t size,
                                float& log_mass, const auto& team) const {
    const auto keys = cache.keys.of(h);
    const float most = most_log_mass(head, row, size, team);
    const auto tokens = [&](index_t i) {  // relative to the member of most; none is without
      const float of_most = scale_values ? 1 : exponential(head.log_mass[row[i].source] - most);
      return of_most > 1e-30F ? of_most : 1e-30F;
    };
    float count = 0;
    for (index_t i = team.index(); i < size; i += team.size) {
      count += tokens(i);
    }
    count = team.sum(count);
    float mean = 0;
    for (index_t i0 = team.warp() * own; i0 < size; i0 += team.warps * own) {
      const index_t left = size - i0 < own ? size - i0 : own;
      float square[own] = {};
      add_squares(cache, keys, row, i0, left, square);
      unrolled<own>([&](index_t k) {
        square[k] = reduce_sum(square[k]);
        if (k < left) {
          mean += tokens(i0 + k) * square_root(square[k]) / count;  // the pivot's 0 counts
        }
        if (k < left && lane() == k) {
          row[i0 + k].key_weight = square[k];
        }
      });
    }
    mean = team.sum(lane() == 0 ? mean : 0.0F);
    team.sync();
    const float own_sigma = mean / square_root(2.0F);
    const float s = sigma > 0 ? sigma : own_sigma > 1e-6F ? own_sigma : 1e-6F;
    float sum = 0;
    for (index_t i = team.index(); i < size; i += team.size) {
      row[i].key_weight = tokens(i) * exponential(-row[i].key_weight / (2 * s * s));
      sum += row[i].key_weight;
    }
    sum = team.sum(sum);
    for (index_t i = team.index(); i < size; i += team.size) {
      const float w = row[i].key_weight / sum;
      row[i].key_weight = w, row[i].value_weight = scale_values ? count * w : w;
    }
    if (!scale_values && team.index() == 0) {
      log_mass = most + logarithm(count);
    }
  }

 private:
  /// The largest log-mass of a row's members.
  KVMELD_DEVICE static float most_log_mass(const head_context& head, const merge_source* row,
                                           index_t size, const auto& team) {
    float most = lowest_score;
    for (index_t i = team.index(); i < size; i += team.size) {
      const float m = head.log_mass[row[i].source];
      most = m > most ? m : most;
    }
    return team.max(most);
  }
  /// This lane's share of `‖k_p − k_i‖²` of `left` members.
  template <class Scalar>
  KVMELD_DEVICE void add_squares(const cache_view<Scalar>& cache, const head_rows<Scalar>& keys,
                                 const merge_source* row, index_t i0, index_t left,
                                 float (&square)[own]) const {
    constexpr index_t width = vector_16<Scalar>::size;
    const Scalar* const pivot = keys.at(row[0].source);
    index_t slot[own];
    unrolled<own>([&](index_t k) { slot[k] = row[k < left ? i0 + k : 0].source; });
    for (index_t e = lane() * width; e < cache.dim; e += 32 * width) {
      const auto p = load_row(pivot, e, cache.dim, aligned);
      row_vector<Scalar> x[own];
      unrolled<own>([&](index_t k) { x[k] = load_row(keys.at(slot[k]), e, cache.dim, aligned); });
      unrolled<own, width>([&](index_t k, index_t j) {
        const float apart = to_float(p[j]) - to_float(x[k][j]);
        square[k] += apart * apart;
      });
    }
  }
};

}  // namespace kvmeld::cuda::detail
