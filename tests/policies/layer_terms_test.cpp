// SPDX-License-Identifier: MIT
// Every policy in layers with caps, sinks and slopes against its oracle: a prompt, then decode.
#include <catch2/catch.hpp>

#include "kvmeld/peers.hpp"
#include "support/agree.hpp"
#include "support/ems_pair.hpp"

namespace policies_layer_terms_test {

using fixtures::agree;
using fixtures::evicted_terms;
using fixtures::in_layers;
using fixtures::layer_terms;
using fixtures::merged_terms;
using fixtures::setting;

TEST_CASE("policies that evict by attention are their oracles, whatever a layer's terms",
          "[oracle][terms]") {
  for (const setting& s : in_layers(evicted_terms)) {
    agree(kvmeld::h2o{}, oracle::h2o{}, s);
    agree(kvmeld::snapkv{.window = 8, .sinks = 0}, oracle::snapkv{.window = 8, .pool_window = true},
          s);
    agree(kvmeld::tova{}, oracle::tova{}, s);
    agree(kvmeld::roco{}, oracle::roco{}, s);
    agree(kvmeld::scissorhands{.history = 20}, oracle::scissorhands{.history = 20}, s);
  }
}

TEST_CASE("policies that evict by what is no logit are their oracles, whatever a layer's terms",
          "[oracle][terms]") {
  for (const setting& s : in_layers(evicted_terms)) {
    agree(kvmeld::full_cache{}, oracle::full_cache{}, s);
    agree(kvmeld::streaming_llm{}, oracle::streaming_llm{}, s);
    agree(kvmeld::r_kv{}, oracle::r_kv{}, s);
    agree(kvmeld::key_diff{}, oracle::key_diff{}, s);
    agree(kvmeld::random_tokens{.window = 8}, oracle::random_tokens{.window = 8}, s);
  }
}

TEST_CASE("policies for prompts alone are their oracles, whatever a layer's terms",
          "[oracle][terms]") {
  for (const layer_terms& terms : evicted_terms) {
    agree(kvmeld::kvzip{}, oracle::kvzip{},
          {.tokens = 90, .dim = 8, .group = 2, .target = 40, .steps = 0, .terms = terms});
    agree(kvmeld::dropkv{.window = 8}, oracle::dropkv{.window = 8},
          {.tokens = 90, .dim = 8, .group = 2, .target = 40, .steps = 0, .terms = terms});
  }
}

TEST_CASE("compactor and triattention are their oracles, whatever a layer's cap and sinks",
          "[oracle][terms]") {
  for (const setting& s : in_layers(merged_terms)) {
    agree(kvmeld::compactor{.chunk = 30}, oracle::compactor{.chunk = 30}, s);
    agree(kvmeld::triattention{}, oracle::triattention{}, s);
  }
}

TEST_CASE("expected_attention is its oracle in layers with sinks", "[oracle][terms]") {
  // Its expectation is of exp(scale q.k): a cap has no such closed form.
  agree(
      kvmeld::expected_attention{.window = 2, .future = 20},
      oracle::expected_attention{.window = 2, .future = 20},
      {.tokens = 90, .dim = 8, .group = 2, .target = 40, .steps = 40, .terms = {.sinks = {1, 3}}});
}

TEST_CASE("policies that merge are their oracles, whatever a layer's cap and sinks",
          "[oracle][terms]") {
  for (const setting& s : in_layers(merged_terms)) {
    agree(kvmeld::d2o{}, oracle::d2o{}, s);
    agree(kvmeld::kvmerger{}, oracle::kvmerger{.epsilon = 0.75}, s, 1e-4);
    agree(kvmeld::zsmerge{.proximity = 0.2F, .residual = 3, .sinks = 0},
          oracle::zsmerge{.proximity = 0.2, .residual = 3}, s);
    agree(kvmeld::centroids{.window = 8}, oracle::centroids{.window = 8}, s);
    agree(kvmeld::cam{}, oracle::cam{}, s, 1e-4);
  }
}

TEST_CASE("keepkv is its oracle, whatever a layer's cap and sinks", "[oracle][terms]") {
  for (const setting& s : in_layers(merged_terms)) {
    agree(kvmeld::keepkv{.similarity = 0.3F, .window = 8},
          oracle::keepkv{.similarity = 0.3F, .window = 8}, s, 1e-3);
    agree(kvmeld::keepkv{.similarity = 0.2F, .merge_first = false},
          oracle::keepkv{.similarity = 0.2F, .merge_first = false}, s, 1e-3);
    agree(kvmeld::keepkv{.similarity = 0.3F, .variant = kvmeld::keepkv::mode::code, .window = 8},
          oracle::keepkv{.similarity = 0.3F, .variant = oracle::keepkv::mode::code, .window = 8}, s,
          1e-3);
  }
}

TEST_CASE("ems is the oracle that expands every token, whatever a layer's cap and sinks",
          "[oracle][terms]") {
  const kvmeld::ems policy{.window = 8, .threshold = 0.1F};
  for (const setting& s : in_layers(merged_terms)) {
    const auto [fast, slow] = fixtures::both(policy);
    agree(fast, slow, s, 1e-5, fixtures::same_table());
  }
  for (const layer_terms& terms : merged_terms) {
    INFO(terms.name);
    const fixtures::alike_tokens data{7, 9};
    fixtures::ems_pair both_ways({.window = 8, .threshold = 0.6F}, 9, 2, 30, fixtures::default_rope,
                                 terms);
    both_ways.prompt(data, 120);
    both_ways.steps(data, 60);
    both_ways.prompt(data, 60);
    both_ways.steps(data, 20);
    CHECK(both_ways.sharing() > 30);
  }
}

}  // namespace policies_layer_terms_test
