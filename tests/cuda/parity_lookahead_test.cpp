// SPDX-License-Identifier: MIT
// Lookahead on the device is that of evaluate.
#include <catch2/catch.hpp>

#include "../../examples/evaluate/reference_queries.hpp"
#include "cuda/mirror.hpp"
#include "kvmeld/cuda/score/lookahead.cuh"
#include "kvmeld/policies/full_cache.hpp"
#include "kvmeld/score/queries.hpp"

namespace kvmeld::cuda {
namespace parity_lookahead_test {

struct lookahead_case {
  index_t tokens, count, dim, group;
  rotary turn = rotary::halves(10'000);
  double tolerance = 1e-5;
};

/// LAW: the same queries at the same positions, for all heads and for some of them. Every further
/// head has seen five tokens more, and its queries go five positions further.
template <class Host, class Scalar = typename device_scalar<Host>::type>
void check_lookahead(const lookahead_case& x) {
  using device_type = row_number<Scalar>;
  INFO(x.tokens << " tokens, " << x.count << " queries, dim " << x.dim << ", group " << x.group);
  constexpr index_t heads = 3;
  const cache_case c{
      .heads = heads, .capacity = x.tokens + 15, .dim = x.dim, .group = x.group, .rope = &x.turn};
  auto kv = cache_of<Host>(c);
  emulator::chance random{7};
  const auto numbers = [&](std::size_t n) {
    std::vector<float> all(n);
    for (float& v : all) {
      v = whole(random, 8);
    }
    return all;
  };
  const auto rows = static_cast<std::size_t>(x.tokens * x.dim);
  for (index_t h = 0; h < heads; ++h) {
    const auto keys = numbers(rows);
    kv.append(h, keys, keys);
  }
  const auto q = numbers(rows * static_cast<std::size_t>(heads * x.group));
  const auto own = prompt_queries(q.data(), x.tokens, heads, x.group, x.dim);
  auto wanted = evaluate::lookahead(kv, own, {.count = x.count});
  for (index_t h = 1; h < heads; ++h) {
    const auto more = numbers(static_cast<std::size_t>(5 * h * x.dim));
    kv.append(h, more, more);
  }
  const full_cache nothing;
  const auto state = fixtures::make_state(nothing, kv);
  mirror<Host, Scalar> twin(nothing, kv, state, c);
  std::vector<device_type> stored;
  for (const float v : q) {
    stored.push_back(from_float<device_type>(v));
  }
  device_buffer<device_type> queries(stored);

  const lookahead_options options{.count = x.count};
  const index_t n = lookahead_count(x.tokens, options);
  REQUIRE(n == wanted.count());
  const std::vector<index_t> two{2, 0};
  device_buffer<index_t> some(two);
  for (const bool all : {true, false}) {
    const std::size_t places = all ? heads : two.size();
    const auto view = all ? twin.device.view() : twin.device.view().with_active(some.data(), 2);
    device_buffer<device_type> out(places * static_cast<std::size_t>(x.group * n * x.dim));
    device_buffer<index_t> position(places * static_cast<std::size_t>(n));
    lookahead(view, query_rows<device_type>{queries.data(), x.tokens, own.head, own.group, own.row},
              options, out.data(), position.data(), order(3));
    double worst = 0;
    for (std::size_t place = 0; place < places; ++place) {
      const auto h = static_cast<index_t>(place);  // queries are by place
      const index_t further = 5 * (all ? h : two[place]);
      for (index_t g = 0; g < x.group; ++g) {
        for (index_t i = 0; i < n; ++i) {
          CHECK(position.host()[h * n + i] == wanted.position(i) + further);
          const auto at =
              ((static_cast<std::ptrdiff_t>(place) * x.group + g) * n + i) * std::ptrdiff_t{x.dim};
          for (index_t d = 0; d < x.dim; ++d) {
            const double a = to_float(out.host()[at + d]), b = wanted.at(h, g, i)[d];
            worst = worse(worst, std::abs(a - b) / (std::abs(b) + 1));
          }
        }
      }
    }
    CHECK(worst <= x.tolerance);
    CHECK((out.intact() && position.intact() && queries.intact()));
  }
}

TEST_CASE("lookahead") {
  check_lookahead<float>({.tokens = 40, .count = 16, .dim = 16, .group = 2});
  check_lookahead<float>({.tokens = 40, .count = 16, .dim = 17, .group = 1});  // an odd one stays
  check_lookahead<float>({.tokens = 300, .count = 256, .dim = 8, .group = 1});
  check_lookahead<float>({.tokens = 12,
                          .count = 256,
                          .dim = 32,
                          .group = 3,
                          .turn = rotary::interleaved(500'000).llama3({.original_context = 16})});
  check_lookahead<float>({.tokens = 1, .count = 4, .dim = 8, .group = 1});
  check_lookahead<host_scalar<q8_0<float>>, q8_0<float>>(
      {.tokens = 40, .count = 16, .dim = 16, .group = 2});
  check_lookahead<Eigen::half>(
      {.tokens = 40, .count = 16, .dim = 16, .group = 2, .tolerance = 1e-3});
  check_lookahead<Eigen::bfloat16>(
      {.tokens = 40, .count = 16, .dim = 16, .group = 2, .tolerance = 8e-3});
}

TEST_CASE("lookahead refuses what it cannot move") {
  device_cache<float> kv({.heads = 1, .capacity = 8, .dim = 8, .group = 1}, {4}, 1);
  CHECK_THROWS_WITH(lookahead_count(0), "kvmeld: cuda lookahead: expected queries");
  CHECK_THROWS_WITH(lookahead_count(5, {.count = 0}),
                    "kvmeld: cuda lookahead: expected at least 1 query, got 0");
  CHECK_THROWS_WITH(
      lookahead<float>(kv.view(), query_rows<float>{.count = 3}, {}, nullptr, nullptr, {}),
      "kvmeld: cuda lookahead: expected queries, positions and an output, got null");
  float rows[3 * 8] = {};
  index_t numbers[3] = {};
  query_rows<float> several{.data = rows, .count = 3};
  several.indptr = numbers, several.heads = 1;
  CHECK_THROWS_WITH(lookahead(kv.view(), several, {}, rows, numbers, {}),
                    "kvmeld: cuda lookahead: expected prompts of one length, got an indptr");
}

}  // namespace parity_lookahead_test
}  // namespace kvmeld::cuda
