// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::ranges::count, std::ranges::transform
#include <vector>

#include "kvmeld/policies/fold/decode.hpp"
#include "kvmeld/policies/fold/layout.hpp"
#include "kvmeld/policies/fold/model_leverage.hpp"
#include "kvmeld/policies/fold/prompt.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"
#include "kvmeld/score/leverage.hpp"
#include "kvmeld/score/prompt_scores.hpp"

namespace kvmeld::inline v0 {

/// fold (ours): slots that attention cannot tell apart are merged; outliers are kept unmerged,
/// whether queries attend to them yet or not.
///   score   m_i, the mean attention of reference queries (lookahead) over the full cache
///   select  sinks, the latest, and up to a share of the rest for the outliers: the highest
///           leverage of un-rotated keys, after a prompt averaged over neighbours, for what stands
///           out is several tokens long, and well above the mean; these keep their bytes. Or
///           (`pins`) what will be asked for, by `prompt_scores`: with `sharing` and
///           `global_budgets` by one threshold over all heads of the model
///   match   prompt: k-means of the rest, D² = scale² δkᵀ C δk + ‖δv‖²/mean‖v‖², C the queries'
///           covariance, farthest-first seeds. Decode: the cheapest pairs by Ward's cost
///   merge   means by m; log-mass fitted to the mass on the queries; values by ridge (prompt)
///   gain    by scores, a head with more pins than its share of the model's slots is one that
///           retrieves: after a prompt the log-mass of its pins is raised, which makes up for what
///           heads with fewer pins retrieve no more
struct fold {
  /// What stays unmerged besides sinks and the latest: outliers among keys, or the best by
  /// `prompt_scores` in all slots but those of the clusters. These are measured when the prompt's
  /// own queries are observed, before `compress` gets the reference queries; of a slot that was not
  /// measured then, leverage decides: in decode in all slots but those of the clusters, so that of
  /// two heads the one with more slots has more pins.
  enum class pin_rule { leverage, scores };

  index_t sinks = 4;
  index_t recent = 24;
  float recent_share = 0.25F;
  float share = 0.5F;
  float leverage_ridge = 1;
  fold_prompt prompt = {};
  fold_decode decode = {};
  pin_rule pins = pin_rule::leverage;
  index_t clusters = 0;
  index_t prompt_recent = 8;
  float score_share = 0.7F;
  index_t room_recent = 2;
  float room_share = 0.85F;
  float evicted = 0;
  float gain = 0.4F;
  index_t mean = 0;
  float leverage_exponent = 0;

  static constexpr std::string_view name() { return "fold"; }
  static constexpr std::tuple options{
      option("pins", &fold::pins, 0, 1, "what stays unmerged: 0 outliers, 1 the best by score"),
      option("sinks", &fold::sinks, 0, any_count, "first tokens, kept as they are"),
      option("recent", &fold::recent, 0, any_count, "latest tokens, kept as they are ..."),
      option("recent_share", &fold::recent_share, 0, 1,
             "... at most this share of the slots (of those that heads share)"),
      option("share", &fold::share, 0, below_1, "of the other slots at most, for outliers"),
      option("pool", in(&fold::prompt, &fold_prompt::pool), 1, any_count,
             "neighbours that leverage is averaged over, itself included"),
      option("leverage_ridge", &fold::leverage_ridge, 0, any_number,
             "relative to the mean variance of the keys' dimensions"),
      option("outlier", in(&fold::prompt, &fold_prompt::outlier), 0, any_number,
             "leverage of an outlier, times the mean: in many heads none has it"),
      option("rounds", in(&fold::prompt, &fold_prompt::rounds), 1, any_count, "of k-means (Lloyd)"),
      option("floor", in(&fold::prompt, &fold_prompt::floor), 0, any_number,
             "weight of a slot without attention, times the number of slots"),
      option("ridge", in(&fold::prompt, &fold_prompt::ridge), 0, any_number,
             "of the fit of values, relative to the trace of its matrix; 0: no fit"),
      option("refine", in(&fold::prompt, &fold_prompt::refine), 0, any_count,
             "gradient steps on the clusters; wants about 900 queries per head"),
      option("rate", in(&fold::prompt, &fold_prompt::rate), above_0, any_number,
             "of a step, relative to the mean norms of keys and values"),
      option("queries", in(&fold::decode, &fold_decode::queries), 0, any_count,
             "remembered per query head; 0 if only prompts are compressed"),
      option("stride", in(&fold::decode, &fold_decode::stride), 1, any_count,
             "steps per remembered query"),
      option("period", in(&fold::decode, &fold_decode::period), 0, any_count,
             "slots freed at once; 0: a sixteenth of the budget"),
      option("horizon", in(&fold::decode, &fold_decode::ahead, &future_positions::horizon), 1,
             any_count, "positions to come, which queries are moved to"),
      option("fade", in(&fold::decode, &fold_decode::ahead, &future_positions::fade), above_0,
             endless, "positions ahead where the density of queries is half"),
      option("clusters", &fold::clusters, 0, any_count,
             "with pins=1: slots of a head for all that is merged; 0: by share"),
      option("prompt_recent", &fold::prompt_recent, 0, any_count,
             "with pins=1: latest tokens of a prompt, kept as they are"),
      option("score_share", &fold::score_share, 0, below_1,
             "with pins=1: of the slots that are neither sinks nor these, for pins"),
      option("room_recent", &fold::room_recent, 0, any_count,
             "prompt_recent where heads have slack slots"),
      option("room_share", &fold::room_share, 0, below_1,
             "score_share where heads have slack slots"),
      option("evicted", &fold::evicted, 0, below_1,
             "with pins=1: share of a prompt's other slots that is evicted, the best by score, "
             "which would blur the clusters"),
      option(
          "gain", &fold::gain, 0, 1,
          "with pins=1: what the log-mass of pins grows with where a head has more than the mean"),
      option("mean", &fold::mean, 0, any_count,
             "slots of a head of the model on average; 0: no gain"),
      option("leverage_exponent", &fold::leverage_exponent, 0, 2,
             "with pins=1: power of the mean leverage that scores are multiplied by")};
  /// The tokens that a slot stands for; by scores also the largest of its `prompt_scores`, and with
  /// an exponent what that was multiplied by (`leverage_weights`; until then minus its leverage).
  static constexpr column tokens{0, "tokens", slot_reduce::sum, 1},
      prompt_score{1, "prompt_score", slot_reduce::max},
      score_weight{2, "score_weight", slot_reduce::max};
  static constexpr std::array columns{tokens, prompt_score, score_weight};
  std::span<const column> columns_used() const {
    return std::span(columns).first(weighs() ? 3 : pins == pin_rule::scores ? 2 : 1);
  }
  detail::leverage_weights weights() const {
    return {leverage_exponent, prompt_score, score_weight};
  }
  bool weighs() const { return pins == pin_rule::scores && leverage_exponent > 0; }
  /// What the scores of a prompt are multiplied by (`leverage_weights`); none without an exponent.
  std::vector<std::vector<float>> score_weights(std::size_t heads, const auto& head,
                                                const auto& state) const {
    return weighs() ? weights().of(heads, head, state) : std::vector<std::vector<float>>(heads);
  }
  void keep_weights(std::span<const float> by, head_state& s) const { weights().keep(by, s); }
  std::size_t memory(index_t dim, index_t group, index_t) const {
    return as_size(detail::fold_layout{decode.queries, group, dim}.size());
  }
  index_t min_budget() const {
    const index_t least = sinks + 2, by_share = search::least_target(least, recent_share, least);
    const index_t slots =
        by_share < search::max_tokens ? std::min(by_share, least + recent) : least + recent;
    return pins == pin_rule::scores
               ? std::max(slots, sinks + prompt_recent + std::max(clusters, index_t{2}))
               : slots;
  }
  /// This policy for a model whose heads share `slots` each on average, with pins by scores: every
  /// head has the sinks, the latest and as many clusters as the others, and `global_budgets` (or a
  /// `budget_profile`) says how many pins in addition to these `slots_beside_pins`. `room`: slots
  /// that a head has in addition, for tokens after the prompt; from `recent` on the prompt is
  /// compressed with `room_recent` and `room_share`. Refused: fewer slots than the protected tokens
  /// and two more, a room below 0.
  fold sharing(index_t slots, index_t room = 0) const {
    search::expect_count(name(), "slack slots", room, 0);
    fold shared = *this;
    shared.pins = pin_rule::scores;
    shared.mean = slots;
    shared.recent = pinned().recent_of(slots);
    if (room > 0 && room >= recent) {
      shared.prompt_recent = room_recent;
      shared.score_share = room_share;
    }
    shared.prompt_recent = std::min(shared.prompt_recent, shared.recent);
    shared.clusters = 0;
    expects(slots >= shared.min_budget(), "fold: expected at least ", shared.min_budget(),
            " slots to share, got ", slots);
    shared.clusters =
        std::max(index_t{2}, slots - sinks - shared.prompt_recent - shared.pinned().scored(slots));
    return shared;
  }
  /// Not attention but what outputs lose without a slot: its largest share over all queries, times
  /// ‖v‖ and its leverage over the mean. No bound, but one unit for all heads, as the values of a
  /// model add up in one residual stream.
  static constexpr bool shares() { return true; }
  void shared_scores(const kv_head auto&, const head_state& state, std::span<float> out) const {
    std::ranges::copy(state.column(prompt_score), out.begin());
  }
  index_t slots_beside_pins() const { return sinks + prompt_recent + clusters; }
  /// How many slots are pinned.
  detail::fold_pins pinned() const {
    return {sinks, recent, recent_share, share, clusters, prompt_recent, score_share, gain, mean};
  }
  index_t eviction_batch(index_t slots) const { return decode.freed(slots) - 1; }
  static constexpr observation_needs needs() { return {.query = true}; }
  /// Pins by scores are measured on all of a prompt; what is merged, on queries of future
  /// positions.
  kvmeld::prompt_use prompt_use() const {
    return {.observes = pins == pin_rule::scores,
            .plans = prompt_use::planned::lookahead,
            .positions = decode.ahead};
  }

  void observe(const kv_head auto& head, head_state& state, const observation& observed) const {
    expects(observed.query != nullptr, "fold: expected the step's query");
    memory_of(head, state).remember(observed.query, head.next_position() - 1, decode.stride);
  }

  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    if (pins == pin_rule::scores && queries.position == nullptr) {
      // With all queries since the first that scored these are the scores of one pass; with fewer a
      // slot keeps the largest that it had.
      const auto score = state.column(prompt_score);
      std::vector<float> now(score.size()), leverage(weighs() ? score.size() : 0);
      prompt_scores(head, queries.last(queries.count + queries.before),
                    {.leverage_ridge = leverage_ridge}, now, leverage);
      if (weighs()) {
        weights().measured(leverage, now, state);
      }
      const index_t begin = head.next_position() - queries.count - queries.before;
      const auto scored = memory_of(head, state).scored();
      const bool all = scored.count() == 0 || begin <= scored.begin;
      std::ranges::transform(score, now, score.begin(), [&](float held, float of_now) {
        return all ? of_now : std::max(held, of_now);
      });
      memory_of(head, state).set_scored({all ? begin : scored.begin, head.next_position()});
    }
    memory_of(head, state)
        .remember(queries.reference(queries.count + queries.before), head.next_position());
  }

  /// A prompt, on its reference queries.
  void plan(const kv_head auto& head, const head_state& state, const query_view<float>& queries,
            index_t target, slot_scratch& work, merge_plan& out) const {
    float log_gain = 0;
    if (pins == pin_rule::scores &&
        pin_scored(head, state, prompt_recent, pinned().scored(target), work)) {
      const auto all = std::ranges::count(work.marks, fold_prompt::pinned);
      log_gain = pinned().log_gain(static_cast<index_t>(all), head.tokens());
      fold_prompt::mark_evicted(evicted, target, state.column(tokens), state.column(prompt_score),
                                work.marks);
    } else {
      const auto of_slots = score::leverage_of_keys(
          head, leverage_ridge, [](index_t) { return true; }, work.numbers);
      score::average_pool(
          head, [](index_t) { return true; }, prompt.pool, false, of_slots);
      const float least =
          prompt.outlier * Eigen::Map<const dense::vector>(of_slots.data(), head.length()).mean();
      pin(
          head, pinned().outliers(target), protected_slots(head, sinks, pinned().recent_of(target)),
          [&, held = state.column(tokens)](index_t s) {
            const auto i = as_size(s);
            return held[i] == 1.0F && of_slots[i] > least ? of_slots[i] : lowest_score;
          },
          work);
    }
    // Raised to the gain, not by it: a pin of an earlier prompt may have one. Without it a slot of
    // one token has no log-mass.
    const auto log_mass_of_pin = [&,
                                  always = protected_slots(head, sinks, prompt_recent)](index_t s) {
      const float own = head.log_mass(s);
      return log_gain > 0 && !always(s) ? std::max(own, log_gain) : own;
    };
    prompt.plan(head, dense::queries(queries, head.group(), head.dim()), target, log_mass_of_pin,
                work, out);
  }

  /// Decode, on the queries remembered.
  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    const auto memory = memory_of(head, state);
    const index_t slots = std::min(head.length() - 1, target + decode.freed(target) - 1);
    const auto scored = memory.scored();
    const bool by_scores = pins == pin_rule::scores;
    const auto pins_of = by_scores ? pinned().decode(slots, target, scored.count(), head.tokens())
                                   : pinned().decode_by_leverage(slots, target);
    const index_t most = pins_of.others;
    if (by_scores) {
      // The prompt keeps the best of its own by score; what was decoded, after it or from an empty
      // cache, has the rest by leverage.
      pin_scored(head, state, pins_of.latest, pins_of.scored, work);
      work.row_of.assign(work.marks.begin(), work.marks.end());
    }
    const auto kept = [&, always = protected_slots(head, sinks, pins_of.latest)](index_t s) {
      return by_scores ? work.row_of[s] != 0 : always(s);
    };
    const auto candidate = [&, held = state.column(tokens)](index_t s) {
      return held[as_size(s)] == 1.0F && !(by_scores && scored.has(head.position(s))) && !kept(s);
    };
    if (most > 0 || !by_scores) {
      const auto leverage = score::leverage_of_keys(head, leverage_ridge, candidate, work.numbers);
      pin(
          head, most, kept, [&](index_t s) { return leverage[as_size(s)]; }, work);
    }
    decode.plan(head, memory, target, work, out);
  }

 private:
  template <class State>
  auto memory_of(const kv_head auto& head, State& state) const {
    return detail::fold_memory(state.memory(), decode.queries, head.group(), head.dim());
  }
  /// Marks what keeps its bytes by scores: sinks, the latest, and the `most` best of the slots that
  /// hold one token which something of the prompt looked up. False: there is none.
  bool pin_scored(const kv_head auto& head, const head_state& state, index_t latest, index_t most,
                  slot_scratch& work) const {
    const auto held = state.column(tokens), score = state.column(prompt_score);
    pin(
        head, most, protected_slots(head, sinks, latest),
        [&](index_t s) {
          const auto i = as_size(s);
          return held[i] == 1.0F && score[i] > 0 ? score[i] : lowest_score;
        },
        work);
    return std::ranges::any_of(score, [](float s) { return s > 0; });
  }

  /// Marks the slots for which `kept(s)`, and the `most` of the highest `value(s)` that have one.
  template <class Kept, class Value>
  static void pin(const kv_head auto& head, index_t most, Kept kept, Value value,
                  slot_scratch& work) {
    index_t pinned = 0, candidates = 0;
    for (index_t s = 0; s < head.length(); ++s) {
      const bool is_kept = kept(s);
      pinned += is_kept ? 1 : 0;
      candidates += !is_kept && value(s) > lowest_score ? 1 : 0;
    }
    search::select(head.length(), pinned + std::min(most, candidates), kept, value, work);
  }
};

}  // namespace kvmeld::inline v0
