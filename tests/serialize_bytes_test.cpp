// SPDX-License-Identifier: MIT
// The bytes of a saved cache: the same on every machine, and refused when they are not whole.
#include <catch2/catch.hpp>
#include <functional>

#include "kvmeld/peers.hpp"
#include "support/fixtures.hpp"
#include "support/saved.hpp"

namespace serialize_bytes_test {

using fixtures::everything;
using fixtures::index_t;
using fixtures::saved;
using fixtures::small;
using fixtures::words;
using any_policy = kvmeld::any_policy_or_peer;

/// One head with one token and what snapkv keeps of it.
struct tiny {
  kvmeld::snapkv policy{.window = 2, .sinks = 0};
  fixtures::cache<Eigen::half> kv{{.heads = 1, .group = 1, .dim = 2, .capacity = 3, .scale = 0.5F}};
  fixtures::state state = fixtures::make_state(policy, kv);

  tiny() {
    kv.append(0, std::vector<float>{9, 9, 1, -2}, std::vector<float>{9, 9, 3, 4});
    state[0].extend(2);
    kvmeld::merge_plan second_alone;
    second_alone.reset(2), second_alone.keep(1, 0);
    kvmeld::apply(second_alone, kv.head(0), state[0]);
    kv.head(0).log_mass(0) = 2.5F;
    state[0].column(0)[0] = 8, state[0].column(1)[0] = -0.25F;
    state[0].memory()[0] = std::bit_cast<float>(0x7FA00001);  // a signalling NaN
    state[0].count_queries(0x123456789A);
  }
  void load(const std::string& bytes) {
    std::istringstream in(bytes);
    fixtures::load(in, policy, kv, state);
  }
};

const unsigned char tiny_file[] = {
    'k',  'v',  'm',  'e',  'l',  'd', '\r', '\n',  //
    5,    0,    0,    0,                            // 8: version
    1,    0,    0,    0,                            // 12: heads
    3,    0,    0,    0,                            // 16: capacity
    1,    0,    0,    0,                            // 20: keys: half
    1,    0,    0,    0,                            // 24: values: half
    1,    0,    0,    0,                            // 28: group
    2,    0,    0,    0,                            // 32: dim
    2,    0,    0,    0,                            // 36: dim of values
    0,    0,    0,    0,                            // 40: place of values
    0,    0,    0,    0x3F,                         // 44: scale
    0,    0,    0,    0,                            // 48: soft cap
    0,    0,    0,    0,                            // 52: window
    0,    0,    0,    0,                            // 56: sink
    0,    0,    0,    0,                            // 60: slope
    2,    0,    0,    0,                            // 64: rotated numbers
    0,    0,    0,    0,                            // 68: the first of them
    0,    0,    0,    0,                            // 72: their pairs
    0,    0,    0x80, 0x3F,                         // 76: frequency
    6,    0,    0,    0,                            // 80: the name's length
    's',  'n',  'a',  'p',  'k',  'v',              // 84
    2,    0,    0,    0,                            // 90: columns
    0,    0,    0,    0,    0,    0,   0,    0,     // 94: fold, initial
    0,    0,    0,    0,    0,    0,   0,    0,     // 102
    1,    0,    0,    0,    0,    0,   0,    0,     // 110: floats of memory
    1,    0,    0,    0,                            // 118: length
    1,    0,    0,    0,                            // 122: measured
    2,    0,    0,    0,                            // 126: seen
    0x9A, 0x78, 0x56, 0x34, 0x12, 0,   0,    0,     // 130: observed
    0,    0x3C, 0,    0xC0,                         // 138: key
    0,    0x42, 0,    0x44,                         // 142: value
    0,    0,    0x20, 0x40,                         // 146: log-mass
    1,    0,    0,    0,                            // 150: position
    0,    0,    0,    0x41,                         // 154: first column
    0,    0,    0x80, 0xBE,                         // 158: second column
    1,    0,    0xA0, 0x7F,                         // 162: memory
    0x4F, 0x13, 0xD1, 0xB4,                         // 166: CRC-32, from another program
};
std::string tiny_bytes() { return {reinterpret_cast<const char*>(tiny_file), sizeof tiny_file}; }

/// `bytes` with `x` at `offset`, and a checksum that agrees.
std::string patched(std::string bytes, std::size_t offset, std::uint32_t x) {
  const auto put = [&](std::size_t at, std::uint32_t word) {
    for (std::size_t i = 0; i < 4; ++i) {
      bytes[at + i] = static_cast<char>((word >> (8 * i)) & 0xFFU);
    }
  };
  put(offset, x);
  kvmeld::detail::crc32 sum;
  sum.add({reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size() - 4});
  put(bytes.size() - 4, sum.value());
  return bytes;
}

void refuses(const std::string& message, const std::function<void()>& call) {
  CHECK_THROWS_AS(call(), kvmeld::error);
  CHECK_THROWS_WITH(call(), Catch::Contains("kvmeld: ") && Catch::Contains(message));
}

TEST_CASE("crc32 is everyone's", "[serialize]") {
  kvmeld::detail::crc32 sum;
  CHECK(sum.value() == 0);
  for (const char digit : std::string("123456789")) {
    const auto c = static_cast<unsigned char>(digit);
    sum.add({&c, 1});
  }
  CHECK(sum.value() == 0xCBF43926);
}

TEST_CASE("a saved cache is the same bytes on every machine", "[serialize]") {
  tiny one;
  CHECK(saved(one.policy, one.kv, one.state) == tiny_bytes());
  tiny other;
  const words before = everything(one.kv, one.state);
  other.kv.append(0, std::vector<float>{5, 5}, std::vector<float>{5, 5});
  other.state[0].extend(2);
  other.state[0].memory()[0] = 0;
  other.load(tiny_bytes());
  CHECK(everything(other.kv, other.state) == before);
}

TEST_CASE("whatever byte was changed, nothing is loaded", "[serialize]") {
  small one(4);
  const std::string good = one.bytes();
  small other(3);
  for (std::size_t i = 0; i < good.size(); ++i) {
    for (unsigned bit = 0; bit < 8; ++bit) {
      std::string damaged = good;
      damaged[i] = static_cast<char>(static_cast<unsigned char>(damaged[i]) ^ (1U << bit));
      INFO("bit " << bit << " of byte " << i << " of " << good.size());
      REQUIRE(other.refuses(damaged));
    }
  }
  auto& random = fixtures::random_bits();
  for (int round = 0; round < 200; ++round) {
    std::string damaged = good;
    const std::size_t i = random() % good.size();
    damaged[i] = static_cast<char>(damaged[i] + 1 + static_cast<char>(random() % 255));
    INFO("byte " << i);
    REQUIRE(other.refuses(damaged));
  }
  CHECK_FALSE(other.refuses(good));
  CHECK(everything(other.kv, other.state) == everything(one.kv, one.state));
}

TEST_CASE("wherever the bytes end, nothing is loaded", "[serialize]") {
  small one(4);
  const std::string good = one.bytes();
  small other(3);
  for (std::size_t size = 0; size < good.size(); ++size) {
    INFO(size << " of " << good.size() << " bytes");
    REQUIRE(other.refuses(good.substr(0, size)));
  }
  refuses("load: expected 28 bytes after the first 138, got 3 (truncated)",
          [] { tiny().load(tiny_bytes().substr(0, 141)); });
}

TEST_CASE("what cannot be is refused even with the right checksum", "[serialize]") {
  struct bad {
    std::size_t offset;
    std::uint32_t word;
    std::string message;
  };
  const bad table[] = {
      {0, 0x66766BU, "expected a saved cache, got other bytes"},
      {4, 0x0A0A646CU, "expected a saved cache"},  // as text mode leaves it
      {8, 2, "expected version 5, got 2"},
      {8, 0, "expected version 5, got 0"},
      {12, 2, "expected heads 1, got 2"},
      {16, 0x7FFFFFFFU, "expected capacity 3, got 2147483647"},
      {20, 0, "4: q4_0, 5: q6_0, 6: k8, 7: k6, 8: k4) 1, got 0"},
      {24, 0, "expected scalar of values 1, got 0"},
      {28, 0xFFFFFFFFU, "expected group 1, got -1"},
      {32, 4096, "expected dim 2, got 4096"},
      {36, 4, "expected dim of values 2, got 4"},
      {40, 1, "expected place of values (0: their own, 1: in the keys) 0, got 1"},
      {44, 0x3E800000U, "expected scale 0.5, got 0.25"},
      {48, 0x3E800000U, "expected soft cap 0, got 0.25"},
      {52, 7, "expected window 0, got 7"},
      {56, 0x3E800000U, "expected sink logit 0, got 0.25"},
      {60, 0x3E800000U, "expected slope 0, got 0.25"},
      {64, 0, "expected rotated numbers 2, got 0"},
      {68, 1, "expected first rotated number 0, got 1"},
      {72, 1, "expected pairing (0: halves, 1: interleaved) 0, got 1"},
      {76, 0x3E800000U, "expected frequency 1, got 0.25"},
      {80, 0xFFFFFFFFU, "name of at most 256 bytes, got 4294967295"},
      {80, 5, "expected policy snapkv, got snapk"},
      {84, 0x70616E53U, "expected policy snapkv, got Snapkv"},
      {90, 3, "expected columns 2, got 3"},
      {94, 1, "expected merge rule of a column (0: sum, 1: max, 2: anchor) 0, got 1"},
      {106, 0x3F800000U, "expected initial number of a column 0, got 1"},
      {110, 2, "expected floats of memory 1, got 2"},
      {114, 1, "expected floats of memory 1, got 4294967297"},
      {118, 4, "expected a length of 0 to 3 slots, got 4"},
      {118, 0xFFFFFFFFU, "expected a length of 0 to 3 slots, got -1"},
      {118, 0x7FFFFFFFU, "expected a length of 0 to 3 slots, got 2147483647"},
      {122, 2, "expected 0 to 1 slots with columns, got 2"},
      {122, 0x80000000U, "expected 0 to 1 slots with columns, got -2147483648"},
      {126, 0, "expected at least 1 tokens in total, got 0"},
      {134, 0x80000000U, "expected at least 0 observed queries, got -"},
      {118, 2, " bytes after the first "},  // a slot more than there are bytes
  };
  tiny one;
  const words before = everything(one.kv, one.state);
  for (const bad& row : table) {
    refuses(row.message, [&] { one.load(patched(tiny_bytes(), row.offset, row.word)); });
    CHECK(everything(one.kv, one.state) == before);
  }
  CHECK_NOTHROW(one.load(patched(tiny_bytes(), 146, 0x3F800000U)));
  CHECK(one.kv.head(0).log_mass(0) == 1);
}

TEST_CASE("another cache or another policy is refused", "[serialize]") {
  tiny one;
  const auto into = [&](const fixtures::cache_shape& shape, const any_policy& policy) {
    return [=] {
      fixtures::cache<Eigen::half> kv(shape);
      auto state = fixtures::make_state(policy, kv);
      std::istringstream in(tiny_bytes());
      fixtures::load(in, policy, kv, state);
    };
  };
  const fixtures::cache_shape same = one.kv.shape();
  CHECK_NOTHROW(into(same, one.policy)());  // any_policy is the policy inside it
  CHECK_NOTHROW(into(same, kvmeld::snapkv{.window = 9})());
  refuses("expected policy h2o, got snapkv", into(same, kvmeld::h2o{}));
  auto shape = same;
  shape.dim = 4;
  refuses("expected dim 4, got 2", into(shape, one.policy));
  shape = same, shape.heads = 2;
  refuses("expected heads 2, got 1", into(shape, one.policy));
  shape = same, shape.capacity = 4;
  refuses("expected capacity 4, got 3", into(shape, one.policy));

  fixtures::cache<float> floats(same);
  auto state = fixtures::make_state(one.policy, floats);
  refuses(" 0, got 1", [&] {
    std::istringstream in(tiny_bytes());
    fixtures::load(in, one.policy, floats, state);
  });
  // One policy, two column layouts: what its parameters decide is compared too.
  fixtures::cache<float> kv({.heads = 1, .dim = 2, .capacity = 3});
  const auto swap = [&](const auto& from, const auto& to) {
    auto state_from = fixtures::make_state(from, kv), state_to = fixtures::make_state(to, kv);
    std::istringstream in(saved(from, kv, state_from));
    fixtures::load(in, to, kv, state_to);
  };
  using kvmeld::slot_reduce, kvmeld::zsmerge, kvmeld::fold, kvmeld::keepkv;
  refuses("expected merge rule of a column (0: sum, 1: max, 2: anchor) 0, got 1",
          [&] { swap(zsmerge{}, zsmerge{.merged_score = slot_reduce::sum}); });
  refuses("expected columns 2, got 8",
          [&] { swap(keepkv{.variant = keepkv::mode::code, .window = 8}, keepkv{}); });
  refuses("floats of memory", [&] { swap(fold{}, fold{.decode = {.queries = 8}}); });
}

TEST_CASE("a stream that fails, and a state ahead of its cache, are refused", "[serialize]") {
  tiny one;
  std::ostringstream out;
  out.setstate(std::ios::badbit);
  refuses("save: expected a stream that takes all bytes",
          [&] { fixtures::save(out, one.policy, one.kv, one.state); });
  one.state[0].extend(3);
  refuses("save: expected a state of at most 1 slots, got 3",
          [&] { (void)saved(one.policy, one.kv, one.state); });
}

TEST_CASE("a cache saved from one layout loads into another", "[serialize]") {
  small one(4);
  std::vector<Eigen::half> keys(36), values(36);
  fixtures::strided_view<Eigen::half> view(
      one.kv.shape(), fixtures::layout<Eigen::half>::head_token_dim(keys.data(), 6, 3),
      fixtures::layout<Eigen::half>::head_dim_token(values.data(), 6, 3));
  auto state = fixtures::make_state(one.policies, view);
  std::istringstream in(one.bytes());
  fixtures::load(in, one.policies, view, state);
  for (index_t h = 0; h < 2; ++h) {
    CHECK(fixtures::bytes_of(view.head(h)) == fixtures::bytes_of(one.kv.head(h)));
  }
  CHECK(saved(one.policies, one.kv, one.state) == [&] {
    std::ostringstream again;
    fixtures::save(again, one.policies, view, state);
    return again.str();
  }());
}

}  // namespace serialize_bytes_test
