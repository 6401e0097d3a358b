// SPDX-License-Identifier: MIT
// What observe refuses has not been observed: the state is as it was, and nothing was measured.
#include <catch2/catch.hpp>
#include <map>

#include "support/policies.hpp"
#include "support/saved.hpp"

namespace observe_test {

using fixtures::every_policy;
using fixtures::normal;
using kvmeld::budget;
using kvmeld::index_t;
using kvmeld::observation;

constexpr index_t group = 2, dim = 8;

/// One head under a policy.
struct one {
  kvmeld::any_policy_or_peer policy;
  fixtures::cache<float> kv{{.heads = 1, .group = group, .dim = dim, .capacity = 60}};
  fixtures::state state = fixtures::make_state(policy, kv);

  void append(index_t n) { kv.append(0, normal(n * dim), normal(n * dim)); }
  fixtures::words all() {
    auto all = fixtures::everything(kv, state);
    all.push_back(static_cast<std::uint32_t>(state[0].length()));
    return all;
  }
  /// Does it refuse? Then nothing has changed.
  bool refuses(const std::string& message, const std::function<void()>& call) {
    const auto before = all();
    try {
      call();
    } catch (const kvmeld::error& e) {
      CHECK_THAT(e.what(), Catch::Contains(message));
      CHECK((all() == before));
      return true;
    }
    return false;
  }
};

/// What policies need of a decode step, beside probabilities.
struct needs {
  bool query = false, log_sum_exp = false;
};

TEST_CASE("an attention without what the policy needs is refused, and nothing was observed",
          "[observe][errors]") {
  const std::map<std::string, needs> expected = {{"keepkv", {true, true}},
                                                 {"keepkv code", {true, true}},
                                                 {"expected_attention", {true, false}},
                                                 {"r_kv", {true, false}},
                                                 {"triattention", {true, false}},
                                                 {"fold", {true, false}},
                                                 {"fold by scores", {true, false}},
                                                 {"fold that scores in decode", {true, true}},
                                                 {"ems, entries shared", {true, false}}};
  auto examples = every_policy();
  examples.push_back({"ems, entries shared", kvmeld::ems{.window = 8, .threshold = -1}});
  const auto q = normal(group * dim), lse = normal(group);
  for (const auto& example : examples) {
    INFO(example.name);
    one head{example.policy};
    std::vector<float> out(group * dim);
    for (int t = 0; t < 40 && kvmeld::declared(head.policy).supports_decode();
         ++t) {  // ems shares entries from here on
      step(head.policy, head.kv, head.state, {normal(group * dim), normal(dim), normal(dim)},
           budget{30}, out);
    }
    head.append(3);
    const std::vector<float> a(static_cast<std::size_t>(group * head.kv.head(0).length()), 0.01F);
    const auto refuses = [&](const observation& observed, const std::string& message) {
      return head.refuses(message, [&] {
        observe(head.policy, head.kv.head(0), head.state[0], head.state.workspace(), observed);
      });
    };
    const auto need = expected.contains(example.name) ? expected.at(example.name) : needs{};
    const bool measures = kvmeld::declared(head.policy).uses_attention();
    CHECK(refuses({.probabilities = a, .log_sum_exp = lse}, "query") == (measures && need.query));
    if (need.log_sum_exp) {
      CHECK(refuses({.probabilities = a, .query = q.data()}, "log-sum-exp"));
    }
    CHECK(refuses({.probabilities = std::span(a).first(5)}, "probabilities"));
    CHECK(refuses({.probabilities = a, .log_sum_exp = std::span(lse).first(1)}, "log_sum_exp"));
    CHECK_FALSE(refuses({.probabilities = a, .log_sum_exp = lse, .query = q.data()}, ""));
    CHECK(head.state[0].length() == head.kv.head(0).length());
  }
}

TEST_CASE("queries that are refused were not observed, and compress knows", "[observe][errors]") {
  for (const auto& example : every_policy()) {
    INFO(example.name);
    one head{example.policy};
    head.append(50);
    const auto& p = example.policy;
    const bool takes =
        kvmeld::declared(p).uses_attention() || kvmeld::declared(p).prompt_use().needs_queries();
    CHECK(head.refuses("got null", [&] {
      observe(p, head.kv.head(0), head.state[0], kvmeld::query_view<float>{nullptr, 4});
    }) == takes);
    CHECK(head.refuses("got -1", [&] {
      observe(p, head.kv.head(0), head.state[0], kvmeld::query_view<float>{nullptr, -1});
    }));
    head.state[0].truncate(0);
    const std::vector<float> a(group * 50, 0.02F);
    const bool refused = head.refuses("", [&] {
      observe(p, head.kv.head(0), head.state[0], head.state.workspace(), {.probabilities = a});
    });
    CHECK(refused == (example.name == "keepkv" || example.name == "keepkv code" ||
                      example.policy.name() == "fold" || example.name == "expected_attention" ||
                      example.name == "r_kv" || example.name == "triattention"));
    if (refused) {  // and so there is nothing to compress by
      CHECK(head.refuses("expected reference queries", [&] {
        compress(p, head.kv.head(0), head.state[0], head.state.workspace(), budget{30});
      }));
    }
  }
}

}  // namespace observe_test
