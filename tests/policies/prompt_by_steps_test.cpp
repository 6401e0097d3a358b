// SPDX-License-Identifier: MIT
// LAW: a prompt at once and the same tokens one by one leave the same slots, for every policy that
// scores by attention, whatever the layer's caps, sinks and slopes.
#include <algorithm>
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "support/agree.hpp"

namespace prompt_by_steps_test {

using fixtures::index_t;
using fixtures::layer_terms;

constexpr index_t kv_heads = 2, group = 2, dim = 16, tokens = 96, slots = 40;
constexpr std::size_t row = kv_heads * dim;

/// A policy, as it measures a prompt as it does its steps, and its oracle.
struct measured_alike {
  kvmeld::any_policy_or_peer policy;
  fixtures::any_oracle slow;
  bool merges = false;
};

std::vector<measured_alike> policies() {
  using namespace kvmeld;
  // No pooling over neighbours, whole windows, one query's estimate: what a prompt has and steps
  // have not. The residual slots of zsmerge are other tokens by its own rules.
  return {{h2o{}, oracle::h2o{}},
          {snapkv{.window = 8, .sinks = 0, .kernel = 1},
           oracle::snapkv{.window = 8, .kernel = 1, .pool_window = true}},
          {tova{}, oracle::tova{}},
          {roco{}, oracle::roco{}},
          {scissorhands{}, oracle::scissorhands{}},
          {d2o{}, oracle::d2o{}, true},
          {cam{}, oracle::cam{}, true},
          {kvmerger{}, oracle::kvmerger{}, true},
          {ems{.window = 8, .kernel = 1}, oracle::ems{.window = 8, .kernel = 1}, true},
          {keepkv{.decay = 0, .merge_first = false},
           oracle::keepkv{.decay = 0, .merge_first = false}, true}};
}

/// Every head's positions, ascending.
std::vector<std::vector<index_t>> kept(kvmeld::cache& kv) {
  std::vector<std::vector<index_t>> all;
  for (index_t h = 0; h < kv.heads(); ++h) {
    all.emplace_back();
    for (index_t s = 0; s < kv.head(h).length(); ++s) {
      all.back().push_back(kv.head(h).position(s));
    }
    std::ranges::sort(all.back());
  }
  return all;
}

/// Rows `[tokens, heads, dim]` of a layer, and the positions that the oracle keeps of each KV head.
struct text {
  std::vector<float> q, k, v;
  std::vector<std::vector<index_t>> expected;

  text(const measured_alike& one, const kvmeld::attention_spec& spec)
      : q(fixtures::normal(tokens * kv_heads * group * dim)),
        k(fixtures::normal(tokens * kv_heads * dim)),
        v(fixtures::normal(tokens * kv_heads * dim)) {
    for (index_t h = 0; h < kv_heads; ++h) {
      oracle::head head = oracle::make_head(dim, group, fixtures::terms_of(spec, h));
      oracle::tensor queries;
      for (std::size_t t = 0; t < tokens; ++t) {
        const std::size_t own = t * row + static_cast<std::size_t>(h * dim);
        append(head, fixtures::to_mat(&k[own], 1, dim)[0], fixtures::to_mat(&v[own], 1, dim)[0]);
        queries.push_back(fixtures::to_mat(&q[own * group], group, dim));
      }
      one.slow.prompt(head, queries, slots);
      const auto at = oracle::positions(head);
      expected.emplace_back(at.begin(), at.end());
    }
  }
  /// Of one token.
  kvmeld::step_input token(std::size_t t) const {
    return {std::span(q).subspan(t * row * group, row * group), std::span(k).subspan(t * row, row),
            std::span(v).subspan(t * row, row)};
  }
};

kvmeld::attention_spec layer(const layer_terms& terms) {
  return terms.shape(kv_heads, group, dim, tokens).spec().checked();
}

TEST_CASE("what a prompt keeps is what its tokens one by one keep, whatever a layer's terms",
          "[laws][terms]") {
  for (const measured_alike& one : policies()) {
    for (const layer_terms& terms : one.merges ? fixtures::merged_terms : fixtures::evicted_terms) {
      INFO(one.policy.name() << ", " << terms.name);
      const auto spec = layer(terms);
      const text x = fixtures::clearly([&] { return text(one, spec); });
      kvmeld::cache at_once(spec, {.capacity = tokens}), by_steps(spec, {.capacity = tokens});

      kvmeld::compressor prompt(at_once, one.policy,
                                kvmeld::budget{.slots = slots, .trigger = tokens});
      at_once.append(at_once.heads(0, 0), x.k, x.v, tokens);
      prompt.prompt(at_once.heads(0, 0), kvmeld::queries(x.q, tokens, spec));
      prompt.end_prompt(0);
      CHECK(kept(at_once) == x.expected);

      kvmeld::compressor steps(by_steps, one.policy,
                               kvmeld::budget{.slots = slots, .trigger = tokens});
      std::vector<float> out(row * group);
      for (std::size_t t = 0; t < tokens; ++t) {
        REQUIRE(by_steps.head(1).length() == static_cast<index_t>(t));  // nothing is evicted
        steps.step(by_steps.heads(0, 0), x.token(t), out);
      }
      CHECK(kept(by_steps) == x.expected);
    }
  }
}

TEST_CASE("drafted tokens are so many steps in layers with caps, sinks and slopes",
          "[laws][terms]") {
  for (const layer_terms& terms : fixtures::all_terms) {
    INFO(terms.name);
    const auto spec = layer(terms);
    const text x({kvmeld::h2o{}, oracle::h2o{}}, spec);
    kvmeld::cache drafted(spec, {.capacity = tokens}), stepped(spec, {.capacity = tokens});
    const kvmeld::budget limit{.slots = slots, .trigger = slots + 1};
    const auto whole = static_cast<std::size_t>(terms.window > 0 ? terms.window : slots);
    kvmeld::compressor draft(drafted, kvmeld::h2o{}, limit), step(stepped, kvmeld::h2o{}, limit);
    std::vector<float> out(row * group), of_draft(4 * row * group);
    for (std::size_t t = 0; t + 4 <= tokens; t += 3) {  // the fourth is not accepted
      const kvmeld::step_input four{std::span(x.q).subspan(t * row * group, 4 * row * group),
                                    std::span(x.k).subspan(t * row, 4 * row),
                                    std::span(x.v).subspan(t * row, 4 * row)};
      draft.draft(drafted.heads(0, 0), four, of_draft, 4);
      draft.accept(0, 3);
      for (std::size_t i = 0; i < 3; ++i) {
        step.step(stepped.heads(0, 0), x.token(t + i), out);
        const auto own = std::span(of_draft).subspan(i * row * group, row * group);
        // Before anything leaves: a draft does not evict within itself.
        CHECK((t + i >= whole || std::ranges::equal(own, out)));
      }
      CHECK(kept(drafted) == kept(stepped));
    }
  }
}

}  // namespace prompt_by_steps_test
