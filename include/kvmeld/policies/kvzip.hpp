// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::max
#include <vector>

#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"

namespace kvmeld::inline v0 {

/// KVzip (Kim et al. 2025, arXiv 2505.23416): what the model looks up when it repeats the prompt.
///   score   the largest attention that any query of the second pass gives a slot, of all query
///           heads of the group
///   select  sinks and the latest, then the top by s; the paper: by one threshold over all heads of
///           all layers, which is `global_budgets` of `attention`
///   match   none: the others are evicted
/// Prompt only. The second pass is the engine's: it appends "Repeat the previous context" and the
/// prompt, as a whole or in chunks, after the prompt's cache, observes the queries of these, and
/// takes the slots away again (`head.restore`, `head_state::truncate`). Without one the prompt's
/// own queries count. The authors' code normalises over the sinks, a chunk of 2,048 tokens and its
/// repetition; here over all that a query sees, the same for prompts of one chunk.
/// kvzip+ (kvpress): attention is multiplied with ‖W_O v_j‖ / ‖h‖ before the largest is taken.
struct kvzip {
  /// What a layer adds of a group's attention, `[rows, group, value_dim]`, `stride` floats a row:
  /// the columns of these query heads in the layer's output matrix W_O.
  struct projection {
    const float* data = nullptr;  ///< null: not given
    index_t rows = 0;             ///< numbers of an output
    std::ptrdiff_t stride = 0;    ///< floats, row to row
  };

  index_t sinks = 4;
  index_t recent = 0;
  bool plus = false;
  projection output = {};  ///< of the head's layer; for `plus`

  static constexpr std::string_view name() { return "kvzip"; }
  static constexpr std::tuple options{
      option("sinks", &kvzip::sinks, 0, any_count,
             "first tokens, never evicted (the authors: the system prompt)"),
      option("recent", &kvzip::recent, 0, any_count, "latest tokens, never evicted"),
      option("plus", &kvzip::plus, "kvzip+; needs `output`, and `hidden_norm` of the queries")};
  static constexpr bool supports_decode() { return false; }
  /// No step is observed; another prompt compares its slots with those of the last.
  static constexpr kvmeld::decode_use decode_use() { return {.steps = 0, .columns = true}; }
  static constexpr group_combine combine = group_combine::max;  ///< of a group's attention
  static constexpr column attention{0, "attention", slot_reduce::max};
  static constexpr std::array columns{attention};
  static constexpr observation_needs needs() { return {.probabilities = true}; }

  static constexpr bool shares() { return true; }
  void shared_scores(const kv_head auto&, const head_state& state, std::span<float> out) const {
    std::ranges::copy(state.column(attention), out.begin());
  }

  void observe(const kv_head auto&, head_state& state, const observation& observed) const {
    expects(errc::unsupported, !plus,
            "kvzip: plus=1: expected queries with their hidden_norm, got a step's attention");
    raise(state.column(attention), observed.attention);
  }
  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    std::vector<float> largest(as_size(head.length()));
    if (plus) {
      weighted_scores(head, queries, largest);
    } else {
      column_scores(head, queries, {}, {.largest = largest});
    }
    raise(state.column(attention), largest);
  }

  protection protects(const kv_head auto&, index_t) const {
    return {.sinks = sinks, .recent = recent};
  }
  float score(const kv_head auto&, const head_state& state, index_t slot) const {
    return state.column(attention)[as_size(slot)];
  }

 private:
  /// The largest of `a_gij ‖W_O^g v_j‖ / ‖h_i‖` over queries `i` and query heads `g`.
  void weighted_scores(const kv_head auto& head, const query_view<float>& queries,
                       std::span<float> largest) const {
    expects(errc::unsupported, output.data != nullptr,
            "kvzip: plus=1: expected the output projection, got none");
    expects(errc::unsupported, queries.hidden_norm != nullptr,
            "kvzip: plus=1: expected the queries' hidden_norm, got none");
    const index_t n = head.length(), dim = head.value_dim(), group = head.group();
    score::query_blocks block(head, queries);
    dense::matrix_of<float> best = dense::matrix_of<float>::Zero(group, block.columns());
    block.each([&] {
      const index_t slots = block.visible();
      block.multiply(slots);
      for (index_t r = 0; r < block.rows(); ++r) {
        const auto all = block.exponentials(r, slots, block.position(r), block.sink(r));
        if (all.max != all.nothing) {
          auto most = best.row(r % group).array();
          const auto mass = block.row_of(r, slots).transpose();
          const float by = all.sum * queries.hidden_norm[block.query(r)];
          most.head(mass.size()) = most.head(mass.size()).max(mass / by);
        }
      }
    });
    std::vector<float> value(as_size(dim));
    for (index_t s = 0; s < n; ++s) {
      value_to_floats(head, s, value.data());
      for (index_t g = 0; g < group; ++g) {
        const Eigen::Map<const dense::matrix_of<float>, 0, Eigen::OuterStride<>> of_head(
            output.data + std::ptrdiff_t{g} * dim, output.rows, dim,
            Eigen::OuterStride<>(output.stride));
        const float norm = (of_head * Eigen::Map<const Eigen::VectorXf>(value.data(), dim)).norm();
        largest[as_size(s)] = std::max(largest[as_size(s)], norm * best(g, s));
      }
    }
  }
  static void raise(std::span<float> score, std::span<const float> to) {
    for (std::size_t j = 0; j < to.size(); ++j) {
      score[j] = std::max(score[j], to[j]);
    }
  }
};

}  // namespace kvmeld::inline v0
