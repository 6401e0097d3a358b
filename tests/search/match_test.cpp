// SPDX-License-Identifier: MIT
// The nearest slot, against loops over all pairs. Keys of whole numbers: products are exact, so
// that ties are ties, and many are.
#include "kvmeld/search/match.hpp"

#include <catch2/catch.hpp>
#include <numeric>  // std::iota
#include <optional>

#include "support/fixtures.hpp"
#include "support/random.hpp"

namespace match_test {

using kvmeld::index_t;

/// A head of whole numbers, `span` above zero at most, with zero keys and duplicates among them.
fixtures::cache<float> whole_numbers(index_t n, index_t dim, int span) {
  auto kv = fixtures::random_cache(n, dim, 1);
  const auto head = kv.head(0);
  for (index_t s = 0; s < n; ++s) {
    for (index_t i = 0; i < dim; ++i) {
      head.key(s)[i] = static_cast<float>(streams::floats() % (2 * unsigned(span) + 1)) -
                       static_cast<float>(span);
    }
  }
  for (index_t s = 3; s < n; s += 11) {
    std::copy_n(head.key(s - 3).data, dim, head.key(s).data);
  }
  for (index_t s = 5; s < n; s += 29) {
    std::fill_n(head.key(s).data, dim, 0.0F);
  }
  return kv;
}

/// `cos(k_a, k_b)` as the library rounds it; 0 when either is zero.
float cosine(const auto& head, index_t a, index_t b) {
  float dot = 0, of_a = 0, of_b = 0;
  for (index_t i = 0; i < head.dim(); ++i) {
    dot += head.key(a)[i] * head.key(b)[i];
    of_a += head.key(a)[i] * head.key(a)[i];
    of_b += head.key(b)[i] * head.key(b)[i];
  }
  const float norms = std::sqrt(of_a) * std::sqrt(of_b);
  return norms > 0 ? dot / norms : 0.0F;
}

/// The nearest to `s` of `among`; ties to the lower slot.
kvmeld::search::near_slot by_loops(const auto& head, index_t s, const std::vector<index_t>& among) {
  std::optional<kvmeld::search::near_slot> best;
  for (const index_t r : among) {
    const float x = cosine(head, s, r);
    if (r != s && (!best || x > best->cosine || (x == best->cosine && r < best->slot))) {
      best = {r, x};
    }
  }
  return best.value_or(kvmeld::search::near_slot{});
}

TEST_CASE("the nearest by cosine is that of all pairs, ties to the lower slot", "[match]") {
  const index_t n = GENERATE(1, 2, 64, 65, 300), dim = GENERATE(1, 3, 16, 37);
  const int span = GENERATE(1, 3, 40);
  CAPTURE(n, dim, span);
  auto kv = whole_numbers(n, dim, span);
  const auto head = kv.head(0);
  const auto candidate = [](index_t s) { return s % 3 != 1; };
  std::vector<index_t> all(static_cast<std::size_t>(n)), staying;
  std::iota(all.begin(), all.end(), 0);
  std::ranges::copy_if(all, std::back_inserter(staying), candidate);
  std::vector<kvmeld::search::near_slot> best(all.size());
  std::vector<float> scratch(kvmeld::search::cosine_floats);
  kvmeld::search::nearest_by_cosine(
      head, all, candidate, scratch.data(),
      [&](index_t s, kvmeld::search::near_slot to) { best[static_cast<std::size_t>(s)] = to; });
  for (const index_t s : all) {
    const auto right = by_loops(head, s, staying), got = best[static_cast<std::size_t>(s)];
    INFO("slot " << s);
    CHECK(std::pair(got.slot, got.cosine) == std::pair(right.slot, right.cosine));
  }
}

TEST_CASE("leaders are joined as by a walk over all of them", "[match]") {
  const index_t n = GENERATE(1, 40, 300), dim = GENERATE(2, 16);
  const float similarity = GENERATE(-1.0F, 0.5F, 0.9F);
  const int span = GENERATE(1, 9);
  CAPTURE(n, dim, similarity, span);
  auto kv = whole_numbers(n, dim, span);
  const auto head = kv.head(0);
  const auto rank = [](index_t s) { return (s * 7) % 13; };
  const index_t most = n / 3;
  kvmeld::slot_scratch out;
  std::vector<index_t> leaders, others, into(static_cast<std::size_t>(n));
  for (index_t s = 0; s < n; ++s) {
    const bool leads = s % 10 == 0;
    out.marks.push_back(leads ? 1 : 0);
    (leads ? leaders : others).push_back(s);
    into[static_cast<std::size_t>(s)] = s;
  }
  kvmeld::search::join_leaders(head, rank, similarity, most, out);

  std::ranges::stable_sort(others, [&](index_t a, index_t b) { return rank(a) > rank(b); });
  std::vector<std::pair<float, index_t>> joins;  // by falling cosine, then the lower slot
  for (const index_t s : others) {
    const auto to = by_loops(head, s, leaders);
    if (to.slot >= 0 && to.cosine >= similarity) {
      joins.emplace_back(-to.cosine, s);
      into[static_cast<std::size_t>(s)] = to.slot;
    } else {
      leaders.push_back(s);
    }
  }
  std::ranges::sort(joins);
  for (std::size_t i = static_cast<std::size_t>(most); i < joins.size(); ++i) {
    into[static_cast<std::size_t>(joins[i].second)] = joins[i].second;
  }
  CHECK(out.row_of == into);
}

TEST_CASE("a tie goes to the lower slot, whatever its sign", "[match]") {
  const float norm[] = {2, 2};
  const index_t slot[] = {8, 4};
  for (const float cosine : {-1.0F, -0.25F, 0.0F, 0.25F, 1.0F}) {
    const float dots[] = {4 * cosine, 4 * cosine};
    kvmeld::search::near_slot best = {9, cosine};
    kvmeld::search::take_nearest(dots, norm, 2, slot, 2, -1, best);
    CHECK(best.slot == 4);
    CHECK(best.cosine == cosine);
  }
}

}  // namespace match_test
