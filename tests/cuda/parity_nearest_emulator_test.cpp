// SPDX-License-Identifier: MIT
// What a step moves that merges one evicted slot into its nearest, as the emulator counts it.
#include <catch2/catch.hpp>
#include <numeric>

#include "cuda/one_step.hpp"
#include "cuda/row_traffic.hpp"
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/keepkv.cuh"

namespace kvmeld::cuda {
namespace parity_nearest_emulator_test {

template <class Policy>
void check_rows(const Policy& p, const cache_case& c, const std::vector<index_t>& held) {
  INFO(p.name() << ", dim " << c.dim << ", group " << c.group);
  one_step<half, Policy> x(p, c, held, true, 3);
  for (index_t h = 0; h < c.heads; ++h) {
    x.lower(h, 10);
  }
  const double slots = std::accumulate(held.begin(), held.end(), 0.0);
  const row_traffic counted(x.kv, &x.q);
  x.run();
  for (index_t h = 0; h < c.heads; ++h) {
    CHECK(x.evicted(h) == 10);
  }
  // Attention, lengths and the search read keys once each, and the evicted one for the search; what
  // is carried out reads two that become one, and the last. The last and the new one are written.
  CHECK(counted.loaded(row_traffic::keys) <= 3 * slots + c.heads * (2 + 1 + 3));
  CHECK(counted.loaded(row_traffic::values) <= slots + c.heads * 3);
  CHECK(counted.stored(row_traffic::keys) <= c.heads * 3);
  CHECK(counted.stored(row_traffic::values) <= c.heads * 3);
  CHECK(counted.sectors(row_traffic::keys) <= 1);
  CHECK(counted.sectors(row_traffic::values) <= 1);
}

TEST_CASE("a step that merges one slot moves three rows") {
  check_rows(d2o{}, {.heads = 2, .capacity = 1024, .dim = 128, .group = 4}, {1023, 700});
  check_rows(keepkv{.similarity = -1}, {.heads = 2, .capacity = 255, .dim = 64, .group = 8},
             {200, 254});
  check_rows(d2o{}, {.heads = 2, .capacity = 255, .dim = 256, .group = 16}, {254, 100});
}

}  // namespace parity_nearest_emulator_test
}  // namespace kvmeld::cuda
