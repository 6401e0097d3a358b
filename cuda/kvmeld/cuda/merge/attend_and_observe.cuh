// SPDX-License-Identifier: MIT
/// Attention that observes: what every step begins with.
#pragma once

#include "kvmeld/cuda/merge/observe_and_remove.cuh"
#include "kvmeld/cuda/score/attend_splits.cuh"
#include "kvmeld/cuda/score/attend_tiles.cuh"

namespace kvmeld::cuda::detail {

/// Attention, then what the second of a step's launches does, by the same block: nothing waits for
/// other blocks. `Observe` begins while attention's first rows are in flight: attention does not
/// write what that asks for.
template <class Attend, class Observe>
struct attend_whole_heads {
  static_assert(Attend::threads == Observe::threads);
  static constexpr index_t threads = Attend::threads, resident = Attend::resident;
  struct shared_memory {
    typename Attend::shared_memory attend;
    typename Observe::shared_memory observe;
  };

  Attend attend;
  Observe observe;

  /// Grid: heads.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    typename Observe::begun known;
    attend(shared.attend, [&] { known = observe.begin(); });
    sync_block();  // logits, maxima and sums are written
    observe.finish(shared.observe, known);
  }
};

/// Two launches: attention over all splits, then what `options` says, which is left out where they
/// say nothing. One where a block attends a whole head (`attend_whole_heads`).
template <class Scalar, class Rule, class Masses>
struct attention_that_observes {
  Rule rule;
  attention_call<Scalar, Masses> call;
  state_view state;
  step_options options;

  void launch_all(stream stream) const {
    const bool observes =
        Rule::observes || remembers<Rule> || options.appended || call.to.splits > 1;
    if constexpr (sizeof(Scalar) == 2) {
      if (observes && in_one_launch()) {
        return call.cache.dim <= 64 ? launch_whole<64>(stream) : launch_whole<128>(stream);
      }
    }
    attend_splits(call, stream);
    if (observes) {
      launch_early(second<observe_and_remove<Scalar, Rule>>(),
                   {call.cache.blocks(), blocks_of(call.to.tiles)}, stream);
    }
  }

 private:
  /// Compiled for what is common: groups to 8, dims to 128.
  bool in_one_launch() const {
    return call.to.splits == 1 && call.to.tiles == 1 && call.cache.group <= 8 &&
           call.cache.dim <= 128 && fits_tiles(call);
  }
  template <index_t Depth>
  void launch_whole(stream stream) const {
    using attend = attend_tiles<Scalar, Depth, 1, Masses>;
    using observe = observe_and_remove<Scalar, Rule, attend::threads, 1>;
    launch(attend_whole_heads<attend, observe>{{call}, second<observe>()}, {call.cache.blocks()},
           stream);
  }
  template <class Kernel>
  Kernel second() const {
    return {call.cache,
            state,
            call.to,
            rule,
            options,
            call.queries,
            call.out,
            call.log_sum_exp,
            call.cache.aligned()};
  }
};

/// `options`: what there is to do besides.
template <class Scalar, class Rule>
void attend_and_observe(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                        const row_number<Scalar>* queries,
                        const new_tokens<row_number<Scalar>>& fresh, const step_options& options,
                        partial_attention partial, row_number<Scalar>* out, float* log_sum_exp,
                        stream stream) {
  expects(queries != nullptr && out != nullptr, "cuda attend: expected queries and out [",
          cache.heads, ", ", cache.group, ", ", cache.dim, "], got null");
  partial.logits = Rule::observes ? partial.logits : nullptr;
  const auto launch_with = [&]<class Masses>(const Masses& masses) {
    attention_that_observes<Scalar, Rule, Masses>{
        rule, {cache, queries, fresh, partial, out, log_sum_exp, masses}, state, options}
        .launch_all(stream);
  };
  if constexpr (shares_entries<Rule>) {
    launch_with(rule.masses(state, cache.stride()));
  } else {
    launch_with(log_masses{});
  }
}

}  // namespace kvmeld::cuda::detail
