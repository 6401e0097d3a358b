// SPDX-License-Identifier: MIT
// How often a step that merges the evicted slot into its nearest reads keys: once where attention
// has compared it on its way, twice where the prediction fails.
#include <catch2/catch.hpp>
#include <numeric>

#include "cuda/one_step.hpp"
#include "cuda/row_traffic.hpp"
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/keepkv.cuh"

namespace kvmeld::cuda {
namespace parity_nearest_emulator_test {

/// `right` of the heads' predictions are right.
template <class Policy>
void check_keys(const Policy& p, const cache_case& c, const std::vector<index_t>& held,
                index_t right) {
  INFO(p.name() << ", dim " << c.dim << ", group " << c.group << ", right " << right);
  one_step<half, Policy> x(p, c, held, true, 3);
  for (index_t h = 0; h < c.heads; ++h) {
    x.lower(h, 10), x.predict(h, {20, 21, 22, 23, 24, 25, 26, h < right ? 10 : 27});
  }
  const double slots = std::accumulate(held.begin(), held.end(), 0.0);
  const double splits = detail::splits_of(c.heads, c.capacity), blocks = c.heads * splits;
  const index_t warps = c.dim > 128 ? 2 : 4, searches = ceiling(c.capacity, 256);
  row_traffic counted(x.kv, &x.q);
  x.run();
  // Each block has the predicted rows; the evicted one and the step's own token are compared apart.
  double keys = slots + blocks * compared_rows + right * 16 * 2;
  double tiles = 0, again = 0, mmas = 0;
  for (index_t h = 0; h < c.heads; ++h) {
    const index_t n = held[static_cast<std::size_t>(h)];
    CHECK(x.evicted(h) == 10);
    tiles += ceiling(n, 16), again += h < right ? 0 : ceiling(n, 16);
    keys += h < right ? 0 : n + searches + warps * 2;
    mmas += h < right ? 0 : searches * warps;  // the evicted row's length
  }
  CHECK(counted.loaded(row_traffic::keys) / keys <= 1);
  CHECK(counted.loaded(row_traffic::values) / slots <= 1);
  CHECK(counted.sectors(row_traffic::keys) <= 1);
  CHECK(counted.sectors(row_traffic::values) <= 1);
  CHECK(counted.bank_conflicts == 0);
  CHECK(counted.launches == (in_one_launch(c) ? 2 : 3));
  // 16 slots at once: K in one product and V in two for 8 query heads, three to compare.
  const index_t eights = ceiling(c.group, 8);
  mmas += (3 * eights + 3) * tiles + 3 * again + blocks * warps;
  CHECK(static_cast<double>(counted.mmas) / (mmas * (c.dim / 16)) <= 1);
  // Attention meets three times a block, the second launch of a head three times and once more for
  // what it predicts, a removal three times, and a search three times a block; where several share
  // a head, twice more each for the ticket, and the last twice for them all.
  const index_t wrong = c.heads - right;
  const index_t shared = searches > 1 ? 2 * searches + 2 : 0;
  const index_t between = in_one_launch(c) ? 1 : 0;
  const double barriers =
      3 * blocks + c.heads * (4 + 3 + between) + wrong * (3 * searches + shared);
  CHECK(static_cast<double>(counted.barriers) / barriers <= 1);
}

TEST_CASE("a step reads keys once where its prediction holds, and twice where it fails") {
  for (index_t right = 0; right <= 2; ++right) {
    check_keys(d2o{}, {.heads = 2, .capacity = 1024, .dim = 128, .group = 4}, {1023, 700}, right);
    check_keys(keepkv{.similarity = -1}, {.heads = 2, .capacity = 255, .dim = 64, .group = 8},
               {200, 254}, right);
    check_keys(d2o{}, {.heads = 2, .capacity = 255, .dim = 256, .group = 16}, {254, 100}, right);
  }
}

}  // namespace parity_nearest_emulator_test
}  // namespace kvmeld::cuda
