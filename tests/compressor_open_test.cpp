// SPDX-License-Identifier: MIT
// What is open of a request: a prompt, a draft, a token that not every layer has. Every call that
// would go on past it is refused, and nothing has changed after it.
#include <catch2/catch.hpp>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/policies/h2o.hpp"
#include "support/random.hpp"

namespace compressor_open_test {

using kvmeld::budget, kvmeld::index_t;
using floats = std::vector<float>;

inline constexpr index_t layers = 2, heads = 2, group = 2, dim = 8, tokens = 30;

floats normal(index_t n) {
  std::normal_distribution<float> gauss;
  floats x(static_cast<std::size_t>(n));
  for (float& e : x) {
    e = gauss(streams::floats);
  }
  return x;
}

/// A token's rows of a layer, or several.
struct rows {
  floats q, k, v, out;
  explicit rows(index_t n)
      : q(normal(n * heads * group * dim)),
        k(normal(n * heads * dim)),
        v(normal(n * heads * dim)),
        out(q.size()) {}
};

struct engine {
  kvmeld::attention_spec spec{.kv_heads = heads, .group = group, .key_dim = dim};
  kvmeld::cache kv{spec, {.layers = layers, .requests = 2, .capacity = 64}};
  kvmeld::compressor<kvmeld::h2o> meld;

  explicit engine(const budget& b = {.slots = 20, .trigger = 40}) : meld(kv, kvmeld::h2o{}, b) {}

  auto at(index_t layer, index_t request = 0) { return kv.heads(layer, request); }
  void append(index_t layer, index_t n, index_t request = 0) {
    const rows x(n);
    kv.append(at(layer, request), x.k, x.v, n);
  }
  void measure(index_t layer, index_t n) {
    append(layer, n);
    meld.prompt(at(layer), kvmeld::queries(normal(n * heads * group * dim), n, spec));
  }
  void prompt() {
    for (index_t l = 0; l < layers; ++l) {
      measure(l, tokens);
    }
    meld.end_prompt(0);
  }
  void step(index_t layer, index_t request = 0) {
    rows x(1);
    meld.step(at(layer, request), {x.q, x.k, x.v}, x.out);
  }
  void draft(index_t layer, index_t n) {
    rows x(n);
    meld.draft(at(layer), {x.q, x.k, x.v}, x.out, n);
  }
  void observe(index_t layer) {
    const auto length = static_cast<std::size_t>(kv.head(at(layer)[0]).length());
    const floats p(heads * group * length, 1.0F / static_cast<float>(length));
    meld.observe(at(layer), {.probabilities = p});
  }
  floats everything() {
    floats all;
    for (index_t h = 0; h < kv.heads(); ++h) {
      const auto head = kv.head(h);
      for (index_t s = 0; s < head.length(); ++s) {
        for (index_t i = 0; i < dim; ++i) {
          all.push_back(head.key(s)[i]), all.push_back(head.value(s)[i]);
        }
        all.push_back(static_cast<float>(head.position(s)));
      }
      all.push_back(static_cast<float>(head.next_position()));
      const auto scores = meld.state(h).column(0);
      all.insert(all.end(), scores.begin(), scores.end());
    }
    return all;
  }
  void refuses(const std::string& message, const std::function<void()>& call) {
    CAPTURE(message);
    const floats before = everything();
    CHECK_THROWS_WITH(call(), Catch::Contains(message));
    CHECK(everything() == before);
  }
};

TEST_CASE("a draft of a request refuses every call on it until accept", "[open][errors]") {
  engine e, twin;
  for (engine* const one : {&e, &twin}) {
    streams::floats.seed(7);
    one->prompt(), one->meld.copy(0, 1);
    one->draft(0, 4), one->draft(1, 4);
  }
  const auto refused = [&](const char* call, const std::function<void()>& f) {
    e.refuses(std::string(call) + ": expected accept first, got a draft", f);
  };
  std::stringstream file;
  const rows x(1);
  const auto state = e.meld.state(0);
  refused("append", [&] { e.append(0, 1); });
  refused("append", [&] { e.append(1, 1); });
  refused("commit", [&] { e.kv.commit(e.at(0), 1); });
  refused("push", [&] { e.kv.head(0).push(x.k.data(), x.v.data()); });
  refused("prompt",
          [&] { e.meld.prompt(e.at(0), kvmeld::queries(normal(heads * group * dim), 1, e.spec)); });
  refused("end_prompt", [&] { e.meld.end_prompt(0); });
  refused("compress", [&] { e.meld.compress(e.at(0)); });
  refused("observe", [&] { e.observe(0); });
  refused("step", [&] { e.step(0); });
  e.refuses("draft: expected accept first, got a draft of head 0", [&] { e.draft(0, 1); });
  e.refuses("attend: expected accept first, got a draft of head 0", [&] {
    rows y(1);
    e.meld.attend(e.at(0), {y.q, y.k, y.v}, y.out, 1);
  });
  refused("attend", [&] {
    rows y(1);
    e.meld.attend(e.at(1), {y.q, y.k, y.v}, y.out, 1);
  });
  refused("seal", [&] { e.meld.seal(0, 1); });
  refused("save", [&] { e.meld.save(file, 0); });
  refused("copy", [&] { e.meld.copy(0, 1); });
  refused("shrink", [&] { e.kv.shrink(e.meld, 50); });
  refused("set_state", [&] { e.meld.set_state(0, state); });
  CHECK_NOTHROW(e.append(0, 1, 1));  // of the other request
  e.meld.accept(0, 2), twin.meld.accept(0, 2);
  for (index_t l = 0; l < layers; ++l) {
    for (index_t h : {e.at(l)[0], e.at(l)[1]}) {
      CHECK(e.kv.head(h).next_position() == tokens + 2);
      CHECK(e.kv.head(h).key(e.kv.head(h).length() - 1)[0] ==
            twin.kv.head(h).key(twin.kv.head(h).length() - 1)[0]);
    }
  }
  CHECK_NOTHROW(e.append(0, 1));
}

TEST_CASE("a draft ends with clear, with a copy or a load into it, and with its compressor",
          "[open]") {
  engine e;
  e.prompt(), e.meld.copy(0, 1);
  std::stringstream file;
  e.meld.save(file, 1);
  e.draft(0, 2), e.meld.clear(0), e.append(0, 1), e.meld.clear(0);
  e.meld.copy(1, 0), e.draft(0, 2), e.meld.copy(1, 0), e.append(0, 1), e.meld.copy(1, 0);
  e.draft(0, 2), e.meld.load(file, 0), e.append(0, 1), e.meld.copy(1, 0);
  {
    kvmeld::compressor meld(e.kv, kvmeld::h2o{}, budget{.slots = 40});
    rows x(2);
    meld.draft(e.at(0), {x.q, x.k, x.v}, x.out, 2);
    CHECK_THROWS_WITH(e.append(0, 1), Catch::Contains("append: expected accept first"));
  }
  CHECK_NOTHROW(e.append(0, 1));
}

TEST_CASE("a prompt that has not ended refuses drafts, steps and observed steps",
          "[open][errors]") {
  for (const auto& b : {budget{.slots = 20}, budget::shared(20)}) {
    engine e(b);
    for (index_t l = 0; l < layers; ++l) {
      e.measure(l, tokens);
      const auto refused = [&](const char* call, const std::function<void()>& f) {
        e.refuses(std::string(call) + ": expected end_prompt first, got a prompt", f);
      };
      for (index_t any = 0; any <= l; ++any) {
        refused("draft", [&] { e.draft(any, 2); });
        refused("observe", [&] { e.observe(any); });
        refused("step", [&] { e.step(any); });
      }
      refused("seal", [&] { e.meld.seal(0, 4); });
    }
    e.refuses("accept: expected a draft, got none", [&] { e.meld.accept(0, 2); });
    e.meld.end_prompt(0);
    CHECK_NOTHROW(e.draft(0, 2));
  }
}

TEST_CASE("a prompt's chunk is appended and attended, and measured then") {
  engine e, by_hand;
  for (const index_t n : {tokens, index_t{1}, index_t{5}}) {
    rows x(n);
    e.meld.attend(e.at(0), {x.q, x.k, x.v}, x.out, n);
    for (index_t t = 0; t < n; ++t) {
      for (index_t h = 0; h < heads; ++h) {
        const auto row = [&](floats& of, index_t each) { return &of[0] + (t * heads + h) * each; };
        const auto head = by_hand.kv.head(h);
        head.push(row(x.k, dim), row(x.v, dim));
        floats own(group * dim);
        kvmeld::attend(head, row(x.q, group * dim), own.data());
        CHECK(std::equal(own.begin(), own.end(), row(x.out, group * dim)));
      }
    }
    for (engine* const one : {&e, &by_hand}) {
      one->meld.prompt(one->at(0), kvmeld::queries(x.q, n, e.spec));
    }
  }
  CHECK(e.everything() == by_hand.everything());
  rows bad(2);
  bad.k.back() = std::numeric_limits<float>::infinity();
  e.refuses("attend: expected finite rows, got NaN or Inf in head 1", [&] {
    e.meld.attend(e.at(0), {bad.q, bad.k, bad.v}, bad.out, 2);
  });
  const index_t all = e.kv.head(0).length();
  const rows other(all);
  for (engine* const one : {&e, &by_hand}) {
    one->kv.append(one->at(1), other.k, other.v, all);
    one->meld.prompt(one->at(1), kvmeld::queries(other.q, all, e.spec));
    one->meld.end_prompt(0);
  }
  CHECK(e.everything() == by_hand.everything());
}

TEST_CASE("a head emptied by hand and filled again is refused until it is cleared", "[open]") {
  for (const index_t again : {tokens, tokens + 7}) {  // as many tokens as before, and more
    engine e({.slots = 40});                          // nothing was evicted
    e.prompt();
    for (index_t l = 0; l < layers; ++l) {
      for (index_t h : {e.at(l)[0], e.at(l)[1]}) {
        e.kv.head(h).restore(0, 0);
      }
      e.append(l, again);
    }
    const auto refused = [&](const char* call, const std::function<void()>& f) {
      e.refuses(std::string(call) + ": expected head 0 as it was left", f);
    };
    refused("step", [&] { e.step(0); });
    refused("compress", [&] { e.meld.compress(e.at(0)); });
    refused("observe", [&] { e.observe(0); });
    refused("end_prompt", [&] { e.meld.end_prompt(0); });
    refused("prompt", [&] {
      e.meld.prompt(e.at(0), kvmeld::queries(normal(heads * group * dim), 1, e.spec));
    });
    e.meld.clear(0), e.prompt(), e.step(0), e.step(1);
  }
  engine e({.slots = 20});  // within a prompt
  e.measure(0, tokens), e.kv.head(0).restore(0, 0), e.kv.head(1).restore(0, 0);
  e.append(0, tokens), e.measure(1, tokens);
  e.refuses("end_prompt: expected head 0 as it was left", [&] { e.meld.end_prompt(0); });
}

TEST_CASE("a prompt does not end before every layer has all of it", "[open][errors]") {
  const auto refused = "end_prompt: expected as many tokens in every head, got 30 in head 0 and ";
  engine e({.slots = 20});
  e.measure(0, tokens);
  e.refuses(refused + std::string("0 in head 4"), [&] { e.meld.end_prompt(0); });
  e.measure(1, tokens - 1);
  e.refuses(refused + std::string("29 in head 4"), [&] { e.meld.end_prompt(0); });
  e.measure(1, 1), e.meld.end_prompt(0);
  CHECK(e.kv.head(4).length() == 20);
  CHECK_NOTHROW(e.meld.end_prompt(1));  // no layer of it has any
}

TEST_CASE("each layer takes a token once, and in its order", "[open][errors]") {
  const auto refused = Catch::Contains("expected each token once in every layer");
  engine e;
  e.prompt(), e.step(0);
  e.refuses(
      "step: expected each token once in every layer, in their order, got head 0 at "
      "position 31 and head 4 of the layer that is last at 30",
      [&] { e.step(0); });
  e.step(1);
  e.refuses("step: expected each token once", [&] { e.step(1); });
  e.step(0), e.step(1);
  e.step(0);
  CHECK_THROWS_WITH(e.draft(0, 2), refused);  // layer 1 lacks a token
  CHECK_THROWS_WITH(e.draft(1, 2), refused);
  e.step(1), e.draft(0, 2);
  e.refuses("accept: expected a draft of every head of the request, got none of head 4",
            [&] { e.meld.accept(0, 1); });
  e.draft(1, 2), e.meld.accept(0, 1);
  engine fresh;  // a layer that never has tokens is not the engine's
  fresh.step(0), fresh.step(0);
  CHECK_THROWS_WITH(fresh.step(1), refused);
}

TEST_CASE("positions that are handed in are compared", "[open][errors]") {
  engine e;
  e.prompt(), e.meld.copy(0, 1);
  const std::vector<index_t> both = {0, 1};
  rows one(1), two(2);
  e.step(0, 0), e.step(1, 0);
  const auto step = [&](const kvmeld::head_selection& of, const std::vector<index_t>& at) {
    rows& x = of.count() == 2 ? one : two;
    e.meld.step(of, {x.q, x.k, x.v, at}, x.out);
  };
  e.refuses("step: expected position 31 of head 0, got 30", [&] { step(e.at(0), {30}); });
  e.refuses("step: expected position 30 of head 2, got 31", [&] {
    step(e.kv.heads(0, both), {31, 31});
  });
  e.refuses("step: expected positions [1, requests] of 4 heads, got 3", [&] {
    step(e.kv.heads(0, both), {31, 30, 30});
  });
  step(e.kv.heads(0, both), {31, 30}), step(e.at(0), {32});  // a layer by itself, as said
  e.refuses("step: expected position 31 of head 4, got 32", [&] { step(e.at(1), {32}); });
  step(e.kv.heads(1, both), {31, 30}), step(e.at(1), {32});
  const auto draft = [&](const std::vector<index_t>& at) {
    e.meld.draft(e.at(0), {two.q, two.k, two.v, at}, two.out, 2);
  };
  e.refuses("draft: expected position 34 of head 0, got 33", [&] { draft({33, 33}); });
  CHECK_NOTHROW(draft({33, 34}));
}

TEST_CASE("a prompt's tokens are measured once, and in every layer", "[open][errors]") {
  engine e;
  const auto again = [&](index_t layer, index_t n) {
    e.meld.prompt(e.at(layer), kvmeld::queries(normal(n * heads * group * dim), n, e.spec));
  };
  e.measure(0, tokens), e.append(1, tokens);
  const std::string most = "queries (the tokens that are not measured yet), got ";
  e.refuses("prompt: expected at most 0 " + most + "30", [&] { again(0, tokens); });
  again(1, tokens), e.meld.end_prompt(0);
  e.refuses("at most 0 " + most + "1", [&] { again(0, 1); });
  // A chunk that one layer has not measured: its tokens would be those without attention.
  e.measure(0, tokens), e.append(1, tokens);
  e.refuses("h2o: expected the prompt's queries, got none", [&] { e.meld.end_prompt(0); });
  e.refuses("at most 30 " + most + "31", [&] { again(1, tokens + 1); });
  again(1, tokens), e.meld.end_prompt(0);
}

TEST_CASE("a copy's tokens are measured as its source's are", "[open]") {
  engine e;
  e.prompt();
  for (index_t l = 0; l < layers; ++l) {
    e.append(l, 1);
  }
  e.meld.copy(0, 1);
  for (index_t l = 0; l < layers; ++l) {
    const auto length = static_cast<std::size_t>(e.kv.head(e.at(l, 1)[0]).length());
    const floats p(heads * group * length, 1.0F / static_cast<float>(length));
    CHECK_NOTHROW(e.meld.observe(e.at(l, 1), {.probabilities = p}));
  }
}

TEST_CASE("a step's attention is observed once, after its token", "[open][errors]") {
  engine e;
  e.prompt();
  const char* const none = "observe: expected a token appended since the last call, got none";
  e.refuses(none, [&] { e.observe(0); });
  e.append(0, 1), e.observe(0);
  e.refuses(none, [&] { e.observe(0); });
  e.meld.compress(e.at(0));
  e.refuses(none, [&] { e.observe(0); });
  e.append(0, 1), e.observe(0), e.meld.compress(e.at(0));
}

TEST_CASE("drafted rows that no step would take are refused, and no head is apart from others",
          "[open][errors]") {
  engine e;
  e.prompt();
  for (const float bad :
       {-std::numeric_limits<float>::infinity(), std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    for (const int which : {0, 1, 2}) {
      rows x(2);
      (which == 0 ? x.q : which == 1 ? x.k : x.v).back() = bad;
      e.refuses("draft: expected finite rows, got NaN or Inf in head 1", [&] {
        e.meld.draft(e.at(0), {x.q, x.k, x.v}, x.out, 2);
      });
    }
  }
  CHECK_NOTHROW(e.draft(0, 2));
}

/// An executor that would run nothing.
struct runs_nothing {
  index_t count;
  index_t workers() const { return count; }
  template <class F>
  void operator()(index_t, F) const {}
};

TEST_CASE("an executor without workers is refused by every call that takes one", "[errors]") {
  for (const index_t count : {0, -1}) {
    engine e;
    rows x(1);
    const runs_nothing none{count};
    const auto refused = [&](const char* call, const std::function<void()>& f) {
      e.refuses(std::string(call) + ": expected an executor of at least 1 worker, got " +
                    std::to_string(count),
                f);
    };
    e.measure(0, tokens), e.measure(1, tokens);
    refused("prompt", [&] {
      e.meld.prompt(e.at(0), kvmeld::queries(normal(heads * group * dim), 1, e.spec), none);
    });
    refused("end_prompt", [&] { e.meld.end_prompt(0, none); });
    refused("compress", [&] { e.meld.compress(e.at(0), {}, none); });
    e.meld.end_prompt(0);
    refused("step", [&] { e.meld.step(e.at(0), {x.q, x.k, x.v}, x.out, none); });
    e.append(0, 1);
    const floats p(static_cast<std::size_t>(heads * group * e.kv.head(0).length()), 0.1F);
    refused("observe", [&] { e.meld.observe(e.at(0), {.probabilities = p}, none); });
  }
}

}  // namespace compressor_open_test
