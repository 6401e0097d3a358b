// SPDX-License-Identifier: MIT
/// All layers of a model: what becomes of a micro-batch's attention.
///
/// A micro-batch of several tokens is a prompt, or its next part: it is measured on its own
/// queries, and at its end every head returns to its budget. Budgets that heads share wait for
/// `end_prompt`. A single token is a step.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "llama_cpp/masses.hpp"

namespace kvmeld::llama {

template <policy P>
class layers {
 public:
  /// Refused: what `kvmeld::compressor` refuses of the policy and its budgets.
  layers(const layers_setup& setup, const P& p)
      : setup_(setup),
        policy_(p),
        needs_(traits::observation_needs_of(p)),
        decodes_(traits::supports_decode(p)),
        measures_steps_(traits::uses_attention(p)),
        measures_prompts_(traits::prompt_use_of(p).needs_queries()),
        kv_(setup) {
    if (kv_.layers() > 0) {
      meld_.emplace(kv_, std::span(&p, 1), setup.limits);
    }
  }
  layers(const layers&) = delete;  // the compressor refers to the cache
  layers& operator=(const layers&) = delete;

  layer_cache& cache() { return kv_; }
  /// Is layer `l` one of those with heads here?
  bool holds(index_t l) const { return kv_.holds(l); }
  layer& operator[](index_t l) { return kv_.of(l); }
  /// KV head `h` of layer `l`, and what its policy remembers; null: the layer is left alone.
  head_ref head(index_t l, index_t h) { return kv_.head(kv_.heads(l).first + h); }
  const head_state* state(index_t l, index_t h) const {
    return kv_.whole(l) ? nullptr : &meld_->state(kv_.heads(l).first + h);
  }

  /// What is held of `tokens` tokens, of which the engine has so many in its cells.
  kvmeld::llama::report report(std::int64_t tokens, index_t cells) {
    kvmeld::llama::report r{.tokens = tokens, .cells = cells, .spent = times_};
    const std::size_t row = 2 * row_bytes(setup_.storage, setup_.spec.key_dim),
                      record = sizeof(float) + sizeof(index_t),
                      room = static_cast<std::size_t>(setup_.capacity);
    for (index_t h = 0; h < setup_.heads(); ++h) {
      const auto slots = static_cast<std::size_t>(kv_.head(h).length());
      r.slots = std::max(r.slots, kv_.head(h).length());
      // Repack cannot give back a cell that another head holds.
      r.bytes += (setup_.how == mode::repack ? static_cast<std::size_t>(cells) : slots) * row +
                 slots * record;
      r.reserved_bytes += kv_.own_bytes(h) + room * record;
      if (h < kv_.heads()) {
        const head_state& state = meld_->state(h);
        r.bytes += state.bytes();
        r.reserved_bytes += state.bytes() + (room - slots) * sizeof(float) *
                                                static_cast<std::size_t>(state.slot_stats());
      }
      r.full_bytes += static_cast<std::size_t>(tokens) * row;
    }
    for (const index_t l : kv_.held()) {
      if (const auto& engine = kv_.of(l).engine;
          engine.keys != nullptr && engine.values != nullptr) {
        r.reserved_bytes += ggml_nbytes(engine.keys) + ggml_nbytes(engine.values);
      }
    }
    return r;
  }

  /// A micro-batch begins, whose tokens the engine has in `cells`.
  void begin(std::span<const index_t> cells) {
    chunk_ = cells;
    prompt_ = cells.size() > 1 || open_ || !decodes_;
    together_ = prompt_ && measures_prompts_;
    for (const index_t l : kv_.held()) {
      kv_.of(l).came = {};
    }
  }
  bool wants_probabilities(index_t l) const {
    return !kv_.whole(l) && !together_ && (needs_.probabilities || needs_.log_sum_exp);
  }
  bool wants_queries(index_t l) const {
    return !kv_.whole(l) && (together_ || needs_.query || needs_.log_sum_exp);
  }
  bool edits_products(index_t l) { return kv_.of(l).edited && kv_.of(l).model.soft_cap == 0; }
  bool edits_capped(index_t l) { return kv_.of(l).edited && kv_.of(l).model.soft_cap > 0; }

  /// Repack: `kq [cells, tokens, heads · group]` before scale, cap and mask, made of `q = src[1]`.
  void products(index_t l, const ggml_tensor* kq) {
    const stopwatch timed(times_.logits);
    kv_.of(l).came.queries = true;
    if (wants_queries(l)) {
      keep_queries(kq->src[1]);
    }
  }
  /// Repack: what the softmax is made of, which are these products or the capped ones. `entries`:
  /// the cells that are in use, without the micro-batch's.
  void edit(index_t l, ggml_tensor* logits, std::span<const index_t> entries) {
    const stopwatch timed(times_.logits);
    kv_.of(l).came.edited = true;
    const head_range heads = kv_.heads(l);
    for (index_t i = 0; i < heads.count; ++i) {
      const index_t h = heads.first + i;
      edit_logits(policy_, kv_.head(h), meld_->state(h), kv_.table(h), entries, logits,
                  kv_.of(l).factor, i * setup_.spec.group);
    }
  }

  /// Repack: the softmax of the logits comes next, with which all that the layer computes is known.
  void measure(index_t l) {
    const stopwatch timed(times_.logits);
    if (!wants_queries(l) || !kv_.of(l).came.queries) {
      return;
    }
    if (together_) {
      commit(l, tokens());
      measure_prompt(l);
    } else if (!wants_probabilities(l)) {
      for (index_t i = 0; i < tokens(); ++i) {
        commit(l, i + 1);
        meld_->observe(kv_.heads(l), {.query = token(queries_, i)});
      }
    }
  }

  /// Repack: `p [cells, tokens, heads · group]`, the softmax of it.
  void probabilities(index_t l, const ggml_tensor* p) {
    const stopwatch timed(times_.observe);
    const head_range heads = kv_.heads(l);
    const index_t group = setup_.spec.group, stride = setup_.capacity;
    seen_.resize(static_cast<std::size_t>(heads.count) * static_cast<std::size_t>(group) *
                 static_cast<std::size_t>(stride));
    log_sum_exp_.resize(needs_.log_sum_exp ? static_cast<std::size_t>(heads.count * group) : 0);
    for (index_t i = 0; i < tokens(); ++i) {
      commit(l, i + 1);
      const auto query = wants_queries(l) ? token(queries_, i) : std::span<float>();
      for (index_t k = 0; k < heads.count; ++k) {
        const head_ref head = kv_.head(heads.first + k);
        const index_t* const cells = kv_.table(heads.first + k);
        float* const of_head = seen_.data() + std::ptrdiff_t{k} * group * stride;
        for (index_t g = 0; g < group; ++g) {
          for (index_t s = 0; s < head.length(); ++s) {
            of_head[std::ptrdiff_t{g} * stride + s] = *element(p, cells[s], i, k * group + g);
          }
        }
        if (needs_.log_sum_exp) {
          log_sum_exp_of(policy_, head, meld_->state(heads.first + k), of_head, stride,
                         query.data() + k * group * head.dim(), log_sum_exp_.data() + k * group);
        }
      }
      meld_->observe(heads, {seen_, stride, log_sum_exp_, query});
    }
  }

  /// Own attention: fills in `out [dim, heads · group, tokens]`, made of `q = src[0]`.
  void attend(index_t l, ggml_tensor* out) {
    const stopwatch timed(times_.attend);
    kv_.of(l).came.queries = true;
    kv_.of(l).came.taken = tokens();
    keep_queries(out->src[0]);
    kv_.read(l, chunk_, keys_, values_);
    const head_range heads = kv_.heads(l);
    const std::span<float> result(element(out, 0), queries_.size());
    // The engine's own output is right where nothing came before, to the precision of its rows.
    const bool theirs = kv_.head(heads.first).length() == 0 && setup_.storage != storage::f32;
    if (kv_.whole(l)) {
      kv_.append(l, keys_, values_, queries_, theirs ? std::span<float>() : result);
    } else if (!prompt_ || (!together_ && measures_steps_)) {
      for (index_t i = 0; i < tokens(); ++i) {
        meld_->step(heads, {token(queries_, i), token(keys_, i), token(values_, i)},
                    token(result, i));
      }
    } else {
      if (!theirs) {  // drafted, for a prompt's tokens are no steps: they are measured together
        meld_->draft(heads, {queries_, keys_, values_}, result, tokens());
        meld_->accept(0, 0);
      }
      kv_.append(l, keys_, values_);
      if (together_) {
        measure_prompt(l);
      }
    }
  }

  /// The micro-batch is over: heads return to their budgets, unless these wait for the prompt's
  /// end.
  void end() {
    const stopwatch timed(times_.compress);
    for (const index_t l : kv_.held()) {
      const auto& of = kv_.of(l);
      const bool attended = setup_.how == mode::own_attention || wants_probabilities(l);
      expects(of.came.scale && (!attended || of.came.taken == tokens()) &&
                  (!wants_queries(l) || of.came.queries) && (!of.edited || of.came.edited),
              "llama.cpp: expected all nodes of layer ", l, "'s attention, got ", another_graph);
    }
    for (const index_t l : kv_.held()) {
      for (index_t i = kv_.of(l).came.taken; i < tokens(); ++i) {
        commit(l, i + 1);
        if (measures_steps_ && !together_ && !kv_.whole(l)) {
          meld_->observe(kv_.heads(l), {});  // the policy needs nothing of it
        }
      }
    }
    if (!prompt_ && meld_.has_value()) {
      meld_->compress(head_range{0, kv_.heads()});
    }
    open_ = prompt_ && meld_.has_value();
    if (tokens() > 1 && !setup_.limits.front().is_shared) {
      end_prompt();
    }
  }

  /// The prompt is over: every head is brought to its budget. Nothing to do where there is none.
  void end_prompt() {
    if (!std::exchange(open_, false)) {
      return;
    }
    meld_->end_prompt(0);
    for (index_t h = 0; h < kv_.heads() && setup_.how == mode::own_attention; ++h) {
      kv_.fit(h, std::max(kv_.head(h).length(), meld_->limit(h).trigger_length()));
    }
  }

  /// Cells that the engine has to keep: `least`, and in repack as many as the longest head has
  /// slots. Says to every layer whether it has masses or holes, so that the engine's logits are
  /// edited from now on.
  index_t settle(index_t least) {
    if (setup_.how == mode::own_attention) {
      return least;
    }
    index_t cells = least;
    for (index_t h = 0; h < setup_.heads(); ++h) {
      cells = std::max(cells, kv_.head(h).length());
    }
    for (const index_t l : kv_.held()) {
      bool& edited = kv_.of(l).edited = false;
      for (index_t h = 0; h < kv_.kv_heads() && !kv_.whole(l) && !edited; ++h) {
        edited = head(l, h).length() < cells || has_mass(policy_, head(l, h), *state(l, h));
      }
    }
    return cells;
  }

 private:
  index_t tokens() const { return static_cast<index_t>(chunk_.size()); }
  /// Token `i` of rows `[tokens, ...]`.
  template <class Rows>
  auto token(Rows& all, index_t i) const {
    const std::size_t each = all.size() / chunk_.size();
    return std::span(all).subspan(static_cast<std::size_t>(i) * each, each);
  }

  /// Repack: takes in the first tokens of the micro-batch that were not yet.
  void commit(index_t l, index_t tokens) {
    for (auto& taken = kv_.of(l).came.taken; taken < tokens; ++taken) {
      kv_.commit(l, chunk_[static_cast<std::size_t>(taken)]);
    }
  }
  void measure_prompt(index_t l) {
    meld_->prompt(kv_.heads(l), queries(queries_, tokens(), kv_.of(l).model));
  }
  void keep_queries(const ggml_tensor* q) {
    const auto dim = static_cast<std::size_t>(q->ne[0]), heads = static_cast<std::size_t>(q->ne[2]);
    queries_.resize(chunk_.size() * heads * dim);
    float* to = queries_.data();
    for (index_t i = 0; i < tokens(); ++i) {
      for (index_t h = 0; h < q->ne[2]; ++h, to += dim) {
        std::copy_n(element(q, 0, i, h), dim, to);
      }
    }
  }

  layers_setup setup_;
  P policy_;
  observation_needs needs_;  // of a decode step: it decides which nodes are requested
  bool decodes_, measures_steps_, measures_prompts_;
  layer_cache kv_;
  std::optional<kvmeld::compressor<P>> meld_;   // none where all layers are left alone
  std::vector<float> queries_, keys_, values_;  // [tokens, heads, ...] of the present layer
  std::vector<float> seen_, log_sum_exp_;       // of a step: [heads, group, stride or 1]
  std::span<const index_t> chunk_;
  bool prompt_ = false;    // are the present tokens a prompt's?
  bool together_ = false;  // ... measured on all of their queries, not one by one?
  bool open_ = false;      // a prompt that has not ended
  times times_;
};

}  // namespace kvmeld::llama
