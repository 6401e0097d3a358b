// SPDX-License-Identifier: MIT
// Caches in pages: everything a cache does, and pages that come free.
#include <algorithm>
#include <catch2/catch.hpp>
#include <sstream>
#include <vector>

#include "kvmeld/memory/cache.hpp"
#include "support/fixtures.hpp"

namespace paged_test {

using fixtures::cache_shape;
using fixtures::paged_view;
using kvmeld::index_t;
using kvmeld::merge_plan;

constexpr index_t heads = 2, dim = 6, slots = 4, pages = 8, pool = 23;
const cache_shape shape{.heads = heads, .group = 2, .dim = dim, .capacity = slots * pages};

/// An engine's pool of pages, and tables that take them in no order.
template <class Scalar>
struct engine {
  std::vector<Scalar> keys = fixtures::normal<Scalar>(pool * heads * slots * dim), values = keys;
  std::vector<index_t> tables = {5, 19, 2, 7, 11, 3, 22, 0, 17, 1, 8, 20, 14, 6, 9, 13};
  paged_view<Scalar> kv;

  engine(bool own_tables, bool slots_first)
      : kv(shape, layout(keys, slots_first), layout(values, slots_first),
           {.pages = tables.data(), .slots = slots, .head = own_tables ? pages : 0}) {}

  static fixtures::layout<Scalar> layout(std::vector<Scalar>& x, bool slots_first) {
    using named = fixtures::layout<Scalar>;
    return slots_first ? named::page_slot_head_dim(x.data(), slots, heads, dim)
                       : named::page_head_slot_dim(x.data(), slots, heads, dim);
  }
};

/// What each slot holds, with its number in the state's first column, in no order: a plan that is
/// carried out fills freed slots from the end, where pages leave the others in theirs.
template <class Head>
std::vector<std::vector<float>> slots_of(const Head& head, const kvmeld::head_state& state) {
  const std::vector<float> bytes = fixtures::bytes_of(head);
  std::vector<std::vector<float>> all;
  const std::ptrdiff_t one = std::ssize(bytes) / head.length();
  for (index_t s = 0; s < head.length(); ++s) {
    all.emplace_back(bytes.begin() + s * one, bytes.begin() + (s + 1) * one);
    all.back().push_back(state.column(0)[static_cast<std::size_t>(s)]);
  }
  std::ranges::sort(all);
  return all;
}

/// The plan that keeps the slots listed.
merge_plan keeping(index_t length, const std::vector<index_t>& kept) {
  merge_plan plan;
  plan.reset(length);
  for (const index_t s : kept) {
    plan.keep(s, 0.25F * static_cast<float>(s));
  }
  return plan;
}

std::vector<index_t> anchors(const merge_plan& plan) {
  std::vector<index_t> all;
  for (index_t r = 0; r < plan.rows(); ++r) {
    all.push_back(plan.anchor(r));
  }
  return all;
}

std::vector<index_t> list(std::span<const index_t> x) { return {x.begin(), x.end()}; }

TEMPLATE_TEST_CASE("a paged view does what a cache does", "[paged]", float, Eigen::half) {
  const bool own_tables = GENERATE(false, true), slots_first = GENERATE(false, true);
  engine<TestType> e(own_tables, slots_first);
  fixtures::cache<TestType> owning(shape);
  const kvmeld::h2o policy{.recent = 0.25F, .sinks = 1};
  auto a = fixtures::make_state(policy, e.kv), b = fixtures::make_state(policy, owning);
  for (index_t h = 0; h < heads; ++h) {
    const auto k = fixtures::normal<TestType>((20 + h) * dim);
    owning.append(h, k, k);
    e.kv.append(h, std::span<const TestType>(k), std::span<const TestType>(k));
  }
  const fixtures::queries queries(20, 2 * heads, dim);
  const auto view = kvmeld::prompt_queries(queries.data.data(), 20, heads, 2, dim);
  compress(policy, e.kv, a, view, kvmeld::budget{15});
  compress(policy, owning, b, view, kvmeld::budget{15});
  std::vector<float> out(heads * 2 * dim), expected(out);
  for (index_t t = 0; t < 40; ++t) {
    const auto q = fixtures::normal(heads * 2 * dim), k = fixtures::normal(heads * dim);
    const std::span<const float> query(q), row(k);
    step(policy, e.kv, a, {query, row, row}, kvmeld::budget{15, 20}, std::span(out));
    step(policy, owning, b, {query, row, row}, kvmeld::budget{15, 20}, std::span(expected));
    REQUIRE(out == expected);
  }
  for (index_t h = 0; h < heads; ++h) {
    CHECK(fixtures::bytes_of(e.kv.head(h)) == fixtures::bytes_of(owning.head(h)));
  }
}

TEST_CASE("rows lie where the table says", "[paged]") {
  engine<float> e(true, true);
  const auto k = fixtures::normal(9 * dim);
  e.kv.append(1, std::span<const float>(k), std::span<const float>(k));
  for (index_t s = 0; s < 9; ++s) {  // page, slot, head, dim; the second head's table
    const index_t page = std::vector<index_t>{17, 1, 8}[static_cast<std::size_t>(s / slots)];
    const float* row = e.keys.data() + ((page * slots + s % slots) * heads + 1) * dim;
    CHECK(std::equal(row, row + dim, k.begin() + s * dim));
  }
}

TEST_CASE("pages are free when no head that shares them has slots in them", "[paged]") {
  engine<float> shared(false, true), own(true, true);
  for (auto* e : {&shared, &own}) {
    e->kv.commit(0, 32), e->kv.commit(1, 17);
  }
  CHECK(shared.kv.free_pages(1).empty());
  CHECK(list(own.kv.free_pages(1)) == std::vector<index_t>{6, 9, 13});
  for (auto* e : {&shared, &own}) {
    apply(keeping(32, {0, 1, 2, 30, 31}), e->kv.head(0));
  }
  CHECK((shared.kv.pages(0) == 5 && own.kv.pages(0) == 2));
  CHECK(list(shared.kv.free_pages(0)) == std::vector<index_t>{3, 22, 0});
  CHECK(list(own.kv.free_pages(0)) == std::vector<index_t>{2, 7, 11, 3, 22, 0});
}

TEST_CASE("a plan rounded to whole pages keeps the pages in which it keeps most", "[paged]") {
  auto kv = fixtures::random_cache(18, dim, 1);  // pages of 4: 4 whole ones, and 2 slots
  merge_plan out;
  const auto rounded = [&](const std::vector<index_t>& kept) {
    whole_pages(keeping(18, kept), kv.head(0), slots, out);
    check(out);
    return anchors(out);
  };
  CHECK(rounded({0, 1, 5, 8, 9, 10, 17}) == std::vector<index_t>{8, 9, 10, 11, 16, 17});
  CHECK(rounded({0, 1, 5, 8, 9, 10, 11, 16, 17}) ==
        std::vector<index_t>{0, 1, 2, 3, 8, 9, 10, 11, 16, 17});
  CHECK(rounded({0, 4, 9, 13, 16}) ==  // one slot each: the later page
        std::vector<index_t>{12, 13, 14, 15, 16, 17});
  CHECK(rounded({3}) == std::vector<index_t>{16, 17});
  CHECK(rounded({}).empty());
  for (index_t r = 0; r < out.rows(); ++r) {
    CHECK(out.log_mass(r) == kv.head(0).log_mass(out.anchor(r)));
  }
}

TEST_CASE("whole pages leave by the table alone, and are reported", "[paged]") {
  const bool own_tables = GENERATE(false, true);
  engine<float> e(own_tables, false);
  fixtures::cache<float> owning(shape);
  const kvmeld::h2o policy{};
  auto a = fixtures::make_state(policy, e.kv), b = fixtures::make_state(policy, owning);
  for (index_t h = 0; h < heads; ++h) {
    const auto k = fixtures::normal(30 * dim);
    owning.append(h, k, k);
    e.kv.append(h, std::span<const float>(k), std::span<const float>(k));
    for (auto* state : {&a[h], &b[h]}) {
      state->extend(30);
      for (index_t s = 0; s < 30; ++s) {
        state->column(0)[static_cast<std::size_t>(s)] = static_cast<float>(100 * h + s);
      }
    }
  }
  for (index_t h = 0; h < heads; ++h) {
    for (index_t s = 0; s < 30; ++s) {
      e.kv.head(h).log_mass(s) = owning.head(h).log_mass(s) = static_cast<float>(50 * h + s);
    }
  }
  const auto memory = e.keys;
  merge_plan plan, own;
  const merge_plan wish = keeping(30, {0, 1, 9, 10, 11, 22, 23, 28, 29});
  whole_pages(wish, owning.head(0), slots, plan);
  REQUIRE(anchors(plan) == std::vector<index_t>{8, 9, 10, 11, 20, 21, 22, 23, 28, 29});
  const index_t last = own_tables ? 1 : 0;  // a shared table: all heads
  for (index_t h = 0; h <= last; ++h) {
    keep_pages(e.kv, h, plan, a);
  }
  for (index_t h = 0; h < heads; ++h) {
    whole_pages(wish, owning.head(h), slots, own);
    apply(own, owning.head(h), b[h]);
    CHECK(slots_of(e.kv.head(h), a[h]) == slots_of(owning.head(h), b[h]));
  }
  CHECK(e.keys == memory);
  CHECK(list(e.kv.free_pages(0)) == std::vector<index_t>{5, 19, 7, 11, 22});
  e.kv.append(0, std::span<const float>(memory).first(3 * dim),
              std::span<const float>(memory).first(3 * dim));  // into the first freed one
  CHECK(e.kv.head(0).length() == 13);
  CHECK(e.kv.head(0).key(12).data == e.keys.data() + 5 * heads * slots * dim);
}

TEST_CASE("what pages cannot hold is refused, and nothing changes", "[paged][errors]") {
  engine<float> e(true, true);
  e.kv.commit(0, 10);
  fixtures::state state = fixtures::make_state(kvmeld::h2o{}, e.kv);
  const auto tables = e.tables;
  const auto bytes = fixtures::bytes_of(e.kv.head(0));
  const auto refuses = [&](const std::string& message, const auto& call) {
    CHECK_THROWS_AS(call(), kvmeld::error);
    CHECK_THROWS_WITH(call(), Catch::Contains(message));
    CHECK((fixtures::bytes_of(e.kv.head(0)) == bytes && e.tables == tables));
  };
  const auto kept = [&](const std::string& message, const merge_plan& plan) {
    refuses(message, [&] { keep_pages(e.kv, 0, plan, state); });
  };
  kept("expected a plan of 10 slots, got 9", keeping(9, {}));
  kept("got slot 1 in row 0", keeping(10, {1, 2, 3}));
  kept("got slot 4 in row 2", keeping(10, {0, 1, 4, 5}));
  kept("got 2 rows", keeping(10, {0, 1}));
  merge_plan merging;
  merging.reset(10);
  merging.add({4}), merging.add({5}), merging.end_row(0);
  kept("got slot 4 in row 0", merging);
  merge_plan scaling;
  scaling.reset(10);
  scaling.add({0, 0.5F, 2}), scaling.end_row(0);
  kept("got slot 0 in row 0", scaling);
  merge_plan out;
  refuses("expected a plan that only evicts, got a merge or correction in row 0",
          [&] { whole_pages(merging, e.kv.head(0), slots, out); });
  refuses("expected pages of at least 1 slot, got 0",
          [&] { whole_pages(keeping(10, {}), e.kv.head(0), 0, out); });
  refuses("expected a plan of 10 slots, got 11",
          [&] { whole_pages(keeping(11, {}), e.kv.head(0), slots, out); });

  e.tables[3] = fixtures::page_table::no_page;
  e.kv.commit(0, 2);
  const std::vector<float> x(dim);
  CHECK_THROWS_WITH(e.kv.head(0).push(x.data(), x.data()),
                    Catch::Contains("expected a page for slot 12, got -1"));
  CHECK(e.kv.head(0).length() == 12);

  const auto view = [&](const cache_shape& s, float* data, fixtures::page_table table) {
    return paged_view<float>(s, {data, 1, 1, 1}, {data, 1, 1, 1}, table);
  };
  index_t table[8] = {};
  float y = 0;
  CHECK_THROWS_WITH(view(shape, nullptr, {table, 4}), Catch::Contains("got null"));
  CHECK_THROWS_WITH(view(shape, &y, {nullptr, 4}), Catch::Contains("got null"));
  CHECK_THROWS_WITH(view(shape, &y, {table, 0}), Catch::Contains("got 32 slots in pages of 0"));
  CHECK_THROWS_WITH(view(shape, &y, {table, 5}), Catch::Contains("got 32 slots in pages of 5"));
  CHECK_THROWS_WITH(view(shape, &y, {table, 4, 7}),
                    Catch::Contains("expected a stride of at least 8 pages, got 7"));
}

TEST_CASE("without a page nothing is written, by any call", "[paged][errors]") {
  const kvmeld::h2o policy{.sinks = 1};
  engine<float> e(true, true), fresh(true, true);
  for (index_t h = 0; h < heads; ++h) {
    const auto k = fixtures::normal(10 * dim);
    e.kv.append(h, std::span<const float>(k), std::span<const float>(k));
  }
  fixtures::state state = fixtures::make_state(policy, e.kv),
                  other = fixtures::make_state(policy, fresh.kv);
  std::stringstream saved;
  save(saved, policy, e.kv, state);
  const auto tables = fresh.tables;
  std::ranges::fill(fresh.tables, fixtures::page_table::no_page);
  CHECK_THROWS_WITH(load(saved, policy, fresh.kv, other),
                    Catch::Contains("expected a page for slot 0, got -1"));
  CHECK((fresh.kv.head(0).length() == 0 && fresh.kv.head(1).length() == 0));
  fresh.tables = tables;
  saved.clear(), saved.seekg(0);
  load(saved, policy, fresh.kv, other);
  CHECK(fixtures::bytes_of(fresh.kv.head(1)) == fixtures::bytes_of(e.kv.head(1)));

  e.tables[pages + 3] = fixtures::page_table::no_page;  // slots 12 to 15 of head 1
  const auto missing = Catch::Contains("expected a page for slot 12, got -1");
  const std::vector<float> x(3 * dim);
  const auto bytes = [&] {
    return std::pair(fixtures::bytes_of(e.kv.head(0)), fixtures::bytes_of(e.kv.head(1)));
  };
  auto before = bytes();
  CHECK_THROWS_WITH(e.kv.commit(1, 3), missing);
  CHECK_THROWS_WITH(e.kv.append(1, std::span<const float>(x), std::span<const float>(x)), missing);
  CHECK(bytes() == before);
  e.kv.commit(0, 2), e.kv.commit(1, 2);
  before = bytes();
  const std::vector<float> q(heads * 2 * dim), row(heads * dim);
  std::vector<float> out(q.size());
  kvmeld::compressor meld(e.kv, policy, kvmeld::budget{20});
  CHECK_THROWS_WITH(meld.step(e.kv.heads(0, 0), {q, row, row}, out), missing);
  CHECK(bytes() == before);
}

}  // namespace paged_test
