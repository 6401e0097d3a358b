/// What `fold` remembers of a head: the last few hundred steps' queries, and the moments of all
/// un-rotated keys.
#pragma once

#include <bit>  // std::bit_cast
#include <span>

#include "kvfold/leverage.hpp"

namespace kvfold {

/// Floats that `fold_memory` takes, for so many queries per query head.
inline std::size_t fold_memory_size(index_t queries, index_t group, index_t dim) {
  const auto w = static_cast<std::size_t>(queries), d = static_cast<std::size_t>(dim);
  return 6 + w * (static_cast<std::size_t>(group) * d + 1) + d + d * d;
}

/// A view of the flat floats in `head_state::memory`; read only when they are const.
template <class Float>
class fold_memory {
  template <class M>
  using as_const = Eigen::Map<std::conditional_t<std::is_const_v<Float>, const M, M>>;

 public:
  fold_memory(std::span<Float> floats, index_t queries, index_t group, index_t dim)
      : floats_(floats), most_(queries), group_(group), dim_(dim) {}

  /// Queries held per query head.
  index_t count() const { return get(held); }
  /// Query `i` of group member `g` `[dim]`, the oldest first.
  const float* query(index_t g, index_t i) const { return at(g, slot_of(i)); }
  index_t position(index_t i) const { return get(header + static_cast<std::size_t>(slot_of(i))); }

  /// A step's query `[group, dim]`. Every `stride`-th is held, and always the newest.
  void remember(const float* q, index_t position, index_t stride) {
    const index_t slot = get(next);
    std::copy_n(q, std::ptrdiff_t{group_} * dim_, at(0, slot));
    set(header + static_cast<std::size_t>(slot), position);
    set(held, std::max(get(held), slot + 1));
    const index_t step = get(steps);
    set(newest, slot);
    set(next, step % stride == 0 ? (slot + 1) % most_ : slot);
    set(steps, (step + 1) % stride);
  }

  /// Reference queries: as many as there is room for, evenly spread. `seen`: tokens so far.
  template <class T>
  void remember(const query_view<T>& reference, index_t seen) {
    const index_t n = std::min(most_, reference.count);
    for (index_t i = 0; i < n; ++i) {
      const auto from = static_cast<index_t>(std::int64_t{i} * reference.count / n);
      set(header + static_cast<std::size_t>(i), reference.position_of(from, seen));
      for (index_t g = 0; g < group_; ++g) {
        const T* q = reference.at(g, from);
        std::transform(q, q + dim_, at(g, i), [](T x) { return static_cast<float>(x); });
      }
    }
    set(held, n), set(newest, n - 1), set(next, n % most_), set(steps, 0);
  }

  /// Takes the keys of the tokens that came since the last call into the moments: running means, so
  /// that they stay exact enough in float however many come.
  void count_keys(const kv_head auto& head, const rope& rope) {
    if (get(counted) >= head.seen()) {
      return;
    }
    float x[max_dim];
    auto m = moments();
    for (index_t s = 0; s < head.length(); ++s) {
      if (head.position(s) < get(counted)) {
        continue;
      }
      for (index_t i = 0; i < dim_; ++i) {
        x[i] = static_cast<float>(head.key(s)[i]);
      }
      rope.rotate(row<float>{x}, dim_, -head.position(s));
      const Eigen::Map<const dense::vector> key(x, dim_);
      const auto n = static_cast<float>(std::min(get(keys) + 1, index_t{1} << 24));
      m.mean += (key - m.mean) / n;
      for (index_t i = 0; i < dim_; ++i) {  // not the whole product: it would be allocated
        m.second.row(i) += (key[i] * key.transpose() - m.second.row(i)) / n;
      }
      set(keys, static_cast<index_t>(n));
    }
    set(counted, head.seen());
  }

  /// Of all un-rotated keys so far: `mean [dim]`, `second [dim, dim]` (E[x xᵀ]).
  struct moments_view {
    as_const<dense::vector> mean;
    as_const<dense::matrix> second;
  };
  moments_view moments() const {
    Float* m = floats_.data() + header +
               static_cast<std::size_t>(most_) *
                   (1 + static_cast<std::size_t>(group_) * static_cast<std::size_t>(dim_));
    return {{m, dim_}, {m + dim_, dim_, dim_}};
  }

 private:
  enum field : std::size_t { counted, keys, held, newest, next, steps, header };
  static constexpr index_t max_dim = 4096;

  index_t get(std::size_t i) const { return std::bit_cast<index_t>(floats_[i]); }
  void set(std::size_t i, index_t x) { floats_[i] = std::bit_cast<float>(x); }
  index_t slot_of(index_t i) const { return get(held) < most_ ? i : (get(newest) + 1 + i) % most_; }
  Float* at(index_t g, index_t slot) const {
    return floats_.data() + header + static_cast<std::size_t>(most_) +
           (static_cast<std::size_t>(slot) * static_cast<std::size_t>(group_) +
            static_cast<std::size_t>(g)) *
               static_cast<std::size_t>(dim_);
  }

  std::span<Float> floats_;
  index_t most_, group_, dim_;
};

}  // namespace kvfold
