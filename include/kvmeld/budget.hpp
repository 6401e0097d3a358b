// SPDX-License-Identifier: MIT
/// How many slots a head may hold.
#pragma once

#include <cstdint>
#include <limits>  // std::numeric_limits

#include "kvmeld/config.hpp"

namespace kvmeld::inline v0 {

/// Slots a head may hold. A prompt is brought to `slots`; decoding returns there when a head holds
/// `trigger`.
struct budget {
  index_t slots = 0;  ///< of a head: keys and values of one token each, or merged ones
  /// 0: a `compressor` frees the policy's `eviction_batch` at once, so that a head never holds more
  /// than `slots` and its slack between steps; one head's own `step` compresses at slots + 1.
  index_t trigger = 0;
  index_t slack = 0;       ///< slots in addition that decoding may fill before it evicts
  index_t most = 0;        ///< shared: no head gets more; 0: what leaves it room in the cache
  bool is_shared = false;  ///< `slots` are a head's on average, divided over the model by scores
  bool by_layer = false;   ///< shared, and equal for the heads of a layer
  bool alike = false;      ///< by layer, and its heads keep the same tokens
  /// In place of `slots`, which a `compressor` finds: bytes that the heads of a request, but those
  /// of layers with a window, take at most between steps, with their states.
  std::int64_t size = 0;

  /// `slots` a head on average, divided over all heads of the model by one threshold over their
  /// scores; `slack` more for each after the prompt. No head gets more than `most`; what it cannot
  /// take goes to the others. By default a head leaves room in the cache for its slack and the new
  /// token, and once a request's prompt goes on (a second `end_prompt`) for another chunk as long
  /// as the latest; no head is held to fewer than `slots`.
  static constexpr budget shared(index_t slots, index_t slack = 0, index_t most = 0) {
    return {slots, 0, slack, most, true};
  }
  /// The same with equal slots for all heads of a layer, each with its own tokens: for engines that
  /// have one page table, or one length, for a layer.
  static constexpr budget shared_by_layer(index_t slots, index_t slack = 0, index_t most = 0) {
    return {slots, 0, slack, most, true, true};
  }
  /// The same with the same tokens for all heads of a layer, which rank them by the mean of their
  /// scores, in decode as well: for engines that move a layer's rows by one list. For policies that
  /// evict by a score alone: of merged slots each head has its own.
  static constexpr budget same_tokens(index_t slots, index_t slack = 0, index_t most = 0) {
    return {slots, 0, slack, most, true, true, true};
  }

  /// As many slots as `n` bytes of a request have room for, the same for every head, or on average
  /// of a head where they share them: rows in the cache's storage, log-mass, positions, and what
  /// the policy keeps while it decodes. `bytes_in_half(kv, tokens)` is what a share is taken of.
  /// @{
  static constexpr budget bytes(std::int64_t n, index_t slack = 0) {
    return {.slack = slack, .size = n};
  }
  static constexpr budget shared_bytes(std::int64_t n, index_t slack = 0) {
    return {.slack = slack, .is_shared = true, .size = n};
  }
  /// @}

  /// Slots at which a head is compressed; for a budget of all positions, that many.
  index_t trigger_length() const {
    constexpr index_t all = std::numeric_limits<index_t>::max();
    return trigger != 0 ? trigger : slots < all ? slots + 1 : all;
  }
  /// Does a head of `length` slots have to be compressed?
  KVMELD_HD bool reached(index_t length) const { return length > slots && length >= trigger; }
};

}  // namespace kvmeld::inline v0
