// SPDX-License-Identifier: MIT
// EMS (arXiv 2412.08521): tokens that are alike share one entry, and keep their own norms and
// scores. This oracle expands every token in every step; the library must not.
//
// Readings that the library follows:
//  - The budget counts entries (slots). Kept as they are: positions below `sinks` (ours; 0 is the
//    paper) and the last `window`. The other target - kept places are the class centres, N_imp.
//  - A token of an entry has a position, the norm of its own key, and what it has received of
//    attention: glo (all queries), past and cur (windows). The entry's first token is its centre:
//    the entry keeps that position, and the centre is never dropped.
//  - The entry's stored key has the direction all its tokens share and the centre's norm; a token's
//    key is that, scaled to its own norm: logit_t = scale * (norm_t / |key|) * q.key. An entry of
//    one token is the token, bytes untouched. Log-mass must be 0 everywhere, and stays so.
//  - Attention and scores are those of all tokens, each on its own; heads of the group are summed.
//  - Score of a token, eq. 2: s = max(glo mean(loc)/mean(glo), loc), loc = past + cur; the means
//    are over all tokens held, window and sinks included. After a prompt s is average-pooled over
//    the tokens outside the window in position order, dividing by the tokens really under the
//    kernel (as snapkv here); in decode it is not pooled: neighbours in the cache are no neighbours
//    in the text. The pooled s serves for one compression and is not stored.
//  - Score of an entry: the sum of its tokens' s. So is its weight in a merge.
//  - Prompt: the N_imp entries of highest score are centres, the next floor((gamma - 1) N_imp + .5)
//    are to be merged, the others go. (Algorithms page; the paper's text counts the window in.)
//  - Decode: all that is not a centre is to be merged; one entry a step, the newest among the
//    candidates. Several at once do not see each other: all match the centres as they were.
//  - R_ij = cos(k_i, k_j) cos(v_i, v_j), but negative when both cosines are (ours: two opposites
//    are not alike). Zero vectors: 0. Ties to the lower slot. R >= threshold merges, else the zero
//    class: the entry is evicted with all its tokens.
//  - Without position, keys are turned back by their entries' positions for R, and only for R.
//  - merge_unrotated: keys are turned back for the merge too; the direction that the tokens share
//  is
//    that of the un-rotated ones. The stored key is it, turned to the centre's position; a token's
//    key is it, turned to the token's own. (The paper expands entries by their tokens' positions.)
//  - Merge: direction = sum of S_i k_i/|k_i| over the centre and all that join it, normalised (the
//    centre's own if that is 0); value = sum S_i v_i / sum S_i; all S_i = 1 if they sum to 0.
//  - The table holds floor(gamma target + .5) tokens, those of the window and the sinks included.
//    After a compression, while there are more, the token of lowest s that is no centre leaves;
//    among equals the one later in the table, which is in order of slots and of joining.
#pragma once

#include "oracle/policies.hpp"

namespace oracle {

struct ems {
  int window = 32, kernel = 7, sinks = 4;
  double gamma = 4, threshold = 0.6;
  bool with_position = true, merge_unrotated = false;
  rope rotation = {};
  combine group = combine::sum;

  static double norm(const vec& x) { return std::sqrt(dot(x, x)); }
  static double cosine(const vec& a, const vec& b) {
    const double n = norm(a) * norm(b);
    return n > 0 ? dot(a, b) / n : 0;
  }

  /// Every slot lists its tokens.
  static void list_members(head& h) {
    for (slot& s : h.slots) {
      if (s.log_mass != 0) throw std::invalid_argument("oracle: ems: expected no log-mass");
      if (s.members.empty()) s.members.push_back({s.position, norm(s.key), 0, 0, 0});
    }
  }

  /// One slot a token, entry by entry.
  head expanded(const head& h) const {
    head e = h;
    e.slots.clear();
    for (const slot& s : h.slots)
      for (const ems_member& m : s.members) {
        slot token;
        token.key = s.key;
        token.value = s.value;
        token.position = m.position;
        if (s.members.size() > 1)
          for (double& x : token.key) x *= norm(s.key) > 0 ? m.norm / norm(s.key) : 0;
        if (merge_unrotated) token.key = rotated(token.key, m.position - s.position, rotation);
        e.slots.push_back(token);
      }
    return e;
  }
  /// All tokens, in the order of `expanded`.
  static std::vector<ems_member*> tokens(head& h) {
    std::vector<ems_member*> all;
    for (slot& s : h.slots)
      for (ems_member& m : s.members) all.push_back(&m);
    return all;
  }

  /// Eq. 2, [tokens].
  static vec scores(const std::vector<ems_member*>& all) {
    double glo = 0, loc = 0;
    for (const ems_member* m : all) {
      glo += m->glo;
      loc += m->past + m->cur;
    }
    vec s;
    for (const ems_member* m : all)
      s.push_back(std::max(glo > 0 ? m->glo * loc / glo : 0, m->past + m->cur));
    return s;
  }

  vec pooled(const std::vector<ems_member*>& all, const vec& s, int newest_position) const {
    std::vector<std::size_t> outside;
    for (std::size_t t = 0; t < all.size(); ++t)
      if (all[t]->position <= newest_position - window) outside.push_back(t);
    std::sort(outside.begin(), outside.end(),
              [&](std::size_t a, std::size_t b) { return all[a]->position < all[b]->position; });
    vec p = s;
    const int n = static_cast<int>(outside.size());
    for (int i = 0; i < n; ++i) {
      double sum = 0;
      int under = 0;
      for (int t = std::max(0, i - kernel / 2); t <= std::min(n - 1, i + kernel / 2); ++t, ++under)
        sum += s[outside[static_cast<std::size_t>(t)]];
      p[outside[static_cast<std::size_t>(i)]] = sum / under;
    }
    return p;
  }

  vec compared_key(const slot& s) const {
    return with_position ? s.key : rotated(s.key, -s.position, rotation);
  }
  double redundancy(const slot& a, const slot& b) const {
    const double k = cosine(compared_key(a), compared_key(b)), v = cosine(a.value, b.value);
    return k < 0 && v < 0 ? -k * v : k * v;
  }

  /// The centre `c` with all of `joining`; weights [slots].
  slot merged(const head& h, std::size_t c, const std::vector<std::size_t>& joining,
              const vec& weight) const {
    const auto key = [&](std::size_t i) {
      return merge_unrotated ? rotated(h.slots[i].key, -h.slots[i].position, rotation)
                             : h.slots[i].key;
    };
    slot made = h.slots[c];
    if (joining.empty()) return made;
    std::vector<std::size_t> all = {c};
    all.insert(all.end(), joining.begin(), joining.end());
    double total = 0;
    for (std::size_t i : all) total += weight[i];
    vec direction(made.key.size(), 0.0);
    made.value = vec(made.value.size(), 0.0);
    for (std::size_t i : all) {
      const double w = total > 0 ? weight[i] / total : 1 / static_cast<double>(all.size());
      const double length = norm(h.slots[i].key);
      if (length > 0) add(direction, w / length, key(i));
      add(made.value, w, h.slots[i].value);
    }
    const double length = norm(direction), own = made.members[0].norm;
    if (merge_unrotated) direction = rotated(direction, made.position, rotation);
    if (length > 0)
      for (std::size_t e = 0; e < direction.size(); ++e) made.key[e] = own * direction[e] / length;
    for (std::size_t i : joining)
      for (const ems_member& m : h.slots[i].members) made.members.push_back(m);
    return made;
  }

  /// Back to `target` entries; `s` [tokens], and how many may be merged at most.
  void compress(head& h, vec s, int target, bool whole_band) const {
    const std::size_t n = h.slots.size();
    if (static_cast<int>(n) > target) {
      const std::vector<bool> safe = protected_slots(h, sinks, window);
      std::vector<std::size_t> candidates;
      vec weight(n, 0.0);
      for (std::size_t j = 0, t = 0; j < n; ++j) {
        for (std::size_t i = 0; i < h.slots[j].members.size(); ++i) weight[j] += s[t++];
        if (!safe[j]) candidates.push_back(j);
      }
      const int centres = target - static_cast<int>(n - candidates.size());
      if (centres < 1)
        throw std::invalid_argument("oracle: ems: expected a slot for a class centre");
      const std::vector<std::size_t> ranked = top(weight, candidates, n);
      const auto first = static_cast<std::size_t>(centres);
      const auto cut = [&](std::size_t at) {
        if (at < ranked.size()) decided(weight[ranked[at - 1]], weight[ranked[at]]);
      };
      const auto band =
          whole_band ? ranked.size()
                     : first + static_cast<std::size_t>(std::floor((gamma - 1) * centres + 0.5));
      cut(first), cut(band);
      std::vector<bool> kept = safe;
      for (std::size_t r = 0; r < first; ++r) kept[ranked[r]] = true;
      std::vector<std::vector<std::size_t>> joining(n);
      for (std::size_t j = 0; j < n; ++j) {
        const auto rank = std::find(ranked.begin(), ranked.end(), j) - ranked.begin();
        if (kept[j] || static_cast<std::size_t>(rank) >= band) continue;
        std::size_t best = n;
        vec alike(n, -2.0);
        for (std::size_t c = 0; c < n; ++c) {
          if (!kept[c] || safe[c]) continue;
          alike[c] = redundancy(h.slots[j], h.slots[c]);
          if (best == n || alike[c] > alike[best]) best = c;
        }
        decided(alike[best], threshold, 1);
        if (alike[best] < threshold) continue;
        for (const double other : alike) decided(alike[best], other, 1);
        joining[best].push_back(j);
      }
      // Scores follow their tokens.
      std::vector<std::size_t> first_token(n, 0);
      for (std::size_t j = 1; j < n; ++j)
        first_token[j] = first_token[j - 1] + h.slots[j - 1].members.size();
      const vec old = s;
      s.clear();
      head made = h;
      made.slots.clear();
      for (std::size_t c = 0; c < n; ++c) {
        if (!kept[c]) continue;
        made.slots.push_back(merged(h, c, joining[c], weight));
        std::vector<std::size_t> all = {c};
        all.insert(all.end(), joining[c].begin(), joining[c].end());
        for (std::size_t i : all)
          for (std::size_t t = 0; t < h.slots[i].members.size(); ++t)
            s.push_back(old[first_token[i] + t]);
      }
      h = made;
    }
    make_room(h, s, static_cast<int>(std::floor(gamma * target + 0.5)));
  }

  /// Takes the least of the tokens that are no centres out until `capacity` are left.
  static void make_room(head& h, vec s, int capacity) {
    while (static_cast<int>(s.size()) > capacity) {
      std::size_t lowest = s.size(), entry = 0, place = 0;
      for (std::size_t j = 0, t = 0; j < h.slots.size(); ++j)
        for (std::size_t i = 0; i < h.slots[j].members.size(); ++i, ++t)
          if (i > 0 && (lowest == s.size() || s[t] <= s[lowest])) {
            lowest = t;
            entry = j;
            place = i;
          }
      if (lowest == s.size()) return;  // centres only
      for (std::size_t j = 0, t = 0; j < h.slots.size(); ++j)
        for (std::size_t i = 0; i < h.slots[j].members.size(); ++i, ++t)
          if (i > 0) decided(s[t], s[lowest]);
      auto& members = h.slots[entry].members;
      members.erase(members.begin() + static_cast<std::ptrdiff_t>(place));
      s.erase(s.begin() + static_cast<std::ptrdiff_t>(lowest));
    }
  }

  void prompt(head& h, const tensor& queries, const std::vector<int>& positions, int target) const {
    list_members(h);
    const column_sums sums =
        column_scores(expanded(h), queries, positions, {.window = window, .group = group});
    const std::vector<ems_member*> all = tokens(h);
    for (std::size_t t = 0; t < all.size(); ++t) {
      all[t]->glo += sums.total[t];
      all[t]->past = sums.last[t];
      all[t]->cur = 0;
    }
    h.queries_seen = 0;
    if (static_cast<int>(h.slots.size()) > target)
      compress(h, pooled(all, scores(all), newest(h)), target, false);
  }

  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    append(h, k, v);
    list_members(h);
    const attention r = attend(expanded(h), q);
    const vec a = combined(r.probabilities, group);
    const std::vector<ems_member*> all = tokens(h);
    const bool full = ++h.queries_seen >= window;
    if (full) h.queries_seen = 0;
    for (std::size_t t = 0; t < a.size(); ++t) {
      all[t]->glo += a[t];
      all[t]->cur += a[t];
      if (full) {  // the window is full: it becomes the past
        all[t]->past = all[t]->cur;
        all[t]->cur = 0;
      }
    }
    if (triggered(h, target, trigger)) compress(h, scores(all), target, true);
    return r.output;
  }
};

}  // namespace oracle
