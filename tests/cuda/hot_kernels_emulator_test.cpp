// SPDX-License-Identifier: MIT
// What the hot kernels move, as the emulator counts it, beside the least that there is to move:
// rows are read no more often than they have to be, sectors are used whole, banks do not conflict.
// Ratios to the floor have no slack: a bound that is passed is a slower kernel.
#include <catch2/catch.hpp>
#include <numeric>

#include "cuda/row_traffic.hpp"
#include "kvmeld/cuda/attend.cuh"
#include "kvmeld/cuda/policies/evicting_rules.cuh"
#include "kvmeld/cuda/policies/keepkv/join_leaders.cuh"
#include "kvmeld/cuda/score/column_scores.cuh"
#include "kvmeld/cuda/search/select.cuh"
#include "kvmeld/cuda/workspace.cuh"

namespace kvmeld::cuda {
namespace hot_kernels_emulator_test {

/// Of `count` queries a query head.
std::size_t query_elements(const cache_case& c, index_t count) {
  return static_cast<std::size_t>(c.heads * c.group * count * c.dim);
}

void check_attend(const cache_case& c, const std::vector<index_t>& lengths) {
  INFO("dim " << c.dim << ", group " << c.group << ", capacity " << c.capacity);
  device_cache<half> kv(c, lengths, 3, {slot_reduce::sum});
  device_buffer<half> q(query_elements(c, 1), 0), out(q.size());
  device_buffer<unsigned char> memory(workspace_bytes(kv.view()));
  row_traffic counted(kv, &q);
  attend_observe(sum_rule{}, kv.view(), kv.state, q.data(), out.data(), nullptr,
                 {memory.data(), memory.size()}, order());
  const double slots = std::accumulate(lengths.begin(), lengths.end(), 0.0);
  for (const auto plane : {row_traffic::keys, row_traffic::values}) {
    CHECK(counted.loaded(plane) / slots <= 1);  // for the whole group
    CHECK(counted.stored(plane) == 0);
    CHECK(counted.sectors(plane) <= 1);
  }
  // Each of a block's four warps holds the queries.
  const double splits = detail::splits_of(c.heads, c.capacity), blocks = c.heads * splits;
  CHECK(counted.loaded(row_traffic::queries) / (blocks * 4 * c.group) <= 1);
  // Logits and, of several splits, their outputs are written and read back once.
  const double between = 4 * c.group * (slots + (splits > 1 ? blocks * c.dim : 0));
  CHECK(static_cast<double>(counted.others().stored.bytes) / between <= 1);
  CHECK(static_cast<double>(counted.others().loaded.bytes) / between <= 1);
  CHECK(counted.bank_conflicts == 0);
  // 16 slots at once, K in one product and V in two, for up to 8 query heads.
  double tiles = 0;
  for (const index_t n : lengths) {
    tiles += ceiling(n, 16);
  }
  CHECK(static_cast<double>(counted.mmas) / (3 * tiles * (c.dim / 16)) <= 1);
  // Warps meet when a block has attended to all its slots; observing meets three times, and before
  // that where it is the same launch.
  const bool whole = in_one_launch(c);
  CHECK(static_cast<double>(counted.barriers) / (2 * blocks + (whole ? 4 : 3) * c.heads) <= 1);
  CHECK(counted.launches == (whole ? 1 : 2));
}

TEST_CASE("attention reads K and V once, sectors whole, without bank conflicts") {
  check_attend({.heads = 2, .capacity = 1024, .dim = 128, .group = 4}, {1024, 700});
  check_attend({.heads = 3, .capacity = 255, .dim = 64, .group = 8}, {255, 33, 250});
}

/// `most_products`: at most so many times those that the mask leaves.
void check_column_sums(const cache_case& c, index_t count, double most_products = 1.25) {
  INFO("dim " << c.dim << ", group " << c.group << ", queries " << count);
  device_cache<half> kv(c, std::vector<index_t>(static_cast<std::size_t>(c.heads), c.capacity), 3);
  device_buffer<half> q(query_elements(c, count), 0);
  const query_rows<half> rows{q.data(), count, std::ptrdiff_t{c.group} * count * c.dim,
                              std::ptrdiff_t{count} * c.dim, c.dim};
  device_buffer<float> total(kv.slots());
  device_buffer<unsigned char> memory(
      column_scores_workspace_bytes(c.heads, c.group, count, c.capacity));
  const emulator::simultaneous_blocks at_once;
  row_traffic counted(kv, &q);
  column_scores(kv.view(), rows, {}, {.total = total.data()}, {memory.data(), memory.size()},
                order());
  // 256 rows against tiles of 128 columns, as far as any of the rows sees them; each part of the
  // columns holds all rows. Query i sees slots up to capacity - count + i.
  const detail::grouped_queries line{count, c.group};
  const auto sees = [&](index_t end) {  // what the queries before place `end` see
    return c.capacity - count + std::min(count, 16 * ceiling(end, 16 * c.group));
  };
  const index_t slot_parts = detail::column_parts(c.heads, line.size(), c.capacity);
  const index_t query_parts = detail::column_parts(c.heads, c.capacity, line.size());
  double keys = 0, queries = 0, products = 0, tiles = 0;
  for (index_t r = 0; r < line.size(); r += 128) {
    tiles += ceiling(sees(r + 128), 256) + (r % 256 == 0 ? ceiling(sees(r + 256), 128) : 0);
  }
  for (index_t r = 0; r < line.size(); r += 256) {
    keys += std::min(c.capacity, 128 * ceiling(sees(r + 256), 128));
  }
  for (index_t r = 0; r < line.size(); ++r) {
    const auto place = line.at(r);
    queries += place.i < count ? ceiling(sees(r / 128 * 128 + 128), 256) : 0;
    products += place.i < count ? c.capacity - count + place.i + 1 : 0;
  }
  keys += c.capacity * query_parts, queries += c.group * count * slot_parts;
  CHECK(counted.loaded(row_traffic::keys) / (c.heads * keys) <= 1);
  CHECK(counted.loaded(row_traffic::queries) / (c.heads * queries) <= 1);
  // Of what the mask leaves; a warp multiplies 32 rows by 64 columns.
  CHECK(static_cast<double>(counted.mmas) / (c.heads * 2 * products / 128 * (c.dim / 16)) <=
        most_products);
  // One a tile, three when a block begins.
  const double blocks =
      ceiling(line.size(), 256) * slot_parts + ceiling(c.capacity, 256) * query_parts;
  CHECK(static_cast<double>(counted.barriers) / (c.heads * (tiles + 3 * blocks)) <= 1);
  CHECK(counted.loaded(row_traffic::values) == 0);
  CHECK(counted.sectors(row_traffic::keys) <= 1);
  CHECK(counted.sectors(row_traffic::queries) <= 1);
  CHECK(counted.bank_conflicts == 0);
}

TEST_CASE("column sums read K once for 256 queries and Q once for 256 slots, by the mask") {
  check_column_sums({.heads = 2, .capacity = 512, .dim = 128, .group = 1}, 512);
  check_column_sums({.heads = 1, .capacity = 600, .dim = 64, .group = 4}, 150);
  // A window's queries of a head fill half of the columns of one turn.
  check_column_sums({.heads = 4, .capacity = 1024, .dim = 128, .group = 1}, 32, 1.53);
}

void check_match(const cache_case& c, index_t removed, index_t kept) {
  INFO("dim " << c.dim << ", " << removed << " removed, " << kept << " kept");
  device_cache<half> kv(c, {c.capacity}, 3);
  std::vector<index_t> slots(kv.slots());
  std::iota(slots.begin(), slots.end(), 0);
  device_buffer<index_t> away(slots), stay(slots), into(kv.slots());
  device_buffer<index_t> aways(std::vector{removed}), stays(std::vector{kept});
  device_buffer<float> similarity(kv.slots());
  row_traffic counted(kv);
  match(dot_similarity{}, kv.view(), {away.data(), aways.data()}, {stay.data(), stays.data()},
        {into.data(), similarity.data()}, {}, order());
  const index_t tiles = ceiling(removed, 128);
  CHECK(counted.loaded(row_traffic::keys) / (removed + tiles * kept) <= 1);
  CHECK(counted.loaded(row_traffic::values) == 0);
  CHECK(counted.sectors(row_traffic::keys) <= 1);
  CHECK(counted.bank_conflicts == 0);
  CHECK(static_cast<double>(counted.mmas) / (8 * tiles * 16 * ceiling(kept, 128) * (c.dim / 16)) <=
        1);
  CHECK(counted.barriers <= tiles * (ceiling(kept, 128) * (c.dim / 64) + 2));  // one a part of 64
}

TEST_CASE("matching reads removed keys once, kept ones once for 128 removed") {
  check_match({.heads = 1, .capacity = 600, .dim = 128}, 300, 299);
  check_match({.heads = 1, .capacity = 300, .dim = 64}, 100, 200);
}

/// H2O's scores, and how often they are looked at.
struct counted_scores : sum_rule {
  static inline int looks = 0;

  unsigned order(const head_context& head, index_t s) const {
    ++looks;
    return sum_rule::order(head, s);
  }
};

TEST_CASE("selecting reads scores twice, and more often only of heads that registers do not hold") {
  const index_t n = GENERATE(4096, 5000);
  device_cache<half> kv({.heads = 1, .capacity = n, .dim = 8}, {n}, 3, {slot_reduce::sum});
  device_buffer<index_t> rows(1), begin(kv.slots() + 1);
  device_buffer<merge_source> sources(kv.slots());
  device_buffer<float> log_mass(kv.slots());
  const emulator::traffic counted;
  counted_scores::looks = 0;
  select(counted_scores{}, kv.view(), kv.state, budget{.slots = n / 2},
         {rows.data(), begin.data(), sources.data(), log_mass.data()}, order());
  REQUIRE(rows[0] == n / 2);
  CHECK(counted_scores::looks <= (n <= 4096 ? 2 : 5) * n);
  // Two for the latest position, two for what is protected, four a digit, one for 2048 slots.
  CHECK(counted.barriers <= 2 + 2 + 4 * 4 + ceiling(n, 2048));
}

/// Slots of which none is near another all lead: every tile of joiners meets all before it.
void check_joins(const cache_case& c, index_t held) {
  INFO("dim " << c.dim << ", " << held << " held of " << c.capacity);
  device_cache<half> kv(c, {c.capacity}, 3);
  std::vector<index_t> slots(kv.slots());
  std::iota(slots.begin(), slots.end(), 0);
  const index_t count = c.capacity - held, tiles = ceiling(count, 128);
  device_buffer<index_t> rows(1, 0), kept(slots), into(kv.slots()), nearest(kv.slots()),
      ends(kv.slots() + 1), removed(std::vector<index_t>(slots.begin() + held, slots.end())),
      holds(std::vector{held}), joins(std::vector{count});
  device_buffer<float> score(kv.slots()), similarity(kv.slots()), norm(kv.slots());
  ends[0] = held;
  const detail::keep_evict_partition of{rows.data(),
                                        kept.data(),
                                        removed.data(),
                                        holds.data(),
                                        joins.data(),
                                        into.data(),
                                        {nearest.data(), score.data()},
                                        similarity.data()};
  detail::norms(kv.view(), of.removed_list(), norm.data(), order());
  row_traffic counted(kv);
  detail::join_tiles(kv.view(), of, ends.data(), norm.data(), 2.0F, order());
  REQUIRE(ends[tiles] == c.capacity);
  double keys = 0, pairs = 0, barriers = 0;
  for (index_t t = 0; t < tiles; ++t) {
    const index_t own = std::min(index_t{128}, count - 128 * t);
    keys += 3 * own + held + 128 * t + t * own;  // a tile is read once a launch, two more to decide
    pairs += ceiling(held, 128) + t + 2;
    barriers += 2 * (t + 1) + 6;  // two a block beside one a part, six where a tile decides
  }
  const index_t parts = c.dim / 64;
  CHECK(counted.loaded(row_traffic::keys) / keys <= 1);
  CHECK(counted.loaded(row_traffic::values) == 0);
  CHECK(counted.sectors(row_traffic::keys) <= 1);
  CHECK(counted.bank_conflicts == 0);
  CHECK(static_cast<double>(counted.mmas) / (128 * pairs * (c.dim / 16)) <= 1);
  CHECK(static_cast<double>(counted.barriers) / (pairs * parts + barriers) <= 1);
}

TEST_CASE("joins read a tile of joiners once a launch, and leaders once for 128 joiners") {
  check_joins({.heads = 1, .capacity = 600, .dim = 128}, 200);
  check_joins({.heads = 1, .capacity = 300, .dim = 64}, 10);
}

}  // namespace hot_kernels_emulator_test
}  // namespace kvmeld::cuda
