/// What plans are made in, carved from a workspace.
#pragma once

#include <cstddef>      // std::size_t
#include <type_traits>  // std::is_same_v

#include "kvfold/cuda/memory/lists.cuh"
#include "kvfold/cuda/policies/rules.cuh"
#include "kvfold/cuda/workspace.cuh"

namespace kvfold::cuda::detail {

/// What plans of fold's work in, beside the division.
struct fold_scratch {
  float* factor;       ///< [heads, dim, dim] covariance, then L⁻¹, column by column
  float* leverage;     ///< [heads, capacity]
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
  keep_evict_partition divided;
  entry_scratch entries;
  fold_scratch fold;
  prompt_scratch prompt;
};

/// What plans by a rule need beside the plan.
struct plan_needs {
  bool merges = false;
  index_t remembered = 0;            ///< fold's queries per query head
  index_t reference = 0;             ///< a prompt's, for fold
  index_t rows = 0;                  ///< whose values are fitted; 0: none are
  ems_rule entries = {.window = 0};  ///< EMS's; window 0: it is another policy

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

inline prompt_scratch carve_prompt_scratch(workspace_allocator& from, index_t heads,
                                           index_t capacity, index_t group, index_t dim,
                                           const plan_needs& needs) {
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

inline entry_scratch carve_entries(workspace_allocator& from, index_t heads, index_t capacity,
                                   index_t dim, const ems_rule& rule) {
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

inline plan_memory carve_plan(workspace_allocator& from, index_t heads, index_t capacity,
                              index_t group, index_t dim, const plan_needs& needs) {
  const auto n = static_cast<std::size_t>(heads), slots = n * static_cast<std::size_t>(capacity);
  plan_memory m{};
  m.plan.rows = from.take<index_t>(n);
  m.plan.begin = from.take<index_t>(slots + n);
  m.plan.sources = from.take<merge_source>(slots);
  m.plan.log_mass = from.take<float>(slots);
  if (needs.merges) {
    keep_evict_partition& d = m.divided;
    d.rows = m.plan.rows;
    d.kept = from.take<index_t>(slots), d.removed = from.take<index_t>(slots);
    d.kept_count = from.take<index_t>(n), d.removed_count = from.take<index_t>(n);
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

}  // namespace kvfold::cuda::detail
