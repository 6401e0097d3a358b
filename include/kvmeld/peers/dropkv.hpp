// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::fill
#include <limits>     // std::numeric_limits
#include <vector>

#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"

namespace kvmeld::inline v0 {

/// DropKV (OpenReview MqfNzH3TVH): what the eviction of each slot alone does to the outputs.
///   score   s_j = Σ_i (p_ij / (1 − p_ij))² ‖v_j − o_i‖² over the last W queries and the group's
///           heads, which is ‖o_i without j − o_i‖²; averaged over K neighbours in position, zeros
///           beyond the ends
///   select  sinks and the last W tokens, then the top of the rest by s
///   match   none: the others are evicted
/// Prompt only. A slot that leaves a query nothing ranks highest.
struct dropkv {
  index_t window = 32;
  index_t sinks = 4;
  index_t kernel = 7;

  static constexpr std::string_view name() { return "dropkv"; }
  static constexpr std::tuple options{
      option("window", &dropkv::window, 1, any_count,
             "latest queries that count, whose tokens stay"),
      option("sinks", &dropkv::sinks, 0, any_count, "first tokens, never evicted (the authors: 0)"),
      option("kernel", &dropkv::kernel, 1, any_count,
             "slots that a score is the mean over, an odd number")};
  static constexpr bool supports_decode() { return false; }
  static constexpr column change{0, "change"};
  static constexpr std::array columns{change};
  kvmeld::prompt_use prompt_use() const {
    return {.observes = true, .reach = window - 1, .latest = window};
  }
  void validate() const {
    expects(kernel % 2 == 1, "dropkv: expected an odd kernel, got ", kernel);
  }

  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    using row_map = Eigen::Map<Eigen::ArrayXd>;
    const index_t n = head.length(), dim = head.value_dim();
    // In double: v − o are differences of near numbers where one slot has nearly all attention.
    std::vector<float> value(as_size(dim));
    std::vector<double> values(as_size(n, dim)), changed(as_size(n));
    const auto v = [&](index_t s) { return row_map(values.data() + std::ptrdiff_t{s} * dim, dim); };
    for (index_t s = 0; s < n; ++s) {
      to_floats(head.value(s), dim, value.data());
      std::ranges::copy(value, v(s).data());
    }
    const auto last = queries.reference(window);
    score::query_blocks block(head, last);
    Eigen::ArrayXd out(dim), without(dim);
    block.each([&] {
      const index_t slots = block.visible();
      if (slots == 0) {
        return;  // queries before the first token
      }
      block.multiply(slots);
      for (index_t r = 0; r < block.rows(); ++r) {
        const auto sink = block.sink(r);
        const auto all = block.exponentials(r, slots, block.position(r), sink);
        const auto mass = block.row_of(r, slots);
        // What the slot of most attention leaves is added up by itself: it may be nearly nothing.
        index_t top = 0;
        const double most{mass.maxCoeff(&top)};
        double others = sink.max == sink.nothing ? 0 : double{sink.below(all.max)};
        without.setZero();
        for (index_t s = 0; s < slots; ++s) {
          const double own{s == top ? 0 : mass[s]};
          others += own, without += own * v(s);
        }
        const double sum = others + most;
        out = (without + most * v(top)) / sum;
        for (index_t s = 0; s < slots; ++s) {
          const double own{mass[s]}, odds = own / (sum - own);
          if (s != top) {
            changed[as_size(s)] += own > 0 ? odds * odds * (v(s) - out).square().sum() : 0;
          } else if (most > 0) {
            double& sum_of_slot = changed[as_size(s)];
            sum_of_slot = others > 0 ? sum_of_slot + (without / others - out).square().sum()
                                     : std::numeric_limits<double>::infinity();
          }
        }
      }
    });
    const auto s = state.column(change);
    std::transform(changed.begin(), changed.end(), s.begin(),
                   [](double x) { return static_cast<float>(x); });
    score::average_pool(
        head, [](index_t) { return true; }, kernel, true, s);
  }

  protection protects(const kv_head auto&, index_t) const {
    return {.sinks = sinks, .recent = window};
  }
  float score(const kv_head auto&, const head_state& state, index_t slot) const {
    return state.column(change)[as_size(slot)];
  }
};

}  // namespace kvmeld::inline v0
