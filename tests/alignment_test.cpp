// SPDX-License-Identifier: MIT
// A program that keeps Eigen from aligning its own arrays, as an engine may: what kvmeld maps as
// aligned is. Compiled with EIGEN_MAX_STATIC_ALIGN_BYTES=0 and Eigen's assertions.
#include <array>
#include <catch2/catch.hpp>
#include <random>
#include <vector>

#include "kvmeld/memory/cache.hpp"
#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/score/attention.hpp"
#include "kvmeld/search/match.hpp"
#include "kvmeld/search/ward.hpp"
#include "support/random.hpp"

namespace alignment_test {

using kvmeld::index_t;

static_assert(EIGEN_MAX_STATIC_ALIGN_BYTES == 0);

constexpr index_t slots = 40, dim = 24;

std::vector<float> normal(index_t n) {
  std::normal_distribution<float> gauss;
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& e : x) {
    e = gauss(streams::floats);
  }
  return x;
}

/// Everything that maps an array of its own: what it has computed.
[[gnu::noinline]] std::vector<float> run(const kvmeld::head_ref& head,
                                         const std::vector<float>& q) {
  std::vector<float> out = q;
  kvmeld::attend(head, q.data(), out.data());
  std::vector<float> turned = q;
  kvmeld::rotation turn(kvmeld::rotary::halves(10'000), dim);
  turn.by(3);
  turn(turned.data());
  out.insert(out.end(), turned.begin(), turned.end());
  std::vector<index_t> all;
  for (index_t s = 0; s < head.length(); ++s) {
    all.push_back(s);
  }
  std::vector<float> scratch(kvmeld::search::cosine_floats), floats;
  kvmeld::search::nearest_by_cosine(
      head, all, [](index_t) { return true; }, scratch.data(),
      [&](index_t, kvmeld::search::near_slot to) { out.push_back(to.cosine); });
  kvmeld::detail::arena parts(floats, kvmeld::search::ward_slots::floats(slots, dim));
  const kvmeld::search::ward_slots ward(
      head, all, [](index_t) { return 1.0F; }, parts);
  kvmeld::search::cheapest_partners(
      ward, ward, [](index_t) { return slots; },
      [&](index_t, kvmeld::search::ward_partner to) { out.push_back(to.cost); });
  return out;
}

/// The same with a stack that begins `bytes` later.
template <std::size_t bytes>
[[gnu::noinline]] std::vector<float> run_below(const kvmeld::head_ref& head,
                                               const std::vector<float>& q) {
  std::array<volatile char, bytes> below;
  below[0] = 0;
  std::vector<float> out = run(head, q);
  below[bytes - 1] = 0;
  return out;
}

TEST_CASE("arrays that are mapped as aligned are, whatever Eigen's own are", "[alignment]") {
  kvmeld::cache kv({.kv_heads = 1, .key_dim = dim}, {.capacity = slots});
  const auto rows = normal(slots * dim), q = normal(dim);
  kv.append(kv.heads(0, 0), rows, rows, slots);
  const auto wanted = run(kv.head(0), q);
  CHECK(run_below<16>(kv.head(0), q) == wanted);
  CHECK(run_below<32>(kv.head(0), q) == wanted);
  CHECK(run_below<48>(kv.head(0), q) == wanted);
}

}  // namespace alignment_test
