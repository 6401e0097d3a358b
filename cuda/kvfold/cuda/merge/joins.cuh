/// Who joins the nearest, and with what weight: D2O's and KeepKV's merges.
#pragma once

#include "kvfold/cuda/memory/lists.cuh"
#include "kvfold/cuda/policies/rules.cuh"

namespace kvfold::cuda::detail {

inline constexpr float own_weight = 2.718281828F;  // exp of a key's similarity to itself

/// Those at or above a similarity.
struct join_above {
  float similarity;

  template <class Scalar, index_t Threads>
  KVFOLD_DEVICE float threshold(of_warps<double, Threads>&, const cache_view<Scalar>&,
                                const keep_evict_partition&, const state_view&, index_t) const {
    return similarity;
  }
};

/// D2O, eq. 10: those at or above a threshold that follows the mean of what leaves, and is
/// remembered.
struct join_above_mean {
  d2o_rule rule;

  template <class Scalar, index_t Threads>
  KVFOLD_DEVICE float threshold(of_warps<double, Threads>& shared, const cache_view<Scalar>& cache,
                                const keep_evict_partition& from, const state_view& state,
                                index_t h) const {
    const head_context head = context_of(cache, state, h, 0);
    const index_t count = from.removed_count[h];
    double sum = 0;
    for (index_t i = thread_index(); i < count; i += Threads) {
      sum += static_cast<double>(from.nearest.similarity[cache.slot(h, i)]);
    }
    const auto m = static_cast<float>(block_sum(shared, sum) / count);
    const float now = rule.next_threshold(head, m);
    sync_block();  // all have read the old one
    if (thread_index() == 0 && m == m) {
      head.memory[d2o_rule::threshold] = now, head.memory[d2o_rule::has_threshold] = 1;
    }
    return now;
  }
};

/// D2O, eqs. 11–12: `(e k_j + Σ exp(u_i) k_i)/Z`; the log-mass stays the anchor's.
struct absorb_weights {
  const float* similarity;  // [heads, capacity]

  KVFOLD_DEVICE bool alone(const head_context&, index_t, bool) const { return false; }
  template <class Scalar>
  KVFOLD_DEVICE void operator()(const cache_view<Scalar>& cache, index_t h, const head_context&,
                                merge_source* row, index_t size, float&) const {
    const auto weight = [&](index_t i) {
      return i == 0 ? own_weight : exponential(similarity[cache.slot(h, row[i].source)]);
    };
    float z = 0;
    for (index_t i = lane(); i < size; i += 32) {
      z += weight(i);
    }
    z = reduce_sum(z);
    for (index_t i = lane(); i < size; i += 32) {
      row[i].key_weight = row[i].value_weight = weight(i) / z;
    }
  }
};

/// KeepKV's merge of some slots, all in logarithms: `A = ln Σ w`, `P = ln Σ p`, `M = Σ ω S`,
/// `r = (A − P)/M` (eqs. 7, 25, 26). In double, as on the CPU: A − P cancels.
struct vote_merge {
  double a;
  float key_scale, log_mass;

  /// By whoever shares `sum` and `max` of all members' numbers; each adds those of its own
  /// `each(f)`, which calls `f(slot)`.
  template <class Each, class Sum, class Max>
  KVFOLD_DEVICE static vote_merge of(const head_context& head, Each each, Sum sum, Max max) {
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
  /// ... by a warp, for a row of a plan.
  KVFOLD_DEVICE static vote_merge of_row(const head_context& head, const merge_source* row,
                                         index_t size) {
    return of(
        head,
        [&](auto take) {
          for (index_t i = lane(); i < size; i += 32) {
            take(row[i].source);
          }
        },
        [](double x) { return reduce_sum(x); }, [](double x) { return reduce_max(x); });
  }
  /// ω
  KVFOLD_DEVICE float share(const head_context& head, index_t s) const {
    return static_cast<float>(exponential(weight(head, s) - a));
  }
  /// S of the merged slot: A − β.
  KVFOLD_DEVICE float score() const {
    return static_cast<float>(a - static_cast<double>(log_mass));
  }

 private:
  KVFOLD_DEVICE static double votes(const head_context& head, index_t s) {
    return static_cast<double>(head.log_mass[s]);
  }
  KVFOLD_DEVICE static double weight(const head_context& head, index_t s) {
    return votes(head, s) + static_cast<double>(keepkv_rule::estimate(head, s));
  }
};

/// ... for a row of a plan. The merged slot's estimate is written before its members go.
struct vote_weights {
  KVFOLD_DEVICE bool alone(const head_context&, index_t, bool) const { return false; }
  template <class Scalar>
  KVFOLD_DEVICE void operator()(const cache_view<Scalar>&, index_t, const head_context& head,
                                merge_source* row, index_t size, float& log_mass) const {
    const auto made = vote_merge::of_row(head, row, size);
    for (index_t i = lane(); i < size; i += 32) {
      const float w = made.share(head, row[i].source);
      row[i].key_weight = made.key_scale * w, row[i].value_weight = w;
    }
    sync_warp();
    if (lane() == 0) {
      log_mass = made.log_mass;
      head.column(keepkv_rule::log_score, row[0].source) = made.score();
    }
  }
};

}  // namespace kvfold::cuda::detail
