// SPDX-License-Identifier: MIT
/// The two products that attention cannot do without, apart from what a step is counted in: a
/// compiler inlines less where a file has more code, and the measure would change with the
/// measured.
#pragma once

#include <Eigen/Core>

namespace bench {

/// `out [dim]` of one query `q [dim]` over `k` and `v [slots, dim]`, `logits [slots]` between them.
void two_products(const float* q, const float* k, const float* v, Eigen::VectorXf& logits,
                  Eigen::VectorXf& out);

}  // namespace bench
