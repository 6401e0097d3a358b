#pragma once

#include <array>
#include <limits>
#include <string_view>

#include "kvfold/memory/head_state.hpp"
#include "kvfold/merge/evict.hpp"
#include "kvfold/merge/plan.hpp"
#include "kvfold/policies/fold/decode.hpp"
#include "kvfold/policies/fold/layout.hpp"
#include "kvfold/policies/fold/prompt.hpp"
#include "kvfold/score/observation.hpp"
#include "kvfold/score/queries.hpp"
#include "kvfold/score/scorers.hpp"
#include "kvfold/search/protection.hpp"
#include "kvfold/search/select.hpp"
#include "kvfold/search/slot_scratch.hpp"

namespace kvfold {
inline namespace v0 {

/// fold (ours): slots that attention cannot tell apart are merged; outliers are kept unmerged,
/// whether queries attend to them yet or not.
///   score   m_i, the mean attention of reference queries (foresight) over the full cache
///   select  sinks, the latest, and up to a share of the rest for the outliers: the highest
///           leverage of un-rotated keys, after a prompt averaged over neighbours, for what stands
///           out is several tokens long, and well above the mean; these keep their bytes
///   match   prompt: k-means of the rest, D² = scale² δkᵀ C δk + ‖δv‖²/mean‖v‖², C the queries'
///           covariance, farthest-first seeds. Decode: the cheapest pairs by Ward's cost
///   merge   means by m; log-mass fitted to the mass on the queries; values by ridge (prompt)
struct fold {
  kvfold::rope rope = {};  ///< the engine's, so that keys and queries can be moved in position
  index_t sinks = 4;
  index_t recent = 24;         ///< latest tokens that stay unmerged ...
  float recent_share = 0.25F;  ///< ... at most this share of the slots
  float share = 0.5F;          ///< of the other slots at most, for outliers
  fold_prompt prompt = {};
  fold_decode decode = {};

  static constexpr std::string_view name() { return "fold"; }
  static void parameters(auto& p, auto f) {
    f("sinks", p.sinks), f("recent", p.recent), f("share", p.share),
        f("recent_share", p.recent_share), f("pool", p.prompt.pool),
        f("leverage_ridge", p.prompt.leverage_ridge), f("outlier", p.prompt.outlier),
        f("rounds", p.prompt.rounds), f("floor", p.prompt.floor), f("ridge", p.prompt.ridge),
        f("polish", p.prompt.polish), f("rate", p.prompt.rate), f("queries", p.decode.queries),
        f("stride", p.decode.stride), f("period", p.decode.period);
  }
  enum column_name : index_t { tokens };  ///< that a slot stands for
  static constexpr std::array<column, 1> columns() { return {column{column_merge::sum, 1}}; }
  std::size_t memory(index_t dim, index_t group, index_t) const {
    return detail::fold_memory_size(decode.queries, group, dim);
  }
  index_t min_budget() const {
    index_t slots = sinks + 2;
    while (slots < sinks + recent_of(slots) + 2) {
      ++slots;
    }
    return slots;
  }
  index_t eviction_batch(index_t slots) const { return decode.freed(slots) - 1; }
  void validate() const {
    search::expect_count(name(), "sinks", sinks, 0);
    search::expect_count(name(), "recent tokens", recent, 0);
    expects(share >= 0 && share < 1, "fold: a share in [0, 1) expected, ", share, " came");
    expects(recent_share >= 0 && recent_share <= 1, "fold: a recent share in [0, 1] expected, ",
            recent_share, " came");
    prompt.validate();
    decode.validate();
  }

  void observe(const kv_head auto& head, head_state& state, const observation& observed) const {
    expects(observed.query != nullptr, "fold: the step's query expected, none came");
    memory_of(head, state).remember(observed.query, head.tokens_total() - 1, decode.stride);
  }

  template <class T>
  void observe(const kv_head auto& head, head_state& state, const query_view<T>& queries) const {
    memory_of(head, state)
        .remember(queries.reference(queries.count + queries.before), head.tokens_total());
  }

  /// A prompt, on its reference queries.
  template <class T>
  void plan(const kv_head auto& head, const head_state& state, const query_view<T>& queries,
            index_t target, slot_scratch& work, merge_plan& out) const {
    dense::vector leverage = score::leverage_of_keys(head, rope, prompt.leverage_ridge);
    const std::span<float> of_slots(leverage.data(), static_cast<std::size_t>(leverage.size()));
    score::average_pool(
        head, [](index_t) { return true; }, prompt.pool, false, of_slots);
    pin(head, state, target, of_slots, prompt.outlier * leverage.mean(), work);
    prompt.plan(head, dense::queries(queries, head.group(), head.dim()), target, work, out);
  }

  /// Decode, on the queries remembered.
  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    const auto memory = memory_of(head, state);
    const index_t slots = std::min(head.length() - 1, target + decode.freed(target) - 1);
    const auto always = protected_slots(head, sinks, recent_of(slots));
    const auto candidate = [&, held = state.column(tokens)](index_t s) {
      return held[static_cast<std::size_t>(s)] == 1.0F && !always(s);
    };
    pin(head, state, slots, decode.leverage(head, memory, rope, candidate, work),
        -std::numeric_limits<float>::infinity(), work);
    decode.plan(head, memory, rope, target, work, out);
  }

  /// The moments of keys, before slots are merged.
  void update_memory(const kv_head auto& head, head_state& state, const merge_plan&,
                     slot_scratch&) const {
    memory_of(head, state).count_keys(head, rope);
  }

 private:
  template <class State>
  auto memory_of(const kv_head auto& head, State& state) const {
    return detail::fold_memory(state.memory(), decode.queries, head.group(), head.dim());
  }
  index_t recent_of(index_t slots) const {
    return detail::fold_recent(recent, recent_share, slots);
  }

  /// Marks what keeps its bytes: sinks, the latest, and of the slots that hold one token those of
  /// the highest leverage above `least`, up to their share.
  void pin(const kv_head auto& head, const head_state& state, index_t slots,
           std::span<const float> leverage, float least, slot_scratch& work) const {
    const index_t latest = recent_of(slots);
    const auto outliers = std::max(
        index_t{0}, static_cast<index_t>(share * static_cast<float>(slots - sinks - latest)));
    const auto always = search::protect(head, sinks, latest);
    const auto held = state.column(tokens);
    const auto outlying = [&](index_t s) {
      const auto i = static_cast<std::size_t>(s);
      return held[i] == 1.0F && leverage[i] > least;
    };
    index_t pinned = 0, candidates = 0;
    for (index_t s = 0; s < head.length(); ++s) {
      const bool is_protected = always(head.position(s));
      pinned += is_protected ? 1 : 0;
      candidates += !is_protected && outlying(s) ? 1 : 0;
    }
    search::select(
        head.length(), pinned + std::min(outliers, candidates),
        [&](index_t s) { return always(head.position(s)); },
        [&](index_t s) {
          return outlying(s) ? rank(leverage[static_cast<std::size_t>(s)])
                             : -std::numeric_limits<float>::infinity();
        },
        work);
  }
};

}  // namespace v0
}  // namespace kvfold
