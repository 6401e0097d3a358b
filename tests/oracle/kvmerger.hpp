// SPDX-License-Identifier: MIT
// KVMerger (arXiv 2407.08454): runs of consecutive similar keys become one slot each, weighted by
// a Gaussian kernel around the member with the most attention.
//
// Readings. The sigma of eq. 6 is the mean distance to the pivot over sqrt 2 (the paper's own
// definition is circular). The last R and the top H by score, sinks first, do not take part and
// break runs; so does a missing position. In the order of positions, a merged slot is where its
// pivot was: after a merge there are gaps around it, so that in decode mostly fresh tokens join
// (gaps_break = false lets neighbours in the cache join across gaps). Joining can reach no fewer
// than (slots that take no part + runs) slots; for a target below that, whole runs are evicted.
//
// The paper multiplies a set's value by |S| and leaves its logit as it is (scale_values). Here |S|
// is counted in the logit: beta = ln of the tokens, of which a slot of log-mass beta_i holds
// exp(beta_i), each with a weight of its own. The paper has one epsilon for all heads (`divide`).
#pragma once

#include "oracle/match.hpp"

namespace oracle {

struct kvmerger {
  enum class mode { threshold, budget };
  mode joins = mode::budget;  // budget: epsilon is whatever gives `target` slots
  double epsilon = 0.75;      // threshold: neighbours join above it
  double recent = 0.25;       // share of target: R, the last ones
  double heavy = 0.25;        // share of target: H, sinks included, at least the sinks
  int sinks = 4;
  double sigma = 0;           // 0: of each set, its mean distance; else this
  bool scale_values = false;  // v times |S|, as the paper does; else ln |S| as log-mass
  bool gaps_break = true;
  combine group = combine::sum;
  int share_slots = 0;  // what recent and heavy are shares of; 0: the target

  /// Takes no part: the last R, then H slots: the sinks, and the top by score of the others.
  std::vector<bool> untouched(const head& h, int target) const {
    const int of = share_slots > 0 ? share_slots : target;
    std::vector<bool> is = protected_slots(h, 0, share(recent, of));
    int places = std::max(sinks, share(heavy, of));
    for (std::size_t j = 0; j < is.size(); ++j)
      if (!is[j] && h.slots[j].position < sinks) {
        is[j] = true;
        --places;
      }
    for (const std::size_t j :
         top(scores_of(h), where(is, false), static_cast<std::size_t>(std::max(places, 0))))
      is[j] = true;
    if (static_cast<int>(where(is, true).size()) > target)
      throw std::invalid_argument("oracle: expected a budget of at least the protected slots");
    return is;
  }

  struct pair {
    std::size_t left, right;  // slots, neighbours in the order of positions
    double cosine;
  };
  /// Neighbours that may join: both take part and no position lies between them.
  std::vector<pair> pairs(const head& h, const std::vector<bool>& out) const {
    std::vector<std::size_t> order;
    for (std::size_t j = 0; j < h.slots.size(); ++j) order.push_back(j);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return h.slots[a].position < h.slots[b].position;
    });
    std::vector<pair> all;
    for (std::size_t i = 1; i < order.size(); ++i) {
      const std::size_t a = order[i - 1], b = order[i];
      const bool consecutive = h.slots[b].position == h.slots[a].position + 1;
      if (!out[a] && !out[b] && (consecutive || !gaps_break))
        all.push_back({a, b, cosine(h.slots[a].key, h.slots[b].key)});
    }
    return all;
  }

  /// Algorithm 1: the set of each slot, named by one of its slots. Budget: the pairs of largest
  /// similarity, ties to the pair with the lower left slot, as many as there are slots too many.
  /// Threshold: all pairs above epsilon, and if these are not enough, as many as budget takes.
  /// (A set is what its joined neighbours make of it, so the order of the walk does not matter.)
  std::vector<std::size_t> sets(const head& h, const std::vector<bool>& out, int target) const {
    std::vector<pair> all = pairs(h, out);
    std::sort(all.begin(), all.end(), [](const pair& a, const pair& b) {
      if (std::isnan(a.cosine) != std::isnan(b.cosine)) return std::isnan(b.cosine);
      if (a.cosine != b.cosine && !std::isnan(a.cosine)) return a.cosine > b.cosine;
      return a.left < b.left;
    });
    std::size_t joined = h.slots.size() - static_cast<std::size_t>(target);
    if (joins == mode::threshold)
      joined = std::max(
          joined, static_cast<std::size_t>(std::count_if(
                      all.begin(), all.end(), [&](const pair& p) { return p.cosine > epsilon; })));
    all.resize(std::min(joined, all.size()));
    std::vector<std::size_t> set;
    for (std::size_t j = 0; j < h.slots.size(); ++j) set.push_back(j);
    for (const pair& p : all) {
      const std::size_t from = set[p.right], into = set[p.left];
      for (std::size_t& name : set)
        if (name == from) name = into;
    }
    return set;
  }

  /// Algorithm 2 and eqs. 6-8: `members` ascending slots, the result is where the pivot was.
  slot merged(const head& h, const std::vector<std::size_t>& members, std::size_t pivot) const {
    slot made = h.slots[pivot];
    if (members.size() == 1) return made;
    vec squared, tokens;  // |k_p - k_i|^2, and how many tokens a member holds
    double size = 0, mean_distance = 0;
    for (const std::size_t i : members) {
      tokens.push_back(scale_values ? 1 : std::exp(h.slots[i].log_mass));
      size += tokens.back();
    }
    for (const std::size_t i : members) {
      double d = 0;
      for (std::size_t x = 0; x < made.key.size(); ++x)
        d += std::pow(h.slots[pivot].key[x] - h.slots[i].key[x], 2);
      squared.push_back(d);
      mean_distance += tokens[squared.size() - 1] * std::sqrt(d) / size;  // the pivot's 0 counts
    }
    const double s = sigma > 0 ? sigma : std::max(mean_distance / std::sqrt(2.0), 1e-6);
    double total = 0;
    for (std::size_t i = 0; i < members.size(); ++i)
      total += tokens[i] * std::exp(-squared[i] / (2 * s * s));
    made.key = vec(made.key.size(), 0.0), made.value = vec(made.value.size(), 0.0);
    made.score = 0;
    for (std::size_t i = 0; i < members.size(); ++i) {
      const slot& member = h.slots[members[i]];
      const double w = tokens[i] * std::exp(-squared[i] / (2 * s * s)) / total;
      add(made.key, w, member.key), add(made.value, (scale_values ? size : 1) * w, member.value);
      made.score += member.score;
    }
    if (!scale_values) made.log_mass = std::log(size);
    return made;
  }

  void compress(head& h, int target) const {
    if (static_cast<int>(h.slots.size()) <= target) return;
    const std::vector<bool> out = untouched(h, target);
    const std::vector<std::size_t> set = sets(h, out, target);
    head next = h;
    std::vector<bool> anchor(h.slots.size(), false), fixed(h.slots.size(), false);
    for (std::size_t name = 0; name < set.size(); ++name) {
      std::vector<std::size_t> members;
      for (std::size_t j = 0; j < set.size(); ++j)
        if (set[j] == name) members.push_back(j);
      if (members.empty()) continue;
      const std::size_t pivot = top(scores_of(h), members, 1)[0];
      next.slots[pivot] = merged(h, members, pivot);
      anchor[pivot] = true;
      fixed[pivot] = out[pivot];
    }
    std::vector<bool> keep = anchor;
    if (static_cast<int>(where(anchor, true).size()) > target) {
      // All pairs are joined and there are still too many: the runs of largest total score stay,
      // ties to the lower slot of the pivots.
      vec score = scores_of(next);
      std::vector<std::size_t> runs;
      for (std::size_t j = 0; j < anchor.size(); ++j)
        if (anchor[j] && !fixed[j]) runs.push_back(j);
      const std::size_t places =
          static_cast<std::size_t>(target) - where(fixed, true).size();  // >= 0, see untouched
      keep = fixed;
      for (const std::size_t j : top(score, runs, places)) keep[j] = true;
    }
    h = next;
    keep_only(h, keep);
  }

  /// One epsilon over a model: of the pairs of all heads the most similar join until `slots` a head
  /// are left on average. The slots that each head is left with.
  std::vector<int> divide(const std::vector<head>& heads, int slots) const {
    kvmerger fixed = *this;
    fixed.share_slots = slots;
    std::vector<std::pair<double, std::size_t>> all;  // cosine, head
    std::vector<int> left;
    int joined = -slots * static_cast<int>(heads.size());
    for (std::size_t i = 0; i < heads.size(); ++i) {
      for (const pair& p : pairs(heads[i], fixed.untouched(heads[i], slots)))
        all.push_back({p.cosine, i});
      left.push_back(static_cast<int>(heads[i].slots.size()));
      joined += left.back();
    }
    std::sort(all.begin(), all.end(), std::greater{});
    for (int j = 0; j < joined; ++j) --left[all.at(static_cast<std::size_t>(j)).second];
    return left;
  }

  void prompt(head& h, const tensor& queries, const std::vector<int>& positions, int target) const {
    add_column_sums(h, queries, positions, group);
    compress(h, target);
  }
  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    const mat output = append_and_observe(h, q, k, v, group);
    if (triggered(h, target, trigger)) compress(h, target);
    return output;
  }
};

}  // namespace oracle
