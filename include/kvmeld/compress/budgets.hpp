// SPDX-License-Identifier: MIT
/// Budgets of one's own: of layers, of a model's heads by one threshold, and a profile of these for
/// the next prompts. Every function's counts sum to exactly the given total.
#pragma once

#include <algorithm>  // std::clamp, std::max_element, std::ranges::any_of
#include <cmath>      // std::exp, std::floor, std::sqrt
#include <cstdint>    // std::int64_t
#include <istream>
#include <limits>  // std::numeric_limits
#include <ostream>
#include <span>
#include <string_view>
#include <vector>

#include "kvmeld/config.hpp"
#include "kvmeld/detail/bytes.hpp"
#include "kvmeld/detail/order.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld::inline v0 {

namespace detail {

/// The reals `clamp(c · weight, least, most)` with the one `c` for which they sum to `total`: what
/// one is cut off or filled up by is taken from the others in proportion.
inline std::vector<double> filled(std::span<const double> weights, double total, double least,
                                  double most) {
  std::vector<double> x(weights.size());
  std::vector<char> fixed(weights.size(), 0);
  for (;;) {
    double weight = 0, rest = total;
    for (std::size_t i = 0; i < x.size(); ++i) {
      weight += fixed[i] != 0 ? 0 : weights[i];
      rest -= fixed[i] != 0 ? x[i] : 0;
    }
    double added = 0;  // by clamping those that are still free
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (fixed[i] == 0) {
        x[i] = rest * weights[i] / weight;
        added += std::clamp(x[i], least, most) - x[i];
      }
    }
    // Too much was added: those below stay fixed. Too much was cut: those above do.
    bool changed = false;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const bool below = x[i] < least && added >= 0, above = x[i] > most && added <= 0;
      if (fixed[i] == 0 && (below || above)) {
        x[i] = below ? least : most;
        fixed[i] = 1, changed = true;
      }
    }
    if (!changed) {
      return x;
    }
  }
}

}  // namespace detail

/// `total` slots in proportion to `weights` (above 0), each share within [least, most]; rounded by
/// largest remainders, ties to the lower index. Refused: sums that cannot be reached.
inline std::vector<index_t> proportional_budgets(std::span<const double> weights, index_t total,
                                                 index_t least, index_t most) {
  const auto n = static_cast<std::int64_t>(weights.size());
  expects(n > 0 && least >= 0 && least <= most && n * least <= total && n * most >= total,
          "budgets: expected ", n * least, " to ", n * most, " slots for ", n, " shares of ", least,
          " to ", most, ", got ", total);
  for (const double w : weights) {
    expects(w > 0 && std::isfinite(w), "budgets: expected finite weights above 0, got ", w);
  }
  const auto x = detail::filled(weights, total, least, most);
  std::vector<index_t> budget;
  std::vector<detail::keyed_slot> by_remainder;
  index_t missing = total;
  for (const double share : x) {
    const double whole = std::floor(share);
    by_remainder.push_back(
        {detail::descending(share - whole), static_cast<index_t>(budget.size())});
    budget.push_back(static_cast<index_t>(whole));
    missing -= budget.back();
  }
  detail::select(by_remainder, missing);
  for (std::size_t i = 0; i < as_size(missing); ++i) {
    ++budget[as_size(by_remainder[i].slot)];
  }
  return budget;
}

/// Population variance: of a head's column sums of the prompt's attention it is D2O's F (eq. 4).
inline double variance(std::span<const float> x) {
  double mean = 0, square = 0;
  for (const float e : x) {
    mean += double{e} / static_cast<double>(x.size());
  }
  for (const float e : x) {
    square += (double{e} - mean) * (double{e} - mean) / static_cast<double>(x.size());
  }
  return square;
}

/// The layers that D2O's authors' code keeps whole, in addition to the budget: 0, 1 and the last.
inline std::vector<index_t> d2o_exempt_layers(index_t layers) {
  std::vector<index_t> exempt;
  for (index_t l = 0; l < layers; ++l) {
    if (l < 2 || l == layers - 1) {
      exempt.push_back(l);
    }
  }
  return exempt;
}

/// D2O's budgets `[layers]` (arXiv 2406.13035, eqs. 4–5 and 13–16, as the authors' code has them):
/// `S_l = α_l · total`, `α_l = exp(−F_l)/Σ exp(−F_m)`, so that the more concentrated a layer's
/// attention, the smaller its share. `F_l`: the variances of a layer's heads, min–max normalised to
/// [0, 1] and averaged (raw variances let one layer take all). Each within [length/100, length].
/// `variances [layers, heads]`; `length` tokens of the prompt; `total` slots of all layers
/// together, those included that are `exempt` and keep all (`d2o_exempt_layers`).
inline std::vector<index_t> layer_budgets(std::span<const double> variances, index_t layers,
                                          index_t length, index_t total,
                                          std::span<const index_t> exempt = {}) {
  expects(layers > 0 && !variances.empty() && variances.size() % as_size(layers) == 0,
          "layer_budgets: expected variances [", layers, ", heads], got ", variances.size(),
          " numbers");
  expects(length > 0, "layer_budgets: expected at least 1 token, got ", length);
  for (const index_t l : exempt) {
    expects(l >= 0 && l < layers, "layer_budgets: expected exempt layers 0 to ", layers - 1,
            ", got ", l);
  }
  const std::size_t heads = variances.size() / as_size(layers);
  std::vector<index_t> budget(as_size(layers), length), others;
  std::vector<double> weights;
  std::int64_t rest = total;
  for (index_t l = 0; l < layers; ++l) {
    if (std::ranges::find(exempt, l) != exempt.end()) {
      rest -= length;
      continue;
    }
    const auto of_layer = variances.subspan(as_size(l) * heads, heads);
    const auto [low, high] = std::ranges::minmax(of_layer);
    double f = 0;
    for (const double x : of_layer) {
      f += (high > low ? (x - low) / (high - low) : 0) / static_cast<double>(heads);
    }
    weights.push_back(std::exp(-f));
    others.push_back(l);
  }
  expects(rest >= 0 && (rest == 0 || !others.empty()), "layer_budgets: expected ",
          others.empty() ? "" : "at least ", total - rest, " slots (the exempt layers'), got ",
          total);
  if (!others.empty()) {
    const auto shares =
        proportional_budgets(weights, static_cast<index_t>(rest), (length + 99) / 100, length);
    for (std::size_t i = 0; i < others.size(); ++i) {
      budget[as_size(others[i])] = shares[i];
    }
  }
  return budget;
}

/// One threshold over a model: the `total` highest of `scores [heads, slots]`, those of all heads
/// of all layers, are chosen, and a head gets as many slots as are its own: heads that look things
/// up get many, most get few. No floor; at most `most [heads]` each (at least 0), what is more goes
/// to the others. The counts sum to `total`; ties go to the lower head, then to the lower slot, NaN
/// is last. `scores`: of the slots that may be chosen, so not of the sinks and the latest.
/// O(scores), and one byte for each.
/// Refused: scores of another shape, totals that cannot be reached.
inline std::vector<index_t> global_budgets(std::span<const float> scores, index_t total,
                                           std::span<const index_t> most) {
  const auto heads = most.size();
  expects(heads > 0 && scores.size() % heads == 0 &&
              scores.size() <= as_size(std::numeric_limits<index_t>::max()),
          "global_budgets: expected scores [", heads, ", slots], got ", scores.size(), " numbers");
  const auto slots = static_cast<index_t>(scores.size() / heads);
  std::int64_t all = 0;
  for (const index_t n : most) {
    expects(n >= 0, "global_budgets: expected at least 0 slots per head, got ", n);
    all += std::min(n, slots);
  }
  expects(total >= 0 && total <= all, "global_budgets: expected 0 to ", all, " slots, got ", total);
  std::vector<char> out(scores.size());  // of each head those after the `most` best
  for (std::size_t h = 0; h < heads; ++h) {
    const auto own = scores.subspan(h * as_size(slots), as_size(slots));
    const auto of_head = [&](index_t s) { return rank(own[as_size(s)]); };
    const auto any = [](index_t) { return false; };
    if (most[h] < slots) {
      const auto last = search::kth_largest(slots, std::max(most[h], index_t{1}), any, of_head);
      for (index_t s = 0; s < slots; ++s) {
        out[h * own.size() + as_size(s)] = most[h] == 0 || last.below(of_head(s), s) ? 1 : 0;
      }
    }
  }
  std::vector<index_t> budget(heads, 0);
  if (total > 0) {
    const auto of_all = [&](index_t i) { return rank(scores[as_size(i)]); };
    const auto is_out = [&](index_t i) { return out[as_size(i)] != 0; };
    const auto n = static_cast<index_t>(scores.size());
    const auto last = search::kth_largest(n, total, is_out, of_all);
    for (index_t i = 0; i < n; ++i) {
      budget[as_size(i / slots)] += is_out(i) || last.below(of_all(i), i) ? 0 : 1;
    }
  }
  return budget;
}
/// The same with at most `most` (above 0) for each of `heads`.
inline std::vector<index_t> global_budgets(std::span<const float> scores, index_t heads,
                                           index_t total,
                                           index_t most = std::numeric_limits<index_t>::max()) {
  expects(heads > 0, "global_budgets: expected at least 1 head, got ", heads);
  expects(most > 0, "global_budgets: expected at least 1 slot per head, got ", most);
  return global_budgets(scores, total, std::vector<index_t>(as_size(heads), most));
}

/// How a model's slots are divided between its heads: what `global_budgets` gave on some prompts.
/// On other prompts as good as a threshold of their own, and known before the first layer is read,
/// so that an engine can compress layer by layer. And what the heads' errors weigh, if that was
/// measured: slots that all heads have, as clusters of `fold`, are worth more where it is much.
class budget_profile {
 public:
  /// Of no prompt yet.
  explicit budget_profile(index_t heads) : slots_(as_size(heads)), errors_(slots_.size()) {
    expects(heads > 0, "budget_profile: expected at least 1 head, got ", heads);
  }

  index_t heads() const { return static_cast<index_t>(slots_.size()); }  ///< heads of the model
  /// Slots `[heads]`, summed over the prompts.
  std::span<const std::int64_t> slots() const { return slots_; }
  /// Errors `[heads]`, summed over the prompts.
  std::span<const double> errors() const { return errors_; }
  /// Did a prompt that was added measure errors?
  bool has_errors() const {
    return std::ranges::any_of(errors_, [](double e) { return e > 0; });
  }
  bool operator==(const budget_profile&) const = default;
  friend void save(std::ostream& out, const budget_profile& profile);
  friend void load(std::istream& in, budget_profile& profile);

  /// Counts in the budgets `[heads]` of a prompt. Refused: another number of heads, budgets below
  /// 0.
  void add(std::span<const index_t> budgets) {
    expects(budgets.size() == slots_.size(), "budget_profile: expected budgets of ", slots_.size(),
            " heads, got ", budgets.size());
    for (const index_t b : budgets) {
      expects(b >= 0, "budget_profile: expected budgets of at least 0 slots, got ", b);
    }
    for (std::size_t h = 0; h < slots_.size(); ++h) {
      slots_[h] += budgets[h];
    }
  }

  /// Counts in the errors `[heads]` of a prompt: of each head the square of what it adds wrongly to
  /// the residual stream, relative to that, as `evaluate` measures it. Refused: another number of
  /// heads, errors below 0, NaN and Inf.
  void add_errors(std::span<const double> errors) {
    expects(errors.size() == errors_.size(), "budget_profile: expected errors of ", errors_.size(),
            " heads, got ", errors.size());
    for (const double e : errors) {
      expects(e >= 0 && std::isfinite(e),
              "budget_profile: expected finite errors of at least 0, got ", e);
    }
    for (std::size_t h = 0; h < errors_.size(); ++h) {
      errors_[h] += errors[h];
    }
  }

  /// `total` slots in proportion to the roots of the errors, within [least, most] a head: where a
  /// head's squared error falls as 1 / slots, their sum is least so. Refused: a profile without
  /// errors, totals that cannot be reached.
  std::vector<index_t> by_errors(index_t total, index_t least, index_t most) const {
    expects(has_errors(), "budget_profile: expected errors");
    // A head without any shares what the others cannot take.
    const double some = 1e-9 * std::sqrt(*std::max_element(errors_.begin(), errors_.end()));
    std::vector<double> weights;
    for (const double e : errors_) {
      weights.push_back(std::sqrt(e) + some);
    }
    return proportional_budgets(weights, total, least, most);
  }

  /// `total` slots in the profile's proportions, at most `most` a head; rounded by largest
  /// remainders, ties to the lower head. A profile of one prompt gives that prompt's budgets back.
  /// Refused: a profile of nothing, totals that cannot be reached.
  std::vector<index_t> budgets(index_t total, index_t most) const {
    double sum = 0;
    for (const std::int64_t s : slots_) {
      sum += static_cast<double>(s);
    }
    expects(sum > 0, "budget_profile: expected a profile of at least 1 slot, got an empty one");
    std::vector<double> weights;  // a head without any shares what the others cannot take
    for (const std::int64_t s : slots_) {
      weights.push_back(static_cast<double>(s) + 1e-9 * sum);
    }
    return proportional_budgets(weights, total, 0, most);
  }

 private:
  static constexpr std::string_view magic = "kvprof\r\n";
  static constexpr std::uint32_t version = 2;

  std::vector<std::int64_t> slots_;
  std::vector<double> errors_;
};

/// Saves a profile: `kvprof\r\n`, u32 version 2, u32 heads, u64 slots of each, f64 errors of each,
/// CRC-32 of all that; little-endian. Refused: a stream that fails.
inline void save(std::ostream& out, const budget_profile& profile) {
  detail::byte_writer to(out);
  to.put_text(budget_profile::magic);
  to.put(budget_profile::version);
  to.put(profile.heads());
  for (const std::int64_t s : profile.slots()) {
    to.put(s);
  }
  for (const double e : profile.errors()) {
    to.put(e);
  }
  to.finish();
}

/// What `save` saved, over a profile of as many heads.
/// Refused, with nothing changed: anything but a profile, another version, another number of heads,
/// counts that cannot be, an end too early, another checksum.
inline void load(std::istream& in, budget_profile& profile) {
  detail::byte_reader from(in);
  expects(errc::corrupt_file, from.get_text(budget_profile::magic.size()) == budget_profile::magic,
          "load: expected a saved profile, got other bytes");
  const auto version = from.get<std::uint32_t>();
  expects(errc::corrupt_file, version == budget_profile::version,
          "load: expected a profile of version ", budget_profile::version, ", got ", version);
  const auto heads = from.get<index_t>();
  expects(errc::corrupt_file, heads == profile.heads(), "load: expected a profile of ",
          profile.heads(), " heads, got ", heads);
  budget_profile loaded(heads);
  for (std::int64_t& s : loaded.slots_) {
    s = from.get<std::int64_t>();
    expects(errc::corrupt_file, s >= 0, "load: expected at least 0 slots per head, got ", s);
  }
  for (double& e : loaded.errors_) {
    e = from.get<double>();
    expects(errc::corrupt_file, e >= 0 && std::isfinite(e),
            "load: expected finite errors of at least 0, got ", e);
  }
  from.finish();
  profile = loaded;
}

}  // namespace kvmeld::inline v0
