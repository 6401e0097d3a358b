// SPDX-License-Identifier: MIT
// The newest rows of a head in half, and when they are rounded to blocks: by what each token's
// numbers become, whatever moves slots, copies or saves them.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/policies/fold.hpp"
#include "kvmeld/policies/h2o.hpp"
#include "kvmeld/policies/streaming_llm.hpp"
#include "oracle/blocks.hpp"
#include "support/fixtures.hpp"

namespace newest_rows_test {

using kvmeld::index_t;
using kvmeld::storage;
using kvmeld::storage_pair;
using numbers = std::vector<float>;

constexpr index_t dim = 64, of_values = 32, group = 3, capacity = 300;
const kvmeld::attention_spec spec{.kv_heads = 1,
                                  .group = group,
                                  .key_dim = dim,
                                  .value_dim = of_values,
                                  .rope = fixtures::default_rope};

kvmeld::cache cache_of(const storage_pair& type, index_t slots = capacity) {
  return {spec,
          {.capacity = slots, .keys = type.keys, .values = type.values, .newest = type.newest}};
}

const std::vector<storage_pair> every_type = {
    {storage::q8_0, storage::q4_0, 16}, {storage::q8_0, storage::q8_0, 5},
    {storage::q4_0, storage::q4_0, 64}, {storage::f16, storage::q4_0, 1},
    {storage::q8_0, storage::f32, 16},  {storage::k8, storage::q4_0, 16},
    {storage::k6, storage::q6_0, 3},    {storage::k4, storage::q4_0, 64}};

numbers in_half(numbers x) {
  for (float& e : x) {
    e = static_cast<float>(static_cast<Eigen::half>(e));
  }
  return x;
}
/// By the encoder, and the numbers that the oracle reads in its blocks; less a mean, by way of it
/// and a rotation.
numbers in_storage(storage type, numbers x, const numbers& mean = {}) {
  const auto size = static_cast<index_t>(x.size());
  if (kvmeld::is_centred(type)) {
    std::transform(x.begin(), x.end(), mean.begin(), x.begin(), std::minus<>());
    kvmeld::detail::hadamard(x.data(), size);
    x = in_storage(kvmeld::lies_as(type), x);
    kvmeld::detail::hadamard(x.data(), size);
    std::transform(x.begin(), x.end(), mean.begin(), x.begin(), std::plus<>());
    return x;
  }
  std::vector<std::byte> bytes(kvmeld::row_bytes(type, size));
  const kvmeld::row<kvmeld::any_scalar> row{
      bytes.data(), static_cast<std::ptrdiff_t>(kvmeld::element_bytes(type)), type};
  kvmeld::detail::store_row(x.data(), row, size);
  numbers y(x);
  if (kvmeld::in_blocks(type)) {
    const int bits = type == storage::q8_0 ? 8 : type == storage::q6_0 ? 6 : 4;
    const auto read = oracle::blocks(bytes.data(), bits, size);
    std::transform(read.begin(), read.end(), y.begin(),
                   [](double e) { return static_cast<float>(e); });
  } else {
    kvmeld::to_floats(row, size, y.data());
  }
  return y;
}
numbers rotated(storage type, numbers x) {
  if (type == storage::q4_0 || type == storage::q6_0) {
    kvmeld::detail::hadamard(x.data(), static_cast<index_t>(x.size()));
  }
  return x;
}
numbers floats(const kvmeld::row<kvmeld::any_scalar>& row, index_t size) {
  numbers x(kvmeld::as_size(size));
  kvmeld::to_floats(row, size, x.data());
  return x;
}
std::string saved(auto& meld) {
  std::ostringstream out;
  meld.save(out, 0);
  return out.str();
}

/// What each token is held as, by its history alone.
struct history {
  storage_pair type;
  std::vector<numbers> keys = {}, values = {};  // as they were given; values rotated
  std::vector<char> was_in_half = {};
  numbers mean = {};  // of the keys at hand when one was rounded first

  void append(kvmeld::cache& kv, index_t tokens) {
    auto k = fixtures::normal(tokens * dim);
    const auto v = fixtures::normal(tokens * of_values);
    for (std::size_t i = 0; i < k.size(); i += 5) {
      k[i] += 0.05F * static_cast<float>(i % dim);  // so that the mean is not 0
    }
    kv.append(kv.heads(0, 0), k, v, tokens);
    for (index_t t = 0; t < tokens; ++t) {
      keys.emplace_back(k.begin() + t * dim, k.begin() + (t + 1) * dim);
      values.push_back(
          rotated(type.values, {v.begin() + t * of_values, v.begin() + (t + 1) * of_values}));
      was_in_half.push_back(t >= tokens - type.newest ? 1 : 0);
    }
    if (kvmeld::is_centred(type.keys) && mean.empty() &&
        keys.size() > kvmeld::as_size(kvmeld::rows_in_half(type.newest))) {
      std::vector<double> sum(dim);
      for (std::size_t p = kvmeld::first_in_half; p < keys.size(); ++p) {
        const numbers x = p < keys.size() - kvmeld::as_size(tokens) ? in_half(keys[p]) : keys[p];
        std::transform(sum.begin(), sum.end(), x.begin(), sum.begin(), std::plus<>());
      }
      for (std::size_t i = 0; i < dim; ++i) {
        mean.push_back(static_cast<float>(kv.head(0).key_mean()[i]));
        const double expected = sum[i] / static_cast<double>(keys.size() - kvmeld::first_in_half);
        REQUIRE(double{mean[i]} == Approx(expected).epsilon(1e-3).margin(1e-6));
      }
    }
  }
  numbers held(storage as, const numbers& x, std::size_t position) const {
    if (!kvmeld::in_blocks(as)) {
      return in_storage(as, x);
    }
    const bool newest =
        position + kvmeld::as_size(type.newest) >= keys.size() || position < kvmeld::first_in_half;
    return newest                       ? in_half(x)
           : was_in_half[position] != 0 ? in_storage(as, in_half(x), mean)
                                        : in_storage(as, x, mean);
  }
  void check(const kvmeld::head_ref& head) const {
    REQUIRE(head.next_position() == static_cast<index_t>(keys.size()));
    for (index_t s = 0; s < head.length(); ++s) {
      const auto p = kvmeld::as_size(head.position(s));
      CAPTURE(s, p);
      REQUIRE(floats(head.key(s), dim) == held(type.keys, keys[p], p));
      REQUIRE(floats(head.value(s), of_values) == held(type.values, values[p], p));
    }
  }
};

/// Attention over the numbers that a head's rows have, in double.
std::vector<double> attended(const kvmeld::head_ref& head, const numbers& q) {
  std::vector<double> out;
  for (index_t g = 0; g < group; ++g) {
    std::vector<double> sum(of_values);
    double all = 0;
    for (index_t s = 0; s < head.length(); ++s) {
      const auto k = floats(head.key(s), dim), v = floats(head.value(s), of_values);
      double dot = 0;
      for (index_t i = 0; i < dim; ++i) {
        dot += double{k[kvmeld::as_size(i)]} * double{q[kvmeld::as_size(g * dim + i)]};
      }
      const double p = std::exp(dot / std::sqrt(double{dim}) + double{head.log_mass(s)});
      all += p;
      for (std::size_t i = 0; i < sum.size(); ++i) {
        sum[i] += p * double{v[i]};
      }
    }
    numbers mean(of_values);
    std::transform(sum.begin(), sum.end(), mean.begin(),
                   [&](double e) { return static_cast<float>(e / all); });
    mean = rotated(head.type().values, mean);
    out.insert(out.end(), mean.begin(), mean.end());
  }
  return out;
}

void check_attention(const kvmeld::head_ref& head) {
  const auto q = fixtures::normal(group * dim);
  numbers out(group * of_values);
  kvmeld::attend(head, q.data(), out.data());
  const auto expected = attended(head, q);
  for (std::size_t i = 0; i < out.size(); ++i) {
    REQUIRE(double{out[i]} == Approx(expected[i]).margin(2e-4));  // queries are in 16 bits
  }
}

TEST_CASE("LAW: a row is in half while it is among the newest, and rounded to blocks once",
          "[newest]") {
  const storage_pair type = GENERATE(from_range(every_type));
  CAPTURE(int(type.keys), int(type.values), type.newest);
  kvmeld::cache kv = cache_of(type);
  history told{type};
  for (const index_t tokens : {3, 90, 1, 1, 7, 2, 64, 1, 5}) {
    told.append(kv, tokens);
    told.check(kv.head(0));
    check_attention(kv.head(0));
  }
  const kvmeld::cache copied = kv;
  kvmeld::cache copy = copied;
  told.check(copy.head(0));
  told.append(copy, 40);
  told.check(copy.head(0));
}

TEST_CASE("LAW: what all keys have alike is no error, however many tokens come at once",
          "[newest]") {
  const index_t newest = GENERATE(0, 1, 2, 3, 4, 5, 16), together = GENERATE(1, 4, 5, 200);
  CAPTURE(newest, together);
  kvmeld::cache kv = cache_of({storage::k4, storage::q4_0, newest});
  numbers keys = fixtures::normal(200 * dim);
  for (std::size_t t = 0; t < 200; ++t) {
    keys[t * dim + 7] += 200, keys[t * dim + 9] -= 60;
  }
  const numbers values = fixtures::normal(200 * of_values);
  for (index_t t = 0; t < 200; t += together) {
    const index_t n = std::min(together, 200 - t);
    kv.append(
        kv.heads(0, 0), std::span(keys).subspan(kvmeld::as_size(t * dim), kvmeld::as_size(n * dim)),
        std::span(values).subspan(kvmeld::as_size(t * of_values), kvmeld::as_size(n * of_values)),
        n);
  }
  double squares = 0;
  for (index_t s = 0; s < 200; ++s) {
    const numbers key = floats(kv.head(0).key(s), dim);
    for (std::size_t i = 0; i < dim; ++i) {
      squares += std::pow(double{key[i]} - double{keys[kvmeld::as_size(s * dim) + i]}, 2);
    }
  }
  CHECK(std::sqrt(squares / (200 * dim)) < 0.2);  // 1.6 with a mean of 0
}

TEST_CASE("LAW: keys are held less the same mean, whether a prompt is appended or attended",
          "[newest]") {
  const index_t newest = GENERATE(0, 3, 16);
  const storage_pair type{storage::k6, storage::q4_0, newest};
  kvmeld::cache one = cache_of(type), other = cache_of(type);
  kvmeld::compressor meld(one, kvmeld::h2o{}, kvmeld::budget{200});
  for (const index_t tokens : {3, 90, 1, 40}) {
    const auto q = fixtures::normal(tokens * group * dim), k = fixtures::normal(tokens * dim),
               v = fixtures::normal(tokens * of_values);
    numbers out(kvmeld::as_size(tokens * group * of_values));
    meld.attend(one.heads(0, 0), {q, k, v}, out, tokens);
    other.append(other.heads(0, 0), k, v, tokens);
    REQUIRE(std::ranges::equal(one.head(0).key_mean(), other.head(0).key_mean()));
  }
}

TEST_CASE("LAW: slots that move take their newest rows along", "[newest]") {
  const storage_pair type = GENERATE(from_range(every_type));
  kvmeld::cache kv = cache_of(type);
  history told{type};
  kvmeld::head_state none({}, 0, capacity);
  told.append(kv, 150);
  for (int round = 0; round < 20; ++round) {
    told.append(kv, 1 + round % 3);
    const kvmeld::head_ref head = kv.head(0);
    kvmeld::merge_plan plan;
    plan.reset(head.length());
    for (index_t s = 0; s < head.length(); ++s) {
      if (s % 11 != round % 11) {  // old tokens and newest ones alike
        plan.keep(s, head.log_mass(s));
      }
    }
    kvmeld::apply(plan, head, none);
    told.check(kv.head(0));
    check_attention(kv.head(0));
  }
}

TEST_CASE("LAW: a draft that is taken back leaves every bit, and what follows as without it",
          "[newest][draft]") {
  const storage_pair type = GENERATE(from_range(every_type));
  for (const kvmeld::budget& b : {kvmeld::budget{60, 80}, kvmeld::budget{200}}) {
    kvmeld::cache kv = cache_of(type), alone = cache_of(type);
    kvmeld::compressor drafting(kv, kvmeld::h2o{}, b), stepping(alone, kvmeld::h2o{}, b);
    const auto input = [](index_t tokens) {
      return std::array{fixtures::normal(tokens * group * dim), fixtures::normal(tokens * dim),
                        fixtures::normal(tokens * of_values)};
    };
    numbers out(group * of_values), of_alone = out;
    for (int t = 0; t < 130; ++t) {
      const auto [q, k, v] = input(1);
      const index_t drafted = std::min<index_t>(drafting.draft_room(0), 1 + t % 20);
      auto [dq, dk, dv] = input(drafted);
      const bool accepts = t % 3 == 1;
      if (accepts) {
        std::ranges::copy(q, dq.begin()), std::ranges::copy(k, dk.begin());
        std::ranges::copy(v, dv.begin());
      }
      const std::string before = saved(drafting);
      numbers drafts(kvmeld::as_size(drafted * group * of_values));
      drafting.draft(kv.heads(0, 0), {dq, dk, dv}, drafts, drafted);
      drafting.accept(0, accepts ? 1 : 0);
      if (!accepts) {
        REQUIRE((saved(drafting) == before));
        drafting.step(kv.heads(0, 0), {q, k, v}, out);
      } else {
        std::copy_n(drafts.begin(), out.size(), out.begin());
      }
      stepping.step(alone.heads(0, 0), {q, k, v}, of_alone);
      REQUIRE(out == of_alone);
      REQUIRE((saved(drafting) == saved(stepping)));
    }
  }
}

TEST_CASE("a cache with newest rows is saved, moved and copied as it is", "[newest][serialize]") {
  const storage_pair type = GENERATE(from_range(every_type));
  kvmeld::cache kv = cache_of(type), other = cache_of(type), large = cache_of(type, capacity + 9);
  kvmeld::compressor meld(kv, kvmeld::h2o{}, kvmeld::budget{60, 70}),
      loaded(other, kvmeld::h2o{}, kvmeld::budget{60, 70}),
      moved(large, kvmeld::h2o{}, kvmeld::budget{60, 70});
  numbers out(group * of_values), again = out;
  const auto step = [&](auto& x, auto& of, const std::array<numbers, 3>& rows, numbers& to) {
    x.step(of.heads(0, 0), {rows[0], rows[1], rows[2]}, to);
  };
  const auto rows = [] {
    return std::array{fixtures::normal(group * dim), fixtures::normal(dim),
                      fixtures::normal(of_values)};
  };
  for (int t = 0; t < 100; ++t) {
    step(meld, kv, rows(), out);
  }
  const std::string bytes = saved(meld);
  std::istringstream in(bytes);
  loaded.load(in, 0);
  CHECK((saved(loaded) == bytes));
  moved.copy(meld, 0, 0);
  for (int t = 0; t < 40; ++t) {
    const auto x = rows();
    step(meld, kv, x, out), step(loaded, other, x, again);
    REQUIRE(out == again);
    step(moved, large, x, again);
    REQUIRE(out == again);
  }
  auto fewer = cache_of({type.keys, type.values, 0});
  kvmeld::compressor refusing(fewer, kvmeld::h2o{}, kvmeld::budget{60, 70});
  std::istringstream refused(bytes);
  CHECK_THROWS_WITH(refusing.load(refused, 0),
                    Catch::Contains(kvmeld::is_centred(type.keys) ? "newest rows in half 0, got"
                                                                  : "expected version 5, got 6"));
}

TEST_CASE("in another cache as many rows stay in half as it has room for", "[newest]") {
  kvmeld::cache floats_of = cache_of(storage::f32),
                k8v4 = cache_of({storage::q8_0, storage::q4_0, 16}),
                fewer = cache_of({storage::q8_0, storage::q4_0, 4}),
                more = cache_of({storage::q8_0, storage::q4_0, 64});
  history told{{storage::q8_0, storage::q4_0, 16}};
  told.append(floats_of, 90);
  kvmeld::head_state none({}, 0, capacity), same = none;
  kvmeld::copy(floats_of.head(0), none, k8v4.head(0), same);
  told.was_in_half.assign(90, 0);  // those of the prompt are rounded from floats
  told.check(k8v4.head(0));
  kvmeld::copy(k8v4.head(0), none, fewer.head(0), same);
  kvmeld::copy(k8v4.head(0), none, more.head(0), same);
  for (index_t s = 0; s < 90; ++s) {
    CHECK(fewer.head(0).is_newest(s) == (s >= 86 || s < 4));
    CHECK(more.head(0).is_newest(s) == (s >= 74 || s < 4));  // what is rounded stays so
    CHECK(floats(more.head(0).key(s), dim) == floats(k8v4.head(0).key(s), dim));
  }
  kvmeld::cache blocks = cache_of({storage::q8_0, storage::q4_0, 0});
  kvmeld::copy(floats_of.head(0), none, blocks.head(0), same);
  kvmeld::copy(blocks.head(0), none, k8v4.head(0), same);
  CHECK(!k8v4.head(0).is_newest(89));  // blocks stay as they are
  more.head(0).restore(90, 200);       // as for tokens that are elsewhere
  CHECK(!more.head(0).is_newest(89));
  for (index_t s = 0; s < 90; ++s) {
    const auto key = floats(fewer.head(0).key(s), dim);
    CHECK(floats(more.head(0).key(s), dim) == (s < 4 ? key : in_storage(storage::q8_0, key)));
  }
  CHECK_THROWS_WITH(fewer.head(0).restore(more.head(0).mark()),
                    Catch::Contains("expected a mark of this head"));
  fewer.head(0).restore(80, 80);  // rows that were taken away were the newest
  CHECK((fewer.head(0).rounded() == 80 && !fewer.head(0).is_newest(79)));
}

TEST_CASE("what a request held before is not saved with the next one", "[newest][serialize]") {
  const storage_pair type = GENERATE(from_range(every_type));
  kvmeld::cache kv = cache_of(type), fresh = cache_of(type);
  kvmeld::compressor meld(kv, kvmeld::h2o{}, kvmeld::budget{60, 70}),
      anew(fresh, kvmeld::h2o{}, kvmeld::budget{60, 70});
  kv.append(kv.heads(0, 0), fixtures::normal(40 * dim), fixtures::normal(40 * of_values), 40);
  meld.clear(0);
  const auto k = fixtures::normal(3 * dim), v = fixtures::normal(3 * of_values);
  kv.append(kv.heads(0, 0), k, v, 3), fresh.append(fresh.heads(0, 0), k, v, 3);
  CHECK((saved(meld) == saved(anew)));
}

TEST_CASE("LAW: a step that is refused leaves every bit", "[newest]") {
  const storage_pair type = GENERATE(from_range(every_type));
  const bool pins = GENERATE(false, true);
  kvmeld::cache kv = cache_of(type);
  kvmeld::compressor meld(kv, kvmeld::h2o{}, kvmeld::budget{60, 70});
  numbers out(group * of_values);
  const auto step = [&](float size) {
    meld.step(kv.heads(0, 0),
              {fixtures::normal(group * dim, size), fixtures::normal(dim, size > 1 ? 6e4F : 1.0F),
               fixtures::normal(of_values)},
              out);
  };
  if (pins) {
    meld.pin(0, 0, 4);
  }
  for (int t = 0; t < 100; ++t) {
    step(1);
    if (t < 4) {
      continue;  // pinned tokens to come
    }
    const std::string before = saved(meld);
    CHECK_THROWS_AS(step(3e36F), kvmeld::error);
    REQUIRE((saved(meld) == before));
  }
}

TEST_CASE("what a slot held before is not read, be it NaN", "[newest]") {
  kvmeld::cache kv = cache_of({storage::q8_0, storage::q8_0, 2});
  const numbers bad(dim, std::nanf("")), good(dim, 1.0F);
  const auto head = kv.head(0);
  for (int t = 0; t < 8; ++t) {
    const numbers& x = t == 4 ? bad : good;
    head.push(x.data(), x.data());
  }
  REQUIRE(std::isnan(floats(head.key(4), dim)[0]));  // rounded by now
  head.restore(0, 0);
  for (int t = 0; t < 5; ++t) {
    head.push(good.data(), good.data());
  }
  numbers out(group * of_values);
  kvmeld::attend(head, numbers(group * dim, 1.0F).data(), out.data());
  CHECK(std::ranges::all_of(out, [](float x) { return x == 1.0F; }));
}

TEST_CASE("what half cannot hold is kept out of merges into a newest row", "[newest]") {
  kvmeld::cache kv = cache_of({storage::q8_0, storage::q8_0, 1});
  const numbers large(dim, 1e6F), one(dim, 1.0F);
  const auto head = kv.head(0);
  for (int t = 0; t < 4; ++t) {
    head.push(one.data(), one.data());
  }
  head.push(large.data(), large.data()), head.push(one.data(), one.data());
  for (const index_t anchor : {5, 0}) {  // of the newest, and the first
    kvmeld::merge_plan plan;
    plan.reset(6);
    plan.add({anchor, 0.5F, 0.5F}), plan.add({4, 0.5F, 0.5F});
    plan.end_row(0.7F);
    kvmeld::merge::keep_in_range(head, plan);
    CHECK(!plan.changes_row(0));
  }
}

TEST_CASE("a sink that is given another position keeps its rows", "[newest]") {
  kvmeld::streaming_llm policy;
  policy.sinks = 2, policy.positions = kvmeld::streaming_llm::position_mode::cache_index;
  const storage_pair type{storage::q8_0, storage::q8_0, 16};
  kvmeld::cache kv = cache_of(type), of_floats = cache_of(storage::f32);
  kvmeld::compressor meld(kv, policy, kvmeld::budget{8}),
      exact(of_floats, policy, kvmeld::budget{8});
  numbers out(group * of_values), of_exact = out;
  for (int t = 0; t < 40; ++t) {
    const auto q = fixtures::normal(group * dim), k = fixtures::normal(dim),
               v = fixtures::normal(of_values);
    meld.step(kv.heads(0, 0), {q, k, v}, out),
        exact.step(of_floats.heads(0, 0), {q, k, v}, of_exact);
    for (std::size_t i = 0; i < out.size(); ++i) {
      REQUIRE(out[i] == Approx(of_exact[i]).margin(0.02));
    }
  }
}

TEST_CASE("pinned and sealed slots stay among the newest until newer ones are there",
          "[newest][pins]") {
  const storage_pair type{storage::q8_0, storage::q4_0, 16};
  const bool seals = GENERATE(false, true);
  kvmeld::cache kv = cache_of(type);
  history told{type};
  kvmeld::compressor meld(kv, kvmeld::h2o{}, kvmeld::budget{40});
  if (seals) {
    told.append(kv, 10);
    meld.seal(0, 10);
    told.append(kv, 50);
  } else {
    meld.pin(0, 50, 6);
    told.append(kv, 60);
  }
  const index_t own = seals ? 50 : 60;
  const auto q = fixtures::normal(own * group * dim);
  meld.prompt(kv.heads(0, 0), kvmeld::queries(q, own, spec));
  meld.end_prompt(0);
  REQUIRE((kv.head(0).length() == (seals ? 50 : 40) && kv.head(0).position(0) == (seals ? 0 : 50)));
  told.check(kv.head(0));
  numbers out(group * of_values);
  for (int t = 0; t < 20; ++t) {
    const auto k = fixtures::normal(dim), v = fixtures::normal(of_values);
    meld.step(kv.heads(0, 0), {fixtures::normal(group * dim), k, v}, out);
    told.keys.push_back(k), told.values.push_back(rotated(type.values, v));
    told.was_in_half.push_back(1);
    told.check(kv.head(0));
  }
}

TEST_CASE("newest rows that cannot be are refused", "[newest][errors]") {
  const auto made = [](storage keys, storage values, index_t newest) {
    return kvmeld::cache(spec, {.capacity = 4, .keys = keys, .values = values, .newest = newest});
  };
  CHECK_THROWS_WITH(made(storage::q8_0, storage::q4_0, -1),
                    Catch::EndsWith("cache: expected 0 to 64 newest rows in half, got -1"));
  CHECK_THROWS_WITH(made(storage::q8_0, storage::q4_0, 65), Catch::Contains("0 to 64"));
  CHECK_THROWS_WITH(made(storage::f16, storage::f16, 1), Catch::Contains("in blocks"));
  auto kv = made(storage::q8_0, storage::f16, 1);
  CHECK_THROWS_WITH(kv.commit(kv.heads(0, 0), 1), Catch::Contains("commit: expected no newest"));
  CHECK(kv.bytes() == 0);
  const numbers x(dim, 1.0F);
  kv.head(0).push(x.data(), x.data()), kv.head(0).push(x.data(), x.data());
  CHECK(kv.bytes() == 2 * (2 * 34 + 2 * of_values + 8) + 2 * 2 * dim);
  kv = kvmeld::cache(spec, {.capacity = 9, .keys = storage::q8_0, .newest = 1});
  for (int t = 0; t < 9; ++t) {
    kv.head(0).push(x.data(), x.data());
  }
  CHECK(kv.bytes() == 9 * (2 * 34 + 4 * of_values + 8) + (1 + 4) * 2 * dim);
}

}  // namespace newest_rows_test
