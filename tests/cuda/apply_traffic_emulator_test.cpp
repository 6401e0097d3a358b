// SPDX-License-Identifier: MIT
// What `apply` moves, as the emulator counts it, beside the least that there is to move, and how
// much of it is in flight at once. Ratios to the floor have no slack.
#include <catch2/catch.hpp>

#include "cuda/row_traffic.hpp"
#include "kvmeld/cuda/merge/apply.cuh"

namespace kvmeld::cuda {
namespace apply_traffic_emulator_test {

/// The first `staying` slots are rows as they are; of the rest every `keep`-th is kept, and moves.
/// `merged`: it takes in those before it. Blocks take 16 bytes of every row a lane.
template <index_t Lanes>
void check_apply(const cache_case& c, index_t staying, index_t keep, bool merged) {
  INFO("dim " << c.dim << ", one of " << keep << " kept, merged " << merged);
  device_cache<half> kv(c, {c.capacity}, 3, {slot_reduce::sum});
  device_buffer<index_t> rows(1), begin(static_cast<std::size_t>(c.capacity + 1));
  device_buffer<merge_source> sources(kv.slots());
  device_buffer<float> log_mass(kv.slots(), 0);
  index_t count = 0, last = 0;
  for (; count < staying; ++count) {
    begin[count] = last, sources[last++] = {count};
  }
  for (index_t s = staying + keep - 1; s < c.capacity; s += keep) {
    begin[count++] = last;
    for (index_t e = 0; e < (merged ? keep : 1); ++e) {
      sources[last++] = merged ? merge_source{s - e, 0.5F, 0.5F} : merge_source{s};
    }
  }
  begin[count] = last, rows[0] = count;
  const emulator::simultaneous_blocks at_once;  // they share rows, each its own columns
  row_traffic counted(kv);
  detail::apply_by<Lanes>({rows.data(), begin.data(), sources.data(), log_mass.data()}, kv.view(),
                          kv.state, order());
  REQUIRE(kv.length[0] == count);
  for (const auto plane : {row_traffic::keys, row_traffic::values}) {
    CHECK(counted.loaded(plane) / (last - staying) <= 1);
    CHECK(counted.stored(plane) / (count - staying) <= 1);
    CHECK(counted.sectors(plane) <= 1);
  }
  CHECK(counted.bank_conflicts == 0);
  // One a chunk of a block's rows, three before; and the numbers beside rows.
  const index_t blocks = 2 * ceiling(c.dim, 8 * Lanes), chunks = ceiling(count, 256 / Lanes);
  CHECK(counted.barriers <= blocks * (chunks + 3) + 3 * ceiling(count, 1024));
}

TEST_CASE("a plan's rows are read once and written once, and not at all where they stay") {
  check_apply<4>({.heads = 1, .capacity = 600, .dim = 128}, 100, 2, false);
  check_apply<4>({.heads = 1, .capacity = 600, .dim = 128}, 0, 3, true);
  check_apply<4>({.heads = 1, .capacity = 300, .dim = 64}, 30, 4, true);
  check_apply<16>({.heads = 1, .capacity = 600, .dim = 128}, 100, 2, false);
  check_apply<16>({.heads = 1, .capacity = 600, .dim = 128}, 0, 3, true);
  check_apply<16>({.heads = 1, .capacity = 300, .dim = 256}, 30, 4, true);
}

/// The last of `count` rows takes in all slots behind the others.
template <index_t Lanes>
void check_long_row(const cache_case& c, index_t count) {
  INFO("dim " << c.dim << ", " << c.capacity << " slots, " << count << " rows");
  device_cache<half> kv(c, {c.capacity}, 3, {slot_reduce::sum, slot_reduce::max});
  device_buffer<index_t> rows(std::vector{count}), begin(static_cast<std::size_t>(c.capacity + 1));
  device_buffer<merge_source> sources(kv.slots());
  device_buffer<float> log_mass(kv.slots(), 0);
  for (index_t s = 0; s < c.capacity; ++s) {
    sources[s] = s + 1 < count ? merge_source{s} : merge_source{s, 0.25F, 0.25F};
    begin[std::min(s, count - 1)] = s < count ? s : count - 1;
  }
  begin[count] = c.capacity;
  const emulator::simultaneous_blocks at_once;  // they share rows, each its own columns
  row_traffic counted(kv);
  detail::apply_by<Lanes>({rows.data(), begin.data(), sources.data(), log_mass.data()}, kv.view(),
                          kv.state, order());
  REQUIRE(kv.length[0] == count);
  const index_t members = c.capacity - (count - 1);
  for (const auto plane : {row_traffic::keys, row_traffic::values}) {
    CHECK(counted.loaded(plane) / members <= 1);
    CHECK(counted.stored(plane) <= 1);
    CHECK(counted.sectors(plane) <= 1);
  }
  CHECK(counted.bank_conflicts == 0);
  // 64 KiB of a block's are in flight, and it waits once for every four sources of its lanes.
  CHECK(counted.copies_at_once * 16 * 256 == std::size_t{64} << 10);
  const index_t chunks = ceiling(count, 256 / Lanes);
  CHECK(counted.waits <= static_cast<std::size_t>(ceiling(members, 4 * 256 / Lanes) + chunks + 2));
  // As of other rows, and two for the long row, of columns too, however many there are.
  const index_t blocks = 2 * ceiling(c.dim, 8 * Lanes);
  CHECK(counted.barriers <= blocks * (chunks + 3 + 2) + 3 * ceiling(count, 1024) + 2);
}

TEST_CASE("a row of very many sources has 64 KiB a block in flight") {
  check_long_row<4>({.heads = 1, .capacity = 1500, .dim = 128}, 200);
  check_long_row<16>({.heads = 1, .capacity = 700, .dim = 256}, 100);
}

}  // namespace apply_traffic_emulator_test
}  // namespace kvmeld::cuda
