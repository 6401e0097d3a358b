/// Where the leaving go: the nearest of those that stay.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::max
#include <cmath>      // std::sqrt
#include <span>
#include <type_traits>  // std::remove_const_t

#include "kvfold/plan.hpp"
#include "kvfold/sweep.hpp"

namespace kvfold {

/// `x·y [dim]` in float, always summed in the same order, so that equal rows have equal products.
template <class X, class Y>
float dot(row<X> x, row<Y> y, index_t dim) {
  using x_scalar = std::remove_const_t<X>;
  using y_scalar = std::remove_const_t<Y>;
  float sum = 0;
  if constexpr (std::same_as<x_scalar, float> && std::same_as<y_scalar, float>) {
    if (x.step == 1 && y.step == 1) {
      detail::dot_block<1, 1>(x.data, 0, y.data, 0, dim, &sum, 0);
      return sum;
    }
  }
  constexpr index_t chunk = 256;
  float a[chunk], b[chunk];
  for (index_t begin = 0; begin < dim; begin += chunk) {
    const index_t n = std::min(chunk, dim - begin);
    to_floats(row<X>{x.data + begin * x.step, x.step}, n, a);
    to_floats(row<Y>{y.data + begin * y.step, y.step}, n, b);
    float part = 0;
    detail::dot_block<1, 1>(a, 0, b, 0, n, &part, 0);
    sum += part;
  }
  return sum;
}

/// `‖x − y‖² [dim]` in float.
template <class X, class Y>
float squared_distance(row<X> x, row<Y> y, index_t dim) {
  constexpr index_t chunk = 256;
  float a[chunk], b[chunk], sum = 0;
  for (index_t begin = 0; begin < dim; begin += chunk) {
    const index_t n = std::min(chunk, dim - begin);
    to_floats(row<X>{x.data + begin * x.step, x.step}, n, a);
    to_floats(row<Y>{y.data + begin * y.step, y.step}, n, b);
    for (index_t i = 0; i < n; ++i) {
      a[i] -= b[i];
    }
    float part = 0;
    detail::dot_block<1, 1>(a, 0, a, 0, n, &part, 0);
    sum += part;
  }
  return sum;
}

/// `argmax_r k_r·k_c` over the slots for which `candidate(r)`; ties to the lower slot; -1: none.
template <class Candidate>
index_t nearest_by_dot(const kv_head auto& head, index_t c, Candidate candidate) {
  index_t best = -1;
  float most = 0;
  for (index_t r = 0; r < head.length(); ++r) {
    if (r == c || !candidate(r)) {
      continue;
    }
    const float product = dot(head.key(r), head.key(c), head.dim());
    if (best < 0 || product > most) {
      best = r, most = product;
    }
  }
  return best;
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

/// The slots most similar to each of `leaving`, into `best`, among those for which `candidate(r)`;
/// ties to the lower slot. Keys are read once for several of the leaving; nothing is allocated.
template <class Candidate>
void nearest_by_cosine(const kv_head auto& head, std::span<const index_t> leaving,
                       Candidate candidate, std::span<near_slot> best) {
  constexpr index_t most = 8, tile_slots = 64, floats = 16384;
  const index_t n = head.length(), dim = head.dim();
  const index_t some = std::clamp(floats / dim, index_t{1}, most);
  float key[floats], buffer[floats], dots[most * tile_slots], norm[tile_slots], own[most],
      cosine[tile_slots];
  for (std::size_t begin = 0; begin < leaving.size(); begin += static_cast<std::size_t>(some)) {
    const auto together =
        leaving.subspan(begin, std::min(leaving.size() - begin, static_cast<std::size_t>(some)));
    for (std::size_t c = 0; c < together.size(); ++c) {
      float* const row_of = key + static_cast<std::ptrdiff_t>(c) * dim;
      to_floats(head.key(together[c]), dim, row_of);
      detail::row_norms({row_of, 1, dim, Eigen::OuterStride<>(dim)}, own + c);
      best[begin + c] = {};
    }
    const index_t rows = std::clamp(floats / dim, index_t{1}, tile_slots);
    for (index_t first = 0; first < n; first += rows) {
      const index_t count = std::min(rows, n - first);
      const auto keys =
          detail::load_tile([&](index_t s) { return head.key(s); }, first, count, dim, buffer);
      detail::tile_dots(key, static_cast<index_t>(together.size()), keys, dots, tile_slots);
      detail::row_norms(keys, norm);
      for (std::size_t c = 0; c < together.size(); ++c) {
        const float* const dot = dots + c * tile_slots;
        for (index_t i = 0; i < count; ++i) {
          const float norms = own[c] * norm[i];
          cosine[i] = norms > 0 ? dot[i] / norms : 0.0F;
        }
        near_slot& now = best[begin + c];
        for (index_t i = 0; i < count; ++i) {
          const index_t r = first + i;
          if ((now.slot < 0 || cosine[i] > now.cosine) && r != together[c] && candidate(r)) {
            now = {r, cosine[i]};
          }
        }
      }
    }
  }
}

/// For one slot, as decode needs it.
template <class Candidate>
near_slot nearest_by_cosine(const kv_head auto& head, index_t c, Candidate candidate) {
  near_slot best;
  nearest_by_cosine(head, {&c, 1}, candidate, {&best, 1});
  return best;
}

/// Every slot that `out.marks()` does not keep goes to the kept one most similar to it: into
/// `out.row_of()` (a kept slot: itself; nobody kept: -1). The cosines `[length]` come back; they
/// lie in `out.numbers()`.
std::span<const float> match_by_cosine(const kv_head auto& head, merge_plan& out) {
  const auto n = static_cast<std::size_t>(head.length());
  auto& numbers = out.numbers();
  numbers.resize(std::max(numbers.size(), n));
  const auto cosine = std::span(numbers).first(n);
  auto& into = out.row_of();
  into.resize(n);
  const auto kept = [&](index_t s) { return out.marks()[static_cast<std::size_t>(s)] != 0; };
  constexpr std::size_t most = 64;
  index_t leaving[most];
  near_slot best[most];
  std::size_t held = 0;
  const auto flush = [&] {
    nearest_by_cosine(head, {leaving, held}, kept, {best, held});
    for (std::size_t i = 0; i < held; ++i) {
      const auto s = static_cast<std::size_t>(leaving[i]);
      into[s] = best[i].slot, cosine[s] = best[i].cosine;
    }
    held = 0;
  };
  for (std::size_t s = 0; s < n; ++s) {
    into[s] = static_cast<index_t>(s), cosine[s] = 1;
    if (!kept(into[s])) {
      leaving[held++] = into[s];
      if (held == most) {
        flush();
      }
    }
  }
  flush();
  return cosine;
}

}  // namespace kvfold
