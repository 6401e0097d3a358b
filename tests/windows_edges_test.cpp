// SPDX-License-Identifier: MIT
// Windows in attention and scores by hand, in an engine with its own attention, and where a head
// has no slots beyond its window.
#include <catch2/catch.hpp>

#include "kvmeld/peers.hpp"
#include "support/all_heads.hpp"
#include "support/windowed.hpp"

namespace windows_edges_test {

using namespace windowed;
using kvmeld::budget;
using kvmeld::compressor;

/// All tokens of layer 0 of a stream, uncompressed.
kvmeld::cache whole(const stream& x, const attention_spec& spec, index_t count) {
  kvmeld::cache kv(spec, {.capacity = capacity});
  kv.append(kv.heads(0, 0), x.part(x.k, 0, 0, count), x.part(x.v, 0, 0, count), count);
  return kv;
}

/// Attention of every query over a head's slots, in double: `[queries, group, slots]`, by the
/// attention of values that name their slot.
std::vector<std::vector<double>> rows_of(const stream& x, const attention_spec& spec, index_t h) {
  std::vector<std::vector<double>> all;
  for (index_t t = 0; t < tokens; ++t) {
    for (index_t g = 0; g < group; ++g) {
      std::vector<double> p(tokens);
      for (index_t first = 0; first < tokens; first += dim) {
        stream named = x;
        std::ranges::fill(named.v[0], 0.0F);
        for (index_t i = 0; i < dim && first + i < tokens; ++i) {
          named.v[0][kvmeld::as_size(((first + i) * kv_heads + h) * dim + i)] = 1;
        }
        const auto out = named.attention(spec, 0, t);
        for (index_t i = 0; i < dim && first + i < tokens; ++i) {
          p[kvmeld::as_size(first + i)] = out[kvmeld::as_size((h * group + g) * dim + i)];
        }
      }
      all.push_back(p);
    }
  }
  return all;
}

TEST_CASE("attention sees no slot that has left its window", "[window]") {
  const stream x;
  for (const index_t own : {index_t{1}, window, tokens, index_t{1} << 30}) {
    for (const index_t count : {index_t{1}, window, window + 1, tokens}) {
      CAPTURE(own, count);
      auto kv = whole(x, layer(own), count);
      std::vector<float> out(kv_heads * group * dim), p(kvmeld::as_size(group, count));
      for (index_t h = 0; h < kv_heads; ++h) {
        const std::ptrdiff_t row = group * dim;
        kvmeld::attend(kv.head(h), x.part(x.q, 0, count - 1, 1).data() + h * row,
                       out.data() + h * row, p);
        for (index_t s = 0; s < count; ++s) {
          CHECK((p[kvmeld::as_size(s)] > 1e-30F) == (s > count - 1 - own));
        }
      }
      CHECK(apart(out, x.attention(layer(own), 0, count - 1)) < 1e-5);
    }
  }
}

TEST_CASE("a prompt's scores are of the slots in each query's window", "[window]") {
  const stream x;
  auto kv = whole(x, layer(window), tokens);
  const auto q = x.part(x.q, 0, 0, tokens);
  const auto prompt = kvmeld::prompt_queries(q.data(), tokens, kv_heads, group, dim);
  for (index_t h = 0; h < kv_heads; ++h) {
    const auto expected = rows_of(x, layer(window), h);
    std::vector<float> total(tokens), largest(tokens);
    kvmeld::column_scores(kv.head(h), prompt.of(h), {}, {.total = total, .largest = largest});
    std::vector<double> sums(tokens), most(tokens);
    index_t low = 0;  // queries that give slot 0 less than the fair share of what they see
    for (std::size_t r = 0; r < expected.size(); ++r) {
      for (std::size_t s = 0; s < tokens; ++s) {
        sums[s] += expected[r][s], most[s] = std::max(most[s], expected[r][s]);
      }
      const auto t = static_cast<index_t>(r) / group;
      if (r % group == 0 && t < window) {
        low += (expected[r][0] + expected[r + 1][0]) / group < 1.0 / (t + 1) ? 1 : 0;
      }
    }
    CHECK(apart(total, sums) < 1e-5);
    CHECK(apart(largest, most) < 1e-5);
    const auto measured = [&](const kvmeld::any_policy_or_peer& p) {
      auto state = kvmeld::make_head_state(p, kv.head(h));
      kvmeld::observe(p, kv.head(h), state, prompt.of(h));
      return state;
    };
    // Slot 0 is in the window of the first queries alone: the others count neither for nor against.
    CHECK(measured(kvmeld::roco{}).column(kvmeld::roco::queries_seen)[0] == float{window});
    CHECK(measured(kvmeld::scissorhands{}).column(kvmeld::scissorhands::past)[0] ==
          static_cast<float>(low));
  }
}

TEST_CASE("an engine with its own attention has its windows cut by compress", "[window]") {
  const stream x;
  kvmeld::cache kv(model(), {.layers = layers, .capacity = capacity});
  compressor meld(kv, kvmeld::h2o{}, budget{.slots = 40});
  read(kv, meld, x, tokens, false);
  for (index_t t = tokens; t < tokens + steps; ++t) {
    for (index_t l = 0; l < layers; ++l) {
      const auto heads = kv.heads(l, 0);
      kv.append(heads, x.part(x.k, l, t, 1), x.part(x.v, l, t, 1), 1);
      const index_t n = kv.head(heads[0]).length();
      std::vector<float> out(kv_heads * group * dim), p(kvmeld::as_size(kv_heads * group, n));
      for (index_t h = 0; h < kv_heads; ++h) {
        const std::ptrdiff_t row = group * dim;
        kvmeld::attend(
            kv.head(heads[h]), x.part(x.q, l, t, 1).data() + h * row, out.data() + h * row,
            std::span(p).subspan(kvmeld::as_size(h * group, n), kvmeld::as_size(group, n)));
      }
      meld.observe(heads, {.probabilities = p});
      meld.compress(heads);
      if (is_cut(l)) {
        CHECK(apart(out, x.attention(layer(window), l, t)) < 1e-5);
        expect_newest(kv.head(heads[0]), window);
      }
    }
  }
}

TEST_CASE("a layer with a window asks neither its policy nor its budget", "[window][policy]") {
  auto specs = model();
  specs[0].alibi_slopes = {0.5F, 0.25F, 0.5F, 0.25F};
  kvmeld::cache kv(specs, {.layers = layers, .capacity = capacity});
  std::vector<budget> budgets(layers * kv_heads, {.slots = 40});
  for (index_t h = 0; h < layers * kv_heads; ++h) {
    budgets[kvmeld::as_size(h)] = is_cut(h / kv_heads) ? budget{} : budget{.slots = 48};
  }
  const std::vector<kvmeld::any_policy_or_peer> policies(budgets.size(), kvmeld::fold{});
  compressor meld(kv, std::span<const kvmeld::any_policy_or_peer>(policies),
                  std::span<const budget>(budgets));
  CHECK(meld.state(0).policy() == "window");
  CHECK(meld.limit(0).slots == window);
  specs[1].alibi_slopes = specs[0].alibi_slopes;
  kvmeld::cache sloped(specs, {.layers = layers, .capacity = capacity});
  try {
    compressor refused(sloped, kvmeld::fold{}, budget{.slots = 48});
    FAIL("not refused");
  } catch (const kvmeld::error& e) {
    CHECK(e.code() == kvmeld::errc::unsupported);
    CHECK_THAT(e.what(), Catch::Contains("compressor: fold: expected attention without alibi_slopes"
                                         " (it merges slots), got some"));
  }
}

TEST_CASE("a head of no more slots than its window holds all of its tokens", "[window][errors]") {
  const stream x;
  for (const index_t slots : {window, window + 1}) {
    CAPTURE(slots);
    kvmeld::cache kv(layer(window), {.capacity = slots});
    compressor meld(kv, kvmeld::full_cache{}, budget{.slots = 1});
    std::vector<float> out(kv_heads * group * dim);
    const auto step = [&](index_t t) { meld.step(kv.heads(0, 0), x.token(0, t), out); };
    for (index_t t = 0; t < window; ++t) {
      step(t);
    }
    if (slots > window) {
      CHECK_NOTHROW(step(window));
      CHECK_THROWS_WITH(kv.shrink(meld, window), Catch::Contains("at least 13 slots"));
      continue;
    }
    CHECK_THROWS_WITH(step(window), Catch::Contains("window: expected a free slot for the token"));
    meld.clear(0);
    step(0);
    CHECK_NOTHROW(kv.shrink(meld, 3));
    step(1), step(2);
    CHECK(apart(out, x.attention(layer(window), 0, 2)) < 1e-5);
  }
}

}  // namespace windows_edges_test
