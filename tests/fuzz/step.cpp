// SPDX-License-Identifier: MIT
// A life of a cache under any policy: tokens, prompts, budgets and broken numbers in any order, in
// a cache's own memory, an engine's or an engine's pages, of heads of any small shape. What is
// refused at the door has changed nothing; after any other call the head can go on.
#include <array>
#include <cmath>
#include <string_view>

#include "bytes.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/peers.hpp"
#include "support/all_heads.hpp"
#include "support/typed_cache.hpp"

namespace {

using kvmeld::budget;
using kvmeld::index_t;
using std::string_view_literals::operator""sv;

constexpr index_t heads = 2, capacity = 40;

/// Do this policy's slots stay as they came, as long as they stay?
bool leaves_rows_alone(std::string_view policy) {
  constexpr std::array names = {"full_cache"sv,
                                "streaming_llm"sv,
                                "h2o"sv,
                                "snapkv"sv,
                                "random"sv,
                                "tova"sv,
                                "roco"sv,
                                "scissorhands"sv,
                                "r_kv"sv,
                                "triattention"sv,
                                "key_diff"sv,
                                "compactor"sv,
                                "expected_attention"sv};
  return std::ranges::find(names, policy) != names.end();
}

template <class Policy, class Cache>
struct life {
  const Policy& policy;
  Cache& kv;
  fixtures::state state = fixtures::make_state(policy, kv);
  std::vector<float> came[heads] = {};  ///< [position, 2 · dim] keys and values, as they are stored

  /// Slot `s` as it is stored: its key, then its value.
  void add_row(index_t h, index_t s, std::vector<float>& to) {
    const auto head = kv.head(h);
    for (index_t i = 0; i < head.dim(); ++i) {
      to.push_back(static_cast<float>(head.key(s)[i]));
      to.push_back(static_cast<float>(head.value(s)[i]));
    }
  }
  /// Tokens `k`, `v` `[tokens, dim]` went into head `h`.
  void remember(index_t h, std::span<const float> k, std::span<const float> v) {
    using scalar = std::remove_cvref_t<decltype(kv.head(h).key(0)[0])>;
    for (std::size_t i = 0; i < k.size(); ++i) {
      came[h].push_back(static_cast<float>(static_cast<scalar>(k[i])));
      came[h].push_back(static_cast<float>(static_cast<scalar>(v[i])));
    }
  }

  std::vector<float> everything() {
    std::vector<float> all;
    for (index_t h = 0; h < heads; ++h) {
      const auto head = kv.head(h);
      for (index_t s = 0; s < head.length(); ++s) {
        add_row(h, s, all);
        all.insert(all.end(), {head.log_mass(s), static_cast<float>(head.position(s))});
      }
      all.push_back(static_cast<float>(head.next_position()));
      for (index_t c = 0; c < state[h].slot_stats(); ++c) {
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
      std::vector<bool> there(static_cast<std::size_t>(head.next_position()));
      for (index_t s = 0; s < head.length(); ++s) {
        fuzz::must(head.position(s) >= 0 && head.position(s) < head.next_position(),
                   "positions are seen");
        fuzz::must(!there[static_cast<std::size_t>(head.position(s))], "one position a slot");
        there[static_cast<std::size_t>(head.position(s))] = true;
        if (leaves_rows_alone(policy.name())) {
          std::vector<float> row;
          add_row(h, s, row);
          const auto at = came[h].begin() + std::ptrdiff_t{head.position(s)} * 2 * head.dim();
          fuzz::must(fuzz::same(row, {at, at + 2 * head.dim()}), "rows go with their positions");
        }
      }
    }
  }
  /// A head is back in its budget.
  void check_length(index_t h, index_t most) {
    fuzz::must(kv.head(h).length() <= most || !kvmeld::declared(policy).evicts(), "budgets");
  }
};

/// What the rest of `in` says, up to 64 calls. Keys and values beyond `most` may break a plan.
void live(const auto& policy, auto& kv, fuzz::bytes& in, float most, float most_query) {
  const index_t group = kv.shape().group, dim = kv.shape().dim;
  bool tame = kv.shape().check_finite;  // no number so large that a query's product is none
  const auto numbers = [&](index_t n, float limit) {
    const auto x = in.numbers(n);
    tame = tame && std::ranges::all_of(x, [&](float y) { return !(std::abs(y) > limit); });
    return x;
  };
  life<std::decay_t<decltype(policy)>, std::decay_t<decltype(kv)>> one{policy, kv};
  for (int round = 0; round < 64 && !in.empty(); ++round) {
    const budget b{in.below(44), in.below(3) == 0 ? in.below(48) : 0};
    const auto before = one.everything();
    try {
      switch (in.below(4)) {
        case 0: {
          const int n = in.below(40);
          const auto k = numbers(n * dim, most), v = numbers(n * dim, most);
          const index_t h = in.below(heads);
          kv.append(h, std::span(k), std::span(v));
          one.remember(h, k, v);
          break;
        }
        case 1: {
          const int n = in.below(20);
          const auto q = numbers(n * heads * group * dim, most_query);
          const auto queries = kvmeld::prompt_queries(q.data(), n, heads, group, dim);
          const index_t h = in.below(heads);
          if (kv.head(h).length() > 0) {
            check(policy, b, capacity);  // or `compress` would refuse what was observed
            if (n > 0) {
              observe(policy, kv.head(h), one.state[h], queries.of(h));
            }
            compress(policy, kv.head(h), one.state[h], one.state.workspace(), b, queries.of(h));
            one.check_length(h, b.slots);
          }
          break;
        }
        default: {
          const auto q = numbers(group * dim, most_query), k = numbers(dim, most);
          std::vector<float> out(q.size());
          const index_t h = in.below(heads);
          check_step(policy, kv.head(h), b);
          step(policy, kv.head(h), one.state[h], one.state.workspace(), q.data(), k.data(),
               k.data(), b, out.data());
          one.remember(h, k, k);
          one.check_length(h, b.trigger_length() - 1);
        }
      }
    } catch (const kvmeld::error& refused) {
      // Numbers that are no numbers, or whose products are none, may break a plan half way.
      const bool plan = std::strstr(refused.what(), "merge_plan") != nullptr;
      fuzz::must(!tame || !plan, refused.what());
      fuzz::must(plan || fuzz::same(one.everything(), before), "nothing changed when refused");
      if (plan) {
        return;
      }
    }
    one.check_laws();
  }
}

/// Halves in pages of 4 slots, which lie in any order: a table for each head.
void live_in_pages(const fixtures::cache_shape& shape, fuzz::bytes& in) {
  using half = Eigen::half;
  constexpr index_t slots = 4, pages = capacity / slots;
  std::vector<half> keys(static_cast<std::size_t>(heads * capacity * shape.dim)), values(keys);
  std::vector<index_t> table;
  for (index_t h = 0; h < heads; ++h) {
    for (index_t p = 0; p < pages; ++p) {
      table.push_back((p * 3 + h) % pages);  // of pages that both heads have a part of
    }
  }
  const auto layout = [&](std::vector<half>& x) {
    return fixtures::layout<half>::page_slot_head_dim(x.data(), slots, heads, shape.dim);
  };
  fixtures::paged_view<half> kv(shape, layout(keys), layout(values),
                                {.pages = table.data(), .slots = slots, .head = pages});
  constexpr float most = 1e4F, most_query = 1e3F;
  switch (in.below(3)) {
    case 0:
      return live(kvmeld::h2o{}, kv, in, most, most_query);
    case 1:
      return live(kvmeld::zsmerge{}, kv, in, most, most_query);
    default:
      return live(kvmeld::d2o{}, kv, in, most, most_query);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto policies = kvmeld::any_policy_or_peer::every();
  fuzz::bytes in(data, size);
  const auto& policy =
      policies[static_cast<std::size_t>(in.below(static_cast<int>(policies.size())))];
  constexpr float most = 1e30F, most_query = 1e6F;
  const fixtures::cache_shape shape{.heads = heads,
                                    .group = 1 + in.below(2),
                                    .dim = 1 + in.below(9),
                                    .capacity = capacity,
                                    .check_finite = in.below(2) == 0};
  switch (in.below(3)) {
    case 0: {
      fixtures::cache<float> kv(shape);
      live(policy, kv, in, most, most_query);
      break;
    }
    case 1: {  // an engine's: keys [token, head, dim], values transposed
      std::vector<float> keys(static_cast<std::size_t>(heads * capacity * shape.dim)), values(keys);
      fixtures::strided_view<float> kv(
          shape, fixtures::layout<float>::token_head_dim(keys.data(), heads, shape.dim),
          fixtures::layout<float>::head_dim_token(values.data(), capacity, shape.dim));
      live(policy, kv, in, most, most_query);
      break;
    }
    default:
      live_in_pages(shape, in);
  }
  return 0;
}
