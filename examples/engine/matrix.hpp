// SPDX-License-Identifier: MIT
/// The matrices of the engine: activations and weights are float, row-major, one token a row.
#pragma once

#include <Eigen/Core>

#include "kvmeld/config.hpp"

namespace engine {

using kvmeld::expects;
using kvmeld::index_t;

using row_major_matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using row_vector = Eigen::RowVectorXf;

/// A matrix or rows and columns of one, read without a copy.
using matrix_view = Eigen::Ref<const row_major_matrix>;

}  // namespace engine
