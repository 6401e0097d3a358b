// SPDX-License-Identifier: MIT
/// What an adapter is told, what follows from it before the first token, and what it reports.
#pragma once

#include <ggml.h>

#include <algorithm>  // std::ranges::count
#include <chrono>
#include <optional>
#include <vector>

#include "kvmeld/peers.hpp"

namespace kvmeld::llama {

enum class mode { repack, own_attention };

/// Of a layer: its heads are compressed, or keep all; or the engine cuts it to a window by itself.
enum class part { compressed, whole, windowed };

struct options {
  mode how = mode::repack;
  /// One for all heads, one a layer, or one a head `[layers · KV heads]`; or one that all heads
  /// share (`budget::shared`), which waits for `compressor::end_prompt`. Those of windowed layers
  /// are not used. In bytes: of a sequence, own attention alone.
  std::vector<budget> limits;
  std::vector<index_t> untouched = {};  ///< layers that keep all
  /// Own attention: slots of heads that keep all, a prompt under shared budgets or those in bytes
  /// among them; 0: the trained context.
  index_t capacity = 0;
  /// Over 0: the budget is this share of the bytes that `capacity` − 1 tokens take in 16 bits, 1
  /// all of these tokens, and `limits` has one without slots.
  double share = 0;
  /// Own attention: what heads hold rows as; without it, as the engine's cells do.
  std::optional<storage_pair> rows = {};
};

/// Everything about the layers that is known before the first token.
struct layers_setup {
  mode how = mode::repack;
  attention_spec spec = {};        ///< of every layer with heads, but for scale and rotation
  index_t context = 0;             ///< slots of heads that keep all
  ggml_type rows = GGML_TYPE_F32;  ///< of the engine's keys and values
  kvmeld::storage storage = kvmeld::storage::f32;  ///< of the same
  storage_pair held = kvmeld::storage::f32;        ///< of heads' rows; in repack the engine's
  std::vector<budget> limits = {};  ///< one, or [layers · heads] of those that are compressed
  std::vector<part> layers = {};    ///< [layers of the model]
  index_t window = 0;               ///< tokens that windowed layers need the engine to keep
  index_t capacity = 0;             ///< slots that a head has room for
  index_t requests = 1;             ///< sequences that have heads of their own

  index_t count(part p) const { return static_cast<index_t>(std::ranges::count(layers, p)); }
  index_t heads() const {
    return (static_cast<index_t>(layers.size()) - count(part::windowed)) * requests * spec.kv_heads;
  }
};

/// Seconds spent in the callback.
struct times {
  double logits = 0, observe = 0, attend = 0, compress = 0;
};

/// What is held, what is reserved for it, and what the whole cache would be.
struct report {
  std::int64_t tokens = 0;
  index_t cells = 0;  ///< of the engine that are in use
  index_t slots = 0;  ///< of the longest head
  /// Keys, values, log-mass, positions and the policy's state in use; of windowed layers none.
  std::size_t bytes = 0;
  /// Room for the same, used or not, and the engine's cells, which are there in either mode (known
  /// from the first graph on).
  std::size_t reserved_bytes = 0;
  std::size_t full_bytes = 0;  ///< keys and values of all tokens
  times spent = {};
};

/// Adds the time until its end to `sum`, seconds.
class stopwatch {
 public:
  explicit stopwatch(double& sum) : sum_(sum) {}
  ~stopwatch() { sum_ += std::chrono::duration<double>(clock::now() - begin_).count(); }
  stopwatch(const stopwatch&) = delete;
  stopwatch& operator=(const stopwatch&) = delete;

 private:
  using clock = std::chrono::steady_clock;
  double& sum_;
  clock::time_point begin_ = clock::now();
};

}  // namespace kvmeld::llama
