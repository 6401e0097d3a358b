// SPDX-License-Identifier: MIT
#include "llama_cpp/own_engine.hpp"

#include <cmath>
#include <optional>

#include "engine/prefill.hpp"
#include "evaluate/names.hpp"

namespace test {

std::vector<std::string> every_policy_name() {
  return {"streaming_llm",
          "h2o",
          "snapkv:window=8",
          "zsmerge:proximity=0.2,residual=3",
          "d2o",
          "kvmerger",
          "ems:window=8",
          "keepkv",
          "keepkv:variant=1,window=8",
          "attention_matching:recent=4",
          "fold",
          "random:window=8",
          "tova",
          "roco",
          "scissorhands",
          "key_diff:window=4",
          "expected_attention",
          "centroids:window=8",
          "compactor",
          "cam",
          "lowest_norm"};
}

evaluate::any_policy policy_named(const std::string& name) {
  return evaluate::detail::parse_policy(name).policy;
}

evaluate::any_policy by_slots() {
  kvmeld::streaming_llm p;
  p.positions = kvmeld::streaming_llm::position_mode::cache_index;
  return p;
}

engine::row_major_matrix full_logits(const engine::decoder& model, std::span<const int> tokens) {
  return engine::prefill(model, tokens, engine::logits_of::all).logits;
}

namespace {

/// Turns `x [tokens, heads * dim]`, whose first token is at position `first`, by llama.cpp's
/// angles.
engine::row_major_matrix turned_as_llama_cpp(engine::row_major_matrix x, index_t first, index_t dim,
                                             double base) {
  const float ratio = std::pow(static_cast<float>(base), -2.0F / static_cast<float>(dim));
  const index_t half = dim / 2;
  for (Eigen::Index t = 0; t < x.rows(); ++t) {
    auto angle = static_cast<float>(first + t);
    for (index_t p = 0; p < half; ++p, angle *= ratio) {
      const float c = std::cos(angle), s = std::sin(angle);
      for (Eigen::Index i = p; i < x.cols(); i += dim) {
        const float a = x(t, i), b = x(t, i + half);
        x(t, i) = a * c - b * s;
        x(t, i + half) = b * c + a * s;
      }
    }
  }
  return x;
}

}  // namespace

chunked_engine::chunked_engine(const engine::decoder& model, policy p,
                               std::vector<kvmeld::budget> limits, index_t capacity,
                               std::vector<char> whole, angles turned)
    : model_(model),
      policy_(std::move(p)),
      limits_(std::move(limits)),
      whole_(std::move(whole)),
      turned_(turned) {
  const auto& c = model.shape();
  whole_.resize(static_cast<std::size_t>(c.layers));
  for (index_t l = 0; l < c.layers; ++l) {
    caches_.emplace_back(c.attention(), kvmeld::cache_options{.capacity = capacity});
    states_.push_back(kvmeld::make_state(policy_, caches_.back()));
  }
}

engine::row_major_matrix chunked_engine::decode(std::span<const int> tokens) {
  engine::row_major_matrix logits;
  const auto attend = [&](index_t layer, const auto& q, const auto& k, const auto& v, auto& out) {
    const auto l = static_cast<std::size_t>(layer);
    for (index_t h = 0; h < caches_[l].heads(); ++h) {
      one_head(l, h, q, k, v, out);
    }
  };
  if (turned_ == angles::ours) {
    model_.forward(tokens, position_, attend, logits);
  } else {  // at position 0 the engine turns nothing
    const auto& c = model_.shape();
    const auto turn = [&](const auto& x) {
      return turned_as_llama_cpp(x, position_, c.dim, c.rope.base());
    };
    engine::decoder::scratch memory;
    model_.forward(
        memory, tokens, std::vector<index_t>(tokens.size(), 0),
        [&](index_t layer, const auto& q, const auto& k, const auto& v, auto& out) {
          attend(layer, turn(q), turn(k), v, out);
        },
        logits);
  }
  position_ += static_cast<index_t>(tokens.size());
  return logits;
}

void chunked_engine::one_head(std::size_t l, index_t h, const engine::row_major_matrix& q,
                              const engine::row_major_matrix& k, const engine::row_major_matrix& v,
                              engine::row_major_matrix& out) {
  auto& kv = caches_[l];
  auto& state = states_[l];
  const auto head = kv.head(h);
  const index_t width = head.group() * head.dim();
  const auto tokens = static_cast<index_t>(q.rows());
  const bool prompt = tokens > 1 && policy_.plans_on_queries();
  std::vector<float> p(static_cast<std::size_t>(head.group() * head.capacity()));
  std::vector<float> lse(static_cast<std::size_t>(head.group()));
  for (index_t t = 0; t < tokens; ++t) {
    head.push(&k(t, h * head.dim()), &v(t, h * head.dim()));
    state[h].extend(head.length());
    const auto seen = std::span(p).first(static_cast<std::size_t>(head.group() * head.length()));
    kvmeld::traits::attend(policy_, head, state[h], &q(t, h * width), &out(t, h * width), seen,
                           lse);
    if (whole_[l] == 0 && !prompt && policy_.measures()) {
      kvmeld::observe(policy_, head, state[h], state.workspace(),
                      {.probabilities = seen, .log_sum_exp = lse, .query = &q(t, h * width)});
    }
  }
  if (whole_[l] != 0) {
    return;
  }
  const kvmeld::budget b = limits_[l];
  std::optional<kvmeld::reference_queries> chosen;
  auto queries =
      kvmeld::prompt_queries(q.data(), tokens, kv.heads(), head.group(), head.dim()).of(h);
  if (prompt) {
    if (policy_.name() == "fold" || policy_.name() == "attention_matching") {
      kvmeld::cache one(model_.shape().attention(1), {.capacity = head.capacity()});
      one.head(0).restore(0, head.next_position());  // foresight and spread look at `seen` alone
      chosen =
          policy_.name() == "fold" ? kvmeld::foresight(one, queries) : kvmeld::spread(one, queries);
      queries = chosen->view();
    }
    kvmeld::observe(policy_, head, state[h], queries);
  }
  if (b.reached(head.length()) && (prompt || policy_.decodes())) {
    kvmeld::plan(policy_, head, state[h], prompt ? queries : kvmeld::no_queries, b.slots,
                 state.workspace().scratch, state.workspace().plan);
    kvmeld::apply(policy_, state.workspace().plan, head, state[h], state.workspace().scratch);
  }
  if (head.length() <= b.slots) {
    kvmeld::traits::after_compress(policy_, head, state[h], b.slots);
  }
}

}  // namespace test
