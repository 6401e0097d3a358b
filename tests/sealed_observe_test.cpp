// SPDX-License-Identifier: MIT
// A sealed prefix under an engine's own attention.
#include <algorithm>  // std::ranges::sort
#include <catch2/catch.hpp>
#include <string_view>
#include <vector>

#include "kvmeld/peers.hpp"
#include "support/sealed_pair.hpp"

namespace sealed_observe_test {

using namespace sealed;

/// Every slot behind the seal with its numbers, by position: plans and removals order them
/// otherwise.
std::vector<floats> by_position(const compressor& meld, kvmeld::cache& kv, index_t h) {
  std::vector<floats> all;
  const auto head = kv.head(h);
  const floats rows = from(head, meld.sealed(h));
  for (index_t s = meld.sealed(h), at = 0; s < head.length(); ++s, at += 2 * dim + 2) {
    floats& slot = all.emplace_back(floats{static_cast<float>(head.position(s))});
    slot.insert(slot.end(), rows.begin() + at, rows.begin() + at + 2 * dim + 2);
    for (index_t c = 0; c < meld.state(h).slot_stats(); ++c) {
      slot.push_back(meld.state(h).column(c)[static_cast<std::size_t>(s - meld.sealed(h))]);
    }
  }
  std::ranges::sort(all);
  return all;
}

TEST_CASE("an engine's own attention over all slots is observed as within those behind a seal",
          "[seal][observe]") {
  const auto spec = with_terms();
  for (const char* name : {"h2o", "keepkv", "roco", "fold", "scissorhands", "zsmerge"}) {
    CAPTURE(name);
    pair p(kvmeld::make_policy<kvmeld::any_policy_or_peer>(name), {.slots = slots}, spec);
    kvmeld::cache kv(spec, {.layers = layers_of, .capacity = capacity});
    compressor observed(kv, kvmeld::make_policy<kvmeld::any_policy_or_peer>(name),
                        budget{.slots = slots});
    const auto q = queries_of(question), k = rows_of(question), v = rows_of(question);
    for (index_t h = 0; h < kv.heads(); ++h) {
      for (index_t s = 0; s < prefix; ++s) {
        float key[dim], value[dim];
        kvmeld::to_floats(p.kv.head(h).key(s), dim, key);
        kvmeld::to_floats(p.kv.head(h).value(s), dim, value);
        kv.head(h).push(key, value);
      }
    }
    observed.seal(0, prefix);
    for (auto* one : {&p.meld, &observed}) {
      kvmeld::cache& of = one == &p.meld ? p.kv : kv;
      for (index_t l = 0; l < layers_of; ++l) {
        of.append(of.heads(l, 0), k, v, question);
        one->prompt(of.heads(l, 0), kvmeld::queries(q, question, spec));
      }
      one->end_prompt(0);
    }
    for (index_t t = 0; t < 30; ++t) {
      const floats x = queries_of(1), key = rows_of(1), value = rows_of(1);
      for (index_t l = 0; l < layers_of; ++l) {
        floats out(x.size()), lse, probabilities;
        p.meld.step(p.kv.heads(l, 0), {x, key, value}, out);
        kv.append(kv.heads(l, 0), key, value, 1);
        for (index_t h = 0; h < kv_heads_of; ++h) {
          const auto seen = oracle::attend(
              fixtures::to_oracle(kv.head(l * kv_heads_of + h), h),
              fixtures::to_mat(&x[static_cast<std::size_t>(h * group * dim)], group, dim));
          for (index_t g = 0; g < group; ++g) {
            const auto i = static_cast<std::size_t>(g);
            lse.push_back(static_cast<float>(seen.lse[i]));
            for (const double a : seen.probabilities[i]) {
              probabilities.push_back(static_cast<float>(a));
            }
          }
        }
        if (t == 0 && std::string_view(name) != "fold") {  // which needs neither
          CHECK_THROWS_WITH(
              observed.observe(kv.heads(l, 0), {.probabilities = probabilities, .query = x}),
              Catch::Contains("log_sum_exp"));
        }
        const bool none = std::string_view(name) == "fold" && t % 2 == 0;
        observed.observe(
            kv.heads(l, 0),
            {.probabilities = probabilities, .log_sum_exp = none ? floats() : lse, .query = x});
        observed.compress(kv.heads(l, 0));
      }
      for (index_t h = 0; h < kv.heads(); ++h) {
        const auto a = by_position(observed, kv, h), b = by_position(p.meld, p.kv, h);
        REQUIRE(a.size() == b.size());
        for (std::size_t i = 0; i < a.size(); ++i) {
          REQUIRE(a[i].size() == b[i].size());
          for (std::size_t j = 0; j < a[i].size(); ++j) {
            REQUIRE(a[i][j] == Approx(b[i][j]).epsilon(1e-3).margin(1e-4));
          }
        }
      }
    }
  }
}

}  // namespace sealed_observe_test
