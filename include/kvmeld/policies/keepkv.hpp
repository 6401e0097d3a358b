// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::max
#include <cmath>      // std::exp, std::isfinite
#include <limits>     // std::numeric_limits
#include <vector>

#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"
#include "kvmeld/score/dense.hpp"
#include "kvmeld/score/softmax.hpp"
#include "kvmeld/search/match.hpp"

namespace kvmeld::inline v0 {
namespace detail {

/// `ln Σ exp(f(i))`, `i = 0 .. n−1`, over the numbers that are finite; −inf: none is.
template <class F>
double log_sum(std::size_t n, F f) {
  score::softmax<double> all;
  for (std::size_t i = 0; i < n; ++i) {
    if (const double y = f(i); std::isfinite(y)) {
      all.add(y);
    }
  }
  return all.log_sum_exp();
}

/// `S_s = ln mean_g exp(cap(scale · q_g·k_s))` of a query's heads, `query [group, dim]`.
float log_score_of(const kv_head auto& head, const float* query, index_t s) {
  const score::logit_terms terms(head);
  score::softmax<> all;
  for (index_t g = 0; g < head.group(); ++g) {
    const row<const float> q{query + std::ptrdiff_t{g} * head.dim()};
    all.add(terms.cap(head.scale() * score::dot(head.key(s), q, head.dim())));
  }
  return all.log_sum_exp() - std::log(static_cast<float>(head.group()));
}

/// Calls `take(first, S, count)` for block after block of slots with each S of a decode step,
/// log-mass not in it. From its probabilities, `p exp(lse)`; where these have underflown, from the
/// query. O(group · length), nothing allocated.
/// `Array`: a parameter, so that it is compiled where it is used.
template <class Array = dense::array, class Take>
void each_log_score(const kv_head auto& head, const observation& observed, Take take) {
  const index_t n = head.length(), group = head.group();
  const float heads = std::log(static_cast<float>(group));
  const float top = *std::ranges::max_element(observed.log_sum_exp);
  for (index_t first = 0; first < n; first += dense::array_size) {
    const index_t count = std::min(dense::array_size, n - first);
    Array mass = Array::Zero();
    for (index_t g = 0; g < group; ++g) {
      const auto at = as_size(g);
      const float share = std::exp(observed.log_sum_exp[at] - top);
      const float* p = observed.probabilities.data() + std::ptrdiff_t{g} * n + first;
      for (index_t i = 0; i < count; ++i) {
        mass[i] += share * p[i];
      }
    }
    Array now = mass.log() + (top - heads);
    int underflown = 0;  // is any? Mostly none.
    for (index_t i = 0; i < count; ++i) {
      now[i] -= head.log_mass(first + i);
      underflown |= static_cast<int>(!(mass[i] > 1e-30F));
    }
    for (index_t i = 0; underflown != 0 && i < count; ++i) {
      if (!(mass[i] > 1e-30F)) {
        now[i] = log_score_of(head, observed.query, first + i);
      }
    }
    take(first, now, count);
  }
}

/// The same for reference queries, each over the slots at or before its position: `take(i, first,
/// S, count)` for query `i` and a block of slots that all see, `take(i, s, S)` for one of another
/// block. The queries of a block are in their order.
template <class Array = dense::array, class Take>
void each_log_score(const kv_head auto& head, const query_view<float>& q, Take take) {
  const index_t group = head.group();
  dense::matrix queries(Eigen::Index{q.count} * group, head.dim());  // one query's heads together
  for (index_t i = 0; i < q.count; ++i) {
    for (index_t g = 0; g < group; ++g) {
      std::copy_n(q.at(g, i), head.dim(), &queries(Eigen::Index{i} * group + g, 0));
    }
  }
  const score::logit_terms terms(head);
  static_assert(max_tile_slots <= dense::array_size);
  dense::matrix logit = dense::matrix::Zero(queries.rows(), dense::array_size);
  each_tile_of_keys(head, [&](index_t first, const tile& keys) {
    const auto count = static_cast<index_t>(keys.rows());
    dense::set_product_transposed(terms.scale(), queries, keys, logit.leftCols(count));
    terms.cap_logits(logit.leftCols(count).array());
    for (index_t i = 0; i < q.count; ++i) {
      const auto of = [&](index_t g) {
        return Eigen::Map<const Array>(&logit(Eigen::Index{i} * group + g, 0));
      };
      Array most = of(0), sum = Array::Zero();
      for (index_t g = 1; g < group; ++g) {
        most = most.max(of(g));
      }
      for (index_t g = 0; g < group; ++g) {
        sum += (of(g) - most).exp();
      }
      const Array now = most + (sum / static_cast<float>(group)).log();
      const auto sees = [&, position = q.position_of(i, head.next_position())](index_t s) {
        return head.sees(s, position);
      };
      index_t visible = 0;
      for (index_t s = first; s < first + count; ++s) {
        visible += sees(s) ? 1 : 0;
      }
      if (visible == count) {
        take(i, first, now, count);
        continue;
      }
      for (index_t s = first; s < first + count; ++s) {
        if (sees(s)) {
          take(i, s, now[s - first]);
        }
      }
    }
  });
}

/// eq. 8: `s ← (a W s + s_now)/(a W + 1)` in logarithms, `W` the weights given so far.
struct moving_average {
  float decay = 0;  ///< a

  /// Of a block of slots.
  template <class Array>
  void operator()(float* log_score, float* weight_sum, const Array& now, index_t count) const {
    Array before = Array::Zero(), weight = Array::Zero();
    std::copy_n(log_score, count, before.data());
    std::copy_n(weight_sum, count, weight.data());
    const Array old = decay * weight, top = before.max(now), less = (-(before - now).abs()).exp();
    const auto averages = [&](index_t i) {  // finite numbers; without branches
      return static_cast<int>(old[i] > 0) & static_cast<int>(std::isfinite(before[i])) &
             static_cast<int>(std::isfinite(now[i]));
    };
    Array of_old, of_now;  // exp(before - top) and exp(now - top), of which one is 1
    int all = 1;
    for (index_t i = 0; i < Array::SizeAtCompileTime; ++i) {
      of_old[i] = before[i] < now[i] ? less[i] : 1.0F;
      of_now[i] = before[i] < now[i] ? 1.0F : less[i];
    }
    for (index_t i = 0; i < count; ++i) {
      all &= averages(i);
    }
    const Array sum = old + 1, after = top + ((old * of_old + of_now) / sum).log();
    std::copy_n(after.data(), count, log_score);
    std::copy_n(sum.data(), count, weight_sum);
    for (index_t i = 0; all == 0 && i < count; ++i) {
      if (averages(i) == 0) {
        log_score[i] = before[i], weight_sum[i] = weight[i];
        (*this)(log_score[i], weight_sum[i], now[i]);
      }
    }
  }

  void operator()(float& log_score, float& weight_sum, float now) const {
    const float old = decay * weight_sum;
    weight_sum = old + 1;
    if (old == 0 || !std::isfinite(log_score)) {
      log_score = now;
    } else if (now > log_score) {
      log_score = now + std::log((old * std::exp(log_score - now) + 1) / weight_sum);
    } else {
      log_score += std::log((old + std::exp(now - log_score)) / weight_sum);
    }
  }
};

/// Each slot's S takes in one more query, slot by slot or a block at a time: by the moving average
/// where there are weights, else as it is.
struct estimates {
  std::span<float> score, weight;
  moving_average average = {};

  void operator()(index_t s, float now) const {
    const auto i = as_size(s);
    if (weight.empty()) {
      score[i] = now;
    } else {
      average(score[i], weight[i], now);
    }
  }
  void operator()(index_t first, const auto& now, index_t count) const {
    const auto i = as_size(first);
    if (weight.empty()) {
      std::copy_n(now.data(), count, &score[i]);
    } else {
      average(&score[i], &weight[i], now, count);
    }
  }
};

/// The authors' estimate: the logits of the last queries, one column each, −inf where a query has
/// not seen the slot.
struct logit_window {
  index_t columns = 0;  ///< of the state, from the first on
  static constexpr float not_seen = -std::numeric_limits<float>::infinity();

  /// No query has seen anything.
  void clear(head_state& state) const {
    for (index_t c = 0; c < columns; ++c) {
      std::ranges::fill(state.column(c), not_seen);
    }
    state.memory()[0] = 0;
  }
  /// The column of the next query, cleared; `memory [1]` counts round.
  std::span<float> next(head_state& state) const {
    float& at = state.memory()[0];
    const auto column = state.column(static_cast<index_t>(at));
    at = at + 1 < static_cast<float>(columns) ? at + 1 : 0;
    std::ranges::fill(column, not_seen);
    return column;
  }
  /// How many queries in the window have seen slot `s`.
  index_t queries(const head_state& state, index_t s) const {
    index_t n = 0;
    for (index_t c = 0; c < columns; ++c) {
      n += at(state, c, s) != not_seen ? 1 : 0;
    }
    return n;
  }
  /// `ln Σ s` over them.
  double sum(const head_state& state, index_t s) const {
    return log_sum(as_size(columns),
                   [&](std::size_t c) { return double{at(state, static_cast<index_t>(c), s)}; });
  }
  /// Slot ↦ `ln Σ w s` over the window's queries: `latest` is the weight of the last one, 1 that of
  /// the first which any slot remembers, between them in a line.
  auto weighted_sums(const head_state& state, float latest) const {
    index_t rows = 0;
    for (index_t s = 0; latest != 1 && s < state.length(); ++s) {
      rows = std::max(rows, queries(state, s));
    }
    return [*this, &state, latest, rows](index_t s) {
      if (latest == 1) {
        return sum(state, s);
      }
      const auto now = static_cast<index_t>(state.memory()[0]);
      return log_sum(as_size(columns), [&](std::size_t i) {
        const auto c = static_cast<index_t>(i);
        const index_t before = (now - 1 - c + columns) % columns;  // queries since this one
        const double share = rows > 1 ? 1 - double(before) / (rows - 1) : 0;
        return double{at(state, c, s)} + std::log(1 + share * (double{latest} - 1));
      });
    };
  }
  /// `ln(mean s + epsilon)`
  double mean(const head_state& state, index_t s, float epsilon) const {
    const index_t seen_by = queries(state, s);
    const double mean = sum(state, s) - std::log(double(seen_by)),
                 floor = std::log(double{epsilon});
    return seen_by == 0 ? floor : log_sum(2, [&](std::size_t i) { return i == 0 ? mean : floor; });
  }
  static float at(const head_state& state, index_t c, index_t s) {
    return state.column(c)[as_size(s)];
  }
};

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

}  // namespace detail

/// KeepKV (Tian et al. 2025, arXiv 2504.09936): votes, and merges that leave the output of a query
/// as it was (ZIP) whose s is what S estimates: of the present one with decay 0 and one query head
/// per KV head, else nearly. β_j = ln p_j, p_j votes; S_j the estimate of ln s_j,
/// s_j = exp(scale · q·k_j), over the group's heads the mean.
///   score   ln w_j = β_j + S_j; S by a moving average of s           eq. 8
///           begun anew with a prompt's last queries
///   select  sinks, the most recent, then the top of the rest by w
///   match   nearest by cosine, merged at `similarity` or above, else evicted
///   merge   ω_j = w_j / Σ w    k = r Σ ω k    v = Σ ω v             eqs. 7, 25, 26
///           r and the slot's β as `vote_merge` has them; its S is A − β, A = ln Σ w: it weighs
///           what its members weighed
/// A prompt is merged first, then evicted (table 3): in descending order of w, each slot joins its
/// most similar leader or becomes one. Appendix B.3's layer budgets are not a policy's.
struct keepkv {
  /// The authors' code never scales keys (r = 1, β = P), and estimates s by its mean over a window.
  enum class mode { paper, code };

  index_t sinks = 4;
  float recent = 0.5F;
  float similarity = 0.8F;
  mode variant = mode::paper;
  index_t window = 32;
  float decay = 0.9F;  // a of the moving average; ours
  bool merge_first = true;
  float epsilon = 1e-6F;
  float distance_weight = 1;
  bool measures_shares = false;  ///< no option: `sharing` sets it

  static constexpr std::string_view name() { return "keepkv"; }
  attention_support supports() const {
    return {.alibi = false, .one_memory = variant == mode::code};  // the paper's keys are scaled
  }
  static constexpr std::tuple options{
      option("sinks", &keepkv::sinks, 0, any_count, "first tokens, never evicted"),
      option("recent", &keepkv::recent, 0, below_1, "share of the budget for the latest tokens"),
      option("similarity", &keepkv::similarity, -1, 1, "the cosine at which keys may merge"),
      option("variant", &keepkv::variant, 0, 1, "0 the paper's, 1 the authors' code's"),
      option("window", &keepkv::window, 1, any_count,
             "queries of a prompt that count; with variant=1 in decode too"),
      option("decay", &keepkv::decay, 0, below_1, "of the average; 0: the present query alone"),
      option("merge_first", &keepkv::merge_first,
             "does a prompt merge before it evicts? With variant=0"),
      option("epsilon", &keepkv::epsilon, above_0, any_number, "added to the mean; with variant=1"),
      option("distance_weight", &keepkv::distance_weight, above_0, any_number,
             "of the latest query in selection (the authors: 1.2); with variant=1")};
  // S and W (paper); code: the window's rows
  static constexpr column log_score{0, "log_score"}, weight_sum{1, "weight_sum"};
  std::vector<slot_stat> slot_stats() const {
    const bool paper = variant == mode::paper;
    const float initial = paper ? 0 : detail::logit_window::not_seen;
    std::vector<slot_stat> all(as_size(estimates()), {slot_reduce::anchor, initial});
    if (measures_shares) {
      all.push_back({slot_reduce::sum});
    }
    return all;
  }
  index_t column_count() const { return estimates() + (measures_shares ? 1 : 0); }
  /// This policy where heads share slots: S knows no other head's sum, so attention is measured
  /// too.
  keepkv sharing(index_t, index_t = 0) const {
    keepkv shared = *this;
    shared.measures_shares = true;
    return shared;
  }
  /// The mean over the queries that count.
  static constexpr bool shares() { return true; }
  void shared_scores(const kv_head auto&, const head_state& state, std::span<float> out) const {
    std::ranges::copy(state.column(estimates()), out.begin());
  }
  std::size_t memory(index_t, index_t, index_t) const { return variant == mode::paper ? 0 : 1; }
  protection protects(const kv_head auto&, index_t target) const {
    return {.sinks = sinks, .recent = share_of(recent, target)};
  }
  index_t min_budget() const { return search::least_target(sinks + 1, recent, sinks); }
  /// Merges take precedence where a plan is given queries, as after a prompt.
  kvmeld::prompt_use prompt_use() const {
    return {true, window - 1, window, prompt_use::planned::latest, 1};
  }
  void validate() const {
    expects(distance_weight == 1 || variant == mode::code,
            "keepkv: expected variant=1 (code) with a distance_weight, got the paper's");
  }

 private:
  /// Columns of S, and what it is made of.
  index_t estimates() const { return variant == mode::paper ? 2 : window; }
  detail::logit_window rows() const { return {window}; }
  /// What takes in one more query.
  detail::estimates taken(head_state& state) const {
    if (variant == mode::paper) {
      return {
          .score = state.column(log_score), .weight = state.column(weight_sum), .average = {decay}};
    }
    return {.score = rows().next(state), .weight = {}};
  }

 public:
  void observe(const kv_head auto& head, head_state& state, const observation& step) const {
    expects(step.query != nullptr && !step.log_sum_exp.empty(),
            "keepkv: expected the step's query and log-sum-exp");
    detail::each_log_score(head, step, taken(state));
  }
  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    auto counted = queries.reference(window);
    // A prompt's estimate is that of its own last queries: what was before does not count on.
    if (variant == mode::paper) {
      std::ranges::fill(state.column(weight_sum), 0.0F);  // a slot that no query sees keeps its S
    } else {
      counted = counted.last(window);  // it has no more rows
      rows().clear(state);
    }
    std::vector<detail::estimates> of;
    of.reserve(as_size(counted.count));
    for (index_t i = 0; i < counted.count; ++i) {
      of.push_back(taken(state));
    }
    detail::each_log_score(head, counted, [&](index_t i, index_t first, const auto&... scores) {
      of[as_size(i)](first, scores...);
    });
    if (measures_shares) {
      const auto share = state.column(estimates());
      column_scores(head, counted, {}, {.total = share});
      score::write_shares(share, group_combine::sum, head.group(), counted.count, share);
    }
  }

  /// A prompt: merges first, then evicts.
  void plan(const kv_head auto& head, const head_state& state, const query_view<float>&,
            index_t target, slot_scratch& work, merge_plan& out) const {
    if (variant == mode::code || !merge_first) {
      return plan(head, state, target, work, out);
    }
    const auto held = protected_slots(head, protects(head, target));
    const index_t n = head.length();
    work.marks.assign(as_size(n), 0);
    for (index_t s = 0; s < n; ++s) {
      work.marks[s] = held(s) ? 1 : 0;
    }
    search::join_leaders(head, ranks(head, state), similarity, n - target, work);
    merge::keep_rows(
        n, target, held,
        [&](std::span<const index_t> members) {
          return static_cast<float>(merged(head, state, members).weight);
        },
        work);
    write_rows(head, state, work, out);
  }

  /// Decode: selects, then merges into the selected what is near enough to one of them.
  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    search::select(
        head.length(), target, protected_slots(head, protects(head, target)),
        [of_slot = ranks(head, state)](index_t s) { return rank(of_slot(s)); }, work);
    const auto cosine = search::match_by_cosine(head, work);
    for (std::size_t s = 0; s < cosine.size(); ++s) {
      if (work.marks[s] == 0 && !(cosine[s] >= similarity)) {
        work.row_of[s] = -1;
      }
    }
    write_rows(head, state, work, out);
  }

  /// S of merged rows: A − β. Code: of each query the vote-weighted mean of the members' s, as far
  /// back as the anchor goes.
  void update_memory(const kv_head auto& head, head_state& state, const merge_plan& change,
                     slot_scratch&) const {
    change.each_changed_row([&](index_t r) {
      const auto row = change.row(r);
      const auto anchor = as_size(row.front().source);
      const auto merged_score = [&](auto score_of) {
        const double a = detail::log_sum(row.size(), [&](std::size_t i) {
          return double{head.log_mass(row[i].source)} + score_of(row[i].source);
        });
        return static_cast<float>(a - double{change.log_mass(r)});
      };
      if (row.size() > 1 && variant == mode::paper) {
        state.column(log_score)[anchor] =
            merged_score([&](index_t s) { return estimate(state, s); });
      }
      for (index_t c = 0; row.size() > 1 && variant == mode::code && c < window; ++c) {
        float& now = state.column(c)[anchor];
        if (now != detail::logit_window::not_seen) {
          now = merged_score([&](index_t s) { return double{rows().at(state, c, s)}; });
        }
      }
    });
  }

 private:
  /// An estimate that is no number weighs nothing next to others.
  static double finite(double x) { return std::isfinite(x) ? x : -1e30; }
  double estimate(const head_state& state, index_t s) const {
    if (variant == mode::paper) {
      return finite(double{state.column(log_score)[as_size(s)]});
    }
    return rows().mean(state, s, epsilon);
  }
  /// ln w
  double log_weight(const kv_head auto& head, const head_state& state, index_t s) const {
    return double{head.log_mass(s)} + estimate(state, s);
  }
  /// Slot ↦ what it is ranked by; the authors' code without the votes.
  auto ranks(const kv_head auto& head, const head_state& state) const {
    return [this, &head, &state,
            of_code = rows().weighted_sums(state, variant == mode::code ? distance_weight : 1.0F)](
               index_t s) {
      return static_cast<float>(variant == mode::paper ? log_weight(head, state, s)
                                                       : finite(of_code(s)));
    };
  }

  detail::vote_merge merged(const kv_head auto& head, const head_state& state,
                            std::span<const index_t> members) const {
    return detail::vote_merge::of(
        members, [&](index_t s) { return double{head.log_mass(s)}; },
        [&](index_t s) { return estimate(state, s); }, variant == mode::paper);
  }

  void write_rows(const kv_head auto& head, const head_state& state, slot_scratch& work,
                  merge_plan& out) const {
    merge::write_rows(head, work, out, [&](std::span<const index_t> members) {
      const detail::vote_merge made = merged(head, state, members);
      for (const index_t s : members) {
        const float w = made.share(log_weight(head, state, s));
        out.add({s, made.key_scale * w, w});
      }
      return made.log_mass;
    });
  }
};

}  // namespace kvmeld::inline v0
