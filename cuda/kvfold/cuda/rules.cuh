/// What the kernels know of a policy: how a slot's attention enters its score, which slots never
/// leave, and which leaves first. A rule is numbers; the policy's budget is already in them.
#pragma once

#include <cstring>  // std::memcpy
#include <limits>
#include <string_view>

#include "kvfold/budget.hpp"
#include "kvfold/cuda/together.cuh"
#include "kvfold/cuda/view.cuh"

namespace kvfold::cuda {

/// One head as a rule sees it.
struct head_context {
  const index_t* position;  ///< [capacity]
  const float* log_mass;    ///< [capacity]
  float* columns;
  std::ptrdiff_t stride;  ///< column to column
  float* memory;
  index_t newest;  ///< the latest position

  KVFOLD_DEVICE float& column(index_t c, index_t s) const { return columns[c * stride + s]; }
};

template <class Scalar>
KVFOLD_DEVICE head_context context_of(const cache_view<Scalar>& cache, const state_view& state,
                                      index_t h, index_t newest) {
  return {cache.position + cache.slot(h, 0),
          cache.log_mass + cache.slot(h, 0),
          state.columns + cache.slot(h, 0),
          std::ptrdiff_t{cache.heads} * cache.capacity,
          state.memory + std::ptrdiff_t{h} * state.floats,
          newest};
}

/// Numbers as integers in the same order; NaN the lowest, zeros equal.
KVFOLD_HD inline unsigned ordered(float x) {
  const float y = rank(x) + 0.0F;
  unsigned bits = 0;
  memcpy(&bits, &y, sizeof bits);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}
KVFOLD_HD inline unsigned ordered(index_t x) { return static_cast<unsigned>(x) ^ 0x80000000U; }

// ---------------------------------------------------------------------------- the rules

/// Attention alone.
struct no_rule {
  static constexpr bool observes = false, leaves = false, merges = false;
  group_combine combine = group_combine::sum;

  KVFOLD_DEVICE void observe(const head_context&, index_t, float) const {}
  KVFOLD_DEVICE void observed(const head_context&) const {}
  KVFOLD_DEVICE bool stays(const head_context&, index_t) const { return true; }
  KVFOLD_DEVICE unsigned order(const head_context&, index_t) const { return 0; }
};

/// StreamingLLM: the oldest but the sinks.
struct position_rule : no_rule {
  static constexpr bool leaves = true;
  index_t sinks = 4;

  KVFOLD_DEVICE bool stays(const head_context& head, index_t s) const {
    return head.position[s] < sinks;
  }
  KVFOLD_DEVICE unsigned order(const head_context& head, index_t s) const {
    return ordered(head.position[s]);
  }
};

/// `s ← decay · s + a` (H2O: decay 1), or `s ← max(s, a)`, in column 0.
struct sum_rule {
  static constexpr bool observes = true, leaves = true, merges = false;
  group_combine combine = group_combine::sum;
  index_t sinks = 4, recent = 0;
  float decay = 1;
  bool max = false;

  KVFOLD_DEVICE void observe(const head_context& head, index_t s, float a) const {
    float& score = head.column(0, s);
    score = max ? (score < a ? a : score) : accumulated(score, a, decay);
  }
  KVFOLD_DEVICE void observed(const head_context&) const {}
  KVFOLD_DEVICE bool stays(const head_context& head, index_t s) const {
    return protection{sinks, recent, head.newest}(head.position[s]);
  }
  KVFOLD_DEVICE unsigned order(const head_context& head, index_t s) const {
    return ordered(head.column(0, s));
  }
};

/// SnapKV: over the last `window` to 2 `window` queries, as a past and a current sum.
struct window_rule {
  static constexpr bool observes = true, leaves = true, merges = false;
  enum column_name : index_t { past, current };
  group_combine combine = group_combine::sum;
  index_t sinks = 4, window = 32;

  KVFOLD_DEVICE bool full(const head_context& head) const {
    return head.memory[0] + 1 >= static_cast<float>(window);
  }
  KVFOLD_DEVICE void observe(const head_context& head, index_t s, float a) const {
    const float sum = accumulated(head.column(current, s), a, 1.0F);
    if (full(head)) {
      head.column(past, s) = sum, head.column(current, s) = 0;
    } else {
      head.column(current, s) = sum;
    }
  }
  /// By one thread, when all slots have been.
  KVFOLD_DEVICE void observed(const head_context& head) const {
    head.memory[0] = full(head) ? 0.0F : head.memory[0] + 1;
  }
  KVFOLD_DEVICE bool stays(const head_context& head, index_t s) const {
    return protection{sinks, window, head.newest}(head.position[s]);
  }
  KVFOLD_DEVICE unsigned order(const head_context& head, index_t s) const {
    return ordered(head.column(past, s) + head.column(current, s));
  }
};

/// ZSMerge: decayed sums; what leaves goes into the nearest residual slot by dot product. Its plans
/// depend on how many residual slots there are already (`counted`): those missing are made.
struct residual_rule {
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
  KVFOLD_DEVICE bool stays(const head_context& head, index_t s) const {
    const index_t latest = ring + (newcomer_competes ? 0 : 1);
    return protection{sinks, latest, head.newest}(head.position[s]) ||
           head.column(is_residual, s) != 0.0F;
  }
  KVFOLD_DEVICE unsigned order(const head_context& head, index_t s) const {
    return ordered(head.column(score, s));
  }
};

// ---------------------------------------------------------------------------- of policies

namespace detail {
template <class>
inline constexpr bool no_cuda_path = false;
}  // namespace detail

/// The rule for a plan of this head: what it depends on is counted by the block.
template <class Rule, index_t Threads>
KVFOLD_DEVICE Rule prepared(Rule rule, of_warps<index_t, Threads>& shared, const head_context& head,
                            index_t n) {
  if constexpr (requires { rule.counted(head, n); }) {
    index_t count = 0;
    for (index_t s = thread_index(); s < n; s += Threads) {
      count += rule.counted(head, s) ? 1 : 0;
    }
    rule.prepare(block_sum(shared, count));
  }
  return rule;
}

/// The rule of `policy` under `budget`. A policy is known by its name and its members; what has no
/// CUDA path is refused when compiled, a mode that has none when called.
template <class Policy>
auto rule_of(const Policy& policy, const budget& budget) {
  constexpr std::string_view name = Policy::name();
  if constexpr (name == "full_cache") {
    return no_rule{};
  } else if constexpr (name == "streaming_llm") {
    expects(policy.positions == decltype(policy.positions)::original,
            "cuda streaming_llm: original positions expected, cache_index came");
    return position_rule{{}, policy.sinks};
  } else if constexpr (name == "h2o") {
    return sum_rule{policy.combine, policy.sinks, share_of(policy.recent, budget.target)};
  } else if constexpr (name == "snapkv") {
    return window_rule{policy.combine, policy.sinks, policy.window};
  } else if constexpr (name == "zsmerge") {
    const index_t share = share_of(policy.proximity, budget.target), ring = share < 2 ? 2 : share;
    return residual_rule{policy.combine,
                         policy.sinks,
                         ring,
                         policy.residual,
                         budget.target - ring - policy.residual,
                         policy.decay,
                         policy.alpha,
                         policy.newcomer_competes,
                         policy.prompt == decltype(policy.prompt)::chunked};
  } else {
    static_assert(detail::no_cuda_path<Policy>, "kvfold::cuda: this policy has no CUDA path yet");
  }
}

}  // namespace kvfold::cuda
