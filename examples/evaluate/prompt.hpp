/// A prompt that the full model has read, and going on from it through a compressed cache.
#pragma once

#include <memory>  // std::shared_ptr
#include <span>
#include <utility>
#include <vector>

#include "engine/decoder.hpp"
#include "engine/prefill.hpp"
#include "evaluate/policies.hpp"

namespace evaluate {

using engine::row_major_matrix;
using kvfold::budget;

/// Rows `first` and on of one layer's record, at the end of `kv`.
inline void append(kvfold::cache<float>& kv, const engine::layer_record& r, Eigen::Index first,
                   Eigen::Index last) {
  for (index_t h = 0; h < kv.heads(); ++h) {
    const auto head = kv.head(h);
    for (Eigen::Index t = first; t < last; ++t) {
      head.push(&r.k(t, h * head.dim()), &r.v(t, h * head.dim()));
    }
  }
}

/// Keys and values of a prompt's beginning, which several prompts may share.
struct prompt_body {
  std::vector<kvfold::cache<float>> layers;
  index_t tokens = 0;

  /// The first `length` tokens of `r`, with room for `capacity`.
  prompt_body(const engine::config& shape, const engine::record& r, index_t length,
              index_t capacity)
      : tokens(length) {
    for (const auto& layer : r.layers) {
      append(layers.emplace_back(kvfold::cache_shape{.heads = shape.kv_heads,
                                                     .group = shape.group(),
                                                     .dim = shape.dim,
                                                     .capacity = capacity}),
             layer, 0, length);
    }
  }
};

/// A prompt as all budgets share it: keys and values, and what each policy measured, which does
/// not depend on the budget.
struct prompt {
  std::shared_ptr<const prompt_body> body;
  std::vector<engine::layer_record> tail;  ///< keys and values behind the body
  /// [policies][layers][KV heads]
  std::vector<std::vector<std::vector<kvfold::head_state>>> measured;
  row_major_matrix logits;  ///< [1, vocab] after the last token
  index_t tokens = 0;

  kvfold::cache<float> layer(std::size_t l) const {
    kvfold::cache<float> kv = body->layers[l];
    append(kv, tail[l], 0, tail[l].k.rows());
    return kv;
  }
};

/// The prompt's own queries of one layer.
inline kvfold::query_view<float> queries_of(const engine::config& shape,
                                            const engine::layer_record& r) {
  return kvfold::prompt_queries(r.q.data(), static_cast<index_t>(r.q.rows()), shape.kv_heads,
                                shape.group(), shape.dim);
}

/// All of `r`, which begins with `body`, measured by every policy.
inline prompt measure(const engine::config& shape, const engine::record& r,
                      std::span<const named_policy> policies,
                      std::shared_ptr<const prompt_body> body) {
  prompt p{.body = std::move(body),
           .tail = {},
           .measured = {},
           .logits = r.logits,
           .tokens = static_cast<index_t>(r.layers.front().q.rows())};
  p.measured.resize(policies.size());
  const Eigen::Index behind = p.tokens - p.body->tokens;
  for (std::size_t l = 0; l < r.layers.size(); ++l) {
    p.tail.push_back(
        {.q = {}, .k = r.layers[l].k.bottomRows(behind), .v = r.layers[l].v.bottomRows(behind)});
    kvfold::cache<float> kv = p.layer(l);
    const auto queries = queries_of(shape, r.layers[l]);
    for (std::size_t i = 0; i < policies.size(); ++i) {
      auto& states = p.measured[i].emplace_back();
      for (index_t h = 0; h < kv.heads(); ++h) {
        states.push_back(kvfold::make_head_state(policies[i].policy, kv.head(h)));
        kvfold::observe(policies[i].policy, kv.head(h), states.back(), queries.of(h));
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
      : kv(p.layer(layer)), state(p.measured[c.index][layer], workspace_for(kv.shape())) {
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
    for (std::size_t l = 0; l < p.tail.size(); ++l) {
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
