/// Ridge: corrections of values by which rows come closer to the outputs that are wanted. In
/// double, as on the CPU.
#pragma once

#include "kvfold/cuda/search/clusters.cuh"

namespace kvfold::cuda::detail {

/// The heads that a call runs, of which those with `rows[h]` below 0 stay as they are.
struct planned_heads {
  const index_t* rows;  // [heads]
  active_heads active;

  KVFOLD_DEVICE index_t head() const { return active.head(); }
};

/// A matrix of every head: element `i, k` of head `h` at `data[h · head + i · row + k · column]`.
template <class T>
struct matrices {
  T* data;
  std::ptrdiff_t head, row, column;

  KVFOLD_DEVICE T& operator()(index_t h, index_t i, index_t k) const {
    return data[h * head + i * row + k * column];
  }
};

/// `out(i, j) = Σ_k a(i, k) b(j, k)`, 32 × 32 a block, summed in double in the order of k.
template <class A, class B, class Out>
struct products_of {
  static constexpr index_t threads = 256;
  static constexpr index_t side = 32;
  struct shared_memory {
    shared_array<double, side*(side + 1)> a, b;
  };

  planned_heads planned;
  matrices<A> a;
  matrices<B> b;
  matrices<Out> out;
  index_t rows, columns, depth;

  /// Grid: heads, tiles of rows, tiles of columns.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = planned.head();
    if (planned.rows[h] < 0) {
      return;
    }
    const index_t i0 = static_cast<index_t>(block_index().y) * side;
    const index_t j0 = static_cast<index_t>(block_index().z) * side;
    constexpr index_t own = side * side / threads;
    double sum[own] = {};
    for (index_t k0 = 0; k0 < depth; k0 += side) {
      sync_block();  // the last tiles are used up
      for (index_t e = thread_index(); e < side * side; e += threads) {
        const index_t x = e % side, k = e / side;  // one of the two is contiguous
        const bool is = k0 + k < depth;
        shared.a[k * (side + 1) + x] =
            is && i0 + x < rows ? static_cast<double>(a(h, i0 + x, k0 + k)) : 0.0;
        shared.b[k * (side + 1) + x] =
            is && j0 + x < columns ? static_cast<double>(b(h, j0 + x, k0 + k)) : 0.0;
      }
      sync_block();
      for (index_t k = 0; k < side; ++k) {
        const double right = shared.b[k * (side + 1) + lane()];
        KVFOLD_UNROLL
        for (index_t u = 0; u < own; ++u) {
          sum[u] += shared.a[k * (side + 1) + warp() * own + u] * right;
        }
      }
    }
    KVFOLD_UNROLL
    for (index_t u = 0; u < own; ++u) {
      const index_t i = i0 + warp() * own + u, j = j0 + lane();
      if (i < rows && j < columns) {
        out(h, i, j) = static_cast<Out>(sum[u]);
      }
    }
  }
};

template <class A, class B, class Out>
products_of<A, B, Out> products_by(const planned_heads& planned, const matrices<A>& a,
                                   const matrices<B>& b, const matrices<Out>& out, index_t rows,
                                   index_t columns, index_t depth) {
  return {planned, a, b, out, rows, columns, depth};
}

/// `out(i, j) = a(i, j)`.
template <class A, class Out>
struct copy_of {
  static constexpr index_t threads = 512;
  struct shared_memory {};

  planned_heads planned;
  matrices<A> a;
  matrices<Out> out;
  index_t rows, columns;

  /// Grid: heads.
  KVFOLD_DEVICE void operator()(shared_memory&) const {
    const index_t h = planned.head();
    for (index_t e = thread_index(); planned.rows[h] >= 0 && e < rows * columns; e += threads) {
      out(h, e / columns, e % columns) = static_cast<Out>(a(h, e / columns, e % columns));
    }
  }
};

template <class A, class Out>
copy_of<A, Out> copies_by(const planned_heads& planned, const matrices<A>& a,
                          const matrices<Out>& out, index_t rows, index_t columns) {
  return {planned, a, out, rows, columns};
}

/// Solves `(G + λ I) X = B` for `G [size, size]` symmetric and positive, `λ` `ridge` times its
/// largest eigenvalue (0: X = 0): power iteration, Cholesky, two substitutions. A block a head.
/// `gram` and `x [size, columns]` are overwritten.
struct solve_ridge {
  static constexpr index_t threads = 512;
  struct shared_memory {
    of_warps<double, threads> sum;
    shared_array<double, 1> pivot;
  };

  planned_heads planned;
  double* gram;    // [heads, size, size]
  double* x;       // [heads, size, columns], B before
  double* vector;  // [heads, 2, size] scratch
  index_t size, columns;
  double ridge;

  /// Grid: heads.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = planned.head();
    if (planned.rows[h] < 0) {
      return;
    }
    double* const a = gram + std::ptrdiff_t{h} * size * size;
    double* const b = x + std::ptrdiff_t{h} * size * columns;
    const double lambda = ridge * largest(shared, a, vector + std::ptrdiff_t{h} * 2 * size);
    if (lambda == 0) {
      for (index_t e = thread_index(); e < size * columns; e += threads) {
        b[e] = 0;
      }
      return;
    }
    for (index_t i = thread_index(); i < size; i += threads) {
      a[std::ptrdiff_t{i} * size + i] += lambda;
    }
    sync_block();
    factor(shared, a);
    substitute(a, b);
  }

 private:
  /// `kvfold::largest_eigenvalue`
  KVFOLD_DEVICE double largest(shared_memory& shared, const double* a, double* vectors) const {
    double* now = vectors;
    double* next = vectors + size;
    for (index_t i = thread_index(); i < size; i += threads) {
      now[i] = 1;
    }
    double eigenvalue = 0;
    for (index_t round = 0; round <= 1000; ++round) {  // the first makes a start of ones
      sync_block();
      double square = 0;
      for (index_t i = warp(); i < size; i += threads / 32) {
        double y = 0;
        for (index_t j = lane(); j < size; j += 32) {
          y += a[std::ptrdiff_t{i} * size + j] * now[j];
        }
        y = reduce_sum(y);
        if (lane() == 0) {
          next[i] = y;
          square += y * y;
        }
      }
      const double norm = square_root(block_sum(shared.sum, square));
      if (norm == 0) {
        return 0;
      }
      for (index_t i = thread_index(); i < size; i += threads) {
        next[i] /= norm;
      }
      const double change = norm > eigenvalue ? norm - eigenvalue : eigenvalue - norm;
      if (round > 0 && change <= 1e-9 * norm) {
        return norm;
      }
      eigenvalue = round > 0 ? norm : 0;
      double* const old = now;
      now = next, next = old;
    }
    return eigenvalue;
  }

  /// `L Lᵀ = a`, column by column in the lower triangle (element `i, j` at `a[j · size + i]`), the
  /// diagonal inverted.
  KVFOLD_DEVICE void factor(shared_memory& shared, double* a) const {
    const auto at = [&](index_t i, index_t j) -> double& {
      return a[std::ptrdiff_t{j} * size + i];
    };
    for (index_t j = 0; j < size; ++j) {
      for (index_t i = j + thread_index(); i < size; i += threads) {
        double y = at(i, j);
        for (index_t k = 0; k < j; ++k) {
          y -= at(i, k) * at(j, k);
        }
        at(i, j) = y;
        if (i == j) {
          shared.pivot[0] = 1.0 / square_root(y);
        }
      }
      sync_block();
      const double inverse = shared.pivot[0];
      for (index_t i = j + thread_index(); i < size; i += threads) {
        at(i, j) = i == j ? inverse : at(i, j) * inverse;
      }
      sync_block();
    }
  }

  /// A thread a column of `b`.
  KVFOLD_DEVICE void substitute(const double* a, double* b) const {
    for (index_t c = thread_index(); c < columns; c += threads) {
      const auto at = [&](index_t i) -> double& { return b[std::ptrdiff_t{i} * columns + c]; };
      for (index_t i = 0; i < size; ++i) {
        double y = at(i);
        for (index_t k = 0; k < i; ++k) {
          y -= a[std::ptrdiff_t{k} * size + i] * at(k);
        }
        at(i) = y * a[std::ptrdiff_t{i} * size + i];
      }
      for (index_t i = size - 1; i >= 0; --i) {
        double y = at(i);
        for (index_t k = i + 1; k < size; ++k) {
          y -= a[std::ptrdiff_t{i} * size + k] * at(k);
        }
        at(i) = y * a[std::ptrdiff_t{i} * size + i];
      }
    }
  }
};

/// Rows that are one pinned slot keep their values: their corrections become 0.
template <class Scalar>
struct spare_pinned {
  static constexpr index_t threads = 256;
  struct shared_memory {};

  cache_view<Scalar> cache;
  plan_view plan;
  const index_t* into;  // [heads, capacity] of the partition
  float* correction;    // [heads, capacity, dim]

  /// Grid: heads, any number of blocks that share the rows.
  KVFOLD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    const index_t* const begin = plan.begin + cache.bound(h, 0);
    each_by_warp<threads>(plan.rows[h], [&](index_t r) {
      const index_t anchor = plan.sources[cache.slot(h, begin[r])].source;
      for (index_t i = lane(); i < cache.dim; i += 32) {
        if ((into[cache.slot(h, anchor)] & keep_evict_partition::fresh) == 0) {
          correction[cache.slot(h, r) * cache.dim + i] = 0;
        }
      }
    });
  }
};

}  // namespace kvfold::cuda::detail
