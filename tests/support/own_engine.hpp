// SPDX-License-Identifier: MIT
// An engine that adopts kvmeld: its tokens, its attention, and what it must give.
#pragma once

#include <catch2/catch.hpp>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/memory/cache.hpp"
#include "support/fixtures.hpp"

namespace own_engine {

constexpr int heads = 2, group = 2, dim = 8, tokens = 40, steps = 60;

/// A prompt and a stream of tokens: queries `[tokens, heads · group, dim]`, keys and values
/// `[tokens, heads, dim]`.
struct text {
  std::vector<float> q = fixtures::normal((tokens + steps) * heads * group * dim);
  std::vector<float> k = fixtures::normal((tokens + steps) * heads * dim);
  std::vector<float> v = fixtures::normal((tokens + steps) * heads * dim);

  const float* query(int t, int h) const { return q.data() + (t * heads + h) * group * dim; }
  const float* key(int t, int h) const { return k.data() + (t * heads + h) * dim; }
  const float* value(int t, int h) const { return v.data() + (t * heads + h) * dim; }

  /// The prompt's queries `[tokens, heads · group, dim]`.
  std::span<const float> prompt() const { return std::span(q).first(tokens * heads * group * dim); }
  /// A token's rows of all heads.
  kvmeld::step_input token(int t) const {
    return {std::span(query(t, 0), heads * group * dim), std::span(key(t, 0), heads * dim),
            std::span(value(t, 0), heads * dim)};
  }
};

/// What every engine must give: kvmeld's own decode steps on a cache of kvmeld's own.
template <class Policy>
std::vector<float> expected(const text& x, const Policy& policy, const kvmeld::budget& budget) {
  kvmeld::cache kv({.kv_heads = heads, .group = group, .key_dim = dim}, {.capacity = 64});
  for (int t = 0; t < tokens; ++t) {
    for (int h = 0; h < heads; ++h) {
      kv.head(h).push(x.key(t, h), x.value(t, h));
    }
  }
  kvmeld::compressor meld(kv, policy, budget);
  meld.prompt(kv.heads(0, 0), kvmeld::queries(x.prompt(), tokens, kv.spec()));
  meld.end_prompt(0);
  std::vector<float> all, out(heads * group * dim);
  for (int t = tokens; t < tokens + steps; ++t) {
    meld.step(kv.heads(0, 0), x.token(t), out);
    all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

inline void same(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    REQUIRE(a[i] == Approx(b[i]).epsilon(1e-4).margin(1e-5));
  }
}

/// An engine's attention: softmax over logits with a bias per slot, in plain loops over its memory.
struct attention {
  std::vector<float> out = std::vector<float>(group * dim), probabilities;

  template <class At>
  attention(const float* q, int length, const float* bias, At at) {
    for (int g = 0; g < group; ++g) {
      std::vector<float> p;
      float sum = 0;
      for (int s = 0; s < length; ++s) {
        float dot = 0;
        for (int i = 0; i < dim; ++i) {
          dot += q[g * dim + i] * at(s, i).first;
        }
        p.push_back(std::exp(dot / std::sqrt(float{dim}) + bias[s]));
        sum += p.back();
      }
      for (int s = 0; s < length; ++s) {
        p[static_cast<std::size_t>(s)] /= sum;
        for (int i = 0; i < dim; ++i) {
          out[static_cast<std::size_t>(g * dim + i)] +=
              p[static_cast<std::size_t>(s)] * at(s, i).second;
        }
      }
      probabilities.insert(probabilities.end(), p.begin(), p.end());
    }
  }
};

}  // namespace own_engine
