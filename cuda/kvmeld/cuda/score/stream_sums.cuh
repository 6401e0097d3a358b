// SPDX-License-Identifier: MIT
/// What `stream_columns` keeps of its products.
#pragma once

#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda::detail {

/// Of a row: the log-sum-exp; one sum; total, window and decayed sum at once; the largest.
enum class measured { log_sums, one_sum, three_sums, largest };

/// How a query counts.
struct column_weights {
  index_t window = 0x7fffffff;  ///< one sum: only the last queries
  float log2_decay = 0;
  float share = 1;  ///< that sums are divided by

  /// A probability is `2^(base · x − shift − rest)`: `shift` is a rounded product and `rest` what
  /// it lost, so that a logit and its own log-sum-exp leave 2^0.
  struct weight {
    float shift, rest;  ///< of one sum, `rest` is less its age too
    float age;          ///< three sums: λ^after; negative before the window
  };
  /// Of a query with `after` others after it; −1: it is not there. `dots`: its log-sum-exp in units
  /// of dot products.
  template <measured What>
  KVMELD_DEVICE weight of(index_t after, float dots, float base) const {
    const float shift = dots * base, power = static_cast<float>(after) * log2_decay;
    const bool late = after < window;
    if (after < 0 || shift == lowest_score || (What == measured::one_sum && !late)) {
      return {-lowest_score, 0, 0};
    }
    const float rest = multiply_add(dots, base, -shift);
    if constexpr (What == measured::three_sums) {  // never 0, for the sign
      const float age = exp2_approx(power > -125.0F ? power : -125.0F);
      return {shift, rest, late ? age : -age};
    } else {
      return {shift, What == measured::one_sum ? rest - power : rest, 0};
    }
  }
};

/// A lane's numbers of its rows, from a warp's products. Logits and sums are in powers of 2.
template <measured What, index_t RowTiles, index_t ColumnTiles>
struct stream_sums {
  static constexpr index_t numbers = What == measured::three_sums ? 3 : 1;
  using products = float[RowTiles][ColumnTiles][4];
  struct weights {
    float shift[ColumnTiles][2], rest[ColumnTiles][2], age[ColumnTiles][2];
  };

  float base;  // scale · log2 e
  float sum[numbers][RowTiles][2];
  // Log-sum-exp: the guess as a dot product and as the power of 2 it makes.
  float guess[RowTiles][2], shift[RowTiles][2], more[RowTiles][2];

  KVMELD_DEVICE explicit stream_sums(float of_base) : base(of_base) {
    KVMELD_UNROLL
    for (index_t m = 0; m < RowTiles; ++m) {
      KVMELD_UNROLL
      for (index_t i = 0; i < 2; ++i) {
        KVMELD_UNROLL
        for (index_t k = 0; k < numbers; ++k) {
          sum[k][m][i] = What == measured::largest ? lowest_score : 0.0F;
        }
        guess[m][i] = 0, shift[m][i] = -1e30F, more[m][i] = 0;
      }
    }
  }

  /// Where weights of a tile's column `x` lie: a lane reads those of its columns by vectors, shift
  /// and rest of two columns side by side, ages of two tiles' columns.
  KVMELD_DEVICE static index_t place_of(index_t x) { return 2 * x; }
  KVMELD_DEVICE static index_t age_of(index_t x) {
    return x / 16 * 16 + x % 8 / 2 * 4 + x / 8 % 2 * 2 + x % 2;
  }
  /// Of a product's columns, from column `first` on.
  template <class Values, class Ages>
  KVMELD_DEVICE static void load(weights& w, const Values& value, const Ages& age, index_t first) {
    if constexpr (What != measured::log_sums) {
      KVMELD_UNROLL
      for (index_t n = 0; n < ColumnTiles; ++n) {
        const auto x = value.vector(place_of(first + n * 8 + lane() % 4 * 2));
        w.shift[n][0] = x[0], w.rest[n][0] = x[1];
        w.shift[n][1] = x[2], w.rest[n][1] = x[3];
      }
    }
    if constexpr (What == measured::three_sums) {
      KVMELD_UNROLL
      for (index_t n = 0; n < ColumnTiles; n += 2) {
        const auto x = age.vector(age_of(first + n * 8 + lane() % 4 * 2));
        w.age[n][0] = x[0], w.age[n][1] = x[1], w.age[n + 1][0] = x[2], w.age[n + 1][1] = x[3];
      }
    }
  }

  KVMELD_DEVICE void fold(const products& x, const weights& w, index_t m, index_t n) {
    KVMELD_UNROLL
    for (index_t e = 0; e < 4; ++e) {
      const index_t i = e / 2;
      if constexpr (What == measured::log_sums) {
        more[m][i] += exp2_approx(multiply_add(x[m][n][e], base, -shift[m][i]));
      } else {
        const index_t c = e % 2;
        const float power = multiply_add(x[m][n][e], base, -w.shift[n][c]) - w.rest[n][c];
        if constexpr (What == measured::largest) {
          sum[0][m][i] = power > sum[0][m][i] ? power : sum[0][m][i];
        } else {
          const float y = exp2_approx(power);
          sum[0][m][i] += y;
          if constexpr (What == measured::three_sums) {
            const float age = w.age[n][c];
            sum[1][m][i] += age > 0 ? y : 0.0F;
            sum[2][m][i] = multiply_add(age < 0 ? -age : age, y, sum[2][m][i]);
          }
        }
      }
    }
  }

  /// After the last piece. Exponents of a log-sum-exp are taken from a guess, the largest logit of
  /// the products at which they were looked at last: no running maximum. Too low a guess shows as a
  /// huge sum; then they are looked at again.
  KVMELD_DEVICE void settle(const products& x) {
    if constexpr (What == measured::log_sums) {
      float all = 0;
      KVMELD_UNROLL
      for (index_t m = 0; m < RowTiles; ++m) {
        all += more[m][0] + more[m][1];
      }
      if (ballot(!(all < 0x1p64F)) != 0) {
        look_again(x);
      }
      KVMELD_UNROLL
      for (index_t m = 0; m < RowTiles; ++m) {
        KVMELD_UNROLL
        for (index_t i = 0; i < 2; ++i) {
          sum[0][m][i] += more[m][i], more[m][i] = 0;
        }
      }
    }
  }

  /// Of a row's four lanes together.
  KVMELD_DEVICE float number(index_t k, index_t m, index_t i) const {
    return What == measured::largest ? exp2_approx(reduce_max(sum[k][m][i], 4))
                                     : reduce_sum(sum[k][m][i], 4);
  }
  /// `scale · guess + ln Σ`: what a guess lost when it was rounded is in the sum, and leaves it.
  KVMELD_DEVICE float log_sum(index_t m, index_t i, float scale) const {
    const float most = reduce_max(shift[m][i], 4);
    const float all = reduce_sum(sum[0][m][i] * exp2_approx(shift[m][i] - most), 4);
    const index_t quad = lane() / 4 * 4;
    const index_t from = quad + lowest_lane(ballot(shift[m][i] == most) >> quad & 15U);
    const float x = shuffle(guess[m][i], from), lost = multiply_add(x, base, -most);
    return all == 0 ? lowest_score : multiply_add(log2_approx(all) - lost, ln_2, scale * x);
  }

 private:
  KVMELD_DEVICE void look_again(const products& x) {
    KVMELD_UNROLL
    for (index_t m = 0; m < RowTiles; ++m) {
      KVMELD_UNROLL
      for (index_t i = 0; i < 2; ++i) {
        const float before = shift[m][i];
        float y = 0;
        KVMELD_UNROLL
        for (index_t n = 0; n < ColumnTiles; ++n) {
          KVMELD_UNROLL
          for (index_t e = 2 * i; e < 2 * i + 2; ++e) {
            const float l = x[m][n][e] * base;
            guess[m][i] = l > shift[m][i] ? x[m][n][e] : guess[m][i];
            shift[m][i] = l > shift[m][i] ? l : shift[m][i];
          }
        }
        KVMELD_UNROLL
        for (index_t n = 0; n < ColumnTiles; ++n) {
          KVMELD_UNROLL
          for (index_t e = 2 * i; e < 2 * i + 2; ++e) {
            y += exp2_approx(multiply_add(x[m][n][e], base, -shift[m][i]));
          }
        }
        sum[0][m][i] *= exp2_approx(before - shift[m][i]);
        more[m][i] = y;
      }
    }
  }
};

}  // namespace kvmeld::cuda::detail
