// SPDX-License-Identifier: MIT
// The models of kv_cache: what is appended is where it belongs, and nothing else is touched.
#include <catch2/catch.hpp>
#include <cstring>
#include <vector>

#include "support/fixtures.hpp"

namespace views_test {

using fixtures::cache;
using fixtures::head_view;
using fixtures::layout;
using fixtures::strided_view;
using kvmeld::index_t;
using kvmeld::row;

std::size_t at(std::ptrdiff_t i) { return static_cast<std::size_t>(i); }

struct one_head {
  index_t heads() const;
  kvmeld::head_ref head(index_t);
};
struct no_heads {
  index_t heads() const;
  int head(index_t);
};

using kvmeld::kv_cache;
using kvmeld::kv_head;
static_assert(kv_head<kvmeld::head_ref> && kv_head<head_view<float>> && !kv_head<int> &&
              !kv_head<cache<float>>);
static_assert(kv_cache<one_head> && kv_cache<cache<float>> && kv_cache<strided_view<Eigen::half>>);
static_assert(!kv_cache<int> && !kv_cache<no_heads> && !kv_cache<head_view<float>>);
static_assert(kvmeld::storage_scalar<Eigen::bfloat16> && !kvmeld::storage_scalar<double> &&
              !kvmeld::storage_scalar<const float> && !kvmeld::storage_scalar<int>);
static_assert(std::is_trivially_copyable_v<head_view<Eigen::half>>);

enum class order { token_head_dim, head_token_dim, head_dim_token };
constexpr order orders[] = {order::token_head_dim, order::head_token_dim, order::head_dim_token};

/// Keys or values of all heads as an engine keeps them, with `gap` guards beside every row (or,
/// transposed, every column).
template <class Scalar>
struct plane {
  order how;
  index_t heads, dim, capacity, gap;
  std::vector<Scalar> memory;

  plane(order o, index_t h, index_t d, index_t c, index_t g)
      : how(o), heads(h), dim(d), capacity(c), gap(g), memory(at((h * (d + g)) * (c + g) + 2 * g)) {
    std::ranges::generate(memory, [i = 0]() mutable { return Scalar(100 + i++ % 37); });
  }
  /// Where element `i` of slot `s` of head `h` is: said once more, without strides.
  Scalar& element(index_t h, index_t s, index_t i) {
    const auto wide = [&](index_t n) { return n + gap; };
    const index_t k = how == order::token_head_dim   ? (s * heads + h) * wide(dim) + i
                      : how == order::head_token_dim ? (h * capacity + s) * wide(dim) + i
                                                     : (h * dim + i) * wide(capacity) + s;
    return memory[at(gap + k)];
  }
  fixtures::layout<Scalar> layout() {
    Scalar* data = memory.data() + gap;
    if (gap == 0) {  // what the library calls by name
      using named = fixtures::layout<Scalar>;
      return how == order::token_head_dim   ? named::token_head_dim(data, heads, dim)
             : how == order::head_token_dim ? named::head_token_dim(data, capacity, dim)
                                            : named::head_dim_token(data, capacity, dim);
    }
    const index_t r = dim + gap, c = capacity + gap;
    return how == order::token_head_dim   ? fixtures::layout<Scalar>{data, r, heads * r, 1}
           : how == order::head_token_dim ? fixtures::layout<Scalar>{data, capacity * r, r, 1}
                                          : fixtures::layout<Scalar>{data, dim * c, 1, c};
  }
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class Scalar>
struct engine {
  plane<Scalar> keys, values;
  strided_view<Scalar> kv;

  engine(const fixtures::cache_shape& shape, order k, order v, index_t gap)
      : keys(k, shape.heads, shape.dim, shape.capacity, gap),
        values(v, shape.heads, shape.dim, shape.capacity, gap),
        kv(shape, keys.layout(), values.layout()) {}
};

/// LAW: the engine's memory is what it was, but for the first `used[h]` slots of each head, which
/// hold what the heads of `expected` hold.
template <class Scalar>
void memory_is(plane<Scalar> now, plane<Scalar> before, cache<Scalar>& expected, bool values,
               const std::vector<index_t>& used) {
  for (index_t h = 0; h < now.heads; ++h) {
    for (index_t s = 0; s < used[at(h)]; ++s) {
      for (index_t i = 0; i < now.dim; ++i) {
        if (s < expected.head(h).length()) {
          const auto x = values ? expected.head(h).value(s)[i] : expected.head(h).key(s)[i];
          CHECK(now.element(h, s, i) == x);
        }
        now.element(h, s, i) = before.element(h, s, i);
      }
    }
  }
  CHECK(same_bits(now.memory, before.memory));
}

/// A plan with rows of one and of many, and slots that go.
kvmeld::merge_plan some_plan(index_t length) {
  kvmeld::merge_plan plan;
  plan.reset(length);
  plan.keep(1, 0.5F);
  for (index_t s = 4; s < length; s += 2) {
    plan.add({s, 0.25F, 0.75F}), plan.add({s - 1, 0.5F, -1}), plan.end_row(1);
  }
  return plan;
}

TEMPLATE_TEST_CASE("a strided view does what a cache does, and only to its slots", "[views]", float,
                   Eigen::half, Eigen::bfloat16) {
  const fixtures::cache_shape shape{.heads = 3, .group = 2, .dim = 5, .capacity = 9};
  const std::vector<index_t> lengths = {7, 0, 9};
  for (const order k : orders) {
    for (const order v : orders) {
      for (const index_t gap : {0, 3}) {
        INFO("keys " << static_cast<int>(k) << ", values " << static_cast<int>(v) << ", " << gap);
        engine<TestType> e(shape, k, v, gap);
        const auto keys = e.keys, values = e.values;
        cache<TestType> owning(shape);
        for (index_t h = 0; h < shape.heads; ++h) {
          const auto x = fixtures::normal<TestType>(lengths[at(h)] * shape.dim);
          const auto y = fixtures::normal<TestType>(lengths[at(h)] * shape.dim);
          owning.append(h, x, y);
          e.kv.append(h, std::span<const TestType>(x), std::span<const TestType>(y));
          CHECK(fixtures::bytes_of(e.kv.head(h)) == fixtures::bytes_of(owning.head(h)));
        }
        memory_is(e.keys, keys, owning, false, lengths);
        memory_is(e.values, values, owning, true, lengths);
        for (index_t h : {0, 2}) {
          auto a = kvmeld::make_head_state(kvmeld::h2o{}, e.kv.head(h)), b = a;
          apply(some_plan(lengths[at(h)]), e.kv.head(h), a);
          apply(some_plan(lengths[at(h)]), owning.head(h), b);
          CHECK(fixtures::bytes_of(e.kv.head(h)) == fixtures::bytes_of(owning.head(h)));
        }
        memory_is(e.keys, keys, owning, false, lengths);
        memory_is(e.values, values, owning, true, lengths);
      }
    }
  }
}

TEMPLATE_TEST_CASE("a strided view reads what the engine wrote", "[views]", float, Eigen::half,
                   Eigen::bfloat16) {
  const fixtures::cache_shape shape{.heads = 2, .dim = 3, .capacity = 8};
  for (const order k : orders) {
    for (const order v : orders) {
      engine<TestType> e(shape, k, v, 2);
      e.kv.commit(0, 3), e.kv.commit(1, 0), e.kv.commit(0, 5), e.kv.commit(1, 1);
      CHECK((e.kv.head(0).length() == 8 && e.kv.head(1).length() == 1));
      for (index_t h = 0; h < 2; ++h) {
        const auto head = e.kv.head(h);
        CHECK(head.next_position() == head.length());
        for (index_t s = 0; s < head.length(); ++s) {
          CHECK((head.position(s) == s && head.log_mass(s) == 0));
          for (index_t i = 0; i < shape.dim; ++i) {
            CHECK(&head.key(s)[i] == &e.keys.element(h, s, i));
            CHECK(&head.value(s)[i] == &e.values.element(h, s, i));
          }
        }
      }
      e.kv.head(0).truncate(2);
      e.kv.head(0).log_mass(2) = 5;  // what the slot had before means nothing to its next token
      e.kv.commit(0, 1);
      CHECK((e.kv.head(0).position(2) == 8 && e.kv.head(0).log_mass(2) == 0));
    }
  }
}

TEMPLATE_TEST_CASE("heads are ragged, and positions go on after slots were freed", "[views]", float,
                   Eigen::half, Eigen::bfloat16) {
  const index_t dim = 2;
  cache<TestType> kv{{.heads = 3, .group = 4, .dim = dim, .capacity = 6}};
  CHECK(kv.bytes() == 0);
  const std::size_t slot = 2 * dim * sizeof(TestType) + 8;
  const auto x = fixtures::normal(6 * dim);
  const auto first = [&](index_t n) { return std::vector(x.begin(), x.begin() + n * dim); };
  kv.append(0, first(6), first(6)), kv.append(2, first(1), first(1));
  kv.append(1, first(0), first(0));
  CHECK(kv.bytes() == 7 * slot);
  CHECK((kv.head(0).length() == 6 && kv.head(1).length() == 0 && kv.head(2).length() == 1));
  const auto head = kv.head(0);
  CHECK((head.group() == 4 && head.capacity() == 6 && head.dim() == dim && !head.check_finite()));
  const auto last = fixtures::bytes_of(kv.head(2));
  head.truncate(6);
  CHECK(head.length() == 6);
  head.log_mass(2) = head.log_mass(3) = -3;
  head.truncate(3);
  CHECK((head.length() == 3 && head.next_position() == 6 && kv.bytes() == 4 * slot));
  kv.append(0, first(2), first(2));
  CHECK((head.length() == 5 &&
         head.next_position() == 8));  // views are of the cache, not of a moment
  const index_t positions[] = {0, 1, 2, 6, 7};
  const float masses[] = {0, 0, -3, 0, 0};
  for (index_t s = 0; s < 5; ++s) {
    CHECK((head.position(s) == positions[s] && head.log_mass(s) == masses[s]));
    for (index_t i = 0; i < dim; ++i) {
      const TestType stored(x[at((s < 3 ? s : s - 3) * dim + i)]);
      CHECK((head.key(s)[i] == stored && head.value(s)[i] == stored));
    }
  }
  CHECK(newest_position(head) == 7);
  std::swap(head.position(0), head.position(4));
  CHECK(newest_position(head) == 7);
  CHECK(newest_position(kv.head(1)) == -1);
  CHECK(fixtures::bytes_of(kv.head(2)) == last);
  head.truncate(0);
  CHECK((head.length() == 0 && head.next_position() == 8 && newest_position(head) == -1));
}

TEST_CASE("a copy of a cache owns its own memory", "[views]") {
  auto kv = fixtures::random_cache(4, 3, 1);
  auto copy = kv;
  const auto before = fixtures::bytes_of(kv.head(0));
  CHECK(fixtures::bytes_of(copy.head(0)) == before);
  copy.head(0).key(1)[2] = 9, copy.head(0).log_mass(0) = 9, copy.head(0).truncate(2);
  CHECK(fixtures::bytes_of(kv.head(0)) == before);
}

}  // namespace views_test
