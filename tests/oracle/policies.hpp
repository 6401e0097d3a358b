// SPDX-License-Identifier: MIT
// The policies that only drop tokens: full cache, StreamingLLM, H2O, SnapKV.
//
// Each has   prompt(head, queries [n][group][dim], query positions [n] or {}, target)
//            step(head, q [group][dim], k [dim], v [dim], target, trigger) -> output [group][dim]
// A step appends, attends, observes, and goes back to `target` slots when there are `trigger` of
// them (0: target + 1).
#pragma once

#include "oracle/margin.hpp"
#include "oracle/rope.hpp"

namespace oracle {

/// floor(fraction * target + 1/2)
inline int share(double fraction, int target) {
  return static_cast<int>(std::floor(fraction * target + 0.5));
}

/// Indices of the `count` highest of `score` among `candidates`; ties to the lower slot, NaN last.
/// `unit`: see `decided`; what is decided is which are among them, not their order.
inline std::vector<std::size_t> top(const vec& score, std::vector<std::size_t> candidates,
                                    std::size_t count, double unit = 0) {
  auto better = [&](std::size_t a, std::size_t b) {
    if (std::isnan(score[a]) != std::isnan(score[b])) return std::isnan(score[b]);
    if (score[a] != score[b] && !std::isnan(score[a])) return score[a] > score[b];
    return a < b;
  };
  std::sort(candidates.begin(), candidates.end(), better);
  if (count > 0 && count < candidates.size())
    decided(score[candidates[count - 1]], score[candidates[count]], unit);
  candidates.resize(std::min(count, candidates.size()));
  return candidates;
}

inline void keep_only(head& h, const std::vector<bool>& keep) {
  std::vector<slot> kept;
  for (std::size_t j = 0; j < keep.size(); ++j)
    if (keep[j]) kept.push_back(h.slots[j]);
  h.slots = kept;
}

/// Positions below `sinks` or among the last `recent`.
inline std::vector<bool> protected_slots(const head& h, int sinks, int recent) {
  std::vector<bool> is;
  for (const slot& s : h.slots) is.push_back(s.position < sinks || s.position > newest(h) - recent);
  return is;
}

/// The protected and the top of the rest by score, `target` in all; see `top`.
inline std::vector<bool> kept_slots(std::vector<bool> keep, const vec& score, int target,
                                    double unit = 0) {
  std::vector<std::size_t> rest;
  for (std::size_t j = 0; j < keep.size(); ++j)
    if (!keep[j]) rest.push_back(j);
  const int places = target - static_cast<int>(keep.size() - rest.size());
  if (places < 0)
    throw std::invalid_argument("oracle: expected a budget of at least the protected slots");
  for (std::size_t j : top(score, rest, static_cast<std::size_t>(places), unit)) keep[j] = true;
  return keep;
}

inline void evict(head& h, const std::vector<bool>& keep, const vec& score, int target,
                  double unit = 0) {
  if (static_cast<int>(h.slots.size()) > target) {
    keep_only(h, kept_slots(keep, score, target, unit));
  }
}

inline bool triggered(const head& h, int target, int trigger) {
  return static_cast<int>(h.slots.size()) >= (trigger > 0 ? trigger : target + 1);
}

struct full_cache {
  void prompt(head&, const tensor&, const std::vector<int>&, int) const {}
  mat step(head& h, const mat& q, const vec& k, const vec& v, int, int = 0) const {
    append(h, k, v);
    return attend(h, q).output;
  }
};

/// StreamingLLM (arXiv 2309.17453, section 3.2): attention sinks and a rolling window.
///
/// `cache_index` is written the paper's own way: the head holds keys *before* rotation and `step`
/// takes q and k before rotation; every key is rotated by its index in the cache at every step, the
/// query by the index of its own token. `original` takes whatever it is given.
struct streaming_llm {
  int sinks = 4;
  bool cache_index = false;
  rope rotation = {};

  void evict_to(head& h, int target) const {
    if (static_cast<int>(h.slots.size()) > target)
      keep_only(h, protected_slots(h, sinks, target - sinks));
  }
  void prompt(head& h, const tensor&, const std::vector<int>&, int target) const {
    evict_to(h, target);
  }
  /// The head with its keys rotated by cache index + `shift`. The attention of a query rotated by
  /// its own index + `shift` does not depend on `shift`.
  head rotated_by_index(const head& h, int shift = 0) const {
    head r = h;
    for (std::size_t j = 0; j < r.slots.size(); ++j)
      r.slots[j].key = rotated(h.slots[j].key, static_cast<int>(j) + shift, rotation);
    return r;
  }
  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    append(h, k, v);
    mat output;
    if (cache_index) {
      mat turned;
      for (const vec& row : q)
        turned.push_back(rotated(row, static_cast<double>(h.slots.size() - 1), rotation));
      output = attend(rotated_by_index(h), turned).output;
    } else {
      output = attend(h, q).output;
    }
    if (triggered(h, target, trigger)) evict_to(h, target);
    return output;
  }
};

/// H2O (arXiv 2306.14048, algorithm 1): score = attention summed over all queries so far.
struct h2o {
  double recent = 0.5;  // share of the budget
  int sinks = 4;
  combine group = combine::sum;

  void evict_to(head& h, int target) const {
    vec score;
    for (const slot& s : h.slots) score.push_back(s.score);
    evict(h, protected_slots(h, sinks, share(recent, target)), score, target);
  }
  void prompt(head& h, const tensor& queries, const std::vector<int>& positions, int target) const {
    const vec total = column_scores(h, queries, positions, {.group = group}).total;
    for (std::size_t j = 0; j < total.size(); ++j) h.slots[j].score += total[j];
    evict_to(h, target);
  }
  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    append(h, k, v);
    const attention r = attend(h, q);
    const vec a = combined(r.probabilities, group);
    for (std::size_t j = 0; j < a.size(); ++j) h.slots[j].score += a[j];
    if (triggered(h, target, trigger)) evict_to(h, target);
    return r.output;
  }
};

/// SnapKV (arXiv 2404.14469, section 4): attention of the last `window` queries, average-pooled.
struct snapkv {
  int window = 32;
  int kernel = 7;
  bool count_border = false;  // true: the authors' code, zeros beyond the border count as tokens
  combine group = combine::sum;
  bool pool_window = false;  // false: tokens of the window start with past = 0, true: their raw sum

  /// The pooled score of every slot outside the window; those inside it have none.
  vec pooled(const head& h, const vec& sums) const {
    vec score(sums.size(), 0.0);
    std::vector<std::size_t> outside;
    for (std::size_t j = 0; j < sums.size(); ++j) {
      if (h.slots[j].position <= newest(h) - window)
        outside.push_back(j);
      else if (pool_window)
        score[j] = sums[j];
    }
    std::sort(outside.begin(), outside.end(), [&](std::size_t a, std::size_t b) {
      return h.slots[a].position < h.slots[b].position;
    });
    const int n = static_cast<int>(outside.size());
    for (int i = 0; i < n; ++i) {
      double sum = 0;
      int under = 0;
      for (int t = i - kernel / 2; t <= i + kernel / 2; ++t) {
        if (t < 0 || t >= n) continue;
        sum += sums[outside[static_cast<std::size_t>(t)]];
        ++under;
      }
      score[outside[static_cast<std::size_t>(i)]] = sum / (count_border ? kernel : under);
    }
    return score;
  }
  void evict_to(head& h, int target) const {
    vec score;
    for (const slot& s : h.slots) score.push_back(s.past + s.current);
    evict(h, protected_slots(h, 0, window), score, target);
  }
  void prompt(head& h, const tensor& queries, const std::vector<int>& positions, int target) const {
    const column_options options{.window = window, .group = group};
    const vec score = pooled(h, column_scores(h, queries, positions, options).last);
    for (std::size_t j = 0; j < score.size(); ++j) {
      h.slots[j].past = score[j];
      h.slots[j].current = 0;
    }
    h.queries_seen = 0;
    evict_to(h, target);
  }
  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    append(h, k, v);
    const attention r = attend(h, q);
    const vec a = combined(r.probabilities, group);
    for (std::size_t j = 0; j < a.size(); ++j) h.slots[j].current += a[j];
    if (++h.queries_seen >= window) {  // the window is full: it becomes the past
      for (slot& s : h.slots) {
        s.past = s.current;
        s.current = 0;
      }
      h.queries_seen = 0;
    }
    if (triggered(h, target, trigger)) evict_to(h, target);
    return r.output;
  }
};

}  // namespace oracle
