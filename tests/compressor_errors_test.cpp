// SPDX-License-Identifier: MIT
// Heads, rows and budgets that a compressor refuses, and nothing has changed after it.
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "support/model.hpp"
#include "support/policies.hpp"
#include "support/refusals.hpp"

namespace compressor_errors_test {

using fixtures::normal;
using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::budget;
using kvmeld::head_range;
using kvmeld::head_selection;
using kvmeld::index_t;
using list = std::vector<index_t>;

/// Three heads with a prompt, and a step's rows of the first two.
struct model {
  static constexpr index_t heads = 3, group = 2, dim = 4, tokens = 14, capacity = 24;

  kvmeld::cache kv{{.kv_heads = heads, .group = group, .key_dim = dim}, {.capacity = capacity}};
  kvmeld::compressor<any_policy> meld{kv, kvmeld::h2o{}, budget{12, 13}};
  std::vector<float> queries = normal(tokens * heads * group * dim), q = normal(2 * group * dim),
                     k = normal(2 * dim), v = normal(2 * dim), out = q;

  model() {
    const auto rows = normal(tokens * heads * dim);
    kv.append(kv.heads(0, 0), rows, rows, tokens);
    meld.prompt(kv.heads(0, 0), kvmeld::queries(queries, tokens, kv.spec()));
    meld.end_prompt(0);
  }
  std::vector<float> everything() {
    std::vector<float> all = out;
    for (index_t h = 0; h < heads; ++h) {
      const auto bytes = fixtures::bytes_of(kv.head(h));
      all.insert(all.end(), bytes.begin(), bytes.end());
      all.push_back(static_cast<float>(kv.head(h).next_position()));
      const auto scores = meld.state(h).column(0);
      all.insert(all.end(), scores.begin(), scores.end());
    }
    return all;
  }
  void refuses(const std::string& message, const std::function<void()>& call) {
    const auto before = everything();
    CHECK_THROWS_WITH(call(), Catch::Contains(message));
    CHECK(everything() == before);
  }
};

TEST_CASE("heads that are not there or come twice are refused by every call", "[heads][errors]") {
  model m;
  const auto refused = [&](const std::string& message, const head_selection& chosen) {
    m.refuses("step: " + message, [&] { m.meld.step(chosen, {m.q, m.k, m.v}, m.out); });
    m.refuses("compress: " + message, [&] { m.meld.compress(chosen); });
    m.refuses("observe: " + message, [&] { m.meld.observe(chosen, {}); });
    m.refuses("draft: " + message, [&] { m.meld.draft(chosen, {m.q, m.k, m.v}, m.out, 1); });
    m.refuses("prompt: " + message, [&] {
      m.meld.prompt(chosen, kvmeld::queries(m.queries, model::tokens, m.kv.spec()));
    });
  };
  for (const head_range r : {head_range{0, 4}, {3, 1}, {4, 0}, {-1, 1}, {1, -1}, {2, 2147483647}}) {
    refused("expected a range of heads within 0 to 2, got " + std::to_string(r.count) +
                " heads from " + std::to_string(r.first),
            r);
  }
  refused("expected heads 0 to 2, got 3", list{0, 3});
  refused("expected heads 0 to 2, got -1", list{-1});
  refused("expected each head once, got head 1 twice", list{1, 2, 1});
  refused("expected a list of heads, got null",
          std::span<const index_t>(static_cast<const index_t*>(nullptr), 2));
}

TEST_CASE("rows of other heads than those chosen, in any scalar, are refused", "[heads][errors]") {
  model m;
  const list two = {2, 0};
  const auto all = normal(24);
  const auto refused = [&](const std::string& message, const kvmeld::step_input& in,
                           std::span<float> out) {
    m.refuses(message, [&] { m.meld.step(two, in, out); });
  };
  const auto &q = m.q, &k = m.k, &v = m.v;
  refused("step: expected q [1, 2, 2, 4] (16 numbers), got 24", {all, k, v}, m.out);
  refused("step: expected q [1, 2, 2, 4] (16 numbers), got 8", {k, k, v}, m.out);
  refused("step: expected k [1, 2, 1, 4] (8 numbers), got 16", {q, q, v}, m.out);
  refused("step: expected v [1, 2, 1, 4] (8 numbers), got 16", {q, k, q}, m.out);
  refused("step: expected out [1, 2, 2, 4] (16 numbers), got 15", {q, k, v},
          std::span(m.out).first(15));
  const std::span<const float> null(static_cast<const float*>(nullptr), 8);
  refused("step: expected k [1, 2, 1, 4] (8 numbers), got null", {q, null, v}, m.out);
  std::vector<Eigen::half> half(8);
  refused("step: expected v [1, 2, 1, 4] (8 numbers), got 7", {q, k, std::span(half).first(7)},
          m.out);
  half[5] = std::numeric_limits<Eigen::half>::infinity();  // of the second row, which is head 0's
  for (const kvmeld::step_input& in : {kvmeld::step_input{q, half, v}, {q, k, half}}) {
    const index_t next = m.kv.head(0).next_position();
    CHECK_THROWS_WITH(m.meld.step(two, in, m.out), Catch::Contains("NaN or Inf in head 0 "));
    CHECK(m.kv.head(0).next_position() == next);
  }
}

TEST_CASE("a step without room for one of its heads is refused", "[errors]") {
  model m;
  const auto rows = normal(12 * model::dim);
  m.kv.append(head_range{2, 1}, rows, rows, 12);  // head 2 is full; the others have room
  m.refuses("expected a free slot for the token, got all 24 slots in use", [&] {
    m.meld.step(list{0, 2}, {m.q, m.k, m.v}, m.out);
  });
  CHECK_NOTHROW(m.meld.step(list{0, 1}, {m.q, m.k, m.v}, m.out));
}

TEST_CASE("policies and budgets are one, or one for each head of a request", "[errors]") {
  model m;
  const auto made = [&](std::size_t policies, std::size_t budgets, index_t last) {
    std::vector<any_policy> each(policies, any_policy(kvmeld::h2o{}));
    std::vector<budget> limits(budgets, budget{12});
    limits.back().slots = last;
    kvmeld::compressor<any_policy> meld(m.kv, each, limits);
  };
  m.refuses("expected policies: one, or one for each of 3 heads of a request, got 2",
            [&] { made(2, 3, 12); });
  m.refuses("expected budgets: one, or one for each of 3 heads of a request, got 4",
            [&] { made(3, 4, 12); });
  m.refuses("h2o: expected a budget of at least 1 slot, got 0", [&] { made(1, 3, 0); });
  CHECK_NOTHROW(made(3, 3, 12));
  CHECK_NOTHROW(made(1, 1, 12));
}

TEST_CASE("null is refused by every call that takes rows or lists", "[errors]") {
  model m;
  const list two = {0, 1};
  const auto null = [](index_t n) {
    return std::span<const float>(static_cast<const float*>(nullptr), static_cast<std::size_t>(n));
  };
  const std::span<float> no_out(static_cast<float*>(nullptr), m.out.size());
  const auto &q = m.q, &k = m.k, &v = m.v;
  const auto all = m.kv.heads(0, 0);
  for (const kvmeld::step_input& in :
       {kvmeld::step_input{null(16), k, v}, {q, null(8), v}, {q, k, null(8)}}) {
    m.refuses("got null", [&] { m.meld.step(two, in, m.out); });
    m.refuses("got null", [&] { m.meld.draft(two, in, m.out, 1); });
  }
  m.refuses("step: expected out", [&] { m.meld.step(two, {q, k, v}, no_out); });
  m.refuses("draft: expected out", [&] { m.meld.draft(two, {q, k, v}, no_out, 1); });
  m.refuses("append: expected keys [1, 3, 4] (12 numbers), got null",
            [&] { m.kv.append(all, null(12), std::vector<float>(12), 1); });
  m.refuses("append: expected values [1, 3, 4] (12 numbers), got null",
            [&] { m.kv.append(all, std::vector<float>(12), null(12), 1); });
  m.refuses("queries: expected rows, got null", [&] { kvmeld::queries(null(24), 1, m.kv.spec()); });
  m.refuses("queries: expected log_sum_exp, got null", [&] {
    (void)kvmeld::queries(m.queries, model::tokens, m.kv.spec())
        .with_log_sum_exp(null(6 * model::tokens));
  });
  m.refuses("queries: expected hidden_norm, got null", [&] {
    (void)kvmeld::queries(m.queries, model::tokens, m.kv.spec())
        .with_hidden_norm(null(model::tokens));
  });
  const std::vector<float> p(3 * 2 * 12, 0.1F);
  m.refuses("probabilities [3, 2, 12] (72 numbers), got null",
            [&] { m.meld.observe(all, {.probabilities = null(3 * 2 * 12)}); });
  m.refuses("log_sum_exp [3, 2, 1] (6 numbers), got null",
            [&] { m.meld.observe(all, {.probabilities = p, .log_sum_exp = null(6)}); });
  m.refuses("query [3, 2, 4] (24 numbers), got null",
            [&] { m.meld.observe(all, {.probabilities = p, .query = null(24)}); });
  m.refuses("compress: expected lengths, got null",
            [&] { m.meld.compress(all, std::span<index_t>(static_cast<index_t*>(nullptr), 3)); });
  m.refuses("heads: expected a list of requests, got null", [&] {
    (void)m.kv.heads(0, std::span<const index_t>(static_cast<const index_t*>(nullptr), 1));
  });
  const std::vector<any_policy> policies(3, any_policy(kvmeld::h2o{}));
  const std::vector<budget> budgets(3, budget{12});
  m.refuses("compressor: expected policies, got null", [&] {
    kvmeld::compressor<any_policy>(
        m.kv, std::span<const any_policy>(static_cast<const any_policy*>(nullptr), 3), budgets);
  });
  m.refuses("compressor: expected budgets, got null", [&] {
    kvmeld::compressor<any_policy>(m.kv, policies,
                                   std::span<const budget>(static_cast<const budget*>(nullptr), 3));
  });
}

TEST_CASE("short extents and memory of others are refused by every call", "[errors]") {
  model m;
  const list two = {0, 1};
  const auto all = m.kv.heads(0, 0);
  const auto &q = m.q, &k = m.k, &v = m.v;
  m.refuses("draft: expected q [2, 2, 2, 4] (32 numbers), got 16", [&] {
    m.meld.draft(two, {q, k, v}, m.out, 2);
  });
  m.refuses("append: expected values [2, 3, 4] (24 numbers), got 23",
            [&] { m.kv.append(all, std::vector<float>(24), std::vector<float>(23), 2); });
  const std::vector<float> p(3 * 2 * 12, 0.1F);
  const auto first = [](const std::vector<float>& x, std::size_t n) {
    return std::span(x).first(n);
  };
  m.refuses("observe: expected probabilities [3, 2, 12] (72 numbers), got 71",
            [&] { m.meld.observe(all, {.probabilities = first(p, 71)}); });
  m.refuses("a stride of at least 12, got 11",
            [&] { m.meld.observe(all, {.probabilities = first(p, 66), .stride = 11}); });
  m.refuses("observe: expected log_sum_exp [3, 2, 1] (6 numbers), got 5",
            [&] { m.meld.observe(all, {.probabilities = p, .log_sum_exp = first(p, 5)}); });
  m.refuses("observe: expected query [3, 2, 4] (24 numbers), got 16",
            [&] { m.meld.observe(all, {.probabilities = p, .query = q}); });
  m.refuses("the step's probabilities (h2o needs it), got none", [&] { m.meld.observe(all, {}); });
  std::vector<index_t> lengths(2);
  m.refuses("compress: expected lengths [3], got 2", [&] { m.meld.compress(all, lengths); });
  m.refuses("queries: expected log_sum_exp [6, 14] (84 floats), got 83", [&] {
    (void)kvmeld::queries(m.queries, model::tokens, m.kv.spec())
        .with_log_sum_exp(first(m.queries, 83));
  });
  const kvmeld::queries asked(m.queries, model::tokens, m.kv.spec());
  m.refuses("queries: expected hidden_norm [14], got 13 floats",
            [&] { (void)asked.with_hidden_norm(first(m.queries, 13)); });
  for (const float norm : {0.0F, -1.0F, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    std::vector<float> norms(model::tokens, 1.0F);
    norms.back() = norm;
    m.refuses("queries: expected finite hidden_norm above 0",
              [&] { (void)asked.with_hidden_norm(norms); });
  }
  // What is written must not lie in what is read, as by a buffer that is used twice.
  std::vector<float> rows = normal(48);
  const std::span<float> out = std::span(rows).subspan(16, 16);
  const auto at = [&](std::size_t begin, std::size_t n) {
    return std::span<const float>(rows).subspan(begin, n);
  };
  const auto before = rows;
  for (const kvmeld::step_input& in : {kvmeld::step_input{at(16, 16), k, v},
                                       {at(1, 16), k, v},
                                       {q, at(9, 8), v},
                                       {q, k, at(31, 8)}}) {
    m.refuses("step: expected out in memory of its own", [&] { m.meld.step(two, in, out); });
    m.refuses("draft: expected out in memory of its own", [&] { m.meld.draft(two, in, out, 1); });
  }
  CHECK(rows == before);
  CHECK_NOTHROW(m.meld.step(two, {at(0, 16), at(32, 8), at(40, 8)}, out));
}

TEST_CASE("requests and heads that are not there are refused by every call", "[heads][errors]") {
  model m;
  std::stringstream file;
  m.meld.save(file, 0);
  for (const index_t r : {-1, 1, 2147483647}) {
    const auto refused = [&](const std::string& call, const std::function<void()>& f) {
      m.refuses(call + ": expected a request of 0 to 0, got " + std::to_string(r), f);
    };
    refused("end_prompt", [&] { m.meld.end_prompt(r); });
    refused("accept", [&] { m.meld.accept(r, 0); });
    refused("clear", [&] { m.meld.clear(r); });
    refused("copy", [&] { m.meld.copy(0, r); });
    refused("copy", [&] { m.meld.copy(r, 0); });
    refused("save", [&] { m.meld.save(file, r); });
    refused("load", [&] { m.meld.load(file, r); });
  }
  for (const index_t h : {-1, 3, 2147483647}) {
    const auto refused = [&](const std::string& call, const std::function<void()>& f) {
      m.refuses(call + ": expected a head from 0 to 2, got " + std::to_string(h), f);
    };
    refused("state", [&] { (void)m.meld.state(h); });
    refused("limit", [&] { (void)m.meld.limit(h); });
    refused("policy_of", [&] { (void)m.meld.policy_of(h); });
    refused("set_state", [&] { m.meld.set_state(h, m.meld.state(0)); });
    m.refuses("head: expected 0 to 2, got " + std::to_string(h), [&] { (void)m.kv.head(h); });
  }
}

}  // namespace compressor_errors_test
