// SPDX-License-Identifier: MIT
// Layers whose rows an engine gives apart: they may interleave, and may share no byte.
#include <algorithm>
#include <catch2/catch.hpp>
#include <random>
#include <string>
#include <vector>

#include "kvmeld/memory/cache.hpp"
#include "support/random.hpp"

namespace layers_apart_test {

using kvmeld::index_t;
using kvmeld::layout;
using kvmeld::rows;
using kvmeld::strides;

constexpr index_t heads = 2, dim = 3, slots = 4, requests = 2;
const kvmeld::attention_spec spec{.kv_heads = heads, .key_dim = dim};
constexpr auto refused = "of each layer in memory of its own, got layers 0 and 1 that share bytes";

index_t below(index_t n) {
  return std::uniform_int_distribution<index_t>(0, n - 1)(streams::floats);
}

/// Strides of nested axes in a random order, with gaps.
strides random_strides() {
  strides s;
  struct axis {
    std::ptrdiff_t* stride;
    index_t count;
  };
  std::vector<axis> axes{
      {&s.request, requests}, {&s.head, heads}, {&s.row, slots}, {&s.element, dim}};
  std::shuffle(axes.begin(), axes.end(), streams::floats);
  std::ptrdiff_t reach = 1;
  for (const axis& a : axes) {
    *a.stride = reach + below(4);
    reach += (a.count - 1) * *a.stride;
  }
  return s;
}

/// The numbers that a layer's rows are made of, one by one.
std::vector<char> taken(const strides& s, std::ptrdiff_t offset, std::size_t size) {
  std::vector<char> numbers(size);
  for (index_t r = 0; r < requests; ++r) {
    for (index_t h = 0; h < heads; ++h) {
      for (index_t t = 0; t < slots; ++t) {
        for (index_t e = 0; e < dim; ++e) {
          numbers[static_cast<std::size_t>(offset + r * s.request + h * s.head + t * s.row +
                                           e * s.element)] = 1;
        }
      }
    }
  }
  return numbers;
}

template <class Scalar>
void apart(std::span<Scalar> keys, std::ptrdiff_t second, const auto& a, const auto& b) {
  std::vector<Scalar> v0(keys.size()), v1(keys.size());
  kvmeld::strided_cache(
      spec, {.layers = 2, .requests = requests, .capacity = slots},
      std::vector{rows(keys, a), rows(keys.subspan(static_cast<std::size_t>(second)), b)},
      std::vector{rows(v0, layout::nhd), rows(v1, layout::nhd)});
}

/// Pages of two layers, with one table a request or one a head.
void apart_in_pages(std::span<float> keys, std::ptrdiff_t second, const strides& s, bool each) {
  std::vector<float> v0(1000), v1(1000);
  std::vector<index_t> table(each ? 2 * heads * 2 : 2, -1);  // [layers, 1, heads, 2] or [1, 2]
  kvmeld::paged_cache(
      spec, {.layers = 2, .capacity = 8},
      std::vector{rows(keys, s), rows(keys.subspan(static_cast<std::size_t>(second)), s)},
      std::vector{rows(v0, layout::pages_nhd), rows(v1, layout::pages_nhd)},
      {.pages = table, .slots = 4});
}

TEST_CASE("layers apart are refused where a byte is in two rows, and nowhere else", "[cache]") {
  int shared = 0, interleaved = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const strides s = random_strides();
    const index_t second = below(120);
    const auto a = taken(s, 0, 2000), b = taken(s, second, 2000);
    bool expected = false;
    for (std::size_t i = 0; i < a.size(); ++i) {
      expected = expected || (a[i] != 0 && b[i] != 0);
    }
    std::vector<float> floats(2000);
    std::vector<Eigen::half> halves(2000);
    CAPTURE(trial, s.request, s.head, s.row, s.element, second);
    if (expected) {
      ++shared;
      REQUIRE_THROWS_WITH(apart(std::span(floats), second, s, s), Catch::Contains(refused));
      REQUIRE_THROWS_WITH(apart(std::span(halves), second, s, s), Catch::Contains(refused));
    } else {
      const auto last = std::find(a.rbegin(), a.rend(), 1);
      interleaved += second < a.rend() - last ? 1 : 0;
      REQUIRE_NOTHROW(apart(std::span(floats), second, s, s));
      REQUIRE_NOTHROW(apart(std::span(halves), second, s, s));
    }
  }
  CHECK((shared > 500 && interleaved > 500));
}

TEST_CASE("layers apart may interleave by slots, pages and numbers", "[cache]") {
  std::vector<float> memory(1000);
  const std::span<float> all(memory);
  const index_t row = heads * dim;
  // [requests, slots, layers, heads, dim]: a slot's rows of both layers follow one another.
  const strides by_slots{.request = 2 * slots * row, .head = dim, .row = 2 * row};
  apart(all, row, by_slots, by_slots);
  CHECK_THROWS_WITH(apart(all, row - 1, by_slots, by_slots), Catch::Contains(refused));
  CHECK_THROWS_WITH(apart(all, 2 * row, by_slots, by_slots), Catch::Contains(refused));
  // [requests, slots, heads, dim, layers]: number by number.
  const strides by_numbers{
      .request = 2 * slots * row, .head = 2 * dim, .row = 2 * row, .element = 2};
  apart(all, 1, by_numbers, by_numbers);
  CHECK_THROWS_WITH(apart(all, 2, by_numbers, by_numbers), Catch::Contains(refused));
  // Layers of two layouts: in memories that end before one another, or refused.
  apart(all.first(500), requests * slots * row, layout::nhd, layout::nhd);
  CHECK_THROWS_WITH(apart(all, requests * slots * row, layout::nhd, layout::hnd),
                    Catch::Contains(refused));
  // [pages, layers, slots, heads, dim]: a page has the slots of both layers.
  const strides pages{.head = dim, .row = row, .page = 2 * 4 * row};
  for (const bool each : {false, true}) {
    apart_in_pages(all, 4 * row, pages, each);
    CHECK_THROWS_WITH(apart_in_pages(all, 4 * row - 1, pages, each), Catch::Contains(refused));
    CHECK_THROWS_WITH(apart_in_pages(all, 5 * 8 * row, pages, each), Catch::Contains(refused));
  }
  // Heads that have pages of their own lie at one place of a page, and still apart by layers.
  const strides one_place{.head = 0, .row = dim, .page = 2 * 4 * dim};
  apart_in_pages(all, 4 * dim, one_place, true);
  CHECK_THROWS_WITH(apart_in_pages(all, 3 * dim, one_place, true), Catch::Contains(refused));
  // A block may begin within another's bytes.
  const kvmeld::attention_spec blocks{.kv_heads = 1, .key_dim = 32};
  const auto at = [&](std::size_t byte) {
    auto* const first = reinterpret_cast<std::byte*>(memory.data()) + byte;
    return rows(std::span(reinterpret_cast<kvmeld::q8_0*>(first), 20), strides{.row = 2});
  };
  std::vector<kvmeld::q8_0> values(16);
  const std::vector v{rows(std::span(values).first(8), layout::nhd),
                      rows(std::span(values).last(8), layout::nhd)};
  for (const std::size_t byte : {0U, 2U, 32U, 34U, 36U, 66U, 68U}) {
    const auto make = [&] {
      kvmeld::strided_cache(blocks, {.layers = 2, .capacity = 8}, std::vector{at(0), at(byte)}, v);
    };
    if (byte == 34) {
      CHECK_NOTHROW(make());
    } else {
      CHECK_THROWS_WITH(make(), Catch::Contains(refused));
    }
  }
}

}  // namespace layers_apart_test
