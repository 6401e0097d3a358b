/// Rules of policies that merge what leaves.
#pragma once

#include "kvfold/cuda/policies/evicting_rules.cuh"

namespace kvfold::cuda {

/// ZSMerge: decayed sums; what leaves goes into the nearest residual slot by dot product. Its plans
/// depend on how many residual slots there are already (`counted`): those missing are made.
struct zsmerge_rule {
  static constexpr bool observes = true, leaves = true, merges = true;
  enum column_name : index_t { score, count, is_residual };
  group_combine combine = group_combine::sum;
  index_t sinks = 4, ring = 2, residual = 1, context = 0;  ///< context: target − ring − residual
  float decay = 0.98F, alpha = 0.6F;
  bool newcomer_competes = true;
  bool chunked = true;  ///< of the prompt's modes
  index_t missing = 0;  ///< residual slots, in a plan

  KVFOLD_DEVICE bool counted(const head_context& head, index_t s) const {
    return head.column(is_residual, s) != 0.0F;
  }
  KVFOLD_DEVICE void prepare(index_t residuals) {
    missing = residual - residuals;
    newcomer_competes = newcomer_competes || missing != 0;
  }
  /// Places for scores, when `stay` slots stay anyway.
  KVFOLD_DEVICE index_t free(index_t target, index_t stay) const { return target - missing - stay; }
  KVFOLD_DEVICE void observe(const head_context& head, index_t s, float a) const {
    float& x = head.column(score, s);
    x = accumulated(x, a, decay);
  }
  KVFOLD_DEVICE void observed(const head_context&) const {}
  KVFOLD_DEVICE bool is_protected(const head_context& head, index_t s) const {
    const index_t latest = ring + (newcomer_competes ? 0 : 1);
    return protection{sinks, latest, head.newest}(head.position[s]) ||
           head.column(is_residual, s) != 0.0F;
  }
  KVFOLD_DEVICE unsigned order(const head_context& head, index_t s) const {
    return ordered(head.column(score, s));
  }
};

/// D2O: sums as H2O's; what leaves goes into the nearest of all others by cosine, or nowhere.
struct d2o_rule : sum_rule {
  static constexpr bool merges = true, nearest = true;
  enum memory_name : index_t { threshold, has_threshold };
  float beta = 0.7F;

  /// eq. 10: the threshold after `m` was measured.
  KVFOLD_DEVICE float next_threshold(const head_context& head, float m) const {
    return head.memory[has_threshold] != 0
               ? multiply_add(beta, m, (1 - beta) * head.memory[threshold])
               : m;
  }
};

/// KeepKV: log-mass (votes) and the estimate S of ln mean_g exp(scale · q_g·k), by a moving average
/// with its weight W; what leaves goes into the nearest of all others by cosine, or nowhere.
struct keepkv_rule {
  static constexpr bool observes = true, leaves = true, merges = true, nearest = true;
  enum column_name : index_t { log_score, weight_sum };
  group_combine combine = group_combine::sum;
  index_t sinks = 4, recent = 0;
  float similarity = 0.8F, decay = 0.9F;

  KVFOLD_DEVICE static bool finite(float x) { return x - x == 0; }
  /// An estimate that is no number weighs nothing beside others.
  KVFOLD_DEVICE static float estimate(const head_context& head, index_t s) {
    const float x = head.column(log_score, s);
    return finite(x) ? x : -1e30F;
  }
  /// eq. 8: `s ← (a W s + s_now)/(a W + 1)` in logarithms.
  KVFOLD_DEVICE void average(float& score, float& weight, float now) const {
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
  /// S from a step's logits `[group]`.
  KVFOLD_DEVICE void observe_logits(const head_context& head, index_t s, const float* logit,
                                    index_t group) const {
    float most = logit[0], sum = 0;
    for (index_t g = 1; g < group; ++g) {
      most = logit[g] > most ? logit[g] : most;
    }
    for (index_t g = 0; g < group; ++g) {
      sum += exponential(logit[g] - most);
    }
    average(head.column(log_score, s), head.column(weight_sum, s),
            most + logarithm(sum / static_cast<float>(group)) - head.log_mass[s]);
  }
  KVFOLD_DEVICE void observed(const head_context&) const {}
  KVFOLD_DEVICE bool is_protected(const head_context& head, index_t s) const {
    return protection{sinks, recent, head.newest}(head.position[s]);
  }
  KVFOLD_DEVICE unsigned order(const head_context& head, index_t s) const {
    return ordered(head.log_mass[s] + estimate(head, s));
  }
};

/// KVMerger: sums as H2O's; runs of neighbours merge, several slots at once always. A plan selects
/// those that take no part: the last, and the sinks and the best of the others together.
struct kvmerger_rule : sum_rule {
  static constexpr bool merges = true, always_plans = true;
  index_t heavy = 4;
  bool by_threshold = false;
  float epsilon = 0.75F, sigma = 0;
  bool scale_values = true, gaps_break = true;

  /// Sinks that are not among the last take places of the best.
  KVFOLD_DEVICE bool counted(const head_context& head, index_t s) const {
    return is_protected(head, s) && !protection{0, recent, head.newest}(head.position[s]);
  }
  KVFOLD_DEVICE void prepare(index_t taken) { heavy = heavy > taken ? heavy - taken : 0; }
  KVFOLD_DEVICE index_t free(index_t, index_t) const { return heavy; }
};

}  // namespace kvfold::cuda
