// SPDX-License-Identifier: MIT
/// D2O's threshold, for host and device.
#pragma once

#include "kvmeld/config.hpp"

namespace kvmeld {
inline namespace v0 {
namespace detail {

/// D2O, eq. 10: `τ_t = β m_t + (1 − β) τ_{t−1}`; the first `m_t` is the first τ. `multiply_add` is
/// the host's or the device's.
template <class MultiplyAdd>
KVMELD_HD float d2o_threshold(float beta, float m, bool has_last, float last,
                              MultiplyAdd multiply_add) {
  return has_last ? multiply_add(beta, m, (1 - beta) * last) : m;
}

}  // namespace detail
}  // namespace v0
}  // namespace kvmeld
