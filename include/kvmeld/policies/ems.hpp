// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::max, std::min
#include <cmath>      // std::exp, std::floor, std::sqrt
#include <limits>     // std::numeric_limits
#include <optional>
#include <type_traits>  // std::is_const_v
#include <utility>      // std::pair
#include <vector>

#include "kvmeld/memory/convert.hpp"
#include "kvmeld/memory/fields.hpp"
#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"
#include "kvmeld/score/leverage.hpp"
#include "kvmeld/score/softmax.hpp"
#include "kvmeld/search/match.hpp"

namespace kvmeld::inline v0 {
namespace detail {

/// What EMS keeps of every token. The first token of an entry, its centre, has its numbers in the
/// columns of its slot; those that share the entry have theirs in places of the state's memory,
/// linked in the order of joining. Apart from the norm they are attention received. A token is
/// named by its slot, or by the capacity plus its place. Links are numbers of places counted from
/// 1, so that zeros are an empty table.
template <class State>
class ems_table {
  using number = std::conditional_t<std::is_const_v<State>, const float, float>;

 public:
  /// `all`: of all queries; `past`, `current`: of the last window and of this one; `norm`: of the
  /// token's own key. In a place the position comes after these, by its bits.
  enum field : std::size_t { all, past, current, norm, next, fields };
  static constexpr index_t none = -1;

  struct parts {
    index_t group;
    std::ptrdiff_t places = 0;
    memory_layout memory = {};
    row_field window = memory.f32(), sharing = memory.f32(), used = memory.f32(),
              free = memory.f32(), scratch = memory.f32(2 * std::ptrdiff_t{group}),
              place = memory.f32(fields + 1, places);
  };

  ems_table(State& state, index_t group)
      : slots_(state.memory_capacity()), memory_(state.memory().data()), at_{group} {
    places_ =
        (static_cast<std::ptrdiff_t>(state.memory().size()) - at_.place.at) / at_.place.floats;
    for (std::size_t f = 0; f < fields; ++f) {
      column_[f] = state.column(static_cast<index_t>(f)).data();
    }
  }

  /// Tokens that share an entry: now, and at most.
  index_t sharing() const { return static_cast<index_t>(*at_.sharing.row(memory_)); }
  index_t places() const { return static_cast<index_t>(places_); }
  /// Names of tokens are below this.
  index_t names() const { return slots_ + places(); }
  /// Queries in the current window.
  number& queries() const { return *at_.window.row(memory_); }
  /// Room for two numbers a query head.
  number* scratch() const { return at_.scratch.row(memory_); }

  number& at(field f, index_t token) const {
    return token < slots_ ? column_[f][token] : place(token)[f];
  }
  index_t position(const head_ref& head, index_t token) const {
    return token < slots_ ? head.position(token) : own_position.get(place(token));
  }
  /// The norm of a slot's own token, counted or not yet.
  float norm_of(const head_ref& head, index_t s) const {
    return at(norm, s) < 0 ? search::key_norm(head, s) : at(norm, s);
  }
  /// The token that joined its entry next; `none`.
  index_t after(index_t token) const { return token_of(at(next, token)); }
  /// Does the slot's entry hold more than its centre?
  bool shared(index_t s) const { return column_[next][s] != 0; }

  /// `f(token)` for every token of an entry: the centre, then those that share it.
  template <class F>
  void each(index_t s, F f) const {
    for (index_t token = s; token != none; token = after(token)) {
      f(token);
    }
  }

  /// Counts the norms of tokens appended since the last call.
  void measure(const head_ref& head) const {
    for (index_t s = 0; s < head.length(); ++s) {
      at(norm, s) = norm_of(head, s);
    }
  }

  /// Takes the token after `token` out of the table.
  void remove_after(index_t token) const {
    const index_t taken = after(token);
    number& free = *at_.free.row(memory_);
    const float link = at(next, token);
    at(next, token) = at(next, taken);
    at(next, taken) = free;
    free = link;
    --*at_.sharing.row(memory_);
  }

  /// The tokens of entry `s` go after those of entry `into`; its centre too, or, unless
  /// `with_centre`, nowhere.
  void join(const head_ref& head, index_t into, index_t s, bool with_centre) const {
    index_t last = into;
    each(into, [&](index_t token) { last = token; });
    if (with_centre) {
      const float link = free_place();
      const index_t token = token_of(link);
      for (const field f : {all, past, current, norm}) {
        at(f, token) = at(f, s);
      }
      own_position.set(place(token), head.position(s));
      at(next, last) = link;
      last = token;
    }
    at(next, last) = at(next, s);
    at(next, s) = 0;
  }

 private:
  static constexpr integer_field own_position{fields};  // of a place

  number* place(index_t token) const { return at_.place.row(memory_, token - slots_); }
  index_t token_of(float link) const {
    return link == 0 ? none : slots_ + static_cast<index_t>(link) - 1;
  }
  /// The link of a free place.
  float free_place() const {
    ++*at_.sharing.row(memory_);
    number &free = *at_.free.row(memory_), &used = *at_.used.row(memory_);
    if (const float link = free; link != 0) {
      free = at(next, token_of(link));
      return link;
    }
    expects(static_cast<index_t>(used) < places(), "ems: expected at most ", places(),
            " tokens that share entries, got one more");
    return ++used;
  }

  index_t slots_;
  number* memory_;
  parts at_;
  std::ptrdiff_t places_ = 0;
  std::array<number*, fields> column_{};
};

/// What becomes of a slot's own token, by slot.
enum ems_centre : char { evicted, moved, dropped };

/// Joins the lists of tokens as the plan's rows say, before it is applied; those of evicted slots
/// are dropped. At most `most` tokens share entries afterwards, so that the table never holds more:
/// those of least `score(token)` are dropped first, among equals the later one in the table, which
/// is in order of rows and of joining.
template <class Score>
void update_table(const head_ref& head, const ems_table<head_state>& tokens,
                  const merge_plan& change, index_t most, Score score, std::vector<char>& centre) {
  centre.assign(as_size(change.length()), evicted);
  for (index_t r = 0; r < change.rows(); ++r) {
    for (const merge_source& e : change.row(r)) {
      centre[as_size(e.source)] = moved;
    }
  }
  index_t joining = -change.rows();
  for (index_t s = 0; s < head.length(); ++s) {
    if (centre[as_size(s)] == evicted) {
      while (tokens.shared(s)) {
        tokens.remove_after(s);
      }
    } else {
      ++joining;
    }
  }
  constexpr index_t none = ems_table<head_state>::none;
  for (index_t more = tokens.sharing() + joining - most; more > 0; --more) {
    float lowest = std::numeric_limits<float>::infinity();
    index_t before = none;  // the least, in its list
    char* own = nullptr;    // or a centre that joins: its mark
    const auto compare = [&](index_t token, index_t behind, char* mark) {
      if (const float s = rank(score(token)); s <= lowest) {
        lowest = s, before = behind, own = mark;
      }
    };
    for (index_t r = 0; r < change.rows(); ++r) {
      for (const merge_source& e : change.row(r)) {
        char& mark = centre[as_size(e.source)];
        if (e.source != change.anchor(r) && mark == moved) {
          compare(e.source, none, &mark);
        }
        for (index_t t = e.source; tokens.after(t) != none; t = tokens.after(t)) {
          compare(tokens.after(t), t, nullptr);
        }
      }
    }
    if (own != nullptr) {
      *own = dropped;
    } else {
      tokens.remove_after(before);
    }
  }
  for (index_t r = 0; r < change.rows(); ++r) {
    for (const merge_source& e : change.row(r).subspan(1)) {
      tokens.join(head, change.anchor(r), e.source, centre[as_size(e.source)] == moved);
    }
  }
}

/// The logits of an entry's tokens for one query. Token `t` has ℓ_t = cap(scale · ‖k_t‖ · q·k̂), k̂
/// the direction of the entry's key; where it `rotates`, of the key rotated to the token's
/// position, one dot product for each. Not for several threads.
template <class State>
class ems_logits {
 public:
  ems_logits(const head_ref& head, const ems_table<State>& table, bool rotates)
      : head_(head), table_(table), terms_(head) {
    if (rotates) {
      turn_.emplace(head.spec().rope, head.dim());
    }
  }

  const ems_table<State>& table() const { return table_; }
  const score::logit_terms& terms() const { return terms_; }
  /// scale · q·k̂ of shared entry `s` from `dot` = q·k.
  float slope(index_t s, float dot) const {
    const float norm = table_.at(ems_table<State>::norm, s);
    return norm > 0 ? head_.scale() * dot / norm : 0.0F;
  }
  /// ℓ_t; `of_entry`: the slope of its entry `s`.
  float operator()(index_t s, index_t token, const float* q, float of_entry) const {
    const float norm = table_.at(ems_table<State>::norm, token);
    return terms_.cap(norm * (turn_ && token != s ? turned_slope(s, token, q) : of_entry));
  }
  /// ln Σ_t exp(ℓ_t)
  float log_sum(index_t s, const float* q, float of_entry) const {
    score::softmax<> all;
    if (turn_) {
      table_.each(s, [&](index_t token) { all.add((*this)(s, token, q, of_entry)); });
    } else {  // the same, asked once
      table_.each(s, [&](index_t token) {
        all.add(terms_.cap(of_entry * table_.at(ems_table<State>::norm, token)));
      });
    }
    return all.log_sum_exp();
  }

 private:
  KVMELD_NOINLINE float turned_slope(index_t s, index_t token, const float* q) const {
    expects(errc::unsupported, q != nullptr, "ems: expected the query with merge_unrotated=1");
    float key[row_floats];
    to_floats(head_.key(s), head_.dim(), key);
    turn_->by(table_.position(head_, token) - head_.position(s));
    (*turn_)(key);
    return slope(s, score::dot(row<const float>{q}, row<const float>{key}, head_.dim()));
  }

  head_ref head_;
  ems_table<State> table_;
  score::logit_terms terms_;
  mutable std::optional<rotation> turn_;
};

/// The mass function: (slot, q·k, q) ↦ logit of an entry, from which `attend` makes the sum of its
/// tokens' probabilities. Without a query: refused where entries are merged un-rotated.
struct ems_mass {
  static constexpr bool caps = true;  // each token's own logit
  head_ref head;
  ems_logits<const head_state> logits;

  float operator()(index_t s, float dot, const float* q = nullptr) const {
    return logits.table().shared(s) ? logits.log_sum(s, q, logits.slope(s, dot))
                                    : logits.terms().cap(head.scale() * dot) + head.log_mass(s);
  }
};

/// `take(token, attention)` for every token: of its entry's probability the share
/// exp(ℓ_t) / Σ exp(ℓ), the group's heads combined token by token. Shared entries need the
/// query: `observed` has one where there are any.
template <class State, class Take>
void each_token_attention(const head_ref& head, const ems_logits<State>& logits,
                          const ems_table<head_state>& table, const observation& observed,
                          group_combine how, Take take) {
  const index_t n = head.length(), group = head.group();
  const auto slope = table.scratch(), log_sum = slope + group;
  for (index_t s = 0; s < n; ++s) {
    if (!table.shared(s)) {
      take(s, observed.attention[as_size(s)]);
      continue;
    }
    const auto query = [&](index_t g) { return observed.query + std::ptrdiff_t{g} * head.dim(); };
    for (index_t g = 0; g < group; ++g) {
      slope[g] = logits.slope(s, score::dot(row<const float>{query(g)}, head.key(s), head.dim()));
      log_sum[g] = logits.log_sum(s, query(g), slope[g]);
    }
    table.each(s, [&](index_t token) {
      float attention = 0;
      for (index_t g = 0; g < group; ++g) {
        const float entry = observed.probabilities[as_size(g) * as_size(n) + as_size(s)];
        const float own = entry * std::exp(logits(s, token, query(g), slope[g]) - log_sum[g]);
        attention = how == group_combine::max ? std::max(attention, own) : attention + own;
      }
      take(token, how == group_combine::mean ? attention / static_cast<float>(group) : attention);
    });
  }
}

/// `take(query, token, attention)` for reference queries, one after another: what `column_scores`
/// sums, where entries are shared. An entry is seen from its centre's position on.
template <class Take>
void each_token_attention(const head_ref& head, const ems_mass& mass,
                          const ems_table<head_state>& table, const query_view<float>& queries,
                          group_combine how, Take take) {
  const auto n = as_size(head.length()), group = as_size(head.group()), dim = as_size(head.dim());
  std::vector<float> query(group * dim), p(group * n), combined(n);
  for (index_t i = 0; i < queries.count; ++i) {
    const index_t position = queries.position_of(i, head.next_position());
    for (std::size_t g = 0; g < group; ++g) {
      float* q = query.data() + g * dim;
      std::copy_n(queries.at(static_cast<index_t>(g), i), dim, q);
      const auto logits = std::span(p).subspan(g * n, n);
      for (std::size_t s = 0; s < n; ++s) {
        const auto slot = static_cast<index_t>(s);
        const bool visible = head.sees(slot, position);
        logits[s] = visible
                        ? mass(slot, score::dot(row<const float>{q}, head.key(slot), head.dim()), q)
                        : -std::numeric_limits<float>::infinity();
      }
      Eigen::Map<Eigen::ArrayXf> of_query(logits.data(), head.length());
      score::softmax<> all = mass.logits.terms().sink(static_cast<index_t>(g));
      all.take(of_query);
      of_query /= all.sum > 0 ? all.sum : 1.0F;  // a query that sees nothing adds nothing
    }
    score::combine_group(p, head.group(), how, combined);
    each_token_attention(head, mass.logits, table,
                         {.probabilities = p, .query = query.data(), .attention = combined}, how,
                         [&](index_t token, float attention) { take(i, token, attention); });
  }
}

/// Eq. 2, token ↦ score: s = max(s_glo · mean(s_loc)/mean(s_glo), s_loc), s_loc = past + current;
/// the means over all tokens held. NaN counts for its own token only.
template <class State>
auto global_local(const ems_table<State>& table, index_t length) {
  using t = ems_table<State>;
  const auto local = [table](index_t token) {
    return table.at(t::past, token) + table.at(t::current, token);
  };
  double all = 0, in_windows = 0;
  for (index_t s = 0; s < length; ++s) {
    table.each(s, [&](index_t token) {
      const float glo = table.at(t::all, token), loc = local(token);
      if (!std::isnan(glo + loc)) {
        all += double{glo}, in_windows += double{loc};
      }
    });
  }
  return [=, scale = static_cast<float>(all > 0 ? in_windows / all : 0.0)](index_t token) {
    return std::max(table.at(t::all, token) * scale, local(token));
  };
}

/// After a prompt: `score` averaged over `kernel` neighbours in position, among the tokens outside
/// the window. By token, `[table.names()]`.
template <class State, class Score>
std::vector<float> pooled_scores(const head_ref& head, const ems_table<State>& table, Score score,
                                 index_t window, index_t kernel) {
  std::vector<float> s(as_size(table.names()));
  std::vector<index_t> outside;
  const auto in_window = search::protect(head, 0, window);
  for (index_t slot = 0; slot < head.length(); ++slot) {
    table.each(slot, [&](index_t token) {
      s[as_size(token)] = score(token);
      if (!in_window(table.position(head, token))) {
        outside.push_back(token);
      }
    });
  }
  std::vector<detail::keyed_slot> keyed;
  detail::sort_slots(
      outside, [&](index_t token) { return detail::ascending(table.position(head, token)); },
      keyed);
  score::average_pool(outside, kernel, false, s);
  return s;
}

/// The redundancy of two slots: cos(k_a, k_b) · cos(v_a, v_b), but negative when both cosines are
/// (ours: two opposites are not alike). Zero vectors: 0.
struct ems_redundancy {
  const head_ref& head;
  std::span<const float> key_norm, value_norm;  ///< [length]
  std::span<const float> keys;                  ///< [length, dim] un-rotated, or empty: as they are

  float operator()(index_t a, index_t b) const {
    const float k = cosine(keys.empty() ? score::dot(head.key(a), head.key(b), head.dim())
                                        : score::dot(turned(a), turned(b), head.dim()),
                           key_norm, a, b);
    const float v =
        cosine(score::dot(head.value(a), head.value(b), head.value_dim()), value_norm, a, b);
    return k < 0 && v < 0 ? -k * v : k * v;
  }

 private:
  row<const float> turned(index_t s) const {
    return {keys.data() + std::ptrdiff_t{s} * head.dim()};
  }
  static float cosine(float dot, std::span<const float> norm, index_t a, index_t b) {
    const float norms = norm[as_size(a)] * norm[as_size(b)];
    return norms > 0 ? dot / norms : 0.0F;
  }
};

/// Eq. 5: a slot to be merged, `row_of [length]` not below 0, joins the centre most like it (the
/// earlier one of equals, wherever it lies), or, with less than `threshold`, the zero class (−1).
/// Centres are marked and not `alone(c)`.
template <class Alone>
void match_entries(const head_ref& head, const ems_redundancy& redundancy, Alone alone,
                   float threshold, slot_scratch& work) {
  for (index_t s = 0; s < head.length(); ++s) {
    auto& to = work.row_of[s];
    if (work.marks[s] != 0 || to < 0) {
      continue;
    }
    search::near_slot best;
    for (index_t c = 0; c < head.length(); ++c) {
      if (work.marks[c] == 0 || alone(c)) {
        continue;
      }
      if (const float near = rank(redundancy(s, c));
          best.slot < 0 || near > best.cosine ||
          (near == best.cosine && head.position(c) < head.position(best.slot))) {
        best = {c, near};
      }
    }
    to = best.cosine >= threshold ? best.slot : -1;
  }
}

/// A row of a plan: the centre `members[0]` with those that join it, by their weights S `[length]`
/// (all equal if they sum to 0). Key: Σ S_i k_i/‖k_i‖, made as long as `norm`, the centre's own;
/// value: Σ S_i v_i / Σ S_i. `key(s)` is what k_i is read from, of length `key_norm [length]`;
/// calls `add(merge_source)` for each.
template <class Key, class Add>
void merge_entries(index_t dim, Key key, std::span<const float> key_norm,
                   std::span<const float> weight, std::span<const index_t> members, float norm,
                   Add add) {
  double total = 0;
  for (const index_t s : members) {
    total += double{weight[as_size(s)]};
  }
  const auto share = [&](index_t s) {
    return total > 0 ? double{weight[as_size(s)]} / total
                     : 1.0 / static_cast<double>(members.size());
  };
  const auto unit = [&](index_t s) {  // of the key's own direction
    const double own{key_norm[as_size(s)]};
    return own > 0 ? share(s) / own : 0.0;
  };
  double squares = 0;
  constexpr index_t chunk = 64;  // whole blocks of what is stored in blocks
  for (index_t begin = 0; begin < dim; begin += chunk) {
    const index_t n = std::min(chunk, dim - begin);
    double sum[chunk] = {};
    for (const index_t s : members) {
      const auto part = key(s).from(begin);
      const double by = unit(s);
      for (index_t i = 0; i < n; ++i) {
        sum[i] += by * double{part[i]};
      }
    }
    for (index_t i = 0; i < n; ++i) {
      squares += sum[i] * sum[i];
    }
  }
  // Directions that cancel, to float's precision, leave the centre's own.
  const double length = std::sqrt(squares);
  for (const index_t s : members) {
    const auto scaled = static_cast<float>(double{norm} * unit(s) / length);
    const float weight_of_key =
        length > 1e-6 ? (std::isfinite(scaled) ? scaled : 0.0F) : (s == members[0] ? 1.0F : 0.0F);
    add(merge_source{s, weight_of_key, static_cast<float>(share(s))});
  }
}

/// The entries that `work.row_of` describes as a plan's rows. With `unrotated [length, dim]` a
/// row's key is made of those and rotated to its centre's place: its weight is the centre's alone,
/// the rest a correction. `corrections [rows, dim]`: memory for these.
template <class State>
void write_entries(const head_ref& head, const ems_table<State>& tokens,
                   std::span<const float> key_norm, std::span<const float> weight,
                   std::span<const float> unrotated, std::span<float> corrections,
                   slot_scratch& work, merge_plan& out) {
  const index_t dim = head.dim();
  std::optional<rotation> turn;
  if (!unrotated.empty()) {
    turn.emplace(head.spec().rope, dim);
  }
  std::ranges::fill(corrections, 0.0F);
  merge::write_rows(head, work, out, [&](std::span<const index_t> members) {
    const index_t centre = members[0];
    const float norm = tokens.norm_of(head, centre);
    if (unrotated.empty()) {
      merge_entries(
          dim, [&](index_t s) { return head.key(s); }, key_norm, weight, members, norm,
          [&](const merge_source& e) { out.add(e); });
      return head.log_mass(centre);
    }
    const auto key = [&](index_t s) {
      return row<const float>{unrotated.data() + std::ptrdiff_t{s} * dim};
    };
    float* const merged = corrections.data() + std::ptrdiff_t{out.rows()} * dim;
    merge_entries(dim, key, key_norm, weight, members, norm, [&](const merge_source& e) {
      const auto source = key(e.source);
      for (index_t i = 0; i < dim; ++i) {
        merged[i] += e.key_weight * source[i];
      }
      out.add({e.source, e.source == centre ? 1.0F : 0.0F, e.value_weight});
    });
    turn->by(head.position(centre));
    (*turn)(merged);
    const auto own = head.key(centre);
    for (index_t i = 0; i < dim; ++i) {
      merged[i] -= own[i];
    }
    return head.log_mass(centre);
  });
  if (!unrotated.empty()) {
    out.correct_keys(corrections.first(as_size(out.rows(), dim)), dim);
  }
}

}  // namespace detail

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
/// token's own position: a dot product per token. N_tbm is appendix A's; §4.2 has (γ − 1) N_budget.
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
    using parts = detail::ems_table<head_state>::parts;
    return as_size(parts{group, static_cast<std::ptrdiff_t>(places)}.memory.size);
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
  void shared_scores(const head_ref& head, const head_state& state, std::span<float> out) const {
    const detail::ems_table<const head_state> tokens(state, head.group());
    for (index_t s = 0; s < head.length(); ++s) {
      out[as_size(s)] = 0;
      tokens.each(s, [&](index_t t) { out[as_size(s)] += tokens.at(tokens.all, t); });
    }
    score::write_shares(out, combine, head.group(), static_cast<double>(state.observed()), out);
  }

  void observe(const head_ref& head, head_state& state, const observation& observed) const {
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

  void observe(const head_ref& head, head_state& state, const query_view<float>& queries) const {
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
  void plan(const head_ref& head, const head_state& state, const query_view<float>&, index_t target,
            slot_scratch& work, merge_plan& out) const {
    const detail::ems_table tokens(state, head.group());
    const auto s = pooled(head, tokens);
    plan(head, tokens, search::column_score(s), target, gamma - 1, work, out);
    out.set_measured(1);  // for `update_memory`: the scores were pooled
  }
  /// Decode: all that are no centres are to be merged.
  void plan(const head_ref& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    const detail::ems_table tokens(state, head.group());
    plan(head, tokens, detail::global_local(tokens, head.length()), target,
         static_cast<float>(head.length()), work, out);
  }

  /// Joins the lists of tokens as the rows say; the least of those that share entries make room.
  void update_memory(const head_ref& head, head_state& state, const merge_plan& change,
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

  detail::ems_mass mass(const head_ref& head, const head_state& state) const {
    const detail::ems_table<const head_state> tokens(state, head.group());
    return {head, {head, tokens, merge_unrotated}};
  }

 private:
  static double rounded(double x) { return std::floor(x + 0.5); }
  template <class State>
  index_t max_sharing(const detail::ems_table<State>& tokens, index_t slots) const {
    return static_cast<index_t>(
        std::min(rounded((double{gamma} - 1) * slots), static_cast<double>(tokens.places())));
  }
  template <class State>
  std::vector<float> pooled(const head_ref& head, const detail::ems_table<State>& tokens) const {
    return detail::pooled_scores(head, tokens, detail::global_local(tokens, head.length()), window,
                                 kernel);
  }

  /// `score`: of a token; `band`: slots to be merged, for each centre.
  template <class State, class Score>
  void plan(const head_ref& head, const detail::ems_table<State>& tokens, Score score,
            index_t target, float band, slot_scratch& work, merge_plan& out) const {
    const index_t n = head.length(), dim = head.dim(), unrotated = with_position ? 0 : n;
    const std::size_t corrected = merge_unrotated ? as_size(target, dim) : 0;
    detail::arena scratch(work.numbers, 3 * as_size(n) + as_size(unrotated, dim) + corrected);
    const auto numbers = [&](std::size_t size) {
      return std::span(scratch.column(static_cast<index_t>(size)).data(), size);
    };
    const auto weight = numbers(as_size(n)), key_norm = numbers(as_size(n)),
               value_norm = numbers(as_size(n)), keys = numbers(as_size(unrotated, dim)),
               corrections = numbers(corrected);
    const auto alone = protected_slots(head, sinks, window);
    index_t centres = target;
    for (index_t s = 0; s < n; ++s) {
      const auto i = as_size(s);
      expects(errc::unsupported, head.log_mass(s) == 0, "ems: expected no log-mass, got ",
              head.log_mass(s));  // another's account of the tokens that the table counts
      weight[i] = 0;
      tokens.each(s, [&](index_t token) { weight[i] += score(token); });
      key_norm[i] = search::key_norm(head, s);
      value_norm[i] = kvmeld::norm(head.value(s), head.value_dim());
      centres -= alone(s) ? 1 : 0;
    }
    if (!with_position) {
      rotation turn(head.spec().rope, dim);
      for (index_t s = 0; s < n; ++s) {
        score::unrotated_key(head, s, turn, &keys[as_size(s, dim)]);
      }
    }
    const auto merged = static_cast<index_t>(
        std::min(rounded(double{band} * centres), static_cast<double>(n - target)));
    // Among equals the earlier token first, wherever in the head it lies.
    const auto by_weight = [&](index_t s) {
      return std::pair(rank(weight[as_size(s)]), -head.position(s));
    };
    search::select(n, target + merged, alone, by_weight, work);  // the others go
    work.row_of.assign(as_size(n), -1);
    for (index_t s = 0; s < n; ++s) {
      work.row_of[s] = work.marks[s] != 0 ? s : -1;
    }
    search::select(n, target, alone, by_weight, work);
    detail::match_entries(head, {head, key_norm, value_norm, keys}, alone, threshold, work);
    detail::write_entries(head, tokens, key_norm, weight,
                          merge_unrotated ? keys : std::span<const float>(), corrections, work,
                          out);
  }
};

}  // namespace kvmeld::inline v0
