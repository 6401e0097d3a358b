// SPDX-License-Identifier: MIT
#include "products.hpp"

namespace bench {

void two_products(const float* q, const float* k, const float* v, Eigen::VectorXf& logits,
                  Eigen::VectorXf& out) {
  using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::Index slots = logits.size(), dim = out.size();
  logits.noalias() =
      Eigen::Map<const matrix>(k, slots, dim) * Eigen::Map<const Eigen::VectorXf>(q, dim);
  out.noalias() = Eigen::Map<const matrix>(v, slots, dim).transpose() * logits;
}

}  // namespace bench
