// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::min, std::transform
#include <cmath>      // std::sin
#include <span>
#include <vector>

#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/dense.hpp"
#include "kvmeld/score/softmax.hpp"
#include "kvmeld/search/match.hpp"

namespace kvmeld::inline v0 {

namespace score {

/// Running mean and second moment of un-rotated queries, of each query head: a view of the flat
/// floats in `head_state::memory`; read only when they are const. Means rather than sums, so that
/// they stay exact enough in float however many queries are counted.
template <class Float>
class query_moments {
  template <class M>
  using map = Eigen::Map<std::conditional_t<std::is_const_v<Float>, const M, M>>;

 public:
  /// Over `size(dim, group)` floats.
  query_moments(std::span<Float> floats, index_t dim) : floats_(floats), dim_(dim) {}

  /// Floats that it takes.
  static std::size_t size(index_t dim, index_t group) {
    const auto d = as_size(dim);
    return 1 + as_size(group) * (d + d * d);
  }

  /// Adds one query's group; `query(g)` is head `g`'s `[dim]`, rotated to `position`. `scratch
  /// [dim]`.
  template <class Query>
  void count(index_t group, index_t position, const rotary& rope, Query query, float* scratch) {
    const float n = counted(1);
    rotation turn(rope, dim_);
    turn.by(-position);
    for (index_t g = 0; g < group; ++g) {
      const auto* q = query(g);
      std::transform(q, q + dim_, scratch, [](auto e) { return static_cast<float>(e); });
      turn(scratch);
      const Eigen::Map<const dense::vector> x(scratch, dim_);
      mean(g) += (x - mean(g)) / n;
      auto m = second(g);
      for (index_t i = 0; i < dim_; ++i) {
        m.row(i) += (x[i] * x.transpose() - m.row(i)) / n;
      }
    }
  }

  /// Adds many queries at once: `queries [count · group, dim]`, un-rotated, those of a group's
  /// head one after another.
  void count(index_t group, const dense::stored auto& queries) {
    const Eigen::Index rows = queries.rows() / group;
    if (rows == 0) {
      return;
    }
    const float n = counted(rows), lost = static_cast<float>(rows) / n;
    for (index_t g = 0; g < group; ++g) {
      const auto x = queries.middleRows(g * rows, rows);
      mean(g) += x.colwise().sum().transpose() / n - lost * mean(g);
      second(g) *= 1 - lost;
      dense::add_transposed_product(1 / n, x, x, second(g));
    }
  }

  map<dense::vector> mean(index_t g) const { return {at(g), dim_}; }                 ///< E[x]
  map<dense::matrix> second(index_t g) const { return {at(g) + dim_, dim_, dim_}; }  ///< E[x xᵀ]

 private:
  /// The count with so many more; exact in float up to there.
  float counted(Eigen::Index more) {
    return floats_[0] =
               std::min(floats_[0] + static_cast<float>(more), static_cast<float>(1 << 24));
  }
  Float* at(index_t g) const {
    return floats_.data() + 1 + std::ptrdiff_t{g} * (dim_ + dim_ * dim_);
  }

  std::span<Float> floats_;
  index_t dim_;
};

}  // namespace score

/// Expected Attention (arXiv 2510.00636): what future queries would attend to, were they Gaussian.
///   score   ℓ_j = scale·μ'·k_j + ½ scale²·k_jᵀ Σ' k_j + β_j = ln E exp(scale·q·k_j) + β_j,
///           μ' = R μ, Σ' = R Σ Rᵀ: moments of all un-rotated queries so far but the sinks', R the
///           mean rotation over the next `future` positions; s_j = ‖v_j‖ · mean over the group of
///           the softmax of ℓ over the slots that may be evicted
///   select  sinks and the last W, then the top of the rest by s
///   match   none: the others are evicted
/// O(length · group · dim²) a plan.
struct expected_attention {
  index_t sinks = 4;
  index_t window = 0;
  index_t future = 512;

  static constexpr std::string_view name() { return "expected_attention"; }
  static constexpr attention_support supports() {
    return {.soft_cap = false, .alibi = false, .why = "its estimate is of plain logits"};
  }
  static constexpr std::tuple options{
      option("sinks", &expected_attention::sinks, 0, any_count, "first tokens, never evicted"),
      option("window", &expected_attention::window, 0, any_count, "latest tokens, never evicted"),
      option("future", &expected_attention::future, 1, any_count, "positions to come")};
  static std::size_t memory(index_t dim, index_t group, index_t) {
    return score::query_moments<float>::size(dim, group) + as_size(dim);
  }
  protection protects(const kv_head auto&, index_t) const {
    return {.sinks = sinks, .recent = window};
  }
  index_t eviction_batch(index_t slots) const { return slots / 16; }
  static constexpr observation_needs needs() { return {.query = true}; }

  void observe(const kv_head auto& head, head_state& state, const observation& observed) const {
    expects(observed.query != nullptr, "expected_attention: expected the step's query");
    if (counts(head.next_position() - 1)) {
      const auto scratch = state.memory().last(as_size(head.dim()));
      moments(head, state)
          .count(
              head.group(), head.next_position() - 1, head.spec().rope,
              [&](index_t g) { return observed.query + std::ptrdiff_t{g} * head.dim(); },
              scratch.data());
    }
  }
  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    constexpr index_t most = 256;  // queries at a time
    const index_t group = head.group(), dim = head.dim();
    rotation turn(head.spec().rope, dim);
    dense::matrix x;
    for (index_t first = 0; first < queries.count; first += most) {
      const index_t end = std::min(first + most, queries.count);
      std::vector<index_t> counted;
      for (index_t i = first; i < end; ++i) {
        if (counts(queries.position_of(i, head.next_position()))) {
          counted.push_back(i);
        }
      }
      const auto rows = static_cast<Eigen::Index>(counted.size());
      x.resize(group * rows, dim);
      for (Eigen::Index r = 0; r < rows; ++r) {
        const index_t i = counted[as_size(r)];
        turn.by(-queries.position_of(i, head.next_position()));
        for (index_t g = 0; g < group; ++g) {
          float* const row = &x(g * rows + r, 0);
          std::copy_n(queries.at(g, i), dim, row);
          turn(row);
        }
      }
      moments(head, state).count(group, x);
    }
  }

  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    // Types that depend on the head's: what is made of them is compiled where it is used.
    const auto n = head.length(), dim = head.dim();
    const rotary& rope = head.spec().rope;
    const auto is_protected = protected_slots(head, sinks, window);
    const score::query_moments<const float> moments(state.memory(), dim);
    const index_t group = head.group();
    const auto d = as_size(dim), heads = as_size(group);
    detail::arena scratch(
        work.numbers, (1 + heads) * as_size(n) + (1 + heads * d) * d + 2 * as_size(tile_slots) * d);
    auto score = scratch.column(n), cosine = scratch.column(dim / 2),
         sine = scratch.column(dim / 2);
    auto logit = scratch.rows(group, n), sigma = scratch.rows(group * dim, dim),
         key = scratch.rows(tile_slots, dim), spread = scratch.rows(tile_slots, dim);
    mean_rotation(rope, newest_position(head), dim, cosine, sine);
    for (index_t g = 0; g < group; ++g) {
      const auto mean = moments.mean(g);
      auto own = sigma.middleRows(Eigen::Index{g} * dim, dim);
      own = moments.second(g);
      for (index_t i = 0; i < dim; ++i) {
        own.row(i) -= mean[i] * mean.transpose();
      }
    }
    for (index_t first = 0; first < n; first += tile_slots) {
      const index_t slots = std::min(tile_slots, n - first);
      for (index_t i = 0; i < slots; ++i) {
        to_floats(head.key(first + i), dim, &key(i, 0));
        for (index_t p = 0; p < rope.rotated(dim) / 2;
             ++p) {  // Rᵀ k, so that moments stay as they are
          rope.turn_pair(row<float>{&key(i, 0)}, dim, p, cosine[p], -sine[p]);
        }
      }
      for (index_t g = 0; g < group; ++g) {
        const auto mean = moments.mean(g);
        const detail::tile rows(&sigma(Eigen::Index{g} * dim, 0), dim, dim,
                                Eigen::OuterStride<>(dim));
        score::qk_tile(key.data(), slots, rows, spread.data(), dim);  // Σ' is symmetric
        for (index_t i = 0; i < slots; ++i) {
          logit(g, first + i) = head.scale() * mean.dot(key.row(i)) +
                                0.5F * head.scale() * head.scale() * key.row(i).dot(spread.row(i)) +
                                head.log_mass(first + i);
        }
      }
    }
    score.setZero();
    for (index_t g = 0; g < group; ++g) {
      auto mass = logit.row(g).array();
      for (index_t s = 0; s < n; ++s) {
        mass[s] = is_protected(s) ? -std::numeric_limits<float>::infinity() : mass[s];
      }
      score::softmax<> all;  // a sink is left out, as protected slots are
      all.take(mass);
      score += logit.row(g).transpose() / (all.sum * static_cast<float>(group));
    }
    for (index_t s = 0; s < n; ++s) {
      score[s] *= norm(head.value(s), head.value_dim());
    }
    evict(head, target, is_protected, search::column_score({score.data(), as_size(n)}), work, out);
  }

 private:
  static constexpr index_t tile_slots = 32;

  /// The sinks' queries are unlike all others.
  bool counts(index_t position) const { return position >= sinks; }
  static auto moments(const kv_head auto& head, head_state& state) {
    const std::size_t size = score::query_moments<float>::size(head.dim(), head.group());
    return score::query_moments<float>(state.memory().first(size), head.dim());
  }

  /// Means of cos and sin over `future` positions, pair by pair: the sum of a geometric series.
  template <class Column>
  void mean_rotation(const rotary& rope, index_t newest, index_t dim, Column& cosine,
                     Column& sine) const {
    for (index_t p = 0; p < rope.rotated(dim) / 2; ++p) {
      const double turn = rope.frequency(p, dim), half = std::sin(turn / 2), n = future;
      const double shrink = half == 0 ? 1 : std::sin(n * turn / 2) / (n * half);
      const double middle = (newest + (n + 1) / 2) * turn;
      cosine[p] = static_cast<float>(shrink * std::cos(middle));
      sine[p] = static_cast<float>(shrink * std::sin(middle));
    }
  }
};

}  // namespace kvmeld::inline v0
