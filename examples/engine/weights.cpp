// SPDX-License-Identifier: MIT
#include "engine/weights.hpp"

#include <algorithm>  // std::max

namespace engine {

void linear::operator()(const row_major_matrix& x, row_major_matrix& y) const {
  y.resize(x.rows(), weight.rows());
  if (x.rows() < 16) {
    // So few tokens do not pay for the packing of a product. The weights are read from memory once,
    // 128 KiB at a time, and from the cache for every token.
    const Eigen::Index block = std::max<Eigen::Index>(8, (1 << 15) / weight.cols());
    for (Eigen::Index first = 0; first < weight.rows(); first += block) {
      const Eigen::Index rows = std::min(block, weight.rows() - first);
      for (Eigen::Index t = 0; t < x.rows(); ++t) {
        y.row(t).segment(first, rows).transpose().noalias() =
            weight.middleRows(first, rows) * x.row(t).transpose();
      }
    }
  } else {
    y.noalias() = x * weight.transpose();
  }
  if (bias.size() > 0) {
    y.rowwise() += bias;
  }
}

}  // namespace engine
