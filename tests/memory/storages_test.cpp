// SPDX-License-Identifier: MIT
// Keys and values that are held as different numbers: in caches of every kind, under every policy.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <iterator>
#include <sstream>
#include <vector>

#include "oracle/blocks.hpp"
#include "oracle/codes.hpp"
#include "support/policies.hpp"
#include "support/saved.hpp"

namespace storages_test {

using kvmeld::index_t;
using kvmeld::storage;

constexpr index_t dim = 32, of_values = 48, group = 2, tokens = 70, target = 40;
const kvmeld::attention_spec spec{.kv_heads = 1,
                                  .group = group,
                                  .key_dim = dim,
                                  .value_dim = of_values,
                                  .rope = fixtures::default_rope};

/// Each of four for keys and values; values in few bits, and keys less their mean, with some.
std::vector<kvmeld::storage_pair> every_storage() {
  std::vector<kvmeld::storage_pair> all{
      {storage::q8_0, storage::q4_0},     {storage::f32, storage::q4_0},
      {storage::q4_0, storage::q4_0},     {storage::q4_0, storage::f16},
      {storage::q8_0, storage::q4_0, 16}, {storage::q4_0, storage::q8_0, 3},
      {storage::f16, storage::q4_0, 64},  {storage::k8, storage::q4_0, 16},
      {storage::k6, storage::q6_0},       {storage::k4, storage::q4_0, 16},
      {storage::k4, storage::f32},        {storage::q6_0, storage::q6_0}};
  const auto four = {storage::f32, storage::f16, storage::bf16, storage::q8_0};
  for (const storage keys : four) {
    for (const storage values : four) {
      all.emplace_back(keys, values);
    }
  }
  return all;
}

kvmeld::cache cache_of(const kvmeld::storage_pair& type) {
  return {
      spec,
      {.capacity = tokens + 9, .keys = type.keys, .values = type.values, .newest = type.newest}};
}

/// `x [dim]` as a storage holds it, keys less their mean as a head of that mean.
std::vector<float> held_as(storage type, std::vector<float> x, const Eigen::half* mean = nullptr) {
  std::vector<std::byte> bytes(kvmeld::row_bytes(type, static_cast<index_t>(x.size())));
  const auto size = static_cast<index_t>(x.size());
  const kvmeld::row<kvmeld::any_scalar> row{
      bytes.data(),
      static_cast<std::ptrdiff_t>(kvmeld::element_bytes(type)),
      type,
      static_cast<std::int16_t>(size),
      0,
      mean};
  kvmeld::detail::store_row(x.data(), row, size);
  kvmeld::to_floats(row, size, x.data());
  return x;
}

/// `x [value_dim]` as the model has it once it is held as `held`: in 4 bits by way of a rotation.
std::vector<float> value_held_as(storage type, std::vector<float> x, storage held) {
  const auto turn = [&] {
    if (type == storage::q4_0 || type == storage::q6_0) {
      kvmeld::detail::hadamard(x.data(), static_cast<index_t>(x.size()));
    }
  };
  turn();
  x = held_as(held, x);
  turn();
  return x;
}
std::vector<float> value_held_as(storage type, std::vector<float> x) {
  return value_held_as(type, std::move(x), type);
}

/// What a row of this storage is held as while it is the last.
storage pushed_as(const kvmeld::storage_pair& type, storage of) {
  return type.newest > 0 && kvmeld::in_blocks(of) ? storage::f16 : of;
}

/// Makes of a row that a push rounds, in a cache of floats that was copied, what it will be.
void round_oldest(const kvmeld::storage_pair& type, const kvmeld::head_ref& copied,
                  const Eigen::half* mean) {
  for (index_t s = 0; s < (type.newest > 0 ? copied.length() : 0); ++s) {
    if (copied.position(s) == copied.next_position() - type.newest) {
      const auto round = [](storage as, const kvmeld::row<kvmeld::any_scalar>& row, index_t size,
                            auto hold) {
        std::vector<float> x(static_cast<std::size_t>(size));
        kvmeld::to_floats(row, size, x.data());
        kvmeld::detail::store_row(hold(as, x).data(), row, size);
      };
      round(type.keys, copied.key(s), dim,
            [&](storage as, const std::vector<float>& x) { return held_as(as, x, mean); });
      round(type.values, copied.value(s), of_values,
            [](storage as, const std::vector<float>& x) { return value_held_as(as, x); });
    }
  }
}

std::vector<float> value_of(const kvmeld::head_ref& head, index_t s) {
  std::vector<float> y(static_cast<std::size_t>(head.value_dim()));
  kvmeld::value_to_floats(head, s, y.data());
  return y;
}

std::vector<float> floats(const kvmeld::row<kvmeld::any_scalar>& x, index_t size) {
  std::vector<float> y(static_cast<std::size_t>(size));
  kvmeld::to_floats(x, size, y.data());
  return y;
}

/// Is the row what the floats become in its storage, but for `off` of its largest number?
bool rounded(const kvmeld::row<kvmeld::any_scalar>& x, const std::vector<float>& from, float off) {
  const auto a = floats(x, static_cast<index_t>(from.size())), b = held_as(x.type, from, x.mean);
  float most = 0, worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    most = std::max(most, std::abs(from[i])), worst = std::max(worst, std::abs(a[i] - b[i]));
  }
  return worst <= off * most;
}

/// What a number may be off where two roundings of nearly the same float differ: a unit.
float unit_of(storage type) {
  return type == storage::f32    ? 1e-4F
         : type == storage::f16  ? 0x1p-9F
         : type == storage::q4_0 ? 0x1.1p-3F
         : type == storage::q6_0 ? 0x1.1p-5F
         : type == storage::k4   ? 0.5F  // of the largest number of a row that is rotated back
         : type == storage::k6   ? 0.15F
                                 : 0x1.1p-6F;
}

template <class Scalar>
std::vector<Scalar> memory_of(index_t rows, index_t size) {
  return std::vector<Scalar>(static_cast<std::size_t>(rows * kvmeld::row_size<Scalar>(size)));
}

TEMPLATE_TEST_CASE("an engine's keys and values may be held as different numbers", "[storages]",
                   float, Eigen::half, Eigen::bfloat16, kvmeld::q8_0, kvmeld::q6_0, kvmeld::q4_0) {
  const auto k = fixtures::normal(tokens * dim), v = fixtures::normal(tokens * of_values);
  const auto holds = [&](auto&& kv, storage of_v) {
    kv.append(kv.heads(0, 0), k, v, tokens);
    REQUIRE(kv.type() == kvmeld::storage_pair(kvmeld::storage_of<TestType>, of_v));
    const auto head = kv.head(0);
    for (index_t s = 0; s < tokens; ++s) {
      const auto key = k.begin() + s * dim, value = v.begin() + s * of_values;
      REQUIRE(floats(head.key(s), dim) == held_as(kvmeld::storage_of<TestType>, {key, key + dim}));
      REQUIRE(value_of(head, s) == value_held_as(of_v, {value, value + of_values}));
    }
  };
  const auto with = [&]<class Values>(Values) {
    const index_t capacity = tokens + 2, slots = 8;
    auto keys = memory_of<TestType>(capacity, dim);
    auto values = memory_of<Values>(capacity, of_values);
    const storage type = kvmeld::storage_of<Values>;
    holds(
        kvmeld::strided_cache(spec, {.capacity = capacity}, kvmeld::rows(keys, kvmeld::layout::nhd),
                              kvmeld::rows(values, kvmeld::layout::hnd)),
        type);
    std::vector<index_t> table{7, 2, 5, 1, 0, 8, 3, 4, 6};
    holds(kvmeld::paged_cache(
              spec, {.capacity = capacity}, kvmeld::rows(keys, kvmeld::layout::pages_nhd),
              kvmeld::rows(values, kvmeld::layout::pages_hnd), {.pages = table, .slots = slots}),
          type);
    holds(cache_of({kvmeld::storage_of<TestType>, type}), type);
  };
  with(float{}), with(Eigen::half{}), with(Eigen::bfloat16{}), with(kvmeld::q8_0{}),
      with(kvmeld::q6_0{}), with(kvmeld::q4_0{});
}

TEST_CASE("LAW: whatever keys and values are held as, a prompt becomes what its numbers become",
          "[storages]") {
  const kvmeld::storage_pair type = GENERATE(from_range(every_storage()));
  for (const fixtures::example& e : fixtures::every_policy()) {
    INFO(e.name << ", keys " << int(type.keys) << ", values " << int(type.values));
    kvmeld::cache kv = cache_of(type), of_floats = cache_of(storage::f32);
    kv.append(kv.heads(0, 0), fixtures::normal(tokens * dim), fixtures::normal(tokens * of_values),
              tokens);
    kvmeld::head_state none({}, 0, tokens + 9), same = none;
    kvmeld::copy(kv.head(0), none, of_floats.head(0), same);
    const fixtures::queries prompt(tokens, group, dim);
    auto state = fixtures::make_state(e.policy, kv), of_f = state;
    fixtures::compress(e.policy, kv, state, prompt.view(), kvmeld::budget{target});
    fixtures::compress(e.policy, of_floats, of_f, prompt.view(), kvmeld::budget{target});
    const auto head = kv.head(0), expected = of_floats.head(0);
    REQUIRE(head.length() == expected.length());
    for (index_t s = 0; s < head.length(); ++s) {
      REQUIRE(head.position(s) == expected.position(s));
      REQUIRE(head.log_mass(s) == Approx(expected.log_mass(s)).margin(1e-3));
      const auto key = head.key(s), row = head.value(s);
      REQUIRE(rounded(key, floats(expected.key(s), dim), unit_of(key.type)));
      auto value = floats(expected.value(s), of_values);
      if (head.rotates_values()) {
        kvmeld::detail::hadamard(value.data(), of_values);
      }
      REQUIRE(rounded(row, value, unit_of(row.type)));
    }
    std::vector<float> out(group * of_values), of_out(out);
    for (int t = 0; t < 6 && kvmeld::declared(e.policy).supports_decode(); ++t) {
      const auto q = fixtures::normal(group * dim), k = fixtures::normal(dim),
                 v = fixtures::normal(of_values);
      kvmeld::copy(kv.head(0), state[0], of_floats.head(0), of_f[0]);
      const Eigen::half* const mean = kv.head(0).key_mean().data();
      round_oldest(type, of_floats.head(0), mean);
      const kvmeld::budget b{target, target + 9};
      fixtures::step(e.policy, kv, state, {q, k, v}, b, out);
      fixtures::step(e.policy, of_floats, of_f,
                     {q, held_as(pushed_as(type, type.keys), k, mean),
                      value_held_as(type.values, v, pushed_as(type, type.values))},
                     b, of_out);
      for (std::size_t i = 0; i < out.size(); ++i) {
        REQUIRE(out[i] == Approx(of_out[i]).margin(1e-4));
      }
    }
  }
}

TEST_CASE("a cache of two storages is saved, and goes on where it is loaded",
          "[storages][serialize]") {
  const kvmeld::any_policy_or_peer policy = kvmeld::zsmerge{.residual = 2};
  const kvmeld::storage_pair type = GENERATE(from_range(every_storage()));
  kvmeld::cache one = cache_of(type), other = cache_of(type);
  auto state = fixtures::make_state(policy, one), loaded = fixtures::make_state(policy, other);
  std::vector<float> out(group * of_values), again(out);
  const auto step = [&](auto& kv, auto& of, const std::vector<float>& x, std::vector<float>& to) {
    fixtures::step(
        policy, kv, of,
        {std::vector(x.begin(), x.begin() + group * dim), std::vector(x.begin(), x.begin() + dim),
         std::vector(x.begin(), x.begin() + of_values)},
        kvmeld::budget{12}, to);
  };
  for (int t = 0; t < 30; ++t) {
    step(one, state, fixtures::normal(group * dim), out);
  }
  const std::string bytes = fixtures::saved(policy, one, state);
  std::istringstream in(bytes);
  fixtures::load(in, policy, other, loaded);
  CHECK(fixtures::everything(other, loaded) == fixtures::everything(one, state));
  CHECK(fixtures::saved(policy, other, loaded) == bytes);
  const auto x = fixtures::normal(group * dim);
  step(one, state, x, out), step(other, loaded, x, again);
  CHECK(out == again);
  const storage unlike = type.values == storage::f32 ? storage::f16 : storage::f32;
  const bool has_newest = kvmeld::in_blocks(type.keys) || kvmeld::in_blocks(unlike);
  kvmeld::cache elsewhere = cache_of({type.keys, unlike, has_newest ? type.newest : 0});
  auto refused = fixtures::make_state(policy, elsewhere);
  std::istringstream refused_in(bytes);
  CHECK_THROWS_WITH(
      fixtures::load(refused_in, policy, elsewhere, refused),
      Catch::Contains(has_newest || type.newest == 0 ? "scalar of values" : "version 5"));
  one.shrink(14);
  CHECK(fixtures::everything(one, state).size() == fixtures::everything(other, loaded).size());
  const auto slots = static_cast<std::size_t>(one.head(0).length());
  const std::size_t in_half = (kvmeld::in_blocks(type.keys) ? 2 * dim : 0) +
                              (kvmeld::in_blocks(type.values) ? 2 * of_values : 0);
  CHECK(
      one.bytes() ==
      slots * (kvmeld::row_bytes(type.keys, dim) + kvmeld::row_bytes(type.values, of_values) + 8) +
          std::min(slots, static_cast<std::size_t>(kvmeld::rows_in_half(type.newest))) * in_half +
          (kvmeld::is_centred(type.keys) ? 2 * dim : 0));
}

TEST_CASE("attention over blocks is that over the numbers that their formats say", "[storages]") {
  using kvmeld::storage;
  const index_t values = GENERATE(64, 80, 48, 5), size = GENERATE(32, 96, 5);
  for (const storage of_k :
       {storage::q8_0, storage::q6_0, storage::q4_0, storage::k8, storage::k6, storage::k4}) {
    kvmeld::cache kv({.kv_heads = 1, .group = group, .key_dim = size, .value_dim = values},
                     {.capacity = tokens, .keys = of_k, .values = storage::q4_0});
    const auto given = fixtures::normal(tokens * values), q = fixtures::normal(group * size),
               bias = fixtures::normal(size, 3);
    auto keys = fixtures::normal(tokens * size);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      keys[i] += bias[i % bias.size()];
    }
    kv.append(kv.heads(0, 0), keys, given, tokens);
    const auto head = kv.head(0);
    const bool centred = kvmeld::is_centred(of_k);
    const int bits = of_k == storage::q8_0 || of_k == storage::k8   ? 8
                     : of_k == storage::q6_0 || of_k == storage::k6 ? 6
                                                                    : 4;
    std::vector<double> mean(static_cast<std::size_t>(size));
    for (std::size_t i = 0; i < head.key_mean().size(); ++i) {
      double sum = 0;
      for (std::size_t k = i + 4 * bias.size(); k < keys.size(); k += bias.size()) {
        sum += double{keys[k]};  // but of the first four tokens
      }
      mean[i] = double{static_cast<float>(head.key_mean()[i])};
      REQUIRE(mean[i] == Approx(sum / (tokens - 4)).epsilon(6e-4).margin(1e-4));  // in half
    }
    const auto rotated = [&](const std::vector<double>& x) {
      return centred ? oracle::hadamard(x) : x;
    };
    head.log_mass(3) = 1.5F;
    std::vector<float> out(static_cast<std::size_t>(group * values));
    kvmeld::attend(head, q.data(), out.data());
    std::vector<float> of_rows;  // queries as they meet the rows
    for (auto x = q.begin(); x != q.end(); x += size) {
      const auto y = rotated({x, x + size});
      std::transform(y.begin(), y.end(), std::back_inserter(of_rows),
                     [](double e) { return static_cast<float>(e); });
    }
    const auto seen = oracle::in_16_bits(of_rows, size);
    for (index_t g = 0; g < group; ++g) {
      std::vector<double> sum(static_cast<std::size_t>(values));
      double all = 0;
      for (index_t s = 0; s < tokens; ++s) {
        const auto k = oracle::blocks(head.key(s).data, bits, size), key = rotated(k),
                   v = oracle::hadamard(oracle::blocks(head.value(s).data, 4, values));
        const auto as_floats = floats(head.key(s), size);
        double logit = 0, off = 0;
        for (index_t i = 0; i < size; ++i) {
          const auto at = static_cast<std::size_t>(i),
                     of_q = static_cast<std::size_t>(g * size + i);
          logit += (k[at] * double{seen[of_q]} + mean[at] * double{q[of_q]}) /
                   std::sqrt(static_cast<double>(size));
          REQUIRE(double{as_floats[at]} == Approx(key[at] + mean[at]).margin(1e-5));
          REQUIRE(head.key(s)[i] == as_floats[at]);
          off += std::pow(key[at] + mean[at] - double{keys[static_cast<std::size_t>(s * size + i)]},
                          2);
        }
        if (centred) {  // of numbers up to 3 or 4, by a unit of their largest
          REQUIRE(std::sqrt(off / size) < 4 / std::exp2(bits - 1));
        }
        const double p = std::exp(logit + double{head.log_mass(s)});
        all += p;
        const auto held = value_of(head, s);
        for (std::size_t i = 0; i < sum.size(); ++i) {
          sum[i] += p * v[i];
          REQUIRE(double{held[i]} == Approx(v[i]).margin(1e-5));
          // A rotated number is off by a scale at most: of 8 numbers up to 4 or so.
          const auto at = static_cast<std::size_t>(s * values) + i;
          REQUIRE(v[i] == Approx(double{given[at]}).margin(1.2));
        }
      }
      for (std::size_t i = 0; i < sum.size(); ++i) {
        const double o = double{out[static_cast<std::size_t>(g * values) + i]};
        CHECK(o == Approx(sum[i] / all).margin(1e-5));
      }
    }
  }
}

TEMPLATE_TEST_CASE(
    "a block of few bits is off by a scale, stays as it is when stored again, and may be NaN",
    "[storages]", kvmeld::q4_0, kvmeld::q6_0) {
  using block_of = TestType;
  constexpr int bits = std::same_as<block_of, kvmeld::q4_0> ? 4 : 6, half = 1 << (bits - 1);
  for (const float size : {0.0F, 1e-30F, 1e-6F, 1e-4F, 1.0F, 1e4F}) {
    for (int draw = 0; draw < 20; ++draw) {
      const auto x = fixtures::normal(block_of::size, size);
      const block_of block = block_of::of(x.data());
      const auto y =
          oracle::blocks(reinterpret_cast<const std::byte*>(&block), bits, block_of::size);
      double most = 0;
      float again[block_of::size];
      for (std::size_t i = 0; i < x.size(); ++i) {
        most = std::abs(x[i]) > std::abs(most) ? double{x[i]} : most;
        again[i] = block[static_cast<index_t>(i)];
        REQUIRE(double{again[i]} == y[i]);
      }
      const double scale = std::abs(most / half), rounding = std::max(scale * 0x1p-11, 0x1p-25);
      for (std::size_t i = 0; i < x.size(); ++i) {
        const bool other_end =
            double{x[i]} * most < 0 && std::abs(double{x[i]}) > (half - 0.5) * scale;
        REQUIRE(std::abs(double{x[i]} - y[i]) <=
                (other_end ? 1.001 : 0.501) * scale + half * rounding);
      }
      const block_of stored_again = block_of::of(again);
      CHECK(std::memcmp(&stored_again, &block, sizeof block) == 0);
    }
  }
  for (const float bad : {std::nanf(""), INFINITY, -INFINITY, half * 6.6e4F, -1e30F}) {
    auto x = fixtures::normal(block_of::size);
    x[5] = bad;
    CHECK((std::isnan(block_of::of(x.data())[0]) && std::isnan(block_of::of(x.data())[31])));
  }
  std::vector<float> largest(block_of::size, half * 6.5e4F);
  CHECK(block_of::of(largest.data())[3] == Approx(half * 6.5e4F).epsilon(1e-3));
}

}  // namespace storages_test
