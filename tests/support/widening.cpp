// SPDX-License-Identifier: MIT
// Compiled for several instruction sets: KVMELD_SET names this one.
#include "support/widening.hpp"

#include "kvmeld/memory/convert.hpp"

namespace widening {

template <>
address of<KVMELD_SET>() {
  return reinterpret_cast<address>(
      static_cast<void (*)(kvmeld::row<const Eigen::half>, kvmeld::index_t, float*)>(
          &kvmeld::to_floats<const Eigen::half>));
}

}  // namespace widening
