// SPDX-License-Identifier: MIT
// A request that goes on in another cache: of another storage, capacity or layout.
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/policies/ems.hpp"
#include "kvmeld/policies/fold.hpp"
#include "kvmeld/policies/h2o.hpp"
#include "kvmeld/policies/keepkv.hpp"
#include "support/model.hpp"

namespace moved_requests_test {

using namespace small_model;
using Catch::Contains;
using kvmeld::budget;
using kvmeld::storage;

constexpr index_t tokens = 80, slots = 32, capacity = 96;

/// A token of every head of a layer.
struct one_row {
  std::vector<float> q = normal(kv_heads_of * group * dim), k = normal(kv_heads_of * dim),
                     v = normal(kv_heads_of * dim);
};

/// A prompt whose heads attend unlike one another.
prompt_rows uneven() {
  prompt_rows x(tokens);
  for (std::size_t i = 0; i < x.q[1].size(); ++i) {
    x.q[1][i] *= i / dim % 4 < 2 ? 6.0F : 2.0F;
  }
  return x;
}

/// The heads of a request of the small model.
std::vector<index_t> heads_of(index_t request, index_t requests = requests_of) {
  std::vector<index_t> all;
  for (index_t l = 0; l < layers_of; ++l) {
    for (index_t h = 0; h < kv_heads_of; ++h) {
      all.push_back((l * requests + request) * kv_heads_of + h);
    }
  }
  return all;
}

/// Request 0 of a compressor over floats goes on as request 1 of one over `to`.
template <class P, class Cache>
void move_to(const P& p, Cache& to, float tolerance) {
  model_cache kv(capacity);
  kvmeld::compressor meld(kv, p, budget::shared(slots, 4));
  kvmeld::compressor into(to, p, budget::shared(slots, 4));
  read(meld, kv, uneven(), 0, 40), meld.end_prompt(0);
  into.copy(meld, 0, 1);
  const auto from = heads_of(0), at = heads_of(1, to.requests());
  bool uneven_limits = false;
  std::vector<float> a(kv_heads_of * group * dim), b(a);
  for (index_t step = 0; step < 12; ++step) {
    for (index_t l = 0; l < layers_of; ++l) {
      const one_row x;
      meld.step(kv.heads(l, 0), {x.q, x.k, x.v}, a), into.step(to.heads(l, 1), {x.q, x.k, x.v}, b);
      for (std::size_t i = 0; step == 0 && i < a.size(); ++i) {
        CHECK(b[i] == Approx(a[i]).margin(tolerance));
      }
    }
    for (std::size_t i = 0; i < from.size(); ++i) {
      const budget &own = meld.limit(from[i]), &theirs = into.limit(at[i]);
      uneven_limits = uneven_limits || own.slots != meld.limit(from[0]).slots;
      CHECK((own.slots == theirs.slots && own.trigger == theirs.trigger));
      CHECK(kv.head(from[i]).length() == to.head(at[i]).length());
      CHECK(kv.head(from[i]).next_position() == to.head(at[i]).next_position());
      if (tolerance == 0) {
        CHECK(same_head(kv.head(from[i]), to.head(at[i])));
        CHECK(same_state(meld.state(from[i]), into.state(at[i])));
      }
    }
  }
  CHECK(uneven_limits);
}

template <class P>
void move_everywhere(const P& p) {
  CAPTURE(p.name());
  using kvmeld::storage_pair;
  for (const auto& [type, tolerance] : {std::pair{storage_pair(storage::f32), 0.0F},
                                        {storage_pair(storage::f16), 0.02F},
                                        {storage_pair(storage::bf16), 0.1F},
                                        {storage_pair(storage::q8_0), 0.1F},
                                        {storage_pair(storage::q8_0, storage::q4_0), 0.7F},
                                        {storage_pair(storage::q8_0, storage::q4_0, 16), 0.7F},
                                        {storage_pair(storage::k8, storage::q4_0), 0.7F},
                                        {storage_pair(storage::k4, storage::q4_0, 16), 0.7F}}) {
    kvmeld::cache to(layer_spec, {.layers = layers_of,
                                  .requests = 3,
                                  .capacity = capacity - 3,
                                  .keys = type.keys,
                                  .values = type.values,
                                  .newest = type.newest});
    move_to(p, to, tolerance);
  }
  const kvmeld::cache_extents extents{.layers = layers_of, .requests = 2, .capacity = 128};
  std::vector<float> k(layers_of * 2 * 128 * kv_heads_of * dim), v(k);
  kvmeld::strided_cache strided(layer_spec, extents, kvmeld::rows(k, kvmeld::layout::nhd),
                                kvmeld::rows(v, kvmeld::layout::hdn));
  move_to(p, strided, 0);
  std::vector<index_t> table;  // [requests, 16], of 8 slots each
  for (index_t i = 0; i < 2 * 16; ++i) {
    table.push_back(2 * 16 - 1 - i);
  }
  kvmeld::paged_cache paged(layer_spec, extents, kvmeld::rows(k, kvmeld::layout::pages_nhd),
                            kvmeld::rows(v, kvmeld::layout::pages_nhd),
                            {.pages = table, .slots = 8});
  move_to(p, paged, 0);
}

TEST_CASE("copy: a request goes on in another storage, capacity or layout, with its limits") {
  move_everywhere(kvmeld::h2o{});
  move_everywhere(kvmeld::fold{});
  move_everywhere(kvmeld::keepkv{});
}

TEST_CASE("copy: a seal goes along") {
  model_cache kv(capacity);
  kvmeld::compressor meld(kv, kvmeld::h2o{}, budget{.slots = slots});
  kvmeld::cache small(layer_spec, {.layers = layers_of,
                                   .requests = 1,
                                   .capacity = 64,
                                   .keys = storage::q8_0,
                                   .values = storage::q8_0});
  kvmeld::compressor into(small, kvmeld::h2o{}, budget{.slots = slots});
  for (index_t l = 0; l < layers_of; ++l) {
    uneven().append(kv, l, 0, 0, 16);
  }
  meld.seal(0, 16);
  read(meld, kv, uneven(), 0, tokens), meld.end_prompt(0);
  into.copy(meld, 0, 0);
  for (const index_t h : heads_of(0, 1)) {
    CHECK((into.sealed(h) == 16 && small.head(h).length() == 16 + slots));
  }
}

TEST_CASE("set_state: a head that shares a budget is held to the slots that it has") {
  model_cache kv(capacity);
  kvmeld::compressor meld(kv, kvmeld::h2o{}, budget::shared(slots));
  read(meld, kv, uneven(), 0, tokens), meld.end_prompt(0);
  kvmeld::cache to(layer_spec, {.layers = layers_of, .requests = requests_of, .capacity = 88});
  kvmeld::compressor into(to, kvmeld::h2o{}, budget::shared(slots));
  for (const index_t h : heads_of(0)) {
    auto state = kvmeld::make_head_state(into.policy_of(h), to.head(h));
    kvmeld::copy(kv.head(h), meld.state(h), to.head(h), state);
    into.set_state(h, std::move(state));
    CHECK(into.limit(h).slots == meld.limit(h).slots);
  }
}

/// Refused, with nothing changed.
template <class Into, class From, class Cache>
void refuses(Into& into, const From& from, Cache& to, const std::string& message) {
  CAPTURE(message);
  std::vector<index_t> before, after;
  for (index_t h = 0; h < to.heads(); ++h) {
    before.push_back(to.head(h).length()), before.push_back(into.limit(h).slots);
  }
  CHECK_THROWS_WITH(into.copy(from, 0, 0), Contains(message));
  for (index_t h = 0; h < to.heads(); ++h) {
    after.push_back(to.head(h).length()), after.push_back(into.limit(h).slots);
  }
  CHECK(before == after);
}

TEST_CASE("copy: another model, policy, or too little room is refused, with nothing changed") {
  model_cache kv(capacity);
  kvmeld::compressor meld(kv, kvmeld::h2o{}, budget::shared(slots));
  read(meld, kv, uneven(), 0, tokens), meld.end_prompt(0);
  const auto into = [&](const kvmeld::attention_spec& spec, index_t layers, index_t room,
                        const kvmeld::h2o& p, const budget& b, const std::string& message) {
    kvmeld::cache to(spec, {.layers = layers, .requests = 1, .capacity = room});
    kvmeld::compressor other(to, p, b);
    refuses(other, meld, to, message);
  };
  kvmeld::attention_spec spec = layer_spec;
  spec.soft_cap = 30;
  const budget shared = budget::shared(slots);
  into(spec, layers_of, capacity, {}, shared, "copy: expected the attention of head 0");
  spec = layer_spec;
  spec.rope = kvmeld::rotary::halves(20'000);
  into(spec, layers_of, capacity, {}, shared, "copy: expected the attention of head 0");
  into(layer_spec, 3, capacity, {}, shared, "copy: expected 6 heads per request, got 4");
  into(layer_spec, layers_of, capacity, {.recent = 0.25F}, shared,
       "copy: expected a request of h2o with the same parameters");
  into(layer_spec, layers_of, slots + 1, {}, shared, "copy: expected a capacity of at least ");
  into(layer_spec, layers_of, capacity, {}, budget::same_tokens(slots),
       "copy: expected requests whose layers keep the same tokens in both or in none");
  // A prompt or a draft in between, on this side or the other.
  const prompt_rows more(4);
  for (index_t l = 0; l < layers_of; ++l) {
    more.append(kv, l, 0, 0, 4);
    meld.prompt(kv.heads(l, 0), kvmeld::queries(more.queries(l, 0, 4), 4, layer_spec));
  }
  into(layer_spec, layers_of, capacity, {}, shared, "copy: expected end_prompt first");
  // A memory that is laid out for a capacity.
  kvmeld::compressor of_ems(kv, kvmeld::ems{.window = 8}, budget{.slots = slots});
  model_cache larger(capacity + 8);
  kvmeld::compressor other(larger, kvmeld::ems{.window = 8}, budget{.slots = slots});
  refuses(other, of_ems, larger, "the memory of ems depends on the capacity");
}

}  // namespace moved_requests_test
