// SPDX-License-Identifier: MIT
// A block's sort and order statistic against the standard library's: every length around whole
// warps and blocks, keys of every width, many of them equal.
#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>

#include "cuda/device_cache.hpp"
#include "kvmeld/cuda/device/block_radix_select.cuh"
#include "kvmeld/cuda/device/block_sort.cuh"

namespace kvmeld::cuda {
namespace sort_test {

struct sort_and_rank {
  static constexpr index_t threads = 256;
  static constexpr bool of_heads = false;
  struct shared_memory {
    detail::sort_memory<threads> sort;
    detail::radix_select_memory radix;
  };

  index_t *slots, *spare, *out;  // [n]
  const unsigned* key;           // [n] by slot
  index_t n, wanted;
  unsigned most;
  unsigned* found;  // [2] the statistic, and how many of its equals

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t* const sorted =
        detail::block_sort(shared.sort, slots, spare, n, most, [&](index_t s) { return key[s]; });
    for (index_t i = thread_index(); i < n; i += threads) {
      out[i] = sorted[i];
    }
    const auto x = detail::block_radix_select<threads>::highest(
        shared.radix, n, wanted, [](index_t s) { return s % 3 != 0; },
        [&](index_t s) { return key[s]; });
    if (thread_index() == 0) {
      found[0] = x.least, found[1] = static_cast<unsigned>(x.equals);
    }
  }
};

void check_sort(index_t n, unsigned most, bool sorted, std::uint64_t seed) {
  INFO("length " << n << ", keys to " << most << ", sorted " << sorted << ", seed " << seed);
  emulator::chance random{seed};
  const auto size = static_cast<std::size_t>(n);
  std::vector<unsigned> numbers(size);
  for (unsigned& x : numbers) {
    x = most == ~0U ? random.below(1U << 16) << 16 | random.below(1U << 16)
                    : random.below(most + 1);
  }
  if (sorted) {
    std::sort(numbers.begin(), numbers.end());
  }
  std::vector<index_t> order(size);
  std::iota(order.begin(), order.end(), 0);
  device_buffer<index_t> slots(order), spare(size), out(size);
  device_buffer<unsigned> key(numbers), found(2);
  std::vector<unsigned> counted;
  for (std::size_t s = 0; s < size; ++s) {
    if (s % 3 != 0) {
      counted.push_back(numbers[s]);
    }
  }
  std::sort(counted.rbegin(), counted.rend());
  const auto wanted =
      static_cast<index_t>(random.below(static_cast<std::uint32_t>(counted.size() + 1)));
  launch(sort_and_rank{slots.data(), spare.data(), out.data(), key.data(), n, wanted, most,
                       found.data()},
         {}, cuda::order(seed));
  std::stable_sort(order.begin(), order.end(), [&](index_t a, index_t b) {
    return numbers[static_cast<std::size_t>(a)] < numbers[static_cast<std::size_t>(b)];
  });
  CHECK(std::equal(order.begin(), order.end(), out.host()));
  CHECK((slots.intact() && spare.intact() && out.intact() && found.intact()));
  if (wanted == 0) {
    CHECK((found[0] == ~0U && found[1] == 0));
    return;
  }
  const unsigned least = counted[static_cast<std::size_t>(wanted - 1)];
  const auto above =
      std::count_if(counted.begin(), counted.end(), [&](unsigned x) { return x > least; });
  CHECK(found[0] == least);
  CHECK(static_cast<std::ptrdiff_t>(found[1]) == wanted - above);
}

TEST_CASE("a block sorts stably, and finds the k-th highest") {
  std::uint64_t seed = 1;
  for (const index_t n : {0, 1, 2, 31, 32, 33, 64, 255, 256, 257, 511, 512, 513, 1500}) {
    for (const unsigned most : {1U, 9U, 255U, 256U, 70000U, ~0U}) {
      check_sort(n, most, seed % 5 == 0, seed);
      ++seed;
    }
  }
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
  const unsigned* key;   // [n] by slot
  index_t n, wanted;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    detail::block_radix_select<threads>::divide(
        shared.radix, shared.prefix, list, n, wanted, [&](index_t e) { return key[list[e]]; },
        [&](index_t s, bool is, index_t before, index_t e) {
          (is ? high[before] : list[e - before]) = s;
        });
  }
};

void check_divide(index_t n, index_t wanted, std::uint64_t seed) {
  INFO("length " << n << ", " << wanted << " wanted");
  emulator::chance random{seed};
  const auto size = static_cast<std::size_t>(n);
  std::vector<index_t> order(size);
  std::iota(order.rbegin(), order.rend(), 0);
  std::vector<unsigned> numbers(size);
  for (unsigned& x : numbers) {
    x = random.below(20);
  }
  device_buffer<index_t> list(order), high(size);
  device_buffer<unsigned> key(numbers);
  launch(divide_list{list.data(), high.data(), key.data(), n, wanted}, {1}, cuda::order(seed));
  std::vector<index_t> places(size);
  std::iota(places.begin(), places.end(), 0);
  const auto number = [&](index_t e) {
    return numbers[static_cast<std::size_t>(order[static_cast<std::size_t>(e)])];
  };
  std::stable_sort(places.begin(), places.end(),
                   [&](index_t a, index_t b) { return number(a) > number(b); });
  const auto middle = places.begin() + std::clamp(wanted, index_t{0}, n);
  std::sort(places.begin(), middle), std::sort(middle, places.end());
  bool same = true;
  for (auto at = places.begin(); at != places.end(); ++at) {
    const index_t s = order[static_cast<std::size_t>(*at)];
    same = same && s == (at < middle ? high[static_cast<index_t>(at - places.begin())]
                                     : list[static_cast<index_t>(at - middle)]);
  }
  CHECK(same);
}

TEST_CASE("a list is divided into its highest and the others") {
  std::uint64_t seed = 1;
  for (const index_t n : {1, 33, 700, 2048, 5000}) {
    for (const index_t wanted : {-3, 0, n / 3, n, n + 4}) {
      check_divide(n, wanted, seed++);
    }
  }
}

}  // namespace sort_test
}  // namespace kvmeld::cuda
