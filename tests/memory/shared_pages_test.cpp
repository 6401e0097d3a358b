// SPDX-License-Identifier: MIT
// Pages that the tables of several requests list, as those of a common prefix: no call changes
// another request's rows.
#include <catch2/catch.hpp>
#include <functional>
#include <numeric>
#include <sstream>

#include "kvmeld/peers.hpp"
#include "support/fixtures.hpp"

namespace shared_pages_test {

using fixtures::normal;
using kvmeld::budget;
using kvmeld::index_t;

constexpr index_t requests = 3, kv_heads = 2, dim = 4, slots = 4, pages = 8, pool = 40;
const kvmeld::attention_spec spec{.kv_heads = kv_heads, .key_dim = dim};

/// Three requests of an engine whose first two have a prefix of two pages in common, and ten tokens
/// each. The pages of request `r` are 10 · r to 10 · r + 7, but for the prefix.
struct engine {
  std::vector<float> keys = normal(pool * slots * kv_heads * dim), values = keys;
  std::vector<index_t> table = std::vector<index_t>(requests * pages);
  kvmeld::paged_cache kv;
  kvmeld::compressor<kvmeld::any_policy_or_peer> meld;
  std::vector<float> out = std::vector<float>(kv_heads * dim);

  explicit engine(const budget& b,
                  const kvmeld::any_policy_or_peer& policy = kvmeld::tova{.sinks = 1})
      : kv(spec, {.requests = requests, .capacity = slots * pages},
           kvmeld::rows(keys, kvmeld::layout::pages_nhd),
           kvmeld::rows(values, kvmeld::layout::pages_nhd), {.pages = table, .slots = slots}),
        meld(kv, policy, b) {
    for (index_t r = 0; r < requests; ++r) {
      std::iota(table.begin() + r * pages, table.begin() + (r + 1) * pages, 10 * r);
    }
    entry(1, 0) = entry(0, 0), entry(1, 1) = entry(0, 1);
    append(0, 10);
    kv.commit(kv.heads(0, 1), 8);
    append(1, 2);
  }
  index_t& entry(index_t r, index_t i) { return table[static_cast<std::size_t>(r * pages + i)]; }
  void append(index_t r, index_t n) {
    kv.append(kv.heads(0, r), normal(n * kv_heads * dim), normal(n * kv_heads * dim), n);
  }
  void step(index_t r) {
    const auto x = normal(kv_heads * dim);
    meld.step(kv.heads(0, r), {x, x, x}, out);
  }
  void prompt(index_t r) {
    const auto q = normal(10 * kv_heads * dim);
    meld.prompt(kv.heads(0, r), kvmeld::queries(q, 10, spec));
  }
  std::vector<float> rows(index_t r) {
    std::vector<float> all;
    for (index_t h = 0; h < kv_heads; ++h) {
      const auto bytes = fixtures::bytes_of(kv.head(r * kv_heads + h));
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }
  /// As an engine that copies before it writes: request `r` gets pages of its own.
  void own_pages(index_t r) {
    const std::ptrdiff_t page = slots * kv_heads * dim;
    for (index_t i = 0; i < 2; ++i) {
      const index_t to = 30 + 2 * r + i;
      std::copy_n(keys.begin() + entry(r, i) * page, page, keys.begin() + to * page);
      std::copy_n(values.begin() + entry(r, i) * page, page, values.begin() + to * page);
      entry(r, i) = to;
    }
  }
  /// LAW: refused for page `page`, with no memory changed; and carried out on pages of its own,
  /// with nothing changed of the others.
  void refuses(index_t r, index_t page, const std::function<void()>& call) {
    const auto k = keys, v = values;
    const auto lengths = [&] {
      std::vector<index_t> all;
      for (index_t h = 0; h < kv.heads(); ++h) {
        all.push_back(kv.head(h).length()), all.push_back(meld.state(h).length());
      }
      return all;
    };
    const auto before = lengths();
    CHECK_THROWS_WITH(call(), Catch::Contains("expected pages that no other table has in use") &&
                                  Catch::Contains("got page " + std::to_string(page)));
    CHECK((keys == k && values == v && lengths() == before));
    std::vector<std::vector<float>> others;
    for (index_t other = 0; other < requests; ++other) {
      others.push_back(rows(other));
    }
    own_pages(r);
    CHECK(rows(r) == others[static_cast<std::size_t>(r)]);
    CHECK_NOTHROW(call());
    for (index_t other = 0; other < requests; ++other) {
      CHECK((other == r || rows(other) == others[static_cast<std::size_t>(other)]));
    }
  }
};

TEST_CASE("a head is not changed in pages that another request's table has", "[paged][errors]") {
  const index_t r = GENERATE(0, 1);
  SECTION("by a step at its trigger, though by those before") {
    engine e({.slots = 11});
    e.step(r);
    CHECK(e.kv.head(r * kv_heads).length() == 11);
    e.refuses(r, 0, [&] { e.step(r); });
    CHECK(e.kv.head(r * kv_heads).length() == 11);
  }
  SECTION("by a prompt's end") {
    engine e({.slots = 8});
    e.prompt(r);
    e.refuses(r, 0, [&] { e.meld.end_prompt(r); });
    CHECK(e.kv.head(r * kv_heads).length() == 8);
    e.prompt(1 - r);
    CHECK_NOTHROW(e.meld.end_prompt(1 - r));  // no other table has them any more
  }
  SECTION("by compress") {
    engine e({.slots = 8});
    e.prompt(r);
    e.refuses(r, 0, [&] { e.meld.compress(e.kv.heads(0, r)); });
  }
  SECTION("by drafted tokens that are accepted") {
    engine e({.slots = 11});
    e.prompt(r), e.meld.end_prompt(r);
    const auto x = normal(2 * kv_heads * dim);
    std::vector<float> out(x.size());
    e.meld.draft(e.kv.heads(0, r), {x, x, x}, out, 2);
    e.refuses(r, 0, [&] { e.meld.accept(r, 2); });
  }
  SECTION("by what is loaded into it") {
    engine e({.slots = 20});
    e.append(2, 10);
    std::stringstream file;
    e.meld.save(file, 2);
    e.refuses(r, 0, [&] {
      file.clear(), file.seekg(0);
      e.meld.load(file, r);
    });
    CHECK(e.rows(r) == e.rows(2));
  }
  SECTION("by another request's rows that are copied to it") {
    engine e({.slots = 20});
    e.append(2, 10);
    e.refuses(r, 0, [&] { e.meld.copy(2, r); });
    CHECK(e.rows(r) == e.rows(2));
  }
}

TEST_CASE("tokens are not appended to a page that another request's table has in use",
          "[paged][errors]") {
  engine e({.slots = 20});
  e.entry(0, 2) = e.entry(1, 2) = 2;  // the engine did not copy the page before it wrote
  const auto before = e.keys;
  e.step(0);  // request 1's is not known to be the same yet
  CHECK_THROWS_WITH(e.step(1), Catch::Contains("got page 2"));
  CHECK_THROWS_WITH(e.append(1, 1), Catch::Contains("append: ") && Catch::Contains("page 2"));
  e.entry(1, 2) = 12;
  CHECK_NOTHROW(e.append(1, 1));
}

TEST_CASE("pages may be shared by heads that nothing changes, and by copies", "[paged]") {
  engine e({.slots = 20});
  const auto first = e.rows(0);
  for (index_t i = 0; i < 2; ++i) {
    e.entry(2, i) = e.entry(0, i);
  }
  e.meld.copy(0, 2);  // the rows of the prefix stay where they are
  CHECK(e.rows(2) == first);
  for (index_t t = 0; t < 10; ++t) {
    for (index_t r = 0; r < requests; ++r) {
      e.step(r);
    }
  }
  CHECK_THROWS_WITH(e.step(0), Catch::Contains("got page 0"));
  e.meld.clear(1), e.meld.clear(2);
  const auto rest = e.rows(0);
  CHECK_NOTHROW(e.step(0));
  CHECK(e.rows(0) != rest);
}

TEST_CASE("pages that came free are another request's from then on", "[paged]") {
  engine e({.slots = 20});
  e.meld.clear(1);
  e.append(0, 22);  // the whole table
  e.prompt(0), e.meld.end_prompt(0);
  const auto free = e.kv.free_pages(e.kv.heads(0, 0));
  REQUIRE(free.size() == 3);
  std::ranges::copy(free, e.table.begin() + pages);
  CHECK_NOTHROW(e.step(1));
  CHECK_THROWS_WITH(e.step(0), Catch::Contains("got page 5"));  // listed still, for its next slot
  e.entry(0, 5) = 35, e.entry(0, 6) = e.entry(0, 7) = kvmeld::page_table::no_page;
  for (index_t t = 0; t < 11; ++t) {
    CHECK_NOTHROW(e.step(0));
    CHECK_NOTHROW(e.step(1));
  }
  CHECK((e.kv.head(0).length() == 20 && e.kv.head(kv_heads).length() == 12));
}

TEST_CASE("a table in another order is no other table", "[paged]") {
  engine e({.slots = 12});
  e.meld.clear(1);
  e.append(0, 10);
  fixtures::state states({e.meld.state(0), e.meld.state(1), e.meld.state(2), e.meld.state(3),
                          e.meld.state(4), e.meld.state(5)});
  kvmeld::merge_plan plan;
  plan.reset(20);
  for (const index_t s : {4, 5, 6, 7, 12, 13, 14, 15, 16, 17, 18, 19}) {
    plan.keep(s, 0);
  }
  keep_pages(e.kv, 0, plan, states);
  e.meld.set_state(0, states[0]), e.meld.set_state(1, states[1]);
  CHECK(std::vector<index_t>(e.table.begin(), e.table.begin() + 5) ==
        std::vector<index_t>{1, 3, 4, 0, 2});
  for (index_t t = 0; t < 12; ++t) {
    CHECK_NOTHROW(e.step(0));
  }
}

TEST_CASE("heads that have tables of their own share pages where rows are the same",
          "[paged][errors]") {
  // A pool of pages of one head each, and the same page in the tables of two heads of a request.
  std::vector<float> keys = normal(pool * slots * dim), values = keys;
  std::vector<index_t> table(kv_heads * pages);
  std::iota(table.begin(), table.end(), 0);
  table[pages] = 0;
  const auto make = [&](std::ptrdiff_t head_stride) {
    const kvmeld::strides how{.head = head_stride, .row = dim, .page = slots * dim};
    return kvmeld::paged_cache(spec, {.capacity = slots * pages}, kvmeld::rows(keys, how),
                               kvmeld::rows(values, how), {.pages = table, .slots = slots});
  };
  const auto run = [&](kvmeld::paged_cache kv) {
    kvmeld::compressor meld(kv, kvmeld::streaming_llm{.sinks = 1}, budget{.slots = 8});
    kv.commit(kv.heads(0, 0), 10);
    meld.end_prompt(0);
  };
  CHECK_THROWS_WITH(run(make(0)), Catch::Contains("got page 0 in a table of head 0"));
  CHECK_NOTHROW(run(make(24 * slots * dim)));  // page 0 of head 1 lies elsewhere
  table[pages] = 8;
  CHECK_NOTHROW(run(make(0)));
}

TEST_CASE("pages that no request has in use are another's to take", "[paged]") {
  engine e({.slots = 6});
  e.own_pages(1);
  (void)e.kv.free_pages(kv_heads);  // what request 1 lists now
  SECTION("after a prompt's compression has freed them") {
    e.prompt(0), e.meld.end_prompt(0);
    CHECK(e.kv.head(0).length() == 6);
    e.entry(2, 0) = 2;  // the third of request 0, which has two now
    CHECK_NOTHROW(e.append(2, 3));
  }
  SECTION("after an append that was refused for want of a page") {
    e.entry(2, 0) = 35, e.entry(2, 1) = kvmeld::page_table::no_page;
    CHECK_THROWS_WITH(e.append(2, slots + 1), Catch::Contains("page"));
    e.entry(2, 0) = 36, e.entry(0, 3) = 35;
    CHECK_NOTHROW(e.append(0, 4));
  }
  SECTION("of a head that is there") {
    CHECK_THROWS_WITH(e.kv.pages(-1), Catch::Contains("expected 0 to 5, got -1"));
    CHECK_THROWS_WITH(e.kv.free_pages(6), Catch::Contains("expected 0 to 5, got 6"));
  }
}

}  // namespace shared_pages_test
