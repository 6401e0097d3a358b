// SPDX-License-Identifier: MIT
/// The matrices of the engine: activations and weights are float, row-major, one token a row.
#pragma once

#include <Eigen/Core>
#include <iterator>  // std::size

#include "kvmeld/config.hpp"

namespace engine {

using kvmeld::as_size;
using kvmeld::expects;
using kvmeld::index_t;

using row_major_matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using row_vector = Eigen::RowVectorXf;

/// A matrix or rows and columns of one, read without a copy.
using matrix_view = Eigen::Ref<const row_major_matrix>;

/// Eigen's counts as containers take them, and a container's as the library takes it.
constexpr std::size_t as_size(Eigen::Index n) { return static_cast<std::size_t>(n); }
constexpr index_t count_of(const auto& container) {
  return static_cast<index_t>(std::size(container));
}

}  // namespace engine
