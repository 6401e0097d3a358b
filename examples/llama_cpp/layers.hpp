// SPDX-License-Identifier: MIT
/// All layers of a model: what becomes of a micro-batch's attention.
///
/// A micro-batch's tokens are appended and attended one after another, as `kvmeld::step` does; at
/// its end every head that has reached its trigger returns to its target. A micro-batch of several
/// tokens whose policy plans on queries is a prompt: it is measured on its own queries.
#pragma once

#include <limits>  // std::numeric_limits
#include <span>
#include <vector>

#include "llama_cpp/cells.hpp"
#include "llama_cpp/needs.hpp"
#include "llama_cpp/setup.hpp"

namespace kvmeld::llama {

template <policy P>
class layers {
 public:
  layers(const layers_setup& setup, const P& p)
      : setup_(setup), policy_(p), needs_(traits::observation_needs_of(p)) {
    const auto heads = static_cast<std::size_t>(setup.shape.heads);
    index_t most = 0;
    for (std::size_t l = 0; l < static_cast<std::size_t>(setup.layers); ++l) {
      const auto of = [&](const auto& list) { return std::span(list).subspan(l * heads, heads); };
      layers_.emplace_back(p, setup.shape, setup.storage, std::span<const budget>(of(setup.limits)),
                           std::span<const index_t>(of(setup.capacities)),
                           setup.how == mode::own_attention);
      layers_.back().whole = setup.whole[l] != 0 || !traits::bounded(p);
      most = std::max(most, std::ranges::max(of(setup.capacities)));
    }
    work_.reserve(setup.shape.group, setup.shape.dim, most);
    query_.resize(static_cast<std::size_t>(setup.shape.group * setup.shape.dim));
  }

  index_t count() const { return static_cast<index_t>(layers_.size()); }
  layer& operator[](index_t l) { return layers_[static_cast<std::size_t>(l)]; }
  const P& rules() const { return policy_; }
  const times& spent() const { return times_; }

  /// A micro-batch begins, whose tokens the engine has in `cells`.
  void begin(std::span<const index_t> cells) {
    chunk_ = cells;
    prompt_ = cells.size() > 1 && traits::plans_on_queries(policy_);
    for (auto& l : layers_) {
      l.taken = 0;
      l.came = {};
    }
  }
  bool wants_probabilities(index_t l) {
    return !(*this)[l].whole && !prompt_ && needs_.probabilities;
  }
  bool wants_queries(index_t l) { return !(*this)[l].whole && (prompt_ || needs_.query); }
  bool wants_logits(index_t l) { return wants_queries(l) || (*this)[l].edited; }

  /// Repack: `kq [cells, tokens, heads · group]` before scale and mask, made of `q = src[1]`.
  /// `entries`: the cells that are in use, without the micro-batch's.
  void logits(index_t l, ggml_tensor* kq, std::span<const index_t> entries) {
    const stopwatch timed(times_.logits);
    auto& of = (*this)[l];
    of.came.queries = true;
    if (wants_queries(l)) {
      keep_queries(of, kq->src[1]);
    }
    if (!of.edited) {
      return;
    }
    const index_t group = setup_.shape.group, tokens = static_cast<index_t>(chunk_.size());
    for (index_t h = 0; h < of.heads(); ++h) {
      const auto head = of.head(h);
      const auto each = [&](index_t cell, auto edit) {
        for (index_t g = h * group; g < (h + 1) * group; ++g) {
          for (index_t i = 0; i < tokens; ++i) {
            float& x = *element(kq, cell, i, g);
            x = edit(x);
          }
        }
      };
      with_mass(policy_, head, of.at(h).state, [&](const auto& mass, bool own) {
        for (index_t s = 0; s < head.length(); ++s) {
          if (own || head.log_mass(s) != 0) {
            each(head.cell(s), [&](float dot) { return mass(s, dot) / head.scale(); });
          }
        }
      });
      if (static_cast<std::size_t>(head.length()) < entries.size()) {  // cells of longer heads
        held_.assign(static_cast<std::size_t>(kq->ne[0]), 0);
        for (const index_t cell : of.at(h).cells) {
          held_[static_cast<std::size_t>(cell)] = 1;
        }
        for (const index_t cell : entries) {
          if (held_[static_cast<std::size_t>(cell)] == 0) {
            each(cell, [](float) { return -std::numeric_limits<float>::infinity(); });
          }
        }
      }
    }
  }

  /// Repack: `p [cells, tokens, heads · group]`, the softmax of it.
  void probabilities(index_t l, const ggml_tensor* p) {
    const stopwatch timed(times_.observe);
    auto& of = (*this)[l];
    for (; of.taken < static_cast<index_t>(chunk_.size()); ++of.taken) {
      for (index_t h = 0; h < of.heads(); ++h) {
        of.commit(h, chunk_[static_cast<std::size_t>(of.taken)]);
        const auto head = of.head(h);
        const auto seen = probabilities_of(head);
        auto out = seen.begin();
        for (index_t g = h * head.group(); g < (h + 1) * head.group(); ++g) {
          for (index_t s = 0; s < head.length(); ++s) {
            *out++ = *element(p, head.cell(s), of.taken, g);
          }
        }
        const float* const q = needs_.query ? query_of(of, of.taken, h) : nullptr;
        const auto lse =
            std::span(work_.log_sum_exp)
                .first(needs_.log_sum_exp ? static_cast<std::size_t>(head.group()) : 0);
        if (needs_.log_sum_exp) {
          log_sum_exp_of(policy_, head, of.at(h).state, seen, q, lse);
        }
        observe_step(of, h, seen, lse, q);
      }
    }
  }

  /// Own attention: fills in `out [dim, heads · group, tokens]`, made of `q = src[0]`.
  void attend(index_t l, ggml_tensor* out) {
    const stopwatch timed(times_.attend);
    auto& of = (*this)[l];
    of.came.queries = true;
    const ggml_tensor* const q = out->src[0];
    if (wants_queries(l)) {
      keep_queries(of, q);
    }
    const index_t group = setup_.shape.group, dim = setup_.shape.dim;
    const bool measured = !of.whole && !prompt_ && traits::measures(policy_);
    // The engine's own output is right where nothing came before, to the precision of its rows.
    const bool theirs = !measured && of.head(0).length() == 0 && setup_.storage != storage::f32 &&
                        !has_mass(policy_);
    for (; of.taken < static_cast<index_t>(chunk_.size()); ++of.taken) {
      for (index_t h = 0; h < of.heads(); ++h) {
        of.commit(h, chunk_[static_cast<std::size_t>(of.taken)]);
        if (theirs) {
          continue;
        }
        const auto head = of.head(h);
        for (index_t g = 0; g < group; ++g) {
          std::copy_n(element(q, 0, of.taken, h * group + g), dim, query_.data() + g * dim);
        }
        const auto seen =
            measured && needs_.probabilities ? probabilities_of(head) : std::span<float>();
        const auto lse =
            std::span(work_.log_sum_exp)
                .first(seen.empty() ? 0U : query_.size() / static_cast<std::size_t>(dim));
        traits::attend(policy_, head, of.at(h).state, query_.data(),
                       element(out, 0, h * group, of.taken), seen, lse);
        if (measured) {
          observe_step(of, h, seen, lse, query_.data());
        }
      }
    }
  }

  /// The micro-batch is over: heads return to their budgets. Slots of the longest head.
  index_t end() {
    const stopwatch timed(times_.compress);
    index_t longest = 0;
    for (index_t l = 0; l < count(); ++l) {
      (*this)[l].expect_complete(l, static_cast<index_t>(chunk_.size()),
                                 setup_.how == mode::own_attention || wants_probabilities(l),
                                 wants_logits(l));
    }
    for (auto& of : layers_) {
      for (; of.taken < static_cast<index_t>(chunk_.size()); ++of.taken) {
        for (index_t h = 0; h < of.heads(); ++h) {
          of.commit(h, chunk_[static_cast<std::size_t>(of.taken)]);
          if (!of.whole && !prompt_ && traits::measures(policy_)) {
            observe_step(of, h, no_floats, no_floats, query_of(of, of.taken, h));
          }
        }
      }
      if (!of.whole) {
        compress(of);
      }
      for (index_t h = 0; h < of.heads(); ++h) {
        longest = std::max(longest, of.head(h).length());
      }
    }
    for (auto& of : layers_) {
      of.edited = setup_.how == mode::repack && (has_mass(policy_) || of.uneven(longest));
    }
    return longest;
  }

  /// Repack: from now on slot `s` of every head lies in `cells[s]`. Cells that are kept keep their
  /// order, so that no row is overwritten before it is read.
  void move_to(std::span<const index_t> cells) {
    for (auto& of : layers_) {
      for (index_t h = 0; h < of.heads(); ++h) {
        const auto head = of.head(h);
        auto& at = of.at(h).cells;
        at.resize(static_cast<std::size_t>(head.length()));
        for (std::size_t s = 0; s < at.size(); ++s) {
          if (at[s] != cells[s]) {
            kvmeld::detail::copy_row(head.key_in(cells[s]), head.key_in(at[s]), head.dim());
            kvmeld::detail::copy_row(head.value_in(cells[s]), head.value_in(at[s]), head.dim());
            at[s] = cells[s];
          }
        }
      }
    }
  }

 private:
  static constexpr std::span<float> no_floats = {};

  void keep_queries(layer& of, const ggml_tensor* q) {
    const auto dim = static_cast<std::size_t>(q->ne[0]), heads = static_cast<std::size_t>(q->ne[2]);
    of.queries.resize(chunk_.size() * heads * dim);
    float* to = of.queries.data();
    for (index_t i = 0; i < static_cast<index_t>(chunk_.size()); ++i) {
      for (index_t h = 0; h < q->ne[2]; ++h, to += dim) {
        std::copy_n(element(q, 0, i, h), dim, to);
      }
    }
  }
  /// `[group, dim]` of token `i`; null where none were kept.
  const float* query_of(const layer& of, index_t i, index_t h) const {
    const index_t width = setup_.shape.group * setup_.shape.dim;
    return needs_.query
               ? of.queries.data() + (std::ptrdiff_t{i} * of.heads() + h) * std::ptrdiff_t{width}
               : nullptr;
  }
  std::span<float> probabilities_of(const cell_head& head) {
    return std::span(work_.attention)
        .first(static_cast<std::size_t>(head.group()) * static_cast<std::size_t>(head.length()));
  }

  void observe_step(layer& of, index_t h, std::span<const float> p,
                    std::span<const float> log_sum_exp, const float* q) {
    auto& state = of.at(h).state;
    const observation observed{.probabilities = p, .log_sum_exp = log_sum_exp, .query = q};
    if (needs_.probabilities) {
      observe(policy_, of.head(h), state, work_, observed);
    } else {  // of queries alone
      state.count_queries(1);
      traits::observe(policy_, of.head(h), state, observed);
    }
  }

  void compress(layer& of) {
    const auto own = prompt_queries(of.queries.data(), static_cast<index_t>(chunk_.size()),
                                    of.heads(), setup_.shape.group, setup_.shape.dim);
    const auto chosen = prompt_ ? reference_of(policy_, of, own) : std::nullopt;
    const auto queries = chosen ? chosen->view() : own;
    for (index_t h = 0; h < of.heads(); ++h) {
      const auto head = of.head(h);
      auto& [records, state, limit, cells, rows] = of.at(h);
      if (prompt_) {
        observe(policy_, head, state, queries.of(h));
      }
      if (limit.reached(head.length()) && (prompt_ || traits::decodes(policy_))) {
        const auto one = !prompt_ && head.length() == limit.slots + 1
                             ? traits::choose_victim(policy_, head, state, limit.slots)
                             : std::nullopt;
        if (one) {
          apply(policy_, *one, head, state, work_.scratch);
        } else {
          plan(policy_, head, state, prompt_ ? queries.of(h) : no_queries, limit.slots,
               work_.scratch, work_.plan);
          apply(policy_, work_.plan, head, state, work_.scratch);
        }
      }
      cells.resize(std::min(cells.size(), static_cast<std::size_t>(head.length())));
      if (head.length() <= limit.slots) {
        traits::after_compress(policy_, head, state, limit.slots);
      }
    }
  }

  layers_setup setup_;
  P policy_;
  observation_needs needs_;  // of a decode step: it decides which nodes are requested
  std::vector<layer> layers_;
  workspace work_;
  std::vector<float> query_;  // [group, dim]
  std::vector<char> held_;    // [cells]
  std::span<const index_t> chunk_;
  bool prompt_ = false;
  times times_;
};

}  // namespace kvmeld::llama
