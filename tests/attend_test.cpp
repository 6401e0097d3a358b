// SPDX-License-Identifier: MIT
// Decode attention against double-precision loops: every size around the tiles, every layout and
// scalar, and the numbers that break softmaxes.
#include <catch2/catch.hpp>
#include <numeric>

#include "oracle/codes.hpp"
#include "support/fixtures.hpp"

namespace attend_test {

using fixtures::cache;
using fixtures::layout;
using fixtures::normal;
using kvmeld::index_t;

std::size_t at(std::ptrdiff_t i) { return static_cast<std::size_t>(i); }

const float not_a_number = std::nanf("");

/// What `attend` gives: output [group, dim], probabilities [group, length], log-sum-exp [group].
struct answer {
  std::vector<float> out, probabilities, log_sum_exp;

  answer(const kvmeld::kv_head auto& head, const float* q)
      : out(at(head.group() * head.dim()), not_a_number),
        probabilities(at(head.group() * head.length()), not_a_number),
        log_sum_exp(at(head.group()), not_a_number) {
    attend(head, q, out.data(), probabilities, log_sum_exp);
  }
  friend bool operator==(const answer&, const answer&) = default;
};

bool all_nan(const std::vector<float>& x) {
  return std::ranges::all_of(x, [](float e) { return std::isnan(e); });
}

/// LAW: output, probabilities (relatively, however small) and log-sum-exp are the oracle's; each is
/// the same whether the others are asked for or not, and that over floats side by side, whatever
/// the rows are held as and however they lie: to the bit, but in blocks, whose queries have 16
/// bits.
void is_the_oracles(const kvmeld::kv_head auto& head, const std::vector<float>& q,
                    double tolerance = 2e-5) {
  const index_t group = head.group(), n = head.length(), dim = head.dim();
  INFO("dim " << dim << ", " << n << " slots, group of " << group);
  const answer ours(head, q.data());
  const bool codes = kvmeld::in_blocks(head.type().keys);
  const std::vector<float> seen = codes ? oracle::in_16_bits(q, dim) : q;
  const auto theirs = attend(fixtures::to_oracle(head), fixtures::to_mat(seen.data(), group, dim));
  double worst = 0, sum_off = 0;
  for (index_t g = 0; g < group; ++g) {
    double sum = 0;
    for (index_t s = 0; s < n; ++s) {
      const double p = static_cast<double>(ours.probabilities[at(g * n + s)]);
      const double expected = theirs.probabilities[at(g)][at(s)];
      worst = std::max(worst, std::abs(p - expected) / (expected + 1e-30));
      sum += p;
    }
    sum_off = std::max(sum_off, std::abs(sum - 1));
  }
  CHECK(worst < 2 * tolerance);
  CHECK(sum_off < 1e-5);
  CHECK(oracle::difference(fixtures::to_mat(ours.out.data(), group, dim), theirs.output) <
        tolerance);
  const oracle::vec lse(ours.log_sum_exp.begin(), ours.log_sum_exp.end());
  CHECK(oracle::difference(lse, theirs.lse) < tolerance / 4);
  std::vector<float> alone(ours.out.size()), other(ours.log_sum_exp.size());
  attend(head, q.data(), alone.data());
  CHECK(alone == ours.out);
  attend(head, q.data(), alone.data(), {}, other);
  CHECK((alone == ours.out && other == ours.log_sum_exp));
  kvmeld::cache floats(head.spec(), {.capacity = n});
  kvmeld::detail::copy_slots(head, floats.head(0));
  const answer of_floats(floats.head(0), seen.data());
  if (codes) {
    CHECK(oracle::difference(fixtures::to_mat(of_floats.out.data(), group, dim),
                             fixtures::to_mat(ours.out.data(), group, dim)) < tolerance);
  } else {
    CHECK(of_floats == ours);
  }
}

/// A head of an engine, in memory that starts `offset` elements in.
template <class Scalar>
struct engine {
  std::vector<Scalar> keys, values;
  fixtures::strided_view<Scalar> kv;

  engine(const fixtures::cache_shape& shape, int of_keys, int of_values, std::ptrdiff_t offset = 0)
      : keys(at(offset + shape.heads * shape.capacity * shape.dim)),
        values(keys.size()),
        kv(shape, plane(keys.data() + offset, of_keys, shape),
           plane(values.data() + offset, of_values, shape)) {}

  static layout<Scalar> plane(Scalar* data, int which, const fixtures::cache_shape& s) {
    return which == 0   ? layout<Scalar>::token_head_dim(data, s.heads, s.dim)
           : which == 1 ? layout<Scalar>::head_token_dim(data, s.capacity, s.dim)
                        : layout<Scalar>::head_dim_token(data, s.capacity, s.dim);
  }
  void append(index_t h, const std::vector<float>& k, const std::vector<float>& v) {
    kv.append(h, std::span<const float>(k), std::span<const float>(v));
  }
};

TEST_CASE("attention is the oracle's at every size around the tiles", "[attend]") {
  for (const index_t dim : {1, 2, 7, 32, 33, 128, 200}) {
    for (const index_t length : {1, 2, 15, 16, 127, 128, 129, 500, 1000}) {
      for (const index_t group : {1, 2, 3, 4, 8, 17}) {
        if (length < 500 || group == 1 || group == 17) {
          auto kv = fixtures::random_cache(length, dim, group);
          const auto head = kv.head(0);
          for (index_t s = 0; s < length; ++s) {
            head.log_mass(s) = normal(1)[0];
          }
          is_the_oracles(head, normal(group * dim));
          if (length > 100 && length < 130) {
            auto blocks = fixtures::random_cache<float, kvmeld::q8_0>(length, dim, group);
            auto halves = fixtures::random_cache<float, Eigen::half>(length, dim, group);
            is_the_oracles(blocks.head(0), normal(group * dim));
            is_the_oracles(halves.head(0), normal(group * dim));
          }
        }
      }
    }
  }
  for (const index_t length : {1, 4, 5, 9, 130}) {  // tiles of 4 slots
    auto kv = fixtures::random_cache(length, 4096, 2);
    is_the_oracles(kv.head(0), normal(2 * 4096), 1e-4);
    auto blocks = fixtures::random_cache<float, kvmeld::q8_0>(length, 4096, 2);  // a query a sweep
    is_the_oracles(blocks.head(0), normal(2 * 4096), 1e-4);
  }
  auto blocks = fixtures::random_cache<float, kvmeld::q8_0>(130, 300, 17);  // 12 of them
  is_the_oracles(blocks.head(0), normal(17 * 300));
}

TEMPLATE_TEST_CASE("attention is the oracle's in every layout and scalar", "[attend]", float,
                   Eigen::half, Eigen::bfloat16) {
  for (const index_t dim : {1, 7, 32, 65}) {
    for (const index_t length : {1, 2, 15, 129, 300}) {
      auto kv = fixtures::random_cache<TestType>(length, dim, 3);
      is_the_oracles(kv.head(0), normal(3 * dim));
      for (int layouts = 0; layouts < 9; ++layouts) {
        const fixtures::cache_shape shape{
            .heads = 3, .group = 3, .dim = dim, .capacity = length + 2, .scale = 0.3F};
        engine<TestType> e(shape, layouts / 3, layouts % 3);
        for (index_t h = 0; h < 3; ++h) {
          e.append(h, normal(length * dim), normal(length * dim));
          e.kv.head(h).log_mass(length / 2) = 2;
        }
        is_the_oracles(e.kv.head(1), normal(3 * dim));
      }
    }
  }
}

TEST_CASE("attention reads a paged head, whose rows jump", "[attend]") {
  static constexpr index_t slots = 300, dim = 16;
  std::vector<float> keys(slots * dim), values(keys.size());
  std::vector<index_t> table(slots);
  std::iota(table.begin(), table.end(), 0);
  const auto moved = [&](auto change) {
    auto t = table;
    change(t);
    const auto one = [](std::vector<float>& x) {  // a slot a page
      return fixtures::layout<float>::page_slot_head_dim(x.data(), 1, 1, dim);
    };
    fixtures::paged_view<float> kv({.heads = 1, .group = 2, .dim = dim, .capacity = slots},
                                   one(keys), one(values), {t.data(), 1});
    kv.append(0, normal(slots * dim), normal(slots * dim));
    for (index_t s = 0; s < slots; ++s) {
      kv.head(0).log_mass(s) = normal(1)[0];
    }
    is_the_oracles(kv.head(0), normal(2 * dim));
  };
  moved([](auto&) {});
  moved([](auto& t) { std::swap(t[0], t[299]); });
  moved([](auto& t) { std::swap(t[2], t[3]); });
  moved([](auto& t) { std::swap(t[127], t[126]); });
  moved([](auto& t) { std::ranges::reverse(t); });
  moved([](auto& t) { std::ranges::shuffle(t, fixtures::random_bits()); });
}

TEST_CASE("log-mass of any size weighs as it says", "[attend]") {
  for (const float heavy : {-100.0F, -30.0F, -1.0F, 0.0F, 0.6F * std::log(3.0F), 30.0F, 100.0F}) {
    for (const index_t slot : {0, 127, 128, 199}) {
      auto kv = fixtures::random_cache(200, 16, 2);
      kv.head(0).log_mass(slot) = heavy;
      is_the_oracles(kv.head(0), normal(32));
    }
  }
}

TEST_CASE("logits of 1e4 keep probabilities that sum to 1", "[attend]") {
  // Whole numbers, so that the logits are exact and only the softmax is put to the test.
  for (const index_t length : {1, 3, 5, 129, 300}) {
    for (const float size : {1e4F, -1e4F}) {
      cache<float> kv{{.heads = 1, .group = 2, .dim = 2, .capacity = length, .scale = 1}};
      std::vector<float> keys;
      for (index_t s = 0; s < length; ++s) {
        keys.insert(keys.end(), {100, static_cast<float>(s % 3)});
      }
      kv.append(0, keys, normal(2 * length));
      is_the_oracles(kv.head(0), {size / 100, 0, size / 100, 1});
      kv.head(0).log_mass(length - 1) = -size;  // the rest has no weight
      is_the_oracles(kv.head(0), {size / 100, 0, size / 100, 1});
    }
  }
}

TEST_CASE("zero keys and duplicate keys share attention to the bit", "[attend]") {
  for (const index_t dim : {1, 2, 7, 8, 24, 40, 64, 200}) {
    for (const index_t length : {2, 3, 5, 16, 17, 128, 129, 257}) {
      for (const bool zero : {true, false}) {
        INFO("dim " << dim << ", " << length << " slots");
        cache<float> kv{{.heads = 1, .group = 2, .dim = dim, .capacity = length}};
        const auto key = zero ? std::vector<float>(at(dim)) : normal(dim);
        for (index_t s = 0; s < length; ++s) {
          kv.append(0, key, normal(dim));
        }
        const auto q = normal(2 * dim);
        is_the_oracles(kv.head(0), q);
        const auto p = answer(kv.head(0), q.data()).probabilities;
        CHECK(std::ranges::count(p.begin(), p.begin() + length, p[0]) == length);
        CHECK(std::ranges::count(p.begin() + length, p.end(), p[at(length)]) == length);
      }
    }
  }
}

TEST_CASE("NaN in a key is heard everywhere, NaN in a value where it is", "[attend]") {
  for (const index_t length : {1, 5, 128, 300}) {
    for (const index_t slot : {0, 4, 127, 128, 299}) {
      if (slot < length) {
        auto kv = fixtures::random_cache(length, 9, 2);
        kv.head(0).value(slot)[3] = not_a_number;
        const auto q = normal(18);
        const answer one(kv.head(0), q.data());
        for (std::size_t i = 0; i < 18; ++i) {
          CHECK(std::isnan(one.out[i]) == (i % 9 == 3));
        }
        kv.head(0).key(slot)[8] = not_a_number;
        const answer all(kv.head(0), q.data());
        CHECK((all_nan(all.out) && all_nan(all.probabilities) && all_nan(all.log_sum_exp)));
      }
    }
  }
}

TEST_CASE("the largest halves overflow nothing", "[attend]") {
  const index_t dim = 64, length = 130;
  cache<Eigen::half> kv{{.heads = 1, .dim = dim, .capacity = length}};
  std::vector<float> x(at(length * dim), 65504.0F);
  kv.append(0, x, x);
  for (const float q : {65504.0F, -65504.0F, 1e-3F}) {
    const answer a(kv.head(0), std::vector<float>(dim, q).data());
    for (const float o : a.out) {
      CHECK(o == Approx(65504).epsilon(1e-6));
    }
    CHECK(a.probabilities[7] == Approx(1.0 / length));
  }
}

TEST_CASE("the same bits wherever q, out, keys and values lie", "[attend]") {
  for (const index_t dim : {1, 7, 32, 33, 200}) {
    for (const index_t length : {1, 15, 129}) {
      const auto keys = normal(length * dim), values = normal(length * dim), q = normal(3 * dim);
      const fixtures::cache_shape shape{.heads = 1, .group = 3, .dim = dim, .capacity = length};
      engine<float> first(shape, 1, 1);
      first.append(0, keys, values);
      const answer expected(first.kv.head(0), q.data());
      for (index_t offset = 1; offset < 17; ++offset) {
        engine<float> e(shape, 1, 1, offset);
        e.append(0, keys, values);
        std::vector<float> moved(at(offset));
        moved.insert(moved.end(), q.begin(), q.end());
        CHECK(answer(e.kv.head(0), moved.data() + offset) == expected);
        std::vector<float> out(at(offset + 3 * dim)), p(at(offset + 3 * length));
        attend(e.kv.head(0), q.data(), out.data() + offset, std::span(p).subspan(at(offset)));
        CHECK(std::equal(out.begin() + offset, out.end(), expected.out.begin()));
        CHECK(std::equal(p.begin() + offset, p.end(), expected.probabilities.begin()));
      }
    }
  }
}

}  // namespace attend_test
