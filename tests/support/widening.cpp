// SPDX-License-Identifier: MIT
// Compiled for several instruction sets: KVMELD_SET names this one.
#include "support/widening.hpp"

#include "kvmeld/memory/convert.hpp"
#include "support/codes.hpp"

namespace widening {

template <>
address of<KVMELD_SET>() {
  return reinterpret_cast<address>(
      static_cast<void (*)(kvmeld::row<const Eigen::half>, kvmeld::index_t, float*)>(
          &kvmeld::to_floats<const Eigen::half>));
}

template <>
bool codes_as_one_by_one<KVMELD_SET>() {
  bool all = true;
  for (const kvmeld::index_t dim : {5, 80, 161}) {
    for (const kvmeld::index_t queries : {1, 2, 4, 7}) {
      all = all && codes_scene<kvmeld::q8_0>(dim, queries, 61).as_one_by_one() &&
            codes_scene<kvmeld::q6_0>(dim, queries, 61).as_one_by_one() &&
            codes_scene<kvmeld::q4_0>(dim, queries, 61).as_one_by_one();
    }
  }
  return all;
}

}  // namespace widening
