// SPDX-License-Identifier: MIT
// Seals that cannot be: refused, with nothing changed.
#include <catch2/catch.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "kvmeld/detail/bytes.hpp"
#include "kvmeld/peers.hpp"
#include "support/shared_prefix.hpp"

namespace sealed_errors_test {

using namespace shared_prefix;
using compressor = kvmeld::compressor<kvmeld::any_policy_or_peer>;

TEST_CASE("a seal that cannot be is refused, and nothing changes", "[seal][errors]") {
  engine e(true, kvmeld::tova{.sinks = 1}, {.slots = 20});
  e.append(0, each_layer(30));
  const auto refuses = [&](index_t r, index_t n, const std::string& message,
                           kvmeld::errc code = errc::invalid_argument) {
    const floats before = e.bytes(r);
    const index_t sealed = e.meld.sealed(e.kv.heads(0, r)[0]);
    CHECK_THROWS_WITH(e.meld.seal(r, n), Catch::Contains("seal: ") && Catch::Contains(message));
    try {
      e.meld.seal(r, n);
    } catch (const kvmeld::error& refused) {
      CHECK(refused.code() == code);
    }
    CHECK((e.bytes(r) == before && e.meld.sealed(e.kv.heads(0, r)[0]) == sealed));
  };
  refuses(0, 31, "expected 0 to 30 tokens (those appended), got 31");
  refuses(0, -1, "expected 0 to 30 tokens");
  refuses(0, 10, "expected whole pages of 4 slots, got 10 slots in head 0");
  CHECK_THROWS_WITH(e.meld.seal(requests, 4),
                    Catch::Contains("seal: expected a request of 0 to 3"));
  const auto q = queries_of(30);
  e.meld.prompt(e.kv.heads(0, 0), kvmeld::queries(q, 30, spec));
  refuses(0, 8, "expected end_prompt first");
  for (index_t l = 1; l < layers; ++l) {
    e.meld.prompt(e.kv.heads(l, 0), kvmeld::queries(q, 30, spec));
  }
  e.meld.end_prompt(0);  // 20 slots
  refuses(0, 29, "expected the slots of the first 29 tokens before all others, got token");
  (void)e.step(0, each_layer(1));
  refuses(0, 30, "expected the slots of the first 30 tokens before all others, got token");
  e.meld.seal(0, 31);  // all that there is
  CHECK(e.meld.sealed(0) == 20);
  refuses(0, 8, "expected at least the 20 slots that are sealed already in head 0");
  CHECK_NOTHROW(e.meld.seal(0, 31));
  e.append(1, each_layer(12)), e.meld.seal(1, 4);
  (void)e.step(1, each_layer(1));
  refuses(1, 8, "expected tokens after the first 8 that were not measured yet, got 5 in head 2");
  e.append(2, each_layer(48));
  refuses(2, 48,
          "expected a capacity of at least 69 slots (sealed, budget and the new token), got 64",
          errc::no_capacity);
  e.grow(3, 2);
  floats out(queries_of(1).size());
  const tokens t(1);
  e.meld.draft(e.kv.heads(0, 3), {t.q, t.k, t.v}, out, 1);
  CHECK_THROWS_WITH(e.meld.seal(3, 0), Catch::Contains("expected accept first"));
  engine ems(true, kvmeld::ems{.window = 4}, {.slots = 20});
  ems.append(0, each_layer(8));
  CHECK_NOTHROW(ems.meld.seal(0, 0));
  try {
    ems.meld.seal(0, 8);
    FAIL("a policy that keeps numbers of all slots was taken");
  } catch (const kvmeld::error& refused) {
    CHECK(refused.code() == errc::unsupported);
    CHECK_THAT(refused.what(),
               Catch::Contains("seal: ems: expected a policy that can leave slots"));
  }
}

TEST_CASE("a saved seal that cannot be is refused", "[seal][errors]") {
  engine e(true, kvmeld::h2o{}, {.slots = 20});
  e.append(0, each_layer(12)), e.meld.seal(0, 12);
  std::stringstream file;
  e.meld.save(file, 0);
  const auto loads = [&](index_t sealed, const std::string& message) {
    std::string bytes = file.str();
    std::stringstream limits;
    kvmeld::detail::byte_writer to(limits);
    for (index_t i = 0; i < layers * kv_heads; ++i) {
      to.put(-sealed), to.put(index_t{20}), to.put(index_t{0});
    }
    to.finish();
    const auto own = limits.str();
    bytes.replace(0, own.size(), own);
    std::istringstream in(bytes);
    e.grow(1, 12);
    if (message.empty()) {
      e.meld.load(in, 1);
    } else {
      CHECK_THROWS_WITH(e.meld.load(in, 1), Catch::Contains(message));
      CHECK((e.head(0, 1).length() == 0 && e.meld.sealed(e.kv.heads(0, 1)[0]) == 0));
    }
  };
  loads(
      16,
      "load: expected at most 12 sealed and pinned slots, the former in whole pages of 4, got 16");
  loads(
      10,
      "load: expected at most 12 sealed and pinned slots, the former in whole pages of 4, got 10");
  loads(65, "load: expected at most 64 sealed slots, got 65");
  loads(8, "");
  CHECK(e.meld.sealed(e.kv.heads(0, 1)[0]) == 8);
}

TEST_CASE("what leaves no room behind a seal is refused by load, as by seal", "[seal][errors]") {
  kvmeld::cache kv(spec, {.capacity = 40});
  compressor saves(kv, kvmeld::h2o{}, budget{.slots = 8}),
      loads(kv, kvmeld::h2o{}, budget{.slots = 20});
  kv.append(kv.heads(0, 0), rows_of(24), rows_of(24), 24);
  saves.seal(0, 24);
  CHECK_THROWS_WITH(loads.seal(0, 24), Catch::Contains("seal: expected a capacity of at least 45"));
  std::stringstream file;
  saves.save(file, 0);
  CHECK_THROWS_WITH(loads.load(file, 0),
                    Catch::Contains("load: expected a capacity of at least 45 slots"));
  CHECK(loads.sealed(0) == 0);
}

TEST_CASE("a head cut below its seal, or given a state of all its slots, is refused",
          "[seal][errors]") {
  for (const budget& b : {budget{.slots = 10}, budget::shared(10)}) {
    kvmeld::cache kv(spec, {.capacity = 64}), whole(spec, {.capacity = 64});
    compressor meld(kv, kvmeld::h2o{}, b), other(whole, kvmeld::h2o{}, b);
    for (kvmeld::cache* const c : {&kv, &whole}) {
      c->append(c->heads(0, 0), rows_of(8), rows_of(8), 8);
    }
    meld.seal(0, 8);
    kv.append(kv.heads(0, 0), rows_of(4), rows_of(4), 4);
    const floats q = queries_of(8);
    other.prompt(whole.heads(0, 0), kvmeld::queries(q, 8, spec));
    other.end_prompt(0);
    CHECK_THROWS_WITH(
        meld.set_state(0, other.state(0)),
        Catch::Contains("set_state: expected a state of at most 4 slots, got one of 8"));
    meld.prompt(kv.heads(0, 0), kvmeld::queries(queries_of(4), 4, spec));
    for (index_t h = 0; h < kv.heads(); ++h) {
      kv.head(h).restore(3, 3);
    }
    CHECK_THROWS_WITH(meld.end_prompt(0), Catch::Contains("end_prompt: expected head 0 as it was"));
  }
}

TEST_CASE("what an engine does not give is refused where it seals", "[seal][errors]") {
  auto with_sinks = spec;
  with_sinks.sink_logits = {0.5F, -1, 2, 0};
  kvmeld::cache kv(with_sinks, {.capacity = 64});
  kv.append(kv.heads(0, 0), rows_of(8), rows_of(8), 8);
  compressor meld(kv, kvmeld::h2o{}, budget{.slots = 20}, {.probabilities = true}),
      reads_none(kv, kvmeld::fold{}, budget{.slots = 40}, {.query = true});
  CHECK_THROWS_WITH(meld.seal(0, 8),
                    Catch::Contains("seal: expected the step's log_sum_exp behind a "
                                    "seal where attention has sinks (h2o"));
  CHECK_NOTHROW(reads_none.seal(0, 8));
}

}  // namespace sealed_errors_test
