// SPDX-License-Identifier: MIT
// How often a block waits for itself, and looks at a key, while it makes a head's plan.
#include <catch2/catch.hpp>
#include <numeric>

#include "cuda/device_cache.hpp"
#include "kvmeld/cuda/device/block_sort.cuh"
#include "kvmeld/cuda/merge/rows.cuh"
#include "kvmeld/cuda/policies/kvmerger/name_runs.cuh"

namespace kvmeld::cuda {
namespace plan_kernels_emulator_test {

/// Sorts, and counts how often a key is looked at.
struct sort_alone {
  static constexpr index_t threads = 256;
  static constexpr bool of_heads = false;
  using shared_memory = detail::sort_memory<threads>;
  static inline index_t looks = 0;

  index_t *slots, *spare;  // [n]
  const unsigned* key;     // [n] by slot
  index_t n;
  unsigned most;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    detail::block_sort(shared, slots, spare, n, most, [&](index_t s) {
      ++looks;
      return key[s];
    });
  }
};

TEST_CASE("a sort looks at a key once a digit, and once where slots are in order") {
  constexpr index_t n = 8 * sort_alone::threads, warps = sort_alone::threads / 32;
  const bool sorted = GENERATE(true, false);
  std::vector<index_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  device_buffer<index_t> slots(order), spare(order.size());
  device_buffer<unsigned> key(order.size());
  for (index_t s = 0; s < n; ++s) {
    key[s] = static_cast<unsigned>(sorted ? s : n - 1 - s);
  }
  sort_alone::looks = 0;
  const emulator::traffic counted;
  launch(sort_alone{slots.data(), spare.data(), key.data(), n, static_cast<unsigned>(n)}, {1},
         cuda::order(1));
  const index_t digits = 2;
  // A share's last key is compared with the next share's first.
  CHECK(sort_alone::looks == (sorted ? 1 : digits) * n + warps - 1);
  CHECK(counted.barriers == 3 + (sorted ? 0 : 4 * digits));
}

/// The highest of a list go to `high`, the others close up in the list.
struct divide_list {
  static constexpr index_t threads = 256;
  static constexpr bool of_heads = false;
  struct shared_memory {
    detail::radix_select_memory radix;
    prefix_memory<threads> prefix;
  };

  index_t *list, *high;  // [n]
  index_t n, wanted;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    detail::block_radix_select<threads>::divide(
        shared.radix, shared.prefix, list, n, wanted, [&](index_t e) { return ordered(list[e]); },
        [&](index_t s, bool is, index_t before, index_t e) {
          (is ? high[before] : list[e - before]) = s;
        });
  }
};

TEST_CASE("a list is divided with a barrier for every eight slots of a thread") {
  constexpr index_t n = 16 * divide_list::threads;
  std::vector<index_t> slots(static_cast<std::size_t>(n));
  std::iota(slots.begin(), slots.end(), 0);
  device_buffer<index_t> list(slots), high(slots.size());
  const emulator::traffic counted;
  launch(divide_list{list.data(), high.data(), n, n / 3}, {1}, order());
  CHECK(counted.barriers == 4 * 4 + 2);  // four a digit
}

TEST_CASE("runs are named and rows are made with a barrier for every 4096 slots") {
  const index_t n = GENERATE(4096, 8192);
  const auto size = static_cast<std::size_t>(n);
  device_cache<float> kv({.heads = 1, .capacity = n, .dim = 8}, {n}, 1, {slot_reduce::sum});
  std::vector<index_t> slots(size);
  std::iota(slots.begin(), slots.end(), 0);
  device_buffer<index_t> rows(1, 0), kept(slots), removed(size), kept_count(1, 0),
      removed_count(1, 0), into(slots), right(size), begin(size + 1);
  device_buffer<float> similarity(size), by_slot(size), log_mass(size);
  device_buffer<merge_source> sources(size);
  index_t pairs = 0;
  for (index_t s = 0; s < n; ++s) {
    const bool joins = s % 7 != 0 && s + 1 < n;
    right[s] = joins ? s + 1 : -1, similarity[s] = static_cast<float>(s % 100);
    kv.column(0, 0, s) = static_cast<float>(s % 5), pairs += joins ? 1 : 0;
  }
  const detail::keep_evict_partition of{rows.data(),
                                        kept.data(),
                                        removed.data(),
                                        kept_count.data(),
                                        removed_count.data(),
                                        into.data(),
                                        {right.data(), similarity.data()},
                                        by_slot.data()};
  {
    // Four to count pairs, four a digit of the cut, one between cut and runs, one behind.
    const emulator::traffic counted;
    launch(detail::name_runs<float>{kv.view(), kv.state, of, budget{.slots = n - pairs / 2}, false,
                                    0.0F},
           {1}, order());
    CHECK(counted.barriers == 4 + 4 * 4 + 2 + 2 * (n / 4096));
  }
  // Three around the lists, three and four a digit to sort, one for every 4096 slots.
  const emulator::traffic counted;
  const plan_view plan{rows.data(), begin.data(), sources.data(), log_mass.data()};
  launch(detail::make_rows<float, detail::join_all>{kv.view(), kv.state, of, plan, {}}, {1},
         order());
  REQUIRE(rows[0] == n - pairs / 2);
  CHECK(counted.barriers == 3 + 3 + 4 * 2 + n / 4096);
}

TEST_CASE("budgets that change between replays stay within their bounds", "[budget]") {
  const budget on_device[] = {{28, 36}, {20, 99}, {40, 0}};
  const auto of = [&](const budget& least, const budget& most, index_t h) {
    return head_budgets::within(least, most, on_device).of(h);
  };
  const auto is = [](const budget& x, index_t slots, index_t trigger) {
    CHECK(x.slots == slots);
    CHECK(x.trigger == trigger);
  };
  is(of({24, 30}, {32, 40}, 0), 28, 36);
  is(of({24, 30}, {32, 40}, 1), 24, 40);
  is(of({24, 30}, {32, 40}, 2), 32, 30);
  is(of({24}, {32}, 0), 28, 0);  // where these have no trigger, none has
}

}  // namespace plan_kernels_emulator_test
}  // namespace kvmeld::cuda
