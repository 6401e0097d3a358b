// SPDX-License-Identifier: MIT
// A text through llama.cpp behind the adapter and through our own engine, both compressing by the
// same policy, chunk by chunk.
#pragma once

#include "llama_cpp/files.hpp"

namespace test {

using kvmeld::llama::mode;

/// The logits `[tokens, vocab]` of every chunk.
using stream_logits = std::vector<engine::row_major_matrix>;

/// The largest differences of logits.
struct distances {
  float to_repack, to_own;  ///< of our engine to llama.cpp, in either mode
  float modes;              ///< of one mode to the other
  float effect;             ///< of repack to llama.cpp's full cache
};

/// A model in both engines, which a text goes through in chunks of `chunk`, compressed to `target`
/// slots a head, in `cells` of llama.cpp's.
struct both_engines {
  static constexpr index_t cells = 256, chunk = 64, target = 96;

  const engine::decoder& ours;
  llama_model* theirs;
  angles turned = angles::ours;

  /// llama.cpp's own, with every token in a cell.
  stream_logits whole(std::span<const int> text, bool singles) const {
    auto parameters = exact_parameters(static_cast<index_t>(text.size()), chunk);
    parameters.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    const llama_context_ptr context(llama_init_from_model(theirs, parameters));
    index_t position = 0;
    return each_chunk(text, singles, [&](std::span<const int> part) {
      const index_t first = std::exchange(position, position + static_cast<index_t>(part.size()));
      return decode(context.get(), part, first);
    });
  }

  /// The same, of our engine.
  stream_logits our_whole(std::span<const int> text, bool singles) const {
    return of_ours(policy_named("full_cache"), text, static_cast<index_t>(text.size()), singles);
  }

  stream_logits of_ours(const evaluate::any_policy& p, std::span<const int> text) const {
    return of_ours(p, text, target + chunk, kvmeld::declared(p).supports_decode());
  }

  stream_logits of_llama(const evaluate::any_policy& p, mode how, std::span<const int> text) const {
    compressed_llama kv(theirs, p, {.how = how, .limits = {{.slots = target}}},
                        exact_parameters(cells, chunk));
    const auto all = each_chunk(text, kvmeld::declared(p).supports_decode(),
                                [&](auto part) { return kv.decode(part); });
    const auto r = kv.kv.report();
    CHECK(r.tokens == static_cast<std::int64_t>(text.size()));
    CHECK(r.slots <= target);
    CHECK(r.cells <= target);
    CHECK(r.bytes < r.full_bytes);
    CHECK(llama_n_ctx(kv.context.get()) == cells);
    CHECK(llama_memory_seq_pos_max(llama_get_memory(kv.context.get()), 0) == r.tokens - 1);
    return all;
  }

  /// All distances; `uncompressed`: what llama.cpp makes of this text, or of a longer one.
  distances compressed(const evaluate::any_policy& p, std::span<const int> text,
                       stream_logits uncompressed) const {
    const auto own_engine = of_ours(p, text), repack = of_llama(p, mode::repack, text),
               own = of_llama(p, mode::own_attention, text);
    uncompressed.resize(repack.size());
    return {apart(own_engine, repack), apart(own_engine, own), apart(repack, own),
            apart(uncompressed, repack)};
  }

 private:
  /// Chunks of `chunk`, and where `singles` 16 single tokens behind every eight of them.
  template <class F>
  static stream_logits each_chunk(std::span<const int> text, bool singles, F f) {
    stream_logits all;
    std::size_t at = 0;
    for (int i = 0; at < text.size(); ++i) {
      const auto n = std::min<std::size_t>(singles && i % 24 >= 8 ? 1 : chunk, text.size() - at);
      all.push_back(f(std::span(text).subspan(at, n)));
      at += n;
    }
    return all;
  }

  stream_logits of_ours(const evaluate::any_policy& p, std::span<const int> text, index_t room,
                        bool singles) const {
    const auto layers = static_cast<std::size_t>(ours.shape().layers);
    chunked_engine loops(ours, p, std::vector<kvmeld::budget>(layers, {.slots = target}), room,
                         std::vector<char>(layers, kvmeld::declared(p).evicts() ? 0 : 1), turned);
    return each_chunk(text, singles, [&](auto part) { return loops.decode(part); });
  }
};

}  // namespace test
