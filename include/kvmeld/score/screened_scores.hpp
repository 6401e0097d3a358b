// SPDX-License-Identifier: MIT
/// Lookahead-max by products of 8 bits, in a fourth of the time that floats take. They tell which
/// query has the largest share of each slot; that one's logit is computed in float.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::clamp, std::fill_n, std::max, std::min
#include <cmath>      // std::abs, std::exp, std::isfinite, std::ldexp, std::log2, std::lrint
#include <cstddef>    // std::byte, std::ptrdiff_t
#include <cstdint>    // std::int16_t, std::int64_t, std::uint8_t
#include <cstring>    // std::memcpy
#include <limits>     // std::numeric_limits
#include <numbers>    // std::numbers::log2e_v
#include <span>
#include <utility>  // std::exchange
#include <vector>

#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/score/queries.hpp"
#include "kvmeld/score/softmax.hpp"
#include "kvmeld/score/tile_products.hpp"

#if defined(__GNUC__) && defined(__x86_64__) && defined(__linux__) && !defined(__CUDACC__)
#define KVMELD_VNNI_TARGET [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]]
#include <immintrin.h>
#endif

namespace kvmeld::inline v0 {
namespace score {

/// Where query `i` of `count` goes, after `next` tokens.
inline index_t moved_position(index_t next, index_t horizon, index_t i, index_t count) {
  const std::int64_t to = next + std::int64_t{horizon} * i / count;
  return static_cast<index_t>(std::min<std::int64_t>(to, std::numeric_limits<index_t>::max()));
}

inline namespace KVMELD_INSTRUCTIONS {
#ifdef KVMELD_VNNI_TARGET
#ifndef __clang__  // g++ 12 means its own header
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

/// Slots of a panel, whose codes lie together: `[dim / 4][panel_slots][4]`; queries of a tile.
inline constexpr index_t panel_slots = 64, tile_rows = 4;
/// A product of a slot that a query does not see.
inline constexpr std::int16_t unseen = std::numeric_limits<std::int16_t>::min();

/// What makes sums over a query's codes products: `(start + Σ) · unit`, and `of_mean` is added to
/// the logit. Products with the first slots, the sinks, are exact: every query's sum has them.
struct coded_query {
  std::int32_t start;
  float unit, of_mean;
  std::int16_t of_first[4];
};

/// `out [tile_rows, next]`: the products of a panel's slots and of queries `[tile_rows, 4 quads]`.
KVMELD_VNNI_TARGET KVMELD_NOINLINE inline void multiply_panel(
    const std::uint8_t* keys, const std::int8_t* codes, index_t quads, const coded_query* queries,
    std::int16_t* out, std::ptrdiff_t next) {
  constexpr index_t vectors = panel_slots / 16;
  __m512i sum[tile_rows][vectors], key[vectors];
  KVMELD_UNROLL_EARLY
  for (index_t r = 0; r < tile_rows; ++r) {
    KVMELD_UNROLL_EARLY
    for (index_t v = 0; v < vectors; ++v) {
      sum[r][v] = _mm512_set1_epi32(queries[r].start);
    }
  }
  for (index_t c = 0; c < quads; ++c, codes += 4, keys += std::ptrdiff_t{4} * panel_slots) {
    KVMELD_UNROLL_EARLY
    for (index_t v = 0; v < vectors; ++v) {
      key[v] = _mm512_load_si512(keys + std::ptrdiff_t{64} * v);
    }
    KVMELD_UNROLL_EARLY
    for (index_t r = 0; r < tile_rows; ++r) {
      std::int32_t four;
      std::memcpy(&four, codes + std::ptrdiff_t{4} * r * quads, sizeof(four));
      const __m512i query = _mm512_set1_epi32(four);
      KVMELD_UNROLL_EARLY
      for (index_t v = 0; v < vectors; ++v) {
        sum[r][v] = _mm512_dpbusd_epi32(sum[r][v], key[v], query);
      }
    }
  }
  KVMELD_UNROLL_EARLY
  for (index_t r = 0; r < tile_rows; ++r) {
    const __m512 unit = _mm512_set1_ps(queries[r].unit);
    KVMELD_UNROLL_EARLY
    for (index_t v = 0; v < vectors; ++v) {
      const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r][v]), unit);
      _mm256_store_si256(reinterpret_cast<__m256i*>(out + r * next + std::ptrdiff_t{16} * v),
                         _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(product)));
    }
  }
}

/// `log2 Σ_s 2^(unit · x_s + bias_s)` of the `count` slots that are seen, in whole vectors of 32.
/// −∞ of none.
KVMELD_VNNI_TARGET KVMELD_NOINLINE inline float log2_sum(const std::int16_t* x, const float* bias,
                                                         float most_bias, index_t count,
                                                         float unit) {
  __m512i most = _mm512_set1_epi16(unseen);
  for (index_t s = 0; s < count; s += 32) {
    most = _mm512_max_epi16(most, _mm512_load_si512(x + s));
  }
  const __m256i half =
      _mm256_max_epi16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
  const int top = _mm512_reduce_max_epi32(_mm512_cvtepi16_epi32(half));
  const float above = unit * static_cast<float>(top) + most_bias;  // of all exponents
  const __m512 scale = _mm512_set1_ps(unit), least = _mm512_set1_ps(above);
  // 2^x of a fraction in [−1/2, 1/2], to 8e-5
  const __m512 c0 = _mm512_set1_ps(0.999928F), c1 = _mm512_set1_ps(0.693261F),
               c2 = _mm512_set1_ps(0.242611F), c3 = _mm512_set1_ps(0.0551717F);
  const __m512i none = _mm512_set1_epi32(unseen);
  __m512 sum = _mm512_setzero_ps();
  for (index_t s = 0; s < count; s += 16) {
    const __m512i whole =
        _mm512_cvtepi16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(x + s)));
    const __m512 exponent = _mm512_sub_ps(
        _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), scale, _mm512_load_ps(bias + s)), least);
    const __m512 nearest = _mm512_roundscale_ps(exponent, 0),
                 fraction = _mm512_sub_ps(exponent, nearest);
    __m512 power = _mm512_fmadd_ps(c3, fraction, c2);
    power = _mm512_fmadd_ps(power, fraction, c1);
    power = _mm512_fmadd_ps(power, fraction, c0);
    sum = _mm512_mask_add_ps(sum, _mm512_cmpgt_epi32_mask(whole, none), sum,
                             _mm512_scalef_ps(power, nearest));
  }
  return above + std::log2(_mm512_reduce_add_ps(sum));
}

/// `best_s = max(best_s, x_rs − less_r)` over `rows` rows, and `row_s` = `first + r` where it grew.
KVMELD_VNNI_TARGET KVMELD_NOINLINE inline void take_largest(const std::int16_t* x,
                                                            const std::int16_t* less, index_t rows,
                                                            index_t first, index_t slots,
                                                            std::int16_t* best, index_t* row) {
  const __m512i before = _mm512_set1_epi32(first);
  for (index_t s = 0; s < slots; s += 32) {
    const __m512i held = _mm512_load_si512(best + s);
    __m512i most = held, at = _mm512_setzero_si512();
    for (index_t r = 0; r < rows; ++r) {
      const __m512i now = _mm512_subs_epi16(_mm512_load_si512(x + std::ptrdiff_t{r} * slots + s),
                                            _mm512_set1_epi16(less[r]));
      at = _mm512_mask_mov_epi16(at, _mm512_cmpgt_epi16_mask(now, most),
                                 _mm512_set1_epi16(static_cast<std::int16_t>(r)));
      most = _mm512_max_epi16(most, now);
    }
    const __mmask32 grew = _mm512_cmpgt_epi16_mask(most, held);
    if (grew != 0) {
      const __m512i lower = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(at)),
                    upper = _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(at, 1));
      _mm512_store_si512(best + s, most);
      _mm512_mask_store_epi32(row + s, static_cast<__mmask16>(grew),
                              _mm512_add_epi32(before, lower));
      _mm512_mask_store_epi32(row + s + 16, static_cast<__mmask16>(grew >> 16),
                              _mm512_add_epi32(before, upper));
    }
  }
}
#ifndef __clang__
#pragma GCC diagnostic pop
#endif

/// `size` numbers, 0 at first, that begin where a vector does.
template <class T>
class aligned_array {
 public:
  explicit aligned_array(std::size_t size) : lines_(size * sizeof(T) / sizeof(line) + 1) {}
  T* at(std::ptrdiff_t i) { return reinterpret_cast<T*>(lines_.data()) + i; }

 private:
  struct alignas(detail::vector_bytes) line {
    std::byte bytes[detail::vector_bytes];
  };
  std::vector<line> lines_;
};

/// `lookahead_max` by codes of 8 bits. Keys are held less their mean μ. What channel c of keys is
/// divided by, queries are multiplied with, so that its largest numbers are alike in both:
///
///     k_c − μ_c ≈ code_k · a f_c     q_c ≈ code_q · b / f_c     a of the head, b of the query
///     scale · q·k ≈ scale · (a b · code_q·code_k + q·μ)
///
/// Such logits, rounded to 16 bits, give the log-sum-exp Z of both passes over all slots, and which
/// query has the largest share of a slot. Its logit is then computed in float, and Z corrected by
/// what codes had made of the slots j' that this query i has:
///
///     p_ij = x_j / (1 + Σ_j' (x_j' − y_j'))     x = exp(a_ij − Z_i), y the same by codes
///
/// A slot that two queries look up alike is one's; the other's Z keeps what codes made of it.
template <class Query>
class screened_prompt {
 public:
  screened_prompt(const head_ref& head, const query_view<Query>& queries, index_t horizon)
      : head_(head), queries_(queries), horizon_(horizon) {}

  /// Returns false, with anything in `out`, where 8 bits or 16 do not hold it.
  bool operator()(std::span<float> out) {
    if (!measure_ranges()) {
      return false;
    }
    round_keys();
    std::ranges::fill(out, 0.0F);
    for (index_t g = 0; g < head_.group(); ++g) {
      std::fill_n(best_.at(0), slots_, unseen);
      for (index_t first = 0; first < queries_.count; first += rows_at_once_) {
        take_block(g, first, std::min(rows_at_once_, queries_.count - first));
      }
      if (!fits_) {
        return false;
      }
      add_shares(g, out);
    }
    for (index_t s = 0; s < n_; ++s) {
      out[as_size(s)] *=
          norm(head_.value(s), head_.value_dim()) / static_cast<float>(head_.group());
    }
    return true;
  }

 private:
  static constexpr float most_code = 127, most_logit = 2000, most_log_mass = 32,
                         log2e = std::numbers::log2e_v<float>;
  static constexpr index_t most_rows = 32, exact_slots = sizeof(coded_query::of_first) / 2;

  index_t position(index_t i) const { return queries_.position_of(i, head_.next_position()); }
  /// Query `i`, as it is or moved, into `row_`.
  void load(index_t g, index_t i, bool moved) {
    const Query* const query = queries_.at(g, i);
    detail::prefetch_row(query, queries_.row * std::ptrdiff_t{sizeof(Query)});
    to_floats(row<const Query>{query}, dim_, row_.data());
    if (moved) {
      const index_t to = moved_position(head_.next_position(), horizon_, i, queries_.count);
      turn_.by(1.0 * to - position(i));
      turn_(row_.data());
    }
  }
  /// `use(slot)` for every slot, with its key less `mean_` in `row_`.
  template <class Use>
  void each_key(Use use) {
    detail::each_tile_of_keys(head_, [&](index_t first, const detail::tile& keys) {
      for (index_t s = 0; s < keys.rows(); ++s) {
        row_ = keys.row(s).transpose().array() - mean_;
        use(first + s);
      }
    });
  }

  bool measure_ranges() {
    Eigen::ArrayXf of_keys = Eigen::ArrayXf::Zero(dim_), of_queries = of_keys;
    float longest_key = 0, longest_query = 0, mass = 0, all = 0;  // not finite if a number is not
    mean_ = of_keys;
    each_key([&](index_t) { of_keys += row_; });
    mean_ = of_keys / static_cast<float>(n_);
    of_keys.setZero();
    each_key([&](index_t s) {
      of_keys = of_keys.max(row_.abs());
      longest_key = std::max(longest_key, row_.matrix().norm());
      if (s < exact_slots) {
        first_keys_.col(s) = row_;
      }
      *bias_.at(s) = head_.log_mass(s) * log2e;
      most_bias_ = std::max(most_bias_, *bias_.at(s));
      mass = std::max(mass, std::abs(head_.log_mass(s))), all += head_.log_mass(s);
    });
    for (index_t i = 0; i < queries_.count; ++i) {
      for (index_t g = 0; g < head_.group(); ++g) {
        load(g, i, false);
        const float square = row_.matrix().squaredNorm();
        all += square, longest_query = std::max(longest_query, std::sqrt(square));
        of_queries = of_queries.max(row_.abs());
      }
    }
    const Eigen::ArrayXf range = (of_keys * of_queries).sqrt();
    width_ = range.maxCoeff();
    key_factor_ = (range > 0).select(range / of_keys, 0) * (most_code / width_);
    query_factor_ = (range > 0).select(range / of_queries, 0);
    all += mean_.sum() + key_factor_.sum() + query_factor_.sum();
    const float largest = head_.scale() * longest_key * longest_query;  // logit, at most
    unit_ = std::max(largest / 32000, 0x1p-10F);
    offset_ = std::max(0.0F, 32000 - mass / unit_);
    return std::isfinite(all) && width_ > 0 && largest < most_logit && mass < most_log_mass;
  }

  void round_keys() {
    each_key([&](index_t s) {
      row_ = (row_ * key_factor_ + 128.5F).floor();
      const std::ptrdiff_t panel = s / panel_slots, of_panel = s % panel_slots;
      std::uint8_t* const codes = keys_.at(panel * panel_slots * codes_ + of_panel * 4);
      for (index_t c = 0; c < dim_; ++c) {
        codes[c / 4 * panel_slots * 4 + c % 4] = static_cast<std::uint8_t>(row_[c]);
      }
    });
  }
  /// Of units; never `unseen`.
  static std::int16_t rounded(float x) {
    return static_cast<std::int16_t>(std::lrint(std::clamp(x, -32767.0F, 32767.0F)));
  }
  void round_query(index_t r) {
    coded_query& query = coded_[r];
    query.of_mean = head_.scale() * row_.matrix().dot(mean_.matrix());
    for (index_t s = 0; s < exact_slots; ++s) {
      const float dot = first_keys_.col(s).matrix().dot(row_.matrix());
      query.of_first[s] = rounded(head_.scale() * dot / unit_);
    }
    row_ *= query_factor_;
    const float largest = std::max(row_.abs().maxCoeff(), 1e-30F);
    query.unit = head_.scale() / unit_ * (width_ / most_code) * (largest / most_code);
    row_ = (row_ * (most_code / largest) + 0.5F).floor();
    std::int8_t* const codes = queries_coded_.at(std::ptrdiff_t{r} * codes_);
    query.start = static_cast<std::int32_t>(-128 * row_.sum());  // keys are held with 128 more
    std::transform(row_.begin(), row_.end(), codes,
                   [](float x) { return static_cast<std::int8_t>(x); });
  }

  /// A block's products with the first `slots` slots. `[rows, slots_]`
  void multiply(index_t g, index_t first, index_t rows, bool moved, index_t slots) {
    for (index_t r = 0; r < rows; ++r) {
      load(g, first + r, moved);
      round_query(r);
    }
    for (index_t s = 0; s < slots; s += panel_slots) {
      for (index_t r = 0; r < rows; r += tile_rows) {
        multiply_panel(keys_.at(std::ptrdiff_t{s} * codes_),
                       queries_coded_.at(std::ptrdiff_t{r} * codes_), codes_ / 4, &coded_[r],
                       products(r) + s, slots_);
      }
    }
    for (index_t r = 0; r < rows; ++r) {
      std::copy_n(coded_[r].of_first, std::min(exact_slots, slots), products(r));
    }
  }
  std::int16_t* products(index_t r) { return products_.at(std::ptrdiff_t{r} * slots_); }
  /// Of the first `slots` of row `r`.
  float log_sum(index_t r, index_t slots) {
    const index_t whole = (slots + panel_slots - 1) / panel_slots * panel_slots;
    std::fill(products(r) + slots, products(r) + whole, unseen);
    return log2_sum(products(r), bias_.at(0), most_bias_, whole, unit_ * log2e) / log2e +
           coded_[r].of_mean;
  }

  /// The log-sum-exp of what the block's queries saw where they stand.
  void take_own(index_t g, index_t first, index_t rows) {
    index_t latest = -1, earliest = std::numeric_limits<index_t>::max(), slots = n_, all = 0;
    for (index_t i = first; i < first + rows; ++i) {
      latest = std::max(latest, position(i)), earliest = std::min(earliest, position(i));
    }
    while (slots > 0 && head_.position(slots - 1) > latest) {
      --slots;
    }
    while (all < slots && head_.position(all) <= earliest) {
      ++all;
    }
    multiply(g, first, rows, false, slots);
    for (index_t r = 0; r < rows; ++r) {
      for (index_t s = all; s < slots; ++s) {
        if (head_.position(s) > position(first + r)) {
          products(r)[s] = unseen;
        }
      }
      softmax<> seen = terms_.sink(g);
      seen.merge({log_sum(r, slots), 1});
      log_sum_[as_size(first + r)] = seen.log_sum_exp();
    }
  }
  void take_block(index_t g, index_t first, index_t rows) {
    const bool known = queries_.log_sum_exp != nullptr;
    if (!known) {
      take_own(g, first, rows);
    }
    multiply(g, first, rows, true, n_);
    std::int16_t less[most_rows];
    for (index_t r = 0; r < rows; ++r) {
      float& z = log_sum_[as_size(first + r)];
      softmax<> both{log_sum(r, n_), 1};
      both.merge({known ? queries_.log_sum(g, first + r) : z, 1});
      z = both.log_sum_exp();
      const float units = (z - coded_[r].of_mean) / unit_ - offset_;
      fits_ = fits_ && std::abs(units) < 32767;  // a sink may be anywhere, and NaN nowhere
      less[r] = rounded(units);
    }
    take_largest(products(0), less, rows, first, slots_, best_.at(0), best_query_.at(0));
  }

  /// Adds the largest share of every slot.
  void add_shares(index_t g, std::span<float> out) {
    // The slots of query i: from[i], then next[that], until −1.
    std::vector<index_t> from(as_size(queries_.count), -1), next(as_size(n_));
    for (index_t s = n_; s-- > 0;) {
      next[as_size(s)] = std::exchange(from[as_size(*best_query_.at(s))], s);
    }
    std::vector<float> share(as_size(n_)), buffer(as_size(dim_));
    for (index_t i = 0; i < queries_.count; ++i) {
      if (from[as_size(i)] < 0) {
        continue;
      }
      load(g, i, true);
      float sum = 1;
      for (index_t s = from[as_size(i)]; s >= 0; s = next[as_size(s)]) {
        const auto key = detail::load_keys(head_, s, 1, buffer.data());
        const float dot = dot_floats(row_.data(), key.data(), dim_), mass = head_.log_mass(s);
        share[as_size(s)] = std::exp(head_.scale() * dot + mass - log_sum_[as_size(i)]);
        const float held = static_cast<float>(*best_.at(s)) - offset_;
        sum += share[as_size(s)] - std::exp(held * unit_ + mass);
      }
      for (index_t s = from[as_size(i)]; s >= 0; s = next[as_size(s)]) {
        out[as_size(s)] += std::min(share[as_size(s)] / std::max(sum, 1e-3F), 1.0F);
      }
    }
  }

  const head_ref& head_;
  const query_view<Query>& queries_;
  const index_t horizon_, n_ = head_.length(), dim_ = head_.dim(),
                          slots_ = (n_ + panel_slots - 1) / panel_slots * panel_slots,
                          codes_ = (dim_ + 3) / 4 * 4;
  // Whose products the second cache holds.
  const index_t rows_at_once_ = std::clamp(393216 / slots_, 8, most_rows) / tile_rows * tile_rows;
  const logit_terms terms_{head_};
  rotation turn_{head_.spec().rope, dim_};
  Eigen::ArrayXf row_{dim_}, mean_, key_factor_, query_factor_;
  Eigen::ArrayXXf first_keys_{dim_, exact_slots};  // less the mean
  float width_ = 0, unit_ = 0, most_bias_ = 0;     // of codes; of products, in logits
  float offset_ = 0;  // in units: logits are at most their log-sum-exp, but for log-mass
  bool fits_ = true;  // every query's log-sum-exp, in units
  aligned_array<std::uint8_t> keys_{as_size(slots_, codes_)};
  aligned_array<float> bias_{as_size(slots_)};  // log-mass, of base 2
  aligned_array<std::int8_t> queries_coded_{as_size(most_rows, codes_)};
  coded_query coded_[most_rows] = {};
  aligned_array<std::int16_t> products_{as_size(rows_at_once_, slots_)};
  aligned_array<std::int16_t> best_{as_size(slots_)};  // share, in units above −offset_
  aligned_array<index_t> best_query_{as_size(slots_)};
  std::vector<float> log_sum_ = std::vector<float>(as_size(queries_.count));  // of both passes
};

/// Has the processor that runs this the instructions of `KVMELD_VNNI_TARGET`?
inline bool runs_vnni() {
  static const bool has =
      __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
      __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
      __builtin_cpu_supports("avx512vnni") != 0;
  return has;
}
#endif

/// `lookahead_max` of 256 slots and more by at least 64 queries, by products of 8 bits. Returns
/// false, with anything in `out`, where that cannot be: on a processor without AVX-512 VNNI, for
/// logits with a soft cap, slopes or a window, for NaN and Inf, keys that are all alike, log-mass
/// beyond ± 32, where the longest key and query would make a logit above 2,000, and where a query's
/// log-sum-exp is far above all of its logits, as with a large sink.
template <class Query>
bool screened_max([[maybe_unused]] const head_ref& head,
                  [[maybe_unused]] const query_view<Query>& queries,
                  [[maybe_unused]] index_t horizon, [[maybe_unused]] std::span<float> out) {
#ifdef KVMELD_VNNI_TARGET
  const logit_terms terms(head);
  return runs_vnni() && head.length() >= 256 && queries.count >= 64 && !terms.caps() &&
         !terms.by_place() && screened_prompt<Query>(head, queries, horizon)(out);
#else
  return false;
#endif
}

}  // namespace KVMELD_INSTRUCTIONS
}  // namespace score
}  // namespace kvmeld::inline v0
