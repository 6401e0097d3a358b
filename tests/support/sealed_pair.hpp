// SPDX-License-Identifier: MIT
// A request with a sealed prefix, and what lies behind it alone.
#pragma once

#include <catch2/catch.hpp>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "oracle/attention.hpp"
#include "oracle/codes.hpp"
#include "support/model.hpp"

namespace sealed {

using namespace small_model;
using kvmeld::budget, kvmeld::errc;
using floats = std::vector<float>;
using compressor = kvmeld::compressor<kvmeld::any_policy_or_peer>;

inline constexpr index_t prefix = 24, question = 60, slots = 40, capacity = 128;

inline floats rows_of(index_t n) { return normal(n * kv_heads_of * dim); }
inline floats queries_of(index_t n) { return normal(n * kv_heads_of * group * dim); }

/// Bits of the slots from `first` on; of those before.
inline floats from(const kvmeld::head_ref& head, index_t first) {
  const auto all = fixtures::bytes_of(head);
  return {all.begin() + first * (2 * dim + 2), all.end()};
}
inline floats before(const kvmeld::head_ref& head, index_t end) {
  auto all = fixtures::bytes_of(head);
  all.resize(static_cast<std::size_t>(end * (2 * dim + 2)));
  return all;
}

/// Request 0 of a cache with a sealed prefix, and the same of a cache without it, which begins at
/// the position behind it.
struct pair {
  kvmeld::attention_spec spec;
  kvmeld::cache kv, lone;
  compressor meld, alone;
  floats sealed;  // bits of the sealed slots of all heads

  pair(const kvmeld::any_policy_or_peer& policy, const budget& b,
       const kvmeld::attention_spec& layer, kvmeld::storage type = kvmeld::storage::f32)
      : spec(layer),
        kv(spec, {.layers = layers_of, .capacity = capacity, .keys = type, .values = type}),
        lone(begun(type)),
        meld(kv, policy, b),
        alone(lone, policy, b) {
    for (index_t l = 0; l < layers_of; ++l) {
      kv.append(kv.heads(l, 0), rows_of(prefix), rows_of(prefix), prefix);
    }
    meld.seal(0, prefix);
    sealed = sealed_bits();
  }
  kvmeld::cache begun(kvmeld::storage type) const {
    kvmeld::cache x(
        spec, {.layers = layers_of, .capacity = capacity - prefix, .keys = type, .values = type});
    for (index_t h = 0; h < x.heads(); ++h) {
      x.head(h).restore(0, prefix);
    }
    return x;
  }
  floats sealed_bits() {
    floats all;
    for (index_t h = 0; h < kv.heads(); ++h) {
      const floats own = before(kv.head(h), meld.sealed(h));
      all.insert(all.end(), own.begin(), own.end());
    }
    return all;
  }
  void prompt(index_t tokens) {
    for (index_t l = 0; l < layers_of; ++l) {
      const floats q = queries_of(tokens), k = rows_of(tokens), v = rows_of(tokens);
      kv.append(kv.heads(l, 0), k, v, tokens), lone.append(lone.heads(l, 0), k, v, tokens);
      meld.prompt(kv.heads(l, 0), kvmeld::queries(q, tokens, spec));
      alone.prompt(lone.heads(l, 0), kvmeld::queries(q, tokens, spec));
    }
    meld.end_prompt(0), alone.end_prompt(0);
  }
  void step() {
    for (index_t l = 0; l < layers_of; ++l) {
      const floats q = queries_of(1), k = rows_of(1), v = rows_of(1);
      floats out(q.size()), own(q.size());
      std::vector<oracle::head> full;
      for (index_t h = 0; h < kv_heads_of; ++h) {
        const auto head = kv.head(l * kv_heads_of + h);
        head.push(k.data() + h * dim, v.data() + h * dim);
        full.push_back(fixtures::to_oracle(head, h));
        head.restore(head.length() - 1, head.next_position() - 1);
      }
      meld.step(kv.heads(l, 0), {q, k, v}, out), alone.step(lone.heads(l, 0), {q, k, v}, own);
      for (index_t h = 0; h < kv_heads_of; ++h) {
        const auto of_head = q.begin() + h * group * dim;
        floats queries(of_head, of_head + group * dim);
        if (kvmeld::in_blocks(kv.type().keys)) {
          queries = oracle::in_16_bits(queries, dim);
        }
        const auto seen = oracle::attend(full[static_cast<std::size_t>(h)],
                                         fixtures::to_mat(queries.data(), group, dim));
        double off = 0;
        for (index_t i = 0; i < group * dim; ++i) {
          const double o =
              seen.output[static_cast<std::size_t>(i / dim)][static_cast<std::size_t>(i % dim)];
          off = std::max(off,
                         std::abs(o - double{out[static_cast<std::size_t>(h * group * dim + i)]}));
        }
        CHECK(off < 1e-5);
      }
    }
  }
  /// LAW: the sealed slots are as they were, all others as without them.
  void check() {
    CHECK(sealed_bits() == sealed);
    for (index_t h = 0; h < kv.heads(); ++h) {
      CHECK(from(kv.head(h), meld.sealed(h)) == fixtures::bytes_of(lone.head(h)));
      CHECK(same_state(meld.state(h), alone.state(h)));
      CHECK(kv.head(h).next_position() == lone.head(h).next_position());
    }
  }
};

inline kvmeld::attention_spec with_terms() {
  kvmeld::attention_spec s = layer_spec;
  s.soft_cap = 20, s.sink_logits = {0.5F, -1, 2, 0};
  return s;
}

}  // namespace sealed
