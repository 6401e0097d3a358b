// SPDX-License-Identifier: MIT
/// What a compressed prompt changes of attention's output, against slow loops.
#include "evaluate/attention_error.hpp"

#include <catch2/catch.hpp>

#include "engine/prefill.hpp"
#include "support/tiny_model.hpp"

namespace attention_error_test {

using test::tiny_model;

constexpr int prompt_tokens = 96, future = 12;

/// Attention of query head `h` of future token `t` over the slots of `head` and the tokens behind
/// them, in double.
std::vector<double> attended(const auto& head, const engine::layer_record& behind, int h, int t,
                             int dim) {
  std::vector<double> out(static_cast<std::size_t>(dim));
  double all = 0;
  const auto take = [&](const auto& key, const auto& value, double log_mass) {
    double dot = 0;
    for (int i = 0; i < dim; ++i) {
      dot += double{behind.q(t, h * dim + i)} * double{key(i)};
    }
    const double e = std::exp(dot / std::sqrt(1.0 * dim) + log_mass);
    all += e;
    for (int i = 0; i < dim; ++i) {
      out[static_cast<std::size_t>(i)] += e * double{value(i)};
    }
  };
  for (int s = 0; s < head.length(); ++s) {
    take([&](int i) { return head.key(s)[i]; }, [&](int i) { return head.value(s)[i]; },
         head.log_mass(s));
  }
  for (int s = 0; s <= t; ++s) {  // two query heads on one KV head
    take([&](int i) { return behind.k(s, i); }, [&](int i) { return behind.v(s, i); }, 0);
  }
  for (double& x : out) {
    x /= all;
  }
  return out;
}

TEST_CASE("the output error is of the residual stream behind each layer's attention") {
  const tiny_model files;
  const auto model = engine::decoder::load(files.file(""));
  const engine::config& shape = model.shape();
  std::vector<int> text;
  for (const char c : engine::read_file(files.file("text.txt")).substr(0, 400)) {
    text.push_back(c);
  }
  const std::vector<evaluate::named_policy> policies = {
      {.name = "h2o", .policy = kvmeld::h2o{}},
      {.name = "fold", .policy = kvmeld::fold{}, .queries = evaluate::query_source::lookahead},
      {.name = "full_cache", .policy = evaluate::full_cache()}};
  std::vector<evaluate::text_prompt> prompts;
  for (const std::size_t first : {0U, 40U}) {
    prompts.push_back(evaluate::read_prompt(model, policies, std::span(text).subspan(first),
                                            prompt_tokens, future, prompt_tokens + future + 1,
                                            false, nullptr));
  }
  std::ostringstream nowhere;
  evaluate::progress bar(nowhere, false);
  const evaluate::workers on(1, bar);
  for (const std::size_t i : {0U, 1U}) {
    INFO(policies[i].name);
    const evaluate::contender chosen{.index = i, .policy = policies[i].policy, .limit = {40}};
    std::vector<double> expected;
    for (std::size_t n = 0; n < prompts.size(); ++n) {
      // What each layer's attention is added to, of the whole text at once.
      std::vector<engine::row_major_matrix> streams;
      engine::decoder::scratch work;
      engine::row_major_matrix logits;
      model.forward(
          work, std::span(text).subspan(n == 0 ? 0 : 40, prompt_tokens + future), 0,
          [&](int, const auto& q, const auto& k, const auto& v, auto& out) {
            streams.push_back(work.stream.bottomRows(future));
            out = engine::causal_attention(q, k, v, shape.attention(0), 0);
          },
          logits);
      const evaluate::compressed_cache ours(chosen, prompts[n].read);
      auto full = prompts[n].read.cache();
      double squares = 0;
      for (std::size_t l = 0; l < 2; ++l) {
        const auto& projection = model.parameters().layers[l].o.weight;
        const auto& behind = prompts[n].future[l].tokens;
        const auto head = static_cast<kvmeld::index_t>(l);
        for (int t = 0; t < future; ++t) {
          double difference = 0, whole = 0;
          for (int row = 0; row < shape.hidden; ++row) {
            double off = 0, stream = streams[l](t, row);
            for (int h = 0; h < shape.heads; ++h) {
              const auto a = attended(ours.kv().head(head), behind, h, t, shape.dim);
              const auto b = attended(full.head(head), behind, h, t, shape.dim);
              for (int d = 0; d < shape.dim; ++d) {
                const double w = projection(row, h * shape.dim + d);
                const auto at = static_cast<std::size_t>(d);
                off += w * (a[at] - b[at]), stream += w * b[at];
              }
            }
            difference += off * off, whole += stream * stream;
          }
          squares += difference / whole;
        }
      }
      expected.push_back(std::sqrt(squares / 2 / future));
    }
    const auto found = evaluate::errors_of(chosen, model, prompts, on).output;
    CHECK(found.mean == Approx((expected[0] + expected[1]) / 2).epsilon(1e-4));
    REQUIRE(found.error.has_value());
    CHECK(*found.error == Approx(std::abs(expected[0] - expected[1]) / 2).epsilon(1e-3));
    CHECK(found.mean > 0.001);
  }
  const evaluate::contender full{
      .index = 2, .policy = evaluate::full_cache(), .limit = {prompt_tokens}};
  CHECK(evaluate::errors_of(full, model, prompts, on).output.mean == 0);
}

}  // namespace attention_error_test
