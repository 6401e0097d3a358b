// SPDX-License-Identifier: MIT
// EMS beside the oracle that expands every token: the same parameters, tables compared token by
// token, and tokens that like to share entries.
#pragma once

#include "kvmeld/policies/ems.hpp"
#include "support/agree.hpp"

namespace fixtures {

using kvmeld::budget;
using kvmeld::ems;
using kvmeld::head_state;
using kvmeld::detail::ems_table;

/// Policy and oracle with the same parameters.
inline std::pair<ems, oracle::ems> both(const ems& p, const kvmeld::rotary& rope = default_rope) {
  oracle::ems o{.window = p.window, .kernel = p.kernel, .sinks = p.sinks};
  o.gamma = static_cast<double>(p.gamma);
  o.threshold = static_cast<double>(p.threshold);
  o.with_position = p.with_position;
  o.merge_unrotated = p.merge_unrotated;
  o.rotation = {.base = rope.base(),
                .interleaved = rope.pairs_as() == kvmeld::rotary::pairing::interleaved};
  o.group = p.combine == kvmeld::group_combine::max    ? oracle::combine::max
            : p.combine == kvmeld::group_combine::mean ? oracle::combine::mean
                                                       : oracle::combine::sum;
  return {p, o};
}

/// The library's table is the oracle's, entry by entry (whose centre has the same position) and
/// token by token.
inline auto same_table(double tolerance = 1e-5) {
  return [tolerance](const head_state& state, const oracle::head& expected, const auto& head) {
    using t = ems_table<const head_state>;
    const t tokens(state, expected.group);
    std::size_t sharing = 0;
    REQUIRE(static_cast<std::size_t>(state.length()) == expected.slots.size());
    for (std::size_t s = 0; s < expected.slots.size(); ++s) {
      const auto& members = expected.slots[s].members;
      oracle::mat ours, theirs;
      index_t own = 0;
      while (own + 1 < state.length() && head.position(own) != expected.slots[s].position) {
        ++own;
      }
      REQUIRE(head.position(own) == expected.slots[s].position);
      tokens.each(own, [&](index_t token) {
        ours.push_back({static_cast<double>(tokens.position(head, token))});
        for (const auto f : {t::norm, t::all, t::past, t::current}) {
          ours.back().push_back(static_cast<double>(tokens.at(f, token)));
        }
      });
      for (const auto& m : members) {
        theirs.push_back({static_cast<double>(m.position), m.norm, m.glo, m.past, m.cur});
      }
      std::ranges::sort(ours), std::ranges::sort(theirs);  // they join in the order of slots
      REQUIRE(oracle::difference(ours, theirs) < tolerance);
      sharing += members.size() - 1;
    }
    REQUIRE(static_cast<std::size_t>(tokens.sharing()) == sharing);
    REQUIRE(tokens.sharing() <= tokens.places());
  };
}

/// Keys and values around a few directions, in lengths of their own: tokens that like to share.
struct alike_tokens {
  index_t kinds, dim;
  kvmeld::rotary rope = default_rope;
  float noise = 0.3F;
  std::vector<float> k = normal(kinds * dim), v = normal(kinds * dim);

  /// Key and value of one kind; as before rotation where `policy` compares them so.
  std::pair<std::vector<float>, std::vector<float>> token(const ems& policy,
                                                          index_t position) const {
    const auto kind = std::uniform_int_distribution<index_t>(0, kinds - 1)(random_bits());
    auto key = near(k, kind), value = near(v, kind);
    if (!policy.with_position) {
      rope.rotate(kvmeld::row<float>{key.data()}, dim, position);
    }
    return {key, value};
  }

 private:
  std::vector<float> near(const std::vector<float>& of, index_t kind) const {
    auto x = normal(dim, noise);
    const float length = 0.5F + std::abs(normal(1)[0]);
    for (index_t i = 0; i < dim; ++i) {
      float& e = x[static_cast<std::size_t>(i)];
      e = length * (e + of[static_cast<std::size_t>(kind * dim + i)]);
    }
    return x;
  }
};

/// One token and its queries `[group, dim]`.
struct decoded {
  std::vector<float> q, k, v;
};

/// A head, its state, and the oracle's head, through the same prompts and steps.
struct ems_pair {
  ems policy;
  oracle::ems slow;
  index_t target;
  fixtures::cache<float> kv;
  fixtures::state state;
  oracle::head expected;

  ems_pair(const ems& p, index_t dim, index_t group, index_t slots,
           const kvmeld::rotary& rope = default_rope, const layer_terms& terms = {})
      : policy(p),
        slow(both(p, rope).second),
        target(slots),
        kv(terms.shape(1, group, dim, 400, rope)),
        state(fixtures::make_state(policy, kv)),
        expected(to_oracle(kv.head(0))) {}

  void check_same() {
    REQUIRE(oracle::set_difference(to_oracle(kv.head(0)), expected) < 1e-5);
    same_table()(state[0], expected, kv.head(0));
  }
  void prompt(const alike_tokens& data, index_t tokens) {
    const auto head = kv.head(0);
    const index_t seen = head.next_position();
    struct begun {
      queries asked;
      std::vector<std::pair<std::vector<float>, std::vector<float>>> tokens;
      oracle::head expected;
    };
    const begun prompt = clearly([&] {
      begun b{{tokens, head.group(), head.dim()}, {}, expected};
      for (index_t t = 0; t < tokens; ++t) {
        b.tokens.push_back(data.token(policy, seen + t));
        const auto& [k, v] = b.tokens.back();
        oracle::append(b.expected, {k.begin(), k.end()}, {v.begin(), v.end()});
      }
      slow.prompt(b.expected, b.asked.tensor(), {}, target);
      return b;
    });
    for (const auto& [k, v] : prompt.tokens) {
      kv.append(0, k, v);
    }
    fixtures::compress(policy, kv, state, prompt.asked.view(), budget{target});
    expected = prompt.expected;
    check_same();
  }
  /// `n` tokens, each drawn by `draw(its position)`.
  template <class Draw>
  void steps(index_t n, Draw draw, index_t trigger = 0) {
    const auto head = kv.head(0);
    struct taken {
      decoded token;
      index_t position;
      oracle::head expected;
      oracle::mat out = {};
    };
    const auto all = clear_steps(
        static_cast<std::size_t>(n), taken{{}, head.next_position() - 1, expected},
        [&](const taken& before) {
          taken t{draw(before.position + 1), before.position + 1, before.expected};
          const auto& [q, k, v] = t.token;
          t.out = slow.step(t.expected, to_mat(q.data(), head.group(), head.dim()),
                            {k.begin(), k.end()}, {v.begin(), v.end()}, target, trigger);
          return t;
        },
        1e-5);  // a hundred times what a float is off: what is set cannot be drawn again
    REQUIRE(all.size() == static_cast<std::size_t>(n));
    for (const taken& t : all) {
      INFO("position " << t.position);
      const auto& [q, k, v] = t.token;
      std::vector<float> out(q.size());
      fixtures::step(policy, kv, state, {q, k, v}, budget{target, trigger}, out);
      expected = t.expected;
      REQUIRE(oracle::difference(to_mat(out.data(), head.group(), head.dim()), t.out) < 1e-5);
      check_same();
    }
  }
  void steps(const alike_tokens& data, index_t n, index_t trigger = 0) {
    const auto one = [&](index_t position) -> decoded {
      const auto [k, v] = data.token(policy, position);
      return {normal(kv.head(0).group() * data.dim), k, v};
    };
    steps(n, one, trigger);
  }
  index_t sharing() { return ems_table(state[0], kv.head(0).group()).sharing(); }
};

}  // namespace fixtures
