// SPDX-License-Identifier: MIT
/// How the rows of a tile compare with another: products, norms, distances, directions; and what a
/// decode step's attention compares for a policy, as it reads every key and value anyway.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::max
#include <cmath>      // std::abs
#include <cstddef>    // std::ptrdiff_t
#include <limits>     // std::numeric_limits
#include <span>
#include <vector>

#include "kvmeld/memory/view.hpp"
#include "kvmeld/score/tile_products.hpp"

namespace kvmeld::inline v0 {
namespace score {
inline namespace KVMELD_INSTRUCTIONS {

/// `squares [rows]` of the rows, or, less `from [dim]`, of their distances: each summed as products
/// are, so that equal rows have equal ones.
template <bool less>
void row_squares(const detail::tile& keys, const float* from, float* squares) {
  using namespace Eigen::internal;
  constexpr index_t rows_at_once = 8;
  const auto rows = static_cast<index_t>(keys.rows()), dim = static_cast<index_t>(keys.cols());
  for (index_t s = 0; s < rows; s += rows_at_once) {
    const index_t count = std::min(rows_at_once, rows - s);
    packet sum[rows_at_once];
    const float* row[rows_at_once];
    for (index_t r = 0; r < rows_at_once;
         ++r) {  // the last row stands in for those that are missing
      sum[r] = pset1<packet>(0.0F);
      row[r] = keys.data() + std::min(s + r, rows - 1) * keys.outerStride();
    }
    index_t i = 0;
    for (; i + lanes <= dim; i += lanes) {
      for (index_t r = 0; r < rows_at_once; ++r) {
        packet x = ploadu<packet>(row[r] + i);
        if constexpr (less) {
          x = psub(x, ploadu<packet>(from + i));
        }
        sum[r] = pmadd(x, x, sum[r]);
      }
    }
    float square[rows_at_once];
    for (index_t r = 0; r < rows_at_once; ++r) {
      square[r] = predux(sum[r]);
    }
    for (index_t r = 0; r < count; ++r) {
      for (index_t j = i; j < dim; ++j) {
        const float x = less ? row[r][j] - from[j] : row[r][j];
        square[r] = detail::multiply_add(x, x, square[r]);
      }
      squares[s + r] = square[r];
    }
  }
}

/// `norms [rows]` of the rows: `√(k · k)`.
inline void row_norms(const detail::tile& keys, float* norms) {
  row_squares<false>(keys, nullptr, norms);
  take_roots(norms, static_cast<index_t>(keys.rows()));
}

/// `dots[n][r] = x_n · k_r` and `squares[r] = k_r · k_r` of `N` vectors and `R` rows.
template <index_t R, index_t N>
void dots_and_squares_block(const float* const (&x)[N], const float* k, std::ptrdiff_t row,
                            std::ptrdiff_t ahead, index_t dim, float* const (&dots)[N], index_t s,
                            float* squares) {
  using namespace Eigen::internal;
  constexpr index_t together = rows_together<float, R>;
  packet product[N][R], square[R];
  index_t i = 0;
  for (index_t first = 0; first < R; first += together) {
    packet of_n[N][together], own[together];
    KVMELD_UNROLL_EARLY
    for (index_t r = 0; r < together; ++r) {
      own[r] = pset1<packet>(0.0F);
      KVMELD_UNROLL_EARLY
      for (index_t n = 0; n < N; ++n) {
        of_n[n][r] = own[r];
      }
    }
    for (i = 0; i + lanes <= dim; i += lanes) {
      packet with[N];
      KVMELD_UNROLL_EARLY
      for (index_t n = 0; n < N; ++n) {
        with[n] = ploadu<packet>(x[n] + i);
      }
      KVMELD_UNROLL_EARLY
      for (index_t r = 0; r < together; ++r) {
        const float* const at = k + (first + r) * row + i;
        detail::fetch(at, ahead);
        const packet key = loaded(at);
        KVMELD_UNROLL_EARLY
        for (index_t n = 0; n < N; ++n) {
          of_n[n][r] = pmadd(with[n], key, of_n[n][r]);
        }
        own[r] = pmadd(key, key, own[r]);
      }
    }
    std::copy_n(own, together, square + first);
    KVMELD_UNROLL_EARLY
    for (index_t n = 0; n < N; ++n) {
      std::copy_n(of_n[n], together, product[n] + first);
    }
  }
  const auto store = [](const packet* sums, float* out) {
    if constexpr (R == reduced) {
      reduce(sums, out);
    } else {
      KVMELD_UNROLL_EARLY
      for (index_t r = 0; r < R; ++r) {
        out[r] = predux(sums[r]);
      }
    }
  };
  KVMELD_UNROLL_EARLY
  for (index_t n = 0; n < N; ++n) {
    store(product[n], dots[n] + s);
  }
  store(square, squares);
  for (index_t r = 0; r < R && i < dim; ++r) {
    KVMELD_UNROLL_EARLY
    for (index_t n = 0; n < N; ++n) {
      dots[n][s + r] = with_rest(dots[n][s + r], x[n], k + r * row, i, dim);
    }
    squares[r] = with_rest(squares[r], k + r * row, k + r * row, i, dim);
  }
}

/// `dots[n] [rows]` with `N` vectors `x_n [dim]` and `norms [rows]` in one pass over the rows; the
/// same bits as `qk_tile` and `row_norms`; `follows` as there.
template <index_t N>
void row_dots_and_norms(const detail::tile& keys, const float* const (&x)[N],
                        float* const (&dots)[N], float* norms, std::ptrdiff_t follows = 0) {
  constexpr index_t rows_at_once = sums_at_once / 2;
  const auto rows = static_cast<index_t>(keys.rows()), dim = static_cast<index_t>(keys.cols());
  const std::ptrdiff_t row = keys.outerStride();
  const float* k = keys.data();
  const std::ptrdiff_t ahead = detail::fetched_ahead(bytes_apart(keys), follows);
  index_t s = 0;
  for (; s + rows_at_once <= rows; s += rows_at_once, k += rows_at_once * row) {
    if (s % detail::prefetch_distance == 0) {
      detail::prefetch_row(k, bytes_apart(keys));
    }
    dots_and_squares_block<rows_at_once>(x, k, row, ahead, dim, dots, s, norms + s);
    take_roots(norms + s, rows_at_once);
  }
  for (; s < rows; ++s, k += row) {
    dots_and_squares_block<1>(x, k, row, ahead, dim, dots, s, norms + s);
    take_roots(norms + s, 1);
  }
}
inline void row_dots_and_norms(const detail::tile& keys, const float* x, float* dots, float* norms,
                               std::ptrdiff_t follows = 0) {
  row_dots_and_norms<1>(keys, {x}, {dots}, norms, follows);
}

/// `squares [rows]`: `‖k − x‖²`, `x [dim]`.
inline void row_distances(const detail::tile& keys, const float* x, float* squares) {
  row_squares<true>(keys, x, squares);
}

/// `sum [dim] += Σ k/‖k‖`, from the rows' `norms [rows]`; row after row, however they are tiled.
/// Zero keys add nothing, broken ones neither.
inline void add_directions(const detail::tile& keys, const float* norms, float* sum) {
  constexpr index_t rows_at_once = 64;
  constexpr float most = std::numeric_limits<float>::max();
  const auto rows = static_cast<index_t>(keys.rows());
  float weight[rows_at_once];
  for (index_t first = 0; first < rows; first += rows_at_once) {
    const index_t count = std::min(rows_at_once, rows - first);
    int broken = 0;  // is any? Without branches, so that compilers take many.
    for (index_t i = 0; i < count; ++i) {
      const float norm = norms[first + i];
      broken |= static_cast<int>(!(std::abs(norm) <= most));
      weight[i] = 1 / (norm > 0 ? norm : std::numeric_limits<float>::infinity());
    }
    const bool all = broken == 0;
    for (index_t i = 0; i < (all ? 1 : count); ++i) {  // 0 · NaN is NaN: such rows are left out
      if (all || weight[i] > 0) {
        const detail::tile part(keys.data() + (first + i) * keys.outerStride(), all ? count : 1,
                                keys.cols(), Eigen::OuterStride<>(keys.outerStride()));
        pv_tile(weight + i, 0, 1, part, sum);
      }
    }
  }
}

}  // namespace KVMELD_INSTRUCTIONS
}  // namespace score

/// A comparison of one slot with all others, computed while attention reads the keys. The slot to
/// remove is known only after attention, when comparing would read the keys a second time. So the
/// policy predicts it (`request`), and attention compares it with every tile of keys in the nearest
/// cache. After a wrong prediction (`is_about`) the policy reads the keys again: the same bits.
class fused_similarity {
 public:
  static constexpr index_t npos = -1;

  /// Products of one row with all others, and their norms, `[length]` each.
  struct products {
    std::vector<float> row, dot, norm;
  };

  /// Requests the comparison of slot `s` with all slots: by key, and by value too.
  void request(const kv_head auto& head, index_t s, bool values_too = false) {
    reset();
    if (s == npos) {
      return;
    }
    slot_ = s;
    prepare(keys_, head.key(s), head.dim(), head.capacity());
    with_values_ = values_too;
    if (values_too) {
      prepare(values_, head.value(s), head.value_dim(), head.capacity());
    }
  }
  /// Requests the comparison of any `row [dim]` with all keys, under slot `s`; `directions [dim]`
  /// += the sum of all k/‖k‖.
  void request(const kv_head auto& head, index_t s, std::span<const float> row,
               std::span<float> directions) {
    request(head, s);
    std::ranges::copy(row, keys_.row.begin());
    directions_ = directions.data();
  }
  /// A step begins, with `query [group, dim]`.
  void begin(const float* query) { reset(), query_ = query; }
  const float* query() const { return query_; }
  void reset() { slot_ = npos, compared_ = 0, with_values_ = false, directions_ = nullptr; }

  bool requested() const { return slot_ != npos; }
  bool values_requested() const { return slot_ != npos && with_values_; }
  /// Is the comparison with all `length` slots done, for any slot? Then all norms are known.
  bool complete(index_t length) const { return requested() && compared_ == length; }
  /// ... for slot `s`?
  bool is_about(index_t s, index_t length) const { return s == slot_ && complete(length); }
  const products& keys() const { return keys_; }
  const products& values() const { return values_; }

  /// Called by attention with its tiles, in order; `dots [rows]` with its query `q [dim]` come with
  /// it, the same bits as `qk_tile`: a key that is loaded is multiplied with all that it meets.
  void add_keys(index_t first, const detail::tile& tile, const float* q, float* dots,
                std::ptrdiff_t follows = 0) {
    float* const norms = keys_.norm.data() + first;
    score::row_dots_and_norms<2>(tile, {q, keys_.row.data()}, {dots, keys_.dot.data() + first},
                                 norms, follows);
    if (directions_ != nullptr) {
      score::add_directions(tile, norms, directions_);
    }
    compared_ += static_cast<index_t>(tile.rows());
  }
  void add_values(index_t first, const detail::tile& tile, std::ptrdiff_t follows = 0) {
    score::row_dots_and_norms(tile, values_.row.data(), values_.dot.data() + first,
                              values_.norm.data() + first, follows);
  }

 private:
  /// Grows at first use.
  template <class Row>
  static void prepare(products& a, Row row, index_t dim, index_t capacity) {
    const auto grow = [](std::vector<float>& x, index_t n) {
      x.resize(std::max(x.size(), as_size(n)));
    };
    grow(a.row, dim), grow(a.dot, capacity), grow(a.norm, capacity);
    to_floats(row, dim, a.row.data());
  }

  index_t slot_ = npos;
  index_t compared_ = 0;
  bool with_values_ = false;
  const float* query_ = nullptr;
  float* directions_ = nullptr;
  products keys_, values_;
};

}  // namespace kvmeld::inline v0
