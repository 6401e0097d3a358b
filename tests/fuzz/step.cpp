// A life of a cache under any policy: tokens, prompts, budgets and broken numbers in any order.
// What is refused at the door has changed nothing; what is not leaves a head that can go on.
#include <cmath>

#include "bytes.hpp"
#include "kvfold/any_policy.hpp"
#include "kvfold/cache.hpp"
#include "kvfold/compress.hpp"

namespace {

using kvfold::budget;
using kvfold::index_t;

constexpr index_t heads = 2, group = 2, dim = 4;

struct life {
  kvfold::any_policy policy;
  kvfold::cache<float> kv;
  kvfold::state state;

  life(const kvfold::any_policy& p, bool finite)
      : policy(p),
        kv({.heads = heads, .group = group, .dim = dim, .capacity = 40, .check_finite = finite}),
        state(make_state(policy, kv)) {}

  std::vector<float> everything() {
    std::vector<float> all;
    for (index_t h = 0; h < heads; ++h) {
      const auto head = kv.head(h);
      for (index_t s = 0; s < head.length(); ++s) {
        all.insert(all.end(), head.key(s).data, head.key(s).data + dim);
        all.insert(all.end(), head.value(s).data, head.value(s).data + dim);
        all.insert(all.end(), {head.log_mass(s), static_cast<float>(head.position(s))});
      }
      all.push_back(static_cast<float>(head.seen()));
      for (index_t c = 0; c < state[h].columns(); ++c) {
        all.insert(all.end(), state[h].column(c).begin(), state[h].column(c).end());
      }
    }
    return all;
  }
  void check_laws() {
    for (index_t h = 0; h < heads; ++h) {
      const auto head = kv.head(h);
      fuzz::must(head.length() >= 0 && head.length() <= head.capacity(), "length");
      fuzz::must(state[h].length() <= head.length(), "columns");
      std::vector<bool> there(static_cast<std::size_t>(head.seen()));
      for (index_t s = 0; s < head.length(); ++s) {
        fuzz::must(head.position(s) >= 0 && head.position(s) < head.seen(), "positions are seen");
        fuzz::must(!there[static_cast<std::size_t>(head.position(s))], "one position a slot");
        there[static_cast<std::size_t>(head.position(s))] = true;
      }
    }
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto policies = kvfold::any_policy::every();
  fuzz::bytes in(data, size);
  const auto& policy =
      policies[static_cast<std::size_t>(in.below(static_cast<int>(policies.size())))];
  const bool finite = in.below(2) == 0;
  bool tame = finite;  // no number is so large that a query's product with a key is none
  const auto numbers = [&](index_t n, float most = 1e30F) {
    const auto x = in.numbers(n);
    tame = tame && std::ranges::all_of(x, [&](float y) { return !(std::abs(y) > most); });
    return x;
  };
  life one(policy, finite);
  for (int round = 0; round < 64 && !in.empty(); ++round) {
    const budget b{in.below(44), in.below(3) == 0 ? in.below(48) : 0};
    const auto before = one.everything();
    try {
      switch (in.below(4)) {
        case 0: {
          const int n = in.below(40);
          const auto k = numbers(n * dim), v = numbers(n * dim);
          one.kv.append(in.below(heads), k, v);
          break;
        }
        case 1: {
          const int n = in.below(20);
          const auto q = numbers(n * heads * group * dim, 1e6F);
          compress(policy, one.kv, one.state,
                   kvfold::prompt_queries(q.data(), n, heads, group, dim), b);
          break;
        }
        default: {
          const auto q = numbers(heads * group * dim, 1e6F), k = numbers(heads * dim);
          std::vector<float> out(q.size());
          step(policy, one.kv, one.state, std::span<const float>(q), std::span<const float>(k),
               std::span<const float>(k), b, std::span(out));
        }
      }
    } catch (const kvfold::invalid_argument& refused) {
      // Numbers that are no numbers, or whose products are none, may break a plan half way.
      const bool plan = std::strstr(refused.what(), "merge_plan") != nullptr;
      fuzz::must(!tame || !plan, refused.what());
      fuzz::must(plan || fuzz::same(one.everything(), before), "nothing changed when refused");
      if (plan) {
        return 0;
      }
    }
    one.check_laws();
  }
  return 0;
}
