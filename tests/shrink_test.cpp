// SPDX-License-Identifier: MIT
// A capacity that is lowered after a prompt was compressed.
#include <catch2/catch.hpp>
#include <string>

#include "kvmeld/compressor.hpp"
#include "support/reused.hpp"

namespace shrink_test {

using fixtures::example;
using fixtures::refuses;
using fixtures::text;
using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::budget;
using kvmeld::errc;
using kvmeld::index_t;

/// A cache of two requests, of which the second has a prompt.
struct model {
  static constexpr index_t slots = 30, capacity = 100;

  const text& x;
  fixtures::cache_shape shape{
      .heads = 1, .group = text::group, .dim = text::dim, .capacity = capacity};
  kvmeld::cache kv{shape.spec(), {.requests = 2, .capacity = capacity}};
  kvmeld::compressor<any_policy> meld;

  model(const any_policy& p, const text& of)
      : x(of), meld(kv, p, budget{std::max(slots, kvmeld::declared(p).min_budget())}) {
    const auto heads = kv.heads(0, 1);
    kv.append(heads, x.at(x.k, 0, x.dim, x.tokens), x.at(x.v, 0, x.dim, x.tokens), x.tokens);
    meld.prompt(heads,
                kvmeld::queries(x.at(x.q, 0, x.group * x.dim, x.tokens), x.tokens, kv.spec()));
  }
  /// The outputs of its steps, and what the head holds then.
  std::vector<float> decode() {
    std::vector<float> all, out(x.group * x.dim);
    for (index_t t = x.tokens;
         t < x.tokens + x.steps && kvmeld::declared(meld.policy_of(1)).supports_decode(); ++t) {
      meld.step(kv.heads(0, 1),
                {x.at(x.q, t, x.group * x.dim), x.at(x.k, t, x.dim), x.at(x.v, t, x.dim)}, out);
      all.insert(all.end(), out.begin(), out.end());
    }
    const auto held = fixtures::bytes_of(kv.head(1));
    all.insert(all.end(), held.begin(), held.end());
    return all;
  }
};

TEST_CASE("a cache that was shrunk with its compressor goes on as it was", "[reuse]") {
  const text x;
  for (const example& e : fixtures::policies()) {
    INFO(e.name);
    model whole(e.policy, x), small(e.policy, x);
    refuses(errc::invalid_argument, "shrink: expected end_prompt first",
            [&] { small.kv.shrink(small.meld, 90); });
    whole.meld.end_prompt(1), small.meld.end_prompt(1);
    const bool bounded = kvmeld::declared(e.policy).evicts();
    const index_t least = bounded
                              ? std::max(model::slots, kvmeld::declared(e.policy).min_budget()) +
                                    (kvmeld::declared(e.policy).supports_decode() ? 1 : 0)
                              : text::tokens;
    refuses(errc::no_capacity,
            "shrink: expected a capacity of at least " + std::to_string(least) + " slots",
            [&] { small.kv.shrink(small.meld, least - 1); });
    refuses(errc::invalid_argument, "shrink: expected a capacity of 1 to 100 slots, got 101",
            [&] { small.kv.shrink(small.meld, 101); });
    CHECK(small.kv.capacity() == 100);
    const index_t capacity = bounded ? least : 90;
    small.kv.shrink(small.meld, capacity);
    CHECK((small.kv.capacity() == capacity && small.kv.head(1).capacity() == capacity));
    CHECK(small.decode() == whole.decode());
  }
}

TEST_CASE("another cache than the one that is compressed is not shrunk", "[reuse][errors]") {
  const text x;
  model one(kvmeld::h2o{}, x), other(kvmeld::h2o{}, x);
  one.meld.end_prompt(1), other.meld.end_prompt(1);
  refuses(errc::invalid_argument, "shrink: expected the cache that is compressed, got another",
          [&] { other.kv.shrink(one.meld, 90); });
  CHECK((one.kv.capacity() == 100 && other.kv.capacity() == 100));
  std::vector<float> out(x.q.size());
  one.meld.draft(one.kv.heads(0, 1),
                 {x.at(x.q, 0, x.group * x.dim, 2), x.at(x.k, 0, x.dim, 2), x.at(x.v, 0, x.dim, 2)},
                 std::span(out).first(static_cast<std::size_t>(2 * x.group * x.dim)), 2);
  refuses(errc::invalid_argument, "shrink: expected accept first, got a draft",
          [&] { one.kv.shrink(one.meld, 90); });
}

}  // namespace shrink_test
