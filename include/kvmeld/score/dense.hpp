// SPDX-License-Identifier: MIT
/// A head and its reference queries as dense matrices, and the full cache's attention on them: what
/// policies that fit a prompt start from.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::min
#include <cstddef>    // std::ptrdiff_t

#include "kvmeld/detail/product.hpp"
#include "kvmeld/memory/convert.hpp"
#include "kvmeld/memory/view.hpp"
#include "kvmeld/score/queries.hpp"
#include "kvmeld/score/softmax.hpp"

namespace kvmeld::inline v0 {
namespace dense {

/// Numbers that are computed side by side; their count is written out for nvcc, as `rotation` says.
using array = Eigen::Array<float, 64, 1>;
inline constexpr index_t array_size = array::SizeAtCompileTime;

using matrix = matrix_of<float>;
using vector = Eigen::VectorXf;

/// `[rows, dim]` of `row_of(i)`.
matrix rows_of(Eigen::Index rows, index_t dim, const auto& row_of) {
  matrix m(rows, dim);
  for (Eigen::Index i = 0; i < rows; ++i) {
    to_floats(row_of(static_cast<index_t>(i)), dim, &m(i, 0));
  }
  return m;
}

/// `[length, dim]`
matrix keys(const kv_head auto& head) {
  return rows_of(head.length(), head.dim(), [&](index_t s) { return head.key(s); });
}
/// `[length, value_dim]`
matrix values(const kv_head auto& head) {
  return rows_of(head.length(), head.value_dim(), [&](index_t s) { return head.value(s); });
}
/// `[length]`
vector log_mass(const kv_head auto& head) {
  return Eigen::Map<const vector>(head.metadata().log_mass, head.length());
}
/// Reference queries of one KV head, `[group · count, dim]`.
template <class T>
matrix queries(const query_view<T>& q, index_t group, index_t dim) {
  return rows_of(Eigen::Index{group} * q.count, dim,
                 [&](index_t i) { return row<const T>{q.at(i / q.count, i % q.count)}; });
}

/// `out [queries, slots]`: the logits with log-mass.
template <class Out>
void set_logits(const score::logit_terms& terms, const rowwise auto& queries,
                const rowwise auto& keys, const auto& log_mass, Out&& out) {
  if (terms.caps()) {
    set_product_transposed(terms.scale(), queries, keys, out);
    terms.cap_logits(out.array());
    out.rowwise() += log_mass.transpose();
  } else {
    out.rowwise() = log_mass.transpose();
    add_product_transposed(terms.scale(), queries, keys, out);
  }
}

/// The attention of reference queries over slots. They stand for future queries: each sees every
/// slot, whatever its own position.
struct attention {
  vector log_sum_exp;  ///< [queries] of the logits, a sink's among them
  matrix output;       ///< [queries, dim]
  vector mass;         ///< [slots] probabilities summed over the queries
};

/// Of `queries [group · n, dim]`, one query head's after another's, over `keys`, `values [slots,
/// dim]` and `log_mass [slots]`. ALiBi's place is a query's own: policies that fit are refused with
/// it.
template <rowwise Queries>
attention attend(const Queries& queries, const rowwise auto& keys, const rowwise auto& values,
                 const stored auto& log_mass, const score::logit_terms& terms) {
  using rows_by_slots = matrix_of<scalar_of<Queries>>;
  attention of{vector(queries.rows()), matrix(queries.rows(), values.cols()),
               vector::Zero(keys.rows())};
  vector_of<scalar_of<Queries>>&log_sum_exp = of.log_sum_exp, &mass = of.mass;
  rows_by_slots& output = of.output;
  // Some queries at a time, so that memory stays O(slots), over tiles of slots that stay in cache
  // from product to exp. A tile's exp are below its own largest logit, then brought together.
  constexpr Eigen::Index block = 128, tile = 512;
  const Eigen::Index slots = keys.rows(), tiles = (slots + tile - 1) / tile;
  rows_by_slots p(block, slots), share(block, tiles);
  std::vector<score::softmax<>> of_tile(as_size(tiles * block));
  const auto part_of = [&](Eigen::Index r, Eigen::Index t) -> score::softmax<>& {
    return of_tile[as_size(r * tiles + t)];
  };
  for (Eigen::Index begin = 0; begin < queries.rows(); begin += block) {
    const Eigen::Index rows = std::min(block, queries.rows() - begin);
    const auto each_tile = [&](auto see) {
      for (Eigen::Index t = 0; t < tiles; ++t) {
        const Eigen::Index width = std::min(tile, slots - t * tile);
        see(t, t * tile, width, p.block(0, t * tile, rows, width));
      }
    };
    each_tile([&](Eigen::Index t, Eigen::Index first, Eigen::Index width, auto part) {
      set_logits(terms, queries.middleRows(begin, rows), keys.middleRows(first, width),
                 log_mass.segment(first, width), part);
      for (Eigen::Index r = 0; r < rows; ++r) {
        auto logit = part.row(r);
        part_of(r, t) = {};
        part_of(r, t).take(logit.array());
      }
    });
    for (Eigen::Index r = 0; r < rows; ++r) {  // of exp to probabilities: what a tile's are times
      score::softmax<> all = terms.sink_of_row(begin + r, queries.rows());
      for (Eigen::Index t = 0; t < tiles; ++t) {
        all.merge(part_of(r, t));
      }
      for (Eigen::Index t = 0; t < tiles; ++t) {
        share(r, t) = part_of(r, t).below(all.max) / all.sum;
      }
      log_sum_exp[begin + r] = all.log_sum_exp();
    }
    output.middleRows(begin, rows).setZero();
    each_tile([&](Eigen::Index t, Eigen::Index first, Eigen::Index width, auto part) {
      part.array().colwise() *= share.col(t).head(rows).array();
      mass.segment(first, width) += part.colwise().sum().transpose();
      add_product(1, part, values.middleRows(first, width), output.middleRows(begin, rows));
    });
  }
  return of;
}

}  // namespace dense
}  // namespace kvmeld::inline v0
