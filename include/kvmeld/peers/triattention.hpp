// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::max
#include <cmath>      // std::sqrt
#include <span>

#include "kvmeld/detail/product.hpp"
#include "kvmeld/memory/convert.hpp"
#include "kvmeld/policies/policy.hpp"

namespace kvmeld::inline v0 {

/// TriAttention (arXiv 2604.04921): what future queries attend to by distance, were all of them
/// their mean.
///   score   per query head, of rotated pairs f as complex numbers, with φ_f the angle of E q_f
///   over
///           k_f, both un-rotated: the mean over Δ = 1, 2, 4 … 65,536 of
///           Σ_f |E q_f| |k_f| cos(ω_f d + φ_f) + Σ_f (E|q_f| − |E q_f|) |k_f|,
///           d the distance of key j from the position Δ after the newest. Scaled to mean 0 and
///           deviation 1 over the slots that may be evicted; then the largest of the group.
///   select  sinks and the last W, then the top of the rest by s (the paper: prompts stay whole)
///   match   none: the others are evicted
/// The first sum is one dot product: E q rotated to the mean of these positions, with the key as
/// stored. Elements that do not rotate are in it.
struct triattention {
  index_t sinks = 4;
  index_t window = 0;
  /// Of this head's queries, `[group, dim + dim / 2]`: E q un-rotated, E|q_f|. Measured elsewhere
  /// (`statistics`), of the caller, who keeps it alive. Empty: of all queries so far.
  std::span<const float> calibration = {};

  static constexpr std::string_view name() { return "triattention"; }
  static constexpr attention_support supports() {
    return {.alibi = false, .why = "its distances are RoPE's"};
  }
  static constexpr std::tuple options{
      option("sinks", &triattention::sinks, 0, any_count, "first tokens, never evicted"),
      option("window", &triattention::window, 0, any_count, "latest tokens, never evicted")};
  /// How many queries were measured, and what `calibration` is of them.
  static constexpr std::size_t memory(index_t dim, index_t group, index_t) {
    return 1 + size(dim, group);
  }
  protection protects(const kv_head auto&, index_t) const {
    return {.sinks = sinks, .recent = window};
  }
  index_t eviction_batch(index_t slots) const { return slots / 8; }
  bool uses_attention() const { return calibration.empty(); }
  observation_needs needs() const { return {.query = calibration.empty()}; }
  kvmeld::prompt_use prompt_use() const { return {.observes = calibration.empty()}; }

  /// What a head's queries were measured as, for `calibration`.
  static std::span<const float> statistics(const kv_head auto& head, const head_state& state) {
    return state.memory().subspan(1, size(head.dim(), head.group()));
  }

  void observe(const kv_head auto& head, head_state& state, const observation& observed) const {
    if (calibration.empty()) {
      observe(head, state, query_of_step(name(), observed, head.dim()));
    }
  }
  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    rotation turn(head.spec().rope, head.dim());
    for (index_t i = 0; calibration.empty() && i < queries.count; ++i) {
      count(head, state, turn, queries, i);
    }
  }

  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    const index_t n = head.length(), dim = head.dim(), group = head.group();
    expects(calibration.empty() || calibration.size() == size(dim, group),
            "triattention: expected a calibration [", group, ", ", dim + dim / 2, "], got ",
            calibration.size(), " floats");
    const std::span<const float> known =
        calibration.empty() ? statistics(head, state) : calibration;
    const auto is_protected = protected_slots(head, sinks, window);
    const rotary& rope = head.spec().rope;
    const index_t pairs = rope.rotated(dim) / 2;
    detail::arena scratch(work.numbers, 2 * as_size(n) + as_size(dim) * 2 + as_size(pairs));
    auto largest = scratch.column(n), score = scratch.column(n);
    auto query = scratch.column(dim), key = scratch.column(dim), spread = scratch.column(pairs);
    largest.setConstant(lowest_score);
    for (index_t g = 0; g < group; ++g) {
      const float* const mean = &known[as_size(g, dim + dim / 2)];
      std::copy_n(mean, dim, query.data());
      for (index_t p = 0; p < pairs; ++p) {
        const auto [a, b] = rope.pair(p, dim);
        spread[p] = mean[dim + p] - magnitude(mean[a], mean[b]);
        turn_ahead(rope, p, dim, newest_position(head), row<float>{query.data()});
      }
      for (index_t s = 0; s < n; ++s) {
        to_floats(head.key(s), dim, key.data());
        score[s] = query.dot(key);
        for (index_t p = 0; p < pairs; ++p) {
          const auto [a, b] = rope.pair(p, dim);
          score[s] += spread[p] * magnitude(key[a], key[b]);
        }
      }
      standardise(is_protected, score);
      largest = largest.cwiseMax(score);
    }
    evict(head, target, is_protected, search::column_score({largest.data(), as_size(n)}), work,
          out);
  }

 private:
  static constexpr std::size_t size(index_t dim, index_t group) {
    return as_size(group, dim + dim / 2);
  }
  static float magnitude(float a, float b) { return std::sqrt(a * a + b * b); }

  /// One query's group more in the means.
  static void count(const kv_head auto& head, head_state& state, rotation& turn,
                    const query_view<float>& queries, index_t i) {
    const index_t dim = head.dim();
    const rotary& rope = head.spec().rope;
    const std::span<float> all = state.memory();
    const float n = all[0] = std::min(all[0] + 1, static_cast<float>(1 << 24));
    float x[detail::row_floats];
    turn.by(-queries.position_of(i, head.next_position()));
    for (index_t g = 0; g < head.group(); ++g) {
      float* const mean = &all[1 + as_size(g, dim + dim / 2)];
      std::copy_n(queries.at(g, i), dim, x);
      turn(x);
      for (index_t e = 0; e < dim; ++e) {
        mean[e] += (x[e] - mean[e]) / n;
      }
      for (index_t p = 0; p < rope.rotated(dim) / 2; ++p) {
        const auto [a, b] = rope.pair(p, dim);
        mean[dim + p] += (magnitude(x[a], x[b]) - mean[dim + p]) / n;
      }
    }
  }

  /// Rotates pair `p` of `query` by the mean of the rotations to Δ positions after the newest.
  static void turn_ahead(const rotary& rope, index_t p, index_t dim, index_t newest,
                         row<float> query) {
    constexpr index_t distances = 17;
    double cosine = 0, sine = 0;
    for (index_t i = 0; i < distances; ++i) {
      const double angle = rope.frequency(p, dim) * (newest + std::exp2(i));
      cosine += std::cos(angle) / distances, sine += std::sin(angle) / distances;
    }
    rope.turn_pair(query, dim, p, cosine, sine);
  }

  /// To mean 0 and deviation 1 over the slots that are not protected; broken ones do not count.
  template <class Protected, class Column>
  static void standardise(Protected is_protected, Column& score) {
    const auto count = static_cast<index_t>(score.size());
    const auto mean_of = [&](auto number) {
      double sum = 0, n = 0;
      for (index_t s = 0; s < count; ++s) {
        if (!is_protected(s) && std::isfinite(score[s])) {
          sum += number(double{score[s]}), ++n;
        }
      }
      return sum / std::max(n, 1.0);
    };
    const double mean = mean_of([](double x) { return x; });
    const double variance = mean_of([&](double x) { return (x - mean) * (x - mean); });
    const double deviation = std::max(std::sqrt(variance), 1e-6);  // the authors' least
    for (float& x : score) {
      x = static_cast<float>((x - mean) / deviation);
    }
  }
};

}  // namespace kvmeld::inline v0
