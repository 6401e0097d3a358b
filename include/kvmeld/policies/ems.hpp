// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::min
#include <cmath>      // std::floor
#include <utility>    // std::pair
#include <vector>

#include "kvmeld/policies/ems/attention.hpp"
#include "kvmeld/policies/ems/match.hpp"
#include "kvmeld/policies/ems/table.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"

namespace kvmeld::inline v0 {

/// EMS (Li et al. 2024, arXiv 2412.08521): tokens that are alike share one entry, and keep their
/// own norms and scores. The budget counts entries (slots); the table of tokens holds γ times that.
///   score   s = max(s_glo · mean(s_loc)/mean(s_glo), s_loc), s_loc past + current window     eq. 2
///           pooled after a prompt; an entry's score is the sum of its tokens'
///   select  sinks, the last W as they are; of the rest the N_imp top entries are class centres
///   match   a prompt: the next (γ − 1) N_imp, decode: all others, to the centre of largest
///           R_ij = cos(k_i, k_j) cos(v_i, v_j)                                               eq. 5
///           R < τ: the zero class, evicted with all its tokens
///   merge   key Σ S_i k_i/‖k_i‖ at the centre's norm, value Σ S_i v_i / Σ S_i, S scores
///   attend  token t of an entry: ℓ_t = scale · ‖k_t‖ · q·k̂; never expanded: one dot product an
///           entry, Σ_t exp(ℓ_t) by `mass`
/// With `merge_unrotated` the keys that are merged are those before RoPE, and k̂ is rotated to each
/// token's own place: a dot product a token. N_tbm is appendix A's, (γ − 1) N_imp; §4.2 has (γ − 1)
/// N_budget.
/// Where the table is too small, the tokens of least s that are no centres are dropped. Decode
/// takes one entry a step, or several with a trigger; these match the centres as they were.
struct ems {
  index_t window = 32;  // W
  index_t kernel = 7;
  index_t sinks = 4;
  float gamma = 4;
  float threshold = 0.6F;  // τ
  bool with_position = true;
  bool merge_unrotated = false;
  index_t table = 0;
  group_combine combine = group_combine::sum;

  static constexpr std::string_view name() { return "ems"; }
  static constexpr std::tuple options{
      option("window", &ems::window, 1, any_count,
             "latest tokens that stay alone, and queries that count locally"),
      option("kernel", &ems::kernel, 1, any_count,
             "slots that a score is the mean over, an odd number"),
      option("sinks", &ems::sinks, 0, any_count, "first tokens that stay alone (the paper: 0)"),
      option("gamma", &ems::gamma, 1, 1024, "tokens per slot of the budget"),
      option("threshold", &ems::threshold, -1, 1, "redundancy below which a token is evicted"),
      option("with_position", &ems::with_position,
             "are keys compared as rotated, not as they were before?"),
      option("merge_unrotated", &ems::merge_unrotated, "are keys merged as they were before RoPE?"),
      option("table", &ems::table, 0, any_count,
             "tokens that may share entries; 0: (gamma - 1) times the capacity"),
      option(&ems::combine)};
  static constexpr std::array columns{
      // of the centres: `ems_table::field`
      column{0, "all", slot_reduce::anchor}, column{1, "past", slot_reduce::anchor},
      column{2, "current", slot_reduce::anchor},
      column{3, "norm", slot_reduce::anchor, -1},  // not counted
      column{4, "next", slot_reduce::anchor}};
  std::size_t memory(index_t, index_t group, index_t capacity) const {
    const double places = table > 0 ? table : rounded((double{gamma} - 1) * capacity);
    expects(places < search::max_tokens, "ems: expected a table of fewer than ", search::max_tokens,
            " tokens per head, got ", places);
    return detail::ems_table<head_state>::size(static_cast<std::size_t>(places), group);
  }
  static bool memory_follows_capacity() { return true; }  // names tokens beyond the slots
  index_t min_budget() const { return sinks + window + 1; }
  protection protects(const kv_head auto&, index_t) const {
    return {.sinks = sinks, .recent = window};
  }
  /// Scores are pooled where a plan is given queries, as after a prompt.
  kvmeld::prompt_use prompt_use() const {
    return {
        .observes = true, .reach = window - 1, .plans = prompt_use::planned::latest, .count = 1};
  }
  void validate() const {
    expects(kernel % 2 == 1, "ems: expected an odd kernel, got ", kernel);
    expects(!merge_unrotated || !with_position,
            "ems: expected with_position=0 with merge_unrotated=1, got 1");
  }
  static constexpr bool shares() { return true; }
  void shared_scores(const kv_head auto& head, const head_state& state,
                     std::span<float> out) const {
    const detail::ems_table<const head_state> tokens(state, head.group());
    for (index_t s = 0; s < head.length(); ++s) {
      out[as_size(s)] = 0;
      tokens.each(s, [&](index_t t) { out[as_size(s)] += tokens.at(tokens.all, t); });
    }
    score::write_shares(out, combine, head.group(), static_cast<double>(state.observed()), out);
  }

  void observe(const kv_head auto& head, head_state& state, const observation& observed) const {
    const detail::ems_table tokens(state, head.group());
    expects(observed.query != nullptr || tokens.sharing() == 0, "ems: expected the step's query");
    tokens.measure(head);
    const bool full = ++tokens.queries() >= static_cast<float>(window);
    const auto logits = detail::ems_logits(head, tokens, merge_unrotated);
    detail::each_token_attention(head, logits, tokens, observed, combine, [&](index_t t, float a) {
      tokens.at(tokens.all, t) += a;
      tokens.at(tokens.current, t) += a;
      if (full) {  // the window becomes the past
        tokens.at(tokens.past, t) = tokens.at(tokens.current, t);
        tokens.at(tokens.current, t) = 0;
      }
    });
    tokens.queries() = full ? 0 : tokens.queries();
  }

  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    const detail::ems_table tokens(state, head.group());
    // The window of a short last chunk reaches back: of the queries in `reach` the first `counted`
    // were summed with earlier chunks, the first `before_window` lie before the window.
    const auto local = queries.reference(window);
    const auto reach = local.count > queries.count ? local : queries;
    const index_t n = head.length(), counted = reach.count - queries.count,
                  before_window = reach.count - local.count;
    tokens.measure(head);
    tokens.queries() = 0;
    for (index_t s = 0; s < n; ++s) {
      tokens.each(s,
                  [&](index_t t) { tokens.at(tokens.past, t) = tokens.at(tokens.current, t) = 0; });
    }
    const auto take = [&](index_t t, float all, float last) {
      tokens.at(tokens.all, t) += all;
      tokens.at(tokens.past, t) += last;
    };
    if (tokens.sharing() > 0) {
      detail::each_token_attention(head, mass(head, state), tokens, reach, combine,
                                   [&](index_t i, index_t t, float a) {
                                     take(t, i < counted ? 0 : a, i < before_window ? 0 : a);
                                   });
      return;
    }
    std::vector<float> all(as_size(n)), last(all);
    column_scores(head, queries, {.window = local.count, .combine = combine},
                  {.total = all, .window = last});
    if (counted > 0) {
      column_scores(head, local, {.combine = combine}, {.total = last});
    }
    for (index_t s = 0; s < n; ++s) {
      take(s, all[as_size(s)], last[as_size(s)]);
    }
  }

  /// A prompt: scores are pooled, what is beyond the band goes.
  void plan(const kv_head auto& head, const head_state& state, const query_view<float>&,
            index_t target, slot_scratch& work, merge_plan& out) const {
    const detail::ems_table tokens(state, head.group());
    const auto s = pooled(head, tokens);
    plan(head, tokens, search::column_score(s), target, gamma - 1, work, out);
    out.set_measured(1);  // for `update_memory`: the scores were pooled
  }
  /// Decode: all that are no centres are to be merged.
  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    const detail::ems_table tokens(state, head.group());
    plan(head, tokens, detail::global_local(tokens, head.length()), target,
         static_cast<float>(head.length()), work, out);
  }

  /// Joins the lists of tokens as the rows say; the least of those that share entries make room.
  void update_memory(const kv_head auto& head, head_state& state, const merge_plan& change,
                     slot_scratch& work) const {
    const detail::ems_table tokens(state, head.group());
    tokens.measure(head);
    const index_t most = max_sharing(tokens, change.rows());
    if (!change.measured()) {
      return detail::update_table(head, tokens, change, most,
                                  detail::global_local(tokens, head.length()), work.marks);
    }
    const auto s = pooled(head, tokens);
    detail::update_table(head, tokens, change, most, search::column_score(s), work.marks);
  }

  auto mass(const kv_head auto& head, const head_state& state) const {
    using head_type = std::remove_cvref_t<decltype(head)>;
    const detail::ems_table<const head_state> tokens(state, head.group());
    return detail::ems_mass<head_type>{head, {head, tokens, merge_unrotated}};
  }

 private:
  /// Entries by weight; among equals the earlier token first, wherever in the head it lies.
  template <class Weight>
  static auto ranked(const kv_head auto& head, Weight weight) {
    return [&head, weight](index_t s) { return std::pair(rank(weight(s)), -head.position(s)); };
  }
  static double rounded(double x) { return std::floor(x + 0.5); }
  template <class State>
  index_t max_sharing(const detail::ems_table<State>& tokens, index_t slots) const {
    return static_cast<index_t>(
        std::min(rounded((double{gamma} - 1) * slots), static_cast<double>(tokens.places())));
  }
  template <class State>
  auto pooled(const kv_head auto& head, const detail::ems_table<State>& tokens) const {
    return detail::pooled_scores(head, tokens, detail::global_local(tokens, head.length()), window,
                                 kernel);
  }

  /// `score`: of a token; `band`: slots to be merged, for each centre.
  template <class State, class Score>
  void plan(const kv_head auto& head, const detail::ems_table<State>& tokens, Score score,
            index_t target, float band, slot_scratch& work, merge_plan& out) const {
    detail::expect_no_log_mass(head);
    const index_t n = head.length();
    const auto size = as_size(n);
    auto& numbers = work.numbers;
    const std::size_t turned = with_position ? 0 : size * as_size(head.dim()),
                      corrected = merge_unrotated ? as_size(target, head.dim()) : 0;
    numbers.resize(std::max(numbers.size(), 3 * size + turned + corrected));
    const auto weight = std::span(numbers).first(size),
               length_of_key = std::span(numbers).subspan(size, size),
               length_of_value = std::span(numbers).subspan(2 * size, size),
               keys = std::span(numbers).subspan(3 * size, turned),
               corrections = std::span(numbers).subspan(3 * size + turned, corrected);
    const auto alone = protected_slots(head, sinks, window);
    const auto weight_of = detail::entry_weight(tokens, score);
    index_t centres = target;
    for (index_t s = 0; s < n; ++s) {
      const auto i = as_size(s);
      weight[i] = weight_of(s);
      length_of_key[i] = search::key_norm(head, s);
      length_of_value[i] = kvmeld::norm(head.value(s), head.value_dim());
      centres -= alone(s) ? 1 : 0;
    }
    if (!with_position) {
      detail::unrotate_keys(head, keys);
    }
    const auto merged = static_cast<index_t>(
        std::min(rounded(double{band} * centres), static_cast<double>(n - target)));
    auto& into = work.row_of;
    const auto at = [](std::span<const float> x) {
      return [x](index_t s) { return x[as_size(s)]; };
    };
    const auto by_weight = ranked(head, at(weight));
    search::select(n, target + merged, alone, by_weight, work);  // the others go
    into.assign(size, -1);
    for (std::size_t s = 0; s < size; ++s) {
      into[s] = work.marks[s] != 0 ? static_cast<index_t>(s) : -1;
    }
    search::select(n, target, alone, by_weight, work);
    detail::match_entries(
        detail::ems_redundancy<std::remove_cvref_t<decltype(head)>>{head, length_of_key,
                                                                    length_of_value, keys},
        alone, threshold, work);
    detail::write_entries(head, tokens, at(length_of_key), at(weight),
                          merge_unrotated ? keys : std::span<const float>(), corrections, work,
                          out);
  }
};

}  // namespace kvmeld::inline v0
