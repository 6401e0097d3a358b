// SPDX-License-Identifier: MIT
// Column sums of a prompt's attention against the oracle's one query at a time.
#include <catch2/catch.hpp>
#include <numeric>

#include "support/fixtures.hpp"

namespace column_scores_test {

using fixtures::normal;
using fixtures::random_bits;
using kvmeld::column_options;
using kvmeld::group_combine;
using kvmeld::index_t;
using kvmeld::query_view;

std::size_t at(std::ptrdiff_t i) { return static_cast<std::size_t>(i); }

struct sums {
  std::vector<float> total, window, decayed, largest;

  explicit sums(index_t length)
      : total(at(length), 7), window(total), decayed(total), largest(total) {}
  kvmeld::column_sums spans() { return {total, window, decayed, largest}; }
};

template <class Query>
sums scores(const kvmeld::kv_head auto& head, const query_view<Query>& queries,
            const column_options& options) {
  sums s(head.length());
  column_scores(head, queries, options, s.spans());
  return s;
}

/// Worst difference of two columns, in units of the attention that a slot could have had.
double off(const std::vector<float>& ours, const oracle::vec& theirs, double most) {
  double worst = ours.size() == theirs.size() ? 0 : 1e9;
  for (std::size_t j = 0; j < theirs.size(); ++j) {
    const double error = std::abs(static_cast<double>(ours[j]) - theirs[j]);
    worst = std::max(worst, std::isnan(error) ? 1e9 : error / (1e-3 * most + theirs[j]));
  }
  return worst;
}

oracle::combine as_oracle(group_combine c) {
  return c == group_combine::sum    ? oracle::combine::sum
         : c == group_combine::mean ? oracle::combine::mean
                                    : oracle::combine::max;
}

/// LAW: in one pass all sums and the largest are the oracle's, each is the same asked for alone,
/// and columns sum up to one for each query head that sees a slot.
template <class Query>
void is_the_oracles(const kvmeld::kv_head auto& head, const query_view<Query>& queries,
                    column_options options = {}) {
  const index_t n = head.length(), group = head.group();
  INFO(n << " slots, " << queries.count << " queries, group of " << group << ", dim "
         << head.dim());
  const oracle::head h = fixtures::to_oracle(head);
  std::vector<int> positions;
  index_t seeing = 0;
  for (index_t i = 0; i < queries.count; ++i) {
    positions.push_back(queries.position_of(i, head.next_position()));
    seeing += std::ranges::any_of(h.slots, [&](auto& s) { return s.position <= positions.back(); });
  }
  const auto theirs =
      oracle::column_scores(h, fixtures::to_tensor(queries, group, head.dim()), positions,
                            {.window = options.window,
                             .decay = static_cast<double>(options.decay),
                             .group = as_oracle(options.combine)});
  sums ours = scores(head, queries, options);
  CHECK(off(ours.total, theirs.total, 1) < 1e-5);
  CHECK(off(ours.window, theirs.last, 1) < 1e-5);
  CHECK(off(ours.decayed, theirs.decayed, 1) < 1e-5);
  CHECK(off(ours.largest, theirs.largest, 1) < 1e-5);
  for (std::size_t j = 0; j < at(n); ++j) {
    if (theirs.total[j] == 0) {  // a slot that no query sees; Eigen's exp ends at 3e-39
      CHECK(ours.total[j] + ours.window[j] + ours.decayed[j] < 1e-36F);
    }
  }
  if (options.combine != group_combine::max) {
    seeing *= options.combine == group_combine::sum ? group : 1;
    const double all = std::accumulate(ours.total.begin(), ours.total.end(), 0.0);
    CHECK(all == Approx(seeing).epsilon(1e-6));
  }
  sums alone(n);
  column_scores(head, queries, options, {.decayed = alone.decayed});
  column_scores(head, queries, options, {.total = alone.total});
  column_scores(head, queries, options, {.window = alone.window});
  CHECK((alone.total == ours.total && alone.window == ours.window));
  column_scores(head, queries, options, {.largest = alone.largest});
  CHECK((alone.decayed == ours.decayed && alone.largest == ours.largest));
}

/// A head after compression: positions in any order, some of the tokens evicted.
template <class Scalar = float>
fixtures::cache<Scalar> compressed_cache(index_t length, index_t dim, index_t group) {
  auto kv = fixtures::random_cache<Scalar>(2 * length, dim, group);
  std::vector<index_t> positions(at(2 * length));
  std::iota(positions.begin(), positions.end(), 0);
  std::ranges::shuffle(positions, random_bits());
  const auto head = kv.head(0);
  head.truncate(length);
  for (index_t s = 0; s < length; ++s) {
    head.position(s) = positions[at(s)];
    head.log_mass(s) = 2 * normal(1)[0];
  }
  return kv;
}

TEST_CASE("column sums are the oracle's at every size around the tiles", "[column_scores]") {
  const auto combine = GENERATE(group_combine::sum, group_combine::mean, group_combine::max);
  for (const index_t slots : {1, 15, 17, 511, 512, 513, 1030}) {
    for (const index_t count : {1, 2, 63, 64, 65}) {
      for (const index_t group : {1, 3, 4, 70}) {
        if (slots < 100 || (group == 3 && count != 2) || (group == 70 && count == 2)) {
          auto kv = fixtures::random_cache(slots, 3 + group % 3, group);
          const fixtures::queries q(count, group, 3 + group % 3, 2);
          is_the_oracles(kv.head(0), q.view(), {.window = 32, .decay = 0.9F, .combine = combine});
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("column sums are the oracle's for every scalar, of queries and of keys",
                   "[column_scores]", float, Eigen::half, Eigen::bfloat16) {
  const index_t count = 21, heads = 2, group = 3;
  for (const index_t dim : {1, 7, 64, 130}) {
    const auto data = normal<TestType>(count * heads * group * dim);
    const auto q = kvmeld::prompt_queries(data.data(), count, heads, group, dim).of(1);
    const column_options options{.window = 5, .decay = 0.98F};
    is_the_oracles(compressed_cache<float>(40, dim, group).head(0), q, options);
    is_the_oracles(compressed_cache<TestType>(40, dim, group).head(0), q, options);
    const auto x = normal(80 * dim), y = normal(80 * dim);  // keys transposed, two heads
    std::vector<TestType> keys(at(2 * 50 * dim)), values = keys;
    fixtures::strided_view<TestType> kv(
        {.heads = 2, .group = group, .dim = dim, .capacity = 50},
        fixtures::layout<TestType>::head_dim_token(keys.data(), 50, dim),
        fixtures::layout<TestType>::token_head_dim(values.data(), 2, dim));
    kv.append(1, std::span<const float>(x).first(at(50 * dim)),
              std::span<const float>(y).first(at(50 * dim)));
    is_the_oracles(kv.head(1), q, options);
  }
}

TEST_CASE("queries lie and see as their view says", "[column_scores]") {
  const index_t dim = 5, group = 2, count = 70, length = 90;
  const auto data = normal(4 * count * group * dim);
  for (const query_view<float>& q :
       {query_view<float>{data.data(), count, 0, dim, group * dim},          // query, member
        query_view<float>{data.data(), count, 0, count * dim, dim},          // member, query
        query_view<float>{data.data(), count, 0, 2 * dim + 1, 4 * dim + 3},  // with gaps
        query_view<float>{data.data() + count * group * dim, count, 0, 0, -dim}}) {  // backwards
    auto kv = fixtures::random_cache(length, dim, group);
    is_the_oracles(kv.head(0), q, {.window = 64});
    std::vector<index_t> positions(count);
    auto placed = [&, v = q](index_t first, index_t step) mutable {
      for (index_t i = 0; i < count; ++i) {
        positions[at(i)] = first + i * step;
      }
      v.position = positions.data();
      return v;
    };
    is_the_oracles(kv.head(0), placed(0, 1), {.window = 3, .decay = 0.5F});  // the prompt's first
    is_the_oracles(kv.head(0), placed(length, 1), {.window = 3});            // lookahead: see all
    is_the_oracles(kv.head(0), placed(length - 1, -1), {.decay = 0.5F});     // backwards
    is_the_oracles(kv.head(0), placed(-40, 1), {.window = 69});              // some see nothing
    is_the_oracles(kv.head(0), placed(-1, -1), {.window = 3});               // all see nothing
    is_the_oracles(kv.head(0), placed(30, 0), {.combine = group_combine::max});
    is_the_oracles(compressed_cache(length, dim, group).head(0), placed(0, 3), {.window = 9});
    is_the_oracles(compressed_cache(length, dim, group).head(0), placed(-35, 1),
                   {.combine = group_combine::max});
  }
}

TEST_CASE("a prompt observed in chunks is the prompt observed at once", "[column_scores]") {
  const index_t dim = 6, group = 3, length = 150;
  const float decay = 0.97F;
  const fixtures::queries q(length, group, dim);
  auto kv = fixtures::random_cache(length, dim, group);
  const auto whole = scores(kv.head(0), q.view(), {.decay = decay});
  for (const index_t chunk : {1, 7, 64, 149, 150}) {
    oracle::vec total(length), decayed(length);
    for (index_t begin = 0; begin < length; begin += chunk) {
      const index_t n = std::min(chunk, length - begin);
      // The engine has appended this chunk's tokens only.
      fixtures::cache<float> part{{.heads = 1, .group = group, .dim = dim, .capacity = length}};
      for (index_t s = 0; s < begin + n; ++s) {
        part.head(0).push(kv.head(0).key(s).data, kv.head(0).value(s).data);
      }
      auto view = q.view();
      view.data = view.at(0, begin), view.count = n;
      const auto s = scores(part.head(0), view, {.decay = decay});
      for (std::size_t j = 0; j < at(begin + n); ++j) {
        total[j] += static_cast<double>(s.total[j]);
        decayed[j] = decayed[j] * std::pow(static_cast<double>(decay), n) +
                     static_cast<double>(s.decayed[j]);
      }
    }
    CHECK(off(whole.total, total, 1) < 1e-5);
    CHECK(off(whole.decayed, decayed, 1) < 1e-5);
  }
}

TEST_CASE("a log-sum-exp that attention left gives the same sums", "[column_scores]") {
  const index_t dim = 8, count = 40, length = 100;
  for (const index_t group : {1, 3}) {
    for (const auto combine : {group_combine::sum, group_combine::mean, group_combine::max}) {
      auto kv = compressed_cache(length, dim, group);
      const fixtures::queries q(count, group, dim);
      std::vector<float> lse(at(group * count));
      const oracle::head h = fixtures::to_oracle(kv.head(0));
      const auto tensor = q.tensor();
      for (index_t i = 0; i < count; ++i) {
        const auto own = attend(h, tensor[at(i)], 2 * length - count + i).lse;
        for (index_t g = 0; g < group; ++g) {
          lse[at(g * count + i)] = static_cast<float>(own[at(g)]);
        }
      }
      auto given = q.view();
      given.log_sum_exp = lse.data();
      is_the_oracles(kv.head(0), given, {.window = 9, .decay = 0.9F, .combine = combine});
      is_the_oracles(kv.head(0), given.last(7), {.window = 5, .combine = combine});
      const auto honest = scores(kv.head(0), q.view(), {.combine = combine}).total;
      std::ranges::for_each(lse, [](float& x) { x += 1; });  // it is used, not computed again
      const auto less = scores(kv.head(0), given, {.combine = combine});
      CHECK(less.total[0] == Approx(honest[0] / std::exp(1.0F)));
    }
  }
}

TEST_CASE("column sums of hard logits", "[column_scores]") {
  const index_t length = 70, dim = 2;
  for (const float size : {1e4F, -1e4F}) {  // whole numbers: exact logits
    fixtures::cache<float> kv{{.heads = 1, .group = 2, .dim = dim, .capacity = length, .scale = 1}};
    std::vector<float> keys, queries;
    for (index_t s = 0; s < length; ++s) {
      keys.insert(keys.end(), {100, static_cast<float>(s % 3)});
      queries.insert(queries.end(), {size / 100, 1, -size / 100, 0});
    }
    kv.append(0, keys, keys);
    const auto q = kvmeld::prompt_queries(queries.data(), length, 1, 2, dim);
    is_the_oracles(kv.head(0), q, {.window = 10, .decay = 0.5F});
    kv.head(0).log_mass(3) = 30, kv.head(0).log_mass(5) = -30;
    is_the_oracles(kv.head(0), q, {.window = 10, .decay = 0.5F, .combine = group_combine::max});
  }
}

TEST_CASE("NaN in a key spoils the queries that see it, and no others", "[column_scores]") {
  const index_t length = 100, dim = 4;
  auto kv = fixtures::random_cache(length, dim, 1);
  const fixtures::queries q(length, 1, dim);
  kv.head(0).key(60)[1] = std::nanf("");
  std::vector<index_t> positions(60);
  std::iota(positions.begin(), positions.end(), 0);
  auto early = q.view();
  early.count = 60, early.position = positions.data();
  const auto clean = scores(kv.head(0), early, {}).total;
  CHECK(std::accumulate(clean.begin(), clean.end(), 0.0) == Approx(60));
  CHECK(std::isnan(scores(kv.head(0), q.view(), {.window = 20}).window[60]));
}

TEST_CASE("column_scores refuses what it cannot do", "[column_scores][errors]") {
  auto kv = fixtures::random_cache(5, 3, 2);
  fixtures::cache<float> empty{{.heads = 1, .group = 2, .dim = 3, .capacity = 5}};
  const fixtures::queries q(4, 2, 3);
  std::vector<float> five(5, 7.0F), six(6, 7.0F);
  const auto refuses = [&](auto& c, const query_view<float>& queries, const column_options& o,
                           const kvmeld::column_sums& to, const std::string& message) {
    CHECK_THROWS_AS(column_scores(c.head(0), queries, o, to), kvmeld::error);
    CHECK_THROWS_WITH(column_scores(c.head(0), queries, o, to), Catch::Contains(message));
    CHECK((five == std::vector(5, 7.0F) && six == std::vector(6, 7.0F)));
  };
  refuses(empty, q.view(), {}, {}, "expected at least 1 slot, got an empty head");
  refuses(kv, kvmeld::no_queries, {}, {.total = five}, "expected at least 1 query, got 0");
  refuses(kv, {nullptr, 4}, {}, {.total = five}, "expected at least 1 query, got 0");
  refuses(kv, {q.data.data(), -3}, {}, {.total = five}, "expected at least 1 query, got -3");
  refuses(kv, q.view(), {}, {.total = six}, "expected total [5], got 6 floats");
  refuses(kv, q.view(), {}, {.total = five, .window = six}, "expected window [5], got 6 floats");
  refuses(kv, q.view(), {}, {.decayed = six}, "expected decayed [5], got 6 floats");
  refuses(kv, q.view(), {.window = -1}, {.total = five},
          "expected a window of at least 0 queries, got -1");
  for (const float decay : {0.0F, -0.5F, 1.5F, std::nanf("")}) {
    refuses(kv, q.view(), {.decay = decay}, {.total = five}, "expected a decay in (0, 1]");
  }
}

}  // namespace column_scores_test
