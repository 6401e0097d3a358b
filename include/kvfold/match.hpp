/// Where the leaving go: the nearest of those that stay.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::max
#include <cmath>      // std::sqrt
#include <span>
#include <type_traits>  // std::remove_const_t

#include "kvfold/plan.hpp"

namespace kvfold {

/// `argmax_r k_r·k_c` over the slots for which `candidate(r)`; ties to the lower slot; -1: none.
template <class Candidate>
index_t nearest_by_dot(const kv_head auto& head, index_t c, Candidate candidate) {
  index_t best = -1;
  float most = 0;
  for (index_t r = 0; r < head.length(); ++r) {
    if (r == c || !candidate(r)) {
      continue;
    }
    float dot = 0;
    for (index_t i = 0; i < head.dim(); ++i) {
      dot += static_cast<float>(head.key(r)[i]) * static_cast<float>(head.key(c)[i]);
    }
    if (best < 0 || dot > most) {
      best = r, most = dot;
    }
  }
  return best;
}

/// `x·y [dim]` in float, always summed in the same order, so that equal rows have equal products.
template <class X, class Y>
float dot(row<X> x, row<Y> y, index_t dim) {
  const auto contiguous = [dim](const auto& r) {
    using scalar = std::remove_const_t<std::remove_reference_t<decltype(r[0])>>;
    return Eigen::Map<const Eigen::Matrix<scalar, Eigen::Dynamic, 1>>(r.data, dim)
        .template cast<float>();
  };
  if (x.step == 1 && y.step == 1) {
    return contiguous(x).dot(contiguous(y));
  }
  float sum = 0;
  for (index_t i = 0; i < dim; ++i) {
    sum += static_cast<float>(x[i]) * static_cast<float>(y[i]);
  }
  return sum;
}

inline float key_norm(const kv_head auto& head, index_t s) {
  return std::sqrt(dot(head.key(s), head.key(s), head.dim()));
}

/// `cos(k_a, k_b)`, from their norms; 0 when either is zero.
float cosine(const kv_head auto& head, index_t a, index_t b, float norm_a, float norm_b) {
  const float norms = norm_a * norm_b;
  return norms > 0 ? dot(head.key(a), head.key(b), head.dim()) / norms : 0.0F;
}

/// A slot, and the cosine of its key with the key in question.
struct near_slot {
  index_t slot = -1;  ///< -1: none
  float cosine = 0;
};

/// The slot most similar to `c` among those for which `candidate(r)`; ties to the lower slot.
/// `norm(s)`: of slot `s`'s key.
template <class Candidate, class Norm>
near_slot nearest_by_cosine(const kv_head auto& head, index_t c, Candidate candidate, Norm norm) {
  near_slot best;
  const float own = norm(c);
  for (index_t r = 0; r < head.length(); ++r) {
    if (r == c || !candidate(r)) {
      continue;
    }
    const float u = cosine(head, c, r, own, norm(r));
    if (best.slot < 0 || u > best.cosine) {
      best = {r, u};
    }
  }
  return best;
}

/// For one slot, as decode needs it.
template <class Candidate>
near_slot nearest_by_cosine(const kv_head auto& head, index_t c, Candidate candidate) {
  return nearest_by_cosine(head, c, candidate, [&](index_t s) { return key_norm(head, s); });
}

/// The norms of all keys, into `norm [length]`.
void key_norms(const kv_head auto& head, std::span<float> norm) {
  for (index_t s = 0; s < head.length(); ++s) {
    norm[static_cast<std::size_t>(s)] = key_norm(head, s);
  }
}

/// Every slot that `out.marks()` does not keep goes to the kept one most similar to it: into
/// `out.row_of()` (a kept slot: itself; nobody kept: -1). The cosines `[length]` come back; they
/// lie in `out.numbers()`.
std::span<const float> match_by_cosine(const kv_head auto& head, merge_plan& out) {
  const auto n = static_cast<std::size_t>(head.length());
  auto& numbers = out.numbers();
  numbers.resize(std::max(numbers.size(), 2 * n));
  const auto cosine = std::span(numbers).first(n), norm = std::span(numbers).subspan(n, n);
  key_norms(head, norm);
  auto& into = out.row_of();
  into.resize(n);
  const auto kept = [&](index_t s) { return out.marks()[static_cast<std::size_t>(s)] != 0; };
  for (std::size_t s = 0; s < n; ++s) {
    near_slot to{static_cast<index_t>(s), 1.0F};
    if (!kept(to.slot)) {
      to = nearest_by_cosine(head, to.slot, kept,
                             [&](index_t r) { return norm[static_cast<std::size_t>(r)]; });
    }
    into[s] = to.slot, cosine[s] = to.cosine;
  }
  return cosine;
}

}  // namespace kvfold
