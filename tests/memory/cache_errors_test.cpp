// SPDX-License-Identifier: MIT
// What caches refuse, by name; layers of different models; selections of heads.
#include <catch2/catch.hpp>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "kvmeld/memory/cache.hpp"

namespace cache_errors_test {

using Catch::Contains;
using kvmeld::attention_spec;
using kvmeld::index_t;
using kvmeld::layout;
using kvmeld::rows;
using kvmeld::storage;

const attention_spec spec{.kv_heads = 2, .group = 2, .key_dim = 4};
constexpr auto invalid = kvmeld::errc::invalid_argument, unsupported = kvmeld::errc::unsupported;

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

TEST_CASE("layers may differ in rope and scale, and in nothing else", "[cache][errors]") {
  std::vector<attention_spec> specs{spec, spec};
  specs[1].scale = 3, specs[1].rope = kvmeld::rotary::halves(500);
  kvmeld::cache kv(specs, {.layers = 2, .requests = 2, .capacity = 8});
  CHECK((kv.spec(0).scale == 0.5F && kv.spec(1).scale == 3));
  CHECK((kv.head(3).scale() == 0.5F && kv.head(4).scale() == 3));
  CHECK((!kv.head(3).spec().rope.rotates() && kv.head(4).spec().rope == specs[1].rope));
  kv.head(4).push(std::vector<float>(4, 1).data(), std::vector<float>(4, 2).data());
  kv.shrink(4);
  CHECK((kv.head(4).spec().scale == 3 && kv.head(4).key(0)[3] == 1));
  const auto different = [&](const std::string& what, auto change) {
    auto other = specs;
    change(other[1]);
    refuses(unsupported, "expected the same " + what + " in every layer, got",
            [&] { kvmeld::cache(other, {.layers = 2, .capacity = 8}); });
  };
  different("kv_heads", [](auto& s) { s.kv_heads = 3; });
  different("group", [](auto& s) { s.group = 1; });
  different("key_dim", [](auto& s) { s.key_dim = 8; });
  different("check_finite", [](auto& s) { s.check_finite = true; });
  refuses(invalid, "one for each of 3 layers, got 2",
          [&] { kvmeld::cache(specs, {.layers = 3, .capacity = 8}); });
}

TEST_CASE("caches that cannot be are refused", "[cache][errors]") {
  refuses(invalid, "at least 1 layer and 1 request, got 0 and 1",
          [] { kvmeld::cache(spec, {.layers = 0, .capacity = 8}); });
  refuses(invalid, "at least 1 layer and 1 request, got 1 and -1",
          [] { kvmeld::cache(spec, {.requests = -1, .capacity = 8}); });
  std::vector<float> k(2 * 8 * 4), v(k), less(63), none;
  std::vector<Eigen::half> halves(k.size());
  const kvmeld::cache_extents extents{.capacity = 8};
  const auto make = [&](auto& keys, auto& values, const auto& how) {
    kvmeld::strided_cache(spec, extents, rows(keys, how), rows(values, layout::nhd));
  };
  make(k, v, layout::nhd);
  make(halves, v, layout::nhd);  // keys and values each have their own
  refuses(invalid, "keys of at least 64 numbers, got 63", [&] { make(less, v, layout::hnd); });
  refuses(invalid, "keys, got null", [&] { make(none, v, layout::hnd); });
  refuses(invalid, "nhd, hnd or hdn, got pages_nhd", [&] { make(k, v, layout::pages_nhd); });
  refuses(invalid, "keys that do not overlap",
          [&] { make(k, v, kvmeld::strides{.head = 4, .row = 4}); });
  refuses(invalid, "keys of at least 68 numbers, got 64",
          [&] { make(k, v, kvmeld::strides{.head = 36, .row = 4}); });
  refuses(invalid, "keys without a page stride (a cache without pages), got 16",
          [&] { make(k, v, kvmeld::strides{.head = 32, .row = 4, .page = 16}); });
  // Products of strides and counts that are no number of 64 bits.
  constexpr auto most = std::numeric_limits<std::ptrdiff_t>::max();
  for (const std::ptrdiff_t stride : {most, most / 7, std::ptrdiff_t{1} << 61}) {
    refuses(invalid, "keys of at least",
            [&] { make(k, v, kvmeld::strides{.head = 4, .row = stride}); });
    refuses(invalid, "keys of at least",
            [&] { make(k, v, kvmeld::strides{.head = stride, .row = 4}); });
  }
  refuses(invalid, "fewer than 2^31 heads, got 1073741824 times 1073741824", [&] {
    kvmeld::cache({.kv_heads = 1 << 30, .group = 1, .key_dim = 4},
                  {.layers = 1 << 15, .requests = 1 << 15, .capacity = 8});
  });
  refuses(invalid, "fewer than 2^31 heads", [&] {  // 2^64 of them
    kvmeld::cache({.kv_heads = 1 << 22, .group = 1, .key_dim = 4},
                  {.layers = 1 << 21, .requests = 1 << 21, .capacity = 8});
  });
  const auto apart = [&](const std::vector<rows>& keys) {
    kvmeld::strided_cache(spec, {.layers = 2, .capacity = 8}, keys,
                          std::vector{rows(v, layout::nhd), rows(k, layout::nhd)});
  };
  apart({rows(k, layout::nhd), rows(v, layout::nhd)});
  refuses(invalid, "of all layers in one, or of each of 2 layers, got 0", [&] { apart({}); });
  refuses(invalid, "of each of 2 layers, got 3", [&] { apart({3, rows(k, layout::nhd)}); });
  refuses(invalid, "of each layer in memory of its own, got layers 0 and 1 that share bytes", [&] {
    apart({2, rows(k, layout::nhd)});
  });
  refuses(invalid, "keys of at least 64 numbers, got 63", [&] {
    apart({rows(k, layout::nhd), rows(less, layout::nhd)});
  });
  refuses(unsupported, "keys of one storage in every layer", [&] {
    apart({rows(k, layout::nhd), rows(halves, layout::nhd)});
  });
  refuses(invalid, "keys of at least 128 numbers, got 64", [&] {
    kvmeld::strided_cache(spec, {.requests = 2, .capacity = 8}, rows(k, layout::nhd),
                          rows(v, layout::nhd));
  });
}

TEST_CASE("heads are chosen by layer and request", "[cache][errors]") {
  kvmeld::cache kv(spec, {.layers = 2, .requests = 3, .capacity = 2});
  const auto list = [](const kvmeld::head_selection& heads) {
    std::vector<index_t> all;
    for (index_t i = 0; i < heads.count(); ++i) {
      all.push_back(heads[i]);
    }
    return all;
  };
  const std::vector<index_t> two{2, 0}, none, bad{0, 3}, twice{1, 1};
  CHECK(list(kv.heads(1, 2)) == std::vector<index_t>{10, 11});
  CHECK(list(kv.heads(1, two)) == std::vector<index_t>{10, 11, 6, 7});
  CHECK(list(kv.heads(0, none)).empty());
  refuses(invalid, "a layer of 0 to 1, got 2", [&] { (void)kv.heads(2, 0); });
  refuses(invalid, "a request of 0 to 2, got -1", [&] { (void)kv.heads(0, -1); });
  refuses(invalid, "a request of 0 to 2, got 3", [&] { (void)kv.heads(0, bad); });
  const std::vector<float> x(2 * 2 * 4, 1);
  refuses(invalid, "append: expected each request once, got request 1 twice",
          [&] { kv.append(kv.heads(0, twice), x, x, 1); });
  refuses(invalid, "append: expected values [1, 4, 4] (16 numbers), got 15",
          [&] { kv.append(kv.heads(0, two), x, std::vector<float>(15), 1); });
  refuses(invalid, "append: expected at least 0 tokens, got -1",
          [&] { kv.append(kv.heads(0, 0), x, x, -1); });
  kv.append(kv.heads(0, two), x, std::vector<Eigen::half>(16, Eigen::half(2)), 1);
  CHECK((kv.head(0).length() == 1 && kv.head(2).length() == 0 && kv.head(5).length() == 1));
  CHECK((kv.head(5).key(0)[0] == 1 && kv.head(5).value(0)[3] == 2));
  kv.head(1).truncate(0);  // of the two, head 0 alone has too few slots left
  refuses(kvmeld::errc::no_capacity,
          "append: expected at most 1 tokens in head 0 of layer 0 (1 of 2 slots in use), got 2",
          [&] { kv.append(kv.heads(0, 0), x, x, 2); });
  refuses(kvmeld::errc::no_capacity,
          "commit: expected at most 1 tokens in head 0 of layer 0 (1 of 2 slots in use), got 2",
          [&] { kv.commit(kv.heads(0, 0), 2); });
  CHECK((kv.head(0).length() == 1 && kv.head(1).length() == 0));
}

}  // namespace cache_errors_test
