// SPDX-License-Identifier: MIT
/// How near keys are, and the nearest of many.
#pragma once

#include <limits>  // std::numeric_limits

#include "kvmeld/cuda/search/tile_stream.cuh"

namespace kvmeld::cuda {

namespace detail {
/// Of a pair that is no candidate.
inline constexpr float no_score = std::numeric_limits<float>::quiet_NaN();
}  // namespace detail

/// What a similarity may need of a key beside its products.
struct key_facts {
  float number;  ///< what the similarity makes of k·k
  float mass;
  index_t slot;  ///< −1: none
};

/// Similarities of keys a and b. Candidates b of one a go by `score`, more is nearer; what it comes
/// to is `similarity`. Scores are taken for every pair: what is a's alone is left to the end.
struct dot_similarity {
  static constexpr bool norms = false;
  KVMELD_DEVICE static float number(float) { return 0; }
  KVMELD_DEVICE static float score(float ab, const key_facts&, const key_facts&) { return ab; }
  KVMELD_DEVICE static float similarity(float score, const key_facts&) { return score; }
};
/// 0 when either is zero.
struct cosine_similarity {
  static constexpr bool norms = true;
  KVMELD_DEVICE static float number(float square) {
    return square > 0 ? 1.0F / square_root(square) : 0.0F;
  }
  KVMELD_DEVICE static float score(float ab, const key_facts&, const key_facts& b) {
    return ab * b.number;
  }
  KVMELD_DEVICE static float similarity(float score, const key_facts& a) {
    return score * a.number;
  }
};

/// −Ward's cost of making one of two, `m_a m_b / (m_a + m_b) · |a − b|²`; NaN costs most.
struct ward_similarity {
  static constexpr bool norms = true;
  static constexpr float no_cost = 3.402823466e38F;

  const float* mass;   ///< [heads, capacity]
  bool among = false;  ///< only slots of no less mass, and none its own: within one list

  KVMELD_DEVICE static float number(float square) { return square; }
  KVMELD_DEVICE float score(float ab, const key_facts& a, const key_facts& b) const {
    const float apart = b.number + a.number - 2 * ab;
    const float cost = a.mass * b.mass / (a.mass + b.mass) * (apart < 0 ? 0.0F : apart);
    return !allows(a, b) ? detail::no_score : cost < no_cost ? -cost : -no_cost;
  }
  KVMELD_DEVICE static float similarity(float score, const key_facts&) { return score; }

 private:
  KVMELD_DEVICE bool allows(const key_facts& a, const key_facts& b) const {
    return b.slot >= 0 && (!among || (a.slot != b.slot && !(rank(b.mass) < rank(a.mass))));
  }
};

namespace detail {

/// Does a similarity need masses?
template <class Similarity>
inline constexpr bool weighs = requires(const Similarity& s) {
  s.mass;
};

/// The nearest of a lane's own columns to each of its rows, ties to the lower slot; `Ascending`:
/// slots come in order. A score that is NaN is none.
template <class Stream, bool Ascending = false>
struct nearest_columns {
  float score[Stream::row_tiles][2];
  index_t slot[Stream::row_tiles][2];

  static constexpr index_t none = 0x7fffffff;

  KVMELD_DEVICE nearest_columns() {
    unrolled<Stream::row_tiles, 2>(
        [&](index_t m, index_t i) { score[m][i] = lowest_score, slot[m][i] = none; });
  }
  /// Takes in a tile: `score_of(sum, m, i, column)` of row `[m][i]`, `slot_of(column)`.
  template <class SlotOf, class ScoreOf>
  KVMELD_DEVICE void take(const typename Stream::products& x, SlotOf slot_of, ScoreOf score_of) {
    unrolled<Stream::column_tiles, 4>([&](index_t n, index_t j) {
      const index_t column = Stream::column(n, j), s = slot_of(column);
      unrolled<Stream::row_tiles>([&](index_t m) {
        const float y = score_of(x[m][n][j], m, j / 2, column);
        float& most = score[m][j / 2];
        index_t& its = slot[m][j / 2];
        if (y > most || (!Ascending && y == most && s < its)) {
          most = y, its = s;
        }
      });
    });
  }
  /// The nearest of all columns to row r, in thread r; 0: none.
  KVMELD_DEVICE candidate of_rows(typename Stream::shared_memory& shared) const {
    candidate best[Stream::row_tiles][2];
    unrolled<Stream::row_tiles, 2>([&](index_t m, index_t i) {
      best[m][i] =
          slot[m][i] == none ? candidate{0} : most_candidate(ordered(score[m][i]), slot[m][i]);
    });
    return Stream::best_of_rows(shared, best);
  }
};

}  // namespace detail

}  // namespace kvmeld::cuda
