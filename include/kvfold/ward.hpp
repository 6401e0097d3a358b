/// Which slots to fold into which: the cheapest by Ward's cost.
#pragma once

#include <algorithm>  // std::nth_element
#include <limits>     // std::numeric_limits

#include "kvfold/dense.hpp"
#include "kvfold/plan.hpp"

namespace kvfold {

/// Ward's cost of making one of two, `m_i m_j / (m_i + m_j) · ‖k_i − k_j‖²`, of every slot to its
/// cheapest partner among those for which `partner(i, j)`. `into [slots]` gets the partner (−1:
/// none), `cost [slots]` the cost. Ties to the lower slot. `keys [slots, dim]`, `mass [slots]`,
/// `square [slots]` the keys' squared norms.
template <class Partner>
void cheapest_partner(const Eigen::Ref<const dense::matrix>& keys,
                      const Eigen::Ref<const dense::vector>& mass,
                      const Eigen::Ref<const dense::vector>& square, Partner partner,
                      std::vector<index_t>& into, float* cost) {
  const auto n = static_cast<index_t>(keys.rows());
  constexpr index_t block = 32;
  float buffer[block * block];
  into.assign(static_cast<std::size_t>(n), -1);
  std::fill_n(cost, n, std::numeric_limits<float>::max());
  for (index_t i0 = 0; i0 < n; i0 += block) {
    const index_t rows = std::min(block, n - i0);
    for (index_t j0 = 0; j0 < n; j0 += block) {
      const index_t columns = std::min(block, n - j0);
      Eigen::Map<dense::matrix> dot(buffer, rows, columns);
      dot.noalias() = keys.middleRows(i0, rows) * keys.middleRows(j0, columns).transpose();
      for (index_t i = i0; i < i0 + rows; ++i) {
        for (index_t j = j0; j < j0 + columns; ++j) {
          if (i == j || !partner(i, j)) {
            continue;
          }
          const float apart = std::max(square[i] + square[j] - 2 * dot(i - i0, j - j0), 0.0F);
          const float ward = mass[i] * mass[j] / (mass[i] + mass[j]) * apart;
          index_t& to = into[static_cast<std::size_t>(i)];
          if (to < 0 || ward < cost[i]) {
            to = j, cost[i] = ward;
          }
        }
      }
    }
  }
}

}  // namespace kvfold
