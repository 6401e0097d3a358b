// SPDX-License-Identifier: MIT
// The laws of every policy, from one list.
#include "support/policies.hpp"

#include <catch2/catch.hpp>
#include <limits>

#include "support/fixtures.hpp"
#include "support/placed.hpp"

namespace policies_test {

using fixtures::every_policy;
using fixtures::index_t;
using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::budget;

/// A head with `tokens` random tokens that has been observed with all its prompt's queries.
struct observed {
  fixtures::cache<float> kv;
  fixtures::queries queries;
  fixtures::state state;

  observed(const any_policy& policy, index_t tokens, index_t dim = 16, index_t group = 2,
           float scale = 1)
      : kv(fixtures::random_cache<float>(tokens, dim, group, tokens + 8)),
        queries(tokens, group, dim, scale),
        state(fixtures::make_state(policy, kv)) {
    kvmeld::observe(policy, kv.head(0), state[0], queries.view());
  }
  void compress(const any_policy& policy, index_t target) {
    kvmeld::compress(policy, kv.head(0), state[0], state.workspace(), {target}, queries.view());
  }
};

void same_plan(const kvmeld::merge_plan& a, const kvmeld::merge_plan& b) {
  REQUIRE(a.rows() == b.rows());
  for (index_t r = 0; r < a.rows(); ++r) {
    CHECK(std::ranges::equal(a.row(r), b.row(r)));
    CHECK(a.log_mass(r) == b.log_mass(r));
  }
}

/// The slots of a head as a set, in position order.
template <class Head>
std::vector<std::vector<float>> as_set(const Head& head) {
  std::vector<std::vector<float>> rows;
  for (index_t s = 0; s < head.length(); ++s) {
    std::vector<float> r{static_cast<float>(head.position(s)), head.log_mass(s)};
    for (index_t i = 0; i < head.dim(); ++i) {
      r.push_back(static_cast<float>(head.key(s)[i]));
      r.push_back(static_cast<float>(head.value(s)[i]));
    }
    rows.push_back(r);
  }
  std::ranges::sort(rows);
  return rows;
}

/// Is no number of the head NaN or infinite?
bool finite(const fixtures::head_view<float>& head) {
  return std::ranges::all_of(fixtures::bytes_of(head), [](float x) { return std::isfinite(x); });
}

TEST_CASE("a plan obeys its laws and is pure", "[laws]") {
  const index_t tokens = GENERATE(30, 64, 129);
  for (const auto& [name, policy, sinks, keeps_bytes, ranks, exact, latest] : every_policy()) {
    observed o(policy, tokens);
    // In decode there are no queries at hand.
    for (const auto& queries : {o.queries.view(), kvmeld::query_view<float>{}}) {
      if (queries.count == 0 && !kvmeld::declared(policy).supports_decode()) {
        continue;
      }
      for (index_t target = kvmeld::declared(policy).min_budget(); target <= tokens + 2;
           target += 5) {
        INFO(name << ", " << tokens << " tokens, target " << target << ", " << queries.count
                  << " queries");
        const auto before = fixtures::bytes_of(o.kv.head(0));
        kvmeld::slot_scratch scratch;
        kvmeld::merge_plan plan, again;
        kvmeld::plan(policy, o.kv.head(0), o.state[0], queries, target, scratch, plan);
        kvmeld::plan(policy, o.kv.head(0), o.state[0], queries, target, scratch, again);
        CHECK_NOTHROW(kvmeld::check(plan));
        same_plan(plan, again);
        CHECK(fixtures::bytes_of(o.kv.head(0)) == before);
        const index_t rows = kvmeld::declared(policy).evicts() ? std::min(target, tokens) : tokens;
        CHECK(plan.rows() <= rows);
        CHECK((plan.rows() == rows || !exact));
        if (target >= tokens) {
          same_plan(plan, kvmeld::identity(o.kv.head(0)));
        }
      }
    }
  }
}

TEST_CASE("sinks and the latest tokens survive, and keep their bytes", "[laws]") {
  for (const auto& [name, policy, sinks, keeps_bytes, ranks, exact, latest] : every_policy()) {
    INFO(name);
    observed o(policy, 100);
    const auto head = o.kv.head(0);
    const auto all = as_set(head);
    o.compress(policy, 40);
    const auto kept = as_set(head);
    const bool bytes = keeps_bytes;  // clang 14 captures no binding
    const auto survives = [&](index_t position) {
      const auto& whole = all[static_cast<std::size_t>(position)];
      return std::ranges::any_of(
          kept, [&](const auto& row) { return bytes ? row == whole : row[0] == whole[0]; });
    };
    for (index_t position = 0; position < sinks; ++position) {
      CHECK(survives(position));
    }
    for (index_t position = 100 - latest; position < 100; ++position) {
      CHECK(survives(position));
    }
  }
}

TEST_CASE("slots that stay do not move, and those of the plan are left", "[laws]") {
  const index_t freed = GENERATE(1, 2, 7);
  for (const auto& [name, policy, sinks, keeps_bytes, ranks, exact, latest] : every_policy()) {
    INFO(name << ", " << freed << " slots freed at once");
    observed o(policy, 90);
    const index_t target = 40;
    o.compress(policy, target);
    const auto head = o.kv.head(0);
    const auto slot = [&](index_t s) {
      std::vector<float> x{static_cast<float>(head.position(s)), head.log_mass(s)};
      for (index_t i = 0; i < head.dim(); ++i) {
        x.insert(x.end(), {head.key(s)[i], head.value(s)[i]});
      }
      return x;
    };
    for (int round = 0; round < 5 && kvmeld::declared(policy).evicts() &&
                        kvmeld::declared(policy).supports_decode();
         ++round) {
      while (head.length() < target + freed) {
        head.push(fixtures::normal(16).data(), fixtures::normal(16).data());
        o.state[0].extend(head.length());
        std::vector<float> p(2 * static_cast<std::size_t>(head.length()));
        std::vector<float> out(32), log_sum_exp(2);
        const auto q = fixtures::normal(32);
        kvmeld::declared(policy).attend(head, o.state[0], q.data(), out.data(), p, log_sum_exp);
        kvmeld::observe(policy, head, o.state[0], o.state.workspace(),
                        {.probabilities = p, .log_sum_exp = log_sum_exp, .query = q.data()});
      }
      kvmeld::slot_scratch scratch;
      kvmeld::merge_plan plan;
      kvmeld::plan(policy, head, o.state[0], target, scratch, plan);
      std::vector<std::vector<float>> before;
      for (index_t s = 0; s < head.length(); ++s) {
        before.push_back(slot(s));
      }
      const auto of = [&](index_t s) -> auto& { return before[static_cast<std::size_t>(s)]; };
      kvmeld::apply(policy, plan, head, o.state[0], scratch);
      const auto placed = fixtures::placed(plan);
      REQUIRE(head.length() == plan.rows());
      for (index_t r = 0; r < plan.rows(); ++r) {
        const index_t s = placed[static_cast<std::size_t>(r)], anchor = plan.anchor(r);
        REQUIRE(head.position(s) == static_cast<index_t>(of(anchor)[0]));
        REQUIRE((s == anchor || anchor >= plan.rows()));
        if (!plan.changes_row(r)) {
          of(anchor)[1] = plan.log_mass(r);
          REQUIRE(slot(s) == of(anchor));
        }
      }
      kvmeld::declared(policy).after_compress(head, o.state[0], target);
    }
  }
}

TEST_CASE("values enter linearly: scaling V scales the compressed V", "[laws]") {
  for (const auto& [name, policy, sinks, keeps_bytes, ranks, exact, latest] : every_policy()) {
    INFO(name);
    observed o(policy, 80);
    auto doubled = o.kv;
    for (index_t s = 0; s < 80; ++s) {
      for (index_t i = 0; i < 16; ++i) {
        doubled.head(0).value(s)[i] *= 2;
      }
    }
    auto state = o.state;
    o.compress(policy, 40);
    kvmeld::compress(policy, doubled.head(0), state[0], state.workspace(), {40}, o.queries.view());
    bool same = o.kv.head(0).length() == doubled.head(0).length();
    for (index_t s = 0; same && s < o.kv.head(0).length(); ++s) {
      for (index_t i = 0; i < 16; ++i) {
        same = same && doubled.head(0).value(s)[i] == 2 * o.kv.head(0).value(s)[i] &&
               doubled.head(0).key(s)[i] == o.kv.head(0).key(s)[i];
      }
    }
    CHECK(same);
  }
}

// ------------------------------------------------------------------------------ hard inputs

TEST_CASE("ties, zeros, duplicates and huge logits leave exactly the budget", "[hard]") {
  const float scale = GENERATE(0.0F, 1.0F, 1e4F);
  const bool duplicates = GENERATE(false, true);
  const index_t dim = GENERATE(1, 7, 16), group = GENERATE(1, 3);
  for (const auto& [name, policy, sinks, keeps_bytes, ranks, exact, latest] : every_policy()) {
    INFO(name << ", scale " << scale << ", dim " << dim << ", group " << group
              << (duplicates ? ", duplicates" : ""));
    auto kv = fixtures::random_cache(80, dim, group, 90);
    if (duplicates) {
      for (index_t s = 1; s < 80; ++s) {
        for (index_t i = 0; i < dim; ++i) {
          kv.head(0).key(s)[i] = kv.head(0).key(0)[i] * scale;
        }
      }
    }
    auto state = fixtures::make_state(policy, kv);
    const fixtures::queries queries(80, group, dim, scale);
    fixtures::compress(policy, kv, state, queries.view(), budget{32});
    const index_t length = kv.head(0).length();
    CHECK((length == (kvmeld::declared(policy).evicts() ? 32 : 80) || (!exact && length < 32)));
    CHECK(finite(kv.head(0)));
    std::vector<float> out(static_cast<std::size_t>(group * dim));
    for (index_t t = 0; kvmeld::declared(policy).supports_decode() && t < 5; ++t) {
      fixtures::step(
          policy, kv, state,
          {fixtures::normal(group * dim, scale), fixtures::normal(dim), fixtures::normal(dim)},
          budget{32}, out);
      CHECK(kv.head(0).length() == (kvmeld::declared(policy).evicts() ? 32 : 81 + t));
      CHECK(finite(kv.head(0)));
      CHECK(std::ranges::all_of(out, [](float x) { return std::isfinite(x); }));
    }
  }
}

TEST_CASE("a NaN score ranks last and changes no law", "[hard]") {
  for (const auto& [name, policy, sinks, keeps_bytes, ranks, exact, latest] : every_policy()) {
    observed o(policy, 60);
    if (o.state[0].slot_stats() == 0 || !ranks) {
      continue;
    }
    INFO(name);
    for (const index_t s : {10, 20, 21}) {
      o.state[0].column(0)[static_cast<std::size_t>(s)] = std::numeric_limits<float>::quiet_NaN();
    }
    kvmeld::slot_scratch scratch;
    kvmeld::merge_plan plan;
    kvmeld::plan(policy, o.kv.head(0), o.state[0], kvmeld::query_view<float>{}, 40, scratch, plan);
    CHECK_NOTHROW(kvmeld::check(plan));
    CHECK(plan.rows() == 40);
    for (index_t r = 0; r < plan.rows(); ++r) {
      const bool alone = plan.row(r).size() == 1 && plan.log_mass(r) == 0.0F;
      CHECK_FALSE(
          (alone && (plan.anchor(r) == 10 || plan.anchor(r) == 20 || plan.anchor(r) == 21)));
    }
  }
}

TEST_CASE("one token, and a prompt that fits, stay as they are", "[hard]") {
  const index_t tokens = GENERATE(1, 2, 40);
  for (const auto& [name, policy, sinks, keeps_bytes, ranks, exact, latest] : every_policy()) {
    INFO(name << ", " << tokens << " tokens");
    auto kv = fixtures::random_cache(tokens, 5, 1, 64);
    const auto before = fixtures::bytes_of(kv.head(0));
    auto state = fixtures::make_state(policy, kv);
    fixtures::compress(policy, kv, state, fixtures::queries(tokens, 1, 5).view(), budget{40});
    CHECK(fixtures::bytes_of(kv.head(0)) == before);
  }
}

TEST_CASE("a prompt's queries and those of steps are counted once", "[laws]") {
  for (const auto& [name, policy, sinks, keeps_bytes, ranks, exact, latest] : every_policy()) {
    INFO(name);
    auto kv = fixtures::random_cache(40, 8, 2, 48);
    auto state = fixtures::make_state(policy, kv);
    fixtures::compress(policy, kv, state, fixtures::queries(40, 2, 8).view(), budget{32});
    const bool shown = kvmeld::declared(policy).uses_attention() ||
                       kvmeld::declared(policy).prompt_use().needs_queries();
    CHECK(state[0].observed() == (shown ? 40 : 0));
    std::vector<float> out(16);
    for (index_t t = 1; kvmeld::declared(policy).supports_decode() && t <= 3; ++t) {
      fixtures::step(policy, kv, state,
                     {fixtures::normal(16), fixtures::normal(8), fixtures::normal(8)}, budget{32},
                     out);
      CHECK(state[0].observed() ==
            (shown ? 40 : 0) + (kvmeld::declared(policy).uses_attention() ? t : 0));
    }
  }
}

}  // namespace policies_test
