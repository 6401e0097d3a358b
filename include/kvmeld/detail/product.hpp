// SPDX-License-Identifier: MIT
/// Matrices in memory: scratch for them that is allocated once, and their products. There are
/// three, for float and double, and each is compiled once: every further shape of Eigen's
/// expressions would cost the compiler another second. Triangular systems are solved by them.
#pragma once

#include <Eigen/Core>
#include <algorithm>    // std::min, std::max
#include <cmath>        // std::sqrt
#include <concepts>     // std::derived_from
#include <memory>       // std::align
#include <type_traits>  // std::remove_cvref_t
#include <utility>      // std::exchange
#include <vector>

#include "kvmeld/config.hpp"
#include "kvmeld/detail/arithmetic.hpp"

namespace kvmeld::inline v0 {
namespace dense {

/// A matrix or a vector in memory (no expression, which would be computed at every use). Functions
/// over it are templates even where one type would do, and have locals of types that depend on
/// their arguments: a program compiles only those it calls.
template <class M>
concept stored = std::derived_from<M, Eigen::MatrixBase<M>> && requires(const M& m) {
  m.data();
};

/// The same, row by row: elements of a row are neighbours.
template <class M>
concept rowwise = stored<M> &&(M::IsRowMajor != 0) && (M::InnerStrideAtCompileTime == 1);

template <class M>
using scalar_of = typename M::Scalar;
template <class Real>
using matrix_of = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class Real>
using vector_of = Eigen::Matrix<Real, Eigen::Dynamic, 1>;

namespace detail {

template <class Real>
using view = Eigen::Map<const matrix_of<Real>, Eigen::Unaligned, Eigen::OuterStride<>>;
template <class Real>
using target = Eigen::Map<matrix_of<Real>, Eigen::Unaligned, Eigen::OuterStride<>>;

/// `mᵀ`: the same numbers, read column by column.
template <class Real>
auto column_wise(const view<Real>& m) {
  using matrix = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic>;
  return Eigen::Map<const matrix, Eigen::Unaligned, Eigen::OuterStride<>>(
      m.data(), m.cols(), m.rows(), Eigen::OuterStride<>(m.outerStride()));
}

auto view_of(const rowwise auto& m) {
  using real = typename std::remove_cvref_t<decltype(m)>::Scalar;
  return view<real>(m.data(), m.rows(), m.cols(), Eigen::OuterStride<>(m.outerStride()));
}
template <class Out>
requires rowwise<std::remove_cvref_t<Out>>
auto target_of(Out&& m) {
  using real = typename std::remove_cvref_t<Out>::Scalar;
  return target<real>(m.data(), m.rows(), m.cols(), Eigen::OuterStride<>(m.outerStride()));
}

/// Eigen's blocks of a product, in memory of the thread's where these are small: on the stack, as
/// Eigen would have them, they are larger than some threads' stacks.
template <class Real>
class blocks
    : public Eigen::internal::gemm_blocking_space<Eigen::RowMajor, Real, Real, Eigen::Dynamic,
                                                  Eigen::Dynamic, Eigen::Dynamic> {
 public:
  blocks(Eigen::Index rows, Eigen::Index cols, Eigen::Index depth)
      : blocks::gemm_blocking_space(rows, cols, depth, 1, true) {
    constexpr Eigen::Index small = (128 << 10) / sizeof(Real);  // what Eigen has on the stack
    thread_local std::vector<Real, Eigen::aligned_allocator<Real>> memory(2 * small);
    if (this->mc() * this->kc() <= small) {
      this->m_blockA = memory.data();
    }
    if (this->kc() * this->nc() <= small) {
      this->m_blockB = memory.data() + small;
    }
    own_a_ = this->m_blockA == nullptr, own_b_ = this->m_blockB == nullptr;
  }
  blocks(const blocks&) = delete;
  blocks& operator=(const blocks&) = delete;
  ~blocks() {  // what is the thread's is not the base's to free
    this->m_blockA = own_a_ ? this->m_blockA : nullptr;
    this->m_blockB = own_b_ ? this->m_blockB : nullptr;
  }

 private:
  bool own_a_ = false, own_b_ = false;
};

template <class M>
inline constexpr int order_of = M::IsRowMajor ? Eigen::RowMajor : Eigen::ColMajor;

/// `out += scale · m · x`, `step` apart the numbers of `x`. Read row by row, `m` wants 1; column by
/// column, numbers of `out` that are neighbours.
template <class Real, class M>
void add_vector(Real scale, const M& m, const Real* x, Eigen::Index step, Real* out,
                Eigen::Index out_step) {
  using namespace Eigen::internal;
  constexpr int of_x = M::IsRowMajor ? Eigen::ColMajor : Eigen::RowMajor;
  using matrix = const_blas_data_mapper<Real, Eigen::Index, order_of<M>>;
  using vector = const_blas_data_mapper<Real, Eigen::Index, of_x>;
  general_matrix_vector_product<Eigen::Index, Real, matrix, order_of<M>, false, Real, vector,
                                false>::run(m.rows(), m.cols(), matrix(m.data(), m.outerStride()),
                                            vector(x, step), out, out_step, scale);
}

/// `out += scale · a · b`, both in memory. On the calling thread, however the program is compiled:
/// under -fopenmp Eigen's own operator would start threads inside an engine's workers. The bits are
/// those of the operator without OpenMP, whose expressions would cost the compiler more than all
/// kernels.
template <class Real, class A, class B>
void add(Real scale, const A& a, const B& b, target<Real> out) {
  const Eigen::Index rows = out.rows(), cols = out.cols(), depth = a.cols();
  if (rows == 0 || cols == 0 || depth == 0) {  // no memory that a pointer may move in
    return;
  }
  if (depth + rows + cols < EIGEN_GEMM_TO_COEFFBASED_THRESHOLD) {
    out.noalias() += scale * a.lazyProduct(b);
    return;
  }
  const Eigen::Index step_a = A::IsRowMajor ? 1 : a.outerStride(),
                     step_b = B::IsRowMajor ? b.outerStride() : 1;
  if (rows == 1 && (B::IsRowMajor || step_a == 1)) {
    return add_vector(scale, b.transpose(), a.data(), step_a, out.data(), 1);
  }
  if (cols == 1 && (A::IsRowMajor ? step_b == 1 : out.outerStride() == 1)) {
    return add_vector(scale, a, b.data(), step_b, out.data(), out.outerStride());
  }
  blocks<Real> memory(rows, cols, depth);
  Eigen::internal::general_matrix_matrix_product<Eigen::Index, Real, order_of<A>, false, Real,
                                                 order_of<B>, false, Eigen::RowMajor,
                                                 1>::run(rows, cols, depth, a.data(),
                                                         a.outerStride(), b.data(), b.outerStride(),
                                                         out.data(), 1, out.outerStride(), scale,
                                                         memory, nullptr);
}

}  // namespace detail

/// `out [m, n] += scale · a [m, k] · b [k, n]`
template <rowwise A, rowwise B, class Out>
void add_product(scalar_of<A> scale, const A& a, const B& b, Out&& out) {
  detail::add(scale, detail::view_of(a), detail::view_of(b), detail::target_of(out));
}

/// `out [m, n] += scale · a [m, k] · b [n, k]ᵀ`
template <rowwise A, rowwise B, class Out>
void add_product_transposed(scalar_of<A> scale, const A& a, const B& b, Out&& out) {
  detail::add(scale, detail::view_of(a), detail::column_wise(detail::view_of(b)),
              detail::target_of(out));
}

/// `out [m, n] += scale · a [k, m]ᵀ · b [k, n]`
template <rowwise A, rowwise B, class Out>
void add_transposed_product(scalar_of<A> scale, const A& a, const B& b, Out&& out) {
  detail::add(scale, detail::column_wise(detail::view_of(a)), detail::view_of(b),
              detail::target_of(out));
}

/// `scale · a [m, k] · b [n, k]ᵀ` over what `out [m, n]` was: rows against rows.
template <rowwise A, rowwise B, class Out>
void set_product_transposed(scalar_of<A> scale, const A& a, const B& b, Out&& out) {
  out.setZero();
  add_product_transposed(scale, a, b, out);
}

/// The upper triangle of `out [n, n] += xᵀ x`, `x [k, n]`, and some of what is below it.
template <rowwise X, rowwise Out>
void add_gram(const X& x, Out& out) {
  constexpr Eigen::Index strip = 64;
  for (Eigen::Index i = 0; i < x.cols(); i += strip) {
    const Eigen::Index width = std::min(strip, x.cols() - i);
    add_transposed_product(1, x.leftCols(i + width), x.middleCols(i, width),
                           out.block(0, i, i + width, width));
  }
}

/// Rows that are factored or solved together; what is before or after them is one product.
inline constexpr Eigen::Index solved_rows = 32;

/// The upper triangle of a symmetric `m [n, n]` becomes `Lᵀ`, row by row, of `L Lᵀ = m`. What is
/// below the diagonal means nothing here. Where `m` is not positive definite, it ends.
template <rowwise M>
void cholesky(M& m) {
  const Eigen::Index n = m.rows();
  for (Eigen::Index first = 0; first < n; first += solved_rows) {
    const Eigen::Index count = std::min(solved_rows, n - first), width = n - first;
    auto rows = m.block(first, first, count, width);
    const auto above = m.block(0, first, first, width);
    add_transposed_product(-1, above.leftCols(count), above, rows);
    for (Eigen::Index i = 0; i < count; ++i) {
      if (rows(i, i) <= 0) {
        return;
      }
      rows(i, i) = std::sqrt(rows(i, i));
      rows.row(i).tail(width - i - 1) /= rows(i, i);
      for (Eigen::Index j = i + 1; j < count; ++j) {
        rows.row(j).tail(width - j) -= rows(i, j) * rows.row(i).tail(width - j);
      }
    }
  }
}

/// `x [n, columns] ← L⁻¹ x`, or `L⁻ᵀ x`, of what `cholesky` gives.
template <bool Transposed = false, rowwise L, rowwise X>
void solve_lower(const L& upper, X& x) {
  constexpr Eigen::Index wide = 256;  // columns in the nearest cache
  const Eigen::Index n = x.rows(), columns = x.cols(), blocks = (n + solved_rows - 1) / solved_rows;
  for (Eigen::Index b = 0; b < blocks; ++b) {
    const Eigen::Index first = (Transposed ? blocks - 1 - b : b) * solved_rows,
                       count = std::min(solved_rows, n - first), behind = n - first - count;
    if constexpr (Transposed) {
      add_product(-1, upper.block(first, first + count, count, behind), x.bottomRows(behind),
                  x.middleRows(first, count));
    } else {
      add_transposed_product(-1, upper.block(0, first, first, count), x.topRows(first),
                             x.middleRows(first, count));
    }
    for (Eigen::Index column = 0; column < columns; column += wide) {
      auto part = x.block(first, column, count, std::min(wide, columns - column));
      for (Eigen::Index k = 0; k < count; ++k) {
        const Eigen::Index i = Transposed ? count - 1 - k : k;
        for (Eigen::Index j = Transposed ? i + 1 : 0; j < (Transposed ? count : i); ++j) {
          part.row(i) -= upper(first + std::min(i, j), first + std::max(i, j)) * part.row(j);
        }
        part.row(i) /= upper(first + i, first + i);
      }
    }
  }
}

}  // namespace dense
namespace detail {

/// Hands out parts of `floats`, which grows to `size` at its first use only. What was handed out by
/// another arena on the same floats is overwritten. Every part begins at a multiple of
/// `vector_bytes`: the same inputs must give the same bytes wherever the block lies.
class arena {
 public:
  arena(std::vector<float>& floats, std::size_t size) {
    const std::size_t needed = size + (max_parts + 1) * line;
    floats.resize(std::max(floats.size(), needed));
    void* begin = floats.data();
    std::size_t room = floats.size() * sizeof(float);
    next_ =
        static_cast<float*>(std::align(line * sizeof(float), size * sizeof(float), begin, room));
  }
  Eigen::Map<Eigen::VectorXf> column(index_t n) { return {take(n), n}; }
  Eigen::Map<dense::matrix_of<float>> rows(index_t n, index_t dim) {
    return {take(std::ptrdiff_t{n} * dim), n, dim};
  }

 private:
  static constexpr std::size_t line = vector_bytes / sizeof(float), max_parts = 16;

  float* take(std::ptrdiff_t n) {
    constexpr std::ptrdiff_t whole = line;
    return std::exchange(next_, next_ + (n + whole - 1) / whole * whole);
  }
  float* next_;
};

}  // namespace detail
}  // namespace kvmeld::inline v0
