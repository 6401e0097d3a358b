// SPDX-License-Identifier: MIT
/// What is held of all layers of each sequence, and the calls on a sequence between micro-batches.
#pragma once

#include <limits>  // std::numeric_limits
#include <optional>
#include <span>
#include <utility>  // std::exchange
#include <vector>

#include "kvmeld/compressor.hpp"
#include "llama_cpp/cells.hpp"
#include "llama_cpp/sequences.hpp"

namespace kvmeld::llama {

template <policy P>
class request_layers {
 public:
  /// Refused: what `kvmeld::compressor` refuses of the policy and its budgets.
  request_layers(const layers_setup& setup, const P& p)
      : setup_(setup), policy_(p), kv_(setup), open_(static_cast<std::size_t>(setup.requests)) {
    if (kv_.layers() > 0) {
      meld_.emplace(kv_, std::span(&p, 1), setup.limits);
    }
  }
  request_layers(const request_layers&) = delete;  // the compressor refers to the cache
  request_layers& operator=(const request_layers&) = delete;

  layer_cache& cache() { return kv_; }
  /// Is layer `l` one of those with heads here?
  bool holds(index_t l) const { return kv_.holds(l); }
  layer& operator[](index_t l) { return kv_.of(l); }
  /// KV head `h` of layer `l` of a sequence, and what its policy remembers; null: the layer is left
  /// alone.
  head_ref head(index_t l, index_t h, index_t request = 0) {
    return kv_.head(kv_.heads(l, request).first + h);
  }
  const head_state* state(index_t l, index_t h, index_t request = 0) const {
    return kv_.whole(l) ? nullptr : &meld_->state(kv_.heads(l, request).first + h);
  }

  /// As `compressor::slots` has them.
  index_t slots() const {
    const auto heads = heads_of(0, false);
    std::int64_t all = 0;
    for (const index_t h : heads) {
      all += meld_->limit(h).trigger_length() - 1;
    }
    return heads.empty() ? 0 : static_cast<index_t>(all / static_cast<std::int64_t>(heads.size()));
  }
  /// What is held of the engine's sequences.
  kvmeld::llama::report report(const std::vector<sequence>& all) {
    kvmeld::llama::report r{.spent = times_};
    for (const sequence& s : all) {
      r.tokens += s.seen;
      r.cells += static_cast<index_t>(s.cells.size());
    }
    const index_t dim = setup_.spec.key_dim;
    const std::size_t row = 2 * row_bytes(setup_.storage, dim);
    r.reserved_bytes = kv_.reserved_bytes();
    for (index_t h = 0; h < setup_.heads(); ++h) {
      const index_t slots = kv_.head(h).length();
      r.slots = std::max(r.slots, slots);
      // Repack cannot give back a cell that another head holds.
      r.bytes += head_bytes(setup_.held, dim, dim, setup_.how == mode::repack ? r.cells : slots) +
                 as_size(slots) * (sizeof(float) + sizeof(index_t));
      if (h < kv_.heads()) {
        r.bytes += meld_->state(h).bytes();
        r.reserved_bytes += meld_->state(h).reserved_bytes();
      }
      r.full_bytes +=
          static_cast<std::size_t>(all[static_cast<std::size_t>(kv_.request_of(h))].seen) * row;
    }
    for (const index_t l : kv_.held()) {
      if (const auto& engine = kv_.of(l).engine;
          engine.keys != nullptr && engine.values != nullptr) {
        r.reserved_bytes += ggml_nbytes(engine.keys) + ggml_nbytes(engine.values);
      }
    }
    return r;
  }

  /// Does a sequence have a prompt that has not ended?
  bool open(index_t request) const { return open_[static_cast<std::size_t>(request)] != 0; }
  /// The prompt is over: every head is brought to its budget. Nothing to do where there is none.
  void end_prompt(index_t request) {
    if (std::exchange(open_[static_cast<std::size_t>(request)], char{0}) == 0) {
      return;
    }
    meld_->end_prompt(request);
  }

  /// Tokens of a draft that see what steps would see: the last of them is the first with which a
  /// head is compressed.
  index_t draft_room(index_t request) {
    index_t room =
        meld_.has_value() ? meld_->draft_room(request) : std::numeric_limits<index_t>::max();
    for (const index_t h : heads_of(request, true)) {
      room = std::min(room, setup_.capacity - kv_.head(h).length());
    }
    return std::max(room, index_t{1});
  }
  /// The first `kept` tokens of the draft count, as so many steps.
  void accept(index_t request, index_t kept) {
    const stopwatch timed(times_.compress);
    if (meld_.has_value()) {
      meld_->accept(request, kept);
    }
    for (const index_t h : heads_of(request, true)) {
      kv_.accept(h, kept);
    }
  }

  /// A sequence is empty again, and gives its memory back.
  void clear(index_t request) {
    if (meld_.has_value()) {
      meld_->clear(request);
    }
    for (const index_t h : heads_of(request, true)) {
      kv_.head(h).restore(0, 0);
      kv_.give_back(h);
    }
    open_[static_cast<std::size_t>(request)] = 0;
  }

  /// Sequence `to` becomes what `from` is.
  void copy(index_t from, index_t to) {
    const auto a = heads_of(from, true), b = heads_of(to, true);
    for (std::size_t i = 0; i < a.size(); ++i) {
      kvmeld::detail::copy_slots(kv_.head(a[i]), kv_.head(b[i]));
    }
    if (meld_.has_value()) {
      meld_->copy(from, to);
    }
  }

  /// Refused: layers that keep all, which the compressor does not save.
  void expect_compressed(const char* call) const {
    expects(setup_.count(part::whole) == 0, call, ": expected compressed layers alone, got ",
            setup_.count(part::whole), " that keep all");
  }
  void save(std::ostream& out, index_t request) { meld_->save(out, request); }
  /// May throw with memory reserved: `clear` gives it back.
  void load(std::istream& in, index_t request) { meld_->load(in, request); }
  /// Refused: heads of other tokens than the engine's state.
  void expect_tokens(index_t request, std::int64_t tokens) {
    for (const index_t h : heads_of(request, false)) {
      expects(errc::corrupt_file, kv_.head(h).next_position() == tokens, "load: expected heads of ",
              tokens, " tokens (llama.cpp's state), got ", kv_.head(h).next_position());
    }
  }

 protected:
  /// Heads of a sequence in all layers that keep all, or that are compressed.
  std::vector<index_t> heads_of(index_t request, bool whole) const {
    std::vector<index_t> list;
    for (const index_t l : kv_.held()) {
      const head_range heads = kv_.heads(l, request);
      for (index_t h = heads.first; kv_.whole(l) == whole && h < heads.first + heads.count; ++h) {
        list.push_back(h);
      }
    }
    return list;
  }

  layers_setup setup_;
  P policy_;
  layer_cache kv_;
  std::optional<kvmeld::compressor<P>> meld_;  // none where all layers are left alone
  std::vector<char> open_;                     // [requests] a prompt that has not ended
  bool known_ = false;                         // has a graph said what the layers compute?
  times times_;
};

}  // namespace kvmeld::llama
