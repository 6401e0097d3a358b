#pragma once

#include <cmath>  // std::exp
#include <string_view>

#include "kvfold/arena.hpp"
#include "kvfold/evict.hpp"
#include "kvfold/match.hpp"
#include "kvfold/policy.hpp"
#include "kvfold/query_moments.hpp"

namespace kvfold {

/// Expected Attention (arXiv 2510.00636): what queries to come would attend to, were they Gaussian.
///   score   ℓ_j = scale·μ'·k_j + ½ scale²·k_jᵀ Σ' k_j + β_j = ln E exp(scale·q·k_j) + β_j,
///           μ' = R μ, Σ' = R Σ Rᵀ: moments of all un-rotated queries so far but the sinks', R the
///           mean rotation over the next `future` positions; s_j = ‖v_j‖ · mean over the group of
///           the softmax of ℓ over the slots that may leave
///   select  sinks and the last W, then the top of the rest by s
///   match   nowhere: what leaves is gone
/// O(length · group · dim²) a plan.
struct expected_attention {
  kvfold::rope rope = {};  ///< the engine's
  index_t sinks = 4;
  index_t window = 0;    ///< latest tokens that never leave
  index_t future = 512;  ///< positions to come

  static constexpr std::string_view name() { return "expected_attention"; }
  static std::size_t memory(index_t dim, index_t group, index_t) {
    return query_moments<float>::size(dim, group) + static_cast<std::size_t>(dim);
  }
  index_t least() const { return sinks + window + 1; }
  index_t slack(index_t slots) const { return slots / 16; }
  void validate() const {
    expect_count(name(), "sinks", sinks, 0);
    expect_count(name(), "tokens in the window", window, 0);
    expect_count(name(), "positions to come", future, 1);
  }

  void observe(const kv_head auto& head, head_state& state, const observation& seen) const {
    expects(seen.query != nullptr, "expected_attention: the step's query expected, none came");
    count(head, state, head.seen() - 1,
          [&](index_t g) { return seen.query + std::ptrdiff_t{g} * head.dim(); });
  }
  template <class T>
  void observe(const kv_head auto& head, head_state& state, const query_view<T>& queries) const {
    for (index_t i = 0; i < queries.count; ++i) {
      count(head, state, queries.position_of(i, head.seen()),
            [&](index_t g) { return queries.at(g, i); });
    }
  }

  void plan(const kv_head auto& head, const head_state& state, index_t target,
            merge_plan& out) const {
    const index_t n = head.length(), dim = head.dim();
    const auto stays = protected_slots(head, sinks, window);
    const query_moments<const float> moments(state.memory(), dim);
    const auto d = static_cast<std::size_t>(dim);
    arena scratch(out.numbers(), 2 * static_cast<std::size_t>(n) + (4 + d) * d);
    auto score = scratch.column(n), logit = scratch.column(n), cosine = scratch.column(dim / 2),
         sine = scratch.column(dim / 2), key = scratch.column(dim), spread = scratch.column(dim);
    auto sigma = scratch.rows(dim, dim);
    mean_rotation(newest_position(head), dim, cosine, sine);
    score.setZero();
    for (index_t g = 0; g < head.group(); ++g) {
      const auto mean = moments.mean(g);
      sigma = moments.second(g);
      for (index_t i = 0; i < dim; ++i) {
        sigma.row(i) -= mean[i] * mean.transpose();
      }
      float top = -std::numeric_limits<float>::infinity(), sum = 0;
      for (index_t s = 0; s < n; ++s) {
        if (stays(s)) {
          continue;
        }
        for (index_t i = 0; i < dim; ++i) {
          key[i] = static_cast<float>(head.key(s)[i]);
        }
        for (index_t p = 0; p < dim / 2; ++p) {  // Rᵀ k, so that moments stay as they are
          rope.turn_pair(row<float>{key.data()}, dim, p, cosine[p], -sine[p]);
        }
        spread.noalias() = sigma * key;
        logit[s] = head.scale() * mean.dot(key) +
                   0.5F * head.scale() * head.scale() * key.dot(spread) + head.log_mass(s);
        top = std::max(top, logit[s]);
      }
      for (index_t s = 0; s < n; ++s) {
        logit[s] = stays(s) ? 0.0F : std::exp(logit[s] - top);
        sum += logit[s];
      }
      score += logit / (sum * static_cast<float>(head.group()));
    }
    for (index_t s = 0; s < n; ++s) {
      score[s] *= std::sqrt(dot(head.value(s), head.value(s), dim));
    }
    evict(head, target, stays, by({score.data(), static_cast<std::size_t>(n)}), out);
  }

 private:
  template <class Query>
  void count(const kv_head auto& head, head_state& state, index_t position, Query query) const {
    if (position >= sinks) {  // the sinks' queries are unlike all others
      const std::size_t size = query_moments<float>::size(head.dim(), head.group());
      query_moments<float>(state.memory().first(size), head.dim())
          .count(head.group(), position, rope, query, state.memory().data() + size);
    }
  }

  /// Means of cos and sin over `future` positions, pair by pair: the sum of a geometric series.
  template <class Column>
  void mean_rotation(index_t newest, index_t dim, Column& cosine, Column& sine) const {
    for (index_t p = 0; p < dim / 2; ++p) {
      const double turn = rope.frequency(p, dim), half = std::sin(turn / 2), n = future;
      const double shrink = half == 0 ? 1 : std::sin(n * turn / 2) / (n * half);
      const double middle = (newest + (n + 1) / 2) * turn;
      cosine[p] = static_cast<float>(shrink * std::cos(middle));
      sine[p] = static_cast<float>(shrink * std::sin(middle));
    }
  }
};

}  // namespace kvfold
