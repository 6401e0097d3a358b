// SPDX-License-Identifier: MIT
/// KeepKV's merge of several slots into one.
#pragma once

#include <cmath>  // std::exp
#include <span>

#include "kvmeld/merge/plan.hpp"
#include "kvmeld/merge/rows.hpp"
#include "kvmeld/policies/keepkv/estimate.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld {
inline namespace v0 {
namespace detail {

/// What members become that weigh `w = p exp(S)` each (eqs. 7, 25, 26), in logarithms:
///
///     A = ln Σ w    P = ln Σ p    M = Σ ω S    r = (A − P)/M    ω = w / Σ w
///     r in [1/2, 2]: k = r Σ ω k, β = P;  else k = Σ ω k, β = A − M;  v = Σ ω v
///
/// The second is ours: as exact for the present query, and stable where M is near 0.
struct vote_merge {
  double weight = 0;    ///< A
  float key_scale = 1;  ///< r
  float log_mass = 0;   ///< β

  /// Slot ↦ `votes`, ln p, and `estimate`, S. Unless `scales`: r = 1 and β = P whatever M is.
  template <class Votes, class Estimate>
  static vote_merge of(std::span<const index_t> members, Votes votes, Estimate estimate,
                       bool scales) {
    const auto sum = [&](auto log_of) {
      return log_sum(members.size(), [&](std::size_t i) { return log_of(members[i]); });
    };
    const double a = sum([&](index_t s) { return votes(s) + estimate(s); });
    const double p = sum(votes);
    if (!scales) {
      return {a, 1.0F, static_cast<float>(p)};
    }
    double mean = 0;
    for (const index_t s : members) {
      mean += std::exp(votes(s) + estimate(s) - a) * estimate(s);
    }
    const double r = (a - p) / mean;
    return r >= 0.5 && r <= 2 ? vote_merge{a, static_cast<float>(r), static_cast<float>(p)}
                              : vote_merge{a, 1.0F, static_cast<float>(a - mean)};
  }

  /// ω of a member that weighs ln w.
  float share(double log_weight) const { return static_cast<float>(std::exp(log_weight - weight)); }
};

/// The rows that `work` names: members ↦ `merged`, a `vote_merge`; slot ↦ `log_weight`, its ln w.
template <class Merged, class LogWeight>
void write_votes(const kv_head auto& head, Merged merged, LogWeight log_weight, slot_scratch& work,
                 merge_plan& out) {
  out.reset(head.length());
  merge::for_each_row(work, [&](std::span<const index_t> members) {
    if (members.size() == 1) {
      return out.keep(members[0], head.log_mass(members[0]));
    }
    const vote_merge made = merged(members);
    for (const index_t s : members) {
      const float w = made.share(log_weight(s));
      out.add({s, made.key_scale * w, w});
    }
    out.end_row(made.log_mass);
  });
}

}  // namespace detail
}  // namespace v0
}  // namespace kvmeld
