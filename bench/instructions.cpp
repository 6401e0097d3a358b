// SPDX-License-Identifier: MIT
// What callgrind counts: `instructions CASE` decodes tokens at 1024 slots, and does what is to be
// counted inside `counted` alone. Without an argument it lists the cases.
#include <Eigen/Core>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <string_view>
#include <vector>

#include "in_c.hpp"
#include "kvmeld/peers.hpp"
#include "products.hpp"
#include "spec.hpp"

/// callgrind collects from here (--toggle-collect=counted).
extern "C" [[gnu::noinline]] void counted(const std::function<void()>& work) { work(); }

namespace {

using kvmeld::index_t;

constexpr index_t slots = 1024, dim = 128, tokens = 128;

/// Not random by a library's choice: the same numbers, so the same count, everywhere.
std::vector<float> numbers(std::size_t n, std::uint32_t seed) {
  std::vector<float> out(n);
  for (float& x : out) {
    x = 0;
    for (int i = 0; i < 4; ++i) {  // roughly normal, of variance 1
      seed = seed * 1664525U + 1013904223U;
      x += 1.732F * (static_cast<float>(seed >> 8) / static_cast<float>(1U << 24) - 0.5F);
    }
  }
  return out;
}

constexpr std::size_t size(index_t n) { return static_cast<std::size_t>(n); }

/// A stream of tokens, `[slots + tokens, dim]` each.
struct stream {
  std::vector<float> q = numbers(size((slots + tokens) * dim), 1),
                     k = numbers(size((slots + tokens) * dim), 2),
                     v = numbers(size((slots + tokens) * dim), 3), out = std::vector<float>(dim);

  std::span<const float> at(const std::vector<float>& x, index_t t) const {
    return std::span(x).subspan(size(t * dim), dim);
  }
};

template <class Policy>
void step(const Policy& policy) {
  stream s;
  kvmeld::cache kv(bench::spec(1, 1, dim), {.capacity = slots + tokens});
  kvmeld::compressor meld(kv, policy, kvmeld::budget_within(policy, slots));
  const auto decode = [&](index_t first, index_t last) {
    for (index_t t = first; t < last; ++t) {
      meld.step(kv.heads(0, 0), {s.at(s.q, t), s.at(s.k, t), s.at(s.v, t)}, s.out);
    }
  };
  // What evicts nothing holds `slots` in the middle of what is counted.
  const index_t first = kvmeld::declared(policy).evicts() ? slots : slots - tokens / 2;
  decode(0, first);
  counted([&] { decode(first, first + tokens); });
}

void attend() {
  stream s;
  kvmeld::cache kv(bench::spec(1, 1, dim), {.capacity = slots});
  for (index_t t = 0; t < slots; ++t) {
    kv.head(0).push(s.at(s.k, t).data(), s.at(s.v, t).data());
  }
  counted([&] {
    for (index_t t = 0; t < tokens; ++t) {
      kvmeld::attend(kv.head(0), s.at(s.q, t).data(), s.out.data());
    }
  });
}

void products() {
  const stream s;
  Eigen::VectorXf logits(slots), out(dim);
  counted([&] {
    for (index_t t = 0; t < tokens; ++t) {
      bench::two_products(s.at(s.q, t).data(), s.k.data(), s.v.data(), logits, out);
    }
  });
}

void step_in_c() {
  stream s;
  const auto held = budget_within(kvmeld::h2o{}, slots);
  bench::step_in_c(dim, held.slots, held.trigger, tokens, s.q.data(), s.k.data(), s.v.data(),
                   s.out.data(), counted);
}

struct named {
  std::string_view name;
  std::function<void()> run;
};

template <class... Policies>
std::vector<named> cases(const Policies&... policies) {
  return {{"products", products}, {"attend", attend}, {policies.name(), [policies] {
                                                         step(policies);
                                                       }}...};
}

}  // namespace

int main(int argc, char** argv) {
  using namespace kvmeld;
  // Not in the list below: where its memory lies, and so how many numbers Eigen takes one by one
  // before an aligned one, would change for all others.
  if (argc > 1 && argv[1] == std::string_view("h2o_in_c")) {
    step_in_c();
    return 0;
  }
  for (const auto& [name, run] :
       cases(full_cache{}, streaming_llm{}, random_tokens{}, h2o{}, snapkv{}, tova{}, zsmerge{},
             d2o{}, kvmerger{}, ems{.table = 4 * slots}, keepkv{}, fold{})) {
    if (argc < 2) {
      std::printf("%.*s\n", static_cast<int>(name.size()), name.data());
    } else if (name == argv[1]) {
      run();
      return 0;
    }
  }
  return argc < 2 ? 0 : 1;
}
