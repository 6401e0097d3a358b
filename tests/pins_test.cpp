// SPDX-License-Identifier: MIT
// Tokens that are pinned: no policy evicts or merges them.
#include <algorithm>  // std::ranges::find
#include <catch2/catch.hpp>
#include <map>
#include <sstream>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "support/model.hpp"
#include "support/policies.hpp"

namespace pins_test {

using namespace small_model;
using Catch::Contains;
using kvmeld::as_size;
using kvmeld::budget;

constexpr index_t tokens = 90, slots = 56, capacity = 100;

/// Spans of tokens: a system prompt, tools, the question.
const std::vector<std::pair<index_t, index_t>> spans = {{0, 4}, {30, 7}, {tokens - 3, 3}};
constexpr index_t pinned = 14;
bool is_pinned(index_t position) {
  return std::ranges::any_of(
      spans, [&](const auto& s) { return position >= s.first && position < s.first + s.second; });
}

std::vector<index_t> heads_of(index_t request) {
  std::vector<index_t> all;
  for (index_t l = 0; l < layers_of; ++l) {
    for (index_t h = 0; h < kv_heads_of; ++h) {
      all.push_back((l * requests_of + request) * kv_heads_of + h);
    }
  }
  return all;
}

/// The bits of the rows of a head's pinned tokens, by position.
std::map<index_t, std::vector<float>> pinned_rows(const kvmeld::head_ref& head) {
  std::map<index_t, std::vector<float>> rows;
  for (index_t s = 0; s < head.length(); ++s) {
    if (is_pinned(head.position(s))) {
      std::vector<float>& row = rows[head.position(s)];
      CHECK(row.empty());  // one slot for each
      for (index_t i = 0; i < dim; ++i) {
        row.push_back(head.key(s)[i]), row.push_back(head.value(s)[i]);
      }
      row.push_back(head.log_mass(s));
    }
  }
  return rows;
}

/// A token of every layer.
template <class Meld, class Cache>
void step(Meld& meld, Cache& kv, index_t request) {
  std::vector<float> out(kv_heads_of * group * dim);
  for (index_t l = 0; l < layers_of; ++l) {
    const auto q = normal(kv_heads_of * group * dim), k = normal(kv_heads_of * dim),
               v = normal(kv_heads_of * dim);
    meld.step(kv.heads(l, request), {q, k, v}, out);
  }
}

TEST_CASE("pins: no policy evicts or merges a pinned token, whose bits stay, within the budget",
          "[compressor]") {
  int laws = 0;
  for (const fixtures::example& e : fixtures::every_policy()) {
    if (!kvmeld::declared(e.policy).evicts()) {
      continue;
    }
    for (const budget& limit :
         {budget{.slots = slots}, budget{.slots = slots, .trigger = slots + 7},
          budget::shared(slots), budget::same_tokens(slots, 5)}) {
      const bool decodes = kvmeld::declared(e.policy).supports_decode();
      if (!decodes && (limit.trigger > 0 || limit.slack > 0)) {
        continue;  // refused
      }
      if (limit.is_shared) {
        try {
          (void)kvmeld::for_shared(e.policy, limit.slots, limit.slack, limit.alike);
        } catch (const kvmeld::error&) {
          continue;
        }
      }
      for (const index_t chunk : {tokens, 40}) {
        CAPTURE(e.name, limit.trigger, limit.is_shared, limit.alike, chunk);
        model_cache kv(capacity);
        kvmeld::compressor meld(kv, e.policy, limit);
        const prompt_rows x(tokens);
        if (!kvmeld::declared(e.policy).supports().seals) {
          CHECK_THROWS_WITH(meld.pin(0, 0, 4), Contains("pin: ") && Contains(" expected a policy"));
          continue;
        }
        for (const auto& [first, count] : spans) {
          meld.pin(0, first, count);
        }
        std::map<index_t, std::map<index_t, std::vector<float>>> rows;
        for (index_t first = 0; first < tokens; first += chunk) {
          const index_t last = std::min(first + chunk, tokens);
          for (index_t l = 0; l < layers_of; ++l) {
            x.append(kv, l, 0, first, last);
            meld.prompt(kv.heads(l, 0),
                        kvmeld::queries(x.queries(l, first, last), last - first, layer_spec));
          }
          for (const index_t h : heads_of(0)) {
            rows[h] = pinned_rows(kv.head(h));
          }
          meld.end_prompt(0);
        }
        const auto check = [&] {
          index_t held = 0;
          for (const index_t h : heads_of(0)) {
            held += kv.head(h).length();
            CHECK(meld.pinned(h) == pinned);
            CHECK(pinned_rows(kv.head(h)) == rows[h]);
            if (!limit.is_shared) {
              CHECK(kv.head(h).length() < slots + std::max(1, limit.trigger - slots));
            }
          }
          CHECK(held <= 4 * (slots + limit.slack + std::max(0, limit.trigger - slots)));
          ++laws;
        };
        check();
        for (int i = 0; i < 30 && decodes; ++i) {
          step(meld, kv, 0);
          check();
        }
      }
    }
  }
  CHECK(laws > 3000);
}

TEST_CASE("pins: tokens that come by steps, a copy, a saved request, a clear") {
  model_cache kv(capacity);
  kvmeld::compressor meld(kv, kvmeld::h2o{}, budget{.slots = slots});
  const prompt_rows x(tokens);
  read(meld, kv, x, 0, tokens);
  meld.pin(0, 30, 7), meld.pin(0, 32, 2), meld.pin(0, tokens + 5, 2);
  meld.end_prompt(0);
  std::ostringstream early;
  CHECK_THROWS_WITH(meld.save(early, 0), Contains("save: expected all pinned tokens"));
  for (int i = 0; i < 40; ++i) {
    step(meld, kv, 0);
  }
  const auto holds = [](auto& cache, index_t h, index_t position) {
    const auto head = cache.head(h);
    bool found = false;
    for (index_t s = 0; s < head.length(); ++s) {
      found = found || head.position(s) == position;
    }
    return found;
  };
  for (const index_t h : heads_of(0)) {
    CHECK(meld.pinned(h) == 9);
    CHECK((holds(kv, h, 33) && holds(kv, h, tokens + 5) && holds(kv, h, tokens + 6)));
  }
  meld.copy(0, 1);
  std::stringstream file;
  meld.save(file, 0);
  model_cache other(capacity);
  kvmeld::compressor loaded(other, kvmeld::h2o{}, budget{.slots = slots});
  loaded.load(file, 1);
  kvmeld::cache wide(layer_spec,
                     {.layers = layers_of, .requests = requests_of, .capacity = capacity + 20});
  kvmeld::compressor moved(wide, kvmeld::h2o{}, budget{.slots = slots});
  moved.copy(meld, 0, 1);
  std::vector<float> a(kv_heads_of * group * dim), b(a), c(a);
  for (int i = 0; i < 20; ++i) {
    for (index_t l = 0; l < layers_of; ++l) {
      const auto q = normal(kv_heads_of * group * dim), k = normal(kv_heads_of * dim);
      meld.step(kv.heads(l, 1), {q, k, k}, a);
      loaded.step(other.heads(l, 1), {q, k, k}, b);
      moved.step(wide.heads(l, 1), {q, k, k}, c);
      CHECK((a == b && a == c));
    }
  }
  for (const index_t h : heads_of(1)) {
    CHECK((meld.pinned(h) == 9 && holds(kv, h, 33)));
    CHECK((same_head(kv.head(h), other.head(h)) && same_head(kv.head(h), wide.head(h))));
  }
  CHECK_THROWS_WITH(loaded.pin(1, 200, slots), Contains("pin: expected at most"));
  meld.clear(0);
  for (const index_t h : heads_of(0)) {
    CHECK(meld.pinned(h) == 0);
  }
  read(meld, kv, x, 0, tokens), meld.end_prompt(0);
  CHECK(meld.pinned(0) == 0);
}

TEST_CASE("pins: tokens that have come, of heads that have evicted nothing yet") {
  model_cache kv(capacity);
  kvmeld::compressor meld(kv, kvmeld::tova{}, budget{.slots = slots});
  read(meld, kv, prompt_rows(50), 0, 50), meld.end_prompt(0);
  step(meld, kv, 0);
  meld.pin(0, 20, 10), meld.pin(0, 50, 1);
  std::stringstream file;
  meld.save(file, 0);
  meld.load(file, 1);
  for (int i = 0; i < 40; ++i) {
    step(meld, kv, 0), step(meld, kv, 1);
  }
  for (index_t h = 0; h < kv.heads(); ++h) {
    CHECK((meld.pinned(h) == 11 && kv.head(h).length() == slots));
    for (index_t s = 0; s < 11; ++s) {
      CHECK(kv.head(h).position(s) == (s < 10 ? 20 + s : 50));
    }
  }
}

TEST_CASE("pins: a question of a later turn, after a seal, in pages") {
  constexpr index_t page = 4, pages = 40;
  std::vector<float> k(as_size(layers_of, pages) * page * kv_heads_of * dim), v(k);
  std::vector<index_t> table;
  for (index_t i = 0; i < pages; ++i) {
    table.push_back(pages - 1 - i);
  }
  kvmeld::paged_cache kv(layer_spec, {.layers = layers_of, .requests = 1, .capacity = page * pages},
                         kvmeld::rows(k, kvmeld::layout::pages_nhd),
                         kvmeld::rows(v, kvmeld::layout::pages_nhd),
                         {.pages = table, .slots = page});
  kvmeld::cache plain(layer_spec, {.layers = layers_of, .requests = 1, .capacity = page * pages});
  kvmeld::compressor meld(kv, kvmeld::fold{}, budget{.slots = slots}),
      of_plain(plain, kvmeld::fold{}, budget{.slots = slots});
  const auto both = [&](const auto& call) { call(kv, meld), call(plain, of_plain); };
  const auto turn = [&](index_t count) {
    const prompt_rows x(count);
    both([&](auto& cache, auto& by) {
      for (index_t l = 0; l < layers_of; ++l) {
        cache.append(cache.heads(l, 0), x.k[as_size(l)], x.v[as_size(l)], count);
        by.prompt(cache.heads(l, 0), kvmeld::queries(x.queries(l, 0, count), count, layer_spec));
      }
    });
  };
  const prompt_rows prefix(8);
  both([&](auto& cache, auto& by) {
    for (index_t l = 0; l < layers_of; ++l) {
      cache.append(cache.heads(l, 0), prefix.k[as_size(l)], prefix.v[as_size(l)], 8);
    }
    by.seal(0, 8);
  });
  turn(70), both([](auto&, auto& by) { by.end_prompt(0); });
  CHECK_THROWS_WITH(meld.pin(0, 40, 3), Contains("pin: expected tokens from 78 on"));
  both([](auto&, auto& by) { by.pin(0, 78, 5); });
  turn(30), both([](auto&, auto& by) { by.end_prompt(0); });
  for (int i = 0; i < 20; ++i) {
    const auto q = normal(kv_heads_of * group * dim), x = normal(kv_heads_of * dim);
    std::vector<float> a(q.size()), b(a);
    for (index_t l = 0; l < layers_of; ++l) {
      meld.step(kv.heads(l, 0), {q, x, x}, a), of_plain.step(plain.heads(l, 0), {q, x, x}, b);
      CHECK(a == b);
    }
  }
  for (index_t h = 0; h < kv.heads(); ++h) {
    CHECK((meld.sealed(h) == 8 && meld.pinned(h) == 5));
    CHECK(same_head(kv.head(h), plain.head(h)));
    for (index_t s = 0; s < 5; ++s) {
      CHECK(kv.head(h).position(8 + s) == 78 + s);
    }
  }
}

TEST_CASE("pins: what does not fit is refused, with nothing changed") {
  model_cache kv(capacity);
  kvmeld::compressor meld(kv, kvmeld::h2o{.sinks = 4}, budget{.slots = 32});
  CHECK_THROWS_WITH(meld.pin(2, 0, 1), Contains("pin: expected a request of 0 to 1, got 2"));
  CHECK_THROWS_WITH(meld.pin(0, -1, 1), Contains("pin: expected tokens from 0 on"));
  CHECK_THROWS_WITH(meld.pin(0, 1, -1), Contains("pin: expected tokens from 0 on"));
  meld.pin(0, 10, 20);
  CHECK_THROWS_WITH(meld.pin(0, 40, 10), Contains("pin: expected at most"));
  meld.pin(0, 12, 18);  // the same tokens
  const prompt_rows x(tokens);
  read(meld, kv, x, 0, tokens), meld.end_prompt(0);
  CHECK((meld.pinned(0) == 20 && kv.head(0).length() == 32));
  CHECK_THROWS_WITH(meld.pin(0, 40, 1), Contains("pin: expected tokens from 90 on"));
  CHECK_THROWS_WITH(meld.seal(0, 96), Contains("seal: expected 0 to 90 tokens"));
}

}  // namespace pins_test
