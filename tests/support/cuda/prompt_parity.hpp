// SPDX-License-Identifier: MIT
/// A prompt compressed on the device and by the library, and decoding after it: the same plans,
/// ties included, where attention is exact.
#pragma once

#include "cuda/mirror.hpp"
#include "cuda/policy_calls.hpp"
#include "cuda/uneven_budgets.hpp"

namespace kvmeld::cuda {

struct prompt_case {
  index_t length = 70;   ///< of head 0; every further head has 9 less
  index_t queries = 70;  ///< the last of the prompt's own
  index_t slots = 24;    ///< that head 0 is brought to
  index_t apart = 0;     ///< slots that every further head has less (below 0: more)
  bool random = false;
  bool shuffled = false;   ///< slots in no order of positions
  bool nan = false;        ///< some scores from before are no numbers
  bool positions = false;  ///< queries at chosen positions
  float rounding = 2e-6F;  ///< of weights and log-mass
  index_t steps = 0;       ///< of decoding afterwards, and once more without queries
  index_t again = 0;       ///< the target of a second time on the same queries; 0: once only
};

/// Element `i` of a code of ±16 for slot `s`: its query attends to this slot alone.
inline float code(index_t s, index_t i) { return (s >> (i % 8) & 1) != 0 ? 16.0F : -16.0F; }

inline void check_plan(const merge_plan& ours, const plan_view& theirs, index_t h, index_t capacity,
                       float tolerance) {
  REQUIRE(on_host(theirs.rows)[h] == ours.rows());
  bool same = true;
  for (index_t r = 0; r < ours.rows(); ++r) {
    const index_t* const begin = on_host(theirs.begin) + std::ptrdiff_t{h} * (capacity + 1) + r;
    const auto row = ours.row(r);
    REQUIRE(begin[1] - begin[0] == static_cast<index_t>(row.size()));
    const merge_source* e = on_host(theirs.sources) + std::ptrdiff_t{h} * capacity + begin[0];
    const auto near = [&](float a, float b) {
      return std::abs(a - b) <= tolerance * (1 + std::abs(b));
    };
    for (const merge_source& x : row) {
      same = same && e->source == x.source && near(e->key_weight, x.key_weight) &&
             near(e->value_weight, x.value_weight);
      ++e;
    }
    same =
        same && near(on_host(theirs.log_mass)[std::ptrdiff_t{h} * capacity + r], ours.log_mass(r));
  }
  CHECK(same);
}

/// Compresses and decodes on the device and by the library, and compares them.
template <class Policy, class scalar>
void policy_calls<Policy, scalar>::check_compress(const Policy& p, cache_case c,
                                                  const prompt_case& what, double tolerance,
                                                  std::uint64_t seed) {
  using Scalar = host_scalar<scalar>;
  using number_type = row_number<scalar>;
  using host_number = host_scalar<number_type>;
  using calls = policy_calls;
  INFO(p.name() << ", dim " << c.dim << ", group " << c.group << ", prompt " << what.length
                << ", target " << what.slots << ", seed " << seed);
  emulator::chance random{seed};
  c.capacity = std::max(what.length, what.slots) + 3;
  auto kv = cache_of<Scalar>(c);
  auto state = fixtures::make_state(p, kv);
  const auto number = [&] {
    return read_alike<scalar>(
        static_cast<float>(random.below(1U << 20)) / static_cast<float>(1U << 19) - 1.0F);
  };
  for (index_t h = 0; h < c.heads; ++h) {
    const index_t n = std::max(what.length - 9 * h, index_t{0});
    std::vector<host_number> k, v;
    for (index_t s = 0; s < n; ++s) {
      for (index_t i = 0; i < c.dim; ++i) {
        k.push_back(static_cast<host_number>(what.random ? number() : code(s, i)));
        v.push_back(static_cast<host_number>(what.random ? number() : whole(random, 8)));
      }
    }
    kv.append(h, k, v);
    state[h].extend(n);
    const auto head = kv.head(h);
    for (index_t s = 0; what.shuffled && s < n; ++s) {
      std::swap(head.position(s),
                head.position(static_cast<index_t>(random.below(static_cast<std::uint32_t>(n)))));
    }
    for (index_t k0 = 0; k0 < state[h].slot_stats() && k0 < 1; ++k0) {  // measured before
      for (float& x : state[h].column(k0)) {
        x = static_cast<float>(random.below(3));
        x = what.nan && random.below(5) == 0 ? std::numeric_limits<float>::quiet_NaN() : x;
      }
    }
    state[h].count_queries(1);
  }
  const index_t row = c.heads * c.group * c.dim;
  std::vector<host_number> q(static_cast<std::size_t>(what.queries * row));
  std::vector<index_t> at;
  for (index_t i = 0; i < what.queries; ++i) {
    at.push_back(static_cast<index_t>(random.below(static_cast<std::uint32_t>(what.length))));
    for (index_t hg = 0; hg < c.heads * c.group; ++hg) {
      const index_t n = what.length - 9 * (hg / c.group);
      const index_t own = what.positions ? at.back() : n - what.queries + i;
      const auto asked = static_cast<index_t>(  // a position that the query sees
          own < 1 ? 0 : random.below(static_cast<std::uint32_t>(std::min(own, n - 1) + 1)));
      index_t slot = 0;
      while (slot + 1 < n && kv.head(hg / c.group).position(slot) != asked) {
        ++slot;
      }
      for (index_t e = 0; e < c.dim; ++e) {
        q[static_cast<std::size_t>(i * row + hg * c.dim + e)] =
            static_cast<host_number>(what.random ? 3 * number() : code(slot, e));
      }
    }
  }
  device_buffer<number_type> queries(q.size());
  for (std::size_t i = 0; i < q.size(); ++i) {
    queries.host()[i] = from_float<number_type>(static_cast<float>(q[i]));
  }
  device_buffer<index_t> positions(at);
  auto seen = prompt_queries(q.data(), what.queries, c.heads, c.group, c.dim);
  seen.position = what.positions ? at.data() : nullptr;
  const query_rows<number_type> rows{queries.data(), what.queries,
                                     seen.head,      seen.group,
                                     seen.row,       what.positions ? positions.data() : nullptr};

  mirror<Scalar, scalar> twin(p, kv, state, c), again(p, kv, state, c);
  twin.nan = what.nan;
  device_buffer<unsigned char> memory(workspace_bytes(p, twin.device.view(), what.queries));
  const workspace space{memory.data(), memory.size()};
  bool merged = false;
  const auto both = [&](const query_view<host_number>& asked, const query_rows<number_type>& device,
                        index_t target, bool plans) {
    uneven_budgets budgets({target}, what.apart, c.heads);
    calls::compress(p, twin.device.view(), twin.device.state, device, budgets.limits(), space,
                    order(seed));
    workspace_allocator from(space);
    const auto made = detail::allocate_prompt(
        from, detail::rule_of(p, twin.device.view()),
        detail::shape_of(
            twin.device.view(),
            detail::measured_queries(detail::rule_of(p, twin.device.view()), device.count),
            budgets.limits().most_target()));
    for (index_t h = 0; h < c.heads; ++h) {
      const auto head = kv.head(h);
      if (head.length() == 0) {
        continue;
      }
      kvmeld::workspace work;
      kvmeld::observe(p, head, state[h], asked.of(h));
      const bool changes = head.length() > budgets[h].slots;
      kvmeld::compress(p, head, state[h], work, budgets[h], asked.of(h));
      if (plans && changes) {  // of rows of 16 bits, that were merged, the last may differ
        check_plan(work.plan, made.plan.plan, h, c.capacity,
                   merged && sizeof(Scalar) == 2 ? static_cast<float>(tolerance) : what.rounding);
      }
    }
    round_rows<scalar>(kv);
    twin.check_same(kv, state, tolerance);
    merged = true;
  };
  both(seen, rows, what.slots, kvmeld::declared(p).evicts());
  CHECK((memory.intact() && queries.intact() && positions.intact()));
  uneven_budgets same({what.slots}, what.apart, c.heads);
  calls::compress(p, again.device.view(), again.device.state, rows, same.limits(), space,
                  order(seed + 7));
  CHECK(again.device.keys.bytes() == twin.device.keys.bytes());
  CHECK(again.device.columns.bytes() == twin.device.columns.bytes());
  CHECK(again.device.memory.bytes() == twin.device.memory.bytes());

  if (what.again > 0) {
    both(seen, rows, what.again, true);
  }
  uneven_budgets budgets({what.slots, what.slots + 2}, what.apart, c.heads);
  const auto nq = c.heads * c.group * c.dim, nk = c.heads * c.dim;
  device_buffer<number_type> dq(static_cast<std::size_t>(nq)), k(static_cast<std::size_t>(nk)),
      v(static_cast<std::size_t>(nk)), out(static_cast<std::size_t>(nq));
  std::vector<float> fq(dq.size()), fk(k.size()), fv(v.size()), fout(dq.size());
  for (index_t step = 0; step < what.steps; ++step) {
    INFO("step " << step);
    const auto fill = [&](std::vector<float>& to, device_buffer<number_type>& device) {
      for (std::size_t i = 0; i < to.size(); ++i) {
        device.host()[i] = from_float<number_type>(what.random ? number() : whole(random, 2));
        to[i] = to_float(device.host()[i]);
      }
    };
    fill(fq, dq), fill(fk, k), fill(fv, v);
    fixtures::step(p, kv, state, {fq, fk, fv}, budgets.host(), fout);
    round_rows<scalar>(kv);
    calls::step(p, twin.device.view(), twin.device.state, dq.data(),
                new_tokens<number_type>{k.data(), v.data()}, budgets.limits(), out.data(), space,
                order(seed));
    twin.check_same(kv, state, tolerance);
  }
  if (what.steps > 0) {
    both({}, {}, what.slots - 2, true);
  }
}

template <class Scalar, class Policy>
void check_compress(const Policy& p, const cache_case& c, const prompt_case& what, double tolerance,
                    std::uint64_t seed) {
  policy_calls<Policy, typename device_scalar<Scalar>::type>::check_compress(p, c, what, tolerance,
                                                                             seed);
}

/// What a policy's parameters change. `exact`: do keys stay exact when they are merged, so that
/// steps on codes still have true ties?
template <class Policy>
void check_policy(const Policy& p, index_t target, std::uint64_t seed, bool exact = true) {
  const cache_case c{.heads = 2, .dim = 32, .group = 2};
  check_compress<float>(p, c, {.slots = target, .steps = exact ? 4 : 0}, 1e-5, seed);
  check_compress<float>(p, {.heads = 1, .dim = 40},
                        {.queries = 20, .slots = target, .shuffled = true, .positions = true}, 1e-5,
                        seed + 1);
  check_compress<float>(p, c, {.slots = target, .random = true, .steps = 2}, 1e-5, seed + 3);
}

/// And what does not depend on them: scalars, layouts, heads without slots, no queries.
template <class Policy>
void check_policy_once(const Policy& p, index_t target, std::uint64_t seed, bool exact = true) {
  check_policy(p, target, seed, exact);
  check_compress<Eigen::half>(
      p, {.heads = 1, .dim = 40, .group = 4, .paged = true},
      {.length = 100, .queries = 33, .slots = target, .steps = exact ? 2 : 0}, 1e-3, seed + 2);
  check_compress<float>(p, {.heads = 1, .dim = 32}, {.queries = 0, .slots = target}, 1e-5,
                        seed + 4);
  check_compress<Eigen::bfloat16>(p, {.heads = 9, .dim = 8}, {.slots = target}, 8e-3, seed + 5);
  check_compress<Eigen::half>(p, {.heads = 1, .dim = 32, .group = 2},
                              {.slots = target, .random = true}, 1e-3, seed + 6);
}

}  // namespace kvmeld::cuda
