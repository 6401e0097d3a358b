// SPDX-License-Identifier: MIT
// Caps, sinks and slopes in attention and in a prompt's scores, of each KV head of a layer, against
// the oracle's loops.
#include <catch2/catch.hpp>
#include <numeric>

#include "kvmeld/score/dense.hpp"
#include "kvmeld/score/prompt_scores.hpp"
#include "support/fixtures.hpp"
#include "support/terms.hpp"

namespace score_layer_terms_test {

using fixtures::index_t;
using fixtures::layer_terms;
using fixtures::normal;
using kvmeld::group_combine;

constexpr index_t kv_heads = 2;

std::size_t at(std::ptrdiff_t i) { return static_cast<std::size_t>(i); }

oracle::vec doubles(std::span<const float> x) { return {x.begin(), x.end()}; }

/// Worst difference of shares of attention: relative for all that is not far below `most`.
double off(std::span<const float> ours, const oracle::vec& theirs, double most = 1) {
  REQUIRE(ours.size() == theirs.size());
  double worst = 0;
  for (std::size_t j = 0; j < theirs.size(); ++j) {
    const double error = std::abs(static_cast<double>(ours[j]) - theirs[j]);
    worst = std::max(worst, std::isnan(error) ? 1e9 : error / (theirs[j] + 1e-3 * most));
  }
  return worst;
}

/// Heads as after a compression: positions in any order, some of the tokens gone, log-mass.
template <class Scalar = float>
fixtures::cache<Scalar> compressed(const layer_terms& terms, index_t length, index_t dim,
                                   index_t group) {
  auto kv =
      fixtures::random_cache<Scalar>(2 * length, terms.shape(kv_heads, group, dim, 2 * length + 1));
  std::vector<index_t> positions(at(2 * length));
  std::iota(positions.begin(), positions.end(), 0);
  for (index_t h = 0; h < kv_heads; ++h) {
    std::ranges::shuffle(positions, fixtures::random_bits());
    std::swap(*std::ranges::max_element(positions), positions[0]);  // a query's own token is there
    kv.head(h).truncate(length);
    for (index_t s = 0; s < length; ++s) {
      kv.head(h).position(s) = positions[at(s)];
      kv.head(h).log_mass(s) = 2 * normal(1)[0];
    }
  }
  return kv;
}

/// LAW: outputs, probabilities and log-sum-exp of decode are the oracle's, of every head.
void attends_as_the_oracle(auto& kv, const std::vector<float>& q, double tolerance = 5e-5) {
  for (index_t h = 0; h < kv_heads; ++h) {
    const auto head = kv.head(h);
    const index_t group = head.group(), n = head.length(), dim = head.dim();
    INFO("KV head " << h << ", " << n << " slots, group of " << group << ", dim " << dim);
    std::vector<float> out(q.size()), p(at(group * n)), lse(at(group));
    kvmeld::attend(head, q.data(), out.data(), p, lse);
    const auto theirs = attend(fixtures::to_oracle(head, h), fixtures::to_mat(q.data(), group, dim),
                               head.next_position() - 1);
    CHECK(oracle::difference(fixtures::to_mat(out.data(), group, dim), theirs.output) < tolerance);
    CHECK(oracle::difference(doubles(lse), theirs.lse) < tolerance / 2);
    for (index_t g = 0; g < group; ++g) {
      CHECK(off(std::span(p).subspan(at(g * n), at(n)), theirs.probabilities[at(g)]) < tolerance);
    }
  }
}

struct sums {
  std::vector<float> total, window, decayed, largest;

  sums(const kvmeld::kv_head auto& head, const kvmeld::query_view<float>& queries,
       const kvmeld::column_options& options)
      : total(at(head.length())), window(total), decayed(total), largest(total) {
    column_scores(head, queries, options, {total, window, decayed, largest});
  }
};

/// LAW: a prompt's column sums, its attention query by query, and its scores are the oracle's, of
/// every head, with the prefill's log-sum-exp and without.
void observes_as_the_oracle(auto& kv, index_t count, double tolerance = 1e-4) {
  const index_t group = kv.head(0).group(), dim = kv.head(0).dim();
  const auto rows = normal(count * kv_heads * group * dim);
  const auto all = kvmeld::prompt_queries(rows.data(), count, kv_heads, group, dim);
  for (index_t h = 0; h < kv_heads; ++h) {
    const auto head = kv.head(h);
    const auto own = all.of(h);
    INFO("KV head " << h << ", " << head.length() << " slots, " << count << " queries, group of "
                    << group << ", dim " << dim);
    const oracle::head slow = fixtures::to_oracle(head, h);
    const oracle::tensor queries = fixtures::to_tensor(own, group, dim);
    std::vector<int> positions;
    for (index_t i = 0; i < count; ++i) {
      positions.push_back(own.position_of(i, head.next_position()));
    }
    std::vector<float> given(at(group * count));
    const oracle::mat first = oracle::lookahead_max::own_log_sums(slow, queries, positions);
    for (index_t i = 0; i < group * count; ++i) {
      given[at(i)] = static_cast<float>(first[at(i % count)][at(i / count)]);
    }
    const auto theirs =
        oracle::column_scores(slow, queries, positions, {.window = 5, .decay = 0.9});
    const oracle::vec scores = oracle::lookahead_max{.horizon = 32, .outliers = false}(
        slow, queries, positions, head.next_position());
    for (const bool with : {false, true}) {
      INFO("log-sum-exp " << (with ? "given" : "computed"));
      auto known = own;
      known.log_sum_exp = with ? given.data() : nullptr;
      const sums ours(head, known, {.window = 5, .decay = 0.9F});
      CHECK(off(ours.total, theirs.total) < tolerance);
      CHECK(off(ours.window, theirs.last) < tolerance);
      CHECK(off(ours.decayed, theirs.decayed) < tolerance);
      CHECK(off(ours.largest, theirs.largest) < tolerance);
      if (slow.terms.window > 0) {
        continue;  // what a later query looks for is no question where slots leave by their age
      }
      std::vector<float> score(at(head.length()));
      kvmeld::prompt_scores(head, known, {.horizon = 32, .leverage = false}, score);
      CHECK(off(score, scores, *std::ranges::max_element(scores)) < 3 * tolerance);
    }
    std::size_t next = 0;
    kvmeld::score::for_each_query(
        head, own, group_combine::mean, [&](auto attention, index_t position, index_t visible) {
          const oracle::mat p = attend(slow, queries[next], positions[next]).probabilities;
          oracle::vec mean = oracle::combined(p, oracle::combine::mean);
          const auto sees = oracle::seen_from(slow, positions[next]);
          CHECK((position == positions[next] &&
                 visible == std::count(sees.begin(), sees.end(), true)));
          CHECK(std::accumulate(mean.begin() + std::ssize(attention), mean.end(), 0.0) == 0);
          mean.resize(attention.size());
          CHECK(off(attention, mean) < tolerance);
          ++next;
        });
    CHECK(next == queries.size());
  }
}

TEST_CASE("attention with caps, sinks and slopes is the oracle's", "[oracle][attend][terms]") {
  for (const layer_terms& terms : fixtures::all_terms) {
    for (const index_t group : {1, 2, 4, 17}) {
      for (const index_t dim : {1, 7, 64}) {
        for (const index_t length : {1, 3, 130, 300}) {
          if (group != 17 || dim == 7) {
            INFO(terms.name);
            auto kv = compressed(terms, length, dim, group);
            attends_as_the_oracle(kv, normal(group * dim));
          }
        }
      }
    }
    INFO(terms.name << ", halves");
    auto halves = compressed<Eigen::half>(terms, 150, 33, 2);
    attends_as_the_oracle(halves, normal(2 * 33));
  }
}

TEST_CASE("column sums and prompt scores with caps, sinks and slopes are the oracle's",
          "[oracle][column_scores][prompt_scores][terms]") {
  for (const layer_terms& terms : fixtures::all_terms) {
    for (const index_t group : {1, 2, 4}) {
      INFO(terms.name);
      auto one = compressed(terms, 1, 7, group);
      observes_as_the_oracle(one, 1);
      auto kv = compressed(terms, 70, group == 4 ? 33 : 7, group);
      observes_as_the_oracle(kv, 66);
    }
    INFO(terms.name << ", halves");
    auto halves = compressed<Eigen::half>(terms, 40, 7, 2);
    observes_as_the_oracle(halves, 21);
  }
}

TEST_CASE("reference queries under caps and sinks attend as the oracle's", "[oracle][terms]") {
  // They stand for queries to come: they see all slots, and have no position for slopes.
  for (const layer_terms& terms : fixtures::all_terms) {
    for (const index_t group : {1, 4}) {
      for (const index_t length : {1, 130, 600}) {
        if (terms.slopes || terms.window > 0) {
          continue;
        }
        const index_t dim = 7, count = 40;
        INFO(terms.name << ", " << length << " slots, group of " << group);
        auto kv = compressed(terms, length, dim, group);
        const fixtures::queries q(count, group, dim);
        for (index_t h = 0; h < kv_heads; ++h) {
          const auto head = kv.head(h);
          using namespace kvmeld;
          const auto ours =
              dense::attend(dense::queries(q.view(), group, dim), dense::keys(head),
                            dense::values(head), dense::log_mass(head), score::logit_terms(head));
          const oracle::tensor rows = q.tensor();
          oracle::vec mass(at(length));
          for (index_t i = 0; i < count; ++i) {
            const auto theirs = attend(fixtures::to_oracle(head, h), rows[at(i)]);
            for (index_t g = 0; g < group; ++g) {
              const Eigen::Index r = Eigen::Index{g} * count + i;
              CHECK(oracle::difference(ours.log_sum_exp[r], theirs.lse[at(g)]) < 5e-5);
              CHECK(oracle::difference(fixtures::to_mat(&ours.output(r, 0), 1, dim)[0],
                                       theirs.output[at(g)]) < 5e-5);
              for (std::size_t s = 0; s < mass.size(); ++s) {
                mass[s] += theirs.probabilities[at(g)][s];
              }
            }
          }
          CHECK(off({ours.mass.data(), at(length)}, mass) < 1e-4);
        }
      }
    }
  }
}

TEST_CASE("logits of 1e4 under caps, sinks and slopes", "[oracle][attend][terms]") {
  // Whole numbers and slopes of powers of two: the logits are exact without a cap.
  for (layer_terms terms : fixtures::all_terms) {
    for (const float size : {1e4F, -1e4F}) {
      INFO(terms.name << ", " << size);
      terms.spread = std::sqrt(2.0F);  // a scale of 1
      if (!terms.sinks.empty()) {
        terms.sinks = {size, size + 2, 0, -size};
      }
      for (const index_t length : {1, 5, 129}) {
        fixtures::cache<float> kv{terms.shape(kv_heads, 2, 2, length)};
        std::vector<float> keys;
        for (index_t s = 0; s < length; ++s) {
          keys.insert(keys.end(), {100, static_cast<float>(s % 3)});
        }
        for (index_t h = 0; h < kv_heads; ++h) {
          kv.append(h, keys, normal(2 * length));
          kv.head(h).log_mass(length / 2) = 3;
        }
        attends_as_the_oracle(kv, {size / 100, 0, size / 100, 1});
      }
    }
  }
}

TEST_CASE("a prompt's sums are those of its tokens decoded one by one, whatever the layer's terms",
          "[column_scores][terms]") {
  const index_t tokens = 90, dim = 16, group = 2, window = 8;
  for (const layer_terms& terms : fixtures::all_terms) {
    INFO(terms.name);
    const auto shape = terms.shape(kv_heads, group, dim, tokens);
    auto kv = fixtures::random_cache(tokens, shape);
    fixtures::cache<float> decoded{shape};
    const auto rows = normal(tokens * kv_heads * group * dim);
    const auto all = kvmeld::prompt_queries(rows.data(), tokens, kv_heads, group, dim);
    for (index_t h = 0; h < kv_heads; ++h) {
      INFO("KV head " << h);
      oracle::vec total(at(tokens)), last(at(tokens)), decayed(at(tokens)), largest(at(tokens));
      std::vector<float> out(at(group * dim));
      for (index_t t = 0; t < tokens; ++t) {
        const auto head = decoded.head(h);
        head.push(kv.head(h).key(t).data, kv.head(h).value(t).data);
        std::vector<float> p(at(group * (t + 1)));
        kvmeld::attend(head, all.of(h).at(0, t), out.data(), p);
        for (index_t s = 0; s <= t; ++s) {
          const double a = p[at(s)], b = p[at(t + 1 + s)];
          total[at(s)] += a + b;
          last[at(s)] += t >= tokens - window ? a + b : 0;
          decayed[at(s)] = 0.9 * decayed[at(s)] + a + b;
          largest[at(s)] = std::max({largest[at(s)], a, b});
        }
      }
      const sums ours(kv.head(h), all.of(h), {.window = window, .decay = 0.9F});
      CHECK(off(ours.total, total) < 1e-4);
      CHECK(off(ours.window, last) < 1e-4);
      CHECK(off(ours.decayed, decayed) < 1e-4);
      CHECK(off(ours.largest, largest) < 1e-4);
    }
  }
}

}  // namespace score_layer_terms_test
