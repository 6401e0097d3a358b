/// A prompt that the full model has read, and going on from it through a compressed cache.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "engine/decoder.hpp"
#include "engine/prefill.hpp"
#include "evaluate/policies.hpp"

namespace evaluate {

using engine::row_major_matrix;
using kvfold::budget;

/// What all policies and budgets share: keys and values of the whole prompt, and each policy's
/// measurements of it, which do not depend on the budget.
struct prompt {
  std::vector<kvfold::cache<float>> layers;
  /// [policies][layers][KV heads]
  std::vector<std::vector<std::vector<kvfold::head_state>>> measured;
  row_major_matrix logits;  ///< [1, vocab] after the last token
  index_t tokens = 0;
};

/// The first `tokens` of one layer's record, in a cache with room for `capacity`.
inline kvfold::cache<float> to_cache(const engine::config& shape, const engine::layer_record& r,
                                     index_t tokens, index_t capacity) {
  kvfold::cache<float> kv{
      {.heads = shape.kv_heads, .group = shape.group(), .dim = shape.dim, .capacity = capacity}};
  for (index_t h = 0; h < kv.heads(); ++h) {
    for (index_t t = 0; t < tokens; ++t) {
      kv.head(h).push(&r.k(t, h * shape.dim), &r.v(t, h * shape.dim));
    }
  }
  return kv;
}

/// The prompt's own queries of one layer.
inline kvfold::query_view<float> queries_of(const engine::config& shape,
                                            const engine::layer_record& r, index_t tokens) {
  return kvfold::prompt_queries(r.q.data(), tokens, shape.kv_heads, shape.group(), shape.dim);
}

/// The first `tokens` of `r`, measured by every policy, in caches with room for `capacity`.
inline prompt measure(const engine::config& shape, const engine::record& r,
                      std::span<const named_policy> policies, index_t tokens, index_t capacity) {
  prompt p{.layers = {}, .measured = {}, .logits = r.logits, .tokens = tokens};
  for (const auto& layer : r.layers) {
    p.layers.push_back(to_cache(shape, layer, tokens, capacity));
  }
  for (const named_policy& named : policies) {
    auto& layers = p.measured.emplace_back();
    for (std::size_t l = 0; l < r.layers.size(); ++l) {
      auto& states = layers.emplace_back();
      const auto queries = queries_of(shape, r.layers[l], tokens);
      for (index_t h = 0; h < p.layers[l].heads(); ++h) {
        const auto head = p.layers[l].head(h);
        states.push_back(kvfold::make_head_state(named.policy, head));
        kvfold::observe(named.policy, head, states.back(), queries.of(h));
      }
    }
  }
  return p;
}

/// Goes on where `r` ends, through the full cache; `r.logits` are the last token's.
inline void extend(const engine::decoder& model, engine::record& r, std::span<const int> tokens) {
  const engine::config& c = model.shape();
  const Eigen::Index before = r.layers.front().q.rows();
  const Eigen::Index after = before + static_cast<Eigen::Index>(tokens.size());
  const auto attend = [&](index_t layer, const auto& q, const auto& k, const auto& v, auto& out) {
    auto& l = r.layers[static_cast<std::size_t>(layer)];
    for (const auto& [all, more] : {std::pair{&l.q, &q}, {&l.k, &k}, {&l.v, &v}}) {
      all->conservativeResize(after, Eigen::NoChange);
      all->bottomRows(more->rows()) = *more;
    }
    engine::causal_attention(q, l.k, l.v, c.heads, c.kv_heads, c.dim, static_cast<index_t>(before),
                             out);
  };
  model.forward(tokens, static_cast<index_t>(before), attend, r.logits, true);
}

/// What is compared: one of the policies that measured the prompts, at a budget.
struct contender {
  std::size_t index = 0;  ///< among the policies of `measure`
  any_policy policy;
  budget limit;
};

/// One layer of a prompt, compressed.
struct compressed_layer {
  kvfold::cache<float> kv;
  kvfold::state state;

  compressed_layer(const contender& c, const prompt& p, std::size_t layer)
      : kv(p.layers[layer]), state(p.measured[c.index][layer], workspace_for(kv.shape())) {
    kvfold::compress(c.policy, kv, state, kvfold::no_queries, c.limit);
  }

  std::size_t bytes() { return kv.bytes() + state.bytes(); }

 private:
  static kvfold::workspace workspace_for(const kvfold::cache_shape& shape) {
    kvfold::workspace work;
    work.reserve(shape.group, shape.capacity);
    return work;
  }
};

/// The model behind a compressed prompt: one token in, the next one's logits out.
class compressed_decoder {
 public:
  compressed_decoder(const engine::decoder& model, const contender& c, const prompt& p)
      : model_(model), contender_(c), position_(p.tokens) {
    for (std::size_t l = 0; l < p.layers.size(); ++l) {
      layers_.emplace_back(c, p, l);
    }
  }

  /// `[1, vocab]`, overwritten by the next call.
  const row_major_matrix& next(int token) {
    const auto attend = [&](index_t layer, const auto& q, const auto& k, const auto& v, auto& out) {
      auto& [kv, state] = layers_[static_cast<std::size_t>(layer)];
      kvfold::step(contender_.policy, kv, state, floats(q), floats(k), floats(v), contender_.limit,
                   std::span(out.data(), static_cast<std::size_t>(out.size())));
    };
    model_.forward(scratch_, std::span(&token, 1), position_++, attend, logits_);
    return logits_;
  }

 private:
  static std::span<const float> floats(const row_major_matrix& m) {
    return {m.data(), static_cast<std::size_t>(m.size())};
  }

  const engine::decoder& model_;
  contender contender_;
  index_t position_;
  std::vector<compressed_layer> layers_;
  engine::decoder::scratch scratch_;
  row_major_matrix logits_;
};

}  // namespace evaluate
