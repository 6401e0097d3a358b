// SPDX-License-Identifier: MIT
#include "evaluate/prompt.hpp"

#include <algorithm>  // std::min, std::ranges::max
#include <utility>

namespace evaluate {

void append(kvmeld::cache& kv, index_t layer, const engine::layer_record& r, index_t first,
            index_t last) {
  const auto rows = [&](const row_major_matrix& m) {
    return std::span(m.data() + first * m.cols(),
                     static_cast<std::size_t>((last - first) * m.cols()));
  };
  kv.append(kv.heads(layer, 0), rows(r.k), rows(r.v), last - first);
}

prompt_body::prompt_body(const engine::config& shape, const engine::record& r, index_t length,
                         index_t capacity)
    : kv(shape.attention(), {.layers = shape.layers, .capacity = capacity}), tokens(length) {
  for (index_t l = 0; l < shape.layers; ++l) {
    append(kv, l, r.layers[static_cast<std::size_t>(l)], 0, length);
  }
}

kvmeld::cache prompt::cache() const {
  kvmeld::cache kv = body->kv;
  for (std::size_t l = 0; l < tail.size(); ++l) {
    append(kv, static_cast<index_t>(l), tail[l], 0, static_cast<index_t>(tail[l].k.rows()));
  }
  return kv;
}

kvmeld::query_view<float> replayed_prompt::queries(const engine::config& shape,
                                                   std::size_t layer) const {
  if (positions.empty()) {
    return {};
  }
  auto view = queries_of(shape, layers[layer].q);
  view.position = positions.data();
  return view;
}

namespace {

/// The queries that `p` measures a layer on, if not the prompt's own; `again`: a second reading's.
std::shared_ptr<const kvmeld::reference_queries> reference_of(
    const named_policy& p, kvmeld::cache& kv, const kvmeld::query_view<float>& own,
    const kvmeld::query_view<float>& again) {
  const auto count = [&](index_t by_default) {
    return p.queries_taken > 0 ? p.queries_taken : by_default;
  };
  const auto shared = [](kvmeld::reference_queries&& q) {
    return std::make_shared<const kvmeld::reference_queries>(std::move(q));
  };
  switch (p.queries) {
    case query_source::own:
      return nullptr;
    case query_source::window:
      return shared(kvmeld::spread(kv, own.last(count(32)), count(32), 0));
    case query_source::spread:
      return shared(kvmeld::spread(kv, own, count(256)));
    case query_source::replay:
      return shared(kvmeld::spread(kv, again, count(256), 0));
    case query_source::lookahead:
      break;
  }
  return shared(kvmeld::lookahead(kv, own, {.count = count(256), .ahead = p.ahead}));
}

/// Each part of a second reading of a layer is appended behind the prompt, observed and taken away
/// again.
void observe_replay(const any_policy& policy, const engine::config& shape, kvmeld::cache& kv,
                    std::span<kvmeld::head_state> heads, const engine::layer_record& again,
                    std::span<const index_t> parts) {
  const index_t tokens = kv.head(0).length();
  index_t begin = 0;
  for (const index_t rows : parts) {
    append(kv, 0, again, begin, begin + rows);
    auto queries = queries_of(shape, again.q);
    queries.data += begin * queries.row;
    queries.count = rows;
    for (index_t h = 0; h < kv.heads(); ++h) {
      auto& state = heads[static_cast<std::size_t>(h)];
      kvmeld::observe(policy, kv.head(h), state, queries.of(h));
      kv.head(h).restore(tokens, tokens);
      state.truncate(tokens);
    }
    begin += rows;
  }
}

}  // namespace

measured_prompt measure(const named_policy& p, const engine::config& shape, const engine::record& r,
                        const second_readings& both, index_t capacity) {
  using planned = kvmeld::prompt_use::planned;
  const replayed_prompt& again = both.of(p);
  const bool replays = p.observes_replay() && !again.parts.empty();
  const any_policy policy = p.measuring();
  const auto use = policy.prompt_use();
  // Where a policy wants chosen queries besides its prompt's own, it scores by these first.
  const bool scores =
      use.observes && (use.plans == planned::spread || use.plans == planned::lookahead);
  measured_prompt m;
  for (std::size_t l = 0; l < r.layers.size(); ++l) {
    const auto tokens = static_cast<index_t>(r.layers[l].k.rows());
    kvmeld::cache kv(shape.attention(),
                     {.capacity = replays ? tokens + std::ranges::max(again.parts) : capacity});
    append(kv, 0, r.layers[l], 0, tokens);
    const auto own = queries_of(shape, r.layers[l].q);
    const auto chosen = replays ? nullptr : reference_of(p, kv, own, again.queries(shape, l));
    for (index_t h = 0; h < kv.heads(); ++h) {
      m.heads.push_back(kvmeld::make_head_state(policy, kv.head(h)));
      if (chosen && scores) {
        kvmeld::observe(policy, kv.head(h), m.heads.back(), own.of(h));
      }
      if (!replays) {
        kvmeld::observe(policy, kv.head(h), m.heads.back(), (chosen ? chosen->view() : own).of(h));
      }
    }
    if (replays) {
      observe_replay(policy, shape, kv,
                     std::span(m.heads).last(static_cast<std::size_t>(kv.heads())), again.layers[l],
                     again.parts);
    }
    m.chosen.push_back(chosen);
  }
  return m;
}

prompt measure(const engine::config& shape, const engine::record& r,
               std::span<const named_policy> policies, std::shared_ptr<const prompt_body> body,
               const second_readings& again) {
  prompt p{.body = std::move(body),
           .tail = {},
           .measured = {},
           .own = {},
           .logits = r.logits,
           .tokens = static_cast<index_t>(r.layers.front().q.rows())};
  const Eigen::Index behind = p.tokens - p.body->tokens;
  for (const engine::layer_record& l : r.layers) {
    p.tail.push_back({.q = {}, .k = l.k.bottomRows(behind), .v = l.v.bottomRows(behind)});
    p.own.push_back(l.q.bottomRows(std::min(p.tokens, own_queries)));
  }
  for (const named_policy& n : policies) {
    p.measured.push_back(measure(n, shape, r, again, p.body->kv.capacity()));
    if (!n.policy.uses_queries()) {  // the queries have told all
      std::ranges::fill(p.measured.back().chosen, nullptr);
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
    out = engine::causal_attention(q, l.k, l.v, c.heads, c.kv_heads, c.dim,
                                   static_cast<index_t>(before));
    if (streams != nullptr) {
      streams->push_back(work.stream);
    }
  };
  model.forward(work, tokens, static_cast<index_t>(before), attend, r.logits,
                kept == engine::logits_of::last);
}

}  // namespace evaluate
