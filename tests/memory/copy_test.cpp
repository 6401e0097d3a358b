// SPDX-License-Identifier: MIT
// Heads copied into caches of other capacities.
#include <catch2/catch.hpp>

#include "support/reused.hpp"

namespace copy_test {

using fixtures::everything;
using fixtures::heads;
using fixtures::policies;
using fixtures::refuses;
using fixtures::text;
using kvmeld::errc;
using kvmeld::index_t;

TEST_CASE("a head is copied to fewer slots, and to more, where its memory allows it", "[reuse]") {
  const text x;
  for (const auto& example : policies()) {
    INFO(example.name);
    heads one(example.policy);
    one.prompt(0, x);
    const auto before = everything(one.kv, one.state);
    for (const index_t capacity : {one.kv.head(0).length() + 1, 64, 100, 300}) {
      if (capacity <= one.kv.head(0).length()) {
        continue;
      }
      CAPTURE(capacity);
      heads other(example.policy, 1, capacity);
      const auto copy_there = [&] {
        copy(one.kv.head(0), one.state[0], other.kv.head(0), other.state[0]);
      };
      if (example.policy.name() == "ems" && capacity != 100) {
        refuses(errc::invalid_argument, "the memory of ems depends on the capacity", copy_there);
        continue;
      }
      copy_there();
      CHECK(everything(other.kv, other.state) == before);
      CHECK(other.state[0].observed() == one.state[0].observed());
      // and back, to decode on beside one that stayed
      heads back(example.policy), stayed(example.policy);
      copy(other.kv.head(0), other.state[0], back.kv.head(0), back.state[0]);
      stayed.prompt(0, x);
      CHECK(back.decode(0, x, 0, 9) == stayed.decode(0, x, 0, 9));
      if (capacity > one.kv.head(0).length() + 9) {  // it decodes where it is, too
        heads again(example.policy);
        again.prompt(0, x);
        CHECK(other.decode(0, x, 0, 9) == again.decode(0, x, 0, 9));
      }
    }
  }
}

TEST_CASE("what a policy says of its memory is what copies go by", "[reuse]") {
  const auto follows = [](const auto& p) {
    return kvmeld::declared(p).memory_follows_capacity(8, 2, 100);
  };
  for (const auto& example : policies()) {
    INFO(example.name);
    CHECK(follows(example.policy) == (example.policy.name() == "ems"));
  }
  CHECK(follows(kvmeld::ems{.table = 50}));
}

TEST_CASE("a head copied onto itself stays as it is", "[copy]") {
  fixtures::cache<float> kv({.heads = 1, .dim = 8, .capacity = 9});
  const auto rows = fixtures::normal(5 * 8);
  for (kvmeld::index_t t = 0; t < 5; ++t) {
    kv.head(0).push(rows.data() + t * 8, rows.data() + t * 8);
  }
  const auto before = fixtures::bytes_of(kv.head(0));
  kvmeld::detail::copy_slots(kv.head(0), kv.head(0));
  CHECK((kv.head(0).length() == 5 && fixtures::bytes_of(kv.head(0)) == before));
}

}  // namespace copy_test
