// SPDX-License-Identifier: MIT
// KVMerger's runs and a plan's rows against slow loops: lengths around a warp, a block's registers
// and beyond them, every order of threads.
#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>

#include "cuda/device_cache.hpp"
#include "kvmeld/cuda/merge/weigh_rows.cuh"
#include "kvmeld/cuda/policies/kvmerger/name_runs.cuh"

namespace kvmeld::cuda {
namespace runs_test {

constexpr index_t fresh = detail::keep_evict_partition::fresh;
constexpr index_t evicted = detail::keep_evict_partition::evicted;
const std::vector<index_t> lengths = {1, 2, 33, 500, 4096, 4700, 9000};

std::size_t size_of(index_t n) { return static_cast<std::size_t>(n); }
std::uint32_t below(index_t n) { return static_cast<std::uint32_t>(n); }

/// A head's slots, divided.
struct divided {
  device_buffer<index_t> rows, kept, removed, kept_count, removed_count, into, nearest;
  device_buffer<float> similarity, by_slot;

  explicit divided(index_t n)
      : rows(1, 0),
        kept(size_of(n)),
        removed(size_of(n)),
        kept_count(1, 0),
        removed_count(1, 0),
        into(size_of(n)),
        nearest(size_of(n)),
        similarity(size_of(n)),
        by_slot(size_of(n)) {}
  detail::keep_evict_partition view() {
    return {rows.data(),
            kept.data(),
            removed.data(),
            kept_count.data(),
            removed_count.data(),
            into.data(),
            {nearest.data(), similarity.data()},
            by_slot.data()};
  }
};

/// Of `n` slots in a random order of positions nearly all may join, `of_ten` of ten: long runs.
void check_runs(index_t n, std::uint32_t of_ten, bool cut, std::uint64_t seed) {
  INFO(n << " slots, joined " << of_ten << " of ten, cut " << cut << ", seed " << seed);
  emulator::chance random{seed};
  device_cache<float> kv({.heads = 1, .capacity = n, .dim = 8}, {n}, seed, {slot_reduce::sum});
  divided d(n);
  std::vector<index_t> slots(size_of(n));
  std::iota(slots.begin(), slots.end(), 0);
  for (index_t i = n - 1; i > 0; --i) {
    std::swap(slots[size_of(i)], slots[random.below(below(i + 1))]);
  }
  std::vector<index_t> pairs;  // their left slots
  for (index_t i = 0; i < n; ++i) {
    const index_t s = slots[size_of(i)];
    const bool joins = i + 1 < n && random.below(10) < of_ten;
    d.kept[i] = s, d.nearest[s] = joins ? slots[size_of(i) + 1] : -1, d.into[s] = s;
    d.similarity[s] = static_cast<float>(random.below(50));  // many ties
    kv.column(0, 0, s) = static_cast<float>(random.below(100));
    if (joins) {
      pairs.push_back(s);
    }
  }
  const index_t count = static_cast<index_t>(pairs.size()), wanted = cut ? count / 2 : count;
  std::sort(pairs.begin(), pairs.end(), [&](index_t a, index_t b) {
    return std::pair(-d.similarity[a], a) < std::pair(-d.similarity[b], b);
  });
  std::vector<char> joined(size_of(n), 0);
  for (index_t i = 0; i < wanted; ++i) {
    joined[size_of(pairs[size_of(i)])] = 1;
  }
  std::vector<index_t> expected(size_of(n));
  for (index_t begin = 0, end = 0; begin < n; begin = end) {
    index_t pivot = slots[size_of(begin)];
    for (end = begin + 1; end < n && joined[size_of(slots[size_of(end) - 1])] != 0; ++end) {
      const index_t s = slots[size_of(end)];
      const float x = kv.column(0, 0, s), y = kv.column(0, 0, pivot);
      pivot = x > y || (x == y && s < pivot) ? s : pivot;
    }
    for (index_t i = begin; i < end; ++i) {
      expected[size_of(slots[size_of(i)])] = pivot;
    }
  }
  launch(detail::name_runs<float>{kv.view(), kv.state, d.view(), budget{.slots = n - wanted}, false,
                                  0.0F},
         {1}, order(seed));
  CHECK(std::equal(expected.begin(), expected.end(), d.into.host()));
}

TEST_CASE("runs of any length go to their best member") {
  std::uint64_t seed = 1;
  for (const index_t n : lengths) {
    for (const std::uint32_t of_ten : {0U, 5U, 9U, 10U}) {
      check_runs(n, of_ten, of_ten == 9, seed++);
    }
  }
}

/// Rows of slots that were kept, of which `crowd` of ten removed ones go to one of two.
void check_rows(index_t n, std::uint32_t crowd, std::uint64_t seed) {
  INFO(n << " slots, crowd " << crowd << ", seed " << seed);
  emulator::chance random{seed};
  device_cache<float> kv({.heads = 1, .capacity = n, .dim = 8}, {n}, seed);
  divided d(n);
  std::vector<index_t> anchors, to(size_of(n));
  for (index_t s = 0; s < n; ++s) {
    kv.log_mass[s] = static_cast<float>(s);
    d.into[s] = to[size_of(s)] = evicted;
    if (random.below(3) == 0) {
      d.into[s] = random.below(4) == 0 ? s | fresh : s;
      to[size_of(s)] = s, anchors.push_back(s);
    }
  }
  index_t removed = 0;
  for (index_t s = 0; s < n; ++s) {
    if (to[size_of(s)] != evicted || anchors.empty()) {
      continue;
    }
    const bool joins = random.below(5) > 0;
    const std::uint32_t k = random.below(10) < crowd ? random.below(2) : random.below(below(n));
    const index_t anchor = anchors[k % anchors.size()];
    d.removed[removed] = s, d.nearest[removed] = anchor;
    d.similarity[removed++] = joins ? 1.0F : 0.0F;
    to[size_of(s)] = joins ? anchor : evicted;
  }
  d.removed_count[0] = removed;
  device_buffer<index_t> begin(size_of(n + 1));
  device_buffer<merge_source> sources(size_of(n));
  device_buffer<float> log_mass(size_of(n));
  const plan_view plan{d.rows.data(), begin.data(), sources.data(), log_mass.data()};
  launch(detail::make_rows<float, detail::join_above>{kv.view(), kv.state, d.view(), plan, {0.5F}},
         {1}, order(seed));
  std::vector<std::vector<index_t>> rows;
  for (const index_t a : anchors) {
    rows.push_back({a});
    for (index_t s = 0; s < n; ++s) {
      if (s != a && to[size_of(s)] == a) {
        rows.back().push_back(s);
      }
    }
  }
  REQUIRE(d.rows[0] == static_cast<index_t>(rows.size()));
  bool same = true;
  index_t e = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    same = same && begin[static_cast<index_t>(r)] == e &&
           log_mass[static_cast<index_t>(r)] == static_cast<float>(rows[r][0]);
    for (const index_t s : rows[r]) {
      const merge_source& x = sources[e++];
      same = same && x.source == s && x.key_weight == 1 && x.value_weight == 1;
    }
  }
  CHECK((same && begin[d.rows[0]] == e));
}

TEST_CASE("rows of any length come in the order of their anchors") {
  std::uint64_t seed = 50;
  for (const index_t n : lengths) {
    for (const std::uint32_t crowd : {0U, 8U}) {
      check_rows(n, crowd, seed++);
    }
  }
}

/// How many threads a row has, as its weight.
struct threads_of_a_row {
  KVMELD_DEVICE bool alone(const head_context&, index_t, bool) const { return true; }
  template <class Scalar>
  KVMELD_DEVICE void operator()(const cache_view<Scalar>&, index_t, const head_context&,
                                merge_source* row, index_t size, float& log_mass,
                                const auto& team) const {
    const auto all = static_cast<float>(team.size), count = team.sum(1.0F);
    for (index_t e = team.index(); e < size; e += team.size) {
      row[e].key_weight = all;
    }
    if (team.index() == 0) {
      log_mass = count;
    }
  }
};

TEST_CASE("a row of very many sources is weighed by a block, others by a warp each") {
  const std::vector<index_t> sizes = {1, 700, 3, 128, 129, 40, 2, 1, 1, 1, 300, 5};
  const index_t n = std::accumulate(sizes.begin(), sizes.end(), 0);
  device_cache<float> kv({.heads = 1, .capacity = n, .dim = 8}, {n}, 1);
  divided d(n);
  device_buffer<index_t> begin(size_of(n + 1));
  device_buffer<merge_source> sources(size_of(n));
  device_buffer<float> log_mass(size_of(n), 0);
  d.rows[0] = static_cast<index_t>(sizes.size()), begin[0] = 0;
  for (std::size_t r = 0; r < sizes.size(); ++r) {
    begin[static_cast<index_t>(r) + 1] = begin[static_cast<index_t>(r)] + sizes[r];
  }
  for (index_t s = 0; s < n; ++s) {
    sources[s] = {s}, d.into[s] = s;
  }
  detail::weigh(kv.view(), kv.state, d.view(),
                {d.rows.data(), begin.data(), sources.data(), log_mass.data()}, threads_of_a_row{},
                d.rows[0], order());
  for (std::size_t r = 0; r < sizes.size(); ++r) {
    const auto expected = static_cast<float>(sizes[r] > 128 ? 256 : 32);
    CHECK(log_mass[static_cast<index_t>(r)] == expected);
    for (index_t e = begin[static_cast<index_t>(r)]; e < begin[static_cast<index_t>(r) + 1]; ++e) {
      REQUIRE(sources[e].key_weight == expected);
    }
  }
}

}  // namespace runs_test
}  // namespace kvmeld::cuda
