// SPDX-License-Identifier: MIT
// A model whose every second layer has a window, a stream of its rows, and its attention in double.
#pragma once

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <span>
#include <vector>

#include "kvmeld/any_policy.hpp"
#include "kvmeld/kvmeld.hpp"
#include "support/random.hpp"

namespace windowed {

using kvmeld::attention_spec;
using kvmeld::index_t;

inline constexpr index_t layers = 4, kv_heads = 2, group = 2, dim = 8, window = 12, capacity = 128,
                         tokens = 60, steps = 30;

/// One layer: capped, with sinks, as gpt-oss and Gemma have them.
inline attention_spec layer(index_t own_window) {
  attention_spec s{.kv_heads = kv_heads, .group = group, .key_dim = dim};
  s.rope = kvmeld::rotary::halves(10'000);
  s.soft_cap = 4, s.sink_logits = {0.5F, -1, 1, 0}, s.window = own_window;
  return s;
}
/// Layers 0 and 2 have a window, which is where a policy of the whole model would be looked up.
inline bool is_cut(index_t l) { return l % 2 == 0; }
inline std::vector<attention_spec> model(index_t own_window = window) {
  std::vector<attention_spec> all;
  for (index_t l = 0; l < layers; ++l) {
    all.push_back(layer(is_cut(l) ? own_window : 0));
  }
  return all;
}

/// Rows of every layer, `[tokens, heads, ...]`.
struct stream {
  std::vector<std::vector<float>> q, k, v;

  stream() {
    std::normal_distribution<float> gauss;
    const auto numbers = [&](index_t row) {
      std::vector<float> x(kvmeld::as_size(row, tokens + steps));
      std::ranges::generate(x, [&] { return gauss(streams::floats); });
      return x;
    };
    for (index_t l = 0; l < layers; ++l) {
      q.push_back(numbers(kv_heads * group * dim));
      k.push_back(numbers(kv_heads * dim)), v.push_back(numbers(kv_heads * dim));
    }
  }
  /// `count` tokens of layer `l` from `first` on.
  static std::span<const float> part(const std::vector<std::vector<float>>& x, index_t l,
                                     index_t first, index_t count) {
    const auto& of = x[kvmeld::as_size(l)];
    const std::size_t row = of.size() / kvmeld::as_size(tokens + steps);
    return std::span(of).subspan(kvmeld::as_size(first) * row, kvmeld::as_size(count) * row);
  }
  kvmeld::step_input token(index_t l, index_t t, index_t count = 1) const {
    return {.q = part(q, l, t, count), .k = part(k, l, t, count), .v = part(v, l, t, count)};
  }

  /// Masked attention of the token at `t` over the whole stream, in double: `[heads, group, dim]`.
  std::vector<double> attention(const attention_spec& spec, index_t l, index_t t) const {
    std::vector<double> out;
    const auto at = [&](const auto& x, index_t token, index_t each, index_t row) {
      return x[kvmeld::as_size(l)].data() + (token * each + row) * dim;
    };
    const double scale = 1 / std::sqrt(double{dim});
    for (index_t j = 0; j < kv_heads * group; ++j) {
      const double sink =
          spec.sink_logits.empty() ? 0 : double{spec.sink_logits[kvmeld::as_size(j)]};
      std::vector<double> sum(dim);
      double total = spec.sink_logits.empty() ? 0 : std::exp(sink);
      for (index_t s = 0; s <= t; ++s) {
        if (spec.window > 0 && s <= t - spec.window) {
          continue;
        }
        double dot = 0;
        for (index_t i = 0; i < dim; ++i) {
          dot +=
              double{at(q, t, kv_heads * group, j)[i]} * double{at(k, s, kv_heads, j / group)[i]};
        }
        double logit = scale * dot;
        logit = spec.soft_cap > 0 ? spec.soft_cap * std::tanh(logit / spec.soft_cap) : logit;
        total += std::exp(logit);
        for (index_t i = 0; i < dim; ++i) {
          sum[kvmeld::as_size(i)] += std::exp(logit) * double{at(v, s, kv_heads, j / group)[i]};
        }
      }
      for (const double x : sum) {
        out.push_back(x / total);
      }
    }
    return out;
  }
};

/// The largest difference.
inline double apart(std::span<const float> a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double most = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    most = std::max(most, std::abs(double{a[i]} - b[i]));
  }
  return most;
}

/// A head holds the newest tokens, and no others.
inline void expect_newest(const kvmeld::head_ref& head, index_t most) {
  std::vector<index_t> held;
  for (index_t s = 0; s < head.length(); ++s) {
    held.push_back(head.position(s));
  }
  std::ranges::sort(held);
  REQUIRE(head.length() == std::min(head.next_position(), most));
  CHECK(held.front() == head.next_position() - head.length());
  CHECK(held.back() == head.next_position() - 1);
}

/// A prompt in chunks. Budgets that are shared wait for the end, but layers with a window need not:
/// in chunks they are cut as these come.
void read(auto& kv, auto& meld, const stream& x, index_t chunk, bool shared,
          const std::vector<index_t>& which = {0, 1, 2, 3}) {
  for (index_t first = 0; first < tokens; first += chunk) {
    const index_t count = std::min(chunk, tokens - first);
    for (std::size_t l = 0; l < which.size(); ++l) {
      const auto heads = kv.heads(static_cast<index_t>(l), 0);
      kv.append(heads, x.part(x.k, which[l], first, count), x.part(x.v, which[l], first, count),
                count);
      meld.prompt(heads, kvmeld::queries(x.part(x.q, which[l], first, count), count, layer(0)));
      if (!shared || (is_cut(which[l]) && chunk < tokens)) {
        meld.compress(heads);
      }
    }
  }
  if (shared) {
    meld.end_prompt(0);
  }
}

/// The steps from `first` on: outputs `[steps, layers, heads, group, dim]`.
std::vector<float> decode(auto& kv, auto& meld, const stream& x, index_t first = 0,
                          index_t last = steps, const std::vector<index_t>& which = {0, 1, 2, 3},
                          index_t request = 0) {
  std::vector<float> all, out(kv_heads * group * dim);
  for (index_t t = tokens + first; t < tokens + last; ++t) {
    for (std::size_t l = 0; l < which.size(); ++l) {
      meld.step(kv.heads(static_cast<index_t>(l), request), x.token(which[l], t), out);
      all.insert(all.end(), out.begin(), out.end());
    }
  }
  return all;
}

}  // namespace windowed
