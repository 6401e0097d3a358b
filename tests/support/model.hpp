// SPDX-License-Identifier: MIT
// A small model's cache by layer and request, a prompt of it, and what heads and states hold.
#pragma once

#include <algorithm>  // std::ranges::equal
#include <bit>        // std::bit_cast
#include <cstdint>    // std::uint32_t
#include <span>
#include <vector>

#include "support/fixtures.hpp"

namespace small_model {

using fixtures::index_t;
using fixtures::normal;

inline constexpr index_t layers_of = 2, requests_of = 2, kv_heads_of = 2, group = 2, dim = 16;
inline const kvmeld::attention_spec layer_spec = [] {
  kvmeld::attention_spec s{.kv_heads = kv_heads_of, .group = group, .key_dim = dim};
  s.rope = kvmeld::rotary::halves(10'000);
  return s;
}();

/// Caches of a small model, by layer and request.
struct model_cache : kvmeld::cache {
  explicit model_cache(index_t capacity)
      : kvmeld::cache(layer_spec,
                      {.layers = layers_of, .requests = requests_of, .capacity = capacity}) {}
  static kvmeld::head_range of(index_t layer, index_t request) {
    return {(layer * requests_of + request) * kv_heads_of, kv_heads_of};
  }
};

/// A prompt of one request: rows and queries of every layer.
struct prompt_rows {
  index_t tokens;
  std::vector<std::vector<float>> q, k, v;  // [layers][tokens, heads, dim]

  explicit prompt_rows(index_t n) : tokens(n) {
    for (index_t l = 0; l < layers_of; ++l) {
      q.push_back(normal(n * kv_heads_of * group * dim));
      k.push_back(normal(n * kv_heads_of * dim));
      v.push_back(normal(n * kv_heads_of * dim));
    }
  }
  void append(model_cache& kv, index_t layer, index_t request, index_t first, index_t last) const {
    const auto l = static_cast<std::size_t>(layer);
    for (index_t t = first; t < last; ++t) {
      for (index_t h = 0; h < kv_heads_of; ++h) {
        const std::ptrdiff_t row = (std::ptrdiff_t{t} * kv_heads_of + h) * dim;
        kv.head(model_cache::of(layer, request).first + h)
            .push(k[l].data() + row, v[l].data() + row);
      }
    }
  }
  std::span<const float> queries(index_t layer, index_t first, index_t last) const {
    const auto row = static_cast<std::size_t>(kv_heads_of * group * dim);
    return std::span(q[static_cast<std::size_t>(layer)])
        .subspan(static_cast<std::size_t>(first) * row,
                 static_cast<std::size_t>(last - first) * row);
  }
};

/// A request's prompt through a compressor, `chunk` tokens at a time.
template <class Meld>
void read(Meld& meld, model_cache& kv, const prompt_rows& p, index_t request, index_t chunk) {
  for (index_t l = 0; l < layers_of; ++l) {
    for (index_t first = 0; first < p.tokens; first += chunk) {
      const index_t last = std::min(first + chunk, p.tokens);
      p.append(kv, l, request, first, last);
      meld.prompt(model_cache::of(l, request),
                  kvmeld::queries(p.queries(l, first, last), last - first, layer_spec));
    }
  }
}

inline bool same_head(const kvmeld::kv_head auto& a, const kvmeld::kv_head auto& b) {
  bool same = a.length() == b.length() && a.next_position() == b.next_position();
  for (index_t s = 0; same && s < a.length(); ++s) {
    same = a.log_mass(s) == b.log_mass(s) && a.position(s) == b.position(s);
    for (index_t i = 0; same && i < a.dim(); ++i) {
      same = a.key(s)[i] == b.key(s)[i] && a.value(s)[i] == b.value(s)[i];
    }
  }
  return same;
}
/// Of states at rest, what they would have next.
inline bool same_state(kvmeld::head_state a, kvmeld::head_state b) {
  a.extend(a.length()), b.extend(b.length());
  bool same = a.length() == b.length() && a.slot_stats() == b.slot_stats();
  for (index_t c = 0; same && c < a.slot_stats(); ++c) {
    same = std::ranges::equal(a.column(c), b.column(c));
  }
  const auto bits = [](float x) { return std::bit_cast<std::uint32_t>(x); };
  return same && std::ranges::equal(a.memory(), b.memory(), {}, bits, bits);
}

}  // namespace small_model
