// SPDX-License-Identifier: MIT
/// Budgets of layers. Every function's counts sum to exactly the given total.
#pragma once

#include <algorithm>  // std::clamp
#include <cmath>      // std::exp
#include <cstdint>    // std::int64_t
#include <numbers>    // std::numbers::pi
#include <span>
#include <vector>

#include "kvmeld/config.hpp"
#include "kvmeld/detail/order.hpp"

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

/// PyramidKV (arXiv 2406.02069): an arithmetic progression down to the last layer, which gets
/// `1/steepness` of the mean, the first `2 − 1/steepness` of it. Each within [1, length].
inline std::vector<index_t> pyramid_kv(index_t layers, index_t length, index_t total,
                                       double steepness = 20) {
  expects(layers > 0, "pyramid_kv: expected at least 1 layer, got ", layers);
  expects(steepness >= 1 && std::isfinite(steepness),
          "pyramid_kv: expected a finite steepness of at least 1, got ", steepness);
  std::vector<double> weights;
  weights.reserve(as_size(layers));
  const double last = 1 / steepness, first = 2 - last;
  for (index_t l = 0; l < layers; ++l) {
    weights.push_back(layers == 1 ? 1 : first + (last - first) * l / (layers - 1));
  }
  return proportional_budgets(weights, total, 1, length);
}

/// PyramidInfer (arXiv 2405.12532): cosine decay from weight 1 at the first layer to `least` at the
/// last. Each within [1, length].
inline std::vector<index_t> pyramid_infer(index_t layers, index_t length, index_t total,
                                          double least = 0.2) {
  expects(layers > 0, "pyramid_infer: expected at least 1 layer, got ", layers);
  expects(least > 0 && least <= 1, "pyramid_infer: expected a least weight in (0, 1], got ", least);
  std::vector<double> weights;
  weights.reserve(as_size(layers));
  for (index_t l = 0; l < layers; ++l) {
    const double turn = layers == 1 ? 0 : std::numbers::pi * l / (layers - 1);
    weights.push_back(least + (1 - least) * (1 + std::cos(turn)) / 2);
  }
  return proportional_budgets(weights, total, 1, length);
}

}  // namespace kvmeld::inline v0
