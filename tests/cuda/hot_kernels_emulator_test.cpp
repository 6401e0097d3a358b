// What the hot kernels move, as the emulator counts it, beside the least that there is to move:
// rows are read no more often than they have to be, sectors are used whole, banks do not conflict.
// Ratios to the floor have no slack: a bound that is passed is a slower kernel.
#include <catch2/catch.hpp>
#include <numeric>

#include "cuda/device_cache.hpp"
#include "kvfold/cuda/attend.cuh"
#include "kvfold/cuda/merge/apply.cuh"
#include "kvfold/cuda/policies/evicting_rules.cuh"
#include "kvfold/cuda/policies/keepkv/join_leaders.cuh"
#include "kvfold/cuda/score/column_scores.cuh"
#include "kvfold/cuda/search/select.cuh"
#include "kvfold/cuda/workspace.cuh"

namespace kvfold::cuda {
namespace {

using emulator::traffic;

/// Rows of keys, values and queries, counted each for itself.
class row_traffic : public traffic {
 public:
  enum plane : std::size_t { keys, values, queries };

  explicit row_traffic(device_cache<half>& kv, device_buffer<half>* q = nullptr)
      : row_bytes_(2.0 * kv.shape.dim) {
    watch(kv.keys.data(), kv.keys.size() * sizeof(half));
    watch(kv.values.data(), kv.values.size() * sizeof(half));
    if (q != nullptr) {
      watch(q->data(), q->size() * sizeof(half));
    }
  }
  double loaded(plane x) const { return static_cast<double>(of(x).loaded.bytes) / row_bytes_; }
  double stored(plane x) const { return static_cast<double>(of(x).stored.bytes) / row_bytes_; }
  /// Sectors that rows touched, beside those that their bytes fill.
  double sectors(plane x) const {
    const auto bytes = of(x).loaded.bytes + of(x).stored.bytes;
    const auto touched = of(x).loaded.sectors + of(x).stored.sectors;
    return bytes == 0 ? 1.0 : static_cast<double>(32 * touched) / static_cast<double>(bytes);
  }

 private:
  double row_bytes_;
};

/// Of `count` queries a query head.
std::size_t query_elements(const cache_case& c, index_t count) {
  return static_cast<std::size_t>(c.heads * c.group * count * c.dim);
}
index_t ceiling(index_t n, index_t of) { return (n + of - 1) / of; }

void check_attend(const cache_case& c, const std::vector<index_t>& lengths) {
  INFO("dim " << c.dim << ", group " << c.group << ", capacity " << c.capacity);
  device_cache<half> kv(c, lengths, 3, {column_merge::sum});
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
  // Warps meet when a block has attended to all its slots; observing meets three times.
  CHECK(static_cast<double>(counted.barriers) / (2 * blocks + 3 * c.heads) <= 1);
}

TEST_CASE("attention reads K and V once, sectors whole, without bank conflicts") {
  check_attend({.heads = 2, .capacity = 1024, .dim = 128, .group = 4}, {1024, 700});
  check_attend({.heads = 3, .capacity = 255, .dim = 64, .group = 8}, {255, 33, 250});
}

void check_column_sums(const cache_case& c, index_t count) {
  INFO("dim " << c.dim << ", group " << c.group << ", queries " << count);
  device_cache<half> kv(c, std::vector<index_t>(static_cast<std::size_t>(c.heads), c.capacity), 3);
  device_buffer<half> q(query_elements(c, count), 0);
  const query_rows<half> rows{q.data(), count, std::ptrdiff_t{c.group} * count * c.dim,
                              std::ptrdiff_t{count} * c.dim, c.dim};
  device_buffer<float> total(kv.slots());
  device_buffer<unsigned char> memory(
      column_scores_workspace_bytes(c.heads, c.group, count, c.capacity));
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
  // Of what the mask leaves; a warp multiplies 32 rows by whole tiles.
  CHECK(static_cast<double>(counted.mmas) / (c.heads * 2 * products / 128 * (c.dim / 16)) <= 1.25);
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
  device_cache<half> kv({.heads = 1, .capacity = n, .dim = 8}, {n}, 3, {column_merge::sum});
  device_buffer<index_t> rows(1), begin(kv.slots() + 1);
  device_buffer<merge_source> sources(kv.slots());
  device_buffer<float> log_mass(kv.slots());
  const emulator::traffic counted;
  counted_scores::looks = 0;
  select(counted_scores{}, kv.view(), kv.state, budget{.target = n / 2},
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
  detail::norms(kv.view(), norm.data(), order());
  row_traffic counted(kv);
  const detail::keep_evict_partition of{rows.data(),
                                        kept.data(),
                                        removed.data(),
                                        holds.data(),
                                        joins.data(),
                                        into.data(),
                                        {nearest.data(), score.data()},
                                        similarity.data()};
  detail::join_tiles<128>(kv.view(), of, ends.data(), norm.data(), 2.0F, order());
  REQUIRE(ends[tiles] == c.capacity);
  double keys = 0, pairs = 0, barriers = 0;
  for (index_t t = 0; t < tiles; ++t) {
    const index_t own = std::min(index_t{128}, count - 128 * t);
    keys += 3 * own + held + 128 * t + t * own;  // a tile is read once a launch, two more to decide
    pairs += ceiling(held, 128) + t + 2;
    barriers += 2 * (t + 1) + 5;  // two a block beside one a part, five where a tile decides
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

/// The first `staying` slots are rows as they are; of the rest every `keep`-th is kept, and moves.
/// `merged`: it takes in those before it. Blocks take 16 bytes of every row a lane.
template <index_t Lanes>
void check_apply(const cache_case& c, index_t staying, index_t keep, bool merged) {
  INFO("dim " << c.dim << ", one of " << keep << " kept, merged " << merged);
  device_cache<half> kv(c, {c.capacity}, 3, {column_merge::sum});
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
  device_cache<half> kv(c, {c.capacity}, 3, {column_merge::sum, column_merge::max});
  device_buffer<index_t> rows(std::vector{count}), begin(static_cast<std::size_t>(c.capacity + 1));
  device_buffer<merge_source> sources(kv.slots());
  device_buffer<float> log_mass(kv.slots(), 0);
  for (index_t s = 0; s < c.capacity; ++s) {
    sources[s] = s + 1 < count ? merge_source{s} : merge_source{s, 0.25F, 0.25F};
    begin[std::min(s, count - 1)] = s < count ? s : count - 1;
  }
  begin[count] = c.capacity;
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
  // 64 KiB of a block's are on their way, and it waits once for every four sources of its lanes.
  CHECK(counted.copies_at_once * 16 * 256 == std::size_t{64} << 10);
  const index_t chunks = ceiling(count, 256 / Lanes);
  CHECK(counted.waits <= static_cast<std::size_t>(ceiling(members, 4 * 256 / Lanes) + chunks + 2));
  // As of other rows, and two for the long row, of columns too, however many there are.
  const index_t blocks = 2 * ceiling(c.dim, 8 * Lanes);
  CHECK(counted.barriers <= blocks * (chunks + 3 + 2) + 3 * ceiling(count, 1024) + 2);
}

TEST_CASE("a row of very many sources has 64 KiB a block on their way") {
  check_long_row<4>({.heads = 1, .capacity = 1500, .dim = 128}, 200);
  check_long_row<16>({.heads = 1, .capacity = 700, .dim = 256}, 100);
}

}  // namespace
}  // namespace kvfold::cuda
