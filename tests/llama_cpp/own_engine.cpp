// SPDX-License-Identifier: MIT
#include "llama_cpp/own_engine.hpp"

#include <algorithm>  // std::ranges::none_of
#include <cmath>

#include "engine/prefill.hpp"
#include "evaluate/policies.hpp"

namespace test {

std::vector<std::string> every_policy_name() {
  std::vector<std::string> all = {"streaming_llm",
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
                                  "random:window=8,prompt=1",
                                  "snapkv+massfold:window=8",
                                  "tova",
                                  "roco",
                                  "scissorhands",
                                  "r_kv",
                                  "key_diff:window=4",
                                  "expected_attention",
                                  "triattention",
                                  "centroids:window=8",
                                  "compactor",
                                  "cam",
                                  "lowest_norm"};
  for (const auto& p : evaluate::any_policy::every()) {
    const auto is_listed = [&](std::string_view text) {
      return text.substr(0, text.find(':')) == p.name();
    };
    // The full cache holds more than a budget; the adapter refuses the other two.
    const bool is_apart =
        p.name() == "full_cache" || p.name().starts_with("kvzip") || p.name().starts_with("dropkv");
    if (!is_apart && std::ranges::none_of(all, is_listed)) {
      all.emplace_back(p.name());
    }
  }
  return all;
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

std::vector<evaluate::any_policy> chunked_engine::each_head(const engine::config& c,
                                                            const policy& p,
                                                            std::vector<char> whole) {
  if (whole.empty()) {
    return {p};
  }
  whole.resize(static_cast<std::size_t>(c.layers));
  std::vector<policy> all;
  for (const char left_alone : whole) {
    all.insert(all.end(), static_cast<std::size_t>(c.kv_heads),
               left_alone != 0 ? policy(kvmeld::full_cache{}) : p);
  }
  return all;
}

std::vector<kvmeld::budget> chunked_engine::each_head(const engine::config& c,
                                                      const std::vector<kvmeld::budget>& limits) {
  std::vector<kvmeld::budget> all;
  for (const kvmeld::budget& b : limits) {
    all.insert(all.end(), limits.size() == 1 ? 1U : static_cast<std::size_t>(c.kv_heads), b);
  }
  return all;
}

chunked_engine::chunked_engine(const engine::decoder& model, const policy& p,
                               std::vector<kvmeld::budget> limits, index_t capacity,
                               std::vector<char> whole, angles turned,
                               const kvmeld::storage_pair& rows)
    : model_(model),
      policy_(p),
      shared_(limits.front().is_shared),
      turned_(turned),
      kv_(model.shape().attention(), {.layers = model.shape().layers,
                                      .capacity = capacity,
                                      .keys = rows.keys,
                                      .values = rows.values,
                                      .newest = rows.newest}),
      meld_(kv_, std::span<const policy>(each_head(model.shape(), p, std::move(whole))),
            std::span<const kvmeld::budget>(each_head(model.shape(), limits))) {}

engine::row_major_matrix chunked_engine::decode(std::span<const int> tokens) {
  engine::row_major_matrix logits;
  const auto through = [&](index_t layer, const auto& q, const auto& k, const auto& v, auto& out) {
    attend(layer, q, k, v, out);
  };
  engine::decoder::scratch memory;
  if (turned_ == angles::ours) {
    model_.forward(memory, tokens, position_, through, logits);
  } else {  // at position 0 the engine turns nothing
    const auto& c = model_.shape();
    const auto turn = [&](const auto& x) {
      return turned_as_llama_cpp(x, position_, c.dim, c.rope.base());
    };
    model_.forward(
        memory, tokens, std::vector<index_t>(tokens.size(), 0),
        [&](index_t layer, const auto& q, const auto& k, const auto& v, auto& out) {
          attend(layer, turn(q), turn(k), v, out);
        },
        logits);
  }
  position_ += static_cast<index_t>(tokens.size());
  if (tokens.size() > 1 && !shared_) {
    end_prompt();
  }
  return logits;
}

void chunked_engine::attend(index_t layer, const engine::row_major_matrix& q,
                            const engine::row_major_matrix& k, const engine::row_major_matrix& v,
                            engine::row_major_matrix& out) {
  const auto of = [](auto& x) { return std::span(x.data(), static_cast<std::size_t>(x.size())); };
  const auto heads = kv_.heads(layer, 0);
  const auto tokens = static_cast<index_t>(q.rows());
  if (tokens == 1 && kvmeld::declared(policy_).supports_decode()) {
    meld_.step(heads, {of(q), of(k), of(v)}, of(out));
    return;
  }
  meld_.attend(heads, {of(q), of(k), of(v)}, of(out), tokens);
  meld_.prompt(heads, kvmeld::queries(of(q), tokens, kv_.spec(layer)));
}

}  // namespace test
