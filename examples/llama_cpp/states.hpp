// SPDX-License-Identifier: MIT
/// Sequences copied, saved and loaded: what the engine has of them, and what the adapter has.
#pragma once

#include <algorithm>  // std::min
#include <cmath>
#include <utility>  // std::swap

#include "llama_cpp/llama_cpp.hpp"

namespace kvmeld::llama {

template <policy P>
void compressor<P>::copy(llama_seq_id from, llama_seq_id to) {
  const index_t a = settled("copy", from), b = sequences_.expect_own("copy", to);
  if (a != b) {
    forget(b);
    layers_->copy(a, b);
    llama_memory_seq_rm(memory_, to, -1, -1);
    llama_memory_seq_cp(memory_, from, to, -1, -1);
    sequences_[b] = sequences_[a];
  }
}

// All numbers are little-endian.
//
//     "kvmllama"                 8 bytes
//     of each layer with heads   scale and cap f32, sinks u32 and as many f32,
//                                rotated pairs u32, 1 if they interleave u32, frequencies f64
//     the engine's state         u64 bytes, and as many
//     CRC-32 of all that         u32
//     the sequence's heads       kvmeld::compressor::save
inline constexpr std::string_view saved_magic = "kvmllama";

template <policy P>
void compressor<P>::save(std::ostream& out, llama_seq_id sequence) {
  const index_t r = settled("save", sequence);
  layers_->expect_compressed("save");
  expects(sequences_[r].seen > 0, "save: expected a sequence with tokens, got none");
  std::string engine(llama_state_seq_get_size(context_, sequence), '\0');
  auto* const bytes = reinterpret_cast<std::uint8_t*>(engine.data());
  expects(llama_state_seq_get_data(context_, bytes, engine.size(), sequence) == engine.size(),
          "save: expected llama.cpp to save the sequence, got an error");
  kvmeld::detail::byte_writer to(out);
  to.put_text(saved_magic);
  for (const index_t l : layers_->cache().held()) {
    const attention_spec& s = (*layers_)[l].model;
    to.put(s.scale), to.put(s.soft_cap), to.put(static_cast<index_t>(s.sink_logits.size()));
    std::ranges::for_each(s.sink_logits, [&](float x) { to.put(x); });
    const index_t pairs = s.rope.rotated(s.key_dim) / 2;
    to.put(pairs), to.put(index_t{s.rope.pairs_as() == rotary::pairing::interleaved});
    for (index_t p = 0; p < pairs; ++p) {
      to.put(s.rope.frequency(p, s.key_dim));
    }
  }
  to.put(std::uint64_t{engine.size()}), to.put_text(engine);
  to.finish();
  layers_->save(out, r);
}

template <policy P>
void compressor<P>::load(std::istream& in, llama_seq_id sequence) {
  const index_t r = settled("load", sequence);
  layers_->expect_compressed("load");
  expects(sequences_[r].seen == 0, "load: expected a sequence without tokens, got one of ",
          sequences_[r].seen);
  kvmeld::detail::byte_reader from(in);
  expects(errc::corrupt_file, from.get_text(saved_magic.size()) == saved_magic,
          "load: expected a sequence that the adapter saved, got other bytes");
  std::vector<attention_spec> specs;
  for (const index_t l : layers_->cache().held()) {
    attention_spec& s = specs.emplace_back((*layers_)[l].model);
    s.scale = from.get<float>(), s.soft_cap = from.get<float>();
    const auto sinks = from.get<index_t>();
    expects(errc::corrupt_file, sinks == 0 || sinks == s.query_heads(), "load: expected 0 or ",
            s.query_heads(), " sinks, got ", sinks);
    s.sink_logits.resize(static_cast<std::size_t>(sinks));
    std::ranges::generate(s.sink_logits, [&] { return from.get<float>(); });
    const auto pairs = from.get<index_t>(), interleaved = from.get<index_t>();
    expects(errc::corrupt_file, pairs >= 0 && pairs <= s.key_dim / 2, "load: expected 0 to ",
            s.key_dim / 2, " rotated pairs, got ", pairs);
    std::vector<double> frequencies(static_cast<std::size_t>(pairs));
    for (double& x : frequencies) {
      x = from.get<double>();
      expects(errc::corrupt_file, std::isfinite(x), "load: expected finite frequencies, got ", x);
    }
    s.rope = pairs > 0 ? rotary::table(frequencies, interleaved != 0 ? rotary::pairing::interleaved
                                                                     : rotary::pairing::halves)
                       : rotary();
  }
  std::string engine;
  constexpr std::uint64_t block = 1 << 20;  // a size that was changed must not allocate
  for (auto left = from.get<std::uint64_t>(); left > 0; left -= std::min(left, block)) {
    engine += from.get_text(std::min(left, block));
  }
  from.finish();
  const auto exchange_models = [&] {
    for (std::size_t i = 0; !layers_->known() && i < specs.size(); ++i) {
      std::swap((*layers_)[layers_->cache().held()[i]].model, specs[i]);  // no graph has said it
    }
  };
  exchange_models();
  auto& s = sequences_[r];
  try {
    layers_->load(in, r);
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(engine.data());
    expects(llama_state_seq_set_data(context_, bytes, engine.size(), sequence) == engine.size(),
            "load: expected a state that llama.cpp takes in this context, got another");
    s.seen = llama_memory_seq_pos_max(memory_, sequence) + std::int64_t{1};
    layers_->expect_tokens(r, s.seen);
  } catch (...) {
    exchange_models();
    forget(r);
    llama_memory_seq_rm(memory_, sequence, -1, -1);
    throw;
  }
  // Own attention leaves the engine the newest tokens, one after the other.
  for (index_t p = llama_memory_seq_pos_min(memory_, sequence); p < s.seen; ++p) {
    s.positions.push_back(p), s.cells.push_back(-1);
  }
}

}  // namespace kvmeld::llama
