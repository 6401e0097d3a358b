// SPDX-License-Identifier: MIT
/// PyTorch's tensors as the operators take them, and what is refused before anything is written.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>

#include "operators.hpp"

namespace kvmeld_torch {

/// Where in the list `cache` which tensor is; in pages the ninth is their table. The last four are
/// there where rows are in few bits.
enum class part {
  keys,
  values,
  log_mass,
  position,
  length,
  seen,
  columns,
  memory,
  measured,
  newest_keys,
  newest_values,
  key_mean,
  rounded
};
inline constexpr std::size_t parts = 9, parts_in_few_bits = 13;

/// What is not in the tensors: the model's.
struct model_shape {
  std::int64_t group = 1;
  double scale = 0;                      ///< 0: 1/sqrt(dim)
  std::optional<at::Tensor> terms = {};  ///< as `read_terms` takes them, doubles on the CPU
};

/// Refused: another number of tensors, dtype, device, rank, size or strides than `Heads` has.
cache_tensors tensors_of(at::TensorList cache, const model_shape& model, at::Device device);
/// ... on the CPU, with lengths that can be.
tensor_cache cache_of(at::TensorList cache, const model_shape& model);

/// Reference queries of a cache of that shape in `dtype`, which live as long as this: `[heads,
/// group, count, dim]` of `dim` in a row, the first `before` of them not counted, or none.
class query_tensors {
 public:
  query_tensors(const tensor_shape& shape, const std::optional<at::Tensor>& queries,
                const std::optional<at::Tensor>& positions, std::int64_t before,
                at::ScalarType dtype, at::Device device);
  const query_layout& rows() const { return rows_; }

 private:
  at::Tensor data_, positions_;
  query_layout rows_;
};

/// What kvmeld refuses becomes a RuntimeError with its message.
template <class F>
auto guarded(F f) {
  try {
    return f();
  } catch (const kvmeld::error& refused) {
    TORCH_CHECK(false, refused.what());
  }
}

/// `x` of these sizes and of one of the cache's dtypes, contiguous; refused otherwise.
void expect_rows(const char* what, const at::Tensor& x, at::IntArrayRef sizes, at::Device device);
/// Of numbers of heads, on that device.
const index_t* places_of(const at::Tensor& x, at::Device device);
/// Of floats, on the CPU.
const float* floats_of(const char* what, const at::Tensor& x, at::IntArrayRef sizes);
/// The numbers of such a tensor.
kvmeld::any_span numbers_of(const at::Tensor& x);

}  // namespace kvmeld_torch
