// SPDX-License-Identifier: MIT
// What EMS moves after a prompt, as the emulator counts it, beside the least that there is to move.
#include <catch2/catch.hpp>
#include <numeric>

#include "cuda/row_traffic.hpp"
#include "kvmeld/cuda/policies/ems/plans.cuh"

namespace kvmeld::cuda {
namespace ems_traffic_emulator_test {

template <index_t Dim>
void check_match(const cache_case& c, index_t removed, index_t kept) {
  INFO("dim " << c.dim << ", " << removed << " removed, " << kept << " centres");
  using kernel = detail::redundant_tiles<half, Dim>;
  device_cache<half> kv(c, {c.capacity}, 3);
  std::vector<index_t> slots(kv.slots());
  std::iota(slots.begin(), slots.end(), 0);
  device_buffer<index_t> rows(1, 0), stay(slots), away(slots), into(kv.slots()),
      nearest(kv.slots()), stays(std::vector{kept}), aways(std::vector{removed});
  device_buffer<float> similarity(kv.slots()), by_slot(kv.slots()),
      length(std::vector<float>(kv.slots(), 1.0F));
  detail::entry_scratch entries{};
  entries.key_length = entries.value_length = length.data();
  const row_traffic counted(kv);
  launch(kernel{kv.view(),
                kv.view().keys,
                kv.view().values,
                entries,
                {rows.data(),
                 stay.data(),
                 away.data(),
                 stays.data(),
                 aways.data(),
                 into.data(),
                 {nearest.data(), similarity.data()},
                 by_slot.data()},
                true},
         {1, static_cast<unsigned>(ceiling(c.capacity, kernel::rows))}, order());
  const index_t blocks = ceiling(removed, kernel::rows), columns = 128 * 128 / kernel::rows;
  const index_t tiles = ceiling(kept, columns), deep = kernel::rows / 2;
  for (const auto plane : {row_traffic::keys, row_traffic::values}) {
    CHECK(counted.loaded(plane) / (removed + blocks * kept) <= 1);
    CHECK(counted.sectors(plane) <= 1);
  }
  CHECK(counted.bank_conflicts == 0);
  const index_t padded = ceiling(c.dim, deep) * deep;
  CHECK(static_cast<double>(counted.mmas) / (2 * blocks * tiles * 8 * padded) <= 1);
  CHECK(counted.barriers <= blocks * (2 * tiles * ceiling(c.dim, deep) + 2));  // one a part
}

TEST_CASE("centres of entries are found with their rows read once for a tile of removed ones") {
  check_match<128>({.heads = 1, .capacity = 500, .dim = 128}, 300, 150);
  check_match<128>({.heads = 1, .capacity = 300, .dim = 64}, 100, 200);
  check_match<256>({.heads = 1, .capacity = 400, .dim = 160}, 100, 300);
}

/// Of tokens that all stand alone; what `column_scores` reads, and K once more for its lengths.
TEST_CASE("EMS reads of a first prompt what column sums read, and K once") {
  const cache_case c{.heads = 1, .capacity = 300, .dim = 64, .group = 2};
  const ems_rule rule{};
  device_cache<half> kv(c, {c.capacity}, 3, std::vector(5, slot_reduce::anchor),
                        static_cast<index_t>(rule.memory(c.dim, c.group, c.capacity)));
  for (index_t s = 0; s < c.capacity; ++s) {
    kv.column(detail::entry_table::norm, 0, s) = -1, kv.column(detail::entry_table::next, 0, s) = 0;
  }
  const index_t count = c.capacity;
  device_buffer<half> q(static_cast<std::size_t>(c.group * count * c.dim), 0);
  const query_rows<half> queries{q.data(), count, std::ptrdiff_t{c.group} * count * c.dim,
                                 std::ptrdiff_t{count} * c.dim, c.dim};
  device_buffer<float> sums(kv.slots()), last(kv.slots());
  device_buffer<unsigned char> memory(
      column_scores_workspace_bytes(c.heads, c.group, count, c.capacity));
  detail::prompt_memory<ems_rule> work{};
  work.sums = sums.data(), work.last = last.data();
  workspace_allocator from({memory.data(), memory.size()});
  work.measure.allocate(from, c.heads, c.group, count, c.capacity);
  double keys = 0;
  std::int64_t mmas = 0;
  {
    const row_traffic counted(kv);
    column_scores(kv.view(), queries, {.window = rule.window},
                  {.total = work.sums, .window = work.last}, {memory.data(), memory.size()},
                  order());
    keys = counted.loaded(row_traffic::keys), mmas = counted.mmas;
  }
  const row_traffic counted(kv);
  detail::observe_tokens(rule, kv.view(), kv.state, queries, work, order());
  CHECK(counted.loaded(row_traffic::keys) <= keys + c.capacity);
  CHECK(counted.loaded(row_traffic::values) == 0);
  CHECK(counted.mmas <= mmas);
}

}  // namespace ems_traffic_emulator_test
}  // namespace kvmeld::cuda
