// SPDX-License-Identifier: MIT
// `match` against double loops on numbers whose products are exact: the same slot, ties included.
#include "kvmeld/cuda/search/match.cuh"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>

#include "cuda/device_cache.hpp"

namespace kvmeld::cuda {
namespace match_test {

double similar(const dot_similarity&, double ab, double, double) { return ab; }
double similar(const cosine_similarity&, double ab, double aa, double bb) {
  const auto inverse = [](double x) { return x > 0 ? 1 / std::sqrt(static_cast<float>(x)) : 0.0F; };
  return static_cast<float>(ab) * inverse(bb) * inverse(aa);  // rounded as the kernel rounds: ties
}

/// Rows in blocks: small codes, and scales whose products are exact in sums too.
template <class Scalar>
void fill_exact(Scalar* row, index_t dim, emulator::chance& random) {
  if constexpr (in_blocks<Scalar>) {
    for (index_t i = 0; i < padded<Scalar>(dim); ++i) {
      row[i].code = static_cast<std::int8_t>(i < dim ? whole(random, 4) : 0.0F);
    }
    for (index_t i = padded<Scalar>(dim); i < row_elements<Scalar>(dim); i += 2) {
      const half scale = from_float<half>(static_cast<float>(1U << random.below(3)));
      std::memcpy(row + i, &scale, sizeof scale);
    }
  }
}

template <class Scalar, class Similarity>
void check_match(const Similarity& similarity, const cache_case& c, std::vector<index_t> lengths,
                 std::uint32_t keep_one_in, std::uint64_t seed) {
  INFO("dim " << c.dim << ", paged " << c.paged << ", length " << lengths[0] << ", one in "
              << keep_one_in << ", seed " << seed);
  device_cache<Scalar> kv(c, lengths, seed);
  emulator::chance random{seed + 1};
  for (index_t h = 0; h < c.heads; ++h) {
    for (index_t s = 0; s < lengths[static_cast<std::size_t>(h)]; ++s) {
      fill_exact(kv.key(h, s), c.dim, random);
    }
  }
  device_buffer<index_t> removed(kv.slots()), kept(kv.slots()),
      leaves(static_cast<std::size_t>(c.heads), 0), stays(static_cast<std::size_t>(c.heads), 0);
  for (index_t h = 0; h < c.heads; ++h) {
    const index_t n = lengths[static_cast<std::size_t>(h)];
    for (index_t s = n; s-- > 0;) {  // descending: ties must not go by place in the list
      if (keep_one_in > 0 && random.below(keep_one_in) == 0) {
        kept[kv.at(h, stays[h]++)] = s;
      } else {
        removed[kv.at(h, leaves[h]++)] = s;
      }
      if (random.below(3) == 0) {  // many keys are the same, some are zero
        const index_t twin = static_cast<index_t>(random.below(static_cast<std::uint32_t>(n)));
        for (index_t i = 0; i < row_elements<Scalar>(c.dim); ++i) {
          kv.key(h, s)[i] = s % 5 == 0 ? Scalar{} : kv.key(h, twin)[i];
        }
      }
    }
  }
  device_buffer<index_t> into(kv.slots()), into_again(kv.slots());
  device_buffer<float> value(kv.slots());
  device_buffer<unsigned char> memory(match_workspace_bytes(c.heads, c.capacity));
  const workspace space{memory.data(), memory.size()};
  const slot_lists away{removed.data(), leaves.data()}, stay{kept.data(), stays.data()};
  match(similarity, kv.view(), away, stay, {into_again.data(), value.data()}, space,
        order(seed + 1));
  match(similarity, kv.view(), away, stay, {into.data(), value.data()}, space, order(seed));
  CHECK(into.bytes() == into_again.bytes());
  CHECK((into.intact() && value.intact() && memory.intact() && removed.intact()));
  kv.check_guards();
  bool ok = true;
  for (index_t h = 0; h < c.heads; ++h) {
    const auto product = [&](index_t a, index_t b) {
      double dot = 0;
      for (index_t i = 0; i < c.dim; ++i) {
        dot +=
            double{number_at(kv.key(h, a), c.dim, i)} * double{number_at(kv.key(h, b), c.dim, i)};
      }
      return dot;
    };
    for (index_t e = 0; e < leaves[h]; ++e) {
      const index_t a = removed[kv.at(h, e)];
      index_t best = -1;
      double most = 0;
      for (index_t k = 0; k < stays[h]; ++k) {
        const index_t b = kept[kv.at(h, k)];
        const double x = similar(similarity, product(a, b), product(a, a), product(b, b));
        if (best < 0 || x > most || (x == most && b < best)) {
          best = b, most = x;
        }
      }
      ok = ok && into[kv.at(h, e)] == best && double{value[kv.at(h, e)]} == most;
    }
  }
  CHECK(ok);
}

TEST_CASE("match takes every dim, scalar, layout and similarity") {
  std::uint64_t seed = 1;
  for (const index_t dim : {32, 40, 64, 33, 100, 128, 256}) {
    const cache_case c{
        .heads = 1, .capacity = 90, .dim = dim, .paged = dim % 3 == 1, .odd = dim % 8 == 0 ? 0 : 3};
    check_match<float>(dot_similarity{}, c, {90}, 3, seed++);
    check_match<half>(cosine_similarity{}, c, {80}, 3, seed++);
    check_match<bfloat16>(cosine_similarity{}, c, {90}, 2, seed++);
    cache_case narrow = c;
    narrow.odd = dim == 33 ? 2 : (16 - row_elements<q8_0<float>>(dim) % 16) % 16;  // aligned
    check_match<q8_0<float>>(cosine_similarity{}, narrow, {90}, 3, seed++);
    narrow.odd = c.odd;
    check_match<fp8_e4m3<half>>(dot_similarity{}, narrow, {90}, 3, seed++);
  }
  check_match<float>(cosine_similarity{}, {.capacity = 90, .dim = 48}, {90, 33}, 3, seed++);
  check_match<half>(dot_similarity{}, {.capacity = 90, .dim = 48}, {90, 33}, 3, seed++);
}

// A half would round both to 126, of which the lower slot is nearer.
TEST_CASE("match takes numbers of q8_0 whole") {
  device_cache<q8_0<float>> kv({.heads = 1, .capacity = 3, .dim = 32}, {3}, 1);
  const auto write = [&](index_t s, std::int8_t code, float number) {
    std::memset(static_cast<void*>(kv.key(0, s)), 0, 34);
    const half scale = from_float<half>(number);
    kv.key(0, s)->code = code;
    std::memcpy(kv.key(0, s) + 32, &scale, sizeof scale);
  };
  write(0, 125, 1032.0F / 1024), write(1, 126, 1), write(2, 1, 1);
  device_buffer<index_t> slots(std::vector<index_t>{2, 0, 1}), counts(std::vector<index_t>{1, 2}),
      into(3);
  device_buffer<float> value(3);
  match(dot_similarity{}, kv.view(), {slots.data(), counts.data()},
        {slots.data() + 1, counts.data() + 1}, {into.data(), value.data()}, {}, order(1));
  CHECK(into[0] == 1);
  CHECK(value[0] == 126);
}

/// Slots `0 … n − 1`, of which every third leaves; or, `among`, all of them both.
template <class Scalar>
void check_ward(index_t n, bool among, std::uint64_t seed) {
  INFO("length " << n << ", among " << among << ", seed " << seed);
  device_cache<Scalar> kv({.heads = 1, .capacity = n, .dim = 24}, {n}, seed);
  emulator::chance random{seed + 1};
  device_buffer<index_t> removed(kv.slots()), kept(kv.slots()), counts(2, 0), into(kv.slots());
  device_buffer<float> mass(kv.slots()), value(kv.slots());
  for (index_t s = 0; s < n; ++s) {
    mass[s] = static_cast<float>(1 + random.below(4));  // many weigh the same
    if (among || s % 3 == 0) {
      removed[counts[0]++] = s;
    }
    if (among || s % 3 != 0) {
      kept[counts[1]++] = s;
    }
    for (index_t i = 0; s % 5 == 4 && i < 24; ++i) {  // some keys are the same
      kv.key(0, s)[i] = kv.key(0, s - 4)[i];
    }
  }
  mass[n / 2] = std::numeric_limits<float>::quiet_NaN();
  device_buffer<unsigned char> memory(match_workspace_bytes(1, n));
  match(ward_similarity{mass.data(), among}, kv.view(), {removed.data(), counts.data()},
        {kept.data(), counts.data() + 1}, {into.data(), value.data()},
        {memory.data(), memory.size()}, order(seed));
  bool ok = true;
  for (index_t e = 0; e < counts[0]; ++e) {
    const index_t a = removed[e];
    index_t best = -1;
    float least = 0;
    for (index_t k = 0; k < counts[1]; ++k) {
      const index_t b = kept[k];
      if (among && (a == b || rank(mass[b]) < rank(mass[a]))) {
        continue;
      }
      float apart = 0;
      for (index_t i = 0; i < 24; ++i) {
        const float x = to_float(kv.key(0, a)[i]) - to_float(kv.key(0, b)[i]);
        apart += x * x;
      }
      const float ward = mass[a] * mass[b] / (mass[a] + mass[b]) * apart;
      const float cost = ward < ward_similarity::no_cost ? ward : ward_similarity::no_cost;
      if (best < 0 || cost < least) {
        best = b, least = cost;
      }
    }
    ok = ok && into[e] == best && value[e] == -least;
  }
  CHECK(ok);
}

TEST_CASE("match finds the cheapest by Ward's cost, ties to the lower slot") {
  for (const bool among : {false, true}) {
    check_ward<float>(100, among, 41);
    check_ward<half>(150, among, 42);
  }
}

TEST_CASE("match takes NaN for the least similar, and the lowest slot where all are") {
  device_cache<half> kv({.heads = 1, .capacity = 40, .dim = 16}, {40}, 7);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const index_t s : {3, 20}) {  // one that is removed, one that is kept
    kv.key(0, s)[5] = from_float<half>(nan);
  }
  device_buffer<index_t> removed(std::vector<index_t>{3, 4}), aways(std::vector<index_t>{2}),
      kept(std::vector<index_t>{30, 20, 25}), stays(std::vector<index_t>{3});
  device_buffer<index_t> into(kv.slots());
  device_buffer<float> similarity(kv.slots());
  match(dot_similarity{}, kv.view(), {removed.data(), aways.data()}, {kept.data(), stays.data()},
        {into.data(), similarity.data()}, {}, order());
  CHECK((into[0] == 20 && similarity[0] == lowest_score));
  CHECK((into[1] != 20 && std::isfinite(similarity[1])));
}

TEST_CASE("match takes any number of kept and evicted, none too") {
  std::uint64_t seed = 100;
  for (const index_t n : {0, 1, 2, 33, 64, 65, 129, 200, 300}) {
    for (const std::uint32_t one_in : {0U, 1U, 2U, 10U, 3U}) {
      const cache_case c{.heads = 2, .capacity = std::max(n, 1), .dim = 16};
      if (seed++ % 2 == 0) {
        check_match<float>(dot_similarity{}, c, {n, n / 2}, one_in, seed);
      } else {
        check_match<half>(dot_similarity{}, c, {n, n / 2}, one_in, seed);
      }
    }
  }
}

}  // namespace match_test
}  // namespace kvmeld::cuda
