// SPDX-License-Identifier: MIT
// One cache per kind: heads by layer and request, rows in every layout and storage, refusals.
#include "kvmeld/memory/cache.hpp"

#include <catch2/catch.hpp>
#include <numeric>
#include <string>
#include <vector>

namespace cache_test {

using Catch::Contains;
using kvmeld::attention_spec;
using kvmeld::index_t;
using kvmeld::layout;
using kvmeld::rows;
using kvmeld::storage;

constexpr index_t layers = 2, requests = 3, kv_heads = 2, dim = 32, capacity = 8, slots = 4;
const attention_spec spec{.kv_heads = kv_heads, .group = 2, .key_dim = dim};
const kvmeld::cache_extents extents{layers, requests, capacity};

std::size_t at(std::ptrdiff_t i) { return static_cast<std::size_t>(i); }

/// Whole numbers that every storage holds but q8_0, which rounds: `n`, from `first` on.
std::vector<float> numbers(index_t n, float first = 0) {
  std::vector<float> x(at(n));
  std::iota(x.begin(), x.end(), first);
  for (float& e : x) {
    e = std::fmod(e, 128.0F);
  }
  return x;
}

/// Every head of a cache has the tokens that `append` gave it, where `[tokens, kv_heads, dim]`
/// says.
template <class Cache>
void holds_what_it_is_given(Cache& kv, double tolerance = 0) {
  REQUIRE((kv.heads() == layers * requests * kv_heads && kv.kv_heads() == kv_heads));
  const index_t tokens = 5, count = tokens * kv_heads * dim;
  const auto first = [&](index_t l, index_t r) {
    return static_cast<float>(7 * (l * requests + r));
  };
  for (index_t l = 0; l < layers; ++l) {
    for (index_t r = 0; r < requests; ++r) {
      kv.append(kv.heads(l, r), numbers(count, first(l, r)), numbers(count, first(l, r) + 1),
                tokens);
    }
  }
  for (index_t l = 0; l < layers; ++l) {
    for (index_t r = 0; r < requests; ++r) {
      const auto k = numbers(count, first(l, r)), v = numbers(count, first(l, r) + 1);
      for (index_t h = 0; h < kv_heads; ++h) {
        const auto head = kv.head((l * requests + r) * kv_heads + h);
        REQUIRE((head.length() == tokens && head.next_position() == tokens));
        REQUIRE(head.dim() == dim);
        double worst = 0;
        for (index_t t = 0; t < tokens; ++t) {
          REQUIRE((head.position(t) == t && head.log_mass(t) == 0));
          for (index_t i = 0; i < dim; ++i) {
            const auto j = at((t * kv_heads + h) * dim + i);
            worst = std::max(worst, std::abs(double{head.key(t)[i]} - double{k[j]}));
            worst = std::max(worst, std::abs(double{head.value(t)[i]} - double{v[j]}));
          }
        }
        CHECK(worst <= tolerance);
      }
    }
  }
}

/// The refusal of `call`, with its code.
template <class Call>
void refuses(kvmeld::errc code, const std::string& message, Call call) {
  INFO(message);
  try {
    call();
    FAIL("not refused");
  } catch (const kvmeld::error& e) {
    CHECK(e.code() == code);
    CHECK_THAT(e.what(), Contains(message));
  }
}
constexpr auto invalid = kvmeld::errc::invalid_argument;

TEST_CASE("a cache holds what it is given, in every storage", "[cache]") {
  for (const auto& [type, off] : {std::pair{storage::f32, 0.0},
                                  {storage::f16, 0.0},
                                  {storage::bf16, 0.0},
                                  {storage::q8_0, 0.6}}) {
    INFO("storage " << static_cast<int>(type));
    kvmeld::cache kv(spec, {layers, requests, capacity, type, type});
    CHECK((kv.type() == type && kv.bytes() == 0));
    holds_what_it_is_given(kv, off);
    CHECK(kv.bytes() == at(kv.heads() * 5) * (2 * kvmeld::row_bytes(type, dim) + 8));
    const kvmeld::cache copy = kv;
    kvmeld::cache moved = std::move(kv), again = copy;
    CHECK(moved.head(3).key(2)[5] == again.head(3).key(2)[5]);
    moved.head(3).push(numbers(dim).data(), numbers(dim).data());
    CHECK((moved.head(3).length() == 6 && again.head(3).length() == 5));
    moved.shrink(6);
    CHECK((moved.capacity() == 6 && moved.head(3).length() == 6 && moved.type() == type));
    CHECK(moved.head(3).key(2)[5] == again.head(3).key(2)[5]);
  }
}

TEMPLATE_TEST_CASE("an engine's rows lie where its layout says", "[cache]", float, Eigen::half,
                   Eigen::bfloat16) {
  const index_t all = layers * requests * capacity * kv_heads * dim;
  std::vector<TestType> k(at(all)), v(at(all));
  // Element i of slot s of head h of request r of layer l.
  const auto nhd = [](index_t l, index_t r, index_t h, index_t s, index_t i) {
    return at((((l * requests + r) * capacity + s) * kv_heads + h) * dim + i);
  };
  const auto hnd = [](index_t l, index_t r, index_t h, index_t s, index_t i) {
    return at((((l * requests + r) * kv_heads + h) * capacity + s) * dim + i);
  };
  const auto hdn = [](index_t l, index_t r, index_t h, index_t s, index_t i) {
    return at((((l * requests + r) * kv_heads + h) * dim + i) * capacity + s);
  };
  const auto lies = [](auto& kv, const auto& data, bool values, auto place) {
    for (index_t h = 0; h < kv.heads(); ++h) {
      for (const index_t s : {0, 4}) {
        for (const index_t i : {0, dim - 1}) {
          const auto head = kv.head(h);
          const auto j =
              place(h / kv_heads / requests, h / kv_heads % requests, h % kv_heads, s, i);
          CHECK((values ? head.value(s) : head.key(s))[i] == static_cast<float>(data[j]));
        }
      }
    }
  };
  SECTION("[capacity, kv_heads, dim], and values transposed") {
    kvmeld::strided_cache kv(spec, extents, rows(k, layout::nhd), rows(v, layout::hdn));
    holds_what_it_is_given(kv);
    lies(kv, k, false, nhd), lies(kv, v, true, hdn);
  }
  SECTION("[kv_heads, capacity, dim], and strides by hand") {
    const kvmeld::strides by_hand{.layer = requests * capacity * kv_heads * dim,
                                  .request = capacity * kv_heads * dim,
                                  .head = dim,
                                  .row = kv_heads * dim};
    kvmeld::strided_cache kv(spec, extents, rows(k, layout::hnd), rows(v, by_hand));
    holds_what_it_is_given(kv);
    lies(kv, k, false, hnd), lies(kv, v, true, nhd);
  }
  SECTION("each layer in memory of its own") {
    std::vector<kvmeld::rows> keys, values;
    const std::size_t one = k.size() / layers;
    for (std::size_t l = 0; l < layers; ++l) {  // the layers' memory in another order
      const std::size_t at = (layers - 1 - l) * one;
      keys.emplace_back(std::span(k).subspan(at, one), layout::nhd);
      values.emplace_back(std::span(v).subspan(at, one), layout::hnd);
    }
    kvmeld::strided_cache kv(spec, extents, keys, values);
    holds_what_it_is_given(kv);
    const auto turned = [&](auto where) {
      return [=](index_t l, auto... rest) { return where(layers - 1 - l, rest...); };
    };
    lies(kv, k, false, turned(nhd)), lies(kv, v, true, turned(hnd));
  }
  SECTION("rows that the engine wrote are committed") {
    std::iota(k.begin(), k.begin() + 100, TestType(1));
    kvmeld::strided_cache kv(spec, extents, rows(k, layout::nhd), rows(v, layout::nhd));
    const std::vector<index_t> active{2, 0};
    kv.commit(kv.heads(0, active), 1);
    CHECK((kv.head(0).length() == 1 && kv.head(2).length() == 0 && kv.head(5).length() == 1));
    CHECK((kv.head(0).key(0)[31] == 32 && kv.head(1).key(0)[0] == 33));
  }
}

TEST_CASE("blocks of an engine's lie where its layout says", "[cache][q8_0]") {
  const index_t blocks = layers * requests * capacity * kv_heads * dim / 32;
  std::vector<kvmeld::q8_0> k(at(blocks)), v(at(blocks));
  kvmeld::strided_cache kv(spec, extents, rows(k, layout::nhd), rows(v, layout::hnd));
  holds_what_it_is_given(kv, 0.6);
  CHECK(reinterpret_cast<kvmeld::q8_0*>(kv.head(1).key(2).data) == &k[5]);
  refuses(invalid, "values of numbers in hdn, got blocks", [&] {
    kvmeld::strided_cache(spec, extents, rows(k, layout::nhd), rows(v, layout::hdn));
  });
}

TEST_CASE("pages are found through the tables of a request, a layer or a head", "[cache][paged]") {
  const index_t pool = 20, tables = capacity / slots;
  std::vector<float> k(at(layers * pool * slots * kv_heads * dim)), v = k;
  std::vector<index_t> pages(at(layers * requests * kv_heads * (tables + 1)), -1);
  const auto fill = [&](index_t count, index_t stride) {
    for (index_t t = 0; t < count; ++t) {
      for (index_t p = 0; p < tables; ++p) {
        pages[at(t * stride + p)] = (t * tables + p) * 7 % pool;  // each page once
      }
    }
    return std::span(pages).first(at(count * stride));
  };
  SECTION("of a request, for all layers and heads") {
    kvmeld::paged_cache kv(spec, extents, rows(k, layout::pages_nhd), rows(v, layout::pages_hnd),
                           {fill(requests, tables), slots});
    holds_what_it_is_given(kv);
    // Layer 1, request 2, head 1, slot 4: page 1 of table 2.
    const index_t page = pages[at(2 * tables + 1)];
    CHECK(kv.head(11).key(4)[3] == k[at((((pool + page) * slots + 0) * kv_heads + 1) * dim + 3)]);
    CHECK(kv.head(11).value(4)[3] == v[at((((pool + page) * kv_heads + 1) * slots + 0) * dim + 3)]);
    CHECK((kv.share_table(0, 1) && kv.share_table(0, 6) && !kv.share_table(0, 2)));
    CHECK((kv.pages(0) == 2 && kv.free_pages(0).empty()));
  }
  SECTION("of a layer's request") {
    kvmeld::paged_cache kv(spec, extents, rows(k, layout::pages_nhd), rows(v, layout::pages_nhd),
                           {fill(layers * requests, tables + 1), slots, tables + 1});
    holds_what_it_is_given(kv);
    CHECK((kv.share_table(0, 1) && !kv.share_table(0, 6) && !kv.share_table(0, 2)));
  }
  SECTION("of a head, which then has pages of its own") {
    std::vector<float> own(at(24 * slots * dim)), values = own;
    for (std::size_t i = 0; i < 24; ++i) {
      pages[i] = static_cast<index_t>(i * 7 % 24);
    }
    const kvmeld::strides a_page{.row = dim, .page = slots * dim};
    const attention_spec one{.kv_heads = 1, .key_dim = dim};
    kvmeld::paged_cache kv(one, {1, 12, capacity}, rows(own, a_page), rows(values, a_page),
                           {std::span(pages).first(24), slots});
    kv.append(kv.heads(0, 11), numbers(5 * dim), numbers(5 * dim), 5);
    CHECK(kv.head(11).key(4)[1] == own[at(pages[23] * slots * dim + 1)]);
  }
  SECTION("a page that is not in memory is refused") {
    auto table = fill(requests, tables);
    table[1] = pool;
    kvmeld::paged_cache kv(spec, extents, rows(k, layout::pages_nhd), rows(v, layout::pages_nhd),
                           {table, slots});
    kv.commit(kv.heads(1, 0), 4);
    refuses(invalid, "expected a page of 0 to 19 for slot 4, got 20",
            [&] { kv.commit(kv.heads(1, 0), 1); });
    table[1] = -1;
    refuses(kvmeld::errc::no_page, "expected a page for slot 4, got -1",
            [&] { kv.append(kv.heads(1, 0), numbers(64), numbers(64), 1); });
    CHECK(kv.head(6).length() == 4);
  }
  SECTION("tables that do not fit are refused") {
    const auto make = [&](std::size_t n, index_t of, std::ptrdiff_t stride = 0) {
      kvmeld::paged_cache(spec, extents, rows(k, layout::pages_nhd), rows(v, layout::pages_nhd),
                          {std::span(pages).first(n), of, stride});
    };
    refuses(invalid, "got 8 slots in pages of 3", [&] { make(6, 3); });
    refuses(invalid, "tables of 2 pages, got 7 entries", [&] { make(7, slots); });
    refuses(invalid, "a stride of at least 2 pages, got 1", [&] { make(6, slots, 1); });
    refuses(invalid, "got 36 entries",  // of 12 tables, in 64 bits
            [&] { make(36, slots, (std::ptrdiff_t{1} << 62) + 3); });
    refuses(invalid, "keys without a request stride (a cache in pages), got 1", [&] {
      const kvmeld::strides both{
          .request = 1, .head = dim, .row = kv_heads * dim, .page = slots * kv_heads * dim};
      kvmeld::paged_cache(spec, extents, rows(k, both), rows(v, both),
                          {fill(requests, tables), slots});
    });
    // Heads with tables of their own may lie at one place of a page, but not before it.
    refuses(invalid, "strides of at least 0, got 0 and -1", [&] {
      const kvmeld::strides before{.head = -1, .row = dim, .page = slots * dim};
      kvmeld::paged_cache(spec, extents, rows(k, before), rows(v, before),
                          {fill(layers * requests * kv_heads, tables), slots});
    });
    refuses(invalid, "laid out as pages_nhd or pages_hnd, got nhd, hnd or hdn", [&] {
      kvmeld::paged_cache(spec, extents, rows(k, layout::nhd), rows(v, layout::pages_nhd),
                          {fill(requests, tables), slots});
    });
  }
}

}  // namespace cache_test
