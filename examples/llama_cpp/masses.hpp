// SPDX-License-Identifier: MIT
/// Repack: a policy's mass function in the engine's logits, and what its softmax leaves out.
#pragma once

#include <algorithm>  // std::ranges::max_element
#include <cmath>      // std::atanh, std::log
#include <limits>     // std::numeric_limits
#include <span>
#include <vector>

#include "kvmeld/score/softmax.hpp"
#include "kvmeld/score/tile_products.hpp"
#include "llama_cpp/cells.hpp"

namespace kvmeld::llama {

/// Calls `f(mass, own)` with the policy's mass function, of (slot, q·k); `own`: it is not just
/// log-mass. A slot that the policy has not measured yet has log-mass alone.
template <policy P, class F>
void with_mass(const P& p, const head_ref& head, const head_state& state, F f) {
  const score::logit_terms terms(head);
  const auto capped = [&](float dot) {
    return terms.caps() ? terms.cap(head.scale() * dot) / head.scale() : dot;
  };
  const log_mass_of log_mass{head};
  const auto plain = [&](index_t s, float dot) { return log_mass(s, capped(dot)); };
  if constexpr (requires { p.visit([](const auto&) {}); }) {
    p.visit([&](const auto& one) { with_mass(one, head, state, f); });
  } else if constexpr (requires { p.mass(head, state); }) {
    const auto own = p.mass(head, state);
    constexpr bool caps = requires { decltype(own)::caps; };
    f(
        [&](index_t s, float dot) {
          return s < state.length() ? own(s, caps ? dot : capped(dot)) : plain(s, dot);
        },
        true);
  } else {
    f(plain, false);
  }
}

/// Does the policy's mass function, or a head's log-mass, change the engine's logits?
template <policy P>
bool has_mass(const P& p, const head_ref& head, const head_state& state) {
  bool found = false;
  with_mass(p, head, state, [&](const auto&, bool own) { found = own; });
  for (index_t s = 0; s < head.length() && !found; ++s) {
    found = head.log_mass(s) != 0;
  }
  return found;
}

/// Edits the logits of one head, `[cells, tokens]` of query heads `first` and on in `kq`, which the
/// softmax multiplies by `factor` before its mask: masses of its slots, and no attention to those
/// of `entries`, the cells in use before the micro-batch, that only longer heads hold.
template <policy P>
void edit_logits(const P& p, const head_ref& head, const head_state& state, const index_t* cells,
                 std::span<const index_t> entries, ggml_tensor* kq, float factor, index_t first) {
  constexpr index_t fresh = -1, hole = -2;
  std::vector<index_t> slot_of(static_cast<std::size_t>(kq->ne[0]), fresh);
  for (const index_t cell : entries) {
    slot_of[static_cast<std::size_t>(cell)] = hole;
  }
  for (index_t s = 0; s < head.length(); ++s) {
    slot_of[static_cast<std::size_t>(cells[s])] = s;
  }
  const float cap = head.spec().soft_cap;
  const auto dot_of = [&](float x) {
    return cap > 0 ? cap / head.scale() * std::atanh(factor * x / cap) : x;
  };
  with_mass(p, head, state, [&](const auto& mass, bool own) {
    for (index_t cell = 0; cell < kq->ne[0]; ++cell) {
      const index_t s = slot_of[static_cast<std::size_t>(cell)];
      if (s == fresh || (s >= 0 && !own && head.log_mass(s) == 0)) {
        continue;
      }
      for (index_t g = first; g < first + head.group(); ++g) {
        for (index_t t = 0; t < kq->ne[1]; ++t) {
          float& x = *element(kq, cell, t, g);
          x = s == hole ? -std::numeric_limits<float>::infinity() : mass(s, dot_of(x)) / factor;
        }
      }
    }
  });
}

/// The engine's softmax `p [group, stride]` leaves no log-sum-exp: it is the logit of each query
/// head's likeliest slot, less the logarithm of its probability. `q [group, dim]`, `out [group]`.
template <policy P>
void log_sum_exp_of(const P& policy, const head_ref& head, const head_state& state, const float* p,
                    index_t stride, const float* q, float* out) {
  with_mass(policy, head, state, [&](const auto& mass, bool) {
    for (index_t g = 0; g < head.group(); ++g, p += stride, q += head.dim()) {
      const auto* const best = std::max_element(p, p + head.length());
      const auto s = static_cast<index_t>(best - p);
      out[g] = mass(s, score::dot(row<const float>{q}, head.key(s), head.dim())) - std::log(*best);
    }
  });
}

}  // namespace kvmeld::llama
