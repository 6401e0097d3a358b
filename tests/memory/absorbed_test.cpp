// SPDX-License-Identifier: MIT
// A layer of DeepSeek-V3's shape, decoded over its latent rows and over the keys and values that
// they stand for: the outputs are the same, as long as the same slots are kept.
#include <Eigen/Core>
#include <catch2/catch.hpp>
#include <set>
#include <vector>

#include "support/fixtures.hpp"
#include "support/policies.hpp"

namespace absorbed_test {

using kvmeld::index_t;
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr index_t heads = 128, latent = 512, turned = 64, plain = 128, of_values = 128;
constexpr index_t tokens = 24, budget = 14;

matrix random(index_t rows, index_t columns, float scale = 1) {
  const auto x = fixtures::normal(rows * columns, scale);
  return Eigen::Map<const matrix>(x.data(), rows, columns);
}

/// The model's layer with queries on one KV head of latent rows, or on one KV head each.
kvmeld::attention_spec spec_of(bool absorbed) {
  return {.kv_heads = absorbed ? 1 : heads,
          .group = absorbed ? heads : 1,
          .key_dim = (absorbed ? latent : plain) + turned,
          .value_dim = absorbed ? latent : of_values,
          .scale = 1 / std::sqrt(static_cast<float>(plain + turned)),
          .rope = kvmeld::rotary::interleaved(10'000).dims(turned).last()};
}

/// Rows of one token, as both ways of decoding it are given them.
struct token {
  matrix latent_row, absorbed_query;            // [1, latent + turned], [heads, the same]
  matrix expanded_query, expanded_key, values;  // [heads, plain + turned], ..., [heads, of_values]
};

/// Random weights: keys and values of every head are made of a token's latent numbers.
struct layer {
  matrix to_keys = random(heads * plain, latent, 1 / std::sqrt(float{latent})),
         to_values = random(heads * of_values, latent, 1 / std::sqrt(float{latent}));

  token at(index_t position) const {
    const kvmeld::rotary rope = spec_of(true).rope;
    const auto rotate = [&](matrix& rows) {
      for (Eigen::Index r = 0; r < rows.rows(); ++r) {
        rope.rotate(kvmeld::row<float>{&rows(r, 0)}, static_cast<index_t>(rows.cols()), position);
      }
    };
    token t{random(1, latent + turned), matrix(heads, latent + turned),
            random(heads, plain + turned), matrix(heads, plain + turned), matrix(heads, of_values)};
    rotate(t.latent_row), rotate(t.expanded_query);
    const Eigen::VectorXf c = t.latent_row.leftCols(latent).transpose();
    for (index_t h = 0; h < heads; ++h) {
      const auto up = to_keys.middleRows(h * plain, plain);
      t.absorbed_query.row(h) << t.expanded_query.row(h).head(plain) * up,
          t.expanded_query.row(h).tail(turned);
      t.expanded_key.row(h) << (up * c).transpose(), t.latent_row.rightCols(turned);
    }
    const Eigen::VectorXf v = to_values * c;
    t.values = Eigen::Map<const matrix>(v.data(), heads, of_values);
    return t;
  }
  /// The heads' outputs `[heads, of_values]` of what attention put out over latent rows.
  matrix of_latent(const std::vector<float>& out) const {
    const Eigen::Map<const matrix> o(out.data(), heads, latent);
    matrix y(heads, of_values);
    for (index_t h = 0; h < heads; ++h) {
      y.row(h) =
          (to_values.middleRows(h * of_values, of_values) * o.row(h).transpose()).transpose();
    }
    return y;
  }
};

std::span<const float> numbers(const matrix& x) {
  return {x.data(), static_cast<std::size_t>(x.size())};
}

/// Keeps the slots of these positions alone.
void keep(const kvmeld::head_ref& head, const std::set<index_t>& positions) {
  kvmeld::merge_plan plan;
  plan.reset(head.length());
  for (index_t s = 0; s < head.length(); ++s) {
    if (positions.contains(head.position(s))) {
      plan.keep(s, 0);
    }
  }
  apply(plan, head);
}

TEST_CASE("latent attention absorbed is that over expanded keys and values", "[latent]") {
  const layer model;
  std::vector<token> stream;
  for (index_t t = 0; t < tokens; ++t) {
    stream.push_back(model.at(t));
  }
  for (const kvmeld::any_policy_or_peer& policy : std::vector<kvmeld::any_policy_or_peer>{
           kvmeld::full_cache{}, kvmeld::h2o{}, kvmeld::streaming_llm{}}) {
    INFO(policy.name());
    std::vector<float> rows((tokens + 1) * (latent + turned));
    kvmeld::strided_cache one(spec_of(true), {.capacity = tokens + 1},
                              kvmeld::rows(rows, kvmeld::layout::nhd),
                              kvmeld::rows(rows, kvmeld::layout::nhd));
    kvmeld::cache expanded(spec_of(false), {.capacity = tokens + 1});
    kvmeld::compressor meld(one, policy, kvmeld::budget{budget});
    std::vector<float> out(heads * latent);
    float worst = 0;
    for (const token& t : stream) {
      meld.step(one.heads(0, 0), {numbers(t.absorbed_query), numbers(t.latent_row), {}}, out);
      expanded.append(expanded.heads(0, 0), numbers(t.expanded_key), numbers(t.values), 1);
      matrix expected(heads, of_values);
      for (index_t h = 0; h < heads; ++h) {
        kvmeld::attend(expanded.head(h), &t.expanded_query(h, 0), &expected(h, 0));
      }
      worst = std::max(worst, (model.of_latent(out) - expected).cwiseAbs().maxCoeff());
      std::set<index_t> kept;
      for (index_t s = 0; s < one.head(0).length(); ++s) {
        kept.insert(one.head(0).position(s));
      }
      for (index_t h = 0; h < heads; ++h) {
        keep(expanded.head(h), kept);
      }
    }
    CHECK(one.head(0).length() == (kvmeld::declared(policy).evicts() ? budget : tokens));
    CHECK(worst < 1e-5F);
  }
}

}  // namespace absorbed_test
