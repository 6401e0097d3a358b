// SPDX-License-Identifier: MIT
// Lookahead-max by products of 8 bits: its parts against loops, its scores against the oracle's.
#include "kvmeld/score/screened_scores.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>

#include "support/fixtures.hpp"

namespace screened_scores_test {

using fixtures::index_t;
using fixtures::normal;
using kvmeld::query_view;

std::size_t at(std::ptrdiff_t i) { return static_cast<std::size_t>(i); }

bool runs() {
#ifdef KVMELD_VNNI_TARGET
  return kvmeld::score::runs_vnni();
#else
  return false;
#endif
}

std::vector<float> scores(const kvmeld::head_ref& head, const query_view<float>& queries,
                          bool screened, bool leverage = false) {
  std::vector<float> s(at(head.length()), 7.0F);
  kvmeld::prompt_scores(head, queries, {.leverage = leverage, .screened = screened}, s);
  return s;
}
/// To the bit, NaN too.
bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}
/// The `share` of slots with the highest scores.
template <class Scores>
std::set<index_t> best(const Scores& s, double share) {
  std::vector<index_t> order(s.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](index_t a, index_t b) { return s[at(a)] > s[at(b)]; });
  const auto count = static_cast<std::ptrdiff_t>(share * static_cast<double>(s.size()));
  return {order.begin(), order.begin() + count};
}
double jaccard(const std::set<index_t>& a, const std::set<index_t>& b) {
  std::vector<index_t> both;
  std::ranges::set_intersection(a, b, std::back_inserter(both));
  return static_cast<double>(both.size()) / static_cast<double>(a.size() + b.size() - both.size());
}

/// A prompt such as models have: a mean that all keys share and queries like, sinks, channels of
/// every size and of zeros, a few tokens that a query looks up.
struct scene {
  scene(index_t tokens, index_t g, index_t d, index_t before = 0)
      : kv(fixtures::random_cache(before + tokens, d, g)), queries(tokens, g, d), dim(d), group(g) {
    const auto mean = normal(d, 3), sink = normal(d, 2), like = normal(d, 0.3F);
    const auto head = kv.head(0);
    for (index_t s = 0; s < head.length(); ++s) {
      for (index_t c = 0; c < d; ++c) {
        head.key(s)[c] = size(c) * (head.key(s)[c] + mean[at(c)] + (s < 2 ? 2 * sink[at(c)] : 0));
      }
    }
    for (index_t i = 0; i < tokens; ++i) {
      for (index_t e = 0; e < g * d; ++e) {
        queries.data[at(i * g * d + e)] += like[at(e % d)] + sink[at(e % d)];
      }
      if (i % 9 == 4) {
        const index_t of = (i * 37) % head.length();
        for (index_t c = 0; c < d; ++c) {
          queries.data[at(i * g * d + c)] += 2 * (head.key(of)[c] - size(c) * mean[at(c)]);
        }
      }
    }
  }
  static float size(index_t c) {
    return c % 11 == 10 ? 0 : 0.2F + 0.1F * static_cast<float>(c % 7);
  }

  /// LAW: each score is the oracle's to 15 %, most to 2 %, with the prefill's log-sum-exp and
  /// without; the best of them are the same.
  void is_the_oracles() {
    const auto head = kv.head(0);
    INFO(head.length() << " slots, " << queries.count << " queries, group of " << group << ", dim "
                       << dim);
    const oracle::head h = fixtures::to_oracle(head);
    std::vector<int> positions;
    for (index_t i = 0; i < queries.count; ++i) {
      positions.push_back(queries.view().position_of(i, head.next_position()));
    }
    const auto q = queries.tensor();
    const oracle::mat own = oracle::lookahead_max::own_log_sums(h, q, positions);
    std::vector<float> log_sum_exp;
    for (index_t g = 0; g < group; ++g) {
      for (const oracle::vec& of_group : own) {
        log_sum_exp.push_back(static_cast<float>(of_group[at(g)]));
      }
    }
    const oracle::vec theirs =
        oracle::lookahead_max{.outliers = false}(h, q, positions, head.next_position());
    for (const bool given : {false, true}) {
      auto view = queries.view();
      view.log_sum_exp = given ? log_sum_exp.data() : nullptr;
      const auto exact = scores(head, view, false), ours = scores(head, view, true);
      CHECK(same(ours, exact) == !runs());
      std::vector<double> off;
      for (std::size_t s = 0; s < ours.size(); ++s) {
        off.push_back(std::abs(std::log((double{ours[s]} + 1e-9) / (theirs[s] + 1e-9))));
      }
      std::ranges::sort(off);
      CHECK(off.back() < 0.15);
      CHECK(off[off.size() * 9 / 10] < 0.02);
      CHECK(jaccard(best(ours, 0.1), best(theirs, 0.1)) > 0.93);
      CHECK(jaccard(best(ours, 0.3), best(theirs, 0.3)) > 0.95);
    }
  }

  fixtures::cache<float> kv;
  fixtures::queries queries;
  index_t dim, group;
};

TEST_CASE("screened scores are the oracle's in every width and group", "[oracle][screened]") {
  const auto [tokens, group, dim] = GENERATE(table<index_t, index_t, index_t>({{256, 1, 64},
                                                                               {257, 2, 5},
                                                                               {300, 3, 64},
                                                                               {319, 8, 24},
                                                                               {320, 4, 30},
                                                                               {400, 1, 80},
                                                                               {330, 1, 256}}));
  scene(tokens, group, dim).is_the_oracles();
}

TEST_CASE("screened scores of a chunk count log-mass, gaps and sinks", "[oracle][screened]") {
  scene s(200, 2, 32, 150);
  const auto head = s.kv.head(0);
  const auto mass = normal(150);
  for (index_t i = 0; i < 150; ++i) {
    head.log_mass(i) = mass[at(i)];
  }
  std::swap(head.position(7), head.position(90));  // slots lie in any order
  std::swap(head.position(20), head.position(300));
  s.is_the_oracles();
}

TEST_CASE("screened scores start their first pass with a sink", "[oracle][screened]") {
  fixtures::cache<float> kv = fixtures::random_cache(
      280, {.heads = 1, .group = 2, .dim = 16, .capacity = 280, .sink_logits = {8, -1}});
  const fixtures::queries queries(280, 2, 16);
  const auto exact = scores(kv.head(0), queries.view(), false),
             ours = scores(kv.head(0), queries.view(), true);
  CHECK(same(exact, ours) == !runs());
  for (std::size_t s = 0; s < ours.size(); ++s) {
    CHECK(ours[s] == Approx(exact[s]).epsilon(0.05));
  }
}

TEST_CASE("screened scores of rows in other types are those of the floats that they hold",
          "[screened]") {
  const index_t tokens = 260, dim = 32;
  auto halves = fixtures::random_cache<Eigen::half>(tokens, dim, 2);
  auto floats = fixtures::random_cache(tokens, dim, 2);
  for (index_t s = 0; s < tokens; ++s) {
    for (index_t c = 0; c < dim; ++c) {
      floats.head(0).key(s)[c] = static_cast<float>(halves.head(0).key(s)[c]);
      floats.head(0).value(s)[c] = static_cast<float>(halves.head(0).value(s)[c]);
    }
  }
  const fixtures::queries queries(tokens, 2, dim);
  const auto a = scores(floats.head(0), queries.view(), true, true),
             b = scores(halves.head(0), queries.view(), true, true);
  for (std::size_t s = 0; s < a.size(); ++s) {
    CHECK(a[s] == Approx(b[s]).epsilon(1e-5));
  }
}

TEST_CASE("equal keys have equal screened scores, and a looked up one the highest", "[screened]") {
  const index_t tokens = 400, dim = 64, fact = 200, asking = 300;
  const float sharp = GENERATE(1.0F, 2.0F, 12.0F);
  auto kv = fixtures::random_cache(tokens, dim, 1);
  const auto head = kv.head(0);
  for (const index_t s : {11, 64, 399}) {
    for (index_t c = 0; c < dim; ++c) {
      head.key(s)[c] = head.key(10)[c], head.value(s)[c] = head.value(10)[c];
    }
  }
  fixtures::queries queries(tokens, 1, dim, 0.5F);
  std::vector<float> key(at(dim));
  for (index_t c = 0; c < dim; ++c) {
    key[at(c)] = sharp * head.key(fact)[c];
  }
  kvmeld::rotation turn(fixtures::default_rope, dim);
  turn.by(asking - (tokens + 64.0 * asking / tokens));
  turn(key.data());
  std::ranges::copy(key, &queries.data[at(asking * dim)]);
  const auto s = scores(head, queries.view(), true);
  CHECK(std::ranges::max_element(s) - s.begin() == fact);
  CHECK(s[fact] == Approx(scores(head, queries.view(), false)[fact]).epsilon(2e-3));
  for (const std::size_t other : {11U, 64U, 399U}) {
    CHECK(s[other] == s[10]);
  }
}

TEST_CASE("keys that share a query's attention have their shares, whatever codes made of them",
          "[screened]") {
  const index_t tokens = 400, dim = 64, apart = 100;
  auto kv = fixtures::random_cache(tokens, dim, 1);
  fixtures::queries queries(tokens, 1, dim, 0.5F);
  std::vector<index_t> facts;
  kvmeld::rotation turn(fixtures::default_rope, dim);
  for (index_t i = 210; i < 310; i += 10) {  // so that no two queries look up the same key
    facts.push_back(i - 200);
    float* const q = &queries.data[at(i * dim)];
    for (index_t c = 0; c < dim; ++c) {
      q[c] = 8 * (kv.head(0).key(facts.back())[c] + kv.head(0).key(facts.back() + apart)[c]);
    }
    turn.by(i - std::floor(tokens + 64.0 * i / tokens));
    turn(q);
  }
  const auto ours = scores(kv.head(0), queries.view(), true),
             exact = scores(kv.head(0), queries.view(), false);
  for (const index_t fact : facts) {
    // Codes of such logits are off by tenths: of a small share another query may seem to have more.
    for (const index_t s : {fact, fact + apart}) {
      const bool small = exact[at(s)] < std::max(exact[at(fact)], exact[at(fact + apart)]);
      CHECK(ours[at(s)] == Approx(exact[at(s)]).epsilon(small ? 0.3 : 2e-3));
    }
  }
}

TEST_CASE("log-sum-exps above every logit are held, as of keys that are alike but for a sign",
          "[screened]") {
  const index_t tokens = 1024, dim = 16;
  const float largest = GENERATE(30.0F, 100.0F, 300.0F);
  const fixtures::cache_shape shape{
      .heads = 1, .group = 1, .dim = dim, .capacity = tokens, .rope = kvmeld::rotary::halves(1e30)};
  fixtures::cache<float> kv = fixtures::random_cache(tokens, shape);
  fixtures::queries queries(tokens, 1, dim, 0);
  for (index_t s = 0; s < tokens; ++s) {
    for (index_t c = 0; c < dim; ++c) {  // what rotates least
      kv.head(0).key(s)[c] = c % (dim / 2) < 4 ? 0 : s % 2 == 0 ? 1.0F : -1.0F;
      queries.data[at(s * dim + c)] = c % (dim / 2) < 4 ? 0 : largest / 8 / kv.head(0).scale();
    }
  }
  const auto ours = scores(kv.head(0), queries.view(), true),
             exact = scores(kv.head(0), queries.view(), false);
  CHECK(same(ours, exact) == !runs());
  for (std::size_t s = 0; s < ours.size(); ++s) {
    CHECK(ours[s] == Approx(exact[s]).epsilon(0.05).margin(1e-9));
  }
}

TEST_CASE("what 8 bits do not hold is scored exactly, to the bit", "[screened]") {
  const index_t tokens = 256, dim = 16;
  fixtures::cache_shape shape{.heads = 1, .group = 2, .dim = dim, .capacity = tokens};
  fixtures::queries queries(tokens, 2, dim);
  auto view = queries.view();
  index_t length = tokens;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  auto change = [](const auto&) {};
  const auto is_exact = [&](const auto& changed) {
    auto kv = fixtures::random_cache(length, shape);
    changed(kv.head(0));
    CHECK(same(scores(kv.head(0), view, true), scores(kv.head(0), view, false)));
  };
  SECTION("soft caps") { shape.soft_cap = 30, is_exact(change); }
  SECTION("slopes") { shape.alibi_slopes = {0.1F, 0.2F}, is_exact(change); }
  SECTION("a window") { shape.window = 100, is_exact(change); }
  SECTION("few slots") { length = 255, view = view.last(255), is_exact(change); }
  SECTION("few queries") { view = view.last(63), is_exact(change); }
  SECTION("NaN in a query") { queries.data[77] = nan, is_exact(change); }
  SECTION("NaN in a key") {
    is_exact([&](const auto& head) { head.key(200)[3] = nan; });
  }
  SECTION("Inf in a key") {
    is_exact([&](const auto& head) { head.key(5)[15] = std::numeric_limits<float>::infinity(); });
  }
  SECTION("NaN among log-mass") {
    is_exact([&](const auto& head) { head.log_mass(9) = nan; });
  }
  SECTION("much log-mass") {
    is_exact([&](const auto& head) { head.log_mass(9) = -40; });
  }
  SECTION("a log-sum-exp far above all logits") {
    shape.sink_logits = {3000, 3000}, is_exact(change);
  }
  SECTION("NaN among log-sum-exps") {
    std::vector<float> given(at(2 * tokens), 3.0F);
    given[70] = nan, view.log_sum_exp = given.data(), is_exact(change);
  }
  SECTION("large logits") { queries.data[5] = 1e4F, is_exact(change); }
  SECTION("equal keys") {
    is_exact([&](const auto& head) {
      for (index_t s = 0; s < tokens; ++s) {
        for (index_t c = 0; c < dim; ++c) {
          head.key(s)[c] = 0.5F;
        }
      }
    });
  }
  SECTION("no queries but zeros") { std::ranges::fill(queries.data, 0.0F), is_exact(change); }
  SECTION("numbers near 0") {
    is_exact([&](const auto& head) {
      for (index_t c = 0; c < dim; ++c) {
        for (index_t s = 0; s < tokens; ++s) {
          head.key(s)[c] = s == 100 ? 1e-38F : 0;
        }
      }
    });
  }
}

TEST_CASE("fold screens a long prompt's scores, or does not", "[screened][fold]") {
  const index_t tokens = 300, dim = 16;
  auto kv = fixtures::random_cache(tokens, dim, 2);
  const fixtures::queries queries(tokens, 2, dim);
  for (const bool screened : {false, true}) {
    kvmeld::fold policy;
    policy.pins = kvmeld::fold::pin_rule::scores, policy.screened = screened;
    auto state = kvmeld::make_head_state(policy, kv.head(0));
    kvmeld::observe(policy, kv.head(0), state, queries.view());
    const auto column = state.column(kvmeld::fold::prompt_score);
    CHECK(same({column.begin(), column.end()}, scores(kv.head(0), queries.view(), screened, true)));
  }
}

#ifdef KVMELD_VNNI_TARGET
namespace score = kvmeld::score;

TEST_CASE("a tile's products are those of loops", "[screened]") {
  if (!runs()) {
    return;
  }
  std::mt19937& bits = fixtures::random_bits();
  for (const index_t quads : {1, 2, 16, 65}) {
    score::aligned_array<std::uint8_t> keys(at(quads * 4 * score::panel_slots));
    score::aligned_array<std::int8_t> codes(at(quads * 4 * score::tile_rows));
    const index_t next = 2 * score::panel_slots;
    score::aligned_array<std::int16_t> out(at(next * score::tile_rows));
    for (index_t i = 0; i < quads * 4 * score::panel_slots; ++i) {
      *keys.at(i) = static_cast<std::uint8_t>(i % 5 == 0 ? 255 : bits() % 256);
    }
    for (index_t i = 0; i < quads * 4 * score::tile_rows; ++i) {
      *codes.at(i) =
          static_cast<std::int8_t>(i % 3 == 0 ? -127 : static_cast<int>(bits() % 255) - 127);
    }
    score::coded_query queries[score::tile_rows] = {
        {-1000, 0.01F, 0, {}}, {77, 1, 0, {}}, {0, 0.25F, 0, {}}, {1 << 20, 1e-3F, 0, {}}};
    score::multiply_panel(keys.at(0), codes.at(0), quads, queries, out.at(score::panel_slots),
                          next);
    for (index_t r = 0; r < score::tile_rows; ++r) {
      for (index_t s = 0; s < score::panel_slots; ++s) {
        std::int32_t sum = queries[r].start;
        for (index_t c = 0; c < 4 * quads; ++c) {
          sum +=
              *keys.at((c / 4 * score::panel_slots + s) * 4 + c % 4) * *codes.at(r * 4 * quads + c);
        }
        const float product = std::nearbyint(static_cast<float>(sum) * queries[r].unit);
        REQUIRE(*out.at(r * next + score::panel_slots + s) ==
                std::clamp(product, -32768.0F, 32767.0F));
        REQUIRE(*out.at(r * next + s) == 0);
      }
    }
  }
}

TEST_CASE("a row's log-sum-exp is that of loops, without unseen slots", "[screened]") {
  if (!runs()) {
    return;
  }
  std::mt19937& bits = fixtures::random_bits();
  for (const index_t slots : {32, 64, 320}) {
    for (const float unit : {0.001F, 0.02F}) {
      for (const int seen : {0, 1, 3}) {  // of every 4
        score::aligned_array<std::int16_t> x(at(slots));
        score::aligned_array<float> bias(at(slots));
        double sum = 0;
        for (index_t s = 0; s < slots; ++s) {
          const bool none = s % 4 >= seen;
          *x.at(s) = none ? score::unseen
                          : static_cast<std::int16_t>(static_cast<int>(bits() % 65535) - 32767);
          *bias.at(s) = normal(1)[0];
          sum += none ? 0 : std::exp2(double{unit} * *x.at(s) + double{*bias.at(s)});
        }
        const float most = *std::max_element(bias.at(0), bias.at(slots));
        const float ours = score::log2_sum(x.at(0), bias.at(0), most, slots, unit);
        CAPTURE(slots, unit, seen);
        CHECK((seen == 0 ? ours == -std::numeric_limits<float>::infinity()
                         : std::abs(ours - std::log2(sum)) < 2e-4 + 1e-6 * std::abs(ours)));
      }
    }
  }
}

TEST_CASE("the largest of a block's rows are those of loops, the first of equals", "[screened]") {
  if (!runs()) {
    return;
  }
  std::mt19937& bits = fixtures::random_bits();
  constexpr index_t slots = 96, rows = 7, blocks = 3;
  score::aligned_array<std::int16_t> x(at(slots * rows)), best(at(slots));
  score::aligned_array<index_t> row(at(slots));
  std::vector<int> most(slots, score::unseen);
  std::vector<index_t> of(slots, 0);
  std::fill_n(best.at(0), slots, score::unseen);
  for (index_t b = 0; b < blocks; ++b) {
    std::int16_t less[rows];
    for (index_t r = 0; r < rows; ++r) {
      less[r] = static_cast<std::int16_t>(r % 3 == 0 ? 30000 : r - 5);
      for (index_t s = 0; s < slots; ++s) {  // many are equal, some saturate
        *x.at(r * slots + s) =
            static_cast<std::int16_t>(s % 8 == 0   ? 32767
                                      : s % 8 == 1 ? -32768
                                                   : static_cast<int>(bits() % 7) - 3);
        if (const int now = std::clamp(*x.at(r * slots + s) - less[r], -32768, 32767);
            now > most[at(s)]) {
          most[at(s)] = now, of[at(s)] = 40000 * b + r;
        }
      }
    }
    score::take_largest(x.at(0), less, rows, 40000 * b, slots, best.at(0), row.at(0));
  }
  for (index_t s = 0; s < slots; ++s) {
    CAPTURE(s);
    CHECK(*best.at(s) == most[at(s)]);
    CHECK(*row.at(s) == of[at(s)]);
  }
}
#endif

}  // namespace screened_scores_test
