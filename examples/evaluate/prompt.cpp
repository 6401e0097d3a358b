// SPDX-License-Identifier: MIT
#include "evaluate/prompt.hpp"

#include <algorithm>  // std::min, std::ranges::max
#include <chrono>
#include <utility>

#include "evaluate/surrogate.hpp"

namespace evaluate {

void append(kvmeld::cache& kv, index_t layer, const engine::layer_record& r, index_t first,
            index_t last) {
  const auto rows = [&](const row_major_matrix& m) {
    return std::span(m.data() + first * m.cols(), as_size((last - first) * m.cols()));
  };
  kv.append(kv.heads(layer, 0), rows(r.k), rows(r.v), last - first);
}

prompt_body::prompt_body(const engine::config& shape, const engine::record& r, index_t length,
                         index_t capacity)
    : kv(shape.attention(), {.layers = shape.layers, .capacity = capacity}), tokens(length) {
  for (index_t l = 0; l < shape.layers; ++l) {
    append(kv, l, r.layers[as_size(l)], 0, length);
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
std::shared_ptr<const reference_queries> reference_of(const named_policy& p, kvmeld::cache& kv,
                                                      const kvmeld::query_view<float>& own,
                                                      const kvmeld::query_view<float>& again) {
  const auto count = [&](index_t by_default) {
    return p.queries_taken > 0 ? p.queries_taken : by_default;
  };
  const auto shared = [](reference_queries&& q) {
    return std::make_shared<const reference_queries>(std::move(q));
  };
  switch (p.queries) {
    case query_source::own:
    case query_source::surrogate:
      return nullptr;
    case query_source::window:
      return shared(spread(kv, own.last(count(32)), count(32), 0));
    case query_source::spread:
      return shared(spread(kv, own, count(256)));
    case query_source::replay:
      return shared(spread(kv, again, count(256), 0));
    case query_source::lookahead:
      break;
  }
  return shared(lookahead(kv, own, {.count = count(256), .ahead = p.ahead}));
}

/// `policy` for KV head `h` of a layer: with what `output` has of its query heads, if it takes
/// that.
any_policy with_output(any_policy policy, const row_major_matrix& output, const kvmeld::cache& kv,
                       index_t h) {
  const auto set = [&](auto& p) {
    if constexpr (requires { p.output; }) {
      const auto columns = Eigen::Index{kv.spec().group} * kv.spec().key_dim;
      p.output = {output.data() + h * columns, static_cast<index_t>(output.rows()), output.cols()};
    }
  };
  policy.visit([&](auto& p) {
    if constexpr (requires { p.scorer; }) {
      kvmeld::detail::with_policy(p.scorer, set);
    } else {
      set(p);
    }
  });
  return policy;
}

/// Each part of a second reading of a layer is appended after the prompt, observed and taken away
/// again. `output [hidden, heads · dim]`: the layer's projection.
void observe_replay(const any_policy& policy, const engine::config& shape, kvmeld::cache& kv,
                    std::span<kvmeld::head_state> heads, const engine::layer_record& again,
                    std::span<const index_t> parts, const row_major_matrix& output) {
  const index_t tokens = kv.head(0).length();
  index_t begin = 0;
  for (const index_t rows : parts) {
    append(kv, 0, again, begin, begin + rows);
    auto queries = queries_of(shape, again.q);
    queries.data += begin * queries.row;
    queries.count = rows;
    queries.hidden_norm = again.hidden_norm.data() + begin;
    for (index_t h = 0; h < kv.heads(); ++h) {
      auto& state = heads[as_size(h)];
      kvmeld::observe(with_output(policy, output, kv, h), kv.head(h), state, queries.of(h));
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
  const auto use = kvmeld::declared(policy).prompt_use();
  // Where a policy wants chosen queries besides its prompt's own, it scores by these first.
  const bool scores =
      use.observes && (use.plans == planned::spread || use.plans == planned::lookahead);
  measured_prompt m;
  for (const index_t layer : shape.full_layers()) {
    const auto l = as_size(layer);
    const auto tokens = static_cast<index_t>(r.layers[l].k.rows());
    kvmeld::cache kv(shape.attention(layer),
                     {.capacity = replays ? tokens + std::ranges::max(again.parts) : capacity});
    append(kv, 0, r.layers[l], 0, tokens);
    const auto own = queries_of(shape, r.layers[l].q);
    const auto chosen = replays ? nullptr : reference_of(p, kv, own, again.queries(shape, l));
    const row_major_matrix surrogate_scores = p.queries == query_source::surrogate
                                                  ? (*p.scores)(layer, r.layers[l].hidden)
                                                  : row_major_matrix();
    for (index_t h = 0; h < kv.heads(); ++h) {
      m.heads.push_back(kvmeld::make_head_state(policy, kv.head(h)));
      if (surrogate_scores.size() > 0) {
        m.heads.back().extend(tokens);
        std::ranges::copy(surrogate_scores.col(h), m.heads.back().column(0).begin());
        continue;
      }
      if (chosen && scores) {
        kvmeld::observe(policy, kv.head(h), m.heads.back(), own.of(h));
      }
      if (!replays) {
        kvmeld::observe(policy, kv.head(h), m.heads.back(), (chosen ? chosen->view() : own).of(h));
      }
    }
    if (replays) {
      observe_replay(policy, shape, kv, std::span(m.heads).last(as_size(kv.heads())),
                     again.layers[l], again.parts, both.model->layers[l].o.weight);
    }
    m.chosen.push_back(chosen);
  }
  return m;
}

prompt measure(const engine::config& shape, const engine::record& r,
               std::span<const named_policy> policies, std::shared_ptr<const prompt_body> body,
               const second_readings& again) {
  prompt p{.body = std::move(body),
           .logits = r.logits,
           .tokens = static_cast<index_t>(r.layers.front().q.rows())};
  const Eigen::Index behind = p.tokens - p.body->tokens;
  for (const engine::layer_record& l : r.layers) {
    p.tail.push_back({.q = {}, .k = l.k.bottomRows(behind), .v = l.v.bottomRows(behind)});
  }
  for (const index_t layer : shape.full_layers()) {
    p.own.push_back(r.layers[as_size(layer)].q.bottomRows(std::min(p.tokens, own_queries)));
  }
  for (const named_policy& n : policies) {
    p.measured.push_back(measure(n, shape, r, again, p.body->kv.capacity()));
    if (!kvmeld::declared(n.policy).uses_queries()) {  // the queries have told all
      std::ranges::fill(p.measured.back().chosen, nullptr);
    }
  }
  return p;
}

namespace {

/// Of the part before, so many tokens follow the words, for a part to begin behind them.
constexpr index_t replay_overlap = 8;

/// The words before the part of `tokens` that begins at `begin`, and that part.
std::vector<int> part_of(std::span<const int> tokens, index_t begin, index_t count,
                         const replay_words& words) {
  std::vector<int> part = begin == 0 ? words.whole : words.part;
  const auto add = [&](std::span<const int> more) {
    part.insert(part.end(), more.begin(), more.end());
  };
  const index_t overlap = words.part.empty() ? 0 : std::min(begin, replay_overlap);
  add(tokens.subspan(as_size(begin - overlap), as_size(overlap)));
  add(words.end);
  add(tokens.subspan(as_size(begin), as_size(count)));
  return part;
}

}  // namespace

replay_words replay_words_of(const engine::tokenizer& tokens, const engine::chat_turn& turn) {
  return {.whole = tokens.encode_fragment("\n\nRepeat the previous context exactly."),
          .part = tokens.encode_fragment(
              "\n\nRepeat the part of the previous context exactly, starting with"),
          .end = turn.after.empty() ? tokens.encode_fragment("\n") : turn.after,
          .skipped = turn.before};
}

replayed_prompt replay(const engine::decoder& model, const engine::record& r,
                       std::span<const int> tokens, const replay_words& words, index_t chunk) {
  const auto started = std::chrono::steady_clock::now();
  replayed_prompt again;
  const auto count = count_of(tokens);
  again.layers.resize(r.layers.size());
  const bool skips = std::ranges::mismatch(words.skipped, tokens).in1 == words.skipped.end();
  const auto first = skips ? count_of(words.skipped) : 0;
  const auto read = tokens.subspan(as_size(first));
  for (index_t begin = 0; begin < count - first; begin += chunk) {
    const auto part = part_of(read, begin, std::min(chunk, count - first - begin), words);
    const auto rows = count_of(part);
    engine::record behind = r;
    engine::extend(model, behind, part);
    const auto before = static_cast<Eigen::Index>(again.positions.size());
    for (std::size_t l = 0; l < r.layers.size(); ++l) {
      auto& all = again.layers[l];
      const auto& layer = behind.layers[l];
      for (const auto& [to, from] : {std::pair{&all.q, &layer.q},
                                     {&all.k, &layer.k},
                                     {&all.v, &layer.v},
                                     {&all.hidden_norm, &layer.hidden_norm}}) {
        to->conservativeResize(before + rows, from->cols());
        to->bottomRows(rows) = from->bottomRows(rows);
      }
    }
    for (index_t i = 0; i < rows; ++i) {
      again.positions.push_back(count + i);
    }
    again.parts.push_back(rows);
  }
  again.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  return again;
}

second_readings replay_for(std::span<const named_policy> policies, const engine::decoder& model,
                           const engine::record& r, std::span<const int> tokens) {
  second_readings both{.repeated = {}, .behind = {}, .model = &model.parameters()};
  for (const named_policy& p : policies) {
    if (p.observes_replay() && both.repeated.parts.empty()) {
      both.repeated = replay(model, r, tokens, p.words, repeated_chunk);
    } else if (p.queries == query_source::replay && !p.observes_replay() &&
               both.behind.parts.empty()) {
      both.behind = replay(model, r, tokens, {}, behind_chunk);
    }
  }
  return both;
}

}  // namespace evaluate
