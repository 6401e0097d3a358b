// SPDX-License-Identifier: MIT
#include "evaluate/prompt.hpp"

#include <algorithm>  // std::min, std::ranges::max_element
#include <utility>

#include "engine/causal.hpp"

namespace evaluate {

namespace {

/// Rows `first` and on of one layer's record, at the end of `kv`.
void append(kvmeld::cache& kv, const engine::layer_record& r, Eigen::Index first,
            Eigen::Index last) {
  for (index_t h = 0; h < kv.heads(); ++h) {
    const auto head = kv.head(h);
    for (Eigen::Index t = first; t < last; ++t) {
      head.push(&r.k(t, h * head.dim()), &r.v(t, h * head.dim()));
    }
  }
}

/// For one worker.
std::vector<kvmeld::workspace> workspaces_for(const kvmeld::cache& kv) {
  std::vector<kvmeld::workspace> work(1);
  work[0].reserve(kv.spec().group, kv.spec().key_dim, kv.capacity());
  return work;
}

}  // namespace

prompt_body::prompt_body(const engine::config& shape, const engine::record& r, index_t length,
                         index_t capacity)
    : tokens(length) {
  for (const auto& layer : r.layers) {
    append(layers.emplace_back(shape.attention(), kvmeld::cache_options{.capacity = capacity}),
           layer, 0, length);
  }
}

kvmeld::cache prompt::layer(std::size_t l) const {
  kvmeld::cache kv = body->layers[l];
  append(kv, tail[l], 0, tail[l].k.rows());
  return kv;
}

kvmeld::query_view<float> replayed_prompt::queries(const engine::config& shape,
                                                   std::size_t layer) const {
  if (positions.empty()) {
    return {};
  }
  auto view = queries_of(shape, layers[layer]);
  view.position = positions.data();
  return view;
}

namespace {

/// The queries that `p` measures a layer on, if not the prompt's own; `again`: a second reading's.
std::shared_ptr<const kvmeld::reference_queries> reference_of(
    const named_policy& p, kvmeld::cache& kv, const kvmeld::query_view<float>& own,
    const kvmeld::query_view<float>& again) {
  using kvmeld::reference_queries;
  const auto count = [&](index_t by_default) {
    return p.queries_taken > 0 ? p.queries_taken : by_default;
  };
  switch (p.queries) {
    case query_source::own:
      return nullptr;
    case query_source::window:
      return std::make_shared<const reference_queries>(
          kvmeld::spread(kv, own.last(count(32)), count(32), 0));
    case query_source::spread:
      return std::make_shared<const reference_queries>(kvmeld::spread(kv, own, count(256)));
    case query_source::replay:
      return std::make_shared<const reference_queries>(kvmeld::spread(kv, again, count(256), 0));
    case query_source::foresight:
      break;
  }
  return std::make_shared<const reference_queries>(
      kvmeld::foresight(kv, own, {.count = count(256), .ahead = p.ahead}));
}

/// The states of a layer's heads after a second reading: each part is appended behind the prompt,
/// observed and taken away again.
std::vector<kvmeld::head_state> observe_replay(const any_policy& policy,
                                               const engine::config& shape,
                                               const engine::layer_record& read,
                                               const engine::layer_record& again,
                                               std::span<const index_t> parts) {
  const auto tokens = static_cast<index_t>(read.k.rows());
  kvmeld::cache kv(shape.attention(), {.capacity = tokens + std::ranges::max(parts)});
  append(kv, read, 0, tokens);
  auto state = kvmeld::make_state(policy, kv);
  std::vector<kvmeld::head_state> heads;
  Eigen::Index begin = 0;
  for (const index_t rows : parts) {
    append(kv, again, begin, begin + rows);
    auto queries = queries_of(shape, again);
    queries.data += begin * queries.row;
    queries.count = rows;
    kvmeld::observe(policy, kv, state, queries);
    for (index_t h = 0; h < kv.heads(); ++h) {
      kv.head(h).restore(tokens, tokens);
      state[h].truncate(tokens);
    }
    begin += rows;
  }
  for (index_t h = 0; h < kv.heads(); ++h) {
    heads.push_back(std::move(state[h]));
  }
  return heads;
}

}  // namespace

measured_layer measure_layer(const named_policy& p, const engine::config& shape, kvmeld::cache& kv,
                             const engine::record& r, const second_readings& both, std::size_t l) {
  const replayed_prompt& again = both.of(p);
  const any_policy policy = p.measuring();
  if (p.observes_replay() && !again.parts.empty()) {
    return {observe_replay(policy, shape, r.layers[l], again.layers[l], again.parts), nullptr};
  }
  const auto own = queries_of(shape, r.layers[l]);
  measured_layer m{{}, reference_of(p, kv, own, again.queries(shape, l))};
  const auto queries = m.chosen ? m.chosen->view() : own;
  for (index_t h = 0; h < kv.heads(); ++h) {
    m.heads.push_back(kvmeld::make_head_state(policy, kv.head(h)));
    if (m.chosen && score_column(policy) > 0) {  // scores are by all of the prompt's own queries
      kvmeld::observe(policy, kv.head(h), m.heads.back(), own.of(h));
    }
    kvmeld::observe(policy, kv.head(h), m.heads.back(), queries.of(h));
  }
  return m;
}

prompt measure(const engine::config& shape, const engine::record& r,
               std::span<const named_policy> policies, std::shared_ptr<const prompt_body> body,
               const second_readings& again) {
  prompt p{.body = std::move(body),
           .tail = {},
           .measured = {},
           .references = {},
           .own = {},
           .logits = r.logits,
           .tokens = static_cast<index_t>(r.layers.front().q.rows())};
  p.measured.resize(policies.size());
  p.references.resize(policies.size());
  const Eigen::Index behind = p.tokens - p.body->tokens;
  for (std::size_t l = 0; l < r.layers.size(); ++l) {
    p.tail.push_back(
        {.q = {}, .k = r.layers[l].k.bottomRows(behind), .v = r.layers[l].v.bottomRows(behind)});
    kvmeld::cache kv = p.layer(l);
    p.own.push_back(r.layers[l].q.bottomRows(std::min(p.tokens, own_queries)));
    for (std::size_t i = 0; i < policies.size(); ++i) {
      measured_layer m = measure_layer(policies[i], shape, kv, r, again, l);
      p.measured[i].push_back(std::move(m.heads));
      p.references[i].push_back(policies[i].policy.plans_on_queries() ? m.chosen : nullptr);
    }
  }
  return p;
}

void extend(const engine::decoder& model, engine::record& r, std::span<const int> tokens,
            engine::logits_of kept, std::vector<row_major_matrix>* streams) {
  const engine::config& c = model.shape();
  engine::decoder::scratch work;
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
    if (streams != nullptr) {
      streams->push_back(work.stream);
    }
  };
  model.forward(work, tokens, static_cast<index_t>(before), attend, r.logits,
                kept == engine::logits_of::last);
}

compressed_layer::compressed_layer(const contender& c, const prompt& p, std::size_t layer)
    : kv(p.layer(layer)), state(p.measured[c.index][layer], workspaces_for(kv)) {
  const auto& reference = p.references[c.index][layer];
  const row_major_matrix& own = p.own[layer];
  const auto queries = reference
                           ? reference->view()
                           : kvmeld::prompt_queries(own.data(), static_cast<index_t>(own.rows()),
                                                    kv.heads(), kv.spec().group, kv.spec().key_dim);
  const auto after_prompt = allocate_budgets(c, p.tokens, p.measured[c.index], layer);
  for (index_t h = 0; h < kv.heads(); ++h) {
    const budget& b = after_prompt[static_cast<std::size_t>(h)];
    if (c.keeps_all(layer, h, kv.heads())) {
      decoding.push_back(full_cache());
    } else {
      const any_policy& policy = c.of_head(layer, h, kv.heads());
      kvmeld::compress(policy, kv.head(h), state[h], state.workspace(), b, queries.of(h));
      // Behind a method for prompts alone, all that comes is kept.
      decoding.push_back(policy.decodes() ? policy : full_cache());
    }
    // A head that holds nearly all of its prompt has no room for more than the cache has.
    limits.push_back(c.in_decode(layer, h, kv.heads(),
                                 std::max(b.slots, std::min(b.slots + c.room, kv.capacity() - 1))));
    if (!c.policy.decodes() || c.keeps_all(layer, h, kv.heads())) {
      state[h] = kvmeld::make_head_state(decoding.back(), kv.head(h));
    }
  }
  if (c.storage != storage::f32) {
    kv = stored(kv, c.storage);
  }
}

compressed_layer::compressed_layer(const contender& c, const engine::config& shape,
                                   std::size_t layer, index_t capacity)
    : compressed_layer(c, shape, layer, capacity,
                       allocate_budgets(c, capacity, shape.kv_heads, layer)) {}

compressed_layer::compressed_layer(const contender& c, const engine::config& shape,
                                   std::size_t layer, index_t capacity,
                                   const std::vector<budget>& budgets)
    : kv(shape.attention(),
         {.capacity = c.policy.bounded()
                          ? std::ranges::max_element(budgets, {}, &budget::slots)->slots + 1
                          : capacity,
          .keys = c.storage,
          .values = c.storage}),
      state(kvmeld::make_state(c.policy, kv)) {
  for (index_t h = 0; h < shape.kv_heads; ++h) {
    limits.push_back(
        c.in_decode(layer, h, shape.kv_heads, budgets[static_cast<std::size_t>(h)].slots));
    decoding.push_back(c.of_head(layer, h, shape.kv_heads));
  }
}

compressed_decoder::compressed_decoder(const engine::decoder& model, const contender& c,
                                       const prompt& p)
    : model_(model), position_(p.tokens) {
  for (std::size_t l = 0; l < p.tail.size(); ++l) {
    layers_.emplace_back(c, p, l);
  }
}

compressed_decoder::compressed_decoder(const engine::decoder& model, const contender& c,
                                       index_t capacity)
    : model_(model), position_(0) {
  for (index_t l = 0; l < model.shape().layers; ++l) {
    layers_.emplace_back(c, model.shape(), static_cast<std::size_t>(l), capacity);
  }
}

const row_major_matrix& compressed_decoder::next(int token) {
  compressed_decoder* const self = this;
  next(std::span(&self, 1), std::span(&token, 1), scratch_, logits_);
  return logits_;
}

void compressed_decoder::next(std::span<compressed_decoder* const> decoders,
                              std::span<const int> tokens, engine::decoder::scratch& work,
                              row_major_matrix& logits) {
  work.positions.clear();
  for (compressed_decoder* const d : decoders) {
    work.positions.push_back(d->position_++);
  }
  const auto attend = [&](index_t layer, const auto& q, const auto& k, const auto& v, auto& out) {
    const auto row = [](auto& m, std::size_t i) {
      return std::span(m.row(static_cast<Eigen::Index>(i)).data(),
                       static_cast<std::size_t>(m.cols()));
    };
    for (std::size_t i = 0; i < decoders.size(); ++i) {
      auto& l = decoders[i]->layers_[static_cast<std::size_t>(layer)];
      kvmeld::step(std::span<const any_policy>(l.decoding), l.kv, l.state,
                   {row(q, i), row(k, i), row(v, i)}, std::span<const budget>(l.limits),
                   row(out, i));
    }
  };
  decoders.front()->model_.forward(work, tokens, work.positions, attend, logits);
}

}  // namespace evaluate
