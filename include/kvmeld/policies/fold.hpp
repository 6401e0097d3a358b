// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::ranges::count, std::ranges::transform
#include <cstdint>
#include <cstring>  // std::memcpy
#include <limits>   // std::numeric_limits
#include <vector>

#include "kvmeld/detail/product.hpp"
#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/merge/fit.hpp"
#include "kvmeld/policies/fold/layout.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"
#include "kvmeld/score/leverage.hpp"
#include "kvmeld/score/prompt_scores.hpp"
#include "kvmeld/score/softmax.hpp"
#include "kvmeld/search/cluster.hpp"
#include "kvmeld/search/ward.hpp"

namespace kvmeld::inline v0 {

namespace detail {

/// What `fold` remembers of a head, in its floats; read only when they are const.
template <class Float>
class fold_memory : fold_layout {
 public:
  fold_memory(std::span<Float> memory, const fold_layout& at)
      : fold_layout(at), memory_(memory.data()) {}

  /// The positions that have been scored, from the first prompt's queries on; in decode all.
  struct positions {
    index_t begin, end;

    index_t count() const { return end - begin; }
    bool has(index_t at) const { return begin <= at && at < end; }
  };
  positions scored() const { return {prompt_begin.get(memory_), prompt_end.get(memory_)}; }
  void set_scored(const positions& p) {
    prompt_begin.set(memory_, p.begin), prompt_end.set(memory_, p.end);
  }

  /// Queries held per query head.
  index_t count() const { return held.get(memory_); }
  /// Query `i` of group member `g`, the oldest first, into `out [dim]`.
  void query_of(index_t g, index_t i, float* out) const {
    std::uint16_t bits[longest_row];
    std::memcpy(bits, at(g, place(i)), bytes());
    std::transform(bits, bits + dim, out, [](std::uint16_t upper) {
      return std::bit_cast<float>(std::uint32_t{upper} << 16);
    });
  }
  index_t position_of(index_t i) const { return position.get(memory_, place(i)); }
  /// The log-sum-exp of its step; infinite of a prompt's query, which has scored there.
  float log_sum_of(index_t g, index_t i) const { return *log_sum_at(g, place(i)); }
  /// Steps since slots were scored.
  index_t count_unscored() const { return scores ? unscored.get(memory_) : 0; }
  void set_unscored(index_t steps_since) { unscored.set(memory_, steps_since); }

  /// A step's query `[group, dim]`, with its `log_sum_exp [group]` where they score. Every
  /// `stride`-th is held, and always the newest.
  void remember(const float* q, std::span<const float> log_sum_exp, index_t at_position,
                index_t stride) {
    if (queries == 0) {
      return;
    }
    const index_t slot = next.get(memory_), step = steps.get(memory_);
    put(slot, at_position, [&](index_t g) { return q + std::ptrdiff_t{g} * dim; });
    for (index_t g = 0; scores && g < group; ++g) {
      *log_sum_at(g, slot) = log_sum_exp[as_size(g)];
    }
    if (scores) {
      set_unscored(count_unscored() + 1);
    }
    held.set(memory_, std::max(count(), slot + 1)), newest.set(memory_, slot);
    next.set(memory_, next_slot(slot, step, stride)), steps.set(memory_, (step + 1) % stride);
  }

  /// Reference queries: as many as there is room for, evenly spread. `next_position`: so far.
  void remember(const query_view<float>& reference, index_t next_position) {
    if (queries == 0) {
      return;
    }
    const index_t n = std::min(queries, reference.count);
    for (index_t i = 0; i < n; ++i) {
      const auto from = static_cast<index_t>(std::int64_t{i} * reference.count / n);
      put(i, reference.position_of(from, next_position),
          [&](index_t g) { return reference.at(g, from); });
      for (index_t g = 0; scores && g < group; ++g) {
        *log_sum_at(g, i) = std::numeric_limits<float>::infinity();
      }
    }
    if (scores) {
      set_unscored(0);
    }
    held.set(memory_, n), newest.set(memory_, n - 1);
    next.set(memory_, n % queries), steps.set(memory_, 0);
  }

 private:
  index_t place(index_t i) const { return slot_of(i, count(), newest.get(memory_)); }
  Float* at(index_t g, index_t slot) const {
    return query.row(memory_, std::ptrdiff_t{slot} * group + g);
  }
  Float* log_sum_at(index_t g, index_t slot) const {
    return log_sum.row(memory_, std::ptrdiff_t{slot} * group + g);
  }
  std::size_t bytes() const { return as_size(dim) * sizeof(std::uint16_t); }
  template <class Query>
  void put(index_t slot, index_t at_position, Query query_of_head) {
    position.set(memory_, at_position, slot);
    for (index_t g = 0; g < group; ++g) {
      const float* const q = query_of_head(g);
      std::uint16_t bits[longest_row];
      std::transform(q, q + dim, bits,
                     [](float x) { return static_cast<Eigen::bfloat16>(x).value; });
      std::memcpy(at(g, slot), bits, bytes());
    }
  }

  Float* memory_;
};

}  // namespace detail

/// The slots that are not marked become clusters, `target` rows in all. Seeds keep away from what
/// is marked.
struct fold_prompt {
  index_t pool = 5;
  float outlier = 1.6F;
  index_t rounds = 4;
  float floor = 0.1F;
  float ridge = 0.002F;

  /// What becomes of a slot.
  enum mark : char { clustered, pinned };

  /// `queries [queries, dim]`; `work.marks` says which slots are pinned, so keep their bytes.
  /// `log_mass_of_pin(slot)`: the ridge of the clusters' values is fitted to it.
  void plan(const kv_head auto& head, const dense::stored auto& queries, index_t target,
            const auto& log_mass_of_pin, slot_scratch& work, merge_plan& out) const {
    const index_t n = head.length();
    // Types that depend on the head's: what is made of them is compiled where it is used.
    const auto keys = dense::keys(head), values = dense::values(head);
    const score::logit_terms terms(head);
    const auto full = dense::attend(queries, keys, values, dense::log_mass(head), terms);
    const auto count = static_cast<float>(queries.rows());
    const auto m = (full.mass.array() / count + 1e-6F).matrix().eval();
    const auto& marks = work.marks;
    const auto alone = static_cast<index_t>(std::ranges::count(marks, pinned));
    const dense::vector pull = m.array() + floor / static_cast<float>(n);
    const search::clusters c =
        search::cluster(space(head, queries, keys, values), marks, pull, target - alone, rounds);
    work.row_of.resize(as_size(n));
    for (index_t s = 0; s < n; ++s) {
      work.row_of[s] = marks[s] == pinned ? s : c.seeds[c.cluster[s]];
    }

    // Rows: keys, values, the mass of what they stand for; a slot's part of its row, by m.
    dense::matrix key = dense::matrix::Zero(target, head.dim()),
                  value = dense::matrix::Zero(target, head.value_dim()), correction;
    dense::vector row_mass = dense::vector::Zero(target), part(n);
    std::vector<char> fixed;
    std::vector<index_t> anchor, ascending;
    merge::for_each_row(work, [&](std::span<const index_t> members) {
      const auto r = static_cast<Eigen::Index>(fixed.size());
      anchor.push_back(members[0]), fixed.push_back(marks[members[0]]);
      ascending.assign(members.begin(), members.end());
      std::ranges::sort(ascending);
      float sum = 0;
      for (const index_t s : ascending) {
        sum += m[s], row_mass[r] += full.mass[s];
      }
      for (const index_t s : ascending) {
        part[s] = m[s] / sum;
        key.row(r) += part[s] * keys.row(s), value.row(r) += part[s] * values.row(s);
      }
    });
    auto beta = merge::fit_log_mass(key, row_mass, queries, full.log_sum_exp, terms);
    for (Eigen::Index r = 0; r < target; ++r) {
      beta[r] = fixed[as_size(r)] != 0 ? log_mass_of_pin(anchor[as_size(r)]) : beta[r];
    }
    if (ridge > 0) {
      auto p = merge::probabilities(queries, key, beta, terms), missing = full.output;
      dense::add_product(-1, p, value, missing);
      std::vector<Eigen::Index> merged;  // rows, whose columns of p come first
      for (Eigen::Index r = 0; r < target; ++r) {
        if (fixed[as_size(r)] == 0) {
          p.col(static_cast<Eigen::Index>(merged.size())) = p.col(r);
          merged.push_back(r);
        }
      }
      p.conservativeResize(p.rows(), static_cast<Eigen::Index>(merged.size()));
      const dense::matrix delta = merge::ridge_values(p, missing, ridge);
      correction.setZero(target, head.value_dim());
      for (std::size_t i = 0; i < merged.size(); ++i) {
        correction.row(merged[i]) = delta.row(static_cast<Eigen::Index>(i));
      }
    }

    out.reset(n);
    merge::for_each_row(work, [&, r = std::size_t{0}](std::span<const index_t> members) mutable {
      const float log_mass = beta[static_cast<Eigen::Index>(r)];
      if (fixed[r++] != 0) {
        return out.keep(members[0], log_mass);
      }
      for (const index_t s : members) {
        out.add({s, part[s], part[s]});
      }
      out.end_row(log_mass);
    });
    if (ridge > 0) {
      out.correct_values({correction.data(), as_size(correction.size())}, head.value_dim());
    }
  }

 private:
  /// The space in which squared distance is D²: `[scale · (k − mean k) L | v / mean‖v‖]`, `L Lᵀ`
  /// the queries' covariance, in numbers that a half holds: what tensor cores multiply, exactly.
  static dense::matrix space(const kv_head auto& head, const dense::stored auto& queries,
                             const dense::stored auto& keys, const dense::stored auto& values) {
    using matrix = std::remove_cvref_t<decltype(keys)>;
    const matrix centred = queries.rowwise() - queries.colwise().mean();
    matrix covariance = matrix::Zero(queries.cols(), queries.cols());
    dense::add_transposed_product(1 / static_cast<float>(queries.rows()), centred, centred,
                                  covariance);
    covariance.diagonal().array() += 1e-3F;
    dense::cholesky(covariance);
    for (Eigen::Index r = 0; r < covariance.rows(); ++r) {
      covariance.row(r).head(r).setZero();  // Lᵀ
    }
    const float norm = std::max(values.rowwise().norm().mean(), 1e-20F);
    matrix x(keys.rows(), keys.cols() + values.cols()), centre(1, keys.cols());
    const matrix mean = keys.colwise().mean();
    dense::set_product_transposed(-head.scale(), mean, covariance, centre);
    x.leftCols(keys.cols()).rowwise() = centre.row(0);
    dense::add_product_transposed(head.scale(), keys, covariance, x.leftCols(keys.cols()));
    x.rightCols(values.cols()) = values / norm;
    constexpr float most = 65504;  // of halfs
    x = x.cwiseMin(most).cwiseMax(-most).template cast<Eigen::half>().template cast<float>();
    return x;
  }
};

/// Everything is computed in the plan's own scratch, so that nothing is allocated after its first
/// use.
struct fold_decode {
  future_positions ahead = {};  ///< where held queries are moved to
  index_t queries = 4;
  index_t stride = 8;
  index_t period = 0;
  index_t rescore = 0;

  /// Raises `score [length]` to `score::lookahead_max` of the queries held: query `i` of `count`
  /// goes `score_horizon · i / count` positions beyond the next one, and has the log-sum-exp of its
  /// own step. A slot keeps the largest that it had, since one query alone may find it. Not
  /// `lookahead_max` itself, which allocates.
  template <class Memory>
  static void rescore_slots(const kv_head auto& head, const Memory& memory,
                            std::vector<float>& numbers, std::span<float> score) {
    const index_t n = head.length(), dim = head.dim(), group = head.group(), held = memory.count();
    const auto size = as_size(n), d = as_size(dim);
    detail::arena scratch(numbers, 2 * size + as_size(held) * as_size(group) * d +
                                       some_queries * (size + score::whole_vectors) +
                                       tile_slots * d);
    auto largest = scratch.column(n), mean = scratch.column(n);
    auto moved = scratch.rows(held * group, dim);
    foresee(
        head, memory,
        [](index_t i, index_t count) {
          return static_cast<index_t>(std::int64_t{score_horizon} * i / count);
        },
        moved);
    mean.setZero();
    each_row(
        head, moved, scratch, [](Eigen::Index) { return score::softmax<>{}; },
        [&](Eigen::Index row, auto probability, const score::softmax<>& all) {
          const auto g = static_cast<index_t>(row) / held, i = static_cast<index_t>(row) % held;
          if (i == 0) {
            largest.setZero();
          }
          if (const float own = memory.log_sum_of(g, i); own < infinity && all.sum > 0) {
            score::softmax<> both = all;
            both.merge({own, 1});
            largest = largest.cwiseMax(probability * (all.below(both.max) / both.sum));
          }
          if (i + 1 == held) {
            mean += largest / static_cast<float>(group);
          }
        });
    for (index_t s = 0; s < n; ++s) {
      float& of_slot = score[as_size(s)];
      of_slot = std::max(of_slot, norm(head.value(s), head.value_dim()) * mean[s]);
    }
  }

  /// `work.marks` says which slots keep their bytes; of the others, the cheapest to fold go.
  /// `log_mass_of_pin(slot)`: what those that keep them have from now on.
  template <class Memory>
  void plan(const kv_head auto& head, const Memory& memory, index_t target,
            const auto& log_mass_of_pin, slot_scratch& work, merge_plan& out) const {
    // Types that depend on the head's: what is made of them is compiled where it is used.
    const auto n = head.length(), dim = head.dim(), count = memory.count() * head.group();
    const auto size = as_size(n), d = as_size(dim), q = as_size(count);
    detail::arena scratch(
        work.numbers, 2 * size + 2 * q + (q + 1) * d +
                          std::max(some_queries * (size + score::whole_vectors) + tile_slots * d,
                                   2 * search::ward_slots::floats(n, dim)));
    auto sum = scratch.column(n), cost = scratch.column(n), log_sum_exp = scratch.column(count),
         logit = scratch.column(count), key = scratch.column(dim);
    auto foreseen = scratch.rows(count, dim);
    foresee(head, memory, ahead, foreseen);
    measure(head, foreseen, scratch, sum, log_sum_exp);
    const auto mass = [&sum, each = static_cast<float>(std::max(count, 1))](index_t s) {
      return sum[s] / each + 1e-6F;
    };

    // Removed are the slots cheapest to merge into one of no less mass. In descending order of
    // mass, these are before it, or next to it where masses are equal.
    auto& order = work.order;
    order.clear();
    for (index_t s = 0; s < n; ++s) {
      if (work.marks[s] == 0) {
        order.push_back(s);
      }
    }
    const index_t freed_now = n - target;
    expects(static_cast<index_t>(order.size()) > freed_now,
            "fold: expected fewer pinned slots than the target of ", target, ", got ",
            n - static_cast<index_t>(order.size()));
    detail::sort_slots(
        order, [&](index_t s) { return detail::descending(rank(mass(s))); }, work.keyed);
    auto& heavier = work.row_of;  // [order] how many weigh no less
    heavier.resize(order.size());
    for (std::size_t i = order.size(); i-- > 0;) {
      const bool last = i + 1 == order.size() || rank(mass(order[i + 1])) < rank(mass(order[i]));
      heavier[i] = last ? static_cast<index_t>(i) + 1 : heavier[i + 1];
    }
    {
      detail::arena pass = scratch;
      const search::ward_slots all(head, order, mass, pass);
      search::cheapest_partners(
          all, all, [&](index_t i) { return heavier[as_size(i)]; },
          [&](index_t i, const search::ward_partner& to) {
            // A key that holds NaN is evicted before others are merged.
            cost[order[as_size(i)]] = std::isnan(all.square[i]) ? -1 : to.cost;
          });
    }
    detail::select_slots(
        order, freed_now, [&](index_t s) { return detail::ascending(cost[s]); }, work.keyed);
    // Into: the cheapest of those that are kept and not pinned.
    const auto removed = std::span(order).first(as_size(freed_now));
    auto& into = work.row_of;
    into.resize(size);
    {
      detail::arena pass = scratch;
      const search::ward_slots to(head, std::span(order).subspan(removed.size()), mass, pass),
          from(head, removed, mass, pass);
      search::cheapest_partners(
          from, to, [&](index_t) { return static_cast<index_t>(to.slot.size()); },
          [&](index_t i, const search::ward_partner& partner) {
            into[as_size(removed[as_size(i)])] =
                std::isnan(from.square[i]) ? evicted : partner.slot;
          });
    }
    write(head, removed, foreseen, log_sum_exp, mass, sum, log_mass_of_pin, key, logit, work, out);
  }

 private:
  static constexpr index_t some_queries = 32, tile_slots = 128, evicted = -1, score_horizon = 512;
  static constexpr float infinity = std::numeric_limits<float>::infinity();

  /// A logit that is no finite number is that of a slot without mass.
  static float of_number(float logit) { return logit < infinity ? logit : -infinity; }

  /// The remembered queries at future positions, `[group · count, dim]`: `positions(i, count)`
  /// beyond the next one.
  template <class Memory>
  static void foresee(const kv_head auto& head, const Memory& memory, const auto& positions,
                      Eigen::Map<dense::matrix>& foreseen) {
    const index_t count = memory.count();
    rotation turn(head.spec().rope, head.dim());
    for (index_t i = 0; i < count; ++i) {
      turn.by(head.next_position() + positions(i, count) - memory.position_of(i));
      for (index_t g = 0; g < head.group(); ++g) {
        float* q = &foreseen(Eigen::Index{g} * count + i, 0);
        memory.query_of(g, i, q);
        turn(q);
        if (!Eigen::Map<const dense::vector>(q, head.dim()).allFinite()) {
          std::fill_n(q, head.dim(), 0.0F);  // it tells nothing: masses are those of log-mass
        }
      }
    }
  }

  /// Calls `use(row, exp [length], softmax)` with the exponentials of each query's logits below the
  /// largest, a few queries at a time; `sink(row)`: what its softmax begins with.
  static void each_row(const kv_head auto& head, const Eigen::Map<dense::matrix>& queries,
                       detail::arena scratch, const auto& sink, const auto& use) {
    const auto n = head.length(), width = score::padded(n);
    auto logits = scratch.rows(some_queries, width);
    float* const buffer = scratch.rows(tile_slots, head.dim()).data();
    const score::logit_terms terms(head);
    for (Eigen::Index first = 0; first < queries.rows(); first += some_queries) {
      const Eigen::Index rows = std::min<Eigen::Index>(some_queries, queries.rows() - first);
      score::multiply_keys(head, queries.middleRows(first, rows), tile_slots, buffer,
                           logits.topLeftCorner(rows, n));
      for (Eigen::Index r = 0; r < rows; ++r) {
        auto logit = logits.row(r).array();
        terms.replace_products(head, 0, head.next_position(), 0, n, logit.data());
        logit = logit.unaryExpr(&of_number);
        score::softmax<> all = sink(first + r);
        all.take(logit);
        use(first + r, logits.row(r).head(n).transpose(), all);
      }
    }
  }

  /// Every slot's mass: probabilities summed over the queries. Without queries, what log-mass says.
  static void measure(const kv_head auto& head, const Eigen::Map<dense::matrix>& queries,
                      detail::arena scratch, Eigen::Map<dense::vector>& sum,
                      Eigen::Map<dense::vector>& log_sum_exp) {
    const score::logit_terms terms(head);
    sum.setZero();
    each_row(
        head, queries, scratch,
        [&](Eigen::Index r) { return terms.sink_of_row(r, queries.rows()); },
        [&](Eigen::Index r, auto probability, const score::softmax<>& all) {
          if (all.sum > 0) {
            sum += probability / all.sum;
          }
          log_sum_exp[r] = all.sum > 0 ? all.log_sum_exp() : infinity;
        });
    for (index_t s = 0; queries.rows() == 0 && s < head.length(); ++s) {
      sum[s] = std::exp(std::min(head.log_mass(s), 80.0F));
    }
  }

  /// Rows at the tangent: members weighted by their mass, log-mass fitted on the same queries. The
  /// mass of a prompt's pin includes its gain: the ridge has fitted the values of all other rows to
  /// the share of attention that the gain gives, which would fall at this step without it.
  /// `removed` is sorted by the slots that they go into; `key`, `logit`: scratch.
  template <class MassOf>
  static void write(const kv_head auto& head, std::span<index_t> removed,
                    const dense::stored auto& queries, const dense::stored auto& log_sum_exp,
                    MassOf mass, const dense::stored auto& sum, const auto& log_mass_of_pin,
                    dense::stored auto& key, dense::stored auto& logit, slot_scratch& work,
                    merge_plan& out) {
    const index_t n = head.length(), dim = head.dim();
    const score::logit_terms terms(head);
    const auto& into = work.row_of;
    const auto destination = [&](index_t s) { return into[as_size(s)]; };
    constexpr char free = 0, gone = 2;  // beside what is pinned
    for (const index_t s : removed) {
      work.marks[as_size(s)] = gone;
    }
    detail::sort_slots(
        removed, [&](index_t s) { return detail::ascending(destination(s)); }, work.keyed);
    out.reset(n);
    std::size_t begin = 0;  // of the next row's members in `removed`
    while (begin < removed.size() && destination(removed[begin]) == evicted) {
      ++begin;
    }
    for (index_t r = 0; r < n; ++r) {
      if (work.marks[as_size(r)] == gone) {
        continue;
      }
      std::size_t end = begin;
      float weight = mass(r), true_mass = sum[r];
      for (; end < removed.size() && destination(removed[end]) == r; ++end) {
        weight += mass(removed[end]), true_mass += sum[removed[end]];
      }
      if (end == begin) {
        out.keep(r, work.marks[as_size(r)] == free ? head.log_mass(r) : log_mass_of_pin(r));
        continue;
      }
      key.setZero();
      const auto add = [&](index_t s) {
        const float w = mass(s) / weight;
        out.add({s, w, w});
        constexpr index_t chunk = 64;  // of a row, on the stack
        float own[chunk];
        for (index_t first = 0; first < dim; first += chunk) {
          const index_t width = std::min(chunk, dim - first);
          to_floats(head.key(s).from(first), width, own);
          for (index_t i = 0; i < width; ++i) {
            key[first + i] += w * own[i];
          }
        }
      };
      add(r);
      for (; begin < end; ++begin) {
        add(removed[begin]);
      }
      float alone = 1;
      if (queries.rows() > 0) {
        logit.noalias() = queries * key;
        logit *= terms.scale();
        terms.cap_logits(logit.array());
        logit = (logit - log_sum_exp).array().exp();
        alone = std::isnan(logit.sum()) ? true_mass : logit.sum();
      }
      out.end_row(merge::log_ratio(true_mass, alone));
    }
  }
};

/// fold (ours): slots that attention cannot tell apart are merged; outliers keep their bytes,
/// whether queries attend to them yet or not.
///   score   m_i, the mean attention of reference queries (lookahead) over the full cache
///   select  sinks, the latest, and up to a share of the rest for the outliers: the highest
///           leverage of un-rotated keys, well above the mean, after a prompt averaged over
///           neighbours, as outliers are several tokens long. Or (`pins`) what will be asked for,
///           by `prompt_scores`: with `sharing` by one threshold over all heads of the model
///   match   prompt: k-means of the rest, D² = scale² δkᵀ C δk + ‖δv‖²/mean‖v‖², C the queries'
///           covariance, farthest-first seeds. Decode: the cheapest pairs by Ward's cost
///   merge   means by m; log-mass fitted to the mass on the queries; values by ridge (prompt)
///   gain    by scores, a head with more pins than its share of the model's slots retrieves: after
///           a prompt the log-mass of its pins makes up for what heads with fewer retrieve no more
struct fold {
  /// What stays unmerged besides sinks and the latest: outliers among keys, or, in all slots but
  /// those of the clusters, the best by `prompt_scores`, which the prompt's own queries measure.
  /// Of slots that they did not measure, leverage decides.
  enum class pin_rule { leverage, scores };

  index_t sinks = 4;
  index_t recent = 24;
  float recent_share = 0.25F;
  float share = 0.5F;
  float leverage_ridge = 1;
  fold_prompt prompt = {};  ///< how a prompt is clustered
  fold_decode decode = {};  ///< how decode merges
  pin_rule pins = pin_rule::leverage;
  index_t clusters = 0;
  index_t prompt_recent = 8;
  float score_share = 0.7F;
  index_t room_recent = 2;
  float room_share = 0.85F;
  float gain = 0.4F;
  index_t mean = 0;
  bool screened = true;

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
      option("queries", in(&fold::decode, &fold_decode::queries), 0, any_count,
             "remembered per query head; 0 if only prompts are compressed"),
      option("stride", in(&fold::decode, &fold_decode::stride), 1, any_count,
             "steps per remembered query"),
      option("period", in(&fold::decode, &fold_decode::period), 0, any_count,
             "slots freed at once; 0: a sixteenth of the budget, `rescore` at least"),
      option("rescore", in(&fold::decode, &fold_decode::rescore), 0, any_count,
             "with pins=1: steps after which all slots are scored by the queries of those steps, "
             "in place of `queries` and `stride`; 0: decoded tokens are pinned by leverage"),
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
      option(
          "gain", &fold::gain, 0, 1,
          "with pins=1: what the log-mass of pins grows with where a head has more than the mean"),
      option("mean", &fold::mean, 0, any_count,
             "slots of a head of the model on average; 0: no gain"),
      option(
          "screened", &fold::screened,
          "with pins=1: scores of a long prompt by products of 8 bits, on processors with them")};
  /// The tokens that a slot stands for; by scores also the largest of its `prompt_scores`.
  static constexpr column tokens{0, "tokens", slot_reduce::sum, 1},
      prompt_score{1, "prompt_score", slot_reduce::max};
  static constexpr std::array columns{tokens, prompt_score};
  std::span<const column> columns_used() const {
    return std::span(columns).first(pins == pin_rule::scores ? 2 : 1);
  }
  /// Are slots scored by the queries of decode?
  bool rescores() const { return pins == pin_rule::scores && decode.rescore > 0; }
  /// Slots that one plan of decode frees. A plan costs more than the scores that it is made by.
  index_t freed(index_t slots) const {
    return std::max(detail::fold_freed(decode.period, slots),
                    rescores() && decode.period == 0 ? decode.rescore : index_t{0});
  }
  std::size_t memory(index_t dim, index_t group, index_t) const {
    return as_size(layout(group, dim).all.size);
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
  /// head has `slots_beside_pins`, for the sinks, the latest and as many clusters as the others,
  /// and `global_budgets` (or a `budget_profile`) says how many pins. `room`: slots that a head has
  /// in addition for the continuation; from `recent` on the prompt is compressed with `room_recent`
  /// and `room_share`. Refused: fewer slots than the protected tokens and two more, a room below 0.
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
  kvmeld::new_scores new_scores(const kv_head auto& head, const head_state& state) const {
    return rescores() ? kvmeld::new_scores{decode.rescore, memory_of(head, state).count_unscored()}
                      : kvmeld::new_scores();
  }
  /// Slots for all but pins.
  index_t slots_beside_pins() const { return sinks + prompt_recent + clusters; }
  /// How many slots are pinned.
  detail::fold_pins pinned() const {
    return {sinks, recent, recent_share, share, clusters, prompt_recent, score_share, gain, mean};
  }
  index_t eviction_batch(index_t slots) const { return freed(slots) - 1; }
  observation_needs needs() const { return {.log_sum_exp = rescores(), .query = true}; }
  /// Pins by scores are measured on all of a prompt; what is merged, on queries of future
  /// positions.
  kvmeld::prompt_use prompt_use() const {
    return {.observes = pins == pin_rule::scores,
            .plans = prompt_use::planned::lookahead,
            .positions = decode.ahead};
  }
  /// The queries of the latest steps, what a prompt was scored as, and which positions were; where
  /// every step's query scores, all.
  kvmeld::decode_use decode_use() const {
    if (rescores()) {
      return {};
    }
    const auto steps = std::int64_t{decode.queries} * decode.stride;
    return {.steps = static_cast<index_t>(std::min<std::int64_t>(steps, search::max_tokens)),
            .columns = true,
            .memory = as_size(detail::fold_layout{}.held.at)};
  }

  void observe(const kv_head auto& head, head_state& state, const observation& observed) const {
    expects(observed.query != nullptr, "fold: expected the step's query");
    expects(!rescores() || !observed.log_sum_exp.empty(), "fold: expected the step's log-sum-exp");
    expects(!rescores() || observed.scratch != nullptr, "fold: expected memory to work in");
    auto memory = memory_of(head, state);
    memory.remember(observed.query, observed.log_sum_exp, head.next_position() - 1,
                    rescores() ? 1 : decode.stride);
    if (rescores() && memory.count_unscored() == decode.rescore) {
      fold_decode::rescore_slots(head, memory, observed.scratch->numbers,
                                 state.column(prompt_score));
      memory.set_unscored(0);
      memory.set_scored({0, head.next_position()});  // a prompt that follows replaces no score
    }
  }

  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    if (pins == pin_rule::scores && queries.position == nullptr) {
      // With all queries since the first that scored these are the scores of one pass; with fewer a
      // slot keeps the largest that it had.
      const auto score = state.column(prompt_score);
      std::vector<float> now(score.size());
      prompt_scores(head, queries.last(queries.count + queries.before),
                    {.leverage_ridge = leverage_ridge, .screened = screened}, now);
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
    prompt.plan(head, dense::queries(queries, head.group(), head.dim()), target,
                pin_mass(head, log_gain, prompt_recent), work, out);
  }

  /// Decode, on the queries remembered.
  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    const auto memory = memory_of(head, state);
    const index_t slots = std::min(head.length() - 1, target + freed(target) - 1);
    const auto scored = memory.scored();
    const bool by_scores = pins == pin_rule::scores;
    if (rescores()) {
      const auto pins_now = pinned().decode_by_scores(target, memory.count_unscored());
      pin_scored(head, state, pins_now.latest, pins_now.scored, work);
      const auto all = std::ranges::count(work.marks, fold_prompt::pinned);
      const float log_gain = pinned().log_gain(static_cast<index_t>(all), head.tokens());
      const index_t latest = std::max(pins_now.latest, decode.rescore);
      return decode.plan(head, memory, target, pin_mass(head, log_gain, latest), work, out);
    }
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
    decode.plan(head, memory, target, pin_mass(head, 0, 0), work, out);
  }

 private:
  detail::fold_layout layout(index_t group, index_t dim) const {
    // One query that scored before is among those that score: a token is found by the one before.
    return {rescores() ? decode.rescore + 1 : decode.queries, group, dim, rescores()};
  }
  template <class State>
  auto memory_of(const kv_head auto& head, State& state) const {
    return detail::fold_memory(state.memory(), layout(head.group(), head.dim()));
  }
  /// (slot) ↦ the log-mass of a pin that gains, save sinks and the `latest`. Raised to the gain,
  /// not by it: it may have had one before. Without one a slot of one token has no log-mass.
  auto pin_mass(const kv_head auto& head, float log_gain, index_t latest) const {
    return [&head, log_gain, always = protected_slots(head, sinks, latest)](index_t s) {
      const float own = head.log_mass(s);
      return log_gain > 0 && !always(s) ? std::max(own, log_gain) : own;
    };
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
