// SPDX-License-Identifier: MIT
/// Rotary position embedding (RoPE) as a model computes it, and its rotation of many rows.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::max
#include <cmath>      // std::pow, std::cos
#include <numbers>    // std::numbers::pi
#include <span>
#include <utility>  // std::pair
#include <variant>
#include <vector>

#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/memory/row.hpp"

namespace kvmeld::inline v0 {

/// Frequency scaling of Llama 3.1 (`rope_type: llama3`): long wavelengths are stretched by
/// `factor`, short ones kept, those between blended.
struct llama3_scaling {
  double factor = 8;                ///< of the longest wavelengths
  double low = 1;                   ///< low_freq_factor
  double high = 4;                  ///< high_freq_factor
  index_t original_context = 8192;  ///< positions

  bool operator==(const llama3_scaling&) const = default;
};

/// YaRN (Peng et al. 2023, arXiv 2309.00071): frequencies of fewer than `slow` turns over the
/// original context are divided by `factor`, those of more than `fast` are kept, a ramp between.
struct yarn_scaling {
  double factor = 1;                ///< of the slowest frequencies
  index_t original_context = 4096;  ///< positions
  double fast = 32;                 ///< beta_fast, turns
  double slow = 1;                  ///< beta_slow, turns
  bool truncate = true;             ///< does the ramp begin and end at whole pairs? Not in gpt-oss

  bool operator==(const yarn_scaling&) const = default;
};

/// RoPE (Su et al. 2021, arXiv 2104.09864): pair `p` of a head is rotated by `frequency(p, dim)`
/// radians per position. A value; none by default.
///
///     rotary::halves(500'000.0).llama3({.factor = 32})
///     rotary::interleaved(10'000.0).dims(64).last()       // DeepSeek's latent rows
///
/// A magnitude that a model multiplies rotated rows with (YaRN's attention factor) is in its rows
/// already, and no shift in position changes it: nothing here needs to know it.
class rotary {
 public:
  /// Which elements form a pair: `(i, i + dims/2)` as in Hugging Face, or `(2i, 2i + 1)`.
  enum class pairing { halves, interleaved };

  /// No rotation: keys have no position.
  rotary() = default;
  /// Frequencies `base^(−2p/dims)`. Refused: a base that is not finite and above 1.
  static rotary halves(double base) { return {pairing::halves, base}; }
  /// Pairs `(2i, 2i + 1)`.
  static rotary interleaved(double base) { return {pairing::interleaved, base}; }
  /// Frequencies `[pairs]` in radians per position, from a model's own table.
  /// Refused: an empty table, frequencies that are not finite.
  static rotary table(std::span<const double> frequencies, pairing pairs) {
    expects(!frequencies.empty(), "rotary::table: expected at least 1 frequency, got none");
    rotary r;
    r.pairing_ = pairs;
    for (const double f : frequencies) {
      expects(std::isfinite(f), "rotary::table: expected finite frequencies, got ", f);
      r.table_.push_back(f);
    }
    return r;
  }

  /// The same for the first `n` elements of a head alone, or with `last` for its last ones.
  /// Refused: less than one pair, an odd `n`.
  rotary dims(index_t n) const {
    expects(n >= 2 && n % 2 == 0, "rotary::dims: expected an even number of at least 2, got ", n);
    rotary r = *this;
    r.dims_ = n;
    return r;
  }
  /// Where not all elements of a head are rotated, the last ones are: as latent rows, `[latent,
  /// rotated]`.
  rotary last() const {
    rotary r = *this;
    r.last_ = true;
    return r;
  }
  /// All positions divided by `factor` (position interpolation). Refused: a factor not above 0.
  rotary linear(double factor) const { return scaled_by("linear", factor, linear_scaling{factor}); }
  /// Refused: a factor not above 0, a high factor not above the low one.
  rotary llama3(const llama3_scaling& s) const {
    expects(s.high > s.low && s.original_context > 0,
            "rotary::llama3: expected a high above the low factor and a context above 0, got ",
            s.high, ", ", s.low, " and ", s.original_context);
    return scaled_by("llama3", s.factor, s);
  }
  /// Refused: a factor not above 0, `fast` not above `slow`, a table (its base is not known).
  rotary yarn(const yarn_scaling& s) const {
    expects(table_.empty(), "rotary::yarn: expected a base, got a table");
    expects(s.fast > s.slow && s.slow > 0 && s.original_context > 0,
            "rotary::yarn: expected fast above slow above 0 and a context above 0, got ", s.fast,
            ", ", s.slow, " and ", s.original_context);
    return scaled_by("yarn", s.factor, s);
  }

  /// Does it rotate anything?
  bool rotates() const { return base_ > 0 || !table_.empty(); }
  pairing pairs_as() const { return pairing_; }  ///< which elements form a pair
  /// 0: none, or a table.
  double base() const { return base_; }
  bool operator==(const rotary&) const = default;

  /// Elements of a head of `dim` that are rotated, side by side from `first(dim)` on; even.
  index_t rotated(index_t dim) const {
    const auto of_table = static_cast<index_t>(2 * table_.size());
    const index_t all = !rotates() ? 0 : dims_ > 0 ? dims_ : of_table > 0 ? of_table : dim;
    return all <= dim ? all / 2 * 2 : 0;
  }
  /// The first of these.
  index_t first(index_t dim) const { return last_ ? dim - rotated(dim) : 0; }
  /// Throws if a head of `dim` has fewer elements than are to be rotated.
  void check(index_t dim) const {
    expects(dims_ <= dim && static_cast<index_t>(2 * table_.size()) <= dim,
            "rotary: expected at most ", dim, " rotated dimensions, got ",
            std::max(dims_, static_cast<index_t>(2 * table_.size())));
    expects(dims_ == 0 || table_.empty() || static_cast<index_t>(2 * table_.size()) == dims_,
            "rotary: expected a table of ", dims_ / 2, " frequencies, got ", table_.size());
  }

  /// Radians per position, of pair `p` in `0 .. rotated(dim)/2 − 1`.
  double frequency(index_t p, index_t dim) const {
    if (!table_.empty()) {
      return scaled(table_[as_size(p)], p, rotated(dim));
    }
    return scaled(std::pow(base_, -2.0 * p / of_base(dim)), p, rotated(dim));
  }

  /// Those of all pairs, `out [rotated(dim)/2]`, faster than one by one.
  void frequencies(index_t dim, std::span<double> out) const {
    const index_t turned = rotated(dim);
    const double ratio = table_.empty() && turned > 0 ? std::pow(base_, -2.0 / of_base(dim)) : 0;
    double f = 1;
    for (std::size_t p = 0; p < out.size(); ++p, f *= ratio) {
      out[p] = scaled(table_.empty() ? f : table_[p], static_cast<index_t>(p), turned);
    }
  }

  /// Rotates `x [dim]` on by `positions` (may be negative), in place.
  template <class Scalar>
  void rotate(row<Scalar> x, index_t dim, double positions) const {
    for (index_t p = 0; p < rotated(dim) / 2; ++p) {
      const double angle = positions * frequency(p, dim);
      turn_pair(x, dim, p, std::cos(angle), std::sin(angle));
    }
  }

  /// The elements of pair `p` of a head of `dim`.
  std::pair<index_t, index_t> pair(index_t p, index_t dim) const {
    const bool split = pairing_ == pairing::halves;
    return {first(dim) + (split ? p : 2 * p),
            first(dim) + (split ? p + rotated(dim) / 2 : 2 * p + 1)};
  }
  /// Rotates pair `p` of `x [dim]` by the angle of this cosine and sine.
  template <class Scalar>
  void turn_pair(row<Scalar> x, index_t dim, index_t p, double cosine, double sine) const {
    const auto [i, j] = pair(p, dim);
    const double a = static_cast<float>(x[i]), b = static_cast<float>(x[j]);
    x[i] = static_cast<Scalar>(static_cast<float>(a * cosine - b * sine));
    x[j] = static_cast<Scalar>(static_cast<float>(b * cosine + a * sine));
  }

 private:
  struct linear_scaling {
    double factor;
    bool operator==(const linear_scaling&) const = default;
  };

  rotary(pairing pairs, double base) : pairing_(pairs), base_(base) {
    expects(std::isfinite(base) && base > 1, "rotary: expected a finite base above 1, got ", base);
  }
  template <class Scaling>
  rotary scaled_by(const char* what, double factor, const Scaling& s) const {
    expects(std::isfinite(factor) && factor > 0, "rotary::", what,
            ": expected a finite factor above 0, got ", factor);
    rotary r = *this;
    r.scaling_ = s;
    return r;
  }

  /// The dimensions that the base's exponents run over.
  index_t of_base(index_t dim) const { return dims_ > 0 ? dims_ : dim; }

  /// The frequency `f` of pair `p` of `turned` dimensions after the scaling.
  double scaled(double f, index_t p, index_t turned) const {
    const auto blended = [&](double kept, double factor) {
      return kept >= 1 ? f : kept <= 0 ? f / factor : (1 - kept) * f / factor + kept * f;
    };
    if (const auto* s = std::get_if<linear_scaling>(&scaling_)) {
      return f / s->factor;
    }
    if (const auto* s = std::get_if<llama3_scaling>(&scaling_)) {
      const double turns = s->original_context * f / (2 * std::numbers::pi);
      return blended((turns - s->low) / (s->high - s->low), s->factor);
    }
    if (const auto* s = std::get_if<yarn_scaling>(&scaling_)) {
      // The pair that turns `n` times over the context, as a real index (find_correction_dim).
      const auto pair_of = [&](double n) {
        return turned * std::log(s->original_context / (2 * std::numbers::pi * n)) /
               (2 * std::log(base_));
      };
      double first = pair_of(s->fast), last = pair_of(s->slow);
      if (s->truncate) {
        first = std::floor(first), last = std::ceil(last);
      }
      first = std::max(first, 0.0), last = std::min(last, turned - 1.0);
      return blended(1 - (p - first) / std::max(last - first, 1e-3), s->factor);
    }
    return f;
  }

  pairing pairing_ = pairing::halves;
  double base_ = 0;
  index_t dims_ = 0;  // 0: all
  bool last_ = false;
  std::variant<std::monostate, linear_scaling, llama3_scaling, yarn_scaling> scaling_;
  std::vector<double> table_;
};

/// One rotation for many rows of floats: the sines are computed once, at the width of a vector, and
/// nothing is allocated for up to 640 dimensions, so that it fits on any stack. The angle is exact
/// (double, brought into one turn), its sine is a float's. Without rotation rows stay as they are.
class rotation {
 public:
  /// Refused: more than `longest_row` dimensions.
  rotation(const rotary& r, index_t dim)
      : pairing_(r.pairs_as()), first_(r.first(dim)), pairs_(r.rotated(dim) / 2) {
    expects(dim <= longest_row, "rotation: expected at most ", longest_row, " dimensions, got ",
            dim);
    if (pairs_ > own_pairs) {
      more_frequencies_.resize(as_size(pairs_));
      more_turns_.resize(2 * as_size(pairs_));
    }
    r.frequencies(dim, {frequencies(), as_size(pairs_)});
    by(0);
  }

  /// Sets the rotation: by so many positions (may be negative).
  void by(double positions) {
    constexpr double turn = 2 * std::numbers::pi;
    constexpr index_t few = 64;
    alignas(detail::vector_bytes) double angles[few];  // on the stack
    alignas(detail::vector_bytes) float reduced[few], turned[few];
    using doubles = Eigen::Map<Eigen::ArrayXd>;
    using block = Eigen::Map<Eigen::ArrayXf, detail::vector_bytes>;
    for (index_t p = 0; p < pairs_; p += few) {
      const index_t count = std::min(few, pairs_ - p);
      doubles angle(angles, count);
      angle = positions * doubles(frequencies() + p, count);
      angle -= turn * (angle / turn).rint();
      std::transform(angles, angles + count, reduced,
                     [](double x) { return static_cast<float>(x); });
      block(turned, count) = block(reduced, count).cos();
      std::copy_n(turned, count, turns() + p);
      block(turned, count) = block(reduced, count).sin();
      std::copy_n(turned, count, turns() + pairs_ + p);
    }
  }

  /// Rotates `head [dim]` in place.
  void operator()(float* head) const {
    float* const x = head + first_;
    const float *const cosine = turns(), *const sine = cosine + pairs_;
    if (pairing_ == rotary::pairing::halves) {
      for (index_t p = 0; p < pairs_; ++p) {
        const float a = x[p], b = x[p + pairs_];
        x[p] = a * cosine[p] - b * sine[p];
        x[p + pairs_] = b * cosine[p] + a * sine[p];
      }
      return;
    }
    for (index_t p = 0; p < pairs_; ++p) {
      float* const pair = x + std::ptrdiff_t{2} * p;
      const float a = pair[0], b = pair[1];
      pair[0] = a * cosine[p] - b * sine[p];
      pair[1] = b * cosine[p] + a * sine[p];
    }
  }

 private:
  static constexpr index_t own_pairs = 320;

  // Of an object that may be copied: where the numbers are is asked for anew.
  double* frequencies() { return pairs_ > own_pairs ? more_frequencies_.data() : own_frequencies_; }
  float* turns() { return pairs_ > own_pairs ? more_turns_.data() : own_turns_; }
  const float* turns() const { return pairs_ > own_pairs ? more_turns_.data() : own_turns_; }

  rotary::pairing pairing_;
  index_t first_, pairs_;
  alignas(detail::vector_bytes) double own_frequencies_[own_pairs];  // [pairs]
  alignas(detail::vector_bytes) float own_turns_[2 * own_pairs];     // cosines, then sines
  std::vector<double> more_frequencies_;
  std::vector<float> more_turns_;
};

}  // namespace kvmeld::inline v0
