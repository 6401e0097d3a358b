/// Products of matrices in memory. There are three, for float and double, and each is compiled
/// once: every further shape of Eigen's expressions would cost the compiler another second.
#pragma once

#include <Eigen/Core>
#include <concepts>     // std::derived_from
#include <type_traits>  // std::remove_cvref_t

namespace kvmeld {
inline namespace v0 {
namespace dense {

/// A matrix or a vector in memory (no expression, which would be computed at every use). Functions
/// over it are templates even where one type would do: a program compiles only those it calls.
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

namespace detail {

template <class Real>
using view = Eigen::Map<const matrix_of<Real>, Eigen::Unaligned, Eigen::OuterStride<>>;
template <class Real>
using target = Eigen::Map<matrix_of<Real>, Eigen::Unaligned, Eigen::OuterStride<>>;

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

template <class Real>
void add_ab(Real scale, const view<Real>& a, const view<Real>& b, target<Real> out) {
  out.noalias() += (scale * a) * b;
}
template <class Real>
void add_abt(Real scale, const view<Real>& a, const view<Real>& b, target<Real> out) {
  out.noalias() += (scale * a) * b.transpose();
}
template <class Real>
void add_atb(Real scale, const view<Real>& a, const view<Real>& b, target<Real> out) {
  out.noalias() += (scale * a.transpose()) * b;
}

}  // namespace detail

/// `out [m, n] += scale · a [m, k] · b [k, n]`
template <rowwise A, rowwise B, class Out>
void add_product(scalar_of<A> scale, const A& a, const B& b, Out&& out) {
  detail::add_ab(scale, detail::view_of(a), detail::view_of(b), detail::target_of(out));
}

/// `out [m, n] += scale · a [m, k] · b [n, k]ᵀ`
template <rowwise A, rowwise B, class Out>
void add_product_transposed(scalar_of<A> scale, const A& a, const B& b, Out&& out) {
  detail::add_abt(scale, detail::view_of(a), detail::view_of(b), detail::target_of(out));
}

/// `out [m, n] += scale · a [k, m]ᵀ · b [k, n]`
template <rowwise A, rowwise B, class Out>
void add_transposed_product(scalar_of<A> scale, const A& a, const B& b, Out&& out) {
  detail::add_atb(scale, detail::view_of(a), detail::view_of(b), detail::target_of(out));
}

/// `scale · a [m, k] · b [n, k]ᵀ` over what `out [m, n]` was: rows against rows.
template <rowwise A, rowwise B, class Out>
void set_product_transposed(scalar_of<A> scale, const A& a, const B& b, Out&& out) {
  out.setZero();
  add_product_transposed(scale, a, b, out);
}

}  // namespace dense
}  // namespace v0
}  // namespace kvmeld
