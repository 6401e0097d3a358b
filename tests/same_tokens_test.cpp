// SPDX-License-Identifier: MIT
// Heads of a layer that keep the same tokens, by the mean of their scores.
#include <algorithm>  // std::ranges::copy
#include <catch2/catch.hpp>
#include <cmath>  // std::isnan
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/peers/roco.hpp"
#include "kvmeld/policies/fold.hpp"
#include "kvmeld/policies/h2o.hpp"
#include "kvmeld/policies/kvzip.hpp"
#include "kvmeld/policies/snapkv.hpp"
#include "kvmeld/policies/tova.hpp"
#include "oracle/budgets.hpp"
#include "oracle/evictors.hpp"
#include "support/model.hpp"

namespace same_tokens_test {

using namespace small_model;
using kvmeld::budget;

constexpr index_t tokens = 90, slots = 48;

std::vector<std::size_t> tokens_of(const kvmeld::head_ref& head) {
  std::vector<std::size_t> all;
  for (index_t s = 0; s < head.length(); ++s) {
    all.push_back(static_cast<std::size_t>(head.position(s)));
  }
  return all;
}
/// ... in their order, wherever in the head they lie.
std::vector<std::size_t> sorted_tokens_of(const kvmeld::head_ref& head) {
  auto all = tokens_of(head);
  std::ranges::sort(all);
  return all;
}

/// A token of every head of a layer.
struct one_row {
  std::vector<float> q = normal(kv_heads_of * group * dim), k = normal(kv_heads_of * dim), v = k;
};

/// The prompt's end against the oracle, then steps, and drafts that count as steps do. The oracle
/// protects the first `sinks` and `share` of the budget and `recent` of the latest tokens.
template <class P>
bool check(const P& given, int sinks, double share, int recent) {
  const auto shared = kvmeld::shared_slots::of(kvmeld::for_shared(given, slots));
  model_cache kv(tokens + 4), twin(tokens + 4);
  kvmeld::compressor meld(kv, given, budget::same_tokens(slots)),
      drafts(twin, given, budget::same_tokens(slots));
  const prompt_rows prompt(tokens);
  read(meld, kv, prompt, 0, 50), read(drafts, twin, prompt, 0, 50);
  std::vector<oracle::mat> scores(layers_of);
  const std::vector<index_t> heads = {0, 1, 4, 5};  // of request 0
  for (const index_t h : heads) {
    const auto column = meld.state(h).column(0);
    scores[static_cast<std::size_t>(h / 4)].emplace_back(column.begin(), column.end());
  }
  meld.end_prompt(0), drafts.end_prompt(0);
  const oracle::mat means = oracle::mean_scores(scores);
  oracle::mat sharing;
  for (const oracle::vec& mean : means) {
    sharing.emplace_back(mean.begin() + shared.sinks, mean.end() - shared.latest);
  }
  const auto more =
      oracle::global_budgets(sharing, layers_of * (slots - shared.own), tokens - shared.own - 1);
  for (const index_t h : heads) {
    const auto l = static_cast<std::size_t>(h / 4);
    const int target = shared.own + more[l], latest = recent + oracle::share(share, target);
    CHECK(sorted_tokens_of(kv.head(h)) == oracle::kept_slots(means[l], sinks, latest, target));
  }
  std::vector<float> out(kv_heads_of * group * dim), all(2 * out.size());
  const std::vector<one_row> first(layers_of), second(layers_of);
  for (const auto* const token : {&first, &second}) {
    for (index_t l = 0; l < layers_of; ++l) {
      const one_row& x = (*token)[static_cast<std::size_t>(l)];
      meld.step(model_cache::of(l, 0), {x.q, x.k, x.v}, out);
    }
  }
  for (index_t l = 0; l < layers_of; ++l) {
    const one_row &a = first[static_cast<std::size_t>(l)], &b = second[static_cast<std::size_t>(l)];
    const auto both = [](std::vector<float> x, const std::vector<float>& y) {
      x.insert(x.end(), y.begin(), y.end());
      return x;
    };
    const auto q = both(a.q, b.q), k = both(a.k, b.k), v = both(a.v, b.v);
    drafts.draft(model_cache::of(l, 0), {q, k, v}, all, 2);
  }
  drafts.accept(0, 2);
  for (const index_t h : heads) {
    CHECK(kv.head(h).length() == meld.limit(h).slots);
    CHECK(tokens_of(kv.head(h)) == tokens_of(kv.head(h - h % 2)));
    CHECK((same_head(kv.head(h), twin.head(h)) && same_state(meld.state(h), drafts.state(h))));
  }
  return more[0] != more[1];
}

TEST_CASE("heads of a layer that keep the same tokens keep those of the highest mean score") {
  const bool h2o = check(kvmeld::h2o{}, 4, 0.5, 0),
             snapkv = check(kvmeld::snapkv{.window = 8}, 4, 0, 8),
             tova = check(kvmeld::tova{}, 4, 0, 0);
  CHECK((h2o || snapkv || tova));  // layers have other lengths
}

/// Decode against the oracle of a policy: no head evicts by itself; at the trigger the heads of a
/// layer get the mean of their scores, and evict by it.
template <class P, class Oracle>
void check_decode(const P& p, const Oracle& by_itself) {
  model_cache kv(40);
  kvmeld::compressor meld(kv, p, budget::same_tokens(20, 4));
  std::vector<oracle::head> heads(4, oracle::make_head(dim, group));
  std::vector<float> out(kv_heads_of * group * dim);
  for (index_t step = 0; step < 60; ++step) {
    for (const index_t layer : {0, 1}) {
      const one_row x;
      const auto row = [&](const std::vector<float>& all, index_t i) {
        return oracle::vec(all.begin() + i * dim, all.begin() + (i + 1) * dim);
      };
      const index_t first = model_cache::of(layer, 0).first;
      const budget limit = meld.limit(first);
      meld.step(model_cache::of(layer, 0), {x.q, x.k, x.v}, out);
      const std::span of_layer = std::span(heads).subspan(static_cast<std::size_t>(2 * layer), 2);
      for (index_t h = 0; h < 2; ++h) {
        oracle::head& head = of_layer[static_cast<std::size_t>(h)];
        const oracle::mat q = {row(x.q, 2 * h), row(x.q, 2 * h + 1)};
        by_itself.step(head, q, row(x.k, h), row(x.v, h), limit.slots, 1000);
      }
      for (std::size_t s = 0; s < of_layer[0].slots.size(); ++s) {
        double& a = of_layer[0].slots[s].score;
        double& b = of_layer[1].slots[s].score;
        // Until they are due, each has its own.
        if (of_layer[0].slots.size() >= static_cast<std::size_t>(limit.trigger_length())) {
          a = b = (a + b) / 2;
        }
      }
      for (index_t h = 0; h < 2; ++h) {
        oracle::head& head = of_layer[static_cast<std::size_t>(h)];
        if (oracle::triggered(head, limit.slots, limit.trigger_length())) {
          by_itself.evict_to(head, limit.slots);
        }
        std::map<std::size_t, double> kept;
        for (const oracle::slot& s : head.slots) {
          kept[static_cast<std::size_t>(s.position)] = s.score;
        }
        const auto held = tokens_of(kv.head(first + h));
        REQUIRE(held.size() == kept.size());
        const auto score = meld.state(first + h).column(0);  // at rest none
        for (std::size_t s = 0; s < held.size(); ++s) {
          REQUIRE(kept.contains(held[s]));
          CHECK((score.empty() || score[s] == Approx(kept.at(held[s])).margin(1e-5)));
        }
      }
    }
  }
  CHECK(kv.head(0).next_position() == 60);
}

TEST_CASE("heads of the same tokens: decode evicts by the mean of what each head has seen") {
  check_decode(kvmeld::h2o{}, oracle::h2o{});
  check_decode(kvmeld::tova{}, oracle::tova{});
}

TEST_CASE("heads of the same tokens: the engine's own attention, and a batch of requests") {
  model_cache kv(tokens + 4);
  kvmeld::compressor meld(kv, kvmeld::h2o{}, budget::same_tokens(slots, 2));
  for (const index_t r : {0, 1}) {
    read(meld, kv, prompt_rows(tokens), r, tokens), meld.end_prompt(r);
  }
  const std::vector<index_t> both = {0, 1};
  for (index_t step = 0; step < 4; ++step) {
    const auto heads = kv.heads(1, both);
    const auto k = normal(2 * kv_heads_of * dim);
    kv.append(heads, k, k, 1);
    index_t longest = 0;
    for (index_t i = 0; i < heads.count(); ++i) {
      longest = std::max(longest, kv.head(heads[i]).length());
    }
    auto seen = normal(heads.count() * group * longest);
    std::ranges::transform(seen, seen.begin(), [](float x) { return x * x; });
    meld.observe(heads, {.probabilities = seen, .stride = longest});
    std::vector<index_t> lengths(4);
    meld.compress(heads, lengths);
    for (index_t i = 0; i < heads.count(); ++i) {
      const auto head = kv.head(heads[i]);
      CHECK(tokens_of(head) == tokens_of(kv.head(heads[i - i % 2])));
      CHECK((lengths[static_cast<std::size_t>(i)] == head.length() &&
             head.length() <= meld.limit(heads[i]).trigger_length() - 1));
    }
  }
}

TEST_CASE("heads of the same tokens: one list of moves, for another model's cache as well") {
  const kvmeld::h2o p{.recent = 0, .sinks = 1};
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  model_cache kv(8);
  prompt_rows(8).append(kv, 0, 0, 0, 8);
  kvmeld::cache draft({.kv_heads = 1, .key_dim = 8}, {.layers = 1, .capacity = 8});
  draft.append(draft.heads(0, 0), normal(64), normal(64), 8);
  const oracle::mat scores = {{0, nan, 3, 1, 2, 0, 9, 1}, {0, 9, 1, 3, 2, 4, 0, 1}};
  const auto kept = oracle::kept_slots(oracle::mean_scores({scores})[0], 1, 0, 4);
  CHECK(kept == std::vector<std::size_t>{0, 2, 3, 6});  // ties to the lower slots
  std::vector<kvmeld::head_state> states;
  for (const index_t h : {0, 1}) {
    states.push_back(make_head_state(p, kv.head(h)));
    states.back().extend(8);
    for (std::size_t s = 0; s < 8; ++s) {
      states.back().column(0)[s] = static_cast<float>(scores[static_cast<std::size_t>(h)][s]);
    }
  }
  kvmeld::average_scores(
      2, [&](index_t i) -> auto& { return states[static_cast<std::size_t>(i)]; });
  kvmeld::workspace work;
  plan(p, kv.head(1), states[1], 4, work.scratch, work.plan);
  for (const auto& head : {kv.head(0), kv.head(1), draft.head(0)}) {
    kvmeld::apply(work.plan, head);
    CHECK(tokens_of(head) == std::vector<std::size_t>{0, 6, 2, 3});  // one list: 6 fills slot 1
  }
}

TEST_CASE("heads of the same tokens: an infinite score ranks highest, NaN is NaN") {
  constexpr float inf = std::numeric_limits<float>::infinity();
  std::vector<kvmeld::head_state> states;
  for (const std::vector<float>& scores :
       {std::vector{inf, 1.0F, 0.1F, 2.0F}, {1.0F, inf, 0.1F, NAN}, {1.0F, inf, 0.1F, 1.0F}}) {
    states.push_back(kvmeld::make_head_state(kvmeld::h2o{}, model_cache(8).head(0)));
    states.back().extend(4);
    std::ranges::copy(scores, states.back().column(0).begin());
  }
  kvmeld::average_scores(
      3, [&](index_t i) -> auto& { return states[static_cast<std::size_t>(i)]; });
  for (kvmeld::head_state& s : states) {
    const auto mean = s.column(0);
    CHECK((mean[0] == inf && mean[1] == inf && mean[2] == 0.1F && std::isnan(mean[3])));
  }
}

template <class P>
void check_only_head(const P& p) {
  const kvmeld::attention_spec one{.kv_heads = 1, .group = group, .key_dim = dim};
  kvmeld::cache a(one, {.layers = 2, .capacity = tokens + 1}), b = a;
  kvmeld::compressor own(a, p, budget::shared(slots)), alike(b, p, budget::same_tokens(slots));
  for (index_t l = 0; l < 2; ++l) {
    const auto k = normal(tokens * dim), v = normal(tokens * dim), q = normal(tokens * group * dim);
    a.append(a.heads(l, 0), k, v, tokens), b.append(b.heads(l, 0), k, v, tokens);
    own.prompt(a.heads(l, 0), kvmeld::queries(q, tokens, one));
    alike.prompt(b.heads(l, 0), kvmeld::queries(q, tokens, one));
  }
  own.end_prompt(0), alike.end_prompt(0);
  std::vector<float> out(group * dim), same(out);
  for (index_t step = 0; step < 10 && kvmeld::declared(p).supports_decode(); ++step) {
    const auto q = normal(group * dim), k = normal(dim), v = normal(dim);
    own.step(a.heads(step % 2, 0), {q, k, v}, out);
    alike.step(b.heads(step % 2, 0), {q, k, v}, same);
    CHECK(out == same);
  }
  for (const index_t h : {0, 1}) {
    CHECK((same_head(a.head(h), b.head(h)) && same_state(own.state(h), alike.state(h))));
  }
}

TEST_CASE("heads of the same tokens: a layer's only head keeps what it keeps by itself") {
  check_only_head(kvmeld::h2o{});
  check_only_head(kvmeld::snapkv{.window = 8});
  check_only_head(kvmeld::kvzip{});
}

TEST_CASE("heads of the same tokens: what cannot be is refused, and changes nothing", "[errors]") {
  using Catch::Contains;
  model_cache kv(64);
  const auto refused = [&](const auto& p, const std::string& name) {
    CHECK_THROWS_WITH(kvmeld::compressor(kv, p, budget::same_tokens(slots)),
                      Contains(name + ": expected a policy that evicts by a score alone"));
  };
  refused(kvmeld::fold{}, "fold");
  refused(kvmeld::roco{}, "roco");
  const std::vector<kvmeld::h2o> each(static_cast<std::size_t>(kv.heads() / 2));
  const std::vector<budget> same = {budget::same_tokens(slots)};
  CHECK_THROWS_WITH(kvmeld::compressor(kv, each, same),
                    Contains("compressor: expected one policy for the same tokens, got"));
  kvmeld::compressor meld(kv, kvmeld::h2o{}, budget::same_tokens(32));
  read(meld, kv, prompt_rows(50), 0, 50), meld.end_prompt(0);
  const model_cache before = kv;
  const one_row x;
  std::vector<float> out(kv_heads_of * group * dim);
  const auto half = [](const std::vector<float>& all) {
    return std::span(all).first(all.size() / 2);
  };
  CHECK_THROWS_WITH(meld.step(kvmeld::head_range{1, 1}, {half(x.q), half(x.k), half(x.v)},
                              std::span(out).first(32)),
                    Contains("step: expected all heads of each layer"));
  CHECK_THROWS_WITH(meld.compress(kvmeld::head_range{1, 2}), Contains("compress: expected all"));
  for (index_t h = 0; h < kv.heads(); ++h) {
    CHECK(same_head(kv.head(h), model_cache(before).head(h)));
  }
  read(meld, kv, prompt_rows(20), 1, 20);
  kv.head(2).push(x.k.data(), x.v.data());
  CHECK_THROWS_WITH(meld.end_prompt(1),
                    Contains("end_prompt: expected as many tokens in every head"));
}

TEST_CASE("heads of the same tokens: a windowed head stands in for none of a layer", "[errors]") {
  std::vector<kvmeld::attention_spec> specs(2, {.kv_heads = 2, .key_dim = dim});
  specs[0].window = 4;
  kvmeld::cache kv(specs, {.layers = 2, .capacity = 16});
  kvmeld::compressor meld(kv, kvmeld::h2o{}, budget::same_tokens(8));
  const std::vector<index_t> mixed = {2, 0};
  CHECK_THROWS_WITH(meld.compress(mixed), Catch::Contains("compress: expected all heads of each"));
  CHECK_NOTHROW(meld.compress(kvmeld::head_range{0, 4}));
}

}  // namespace same_tokens_test
