// SPDX-License-Identifier: MIT
// Keys and values in Q8_0: what a block holds, and policies over rows of blocks.
#include <catch2/catch.hpp>
#include <cstring>
#include <vector>

#include "kvmeld/memory/row.hpp"
#include "oracle/codes.hpp"
#include "support/policies.hpp"
#include "support/saved.hpp"

namespace memory_q8_0_test {

using kvmeld::index_t;
using kvmeld::q8_0;

/// Numbers of a row that are in Q8_0 already.
std::vector<float> representable(index_t n) {
  auto x = fixtures::normal(n);
  std::vector<q8_0> blocks(static_cast<std::size_t>(kvmeld::row_size<q8_0>(n)));
  kvmeld::detail::store_row(x.data(), kvmeld::row<q8_0>{blocks.data()}, n);
  kvmeld::to_floats(kvmeld::row<q8_0>{blocks.data()}, n, x.data());
  return x;
}

/// Half of the scale that a block of these numbers has.
float half_a_scale(const float* x) {
  float most = 0;
  for (index_t i = 0; i < q8_0::size; ++i) {
    most = std::max(most, std::abs(x[i]));
  }
  return most / 254;
}

/// Is each row of `a` the same row of `b` rounded to Q8_0, but for `rounding` of its largest
/// number?
bool rounded(const auto& a, const auto& b, index_t dim, float rounding) {
  std::vector<float> x(static_cast<std::size_t>(kvmeld::row_size<q8_0>(dim) * q8_0::size)), y = x;
  kvmeld::to_floats(a, dim, x.data()), kvmeld::to_floats(b, dim, y.data());
  bool all = true;
  for (index_t i = 0; i < dim; ++i) {
    const auto e = static_cast<std::size_t>(i);
    const float half = half_a_scale(y.data() + i / q8_0::size * q8_0::size);
    all = all && std::abs(x[e] - y[e]) <= half * (1.002F + 254 * rounding);
  }
  return all;
}

/// Are the codes of the last block behind `dim` numbers 0?
bool filled_with_zeros(const kvmeld::row<q8_0>& x, index_t dim) {
  const index_t used = dim % q8_0::size;
  const q8_0& last = x.data[dim / q8_0::size];
  return used == 0 || std::all_of(last.codes + used, last.codes + q8_0::size,
                                  [](std::int8_t code) { return code == 0; });
}

/// A cache of Q8_0 and one of floats that hold the same numbers.
struct pair_of_caches {
  fixtures::cache<q8_0> blocks;
  fixtures::cache<float> floats;

  explicit pair_of_caches(index_t tokens, index_t dim = 64, index_t group = 2)
      : blocks(fixtures::random_cache<float, q8_0>(tokens, dim, group, tokens + 40)),
        floats({.heads = 1, .group = group, .dim = dim, .capacity = tokens + 40}) {
    kvmeld::head_state none({}, 0, tokens + 40), same = none;
    kvmeld::copy(blocks.head(0), none, floats.head(0), same);
  }
};

TEST_CASE("a block is off by half a scale, and stays as it is when it is stored again", "[q8_0]") {
  for (const float size : {0.0F, 1e-30F, 1e-4F, 1.0F, 1e4F}) {
    for (int draw = 0; draw < 20; ++draw) {
      const auto x = fixtures::normal(q8_0::size, size);
      const q8_0 block = q8_0::of(x.data());
      float y[q8_0::size];
      const auto scale = static_cast<float>(block.scale);
      for (index_t i = 0; i < q8_0::size; ++i) {
        y[i] = block[i];
        // Of tiny numbers the scale itself has few bits.
        const float of_scale = 127 * std::abs(half_a_scale(x.data()) * 2 - scale);
        CHECK(std::abs(x[static_cast<std::size_t>(i)] - y[i]) <= 0.5001F * scale + of_scale);
        CHECK(y[i] == scale * static_cast<float>(block.codes[i]));
      }
      const q8_0 again = q8_0::of(y);
      CHECK(std::memcmp(&again, &block, sizeof block) == 0);
    }
  }
}

TEST_CASE("a block with NaN, Inf or a number that no scale reaches is NaN whole", "[q8_0]") {
  for (const float bad : {std::nanf(""), INFINITY, -INFINITY, 9e6F, -1e30F}) {
    auto x = fixtures::normal(2 * q8_0::size);
    x[5] = bad;
    std::vector<q8_0> blocks(2);
    const kvmeld::row<q8_0> row{blocks.data()};
    kvmeld::detail::store_row(x.data(), row, 2 * q8_0::size);
    for (index_t i = 0; i < 2 * q8_0::size; ++i) {
      CHECK(std::isnan(row[i]) == (i < q8_0::size));
    }
    std::vector<float> floats(x.size());
    kvmeld::to_floats(row, 2 * q8_0::size, floats.data());
    CHECK((std::isnan(floats[0]) && floats[40] == row[40]));
  }
  std::vector<float> largest(q8_0::size, 8.3e6F);
  CHECK(q8_0::of(largest.data())[3] == Approx(8.3e6F).epsilon(1e-3));
}

TEST_CASE("attention over Q8_0 is that over the numbers that it holds, with queries in 16 bits",
          "[q8_0]") {
  double off = 0, off_in_16_bits = 0, size = 0;
  for (const index_t dim : {32, 96, 256, 80, 100, 112, 5}) {
    pair_of_caches kv(70, dim, 3);
    const auto q = fixtures::normal(3 * dim);
    std::vector<float> out(static_cast<std::size_t>(3 * dim)), expected = out, rounded = out;
    kvmeld::attend(kv.blocks.head(0), q.data(), out.data());
    kvmeld::attend(kv.floats.head(0), q.data(), expected.data());
    kvmeld::attend(kv.floats.head(0), oracle::in_16_bits(q, dim).data(), rounded.data());
    for (std::size_t i = 0; i < out.size(); ++i) {
      off += std::pow(out[i] - expected[i], 2), size += std::pow(expected[i], 2);
      off_in_16_bits += std::pow(out[i] - rounded[i], 2);
    }
  }
  CHECK(std::sqrt(off / size) < 4e-5);
  CHECK(std::sqrt(off_in_16_bits / size) < 1e-6);
}

TEST_CASE("LAW: a prompt in Q8_0 becomes what its numbers become in floats, rounded", "[q8_0]") {
  for (const fixtures::example& e : fixtures::every_policy()) {
    const index_t dim = GENERATE(64, 80);
    INFO(e.name << ", dim " << dim);
    pair_of_caches kv(120, dim);
    const fixtures::queries prompt(120, 2, dim);
    auto state = fixtures::make_state(e.policy, kv.blocks), of_floats = state;
    fixtures::compress(e.policy, kv.blocks, state, prompt.view(), kvmeld::budget{50});
    fixtures::compress(e.policy, kv.floats, of_floats, prompt.view(), kvmeld::budget{50});
    const auto head = kv.blocks.head(0);
    const auto expected = kv.floats.head(0);
    REQUIRE(head.length() == expected.length());
    for (index_t s = 0; s < head.length(); ++s) {
      CHECK(head.position(s) == expected.position(s));
      CHECK(head.log_mass(s) == Approx(expected.log_mass(s)).margin(1e-3));
      CHECK(rounded(head.key(s), expected.key(s), dim, 1e-3F));
      CHECK(rounded(head.value(s), expected.value(s), dim, 1e-3F));
      CHECK((filled_with_zeros(head.key(s), dim) && filled_with_zeros(head.value(s), dim)));
    }
  }
}

TEST_CASE("LAW: what evicts decodes over Q8_0 as over floats", "[q8_0]") {
  for (const kvmeld::any_policy_or_peer& policy : std::vector<kvmeld::any_policy_or_peer>{
           kvmeld::h2o{}, kvmeld::snapkv{.window = 8}, kvmeld::tova{}, kvmeld::streaming_llm{}}) {
    INFO(policy.name());
    pair_of_caches kv(60);
    const fixtures::queries prompt(60, 2, 64);
    auto state = fixtures::make_state(policy, kv.blocks), of_floats = state;
    fixtures::compress(policy, kv.blocks, state, prompt.view(), kvmeld::budget{40});
    fixtures::compress(policy, kv.floats, of_floats, prompt.view(), kvmeld::budget{40});
    std::vector<float> out(128), expected(128);
    for (int t = 0; t < 50; ++t) {
      const auto q = fixtures::normal(128), k = representable(64), v = representable(64);
      fixtures::step(policy, kv.blocks, state, {q, k, v}, kvmeld::budget{40}, out);
      fixtures::step(policy, kv.floats, of_floats, {q, k, v}, kvmeld::budget{40}, expected);
      for (std::size_t i = 0; i < out.size(); ++i) {
        REQUIRE(out[i] == Approx(expected[i]).margin(1e-4));
      }
    }
    CHECK(fixtures::bytes_of(kv.blocks.head(0)) == fixtures::bytes_of(kv.floats.head(0)));
  }
}

TEST_CASE("a compressed cache goes to Q8_0 and decodes on from there", "[q8_0]") {
  const kvmeld::fold policy;
  pair_of_caches kv(120);
  const fixtures::queries prompt(120, 2, 64);
  auto state = fixtures::make_state(policy, kv.floats),
       held = fixtures::make_state(policy, kv.blocks);
  fixtures::compress(policy, kv.floats, state, prompt.view(), kvmeld::budget{50});
  kvmeld::copy(kv.floats.head(0), state[0], kv.blocks.head(0), held[0]);
  REQUIRE(kv.blocks.head(0).length() == 50);
  for (index_t s = 0; s < 50; ++s) {
    CHECK(rounded(kv.blocks.head(0).value(s), kv.floats.head(0).value(s), 64, 0));
    CHECK(kv.blocks.head(0).log_mass(s) == kv.floats.head(0).log_mass(s));
  }
  CHECK(fixtures::everything(kv.floats, state).size() ==
        fixtures::everything(kv.blocks, held).size());
  std::vector<float> out(128), expected(128);
  double off = 0, size = 0;
  for (int t = 0; t < 4; ++t) {  // until slots are merged again, which rounding may choose
    const auto q = fixtures::normal(128), k = fixtures::normal(64), v = fixtures::normal(64);
    fixtures::step(policy, kv.blocks, held, {q, k, v}, kvmeld::budget{50, 55}, out);
    fixtures::step(policy, kv.floats, state, {q, k, v}, kvmeld::budget{50, 55}, expected);
    for (std::size_t i = 0; i < out.size(); ++i) {
      off += std::pow(out[i] - expected[i], 2), size += std::pow(expected[i], 2);
    }
  }
  CHECK(std::sqrt(off / size) < 0.02);
  CHECK(std::sqrt(off / size) > 1e-5);  // it was int8
}

TEST_CASE("Q8_0 lies in rows of blocks, strided and in pages", "[q8_0]") {
  const index_t dim = GENERATE(64, 48);
  const index_t heads = 2, capacity = 12, tokens = 9, slots = 4;
  const fixtures::cache_shape shape{.heads = heads, .group = 2, .dim = dim, .capacity = capacity};
  std::vector<float> keys, values;
  for (index_t s = 0; s < tokens; ++s) {
    const auto key = representable(dim), value = representable(dim);
    keys.insert(keys.end(), key.begin(), key.end());
    values.insert(values.end(), value.begin(), value.end());
  }
  const std::size_t rows = 32 * heads * 2;  // of two blocks
  std::vector<q8_0> k(rows), v(rows);
  using layout = fixtures::layout<q8_0>;
  const auto holds = [&](auto& kv) {
    kv.append(1, std::span<const float>(keys), std::span<const float>(values));
    for (index_t s = 0; s < tokens; ++s) {
      for (index_t i = 0; i < dim; ++i) {
        const auto e = static_cast<std::size_t>(s * dim + i);
        REQUIRE((kv.head(1).key(s)[i] == keys[e] && kv.head(1).value(s)[i] == values[e]));
        const kvmeld::head_ref any = kv.head(1);
        REQUIRE(any.value(s).from(i / 32 * 32)[i % 32] == values[e]);
      }
      REQUIRE(filled_with_zeros(kv.head(1).key(s), dim));
    }
  };
  fixtures::strided_view<q8_0> strided(shape, layout::token_head_dim(k.data(), heads, dim),
                                       layout::head_token_dim(v.data(), capacity, dim));
  holds(strided);
  std::vector<index_t> table{5, 0, 3};
  fixtures::paged_view<q8_0> paged(shape, layout::page_slot_head_dim(k.data(), slots, heads, dim),
                                   layout::page_head_slot_dim(v.data(), slots, heads, dim),
                                   {table.data(), slots, 0});
  holds(paged);
  fixtures::cache<q8_0> own(shape);
  holds(own);
  CHECK(own.bytes() == tokens * (2 * 68 + 8));  // two blocks, log-mass and position
}

TEST_CASE("blocks that do not lie side by side are refused", "[q8_0][errors]") {
  std::vector<q8_0> x(64);
  const fixtures::layout<q8_0> rows{x.data(), 16, 4, 1}, apart{x.data(), 16, 4, 2};
  index_t page = 0;
  const fixtures::cache_shape whole{.heads = 1, .dim = 64, .capacity = 4};
  CHECK_THROWS_WITH(
      fixtures::strided_view<q8_0>(whole, rows, apart),
      Catch::Contains("expected values of blocks with an element stride of 1, got 2"));
  CHECK_THROWS_WITH(fixtures::paged_view<q8_0>(whole, apart, rows, {&page, 4, 0}),
                    Catch::Contains("expected keys of blocks with an element stride of 1, got 2"));
}

TEST_CASE("Q8_0 is saved block by block, and goes on", "[q8_0][serialize]") {
  const kvmeld::any_policy_or_peer policy = kvmeld::h2o{};
  fixtures::cache<q8_0> one({.heads = 2, .group = 1, .dim = 32, .capacity = 20}),
      other(one.shape());
  auto state = fixtures::make_state(policy, one), loaded = fixtures::make_state(policy, other);
  std::vector<float> out(64), again(64);
  for (int t = 0; t < 25; ++t) {
    const auto x = fixtures::normal(64);
    fixtures::step(policy, one, state, {x, x, x}, kvmeld::budget{12}, out);
  }
  const std::string bytes = fixtures::saved(policy, one, state);
  std::istringstream in(bytes);
  fixtures::load(in, policy, other, loaded);
  CHECK(fixtures::everything(other, loaded) == fixtures::everything(one, state));
  CHECK(fixtures::saved(policy, other, loaded) == bytes);
  const auto x = fixtures::normal(64);
  fixtures::step(policy, one, state, {x, x, x}, kvmeld::budget{12}, out);
  fixtures::step(policy, other, loaded, {x, x, x}, kvmeld::budget{12}, again);
  CHECK(out == again);
  fixtures::cache<float> floats(one.shape());
  auto unlike = fixtures::make_state(policy, floats);
  std::istringstream in_floats(bytes);
  CHECK_THROWS_WITH(fixtures::load(in_floats, policy, floats, unlike),
                    Catch::Contains("8: k4) 0, got 3"));
}

}  // namespace memory_q8_0_test
