// SPDX-License-Identifier: MIT
#include "evaluate/dataset.hpp"

#include <algorithm>  // std::copy, std::max
#include <memory>     // std::make_shared

#include "evaluate/replay.hpp"

namespace evaluate {

namespace {

/// Attention of the rows of `q`; `before(head, at, i)` is called before that of row `i`.
template <class F>
void attend_rows(kvmeld::cache& kv, index_t layer, const row_major_matrix& q, row_major_matrix& out,
                 F before) {
  out.resize(q.rows(), q.cols());
  for (index_t h = 0; h < kv.kv_heads(); ++h) {
    const auto head = kv.head(kv.heads(layer, 0)[h]);
    const Eigen::Index at = Eigen::Index{h} * head.group() * head.dim();
    for (Eigen::Index i = 0; i < q.rows(); ++i) {
      before(head, Eigen::Index{h} * head.dim(), i);
      kvmeld::attend(head, &q(i, at), &out(i, at));
    }
  }
}

}  // namespace

void attend_all(kvmeld::cache& kv, index_t layer, const row_major_matrix& q,
                row_major_matrix& out) {
  attend_rows(kv, layer, q, out, [](const auto&, Eigen::Index, Eigen::Index) {});
}

void attend_behind(kvmeld::cache& kv, index_t layer, const engine::layer_record& tokens,
                   row_major_matrix& out) {
  attend_rows(kv, layer, tokens.q, out, [&](const auto& head, Eigen::Index at, Eigen::Index i) {
    head.push(&tokens.k(i, at), &tokens.v(i, at));
  });
}

text_prompt read_prompt(const engine::decoder& model, std::span<const named_policy> policies,
                        std::span<const int> tokens, index_t length, index_t future,
                        index_t capacity, bool predicts, engine::record* keep) {
  const auto read = tokens.first(static_cast<std::size_t>(length)),
             rest = tokens.subspan(static_cast<std::size_t>(length));
  engine::record r = engine::prefill(model, read);
  if (keep != nullptr) {
    *keep = r;
  }
  const auto body = std::make_shared<prompt_body>(model.shape(), r, length, capacity);
  text_prompt p{
      .read = measure(model.shape(), r, policies, body, replay_for(policies, model, r, read)),
      .next = {rest.begin(), rest.begin() + decoded_tokens},
      .future = {},
      .predicted = {}};
  const index_t behind = std::max(future, predicts ? decoded_tokens - 1 : 0);
  if (behind == 0) {
    return p;
  }
  std::vector<row_major_matrix> streams;
  extend(model, r, rest.first(static_cast<std::size_t>(behind)),
         predicts ? engine::logits_of::all : engine::logits_of::last, &streams);
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
    attend_all(kv, layer, f.tokens.q, f.of_prompt);
    attend_behind(kv, layer, f.tokens, f.of_all);
    const auto& projection = model.parameters().layers[l].o.weight;
    f.stream = (streams[l].topRows(future) + f.of_all * projection.transpose()).rowwise().norm();
  }
  return p;
}

needle_case read_needle(const engine::decoder& model, std::span<const named_policy> policies,
                        const engine::tokenizer& tokens, needle_text text, index_t capacity) {
  // Inside the prompt, the question takes the place of its end, where no needle lies.
  const auto shared = static_cast<index_t>(text.body.size() - text.question.size());
  engine::record r = engine::prefill(model, text.body);
  const auto body = std::make_shared<prompt_body>(model.shape(), r, shared, capacity);
  needle_case c{.without = measure(model.shape(), r, policies, body,
                                   replay_for(policies, model, r, text.body)),
                .with = {},
                .question = std::move(text.question),
                .value = std::move(text.value),
                .bin = text.bin,
                .stats = {}};
  for (auto& layer : r.layers) {
    for (row_major_matrix* m : {&layer.q, &layer.k, &layer.v}) {
      m->conservativeResize(shared, Eigen::NoChange);
    }
  }
  extend(model, r, c.question);
  std::copy(c.question.begin(), c.question.end(), text.body.begin() + shared);
  c.with = measure(model.shape(), r, policies, body, replay_for(policies, model, r, text.body));
  if (text.fact_tokens > 0) {
    // The last token of the question predicts the answer's first.
    const auto answer = tokens.encode_fragment(" " + c.value);
    extend(model, r, std::span(answer).first(answer.size() - 1));
    c.stats = head_stats_of(model.shape(), r, static_cast<index_t>(answer.size()), text.fact,
                            text.fact_tokens);
  }
  return c;
}

std::vector<head_stats> mean_head_stats(const std::vector<std::vector<head_stats>>& cases) {
  std::vector<head_stats> mean(cases.empty() ? 0 : cases.front().size());
  const auto n = static_cast<double>(cases.size());
  for (const auto& stats : cases) {
    for (std::size_t i = 0; i < mean.size(); ++i) {
      mean[i].retrieval += stats[i].retrieval / n;
      mean[i].local += stats[i].local / n;
      mean[i].sink += stats[i].sink / n;
    }
  }
  return mean;
}

stream_record read_stream(const engine::decoder& model, std::span<const int> tokens) {
  const engine::config& c = model.shape();
  stream_record s{.layers = engine::prefill(model, tokens).layers, .attended = {}};
  for (const auto& l : s.layers) {
    s.attended.push_back(engine::causal_attention(l.q, l.k, l.v, c.heads, c.kv_heads, c.dim, 0));
  }
  return s;
}

}  // namespace evaluate
