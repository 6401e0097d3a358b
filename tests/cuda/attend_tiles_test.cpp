// SPDX-License-Identifier: MIT
// Attention of half and bfloat16 on tensor cores against double loops: every dim and group, layouts
// and pages, one split and several, what is not a number, and where the new token goes.
#include <catch2/catch.hpp>
#include <limits>

#include "cuda/attention_oracle.hpp"

namespace kvmeld::cuda {
namespace attend_tiles_test {

using detail::splits_of;

/// half or bfloat16, by turns.
template <class Check>
void in_16_bits(std::uint64_t turn, Check check) {
  if (turn % 2 == 0) {
    check(half{});
  } else {
    check(bfloat16{});
  }
}

TEST_CASE("tensor cores attend every dim and group, over one split and several") {
  std::uint64_t seed = 5000;
  for (const index_t dim : {8, 32, 64, 96, 128, 256}) {
    for (const index_t group : {1, 3, 4, 7, 8, 16}) {
      const cache_case several{.heads = 3, .capacity = 333, .dim = dim, .group = group};
      const cache_case one{.heads = 2, .capacity = 130, .dim = dim, .group = group};
      in_16_bits(seed, [&](auto x) {
        check_attention<decltype(x)>(sum_rule{}, several, {333, 0, 1}, seed);
        check_attention<decltype(x)>(sum_rule{}, one, {130, 77}, seed + 1);
      });
      seed += 3;
    }
  }
  CHECK(splits_of(3, 333) == 2);
  CHECK(splits_of(2, 130) == 1);
}

TEST_CASE("tensor cores attend strided rows and pages of every size") {
  std::uint64_t seed = 6000;
  for (const index_t page : {1, 4, 5, 16, 24, 32, 48}) {
    for (const bool paged : {true, false}) {
      const cache_case c{.heads = 4,
                         .capacity = 300,
                         .dim = 64,
                         .group = 2,
                         .paged = paged,
                         .odd = page % 3 * 8,  // rows further apart, aligned all the same
                         .sequences = page % 2 == 0,
                         .page = page};
      in_16_bits(seed++, [&](auto x) {
        check_attention<decltype(x)>(sum_rule{}, c, {300, 129, 16, 33}, seed);
        check_attention<decltype(x)>(no_rule{}, c, {17, 300, 128, 290}, seed + 1);
      });
    }
  }
}

TEST_CASE("splits follow heads and slots, and fill no second wave by a little") {
  CHECK(splits_of(64, 2048) == 4);
  CHECK(splits_of(256, 1024) == 1);
  CHECK(splits_of(256, 1025) == 1);
  CHECK(splits_of(256, 4096) == 8);
  CHECK(splits_of(1, 1 << 20) == 128);
  CHECK(splits_of(0, 100) == 1);
  CHECK(splits_of(1 << 20, 1 << 20) == 128);
  CHECK(splits_of(100, 1024, 216) == 2);  // an A100
  CHECK(splits_of(150, 1024, 216) == 1);
}

TEST_CASE("a workspace for all heads and slots has room for the splits of fewer") {
  for (const std::int64_t at_once : {100, 216, 396}) {
    for (const index_t heads : {1, 7, 8, 63, 256, 1000}) {
      for (const index_t capacity : {1, 130, 1025, 4096, 32768, 1 << 19}) {
        const auto parts = [&](index_t h, index_t c) { return h * splits_of(h, c, at_once); };
        const auto room = static_cast<index_t>(
            detail::most_parts(heads, capacity, splits_of(heads, capacity, at_once), at_once));
        for (index_t fewer = 1; fewer <= heads; fewer += 1 + fewer / 9) {
          CHECK((parts(fewer, capacity) <= room && parts(fewer, capacity / 3 + 1) <= room));
        }
      }
    }
  }
}

/// One call on numbers of the test's own.
template <class Scalar>
struct one_attention {
  device_cache<Scalar> kv;
  device_buffer<Scalar> q, out;
  device_buffer<float> lse;

  one_attention(const cache_case& c, const std::vector<index_t>& lengths, std::uint64_t seed)
      : kv(c, lengths, seed, {slot_reduce::sum}),
        q(static_cast<std::size_t>(c.heads * c.group * c.dim)),
        out(q.size()),
        lse(static_cast<std::size_t>(c.heads * c.group)) {
    emulator::chance random{seed + 1};
    for (std::size_t i = 0; i < q.size(); ++i) {
      q.host()[i] = from_float<Scalar>(0.25F * whole(random, 3));
    }
  }
  void run() {
    device_buffer<unsigned char> memory(workspace_bytes(kv.view()));
    attend(kv.view(), q.data(), out.data(), lse.data(), {memory.data(), memory.size()}, order());
  }
  /// The first element of query head `g` of head `h`.
  float at(index_t h, index_t g) const {
    return to_float(out[(std::ptrdiff_t{h} * kv.shape.group + g) * kv.shape.dim]);
  }
  /// The largest difference from double loops.
  double error(index_t h) {
    const std::ptrdiff_t first = std::ptrdiff_t{h} * kv.shape.group * kv.shape.dim;
    const auto want = slow_attention(kv, h, q.host() + first);
    double worst = 0;
    for (std::size_t i = 0; i < want.out.size(); ++i) {
      const double x = want.out[i];
      const double y = double{to_float(out[first + static_cast<std::ptrdiff_t>(i)])};
      worst = worse(worst, std::abs(x - y) / (std::abs(x) + 1));
    }
    return worst;
  }
};

TEST_CASE("logits of 1e4 either way leave the heaviest slots") {
  for (const index_t group : {4, 16}) {
    one_attention<half> a({.capacity = 300, .dim = 64, .group = group, .scale = 512}, {300, 70}, 1);
    a.run();
    CHECK(std::abs(a.lse[0]) > 1e4F);
    CHECK((a.error(0) < 1e-3 && a.error(1) < 1e-3));
    for (std::ptrdiff_t s = 0; s < 600; ++s) {
      a.kv.log_mass[s] -= 5e4F;
    }
    a.run();
    CHECK(a.lse[0] < -1e4F);
    CHECK((a.error(0) < 1e-3 && a.error(1) < 1e-3));
  }
}

TEMPLATE_TEST_CASE("what is not a number stays with its own heads and query heads", "", half,
                   bfloat16, float) {
  const cache_case c{.heads = 3, .capacity = 300, .dim = 32, .group = 4};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  one_attention<TestType> a(c, {300, 40, 40}, 7);
  const auto is_nan = [&](index_t h, index_t g) { return a.at(h, g) != a.at(h, g); };
  a.q[32 + 5] = from_float<TestType>(nan);  // of head 0, query head 1
  a.kv.key(1, 17)[3] = from_float<TestType>(nan);
  a.kv.log_mass[a.kv.at(2, 39)] = -inf;
  a.run();
  CHECK((!is_nan(0, 0) && is_nan(0, 1) && !is_nan(0, 2) && !is_nan(0, 3)));
  CHECK((is_nan(1, 0) && is_nan(1, 3)));
  CHECK(a.error(2) < tolerance<TestType>);
  for (index_t s = 0; s < 40; ++s) {
    a.kv.log_mass[a.kv.at(2, s)] = -inf;
  }
  a.run();
  CHECK((a.at(2, 0) == 0.0F && a.lse[8] == -inf));
  a.kv.log_mass[a.kv.at(2, 0)] = nan;
  a.run();
  CHECK((is_nan(2, 0) && is_nan(2, 3)));
}

TEMPLATE_TEST_CASE("weights are as good as float where values cancel", "", half, bfloat16) {
  one_attention<TestType> a({.heads = 1, .capacity = 2, .dim = 16, .group = 1}, {2}, 3);
  for (std::ptrdiff_t i = 0; i < 16; ++i) {
    a.q[i] = from_float<TestType>(0);
    a.kv.value(0, 0)[i] = from_float<TestType>(-1024),
                  a.kv.value(0, 1)[i] = from_float<TestType>(3072);
  }
  a.kv.log_mass[0] = std::log(3.0F), a.kv.log_mass[1] = 0;  // 3/4 and 1/4
  a.run();
  CHECK(std::abs(a.at(0, 0)) < 0.02F);  // rounded to 16 bits, 1/3 beside 1 leaves 0.2 and 1.5
}

/// A step's new token behind `n` slots: its row, and the attention with it. The row lies `skew`
/// numbers behind where it were aligned.
template <class Scalar>
void check_new_token(const cache_case& c, index_t n, std::ptrdiff_t skew = 0) {
  INFO(n << " slots, dim " << c.dim << ", paged " << c.paged << ", skew " << skew);
  one_attention<Scalar> a(c, {n}, static_cast<std::uint64_t>(n));
  device_buffer<Scalar> k(static_cast<std::size_t>(c.dim + skew)), v(k.size());
  for (std::ptrdiff_t i = 0; i < c.dim; ++i) {
    k[skew + i] = from_float<Scalar>(static_cast<float>(i % 5) - 2);
    v[skew + i] = from_float<Scalar>(static_cast<float>(i % 7) + 20);
  }
  a.kv.next_position[0] = n + 1000;
  device_buffer<unsigned char> memory(workspace_bytes(a.kv.view()));
  workspace_allocator from({memory.data(), memory.size()});
  const auto work =
      detail::allocate_step(from, sum_rule{}, detail::shape_of(a.kv.view()), false).partial;
  detail::attend_and_observe(sum_rule{}, a.kv.view(), a.kv.state, a.q.data(),
                             new_tokens<Scalar>{k.data() + skew, v.data() + skew}, {true, 0}, work,
                             a.out.data(), a.lse.data(), order(static_cast<std::uint64_t>(n)));
  a.kv.check_guards();
  if (n == c.capacity) {
    CHECK((a.kv.length[0] == n && a.at(0, 0) != a.at(0, 0)));
    return;
  }
  CHECK(a.kv.length[0] == n + 1);
  const std::size_t row = sizeof(Scalar) * static_cast<std::size_t>(c.dim);
  CHECK(std::memcmp(a.kv.key(0, n), k.host() + skew, row) == 0);
  CHECK(std::memcmp(a.kv.value(0, n), v.host() + skew, row) == 0);
  CHECK((a.kv.log_mass[n] == 0.0F && a.kv.position[n] == n + 1000));
  CHECK(a.error(0) <= tolerance<Scalar>);
}

TEST_CASE("the new token is attended and appended in every split") {
  CHECK(splits_of(1, 1300) == 10);
  for (const index_t n :
       {0, 1, 63, 64, 65, 128, 192, 256, 333, 384, 448, 512, 576, 639, 1023, 1299, 1300}) {
    check_new_token<half>({.heads = 1, .capacity = 1300, .dim = 32, .group = 2}, n);
    check_new_token<float>({.heads = 1, .capacity = 1300, .dim = 32, .group = 2}, n);
  }
  for (const index_t page : {4, 16, 20}) {
    for (const index_t n : {0, 15, 16, 40, 100, 200}) {  // one split
      const cache_case c{.heads = 1, .capacity = 200, .dim = 256, .paged = true, .page = page};
      check_new_token<bfloat16>(c, n);
    }
  }
  check_new_token<half>({.heads = 1, .capacity = 200, .dim = 31, .odd = 2}, 77);
  check_new_token<half>({.heads = 1, .capacity = 200, .dim = 64}, 77, 1);  // in an aligned cache
  check_new_token<float>({.heads = 1, .capacity = 200, .dim = 32}, 77, 1);
  for (const index_t capacity : {200, 1300}) {  // a sink of the first split alone
    const cache_case c{.heads = 1, .capacity = capacity, .group = 2, .soft_cap = 2, .sinks = true};
    check_new_token<half>(c, capacity - 1);
    check_new_token<float>(c, 0);
  }
}

/// Latent rows of `c.dim` numbers, of which the first `dim` are the values.
template <class Scalar>
void check_latent(const cache_case& c, index_t dim, const std::vector<index_t>& lengths) {
  INFO("latent " << c.dim << ", " << dim << ", group " << c.group << ", capacity " << c.capacity);
  one_attention<Scalar> a(c, lengths, 11);
  std::memcpy(a.kv.values.host(), a.kv.keys.host(), a.kv.keys.size() * sizeof(Scalar));
  auto view = a.kv.view();
  view.dim = dim;
  device_buffer<unsigned char> memory(workspace_bytes(view));
  attend_latent(view, c.dim, a.q.data(), a.out.data(), a.lse.data(), {memory.data(), memory.size()},
                order());
  double worst = 0;
  for (index_t h = 0; h < c.heads; ++h) {
    const std::ptrdiff_t first = std::ptrdiff_t{h} * c.group;
    const auto want = slow_attention(a.kv, h, a.q.host() + first * c.dim);
    for (index_t g = 0; g < c.group; ++g) {
      const double lse = want.log_sum_exp[static_cast<std::size_t>(g)];
      const double l = double{a.lse[first + g]};
      worst = worse(worst, lse == l ? 0 : std::abs(lse - l));
      for (index_t i = 0; i < dim; ++i) {
        const double x = want.out[static_cast<std::size_t>(g * c.dim + i)];
        const double y = double{to_float(a.out[(first + g) * dim + i])};
        worst = worse(worst, std::abs(x - y) / (std::abs(x) + 1));
      }
    }
  }
  CHECK(worst <= tolerance<Scalar>);
  CHECK((memory.intact() && a.out.intact() && a.lse.intact()));
}

TEST_CASE("latent rows are attended, keys and values of one row") {
  const cache_case mla{.heads = 2, .capacity = 300, .dim = 576, .group = 16, .scale = 0.04F};
  check_latent<half>(mla, 512, {300, 17});
  cache_case c = mla;
  c.group = 40, c.capacity = 90, c.paged = true, c.page = 16, c.soft_cap = 2, c.sinks = true;
  check_latent<bfloat16>(c, 512, {90, 0});
  check_latent<half>({.capacity = 33, .dim = 40, .group = 3}, 21, {33, 1});
  one_attention<half> a({.dim = 32}, {3, 3}, 1);
  CHECK_THROWS_WITH(
      attend_latent<half>(a.kv.view(), 24, a.q.data(), a.out.data(), nullptr, {}, order()),
      Catch::Contains("a key_dim of 8 to 576 and a dim up to it and 512, got 24 and"));
}

}  // namespace attend_tiles_test
}  // namespace kvmeld::cuda
