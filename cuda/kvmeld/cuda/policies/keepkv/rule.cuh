// SPDX-License-Identifier: MIT
/// KeepKV as the kernels know it: votes, estimates, and the merge of slots by both.
#pragma once

#include "kvmeld/cuda/score/rule.cuh"

namespace kvmeld::cuda {

/// KeepKV: log-mass (votes) and the estimate S of ln mean_g exp(scale · q_g·k), by a moving average
/// with its weight W; an evicted slot merges into the nearest that stays by cosine, or is lost.
struct keepkv_rule {
  static constexpr index_t columns = 2, observed_columns = 2;
  static constexpr bool observes = true, evicts = true, merges = true, always_plans = true;
  enum column_name : index_t { log_score, weight_sum };
  group_combine combine = group_combine::sum;
  index_t sinks = 4;
  float recent = 0;  ///< of the target
  float similarity = 0.8F, decay = 0.9F;
  index_t latest = 0;  ///< that share, in tokens

  KVMELD_DEVICE void of_target(index_t target) { latest = share_of(recent, target); }

  KVMELD_DEVICE static bool finite(float x) { return x - x == 0; }
  /// An estimate that is no number weighs nothing beside others.
  KVMELD_DEVICE static float estimate(float x) { return finite(x) ? x : -1e30F; }
  KVMELD_DEVICE static float estimate(const head_context& head, index_t s) {
    return estimate(head.column(log_score, s));
  }
  /// eq. 8: `s ← (a W s + s_now)/(a W + 1)` in logarithms.
  KVMELD_DEVICE void average(float& score, float& weight, float now) const {
    const float old = decay * weight;
    if (old == 0 || !finite(score)) {
      score = now;
    } else {
      const float top = now > score ? now : score;
      score =
          top + logarithm((old * exponential(score - top) + exponential(now - top)) / (old + 1));
    }
    weight = old + 1;
  }
  /// S of a slot of this log-mass from the `ln mean_g exp` of a step's logits.
  KVMELD_DEVICE float observe_logits(float log_mass, float* column, float mean) const {
    average(column[log_score], column[weight_sum], mean - log_mass);
    return log_mass + estimate(column[log_score]);
  }
  KVMELD_DEVICE void observed(const head_context&) const {}
  KVMELD_DEVICE bool is_protected(const head_context& head, index_t s) const {
    return protection{sinks, latest, head.newest}(head.position[s]);
  }
  KVMELD_DEVICE unsigned order(const head_context& head, index_t s) const {
    return ordered(head.log_mass[s] + estimate(head, s));
  }
};

namespace detail {

/// KeepKV's merge of some slots, all in logarithms: `A = ln Σ w`, `P = ln Σ p`, `M = Σ ω S`,
/// `r = (A − P)/M` (eqs. 7, 25, 26). In double, as on the CPU: A − P cancels.
struct vote_merge {
  double a;
  float key_scale, log_mass;

  /// For threads that share `sum` and `max` of all members' numbers; each adds those of its own
  /// `each(f)`, which calls `f(slot)`.
  template <class Each, class Sum, class Max>
  KVMELD_DEVICE static vote_merge of(const head_context& head, Each each, Sum sum, Max max) {
    double most = -1e300, most_votes = -1e300;
    each([&](index_t s) {
      const double p = votes(head, s), w = weight(head, s);
      most = w > most ? w : most, most_votes = p > most_votes ? p : most_votes;
    });
    most = max(most), most_votes = max(most_votes);
    double all = 0, all_votes = 0;
    each([&](index_t s) {
      all += exponential(weight(head, s) - most);
      all_votes += exponential(votes(head, s) - most_votes);
    });
    const double a = most + logarithm(sum(all)), p = most_votes + logarithm(sum(all_votes));
    double mean = 0;
    each([&](index_t s) {
      mean += exponential(weight(head, s) - a) * (weight(head, s) - votes(head, s));
    });
    mean = sum(mean);
    const double r = (a - p) / mean;
    return r >= 0.5 && r <= 2 ? vote_merge{a, static_cast<float>(r), static_cast<float>(p)}
                              : vote_merge{a, 1.0F, static_cast<float>(a - mean)};
  }
  /// ... for a row of a plan.
  KVMELD_DEVICE static vote_merge of_row(const head_context& head, const merge_source* row,
                                         index_t size, const auto& team) {
    return of(
        head,
        [&](auto take) {
          for (index_t i = team.index(); i < size; i += team.size) {
            take(row[i].source);
          }
        },
        [&](double x) { return team.sum(x); }, [&](double x) { return team.max(x); });
  }
  /// ω
  KVMELD_DEVICE float share(const head_context& head, index_t s) const {
    return static_cast<float>(exponential(weight(head, s) - a));
  }
  /// S of the merged slot: A − β.
  KVMELD_DEVICE float score() const {
    return static_cast<float>(a - static_cast<double>(log_mass));
  }

 private:
  KVMELD_DEVICE static double votes(const head_context& head, index_t s) {
    return static_cast<double>(head.log_mass[s]);
  }
  KVMELD_DEVICE static double weight(const head_context& head, index_t s) {
    return votes(head, s) + static_cast<double>(keepkv_rule::estimate(head, s));
  }
};

/// ... for a row of a plan. The merged slot's estimate is written before its members go.
struct vote_weights {
  KVMELD_DEVICE bool alone(const head_context&, index_t, bool) const { return false; }
  template <class Scalar>
  KVMELD_DEVICE void operator()(const cache_view<Scalar>&, index_t, const head_context& head,
                                merge_source* row, index_t size, float& log_mass,
                                const auto& team) const {
    const auto made = vote_merge::of_row(head, row, size, team);
    for (index_t i = team.index(); i < size; i += team.size) {
      const float w = made.share(head, row[i].source);
      row[i].key_weight = made.key_scale * w, row[i].value_weight = w;
    }
    team.sync();
    if (team.index() == 0) {
      log_mass = made.log_mass;
      head.column(keepkv_rule::log_score, row[0].source) = made.score();
    }
  }
};

}  // namespace detail

}  // namespace kvmeld::cuda
