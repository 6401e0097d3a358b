// SPDX-License-Identifier: MIT
// Layers with a window are cut to it, exactly; the policy and its budget are the other layers'.
#include <catch2/catch.hpp>
#include <sstream>
#include <string>

#include "kvmeld/peers.hpp"
#include "support/windowed.hpp"

namespace windows_test {

using namespace windowed;
using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::budget;
using kvmeld::cache_options;
using kvmeld::compressor;

const cache_options size{.layers = layers, .requests = 2, .capacity = capacity};
constexpr std::ptrdiff_t row = kv_heads * group * dim;

/// The policies and budgets that the other layers have.
struct others {
  any_policy policy;
  budget limit;
};
std::vector<others> all_others() {
  return {{kvmeld::h2o{}, {.slots = 40}},
          {kvmeld::h2o{}, budget::shared(40)},
          {kvmeld::fold{}, {.slots = 48}},
          {kvmeld::fold{}, budget::shared(40)}};
}

/// LAW: the outputs of layers with a window are those of masked attention over the whole stream,
/// and their heads hold the newest tokens, whatever the chunks of the prompt.
void cut_exactly(auto& kv, const others& o, const stream& x, index_t chunk) {
  compressor meld(kv, o.policy, o.limit);
  read(kv, meld, x, chunk, o.limit.is_shared);
  for (index_t t = 0; t < steps; ++t) {
    for (index_t l = 0; l < layers; l += 2) {
      for (index_t h = 0; h < kv_heads; ++h) {
        expect_newest(kv.head(kv.heads(l, 0)[h]), window);
      }
    }
    const auto out = decode(kv, meld, x, t, t + 1);
    for (index_t l = 0; l < layers; l += 2) {
      CHECK(apart(std::span(out).subspan(kvmeld::as_size(l * row), row),
                  x.attention(layer(window), l, tokens + t)) < 1e-5);
    }
  }
}

TEST_CASE("a layer with a window is cut to it, whatever the chunks of its prompt", "[window]") {
  const stream x;
  for (const others& o : all_others()) {
    for (const index_t chunk : {tokens, index_t{7}, index_t{1}}) {
      CAPTURE(o.policy.name(), o.limit.is_shared, chunk);
      kvmeld::cache kv(model(), size);
      cut_exactly(kv, o, x, chunk);
    }
  }
}

TEST_CASE("a layer with a window is cut to it in an engine's rows and pages", "[window][paged]") {
  const stream x;
  const others o = all_others()[1];
  constexpr index_t slots = 4, pages = capacity / slots;
  std::vector<float> keys(layers * capacity * kv_heads * dim), values = keys;
  SECTION("rows") {
    kvmeld::strided_cache kv(model(), {.layers = layers, .requests = 1, .capacity = capacity},
                             kvmeld::rows(keys, kvmeld::layout::nhd),
                             kvmeld::rows(values, kvmeld::layout::hdn));
    cut_exactly(kv, o, x, 7);
  }
  SECTION("pages, of which a prompt gives back what left the window") {
    std::vector<index_t> table;
    for (index_t i = 0; i < layers * pages; ++i) {  // each layer has pages of its own
      table.push_back(i % pages);
    }
    kvmeld::paged_cache kv(model(), {.layers = layers, .requests = 1, .capacity = capacity},
                           kvmeld::rows(keys, kvmeld::layout::pages_nhd),
                           kvmeld::rows(values, kvmeld::layout::pages_nhd),
                           {.pages = table, .slots = slots});
    cut_exactly(kv, o, x, tokens);
    CHECK(kv.pages(kv.heads(0, 0)[0]) == window / slots);
    CHECK(kv.free_pages(kv.heads(2, 0)).size() == pages - window / slots);
    CHECK(kv.pages(kv.heads(1, 0)[0]) > window / slots);
  }
}

TEST_CASE("the other layers are compressed as if there were none with a window", "[window]") {
  const stream x;
  for (const others& o : all_others()) {
    CAPTURE(o.policy.name(), o.limit.is_shared);
    kvmeld::cache mixed(model(), size), full(layer(0), {.layers = 2, .capacity = capacity});
    compressor meld(mixed, o.policy, o.limit), alone(full, o.policy, o.limit);
    read(mixed, meld, x, tokens, o.limit.is_shared);
    read(full, alone, x, tokens, o.limit.is_shared, {1, 3});
    const auto out = decode(mixed, meld, x), theirs = decode(full, alone, x, 0, steps, {1, 3});
    for (index_t i = 0; i < 2; ++i) {
      for (index_t h = 0; h < kv_heads; ++h) {
        CHECK(mixed.head(mixed.heads(1 + 2 * i, 0)[h]).length() ==
              full.head(full.heads(i, 0)[h]).length());
      }
      for (index_t t = 0; t < steps; ++t) {
        const auto a = out.begin() + (t * layers + 1 + 2 * i) * row,
                   b = theirs.begin() + (t * 2 + i) * row;
        CHECK(std::equal(a, a + row, b));
      }
    }
  }
}

TEST_CASE("drafts of layers with a window count as so many steps, to the bit", "[window]") {
  const stream x;
  kvmeld::cache kv(model(), size), twin(model(), size);
  const others o = all_others()[0];
  compressor meld(kv, o.policy, o.limit), plain(twin, o.policy, o.limit);
  read(kv, meld, x, 7, false), read(twin, plain, x, 7, false);
  constexpr index_t drafted = 20;  // more than the window holds
  std::vector<float> out(drafted * row);
  for (index_t l = 0; l < layers; ++l) {
    meld.draft(kv.heads(l, 0), x.token(l, tokens, drafted), out, drafted);
    for (index_t t = 0; is_cut(l) && t < drafted; ++t) {
      CHECK(apart(std::span(out).subspan(kvmeld::as_size(t * row), row),
                  x.attention(layer(window), l, tokens + t)) < 1e-5);
    }
  }
  meld.accept(0, 13);
  decode(twin, plain, x, 0, 13);
  std::ostringstream a, b;
  meld.save(a, 0), plain.save(b, 0);
  CHECK(a.str() == b.str());
  CHECK(decode(kv, meld, x, 13) == decode(twin, plain, x, 13));
}

TEST_CASE("a request with windows is saved, copied, emptied and shrunk", "[window]") {
  const stream x;
  const others o = all_others()[1];
  kvmeld::cache kv(model(), size);
  compressor meld(kv, o.policy, o.limit);
  read(kv, meld, x, tokens, true);
  std::stringstream file;
  meld.save(file, 0);
  meld.copy(0, 1);
  const auto expected = decode(kv, meld, x);
  CHECK(decode(kv, meld, x, 0, steps, {0, 1, 2, 3}, 1) == expected);
  {
    kvmeld::cache other(model(), size), narrow(model(window - 1), size);
    compressor goes_on(other, o.policy, o.limit), refuses(narrow, o.policy, o.limit);
    CHECK_THROWS_WITH(refuses.load(file, 0),
                      Catch::Contains("a window of 11 tokens without a trigger, got 12"));
    file.seekg(0);
    goes_on.load(file, 0);
    CHECK(decode(other, goes_on, x) == expected);
  }
  meld.clear(0), meld.clear(1);
  read(kv, meld, x, tokens, true);
  CHECK_THROWS_WITH(kv.shrink(meld, window), Catch::Contains("a capacity of at least"));
  index_t most = 0;
  for (index_t h = 0; h < kv.heads(); ++h) {
    most = std::max(most, meld.limit(h).trigger_length());
  }
  kv.shrink(meld, std::max(most, index_t{41}));
  CHECK(decode(kv, meld, x) == expected);
}

}  // namespace windows_test
