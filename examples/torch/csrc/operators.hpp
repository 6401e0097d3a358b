// SPDX-License-Identifier: MIT
/// What the operators do, without a word of PyTorch: compiled once, for tensors of every scalar.
#pragma once

#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "kvmeld/compress/one_head.hpp"
#include "kvmeld/executor.hpp"
#include "tensor_cache.hpp"

namespace kvmeld_torch {

/// An executor (kvmeld/executor.hpp) on threads of the framework's.
struct threads {
  using task = std::function<void(index_t, index_t)>;

  index_t count = 1;
  std::function<void(index_t count, const task& f)> run;

  index_t workers() const { return count; }
  template <class F>
  void operator()(index_t n, F f) const {
    run(n, f);
  }
};

static_assert(kvmeld::executor<threads>);

/// The policy of that text (kvmeld/peers.hpp), `fold/90` as it is where a model's heads share
/// 90 slots each on average. What was made before is remembered.
/// Refused: shared slots of a policy without scores, fewer than it can share.
const kvmeld::any_policy_or_peer& policy_of(std::string_view text);
/// What a model's attention has beside its shape and scale, as numbers: the soft cap, whether
/// rotated pairs are interleaved, whether they are a head's last ones, then three lists with their
/// lengths before them: frequencies in radians per position, logits of the sinks and ALiBi's slopes
/// `[KV heads of a layer * group]`. `spec.kv_heads`, the heads of all sequences, becomes that of a
/// layer where such a list says it.
void read_terms(std::span<const double> numbers, kvmeld::attention_spec& spec);

/// One for all heads, or one for each. `triggers`: none is `target + 1`.
std::vector<kvmeld::budget> budgets_of(index_t heads, std::span<const std::int64_t> targets,
                                       std::span<const std::int64_t> triggers);

/// What heads share slots by, `scores [heads, capacity]`: +inf for what a head keeps whatever its
/// score, -inf where it has no slot. Refused: a policy that cannot say it.
void shared_scores(const kvmeld::any_policy_or_peer& policy, tensor_cache cache, float* scores);
/// Slots of each head, `slots` on average, by one threshold over such `scores [heads, width]`.
std::vector<std::int64_t> divide(const kvmeld::any_policy_or_peer& policy,
                                 std::span<const float> scores, index_t heads, index_t slots);

using query_rows = kvmeld::query_view<float>;

/// What a policy plans a prompt on of its queries: `rows [heads, group, count, dim]` at
/// `position [count]`.
struct kept_queries {
  index_t count = 0;
  std::vector<float> rows;
  std::vector<index_t> position;
};

/// Measures a prompt on its own queries, as `compressor::prompt` does.
kept_queries observe(const kvmeld::any_policy_or_peer& policy, tensor_cache cache,
                     const query_rows& own, const threads& run);
/// `queries`: a prompt's own, which are observed first; with positions those that `observe` kept;
/// or none, where it kept none.
void compress(const kvmeld::any_policy_or_peer& policy, tensor_cache cache,
              const query_rows& queries, std::span<const kvmeld::budget> budgets,
              const threads& run);

/// All that `from` holds into `to`, whose rows are held as others; `to` is empty.
/// Refused: another shape, too few slots.
void convert(tensor_cache from, tensor_cache to, const threads& run);

/// A decode step's attention: `probabilities [heads, group, capacity]` of which a head's length is
/// used, `log_sum_exp [heads, group]` and `query [heads, group, dim]` or null.
void observe_step(const kvmeld::any_policy_or_peer& policy, tensor_cache cache,
                  const float* probabilities, const float* log_sum_exp, const float* query);

void step(const kvmeld::any_policy_or_peer& policy, tensor_cache cache,
          const kvmeld::step_input& in, std::span<const kvmeld::budget> budgets,
          const kvmeld::head_selection& heads, std::span<float> out, const threads& run);

/// `query [heads, group, dim]`, `out [heads, group, value_dim]`, `log_sum_exp [heads, group]`;
/// `probabilities [heads, group, capacity]`, 0 behind a head's length, or null.
void attend(const kvmeld::any_policy_or_peer& policy, tensor_cache cache, const float* query,
            float* out, float* log_sum_exp, float* probabilities, const threads& run);

}  // namespace kvmeld_torch
