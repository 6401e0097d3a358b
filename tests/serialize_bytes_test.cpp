// SPDX-License-Identifier: MIT
// The bytes of a saved cache: the same on every machine, and refused when they are not whole.
#include <catch2/catch.hpp>
#include <functional>

#include "support/fixtures.hpp"
#include "support/saved.hpp"

namespace serialize_bytes_test {

using fixtures::everything;
using fixtures::index_t;
using fixtures::saved;
using fixtures::small;
using fixtures::words;
using kvmeld::any_policy;

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
    1,    0,    0,    0,                            // 8: version
    1,    0,    0,    0,                            // 12: half
    1,    0,    0,    0,                            // 16: heads
    1,    0,    0,    0,                            // 20: group
    2,    0,    0,    0,                            // 24: dim
    3,    0,    0,    0,                            // 28: capacity
    0x00, 0x00, 0x00, 0x3F,                         // 32: scale
    6,    0,    0,    0,                            // 36: the name's length
    's',  'n',  'a',  'p',  'k',  'v',              // 40
    2,    0,    0,    0,                            // 46: columns
    0,    0,    0,    0,    0,    0,   0,    0,     // 50: fold, initial
    0,    0,    0,    0,    0,    0,   0,    0,     // 58
    1,    0,    0,    0,    0,    0,   0,    0,     // 66: floats of memory
    1,    0,    0,    0,                            // 74: length
    1,    0,    0,    0,                            // 78: measured
    2,    0,    0,    0,                            // 82: seen
    0x9A, 0x78, 0x56, 0x34, 0x12, 0,   0,    0,     // 86: observed
    0x00, 0x3C, 0x00, 0xC0,                         // 94: key
    0x00, 0x42, 0x00, 0x44,                         // 98: value
    0x00, 0x00, 0x20, 0x40,                         // 102: log-mass
    1,    0,    0,    0,                            // 106: position
    0x00, 0x00, 0x00, 0x41,                         // 110: first column
    0x00, 0x00, 0x80, 0xBE,                         // 114: second column
    0x01, 0x00, 0xA0, 0x7F,                         // 118: memory
    0x78, 0xBC, 0x31, 0x46,                         // 122: CRC-32, from another program
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
  refuses("load: expected 28 bytes after the first 94, got 3 (truncated)",
          [] { tiny().load(tiny_bytes().substr(0, 97)); });
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
      {8, 2, "expected version 1, got 2"},
      {8, 0, "expected version 1, got 0"},
      {12, 0, "expected scalar (0: float, 1: half, 2: bfloat16, 3: q8_0, 4: q4_0) 1, got 0"},
      {16, 2, "expected heads 1, got 2"},
      {20, 0xFFFFFFFFU, "expected group 1, got -1"},
      {24, 4096, "expected dim 2, got 4096"},
      {28, 0x7FFFFFFFU, "expected capacity 3, got 2147483647"},
      {32, 0x3E800000U, "expected scale 0.5, got 0.25"},
      {36, 0xFFFFFFFFU, "name of at most 256 bytes, got 4294967295"},
      {36, 5, "expected policy snapkv, got snapk"},
      {40, 0x70616E53U, "expected policy snapkv, got Snapkv"},
      {46, 3, "expected columns 2, got 3"},
      {50, 1, "expected merge rule of a column (0: sum, 1: max, 2: anchor) 0, got 1"},
      {62, 0x3F800000U, "expected initial number of a column 0, got 1"},
      {66, 2, "expected floats of memory 1, got 2"},
      {70, 1, "expected floats of memory 1, got 4294967297"},
      {74, 4, "expected a length of 0 to 3 slots, got 4"},
      {74, 0xFFFFFFFFU, "expected a length of 0 to 3 slots, got -1"},
      {74, 0x7FFFFFFFU, "expected a length of 0 to 3 slots, got 2147483647"},
      {78, 2, "expected 0 to 1 slots with columns, got 2"},
      {78, 0x80000000U, "expected 0 to 1 slots with columns, got -2147483648"},
      {82, 0, "expected at least 1 tokens in total, got 0"},
      {90, 0x80000000U, "expected at least 0 observed queries, got -"},
      {74, 2, " bytes after the first "},  // a slot more than there are bytes
  };
  tiny one;
  const words before = everything(one.kv, one.state);
  for (const bad& row : table) {
    refuses(row.message, [&] { one.load(patched(tiny_bytes(), row.offset, row.word)); });
    CHECK(everything(one.kv, one.state) == before);
  }
  CHECK_NOTHROW(one.load(patched(tiny_bytes(), 102, 0x3F800000U)));
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
