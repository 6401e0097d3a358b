// SPDX-License-Identifier: MIT
#include "evaluate/dataset.hpp"

#include <algorithm>  // std::copy, std::max
#include <memory>     // std::make_shared

#include "evaluate/prompt.hpp"

namespace evaluate {

row_major_matrix attended(kvmeld::cache& kv, index_t layer, const engine::layer_record& tokens,
                          bool behind) {
  row_major_matrix out(tokens.q.rows(), tokens.q.cols());
  for (index_t h = 0; h < kv.kv_heads(); ++h) {
    const auto head = kv.head(kv.heads(layer, 0)[h]);
    const Eigen::Index own = Eigen::Index{h} * head.dim(), at = own * head.group();
    for (Eigen::Index i = 0; i < out.rows(); ++i) {
      if (behind) {
        head.push(&tokens.k(i, own), &tokens.v(i, own));
      }
      kvmeld::attend(head, &tokens.q(i, at), &out(i, at));
    }
  }
  return out;
}

namespace {

engine::record read(const engine::decoder& model, std::span<const named_policy> policies,
                    std::span<const int> tokens) {
  const bool by_surrogate = std::ranges::any_of(
      policies, [](const auto& p) { return p.queries == query_source::surrogate; });
  return engine::prefill(model, tokens, engine::logits_of::last, 256, by_surrogate);
}

}  // namespace

prompt read_whole(const engine::decoder& model, std::span<const named_policy> policies,
                  std::span<const int> tokens, index_t capacity) {
  const engine::record r = read(model, policies, tokens);
  const auto body = std::make_shared<prompt_body>(model.shape(), r, count_of(tokens), capacity);
  return measure(model.shape(), r, policies, body, replay_for(policies, model, r, tokens));
}

text_prompt read_prompt(const engine::decoder& model, std::span<const named_policy> policies,
                        std::span<const int> tokens, index_t length, index_t future,
                        index_t capacity, bool predicts, engine::record* keep) {
  const auto first = tokens.first(as_size(length)), rest = tokens.subspan(as_size(length));
  engine::record r = read(model, policies, first);
  if (keep != nullptr) {
    *keep = r;
  }
  const auto body = std::make_shared<prompt_body>(model.shape(), r, length, capacity);
  text_prompt p{
      .read = measure(model.shape(), r, policies, body, replay_for(policies, model, r, first)),
      .next = {rest.begin(), rest.begin() + decoded_tokens}};
  const index_t behind = std::max(future, predicts ? decoded_tokens - 1 : 0);
  if (behind == 0) {
    return p;
  }
  std::vector<row_major_matrix> streams;
  engine::extend(model, r, rest.first(as_size(behind)),
                 predicts ? engine::logits_of::all : engine::logits_of::last, behind, &streams);
  if (predicts) {
    p.predicted = r.logits.topRows(decoded_tokens - 1);
  }
  kvmeld::cache kv = p.read.cache();
  for (std::size_t l = 0; l < r.layers.size(); ++l) {
    const auto layer = static_cast<index_t>(l);
    const engine::layer_record& all = r.layers[l];
    future_attention& f = p.future.emplace_back();
    f.tokens = {.q = all.q.middleRows(length, future),
                .k = all.k.middleRows(length, future),
                .v = all.v.middleRows(length, future)};
    f.of_prompt = attended(kv, layer, f.tokens, false);
    f.of_all = attended(kv, layer, f.tokens, true);
    const auto& projection = model.parameters().layers[l].o.weight;
    f.stream = (streams[l].topRows(future) + f.of_all * projection.transpose()).rowwise().norm();
  }
  return p;
}

needle_case read_needle(const engine::decoder& model, std::span<const named_policy> policies,
                        const engine::tokenizer& tokens, needle_text text, index_t capacity) {
  // Inside the prompt, the question takes the place of its end, where no needle lies.
  const auto shared = static_cast<index_t>(text.body.size() - text.question.size());
  engine::record r = read(model, policies, text.body);
  const auto body = std::make_shared<prompt_body>(model.shape(), r, shared, capacity);
  needle_case c{.without = measure(model.shape(), r, policies, body,
                                   replay_for(policies, model, r, text.body)),
                .question = std::move(text.question),
                .value = std::move(text.value),
                .bin = text.bin};
  for (auto& layer : r.layers) {
    for (row_major_matrix* m : {&layer.q, &layer.k, &layer.v, &layer.hidden_norm, &layer.hidden}) {
      m->conservativeResize(shared, Eigen::NoChange);
    }
  }
  engine::extend(model, r, c.question);
  std::copy(c.question.begin(), c.question.end(), text.body.begin() + shared);
  c.with = measure(model.shape(), r, policies, body, replay_for(policies, model, r, text.body));
  if (text.fact_tokens > 0) {
    // The last token of the question predicts the answer's first.
    const auto answer = tokens.encode_fragment(" " + c.value);
    engine::extend(model, r, std::span(answer).first(answer.size() - 1));
    c.stats = head_stats_of(model.shape(), r, count_of(answer), text.fact, text.fact_tokens);
  }
  return c;
}

stream_record read_stream(const engine::decoder& model, std::span<const int> tokens) {
  const engine::config& c = model.shape();
  stream_record s{.layers = engine::prefill(model, tokens).layers};
  for (const auto& l : s.layers) {
    s.attended.push_back(
        engine::causal_attention(l.q, l.k, l.v, c.attention(count_of(s.attended)), 0));
  }
  return s;
}

}  // namespace evaluate
