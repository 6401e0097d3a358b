// SPDX-License-Identifier: MIT
/// EMS: the table of a head, and attention over entries that tokens share.
#pragma once

#include <cstring>  // std::memcpy

#include "kvmeld/cuda/score/rule.cuh"

namespace kvmeld::cuda::detail {

/// `kvmeld::detail::ems_table` of a head: the first token of an entry, its centre, has its numbers
/// in the columns of its slot, those that share the entry in places of the head's memory, linked in
/// the order of joining. A token is named by its slot, or by the capacity plus its place; links are
/// numbers of places counted from 1.
struct entry_table {
  enum field : index_t { all, past, current, norm, next, fields };
  enum counter : index_t { window_count, sharing, used, free, header };
  static constexpr index_t none = -1, place_size = fields + 1;  // and the position

  head_context head;
  index_t slots, places;
  float* first;  // place

  template <class Scalar>
  KVMELD_DEVICE static entry_table of(const cache_view<Scalar>& cache, const state_view& state,
                                      index_t h, index_t newest, index_t places) {
    const head_context head = context_of(cache, state, h, newest);
    return {head, cache.stride(), places, head.memory + header + 2 * cache.group};
  }

  KVMELD_DEVICE float& counted(counter c) const { return head.memory[c]; }
  KVMELD_DEVICE float& at(field f, index_t token) const {
    return token < slots ? head.column(f, token) : place(token)[f];
  }
  KVMELD_DEVICE index_t position(index_t token) const {
    index_t x = 0;
    if (token < slots) {
      x = head.position[token];
    } else {
      memcpy(&x, place(token) + fields, sizeof x);
    }
    return x;
  }
  KVMELD_DEVICE index_t token_of(float link) const {
    return link == 0 ? none : slots + static_cast<index_t>(link) - 1;
  }
  KVMELD_DEVICE float link_of(index_t token) const {
    return token == none ? 0.0F : static_cast<float>(token - slots + 1);
  }
  KVMELD_DEVICE index_t after(index_t token) const { return token_of(at(next, token)); }
  KVMELD_DEVICE bool shared(index_t s) const { return head.column(next, s) != 0; }
  /// `f(token)` for every token of an entry: the centre, then those that share it.
  template <class F>
  KVMELD_DEVICE void each(index_t s, F f) const {
    for (index_t token = s; token != none; token = after(token)) {
      f(token);
    }
  }
  KVMELD_DEVICE index_t count(index_t s) const {
    index_t n = 0;
    each(s, [&](index_t) { ++n; });
    return n;
  }
  KVMELD_DEVICE index_t last(index_t s) const {
    index_t end = s;
    each(s, [&](index_t token) { end = token; });
    return end;
  }

  /// A step's attention of one token; `full`: the window becomes the past.
  KVMELD_DEVICE void credit(index_t token, float a, bool full) const {
    at(all, token) += a;
    const float sum = at(current, token) + a;
    at(current, token) = full ? 0.0F : sum;
    if (full) {
      at(past, token) = sum;
    }
  }

  // What follows is for one thread, or for one a row.

  /// The centre `s` as it is, in place `token` behind `end`, and its list behind that; without a
  /// place the list alone. Returns the last then.
  KVMELD_DEVICE index_t join(index_t end, index_t s, index_t token) const {
    if (token != none) {
      at(all, token) = at(all, s), at(past, token) = at(past, s);
      at(current, token) = at(current, s), at(norm, token) = at(norm, s);
      memcpy(place(token) + fields, head.position + s, sizeof(index_t));
      at(next, end) = link_of(token);
      end = token;
    }
    at(next, end) = at(next, s);
    at(next, s) = 0;
    return last(end);
  }

 private:
  KVMELD_DEVICE float* place(index_t token) const {
    return first + std::ptrdiff_t{token - slots} * place_size;
  }
};

/// scale · q·k̂ of a shared entry from `dot` = q·k: its token `t` has the logit ‖k_t‖ times that.
KVMELD_DEVICE inline float entry_slope(const entry_table& tokens, index_t s, float scale,
                                       float dot) {
  const float norm = tokens.at(entry_table::norm, s);
  return norm > 0 ? scale * dot / norm : 0.0F;
}

/// ln Σ_t exp(slope · ‖k_t‖) over the tokens of entry `s`. Not inlined: attention has 32 of these.
KVMELD_DEVICE __attribute__((noinline)) inline float entry_log_sum(const entry_table tokens,
                                                                   index_t s, float slope) {
  float most = lowest_score, sum = 0;
  tokens.each(s, [&](index_t t) {
    const float l = slope * tokens.at(entry_table::norm, t);
    const float higher = l > most ? l : most;
    sum = sum * exponential(most - higher) + exponential(l - higher);
    most = higher;
  });
  return most + logarithm(sum);
}

/// Entries' logits; observing starts from the slope, of those that are not shared from the logit.
struct entry_masses {
  state_view state;
  index_t places;

  template <class Scalar>
  KVMELD_DEVICE float operator()(const cache_view<Scalar>& cache, index_t h, index_t s, float dot,
                                 float mass, float& observed) const {
    const entry_table tokens = entry_table::of(cache, state, h, 0, places);
    if (s >= cache.length[h] || !tokens.shared(s)) {  // a new token has no numbers yet
      return observed = cache.scale * dot + mass;
    }
    observed = entry_slope(tokens, s, cache.scale, dot);
    return entry_log_sum(tokens, s, observed);
  }
  /// Is a prompt's log-sum-exp of this head another than `column_scores` has?
  template <class Scalar>
  KVMELD_DEVICE bool differ(const cache_view<Scalar>& cache, index_t h) const {
    return entry_table::of(cache, state, h, 0, places).counted(entry_table::sharing) != 0;
  }
};

}  // namespace kvmeld::cuda::detail
