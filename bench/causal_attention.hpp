// SPDX-License-Identifier: MIT
/// What a prompt costs without any policy: exact causal attention, blocked, as a good engine on
/// Eigen would do it.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <vector>

#include "kvmeld/memory/view.hpp"
#include "versus.hpp"

namespace bench {

using kvmeld::index_t;
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using rows_in_place = Eigen::Map<const matrix, 0, Eigen::OuterStride<>>;

/// One KV head's attention by online softmax over tiles of keys (Milakov and Gimelshein 2018), all
/// query heads of the group in one product. 256 queries × 256 keys were the fastest of the sizes
/// tried: the logits stay in the second-level cache.
class causal_attention {
 public:
  causal_attention(index_t group, index_t dim)
      : group_(group),
        dim_(dim),
        tokens_a_block_(std::max(index_t{1}, 256 / group)),
        queries_(rows(), dim),
        logits_(rows(), keys_a_tile),
        top_(rows()),
        sum_(rows()) {}

  /// `q`, `out` `[tokens, heads · group, dim]` from this head's first number on, with `stride`
  /// floats between tokens; `k`, `v` `[tokens, dim]`.
  void operator()(const float* q, std::ptrdiff_t stride, const rows_in_place& k,
                  const rows_in_place& v, float* out) {
    const auto tokens = static_cast<index_t>(k.rows());
    const float scale = 1 / std::sqrt(static_cast<float>(dim_));
    for (index_t begin = 0; begin < tokens; begin += tokens_a_block_) {
      const index_t count = std::min(tokens_a_block_, tokens - begin), rows = count * group_;
      for (index_t i = 0; i < count; ++i) {
        queries_.middleRows(i * group_, group_) = of_token(q, begin + i, stride) * scale;
      }
      result_.setZero(rows, dim_);
      top_.setConstant(-std::numeric_limits<float>::infinity());
      sum_.setZero();
      for (index_t first = 0; first < begin + count; first += keys_a_tile) {
        const index_t width = std::min(keys_a_tile, begin + count - first);
        auto p = logits_.topLeftCorner(rows, width);
        p.noalias() = queries_.topRows(rows) * k.middleRows(first, width).transpose();
        for (index_t r = 0; r < rows; ++r) {
          exponentiate(r, std::clamp(begin + r / group_ + 1 - first, index_t{0}, width), width);
        }
        result_.noalias() += p * v.middleRows(first, width);
      }
      for (index_t i = 0; i < count; ++i) {
        Eigen::Map<matrix>(out + (begin + i) * stride, group_, dim_) =
            sum_.segment(i * group_, group_).cwiseInverse().asDiagonal() *
            result_.middleRows(i * group_, group_);
      }
    }
  }

  /// The two products alone, in the same blocks: what no softmax can go below.
  void products(const float* q, std::ptrdiff_t stride, const rows_in_place& k,
                const rows_in_place& v) {
    const auto tokens = static_cast<index_t>(k.rows());
    for (index_t begin = 0; begin < tokens; begin += tokens_a_block_) {
      const index_t count = std::min(tokens_a_block_, tokens - begin), rows = count * group_;
      for (index_t i = 0; i < count; ++i) {
        queries_.middleRows(i * group_, group_) = of_token(q, begin + i, stride);
      }
      result_.setZero(rows, dim_);
      for (index_t first = 0; first < begin + count; first += keys_a_tile) {
        const index_t width = std::min(keys_a_tile, begin + count - first);
        auto p = logits_.topLeftCorner(rows, width);
        p.noalias() = queries_.topRows(rows) * k.middleRows(first, width).transpose();
        result_.noalias() += p * v.middleRows(first, width);
      }
      benchmark::DoNotOptimize(result_.data());
    }
  }

 private:
  static constexpr index_t keys_a_tile = 256;

  index_t rows() const { return tokens_a_block_ * group_; }
  Eigen::Map<const matrix> of_token(const float* q, index_t i, std::ptrdiff_t stride) const {
    return {q + i * stride, group_, dim_};
  }

  /// Row `r`'s logits of a tile, of which `visible` are not in the future, become its weights.
  void exponentiate(index_t r, index_t visible, index_t width) {
    if (visible > 0) {
      auto row = logits_.row(r).head(visible).array();
      const float top = std::max(top_[r], row.maxCoeff()), rescale = std::exp(top_[r] - top);
      row = (row - top).exp();
      sum_[r] = sum_[r] * rescale + row.sum();
      if (rescale != 1) {
        result_.row(r) *= rescale;
      }
      top_[r] = top;
    }
    logits_.row(r).segment(visible, width - visible).setZero();
  }

  index_t group_, dim_, tokens_a_block_;
  matrix queries_, logits_, result_;
  Eigen::VectorXf top_, sum_;
};

/// Throws unless the blocked attention is that of three loops: a wrong baseline would make every
/// ratio meaningless.
inline void check_causal_attention() {
  constexpr index_t tokens = 301, group = 3, dim = 20;  // several tiles and blocks, none full
  const auto q = gaussian(tokens * group * dim, 1), k = gaussian(tokens * dim, 2),
             v = gaussian(tokens * dim, 3);
  std::vector<float> out(q.size());
  const Eigen::OuterStride<> rows(dim);
  causal_attention(group, dim)(q.data(), group * dim, {k.data(), tokens, dim, rows},
                               {v.data(), tokens, dim, rows}, out.data());
  const auto at = [](const std::vector<float>& x, index_t row, index_t i) {
    return double{x[static_cast<std::size_t>(row * dim + i)]};
  };
  for (index_t r = 0; r < tokens * group; ++r) {
    std::vector<double> sum(dim);
    double mass = 0;
    for (index_t t = 0; t <= r / group; ++t) {
      double logit = 0;
      for (index_t i = 0; i < dim; ++i) {
        logit += at(q, r, i) * at(k, t, i) / std::sqrt(double{dim});
      }
      mass += std::exp(logit);
      for (index_t i = 0; i < dim; ++i) {
        sum[static_cast<std::size_t>(i)] += std::exp(logit) * at(v, t, i);
      }
    }
    for (index_t i = 0; i < dim; ++i) {
      const double wanted = sum[static_cast<std::size_t>(i)] / mass, error = at(out, r, i) - wanted;
      if (!(std::abs(error) < 1e-5)) {
        throw std::logic_error("causal_attention differs from three loops");
      }
    }
  }
}

}  // namespace bench
