// SPDX-License-Identifier: MIT
// Comparisons within attention's sweep: the same bits as a sweep of its own, and plans that do not
// change.
#include "kvmeld/score/fused_similarity.hpp"

#include <catch2/catch.hpp>

#include "kvmeld/policies/cam.hpp"
#include "kvmeld/policies/centroids.hpp"
#include "kvmeld/policies/d2o.hpp"
#include "kvmeld/policies/ems.hpp"
#include "kvmeld/policies/keepkv.hpp"
#include "kvmeld/policies/key_diff.hpp"
#include "support/agree.hpp"

namespace fused_similarity_test {

using fixtures::index_t;
using kvmeld::fused_similarity;

template <class Head>
std::pair<float, float> alone(const Head& head, bool keys, index_t s, index_t with) {
  const auto row_of = [&](index_t i) { return keys ? head.key(i) : head.value(i); };
  const auto dim = static_cast<std::size_t>(head.dim());
  std::vector<float> x(dim), y(dim);
  kvmeld::to_floats(row_of(s), head.dim(), x.data());
  kvmeld::to_floats(row_of(with), head.dim(), y.data());
  float dot = 0, norm = 0;
  kvmeld::score::row_dots_and_norms({x.data(), 1, head.dim(), Eigen::OuterStride<>(head.dim())},
                                    y.data(), &dot, &norm);
  return {dot, norm};
}

/// `steps` tokens into two heads: `step`, which predicts, and the same without a prediction.
/// Returns how often the prediction was right. `memory_noise`: what is added to key_diff's
/// prediction.
int check_comparisons_change_nothing(const kvmeld::any_policy& policy, index_t target, index_t dim,
                                     index_t steps, float memory_noise = 0) {
  INFO(policy.name());
  auto kv = fixtures::random_cache(2 * target, dim, 2, 2 * target + 1);
  auto state = fixtures::make_state(policy, kv);
  const fixtures::queries prompt(2 * target, 2, dim);
  fixtures::compress(policy, kv, state, prompt.view(), kvmeld::budget{target});
  auto other = kv;
  auto other_state = state;
  int right = 0;
  for (index_t t = 0; t < steps; ++t) {
    const auto q = fixtures::normal(2 * dim), k = fixtures::normal(dim), v = fixtures::normal(dim);
    std::vector<float> a(q.size()), b(q.size());
    for (float& x : state[0].memory().subspan(memory_noise == 0 ? state[0].memory().size() : 1)) {
      x += memory_noise * fixtures::normal(1)[0];
    }
    fixtures::step(policy, kv, state, {q, k, v}, kvmeld::budget{target}, a);

    const auto head = other.head(0);
    head.push(k.data(), v.data());
    std::vector<float> p(2 * static_cast<std::size_t>(head.length())), lse(2);
    other_state[0].extend(head.length());
    kvmeld::hooks(policy).attend(head, other_state[0], q.data(), b.data(), p, lse);
    kvmeld::observe(policy, head, other_state[0], other_state.workspace(),
                    {.probabilities = p, .log_sum_exp = lse, .query = q.data()});
    const auto one = kvmeld::hooks(policy).choose_victim(head, other_state[0], target);
    REQUIRE(one.has_value());
    right += state.workspace().comparison.is_about(one->removed, target + 1) ? 1 : 0;
    kvmeld::apply(policy, *one, head, other_state[0], other_state.workspace().scratch);
    kvmeld::hooks(policy).after_compress(head, other_state[0], target);

    REQUIRE(a == b);
    REQUIRE(fixtures::bytes_of(kv.head(0)) == fixtures::bytes_of(head));
    REQUIRE((policy.name() == "key_diff" ||  // keeps its prediction there
             std::ranges::equal(state[0].memory(), other_state[0].memory())));
    for (index_t c = 0; c < state[0].slot_stats(); ++c) {
      REQUIRE(std::ranges::equal(state[0].column(c), other_state[0].column(c)));
    }
  }
  return right;
}

TEMPLATE_TEST_CASE("attention answers to the bit, and is not disturbed", "[comparison]", float,
                   Eigen::half, Eigen::bfloat16, kvmeld::q8_0) {
  for (const index_t dim : {1, 7, 33, 128, 300}) {
    for (const index_t length : {1, 31, 33, 129, 270}) {
      const index_t group = dim == 33 || dim == 300 ? 17 : 2, s = length / 2;
      INFO("dim " << dim << ", " << length << " slots");
      auto kv = fixtures::random_cache<float, TestType>(length, dim, group);
      const auto head = kv.head(0);
      const auto q = fixtures::normal(group * dim);
      std::vector<float> a(q.size()), b(q.size());
      fused_similarity comparison;
      kvmeld::attend(head, q.data(), a.data(), {}, {}, &comparison);
      CHECK_FALSE(comparison.is_about(s, length));
      comparison.request(head, s, true);
      CHECK_FALSE(comparison.is_about(s, length));
      kvmeld::attend(head, q.data(), b.data(), {}, {}, &comparison);
      CHECK(a == b);
      REQUIRE(comparison.is_about(s, length));
      CHECK_FALSE(comparison.is_about(s, length + 1));
      CHECK_FALSE(comparison.is_about(s + 1, length));
      for (std::size_t r = 0; r < static_cast<std::size_t>(length); ++r) {
        const auto i = static_cast<index_t>(r);
        REQUIRE(std::pair(comparison.keys().dot[r], comparison.keys().norm[r]) ==
                alone(head, true, i, s));
        REQUIRE(std::pair(comparison.values().dot[r], comparison.values().norm[r]) ==
                alone(head, false, i, s));
      }
      comparison.request(head, fused_similarity::npos);
      CHECK_FALSE(comparison.requested());
    }
  }
}

TEST_CASE("the nearest slot is the same, answered or swept for", "[comparison]") {
  for (const index_t dim : {1, 2, 16, 130}) {
    auto kv = fixtures::random_cache(200, dim, 1);
    const auto head = kv.head(0);
    for (const index_t s : {90, 91, 92}) {  // duplicates, and a key of zeros
      std::copy_n(head.key(s - 50).data, dim, head.key(s).data);
    }
    std::fill_n(head.key(17).data, dim, 0.0F);
    const auto q = fixtures::normal(dim);
    std::vector<float> out(q.size());
    const auto odd = [](index_t r) { return r % 2 == 1; };
    for (const index_t c : {0, 17, 41, 90, 199}) {
      INFO("dim " << dim << ", slot " << c);
      fused_similarity comparison;
      comparison.request(head, c);
      kvmeld::attend(head, q.data(), out.data(), {}, {}, &comparison);
      const auto swept = kvmeld::search::nearest_by_cosine(head, c, fused_similarity()),
                 answered = kvmeld::search::nearest_by_cosine(head, c, comparison);
      CHECK(std::pair(swept.slot, swept.cosine) == std::pair(answered.slot, answered.cosine));
      CHECK(kvmeld::search::nearest_by_distance(head, c, odd) ==
            kvmeld::search::nearest_by_distance(head, c, odd, comparison));
      std::fill_n(head.key(3).data, dim, 1e30F);  // whose square is infinite
      kvmeld::attend(head, q.data(), out.data(), {}, {}, &comparison);
      CHECK(kvmeld::search::nearest_by_distance(head, c, odd) ==
            kvmeld::search::nearest_by_distance(head, c, odd, comparison));
      std::fill_n(head.key(3).data, dim, 1.0F);
    }
  }
}

TEST_CASE("a step is what it would be without a prediction, right or wrong", "[comparison]") {
  const index_t dim = GENERATE(8, 33);
  int all = 0;
  for (const int right :
       {check_comparisons_change_nothing(kvmeld::d2o{}, 40, dim, 150),
        check_comparisons_change_nothing(kvmeld::keepkv{.similarity = 0}, 40, dim, 150),
        check_comparisons_change_nothing(kvmeld::ems{.window = 8, .threshold = 0.04F}, 40, dim,
                                         150)}) {
    CHECK(right > 15);  // else nothing was tested of the answers
    all += right;
  }
  CHECK(all < 3 * 150);  // nor of the second look
  // What the query will do to the lowest is known beforehand.
  CHECK(check_comparisons_change_nothing(kvmeld::keepkv{.similarity = 0.3F}, 40, dim, 150) > 140);
  // Which token passes the window is known beforehand.
  CHECK(check_comparisons_change_nothing(kvmeld::centroids{.window = 8}, 40, dim, 110) == 110);
  check_comparisons_change_nothing(kvmeld::key_diff{}, 40, dim, 150);
  check_comparisons_change_nothing(kvmeld::key_diff{}, 40, dim, 150, 0.1F);
  check_comparisons_change_nothing(kvmeld::key_diff{.sinks = 0, .window = 9}, 40, dim, 150);
}

TEST_CASE("the lowest scored slot is the first by score, the higher slot among equals",
          "[select]") {
  for (int round = 0; round < 200; ++round) {
    auto x = fixtures::normal(331);
    for (float& y : x) {
      y = std::round(y * static_cast<float>(round % 8)) * (round % 3 == 0 ? -0.0F : 0.5F);
    }
    if (round % 5 == 0) {
      x[static_cast<std::size_t>(round)] = std::numeric_limits<float>::quiet_NaN();
    }
    const auto stays = [&](index_t s) { return (s * 7 + round) % 4 == 0; };
    index_t last = -1;
    for (index_t s = 0; s < 331; ++s) {
      const auto at = [&](index_t i) { return kvmeld::rank(x[static_cast<std::size_t>(i)]); };
      last = !stays(s) && (last < 0 || at(s) <= at(last)) ? s : last;
    }
    REQUIRE(kvmeld::search::lowest_scored(331, stays, kvmeld::search::column_score(x)) == last);
    const auto whole = [&](index_t s) { return (s * 37 + round) % 101; };
    last = -1;
    for (index_t s = 0; s < 331; ++s) {
      last = !stays(s) && (last < 0 || whole(s) <= whole(last)) ? s : last;
    }
    REQUIRE(kvmeld::search::lowest_scored(331, stays, whole) == last);
  }
}

TEST_CASE("the k-th largest is where a sorted list has it", "[oracle]") {
  constexpr float inf = std::numeric_limits<float>::infinity();
  for (const index_t n : {1, 2, 63, 331}) {
    for (const float step : {1e-6F, 0.5F, 4.0F}) {  // the coarser, the more are equal
      std::vector<float> x = fixtures::normal(n);
      for (float& value : x) {
        value = step * std::round(value / step);  // −0 among them
      }
      x[static_cast<std::size_t>(n / 2)] = -inf, x[static_cast<std::size_t>(n / 3)] = inf;
      const auto score = [&](index_t s) { return x[static_cast<std::size_t>(s)]; };
      const auto stays = [&](index_t s) { return n > 2 && (s % 7 == 3 || s == 0); };
      std::vector<index_t> order;
      for (index_t s = 0; s < n; ++s) {
        if (!stays(s)) {
          order.push_back(s);
        }
      }
      std::ranges::stable_sort(order, std::greater<>(), score);
      for (std::size_t k = 1; k <= order.size(); ++k) {
        const auto bar = kvmeld::search::kth_largest(n, static_cast<index_t>(k), stays, score);
        CAPTURE(n, step, k);
        REQUIRE(bar.slot == order[k - 1]);
        REQUIRE(bar.score == score(order[k - 1]));
        for (std::size_t i = 0; i < order.size(); ++i) {
          REQUIRE(bar.below(score(order[i]), order[i]) == (i >= k));
        }
      }
    }
  }
}

}  // namespace fused_similarity_test
