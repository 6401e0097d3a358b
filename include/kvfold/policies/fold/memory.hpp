/// What `fold` remembers of a head: the last few hundred steps' queries, and the moments of all
/// un-rotated keys.
#pragma once

#include <bit>  // std::bit_cast
#include <span>

#include "kvfold/memory/head_state.hpp"
#include "kvfold/policies/fold/layout.hpp"
#include "kvfold/score/key_moments.hpp"
#include "kvfold/score/queries.hpp"

namespace kvfold {
inline namespace v0 {
namespace detail {

/// Floats that `fold_memory` takes, for so many queries per query head.
inline std::size_t fold_memory_size(index_t queries, index_t group, index_t dim) {
  const auto w = static_cast<std::size_t>(queries), d = static_cast<std::size_t>(dim);
  return fold_layout::header + w * (static_cast<std::size_t>(group) * d + 1) +
         score::key_moments::floats(dim);
}

/// A view of the flat floats in `head_state::memory`; read only when they are const.
template <class Float>
class fold_memory {
 public:
  fold_memory(std::span<Float> floats, index_t queries, index_t group, index_t dim)
      : floats_(floats), layout_{queries, group, dim} {}

  /// The positions of the prompts that have been scored, from the first one's queries on.
  struct positions {
    index_t begin, end;

    index_t count() const { return end - begin; }
    bool has(index_t position) const { return begin <= position && position < end; }
  };
  positions scored() const { return {get(prompt_begin), get(prompt_end)}; }
  void set_scored(const positions& p) { set(prompt_begin, p.begin), set(prompt_end, p.end); }

  /// Queries held per query head.
  index_t count() const { return get(held); }
  /// Query `i` of group member `g` `[dim]`, the oldest first.
  const float* query(index_t g, index_t i) const { return at(g, slot_of(i)); }
  index_t position(index_t i) const { return get(header + static_cast<std::size_t>(slot_of(i))); }

  /// A step's query `[group, dim]`. Every `stride`-th is held, and always the newest.
  void remember(const float* q, index_t position, index_t stride) {
    const index_t slot = get(next);
    std::copy_n(q, std::ptrdiff_t{layout_.group} * layout_.dim, at(0, slot));
    set(header + static_cast<std::size_t>(slot), position);
    set(held, std::max(get(held), slot + 1));
    const index_t step = get(steps);
    set(newest, slot);
    set(next, layout_.next_slot(slot, step, stride));
    set(steps, (step + 1) % stride);
  }

  /// Reference queries: as many as there is room for, evenly spread. `seen`: tokens so far.
  template <class T>
  void remember(const query_view<T>& reference, index_t tokens_total) {
    const index_t n = std::min(layout_.queries, reference.count);
    for (index_t i = 0; i < n; ++i) {
      const auto from = static_cast<index_t>(std::int64_t{i} * reference.count / n);
      set(header + static_cast<std::size_t>(i), reference.position_of(from, tokens_total));
      for (index_t g = 0; g < layout_.group; ++g) {
        const T* q = reference.at(g, from);
        std::transform(q, q + layout_.dim, at(g, i), [](T x) { return static_cast<float>(x); });
      }
    }
    set(held, n), set(newest, n - 1), set(next, n % layout_.queries), set(steps, 0);
  }

  /// Takes the keys of the tokens that came since the last call into the moments. Called before
  /// slots are merged: until then they are all there to be read.
  void count_keys(const kv_head auto& head, const rope& rope) {
    set(keys, score::key_moments(moments(), layout_.dim).add(head, rope, get(counted), get(keys)));
    set(counted, head.tokens_total());
  }
  /// The moments as they would be then, in `to [score::key_moments::floats(dim)]`.
  score::key_moments counting_keys(const kv_head auto& head, const rope& rope, float* to) const {
    std::copy_n(moments(), score::key_moments::floats(layout_.dim), to);
    const score::key_moments now(to, layout_.dim);
    now.add(head, rope, get(counted), get(keys));
    return now;
  }

 private:
  using enum fold_layout::field;
  index_t get(std::size_t i) const { return std::bit_cast<index_t>(floats_[i]); }
  void set(std::size_t i, index_t x) { floats_[i] = std::bit_cast<float>(x); }
  index_t slot_of(index_t i) const { return layout_.slot_of(i, get(held), get(newest)); }
  Float* moments() const { return floats_.data() + layout_.moments(); }
  Float* at(index_t g, index_t slot) const { return floats_.data() + layout_.query(g, slot); }

  std::span<Float> floats_;
  fold_layout layout_;
};

}  // namespace detail
}  // namespace v0
}  // namespace kvfold
