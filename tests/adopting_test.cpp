// SPDX-License-Identifier: MIT
// The code of docs/how-to/engine-integration.md: an engine with its own memory and attention, in
// four layouts.
#include <catch2/catch.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "kvmeld/memory/cache.hpp"
#include "kvmeld/merge/pages.hpp"
#include "kvmeld/policies/zsmerge.hpp"
#include "support/own_engine.hpp"

namespace adopting_test {

using namespace own_engine;

/// Slots of one sequence as llama.cpp's cells are: `[cell, head, dim]`.
std::vector<float> cells_engine(const text& x) {
  const int cells = 64;
  std::vector<float> keys(cells * heads * dim), values(keys), all;
  float *k = keys.data(), *v = values.data();
  std::copy_n(x.k.data(), tokens * heads * dim, k);
  std::copy_n(x.v.data(), tokens * heads * dim, v);

  // keys, values: the engine's own [cells, heads, dim], with a prompt of `tokens` tokens in it.
  kvmeld::strided_cache kv({.kv_heads = heads, .group = group, .key_dim = dim},
                           {.layers = 1, .requests = 1, .capacity = cells},
                           kvmeld::rows(keys, kvmeld::layout::nhd),
                           kvmeld::rows(values, kvmeld::layout::nhd));
  kv.commit(kv.heads(0, 0), tokens);
  const kvmeld::budget budget{.slots = 24, .trigger = 32};
  kvmeld::compressor meld(kv, kvmeld::h2o{.recent = 0.25F}, budget);
  meld.prompt(kv.heads(0, 0), kvmeld::queries(x.prompt(), tokens, kv.spec()));
  meld.end_prompt(0);

  for (int t = tokens; t < tokens + steps; ++t) {
    std::vector<float> probabilities;  // [heads, group, length]
    for (int h = 0; h < heads; ++h) {
      const auto head = kv.head(h);
      head.push(x.key(t, h), x.value(t, h));  // rotated to position head.next_position()
      // The engine's own attention over head.length() rows, whatever it is.
      const attention own(x.query(t, h), head.length(), &head.log_mass(0), [&](int s, int i) {
        return std::pair(k[(s * heads + h) * dim + i], v[(s * heads + h) * dim + i]);
      });
      all.insert(all.end(), own.out.begin(), own.out.end());
      probabilities.insert(probabilities.end(), own.probabilities.begin(), own.probabilities.end());
    }
    meld.observe(kv.heads(0, 0), {.probabilities = probabilities});
    meld.compress(kv.heads(0, 0));  // those at their trigger
  }
  return all;
}

/// `[head, token, dim]`, an attention that gives no probabilities, a policy that merges.
std::vector<float> head_token_dim_engine(const text& x) {
  const int capacity = 64;
  std::vector<float> keys(heads * capacity * dim), values(keys), all;
  float *k = keys.data(), *v = values.data();
  for (int h = 0; h < heads; ++h) {
    for (int t = 0; t < tokens; ++t) {
      std::copy_n(x.key(t, h), dim, k + (h * capacity + t) * dim);
      std::copy_n(x.value(t, h), dim, v + (h * capacity + t) * dim);
    }
  }

  kvmeld::strided_cache kv({.kv_heads = heads, .group = group, .key_dim = dim},
                           {.layers = 1, .requests = 1, .capacity = capacity},
                           kvmeld::rows(keys, kvmeld::layout::hnd),
                           kvmeld::rows(values, kvmeld::layout::hnd));
  kv.commit(kv.heads(0, 0), tokens);
  kvmeld::compressor meld(kv, kvmeld::zsmerge{.residual = 2}, kvmeld::budget{.slots = 24});
  meld.prompt(kv.heads(0, 0), kvmeld::queries(x.prompt(), tokens, kv.spec()));
  meld.end_prompt(0);

  std::vector<float> out(heads * group * dim);
  for (int t = tokens; t < tokens + steps; ++t) {  // all heads: append, attend, observe, compress
    meld.step(kv.heads(0, 0), x.token(t), out);
    all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

/// Blocks of slots in a pool, and a table of those that a sequence has.
std::vector<float> paged_engine(const text& x, std::vector<int>& pool) {
  const int slots = 4, pages = 16;
  std::vector<float> keys(40 * slots * heads * dim), values(keys), all;

  // keys, values: [page, slot, head, dim], a pool of pages; `pool` lists those that are free.
  std::vector<kvmeld::index_t> table(pages, kvmeld::page_table::no_page);
  kvmeld::paged_cache kv({.kv_heads = heads, .group = group, .key_dim = dim},
                         {.layers = 1, .requests = 1, .capacity = pages * slots},
                         kvmeld::rows(keys, kvmeld::layout::pages_nhd),
                         kvmeld::rows(values, kvmeld::layout::pages_nhd),
                         {.pages = table, .slots = slots});
  const auto next_page = [&](int length) {  // for slot `length`, if it begins one
    if (length % slots == 0 && table[static_cast<std::size_t>(length / slots)] < 0) {
      table[static_cast<std::size_t>(length / slots)] = pool.back(), pool.pop_back();
    }
  };
  const auto free_pages = [&] {
    for (const kvmeld::index_t& page : kv.free_pages(0)) {
      if (page >= 0) {
        pool.push_back(page);
        table[static_cast<std::size_t>(&page - table.data())] = kvmeld::page_table::no_page;
      }
    }
  };
  for (int t = 0; t < tokens; ++t) {
    next_page(t);
    for (int h = 0; h < heads; ++h) {
      kv.head(h).push(x.key(t, h), x.value(t, h));
    }
  }
  const kvmeld::budget budget{.slots = 24, .trigger = 32};  // whole pages
  kvmeld::compressor meld(kv, kvmeld::h2o{.recent = 0.25F}, budget);
  meld.prompt(kv.heads(0, 0), kvmeld::queries(x.prompt(), tokens, kv.spec()));
  meld.end_prompt(0);
  free_pages();

  std::vector<float> out(heads * group * dim);
  for (int t = tokens; t < tokens + steps; ++t) {
    next_page(kv.head(0).length());
    meld.step(kv.heads(0, 0), x.token(t), out);
    free_pages();
    all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

/// Values transposed, as llama.cpp keeps them without flash attention: `[head, dim, cell]`.
std::vector<float> transposed_engine(const text& x) {
  const int cells = 64;
  std::vector<float> keys(cells * heads * dim), values(keys), all;
  float *k = keys.data(), *v = values.data();

  // keys [cell, head, dim], values [head, dim, cell]: the engine writes a value as a column.
  kvmeld::strided_cache kv({.kv_heads = heads, .group = group, .key_dim = dim},
                           {.layers = 1, .requests = 1, .capacity = cells},
                           kvmeld::rows(keys, kvmeld::layout::nhd),
                           kvmeld::rows(values, kvmeld::layout::hdn));
  const auto write = [&](int cell, int h, int t) {
    std::copy_n(x.key(t, h), dim, k + (cell * heads + h) * dim);
    for (int i = 0; i < dim; ++i) {
      v[(h * dim + i) * cells + cell] = x.value(t, h)[i];
    }
    kv.commit(kvmeld::head_range{h, 1}, 1);
  };
  for (int t = 0; t < tokens; ++t) {
    for (int h = 0; h < heads; ++h) {
      write(t, h, t);
    }
  }
  const kvmeld::budget budget{.slots = 24, .trigger = 32};
  kvmeld::compressor meld(kv, kvmeld::h2o{.recent = 0.25F}, budget);
  meld.prompt(kv.heads(0, 0), kvmeld::queries(x.prompt(), tokens, kv.spec()));
  meld.end_prompt(0);

  for (int t = tokens; t < tokens + steps; ++t) {
    std::vector<float> probabilities;  // [heads, group, length]
    for (int h = 0; h < heads; ++h) {
      const auto head = kv.head(h);
      write(head.length(), h, t);
      const attention own(x.query(t, h), head.length(), &head.log_mass(0), [&](int s, int i) {
        return std::pair(k[(s * heads + h) * dim + i], v[(h * dim + i) * cells + s]);
      });
      all.insert(all.end(), own.out.begin(), own.out.end());
      probabilities.insert(probabilities.end(), own.probabilities.begin(), own.probabilities.end());
    }
    meld.observe(kv.heads(0, 0), {.probabilities = probabilities});
    meld.compress(kv.heads(0, 0));  // those at their trigger
  }
  return all;
}

TEST_CASE("an engine's own memory and attention, in four layouts", "[adopting]") {
  const text x;
  const kvmeld::h2o policy{.recent = 0.25F};
  const auto evicted = expected(x, policy, {.slots = 24, .trigger = 32});
  same(cells_engine(x), evicted);
  same(transposed_engine(x), evicted);
  same(head_token_dim_engine(x), expected(x, kvmeld::zsmerge{.residual = 2}, {.slots = 24}));
  std::vector<int> pool(40);
  std::iota(pool.begin(), pool.end(), 0);
  same(paged_engine(x, pool), evicted);
  CHECK((pool.size() >= 40 - 8 && pool.size() <= 40 - 6));  // 24 to 31 slots in pages of 4
}

TEST_CASE("a hybrid model's attention layers: full ones are compressed, windows are cut",
          "[adopting][window]") {
  const text x;
  enum class kind { full, sliding, linear };
  std::vector<kvmeld::attention_spec> specs;  // of the attention layers, which a cache has alone
  std::vector<int> place;                     // of a model's layer in the cache; −1: it has none
  for (const kind layer : {kind::linear, kind::sliding, kind::linear, kind::full}) {
    place.push_back(layer == kind::linear ? -1 : static_cast<int>(specs.size()));
    if (layer != kind::linear) {
      specs.push_back({.kv_heads = heads, .group = group, .key_dim = dim});
      specs.back().window = layer == kind::sliding ? 16 : 0;  // tokens, its own among them
    }
  }
  kvmeld::cache kv(specs, {.layers = static_cast<int>(specs.size()), .capacity = tokens + 1});
  kvmeld::compressor meld(kv, kvmeld::h2o{}, kvmeld::budget::shared(24));
  for (const int layer : place) {
    if (layer >= 0) {
      kv.append(kv.heads(layer, 0), std::span(x.k).first(tokens * heads * dim),
                std::span(x.v).first(tokens * heads * dim), tokens);
      meld.prompt(kv.heads(layer, 0), kvmeld::queries(x.prompt(), tokens, kv.spec(layer)));
    }
  }
  meld.end_prompt(0);
  std::vector<float> out(heads * group * dim);
  for (int t = tokens; t < tokens + steps; ++t) {
    for (int layer = 0; layer < kv.layers(); ++layer) {
      meld.step(kv.heads(layer, 0), x.token(t), out);
    }
  }
  CHECK(place == std::vector<int>{-1, 0, -1, 1});
  CHECK((kv.head(0).length() == 16 && kv.head(1).length() == 16));
  CHECK(kv.head(2).length() + kv.head(3).length() == 2 * 24);
}

TEST_CASE("chunks of a prompt, a second cache, and fixed pages", "[adopting]") {
  const text x;
  kvmeld::cache kv({.kv_heads = 1, .group = group, .key_dim = dim}, {.capacity = tokens});
  kvmeld::cache draft({.kv_heads = 1, .key_dim = 4}, {.capacity = tokens});
  const kvmeld::h2o policy{.recent = 0.25F};
  const auto head = kv.head(0);
  auto state = kvmeld::make_head_state(policy, head);
  const kvmeld::query_view<float> queries{x.q.data(), tokens, 0, dim, heads * group * dim};
  const int chunk = 16, fixed = 10, target = 20;

  for (int begin = 0; begin < tokens; begin += chunk) {
    const int count = std::min(chunk, tokens - begin);
    for (int t = begin; t < begin + count; ++t) {
      head.push(x.key(t, 0), x.value(t, 0));
      draft.head(0).push(x.key(t, 1), x.value(t, 1));
    }
    auto own = queries;  // this chunk's queries, behind those of the chunks before
    own.data += begin * queries.row, own.count = count, own.before = begin;
    kvmeld::observe(policy, head, state, own);
  }

  kvmeld::slot_scratch scratch;
  kvmeld::merge_plan plan, new_tokens;
  kvmeld::plan(policy, head, state, target, scratch, plan);
  kvmeld::append_only(plan, head, fixed, new_tokens);       // the first slots stay as they are
  kvmeld::apply(policy, new_tokens, head, state, scratch);  // the model's cache
  new_tokens.clear_corrections();                           // they are for its dim
  kvmeld::apply(new_tokens, draft.head(0));                 // the draft model's

  CHECK((head.length() >= target && head.length() < tokens));
  REQUIRE(draft.head(0).length() == head.length());
  for (int s = 0; s < head.length(); ++s) {
    CHECK((head.position(s) == s || s >= fixed));
    CHECK(draft.head(0).position(s) == head.position(s));
  }
}

TEST_CASE("tokens of a decode stream are admitted, and stay where they are", "[adopting]") {
  const text x;
  const int capacity = tokens + 1, target = 16, open = 8;
  kvmeld::cache kv({.kv_heads = heads, .group = group, .key_dim = dim}, {.capacity = capacity});
  const kvmeld::h2o policy{.recent = 0.25F};
  kvmeld::head_state state[heads] = {make_head_state(policy, kv.head(0)),
                                     make_head_state(policy, kv.head(1))};
  kvmeld::workspace work;
  kvmeld::merge_plan new_tokens;
  std::vector<float> out(group * dim);
  std::vector<int> fixed[heads];  // tokens that are decided, by slot
  for (int t = 0; t < tokens; ++t) {
    for (int h = 0; h < heads; ++h) {
      const auto head = kv.head(h);  // no budget is reached: append, attend, observe
      kvmeld::step(policy, head, state[h], work, x.query(t, h), x.key(t, h), x.value(t, h),
                   kvmeld::budget{.slots = capacity - 1}, out.data());
      kvmeld::plan(policy, head, state[h], target, work.scratch, work.plan);
      for (int s = static_cast<int>(fixed[h].size()); s < head.length() - open; ++s) {
        fixed[h].push_back(head.position(s));
      }
      kvmeld::append_only(work.plan, head, std::max(head.length() - open, 0), new_tokens);
      kvmeld::apply(policy, new_tokens, head, state[h], work.scratch);
    }
  }
  for (int h = 0; h < heads; ++h) {
    const auto head = kv.head(h);
    CHECK((head.length() >= target && head.length() < tokens));
    for (int s = 0; s < static_cast<int>(fixed[h].size()); ++s) {
      CHECK(head.position(s) == fixed[h][static_cast<std::size_t>(s)]);  // nothing took its place
    }
  }
}

}  // namespace adopting_test
