/// What calls work in, carved from one workspace: what one phase has left may be overwritten by the
/// next, but for the tickets.
#pragma once

#include <cstddef>      // std::size_t
#include <type_traits>  // std::is_same_v

#include "kvfold/cuda/lists.cuh"
#include "kvfold/cuda/rules.cuh"
#include "kvfold/cuda/workspace.cuh"

namespace kvfold::cuda {

/// Bytes of workspace for `column_scores`: the queries' log-sum-exp.
inline std::size_t column_scores_workspace_bytes(index_t heads, index_t group, index_t queries) {
  return sizeof(float) * static_cast<std::size_t>(heads) * static_cast<std::size_t>(group) *
         static_cast<std::size_t>(queries);
}

namespace detail {

// ---------------------------------------------------------------------------- attention

inline constexpr index_t most_splits = 128;

/// What the first launch leaves for the second.
struct partial_attention {
  index_t* tickets;  // [heads] blocks of the second launch that are done; 0 between steps
  float* logits;     // [heads, capacity, group], or null: nobody observes
  float* max;        // [heads, splits, group] of the logits
  float* sum;        // [heads, splits, group] Σ exp(ℓ − max)
  float* out;        // [heads, splits, group, dim] Σ exp(ℓ − max) v
  unsigned long long* leaving;  // [heads, near_tiles] best candidate of each tile
  index_t* victims;             // [heads] who leaves for the nearest; −1: nobody
  index_t splits;
  index_t tiles;
  index_t near_tiles;
};

inline constexpr index_t slots_a_tile = 1024;      // of the second launch
inline constexpr index_t slots_a_near_tile = 256;  // of the search for the nearest

/// As many blocks as keep an H100's 132 multiprocessors busy (8 each), but no fewer than 256 slots
/// for each at full capacity. By shape alone: the same bytes whatever the device.
inline index_t splits_of(index_t heads, index_t capacity) {
  const index_t wanted = (132 * 8 + heads - 1) / (heads < 1 ? 1 : heads);
  const index_t most = (capacity + 255) / 256;
  const index_t splits = wanted < most ? wanted : most;
  return splits < 1 ? 1 : splits > most_splits ? most_splits : splits;
}

/// All but the tickets.
inline void carve(partial_attention& p, carver& from, index_t heads, index_t capacity,
                  index_t group, index_t dim) {
  p.splits = splits_of(heads, capacity);
  p.tiles = (capacity + slots_a_tile - 1) / slots_a_tile;
  p.near_tiles = (capacity + slots_a_near_tile - 1) / slots_a_near_tile;
  const auto n = static_cast<std::size_t>(heads), g = static_cast<std::size_t>(group);
  const auto parts = n * static_cast<std::size_t>(p.splits) * g;
  p.logits = from.take<float>(n * static_cast<std::size_t>(capacity) * g);
  p.max = from.take<float>(parts);
  p.sum = from.take<float>(parts);
  p.out = from.take<float>(parts * static_cast<std::size_t>(dim));
  p.leaving = from.take<unsigned long long>(n * static_cast<std::size_t>(p.near_tiles));
  p.victims = from.take<index_t>(n);
}

// ---------------------------------------------------------------------------- plans

/// What plans of fold's work in, beside the division.
struct fold_scratch {
  float* factor;       ///< [heads, dim, dim] covariance, then L⁻¹, column by column
  float* lever;        ///< [heads, capacity]
  float* sum;          ///< [heads, capacity] probabilities summed over the queries
  float* mass;         ///< [heads, capacity]
  float* foreseen;     ///< [heads, group, queries, pitch]
  float* log_sum_exp;  ///< [heads, group, queries]
};

/// Floats between foreseen queries: rows begin at multiples of 16 bytes.
inline index_t pitch_of(index_t dim) { return (dim + 3) / 4 * 4; }

/// The space that a prompt's clusters are made in: squared distance is
/// `δkᵀ M δk + ν ‖δv‖²`.
struct cluster_space {
  float* metric;   ///< M [heads, dim, dim], symmetric
  float* inverse;  ///< ν [heads]
  float* square;   ///< [heads, capacity]
  float* pull;     ///< [heads, capacity] weight of a slot
};

/// Centres `[heads, most, pitch]`: `M k`, `ν v`, and half of their square.
struct centre_rows {
  float *key, *value;
  float* half;  ///< [heads, most]
  index_t most, pitch;

  KVFOLD_DEVICE std::ptrdiff_t at(index_t h, index_t c) const {
    return (std::ptrdiff_t{h} * most + c) * pitch;
  }
};

/// What plans of fold's for a prompt work in beside.
struct prompt_scratch {
  cluster_space space;
  centre_rows centres;
  float* probabilities;               ///< [heads, group · queries, rows]
  float* missing;                     ///< [heads, group · queries, dim]
  float* correction;                  ///< [heads, capacity, dim]
  double *gram, *solution, *vectors;  ///< [heads, size, size], [heads, size, dim], [heads, 2, size]
  float *moments, *least;             ///< of the prompt's keys [heads, floats]; [heads]
  float* distance;                    ///< [heads, capacity]
  index_t *met, *members, *centre;    ///< [heads, capacity]
};

/// What EMS's tokens and entries are weighed in.
struct entry_scratch {
  float *key_length, *value_length, *weight;  ///< [heads, capacity]
  float *score, *raw;                         ///< [heads, names] of tokens; before pooling
  index_t *order, *spare, *freed, *mark;      ///< [heads, names]
  float* turned;  ///< [heads, capacity, pitch] or null: keys as they are
  index_t places, names, pitch;

  KVFOLD_DEVICE std::ptrdiff_t at(index_t h, index_t token) const {
    return std::ptrdiff_t{h} * names + token;
  }
};

/// What plans are made in. Evictions need the plan alone.
struct plan_memory {
  plan_view plan;
  division divided;
  entry_scratch entries;
  fold_scratch fold;
  prompt_scratch prompt;
};

/// What plans by a rule need beside the plan.
struct plan_needs {
  bool merges = false;
  index_t remembered = 0;              ///< fold's queries per query head
  index_t reference = 0;               ///< a prompt's, for fold
  index_t rows = 0;                    ///< whose values are fitted; 0: none are
  entry_rule entries = {.window = 0};  ///< EMS's; window 0: it is another policy

  template <class Rule>
  static plan_needs of(const Rule& rule, [[maybe_unused]] index_t reference = 0,
                       [[maybe_unused]] index_t rows = 0) {
    if constexpr (std::is_same_v<Rule, fold_rule>) {
      return {true, rule.queries, reference, rule.prompt.ridge > 0 ? rows : 0};
    } else if constexpr (shares_entries<Rule>) {
      return {true, 0, 0, 0, rule};
    } else {
      return {Rule::merges};
    }
  }
};

inline prompt_scratch carve_prompt_scratch(carver& from, index_t heads, index_t capacity,
                                           index_t group, index_t dim, const plan_needs& needs) {
  const auto n = static_cast<std::size_t>(heads), slots = n * static_cast<std::size_t>(capacity),
             d = static_cast<std::size_t>(dim), pitch = static_cast<std::size_t>(pitch_of(dim));
  prompt_scratch m{};
  m.space = {from.take<float>(n * d * d), from.take<float>(n), from.take<float>(slots),
             from.take<float>(slots)};
  m.centres = {from.take<float>(slots * pitch), from.take<float>(slots * pitch),
               from.take<float>(slots), capacity, pitch_of(dim)};
  m.moments = from.take<float>(n * static_cast<std::size_t>(key_memory::size(dim)));
  m.least = from.take<float>(n);
  m.distance = from.take<float>(slots);
  m.met = from.take<index_t>(slots), m.members = from.take<index_t>(slots);
  m.centre = from.take<index_t>(slots);
  if (needs.rows > 0) {
    const auto all = static_cast<std::size_t>(group) * static_cast<std::size_t>(needs.reference),
               rows = static_cast<std::size_t>(needs.rows), size = all < rows ? all : rows;
    m.probabilities = from.take<float>(n * all * rows);
    m.missing = from.take<float>(n * all * d);
    m.correction = from.take<float>(slots * d);
    m.gram = from.take<double>(n * size * size);
    m.solution = from.take<double>(n * size * d);
    m.vectors = from.take<double>(n * 2 * size);
  }
  return m;
}

inline entry_scratch carve_entries(carver& from, index_t heads, index_t capacity, index_t dim,
                                   const entry_rule& rule) {
  entry_scratch m{};
  m.places = rule.places(capacity), m.names = capacity + m.places, m.pitch = pitch_of(dim);
  const auto n = static_cast<std::size_t>(heads), slots = n * static_cast<std::size_t>(capacity),
             tokens = n * static_cast<std::size_t>(m.names);
  m.key_length = from.take<float>(slots), m.value_length = from.take<float>(slots);
  m.weight = from.take<float>(slots);
  m.score = from.take<float>(tokens), m.raw = from.take<float>(tokens);
  m.order = from.take<index_t>(tokens), m.spare = from.take<index_t>(tokens);
  m.freed = from.take<index_t>(tokens), m.mark = from.take<index_t>(tokens);
  if (!rule.with_position) {
    m.turned = from.take<float>(slots * static_cast<std::size_t>(m.pitch));
  }
  return m;
}

inline plan_memory carve_plan(carver& from, index_t heads, index_t capacity, index_t group,
                              index_t dim, const plan_needs& needs) {
  const auto n = static_cast<std::size_t>(heads), slots = n * static_cast<std::size_t>(capacity);
  plan_memory m{};
  m.plan.rows = from.take<index_t>(n);
  m.plan.begin = from.take<index_t>(slots + n);
  m.plan.edges = from.take<edge>(slots);
  m.plan.log_mass = from.take<float>(slots);
  if (needs.merges) {
    division& d = m.divided;
    d.rows = m.plan.rows;
    d.kept = from.take<index_t>(slots), d.leaving = from.take<index_t>(slots);
    d.kept_count = from.take<index_t>(n), d.leaving_count = from.take<index_t>(n);
    d.into = from.take<index_t>(slots);
    d.nearest = {from.take<index_t>(slots), from.take<float>(slots)};
    d.similarity = from.take<float>(slots);  // until then the norms of `match`
  }
  if (needs.remembered > 0) {
    const auto d = static_cast<std::size_t>(dim), pitch = static_cast<std::size_t>(pitch_of(dim));
    const auto all = static_cast<std::size_t>(group) * n,
               queries = all * static_cast<std::size_t>(needs.remembered),
               most = all * static_cast<std::size_t>(needs.remembered > needs.reference
                                                         ? needs.remembered
                                                         : needs.reference);
    m.fold = {from.take<float>(n * d * d),       from.take<float>(slots),
              from.take<float>(slots),           from.take<float>(slots),
              from.take<float>(queries * pitch), from.take<float>(most)};
  }
  if (needs.entries.window > 0) {
    m.entries = carve_entries(from, heads, capacity, dim, needs.entries);
  }
  if (needs.reference > 0) {
    m.prompt = carve_prompt_scratch(from, heads, capacity, group, dim, needs);
  }
  return m;
}

// ---------------------------------------------------------------------------- steps, prompts

/// What a step works in: the splits' attention, then plans in the same memory.
struct step_memory {
  partial_attention partial;
  plan_memory plan;
};

inline step_memory carve_step(carver& from, index_t heads, index_t capacity, index_t group,
                              index_t dim, bool plans, const plan_needs& needs) {
  step_memory m{};
  m.partial.tickets = from.take<index_t>(static_cast<std::size_t>(heads));
  carver plan = from;
  carve(m.partial, from, heads, capacity, group, dim);
  if (plans) {
    m.plan = carve_plan(plan, heads, capacity, group, dim, needs);
    from.reserve(plan.used());
  } else if (needs.entries.window > 0) {  // beside what attention leaves
    m.plan.entries = carve_entries(from, heads, capacity, dim, needs.entries);
  }
  return m;
}

/// What `compress` works in: column sums, then plans in the same memory.
struct prompt_memory {
  float *sums, *last;  // [heads, capacity]; of the last window
  index_t *order, *spare;
  workspace log_sums;
  plan_memory plan;
};

inline prompt_memory carve_prompt(carver& from, index_t heads, index_t capacity, index_t group,
                                  index_t dim, index_t queries, const plan_needs& needs) {
  const std::size_t slots = static_cast<std::size_t>(heads) * static_cast<std::size_t>(capacity);
  from.take<index_t>(static_cast<std::size_t>(heads));  // the tickets of steps stay 0
  carver measure = from;
  prompt_memory m{};
  m.sums = measure.take<float>(slots);
  m.last = needs.entries.window > 0 ? measure.take<float>(slots) : nullptr;
  m.order = measure.take<index_t>(slots), m.spare = measure.take<index_t>(slots);
  const std::size_t bytes = column_scores_workspace_bytes(heads, group, queries);
  m.log_sums = {measure.take<char>(bytes), bytes};
  m.plan = carve_plan(from, heads, capacity, group, dim, needs);
  from.reserve(measure.used());
  return m;
}

}  // namespace detail

/// Bytes of workspace for `attend` and `attend_observe`.
template <class Scalar>
std::size_t workspace_bytes(const cache_view<Scalar>& cache) {
  carver count;
  detail::carve_step(count, cache.heads, cache.capacity, cache.group, cache.dim, false, {});
  return count.used();
}

/// Bytes of workspace for `compress` with `queries` queries a query head, and for `step`: the
/// larger. One workspace may serve both, on one stream. `target`: of `compress`; 0: any. Of fold it
/// takes much more.
template <class Policy, class Scalar>
std::size_t workspace_bytes(const Policy& policy, const cache_view<Scalar>& cache,
                            index_t queries = 0, index_t target = 0) {
  const auto rule = rule_of(policy, budget{});
  carver prompt;
  detail::carve_prompt(prompt, cache.heads, cache.capacity, cache.group, cache.dim, queries,
                       detail::plan_needs::of(rule, queries, target > 0 ? target : cache.capacity));
  for (const bool plans : {false, static_cast<bool>(rule.leaves)}) {
    carver decode;
    detail::carve_step(decode, cache.heads, cache.capacity, cache.group, cache.dim, plans,
                       detail::plan_needs::of(rule));
    prompt.reserve(decode.used());
  }
  return prompt.used();
}

}  // namespace kvfold::cuda
