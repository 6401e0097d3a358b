// SPDX-License-Identifier: MIT
/// Which slots to fold into which: the cheapest by Ward's cost.
#pragma once

#include <algorithm>  // std::copy_n
#include <limits>     // std::numeric_limits
#include <span>

#include "kvmeld/detail/product.hpp"
#include "kvmeld/memory/convert.hpp"
#include "kvmeld/score/dense.hpp"

namespace kvmeld::inline v0 {
namespace search {

/// Slots taken out of a head, in an order of choice, so that their products are one matrix product.
/// Aligned and padded to whole blocks: what is computed of two slots does not depend on where they
/// stand.
struct ward_slots {
  static constexpr index_t block = dense::array_size;  ///< padded to

  Eigen::Map<dense::matrix> keys;          ///< [slots, dim]
  Eigen::Map<dense::vector> mass, square;  ///< [slots], square: of the keys' norms
  std::span<const index_t> slot;           ///< [slots] where they are in the head

  /// What `n` slots take of the scratch.
  static std::size_t floats(index_t n, index_t dim) {
    return as_size(n) * (as_size(dim) + 2) + 2 * std::size_t{block};
  }

  /// Room in `scratch` for `slots`, and their keys. `mass_of(s)`.
  template <class MassOf>
  ward_slots(const kv_head auto& head, std::span<const index_t> slots, MassOf mass_of,
             detail::arena& scratch)
      : keys(scratch.rows(static_cast<index_t>(slots.size()), head.dim())),
        mass(scratch.column((static_cast<index_t>(slots.size()) + block - 1) / block * block)),
        square(scratch.column(static_cast<index_t>(mass.size()))),
        slot(slots) {
    mass.setOnes(), square.setZero();  // the padding too: any finite number
    for (Eigen::Index i = 0; i < keys.rows(); ++i) {
      const index_t s = slots[as_size(i)];
      to_floats(head.key(s), head.dim(), &keys(i, 0));
      mass[i] = mass_of(s);
      square[i] = keys.row(i).squaredNorm();
    }
  }
};

/// A partner and the cost of joining it.
struct ward_partner {
  static constexpr float no_cost = std::numeric_limits<float>::max();  ///< NaN ranks here too

  index_t slot = -1;     ///< -1: none
  float cost = no_cost;  ///< of joining it
};

/// Ward's cost of making one of two, `m_i m_j / (m_i + m_j) · ‖k_i − k_j‖²`. Calls
/// `found(i, partner)` for every `from` slot with the cheapest of the first `limit(i)` slots of
/// `to` (which may be `from` itself: no slot is its own partner); ties to the lower slot. `limit`
/// must not fall with `i`.
template <class Limit, class Found>
void cheapest_partners(const ward_slots& from, const ward_slots& to, Limit limit, Found found) {
  constexpr index_t block = ward_slots::block, rows_at_once = 32;
  alignas(detail::vector_bytes) float products[rows_at_once * block];
  const auto n = static_cast<index_t>(from.slot.size());
  for (index_t i0 = 0; i0 < n; i0 += rows_at_once) {
    const index_t rows = std::min(rows_at_once, n - i0), columns = limit(i0 + rows - 1);
    ward_partner best[rows_at_once];
    for (index_t j0 = 0; j0 < columns; j0 += block) {
      const index_t width = std::min(block, columns - j0);
      Eigen::Map<dense::matrix, 0, Eigen::OuterStride<>> dot(products, rows, width,
                                                             Eigen::OuterStride<>(block));
      dense::set_product_transposed(1, from.keys.middleRows(i0, rows),
                                    to.keys.middleRows(j0, width), dot);
      const float *const mass = to.mass.data() + j0, *const square = to.square.data() + j0;
      for (index_t r = 0; r < rows; ++r) {
        const index_t i = i0 + r, visible = std::min(limit(i) - j0, width);
        if (visible <= 0) {
          continue;
        }
        const float m = from.mass[i];
        const float* const product = products + std::ptrdiff_t{r} * block;
        dense::array cost;
        for (index_t j = 0; j < block; ++j) {
          const float apart = square[j] + from.square[i] - 2 * product[j];
          const float ward = m * mass[j] / (m + mass[j]) * (apart < 0 ? 0.0F : apart);
          cost[j] = ward < ward_partner::no_cost ? ward : ward_partner::no_cost;  // NaN: no cost
        }
        std::fill(cost.data() + visible, cost.data() + block, ward_partner::no_cost);
        const index_t self = &from == &to ? i - j0 : -1;
        if (self >= 0 && self < visible) {
          cost[self] = ward_partner::no_cost;
        }
        const float least = cost.minCoeff();
        if (least > best[r].cost) {
          continue;
        }
        for (index_t j = 0; j < visible; ++j) {  // rare: which slot is it?
          const index_t slot = to.slot[as_size(j0 + j)];
          if (cost[j] == least && j != self &&
              (best[r].slot < 0 || least < best[r].cost || slot < best[r].slot)) {
            best[r] = {slot, least};
          }
        }
      }
    }
    for (index_t r = 0; r < rows; ++r) {
      found(i0 + r, best[r]);
    }
  }
}

}  // namespace search
}  // namespace kvmeld::inline v0
