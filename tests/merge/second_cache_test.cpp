// One plan on two caches: another model's, or the same rows in int8.
#include <catch2/catch.hpp>
#include <vector>

#include "kvfold/memory/quantised.hpp"
#include "support/fixtures.hpp"
#include "support/policies.hpp"

namespace {

using kvfold::index_t;
using kvfold::merge_plan;

/// A head's slots in int8, owned.
struct int8_cache {
  index_t dim, group, length;
  std::vector<std::int8_t> keys, values;
  std::vector<float> key_scales, value_scales, masses;
  std::vector<index_t> positions;

  int8_cache(const kvfold::kv_head auto& from, index_t elements_a_scale)
      : dim(from.dim()), group(elements_a_scale), length(from.length()) {
    const auto n = static_cast<std::size_t>(length), d = static_cast<std::size_t>(dim),
               scales = (d + static_cast<std::size_t>(group) - 1) / static_cast<std::size_t>(group);
    keys.resize(n * d), values.resize(n * d), masses.resize(n), positions.resize(n);
    key_scales.resize(n * scales), value_scales.resize(n * scales);
    std::vector<float> row(d);
    for (index_t s = 0; s < length; ++s) {
      kvfold::to_floats(from.key(s), dim, row.data());
      kvfold::from_floats(row.data(), dim, head().key(s));
      kvfold::to_floats(from.value(s), dim, row.data());
      kvfold::from_floats(row.data(), dim, head().value(s));
      head().log_mass(s) = from.log_mass(s), head().position(s) = from.position(s);
    }
  }
  kvfold::int8_head head() {
    return {keys.data(),   values.data(),    key_scales.data(), value_scales.data(),
            masses.data(), positions.data(), &length,           dim,
            group};
  }
  /// As floats, to attend over.
  kvfold::cache<float> floats() {
    kvfold::cache<float> kv{{.heads = 1, .dim = dim, .capacity = std::max(length, 1)}};
    std::vector<float> k(static_cast<std::size_t>(dim)), v = k;
    for (index_t s = 0; s < length; ++s) {
      kvfold::to_floats(head().key(s), dim, k.data());
      kvfold::to_floats(head().value(s), dim, v.data());
      kv.append(0, k, v);
      kv.head(0).log_mass(s) = masses[static_cast<std::size_t>(s)];
    }
    return kv;
  }
};

/// A plan that a policy makes of a head.
merge_plan plan_of(const kvfold::any_policy& policy, const kvfold::head_view<float>& head,
                   index_t target) {
  auto state = kvfold::make_head_state(policy, head);
  const fixtures::queries queries(head.length(), head.group(), head.dim());
  observe(policy, head, state, queries.view());
  kvfold::slot_scratch scratch;
  merge_plan out;
  plan(policy, head, state, queries.view(), target, scratch, out);
  return out;
}

double off(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    error += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    size += std::pow(static_cast<double>(a[i]), 2);
  }
  return std::sqrt(error / size);
}

}  // namespace

TEST_CASE("int8 rows are off by half a scale at most", "[int8]") {
  const index_t dim = 70;
  for (const index_t group : {1, 16, 32, 70, 128}) {
    for (const float size : {0.0F, 1e-40F, 1e-30F, 1.0F, 1e30F}) {
      const auto x = fixtures::normal(dim, size);
      std::vector<std::int8_t> codes(dim);
      std::vector<float> scales(dim), y(dim);
      const kvfold::int8_row row{codes.data(), scales.data(), group};
      kvfold::from_floats(x.data(), dim, row);
      kvfold::to_floats(row, dim, y.data());
      for (index_t i = 0; i < dim; ++i) {
        const auto e = static_cast<std::size_t>(i);
        const float scale = scales[static_cast<std::size_t>(i / group)];
        CHECK(std::abs(x[e] - y[e]) <= 0.5001F * scale + 1e-38F);
        CHECK(row[i] == y[e]);
      }
      auto again = codes;
      const kvfold::int8_row copy{again.data(), scales.data(), group};
      kvfold::from_floats(y.data(), dim, copy);
      CHECK(again == codes);  // what is in int8 stays as it is
    }
  }
  std::vector<float> x(8, 2.0F);
  for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
    x[5] = bad;
    std::vector<std::int8_t> codes(8);
    std::vector<float> scales(2);
    const kvfold::int8_row row{codes.data(), scales.data(), 4};
    kvfold::from_floats(x.data(), 8, row);
    CHECK((row[3] == 2.0F && std::isnan(row[4]) && std::isnan(row[5]) && std::isnan(row[7])));
  }
}

TEST_CASE("int8 groups of no element are refused, and nothing is written", "[int8][errors]") {
  const std::vector<float> x(8, 2.0F);
  for (const index_t group : {0, -1}) {
    std::vector<std::int8_t> codes(8, 3);
    std::vector<float> scales(8, 5);
    const kvfold::int8_row row{codes.data(), scales.data(), group};
    CHECK_THROWS_WITH(kvfold::from_floats(x.data(), 8, row),
                      Catch::Contains("groups of at least 1 element expected"));
    CHECK(codes == std::vector<std::int8_t>(8, 3));
    CHECK(scales == std::vector<float>(8, 5));
  }
}

TEST_CASE("a plan that evicts moves int8 rows byte for byte", "[int8]") {
  const index_t dim = GENERATE(64, 70);  // of 70 the last group is short
  auto kv = fixtures::random_cache(60, dim, 2);
  int8_cache second(kv.head(0), 32), before = second;
  const merge_plan plan = plan_of(kvfold::h2o{}, kv.head(0), 24);
  apply(plan, kv.head(0));
  apply(plan, second.head());
  REQUIRE(second.length == 24);
  for (index_t r = 0; r < 24; ++r) {
    CHECK(second.head().position(r) == kv.head(0).position(r));
    for (index_t i = 0; i < dim; ++i) {
      CHECK(second.head().key(r)[i] == before.head().key(plan.anchor(r))[i]);
      CHECK(second.head().value(r)[i] == before.head().value(plan.anchor(r))[i]);
    }
  }
  apply(kvfold::slot_removal{.removed = 3}, second.head());
  CHECK((second.length == 23 && second.head().position(3) == kv.head(0).position(23)));
}

TEST_CASE("a plan that merges costs int8 rows one more rounding", "[int8]") {
  const auto check_policy = [](const kvfold::any_policy& policy, const char* name) {
    for (const index_t group : {32, 64}) {
      auto kv = fixtures::random_cache(128, 64, 1);
      int8_cache second(kv.head(0), group);
      auto rounded = second.floats();  // what the plan would make of the rounded rows, in float
      const merge_plan plan = plan_of(policy, kv.head(0), 48);
      apply(plan, kv.head(0));
      apply(plan, second.head());
      apply(plan, rounded.head(0));
      const auto dequantised = second.floats();
      auto floats = dequantised;
      for (index_t r = 0; r < second.length; ++r) {
        for (index_t i = 0; i < 64; ++i) {
          const float scale = second.head().key(r).scales[i / group];
          CHECK(std::abs(floats.head(0).key(r)[i] - rounded.head(0).key(r)[i]) <= 0.51F * scale);
        }
      }
      double worst = 0;
      for (int t = 0; t < 16; ++t) {
        const auto q = fixtures::normal(64);
        std::vector<float> exact(64), from_int8(64);
        attend(kv.head(0), q.data(), exact.data());
        attend(floats.head(0), q.data(), from_int8.data());
        worst = std::max(worst, off(exact, from_int8));
      }
      INFO(name << ", a scale for " << group << ": off by " << 100 * worst << " %");
      CHECK(worst < 0.02);
      CHECK(worst > 1e-5);  // it was int8
    }
  };
  check_policy(kvfold::zsmerge{}, "zsmerge");
  check_policy(kvfold::d2o{.beta = 0}, "d2o");
  check_policy(kvfold::fold{}, "fold");
}

TEST_CASE("a draft model's cache follows the plans of the model", "[second]") {
  auto kv = fixtures::random_cache(50, 16, 4), draft = fixtures::random_cache(50, 6, 1);
  auto expected = draft;
  const merge_plan whole = plan_of(kvfold::attention_matching{.recent = 4}, kv.head(0), 20);
  REQUIRE(whole.has_correction());
  const auto bytes = fixtures::bytes_of(draft.head(0));
  CHECK_THROWS_WITH(apply(whole, draft.head(0)),
                    Catch::Contains("a correction of dim 6 expected, 16 came"));
  CHECK(fixtures::bytes_of(draft.head(0)) == bytes);
  merge_plan plan = whole;
  plan.forget_corrections();  // they were measured on the model's keys and values
  apply(whole, kv.head(0)), apply(plan, draft.head(0));
  REQUIRE(draft.head(0).length() == kv.head(0).length());
  for (index_t r = 0; r < draft.head(0).length(); ++r) {
    CHECK(draft.head(0).position(r) == kv.head(0).position(r));
    CHECK(draft.head(0).log_mass(r) == kv.head(0).log_mass(r));
    for (index_t i = 0; i < 6; ++i) {
      CHECK(draft.head(0).key(r)[i] == expected.head(0).key(whole.anchor(r))[i]);
    }
  }
  CHECK_THROWS_WITH(apply(plan, draft.head(0)), Catch::Contains("a plan of"));
}
