// SPDX-License-Identifier: MIT
/// A contender's cache, and going on in it.
#pragma once

#include <memory>  // std::unique_ptr
#include <span>
#include <vector>

#include "engine/decoder.hpp"
#include "evaluate/contender.hpp"
#include "evaluate/prompt.hpp"

namespace evaluate {

using compressor = kvmeld::compressor<any_policy>;

/// The slots of `kv`, all of one request, each number rounded once.
kvmeld::cache stored(kvmeld::cache& kv, const kvmeld::storage_pair& type);

/// What a prompt was measured as, `[full layers · KV heads]`, with what heads of `kv`, which hold
/// it, share slots by at the contender's budget.
std::vector<kvmeld::head_state> states_of(const contender& c, const prompt& p, kvmeld::cache& kv);

/// A cache of all layers in the contender's storage, and the compressor that decodes in it. Layers
/// with a window hold their window, whatever the contender.
class compressed_cache {
 public:
  /// Of a prompt, compressed in floats.
  compressed_cache(const contender& c, const prompt& p);
  /// An empty one, for at most `tokens`.
  compressed_cache(const contender& c, const engine::config& shape, index_t tokens);
  compressed_cache(const compressed_cache& other);
  compressed_cache(compressed_cache&&) noexcept = default;
  compressed_cache& operator=(const compressed_cache&) = delete;
  compressed_cache& operator=(compressed_cache&&) noexcept = default;
  ~compressed_cache() = default;

  kvmeld::cache& kv() const { return *kv_; }
  compressor& meld() const { return *meld_; }
  /// Of the full layers: rows, log-mass and positions of the slots in use, and the states.
  std::size_t bytes() const;

 private:
  /// Over `kv_`: of full layers the contender's policy, where heads share slots in decode too; else
  /// `of_heads [full layers · KV heads]`, each with its own budget.
  void compress_by(const contender& c, std::vector<any_policy> of_heads,
                   const std::vector<budget>& budgets);

  std::unique_ptr<kvmeld::cache> kv_;  // stays where it is: the compressor refers to it
  std::vector<any_policy> policies_;   // of `meld_`: one, or those of all heads
  std::vector<budget> budgets_;
  std::unique_ptr<compressor> meld_;
};

/// The model over a compressed cache: one token in, the next one's logits out.
class compressed_decoder {
 public:
  compressed_decoder(const engine::decoder& model, const contender& c, const prompt& p)
      : model_(model), position_(p.tokens), cache_(c, p) {}
  /// From an empty cache, for at most `tokens`.
  compressed_decoder(const engine::decoder& model, const contender& c, index_t tokens)
      : model_(model), position_(0), cache_(c, model.shape(), tokens) {}

  /// `[1, vocab]`, overwritten by the next call.
  const row_major_matrix& next(int token);

  /// Several at once, all of one model: the weights are read once for all. `logits [decoders,
  /// vocab]`.
  static void next(std::span<compressed_decoder* const> decoders, std::span<const int> tokens,
                   engine::decoder::scratch& work, row_major_matrix& logits);

 private:
  const engine::decoder& model_;
  index_t position_;
  compressed_cache cache_;
  engine::decoder::scratch scratch_;
  row_major_matrix logits_;
};

}  // namespace evaluate
