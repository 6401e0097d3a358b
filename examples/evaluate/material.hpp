/// All that the tasks measure on: made once, shared by every policy and budget.
#pragma once

#include <memory>
#include <numeric>  // std::accumulate
#include <span>
#include <vector>

#include "engine/tokenizer.hpp"
#include "evaluate/heads.hpp"
#include "evaluate/needle_text.hpp"
#include "evaluate/parallel.hpp"
#include "evaluate/plan.hpp"
#include "evaluate/prompt.hpp"
#include "evaluate/replay.hpp"

namespace evaluate {

/// A prompt of plain text and what comes after it.
struct text_prompt {
  prompt read;
  std::vector<int> next;                   ///< [decoded_tokens]
  std::vector<row_major_matrix> queries;   ///< [layers] of the first future tokens
  std::vector<row_major_matrix> attended;  ///< [layers] their attention over the whole prompt
};

/// A needle case, asked after compression and before it.
struct needle_case {
  prompt without, with;  ///< the question; both of as many tokens
  std::vector<int> question;
  std::string value;
  index_t bin = 0;
  std::vector<head_habits> habits;  ///< [layers · query heads] while the answer is written
};

/// A text decoded by the full model from an empty cache, and its attention's output.
struct stream_record {
  std::vector<engine::layer_record> layers;
  std::vector<row_major_matrix> attended;  ///< [tokens, heads · dim]
};

struct material {
  std::vector<text_prompt> prompts;
  std::vector<needle_case> cases;
  std::vector<stream_record> streams;
  engine::record timed;        ///< the first prompt's, with its queries
  double prefill_seconds = 0;  ///< that the full model takes to read it
  second_reading again;        ///< of the first prompt, for policies that measure on it
  double again_seconds = 0;
};

/// `count` tokens of the text, from a place drawn for piece `i` of kind `what`.
inline std::span<const int> draw_text(std::span<const int> text, std::uint64_t seed,
                                      std::uint64_t what, index_t i, index_t count) {
  random_source random(seed, what, i);
  const auto first = random.below(static_cast<index_t>(text.size()) - count + 1);
  return text.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
}

/// Attention of queries `[count, heads · dim]` over a layer's cache.
inline void attend_all(kvfold::cache<float>& kv, const row_major_matrix& q, row_major_matrix& out) {
  out.resize(q.rows(), q.cols());
  for (index_t h = 0; h < kv.heads(); ++h) {
    const auto head = kv.head(h);
    for (Eigen::Index i = 0; i < q.rows(); ++i) {
      const Eigen::Index at = Eigen::Index{h} * head.group() * head.dim();
      kvfold::attend(head, &q(i, at), &out(i, at));
    }
  }
}

/// A prompt of `length` tokens, and the next `future` ones' queries.
inline text_prompt read_prompt(const engine::decoder& model, std::span<const named_policy> policies,
                               std::span<const int> tokens, index_t length, index_t future,
                               index_t capacity, engine::record* keep) {
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
      .queries = {},
      .attended = {}};
  extend(model, r, rest.first(static_cast<std::size_t>(future)));
  for (std::size_t l = 0; l < r.layers.size(); ++l) {
    p.queries.push_back(r.layers[l].q.bottomRows(future));
    auto kv = p.read.layer(l);
    attend_all(kv, p.queries.back(), p.attended.emplace_back());
  }
  return p;
}

inline needle_case read_needle(const engine::decoder& model, std::span<const named_policy> policies,
                               const engine::tokenizer& tokens, needle_text text,
                               index_t capacity) {
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
                .habits = {}};
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
    c.habits = habits_of(model.shape(), r, static_cast<index_t>(answer.size()), text.fact,
                         text.fact_tokens);
  }
  return c;
}

/// The mean over cases, `[layers · query heads]`; empty: there are none.
inline std::vector<head_habits> mean_habits(const std::vector<needle_case>& cases) {
  std::vector<head_habits> mean(cases.empty() ? 0 : cases.front().habits.size());
  const auto n = static_cast<double>(cases.size());
  for (const needle_case& c : cases) {
    for (std::size_t i = 0; i < mean.size(); ++i) {
      mean[i].retrieval += c.habits[i].retrieval / n;
      mean[i].local += c.habits[i].local / n;
      mean[i].sink += c.habits[i].sink / n;
    }
  }
  return mean;
}

inline stream_record read_stream(const engine::decoder& model, std::span<const int> tokens) {
  const engine::config& c = model.shape();
  stream_record s{.layers = engine::prefill(model, tokens).layers, .attended = {}};
  for (const auto& l : s.layers) {
    s.attended.push_back(engine::causal_attention(l.q, l.k, l.v, c.heads, c.kv_heads, c.dim, 0));
  }
  return s;
}

}  // namespace evaluate
