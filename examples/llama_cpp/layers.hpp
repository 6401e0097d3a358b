// SPDX-License-Identifier: MIT
/// All layers of a model: what becomes of a micro-batch's attention.
///
/// A micro-batch of several tokens is a prompt, or its next part: it is measured on its own
/// queries, and at its end every head returns to its budget. Budgets that heads share wait for
/// `end_prompt`. A single token is a step.
#pragma once

#include <span>
#include <vector>

#include "llama_cpp/masses.hpp"
#include "llama_cpp/requests.hpp"

namespace kvmeld::llama {

template <policy P>
class layers : public request_layers<P> {
  using base = request_layers<P>;
  using base::setup_, base::policy_, base::kv_, base::meld_, base::times_, base::known_;

 public:
  layers(const layers_setup& setup, const P& p)
      : base(setup, p),
        needs_(kvmeld::declared(p).needs()),
        decodes_(kvmeld::declared(p).supports_decode()),
        measures_steps_(kvmeld::declared(p).uses_attention()),
        measures_prompts_(kvmeld::declared(p).prompt_use().needs_queries()) {}

  /// Has a graph said yet what its layers compute?
  bool known() const { return known_; }

  /// Tokens of a sequence that no policy evicts or merges. From then on repack says how much of a
  /// step's attention sinks have: attention within the others is measured by it.
  void pin(index_t request, index_t first, index_t count) {
    if (meld_.has_value()) {
      meld_->pin(request, first, count);
      needs_.log_sum_exp = needs_.log_sum_exp || needs_.probabilities;
    }
  }

  /// A micro-batch begins, of these tokens of sequences: in repack of one.
  void begin(std::span<chunk> chunks) {
    chunks_ = chunks;
    tokens_ = 0;
    for (chunk& c : chunks_) {
      tokens_ += static_cast<index_t>(c.cells.size());
      const bool several = c.kind == token_kind::text && c.cells.size() > 1;
      c.prompt = c.kind != token_kind::draft && (several || this->open(c.request) || !decodes_);
      c.together = opens(c) && measures_prompts_;
    }
    for (const index_t l : kv_.held()) {
      kv_.of(l).came = {};
    }
  }
  bool wants_probabilities(index_t l) const {
    return !kv_.whole(l) && !only().together && (needs_.probabilities || needs_.log_sum_exp);
  }
  bool wants_queries(index_t l) const {
    return !kv_.whole(l) && (only().together || needs_.query || needs_.log_sum_exp);
  }
  bool edits_products(index_t l) { return kv_.of(l).edited && kv_.of(l).model.soft_cap == 0; }
  bool edits_capped(index_t l) { return kv_.of(l).edited && kv_.of(l).model.soft_cap > 0; }

  /// Repack: `kq [cells, tokens, heads · group]` before scale, cap and mask, made of `q = src[1]`.
  void products(index_t l, const ggml_tensor* kq) {
    const stopwatch timed(times_.logits);
    kv_.of(l).came.queries = true;
    if (wants_queries(l)) {
      keep_queries(kq->src[1], only().tokens);
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
    if (only().together) {
      commit(l, tokens_);
      measure_prompt(l, only());
    } else if (!wants_probabilities(l)) {
      for (index_t i = 0; i < tokens_; ++i) {
        commit(l, i + 1);
        meld_->observe(kv_.heads(l), {.query = token(queries_, i, tokens_)});
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
    for (index_t i = 0; i < tokens_; ++i) {
      commit(l, i + 1);
      const auto query = wants_queries(l) ? token(queries_, i, tokens_) : std::span<float>();
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
    kv_.of(l).came.taken = tokens_;
    for (const chunk& c : chunks_) {
      keep_queries(out->src[0], c.tokens);
      kv_.read(l, c.cells, keys_, values_);
      const auto n = static_cast<index_t>(c.tokens.size());
      if (n == tokens_) {
        attend(l, c, std::span<float>(element(out, 0), queries_.size()));
        continue;
      }
      result_.resize(queries_.size());
      const bool filled = attend(l, c, result_);
      for (index_t i = 0; filled && i < n; ++i) {
        std::ranges::copy(token(result_, i, n),
                          element(out, 0, 0, c.tokens[static_cast<std::size_t>(i)]));
      }
    }
  }

  /// The micro-batch is over: heads return to their budgets, unless these wait for the prompt's
  /// end, or for a draft's.
  void end() {
    const stopwatch timed(times_.compress);
    const bool own = setup_.how == mode::own_attention;
    for (const index_t l : kv_.held()) {
      const auto& of = kv_.of(l);
      const bool attended = own || wants_probabilities(l);
      expects(of.came.scale && (!attended || of.came.taken == tokens_) &&
                  (!wants_queries(l) || of.came.queries) && (!of.edited || of.came.edited),
              "llama.cpp: expected all nodes of layer ", l, "'s attention, got ", another_graph);
    }
    for (const index_t l : kv_.held()) {
      for (index_t i = kv_.of(l).came.taken; i < tokens_; ++i) {
        commit(l, i + 1);
        if (measures_steps_ && !only().together && !kv_.whole(l)) {
          meld_->observe(kv_.heads(l), {});  // the policy needs nothing of it
        }
      }
    }
    known_ = true;
    for (const chunk& c : chunks_) {
      if (!own && !c.prompt && meld_.has_value()) {
        meld_->compress(head_range{0, kv_.heads()});
      }
      this->open_[static_cast<std::size_t>(c.request)] = opens(c) && meld_.has_value() ? 1 : 0;
      if (!setup_.limits.front().is_shared) {
        this->end_prompt(c.request);
      }
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
        edited = this->head(l, h).length() < cells ||
                 has_mass(policy_, this->head(l, h), *this->state(l, h));
      }
    }
    return cells;
  }

 private:
  /// Does a prompt begin with these tokens, or go on? A single token under a policy for prompts
  /// alone is kept for the next one, whose end is known: no call has to end it.
  bool opens(const chunk& c) const {
    return c.prompt && (c.cells.size() > 1 || setup_.limits.front().is_shared);
  }
  /// The tokens of repack's one sequence.
  const chunk& only() const { return chunks_.front(); }
  /// Token `i` of `n` tokens' rows, `[tokens, ...]`.
  template <class Rows>
  static auto token(Rows& all, index_t i, index_t n) {
    const std::size_t each = all.size() / static_cast<std::size_t>(n);
    return std::span(all).subspan(static_cast<std::size_t>(i) * each, each);
  }

  /// Own attention: the tokens of one sequence, `result [tokens, heads · group, dim]`. False: the
  /// engine's own output stays.
  bool attend(index_t l, const chunk& c, std::span<float> result) {
    const head_range heads = kv_.heads(l, c.request);
    const auto n = static_cast<index_t>(c.tokens.size());
    // The engine's own output is right where nothing came before, to the precision of its rows.
    const bool theirs = kv_.head(heads.first).length() == 0 && setup_.storage != storage::f32;
    if (kv_.whole(l)) {
      const auto out = theirs ? std::span<float>() : result;
      c.kind == token_kind::draft ? kv_.draft(heads.first, keys_, values_, queries_, out)
                                  : kv_.append(heads.first, keys_, values_, queries_, out);
      return !theirs;
    }
    if (c.kind == token_kind::draft) {
      meld_->draft(heads, {queries_, keys_, values_}, result, n);
    } else if (!c.prompt || (!c.together && measures_steps_ && decodes_)) {
      for (index_t i = 0; i < n; ++i) {  // all tokens of a micro-batch, layer by layer
        const index_t next = kv_.head(heads.first).next_position();
        meld_->step(heads,
                    {token(queries_, i, n), token(keys_, i, n), token(values_, i, n), {&next, 1}},
                    token(result, i, n));
      }
    } else {
      if (theirs) {
        kv_.append(heads.first, keys_, values_);
      } else {
        meld_->attend(heads, {queries_, keys_, values_}, result, n);
      }
      if (c.together) {
        measure_prompt(l, c);
      }
      return !theirs;
    }
    return true;
  }

  /// Repack: takes in the first tokens of the micro-batch that were not yet.
  void commit(index_t l, index_t tokens) {
    for (auto& taken = kv_.of(l).came.taken; taken < tokens; ++taken) {
      kv_.commit(l, only().cells[static_cast<std::size_t>(taken)]);
    }
  }
  void measure_prompt(index_t l, const chunk& c) {
    meld_->prompt(kv_.heads(l, c.request),
                  queries(queries_, static_cast<index_t>(c.tokens.size()), kv_.of(l).model));
  }
  void keep_queries(const ggml_tensor* q, std::span<const index_t> tokens) {
    const auto dim = static_cast<std::size_t>(q->ne[0]), heads = static_cast<std::size_t>(q->ne[2]);
    queries_.resize(tokens.size() * heads * dim);
    float* to = queries_.data();
    for (const index_t i : tokens) {
      for (index_t h = 0; h < q->ne[2]; ++h, to += dim) {
        std::copy_n(element(q, 0, i, h), dim, to);
      }
    }
  }

  observation_needs needs_;  // of a decode step: it decides which nodes are requested
  bool decodes_, measures_steps_, measures_prompts_;
  std::vector<float> queries_, keys_, values_, result_;  // [tokens, heads, ...] of one layer
  std::vector<float> seen_, log_sum_exp_;                // of a step: [heads, group, stride or 1]
  std::span<chunk> chunks_;                              // of the present micro-batch
  index_t tokens_ = 0;                                   // of all of them
};

}  // namespace kvmeld::llama
