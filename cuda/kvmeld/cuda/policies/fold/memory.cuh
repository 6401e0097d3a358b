// SPDX-License-Identifier: MIT
/// What fold's plans work in.
#pragma once

#include "kvmeld/cuda/memory/column_memory.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/memory/wide_rows.cuh"
#include "kvmeld/cuda/policies/fold/leverage.cuh"
#include "kvmeld/cuda/policies/fold/points.cuh"
#include "kvmeld/cuda/policies/fold/prompt_scores.cuh"
#include "kvmeld/cuda/policies/fold/rule.cuh"
#include "kvmeld/cuda/policies/fold/value_memory.cuh"
#include "kvmeld/cuda/search/clusters.cuh"

namespace kvmeld::cuda::detail {

/// What plans of fold's work in, beside the partition.
struct fold_scratch {
  leverage_scratch leverage;
  index_t* more;    ///< [heads] by scores: pins by leverage
  float* sum;       ///< [heads, capacity] probabilities summed over the queries
  float* mass;      ///< [heads, capacity]
  float* foreseen;  ///< [heads, group, queries, pitch]
  column_memory measure;
};

/// What plans of fold's for a prompt work in beside.
struct prompt_scratch {
  point_space space;
  space_sums sums;
  point_rows points;
  seed_lists seeds;          ///< the budgets are the call's
  cluster_scratch clusters;  ///< the first members' places are the plan's
  value_scratch values;
  float* least;  ///< [heads]
};

/// `of_queries`: where their covariance will be. `fits`: are values fitted?
inline prompt_scratch allocate_prompt_scratch(workspace_allocator& from, const work_shape& shape,
                                              const moment_scratch& of_queries, bool fits) {
  const std::size_t n = shape.all_heads(), slots = shape.slots();
  const auto d = static_cast<std::size_t>(shape.dim);
  prompt_scratch m{};
  const index_t depth = point_rows::depth_of(shape.dim);
  const auto points = [&](index_t of_head) {
    const std::size_t rows = n * static_cast<std::size_t>(of_head);
    return point_rows{from.take<half>(rows * static_cast<std::size_t>(depth)),
                      from.take<float>(rows), of_head, depth};
  };
  m.space = {of_queries.covariance, from.take<char>(n * d * d * split_factor<float>::most_bytes),
             from.take<float>(n * d), from.take<float>(n), from.take<float>(slots)};
  const index_t spare = pick_seeds<>::spare_rows(depth);
  m.points = points(shape.capacity);
  m.clusters.means = points(shape.target > spare ? shape.target : spare);
  m.clusters.members = from.take<index_t>(slots), m.clusters.spare = from.take<index_t>(slots);
  m.clusters.by_slot = from.take<index_t>(slots);
  m.seeds = {from.take<index_t>(slots), from.take<float>(slots), {}};
  const index_t stretches = (shape.capacity + space_sums::slots - 1) / space_sums::slots;
  const std::size_t parts = n * static_cast<std::size_t>(stretches);
  m.sums = {from.take<float>(parts * d), from.take<float>(parts)};
  m.least = from.take<float>(n);
  m.values = allocate_values(from, shape, fits);
  return m;
}

struct fold_plan_memory : plan_memory {
  wide_memory wide;
  fold_scratch fold;
  prompt_scratch prompt;
  score_scratch scores;  ///< of a prompt, before it is planned: in the same memory

  void allocate(workspace_allocator& from, const fold_rule& rule, const work_shape& shape) {
    wide.allocate(from, shape, shape.queries > 0);
    workspace_allocator before = from;
    if (rule.by_scores && shape.queries > 0) {
      scores.allocate(before, shape);
    }
    if (shape.queries == 0 || shape.target > 0) {
      allocate_plan(from, rule, shape);
    }
    from.reserve(before.used());
  }

 private:
  void allocate_plan(workspace_allocator& from, const fold_rule& rule, const work_shape& shape) {
    plan_memory::allocate(from, rule, shape);
    const std::size_t n = shape.all_heads(), slots = shape.slots();
    const auto pitch = static_cast<std::size_t>(pitch_of(shape.dim)),
               all = static_cast<std::size_t>(shape.group) * n,
               queries = all * static_cast<std::size_t>(rule.queries);
    fold.leverage.allocate(from, shape);
    fold.more = from.take<index_t>(n);
    fold.sum = from.take<float>(slots);
    fold.mass = from.take<float>(slots), fold.foreseen = from.take<float>(queries * pitch);
    fold.measure.allocate(from, shape.heads, shape.group,
                          rule.queries > shape.queries ? rule.queries : shape.queries,
                          shape.capacity);
    if (shape.queries > 0) {
      prompt = allocate_prompt_scratch(from, shape, fold.leverage.moments, rule.prompt.ridge > 0);
    }
  }
};

}  // namespace kvmeld::cuda::detail
