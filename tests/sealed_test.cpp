// SPDX-License-Identifier: MIT
// A sealed prefix: what lies behind it is compressed as a head of its own, attention is over all.
#include <catch2/catch.hpp>
#include <cmath>
#include <string>
#include <vector>

#include "support/policies.hpp"
#include "support/sealed_pair.hpp"

namespace sealed_test {

using namespace sealed;

TEST_CASE("behind a seal every policy does what it does on a head of its own", "[seal]") {
  const bool terms = GENERATE(false, true), shared = GENERATE(false, true);
  const auto type = terms == shared ? kvmeld::storage::f32 : kvmeld::storage::q8_0;
  for (const fixtures::example& e : fixtures::every_policy()) {
    CAPTURE(e.name, terms, shared, type);
    const auto spec = terms ? with_terms() : layer_spec;
    const auto goes = [&] {
      try {
        kvmeld::check(e.policy, spec);
        return !shared || (kvmeld::for_shared(e.policy, slots), true);
      } catch (const kvmeld::error&) {
        return false;
      }
    };
    if (!goes()) {
      continue;
    }
    const index_t slack = kvmeld::declared(e.policy).supports_decode() ? 4 : 0;
    const budget b = shared ? budget::shared(slots, slack) : budget{.slots = slots};
    if (e.policy.name() == "ems") {
      CHECK_THROWS_WITH(pair(e.policy, b, spec), Catch::Contains("seal: ems: expected a policy"));
      continue;
    }
    if (e.name == "fold by scores" || (e.name == "fold" && shared)) {
      continue;  // counts tokens: below
    }
    pair p(e.policy, b, spec, type);
    p.prompt(question), p.check();
    CHECK(p.kv.head(0).length() <= prefix + question);
    if (!kvmeld::declared(e.policy).supports_decode()) {
      continue;
    }
    for (index_t t = 0; t < 30; ++t) {
      p.step();
    }
    p.check();
    if (e.name != "full_cache" && !shared) {
      CHECK(p.kv.head(0).length() <= prefix + slots);
    }
  }
}

TEST_CASE("queries of sealed tokens are refused", "[seal][errors]") {
  pair p(kvmeld::h2o{}, {.slots = slots}, layer_spec);
  p.kv.append(p.kv.heads(0, 0), rows_of(question), rows_of(question), question);
  const floats q = queries_of(question + 1);
  CHECK_THROWS_WITH(p.meld.prompt(p.kv.heads(0, 0), kvmeld::queries(q, question + 1, layer_spec)),
                    Catch::Contains("prompt: expected at most 60 queries (the tokens that are "
                                    "not measured yet), got 61"));
}

TEST_CASE("fold counts the tokens behind a seal alone", "[seal][fold]") {
  auto spec = layer_spec;
  spec.rope = {};
  const kvmeld::any_policy_or_peer policy =
      kvmeld::make_policy<kvmeld::any_policy_or_peer>("fold:sinks=0");
  std::vector<floats> kept;
  for (const index_t sealed : {0, prefix, 10 * prefix}) {
    kvmeld::cache kv(spec, {.layers = layers_of, .capacity = 10 * prefix + capacity});
    compressor meld(kv, policy, budget::shared(slots, 4));
    for (index_t l = 0; l < layers_of; ++l) {
      kv.append(kv.heads(l, 0), rows_of(sealed), rows_of(sealed), sealed);
    }
    meld.seal(0, sealed);
    streams::restart();
    for (index_t l = 0; l < layers_of; ++l) {
      const floats q = queries_of(question), k = rows_of(question), v = rows_of(question);
      kv.append(kv.heads(l, 0), k, v, question);
      meld.prompt(kv.heads(l, 0), kvmeld::queries(q, question, spec));
    }
    meld.end_prompt(0);
    for (index_t t = 0; t < 40; ++t) {
      for (index_t l = 0; l < layers_of; ++l) {
        const floats q = queries_of(1), k = rows_of(1), v = rows_of(1);
        floats out(q.size());
        meld.step(kv.heads(l, 0), {q, k, v}, out);
      }
    }
    floats& all = kept.emplace_back();
    for (index_t h = 0; h < kv.heads(); ++h) {
      const auto head = kv.head(h);
      for (index_t s = sealed; s < head.length(); ++s) {
        all.push_back(static_cast<float>(head.position(s) - sealed));
        all.push_back(head.log_mass(s));
        for (index_t i = 0; i < dim; ++i) {
          all.push_back(head.key(s)[i]), all.push_back(head.value(s)[i]);
        }
      }
    }
  }
  CHECK((kept[1] == kept[0]));
  CHECK((kept[2] == kept[0]));
}

TEST_CASE("a layer's window is cut exactly behind a seal", "[seal][windows]") {
  auto spec = layer_spec;
  spec.window = 8;
  for (const index_t tokens : {5, 24}) {
    CAPTURE(tokens);
    kvmeld::cache sealed(spec, {.capacity = 48}), plain(spec, {.capacity = 256});
    kvmeld::compressor one(sealed, kvmeld::h2o{}, budget{.slots = 32});
    const auto k = rows_of(tokens), v = rows_of(tokens);
    sealed.append(sealed.heads(0, 0), k, v, tokens), plain.append(plain.heads(0, 0), k, v, tokens);
    one.seal(0, tokens);
    for (index_t t = 0; t < 40; ++t) {
      const floats q = queries_of(1), key = rows_of(1), value = rows_of(1);
      floats out(q.size()), full(q.size());
      one.step(sealed.heads(0, 0), {q, key, value}, out);
      plain.append(plain.heads(0, 0), key, value, 1);
      for (index_t h = 0; h < kv_heads_of; ++h) {
        kvmeld::attend(plain.head(h), &q[static_cast<std::size_t>(h * group * dim)],
                       &full[static_cast<std::size_t>(h * group * dim)]);
      }
      for (std::size_t i = 0; i < out.size(); ++i) {
        REQUIRE(out[i] == Approx(full[i]).margin(1e-5));
      }
      CHECK(sealed.head(0).length() == tokens + std::min(t + 1, index_t{8}));
    }
  }
}

TEST_CASE("a step that is not finite behind a seal leaves the head as it was", "[seal][errors]") {
  pair p(kvmeld::zsmerge{.residual = 2}, {.slots = slots}, layer_spec);
  p.prompt(question);
  const auto bits = fixtures::bytes_of(p.kv.head(0));
  for (const int bad : {0, 1, 2}) {
    floats q = normal(group * dim), k = normal(dim), v = normal(dim), out(q.size());
    (bad == 0 ? q : bad == 1 ? k : v)[3] = std::nanf("");
    CHECK_THROWS_WITH(p.meld.step(kvmeld::head_range{0, 1}, {q, k, v}, out),
                      Catch::Contains("got NaN or Inf in head 0"));
    CHECK(fixtures::bytes_of(p.kv.head(0)) == bits);
    CHECK(p.kv.head(0).next_position() == prefix + question);
  }
}

TEST_CASE("a cache with a seal shrinks to what is in use and the budget", "[seal]") {
  pair p(kvmeld::h2o{}, {.slots = slots}, layer_spec);
  p.prompt(question);
  CHECK_THROWS_WITH(p.kv.shrink(p.meld, prefix + slots),
                    Catch::Contains("capacity of at least 65"));
  p.kv.shrink(p.meld, prefix + slots + 1);
  for (index_t t = 0; t < 10; ++t) {
    p.step();
  }
  p.check();
  p.meld.clear(0);
  CHECK((p.meld.sealed(0) == 0 && p.kv.head(0).length() == 0));
}

TEST_CASE("rows are behind a seal wherever they lie", "[seal]") {
  // Keys [cell, head, dim] and values [head, dim, cell]; and latent rows [cell, dim].
  for (const bool latent : {false, true}) {
    kvmeld::attention_spec spec = layer_spec;
    spec.rope = latent ? kvmeld::rotary() : spec.rope;
    spec.kv_heads = latent ? 1 : kv_heads_of, spec.value_dim = latent ? dim / 2 : dim;
    const index_t heads = spec.kv_heads;
    floats keys(static_cast<std::size_t>(capacity * heads * dim)), values(keys);
    const kvmeld::rows k(keys, kvmeld::layout::nhd), v(values, kvmeld::layout::hdn);
    kvmeld::strided_cache over(spec, {.capacity = capacity}, k, latent ? k : v);
    kvmeld::cache own(spec, {.capacity = capacity});
    CHECK(over.one_memory() == latent);
    compressor a(over, kvmeld::h2o{}, budget{.slots = slots}),
        b(own, kvmeld::h2o{}, budget{.slots = slots});
    const auto first_numbers = [&](const floats& rows) {
      floats x;
      for (std::size_t i = 0; i < rows.size(); ++i) {
        if (i % dim < static_cast<std::size_t>(spec.value_dim)) {
          x.push_back(rows[i]);
        }
      }
      return x;
    };
    for (index_t t = 0; t < prefix + 2 * slots; ++t) {
      const floats q = normal(heads * group * dim), key = normal(heads * dim),
                   value = latent ? first_numbers(key) : normal(heads * dim);
      floats out(static_cast<std::size_t>(heads * group * spec.value_dim)), same(out);
      const floats given = latent ? floats() : value;
      if (t < prefix) {
        over.append(over.heads(0, 0), key, given, 1), own.append(own.heads(0, 0), key, value, 1);
        continue;
      }
      a.seal(0, prefix), b.seal(0, prefix);
      a.step(over.heads(0, 0), {q, key, given}, out),
          b.step(own.heads(0, 0), {q, key, value}, same);
      REQUIRE(out == same);
    }
    for (index_t h = 0; h < heads; ++h) {
      CHECK(fixtures::bytes_of(over.head(h)) == fixtures::bytes_of(own.head(h)));
      CHECK(over.head(h).length() == prefix + slots);
    }
  }
}

}  // namespace sealed_test
