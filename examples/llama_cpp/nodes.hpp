// SPDX-License-Identifier: MIT
/// What is read off the nodes of llama.cpp's graphs: names, cells, positions, rotation.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <charconv>  // std::from_chars
#include <cstring>   // std::memcpy
#include <string_view>
#include <vector>

#include "kvmeld/memory/rotation.hpp"

namespace kvmeld::llama {

/// What is said where a node is not there, or not where it is expected.
inline constexpr const char* another_graph = "another graph than the adapter knows";

/// The tensor that `t` is a view of, or a cast of: flash attention casts float rows.
inline ggml_tensor* root_of(ggml_tensor* t) {
  while (t->view_src != nullptr || t->op == GGML_OP_CPY) {
    t = t->view_src != nullptr ? t->view_src : t->src[0];
  }
  return t;
}

/// N of a name such as "kq-N", for `prefix` "kq-"; -1: it has another form.
inline index_t number_behind(std::string_view prefix, std::string_view name) {
  if (!name.starts_with(prefix)) {
    return -1;
  }
  name.remove_prefix(prefix.size());
  index_t n = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), n);
  return error == std::errc() && end == name.data() + name.size() ? n : -1;
}

/// Parameter `i` of a node.
template <class T>
T parameter(const ggml_tensor* t, int i) {
  static_assert(sizeof(T) == sizeof(t->op_params[0]));
  T x;
  std::memcpy(&x, &t->op_params[i], sizeof x);
  return x;
}

/// Element `[.., k, j, i]` of a float tensor that may be a view.
inline float* element(const ggml_tensor* t, std::int64_t i, std::int64_t j = 0,
                      std::int64_t k = 0) {
  auto* const data = static_cast<char*>(t->data);
  return reinterpret_cast<float*>(data + static_cast<std::size_t>(i) * t->nb[0] +
                                  static_cast<std::size_t>(j) * t->nb[1] +
                                  static_cast<std::size_t>(k) * t->nb[2]);
}

/// Throws unless the processor can read `t`.
inline void expect_on_host(const ggml_tensor* t) {
  ggml_backend_buffer_t buffer = t->view_src != nullptr ? t->view_src->buffer : t->buffer;
  expects(t->data != nullptr && buffer != nullptr && ggml_backend_buffer_is_host(buffer),
          "llama.cpp: expected '", t->name, "' in the processor's memory, got a device's; ",
          "set n_gpu_layers = 0 and offload_kqv = false");
}

/// Throws unless `t` are the cells of one stream, of rows as `attach` was told.
inline void expect_rows(const ggml_tensor* t, std::int64_t width, ggml_type type) {
  expects(t->type == type, "llama.cpp: expected '", t->name, "' in ", ggml_type_name(type),
          " (given to attach), got ", ggml_type_name(t->type));
  expects(t->ne[0] == width && t->ne[2] == 1, "llama.cpp: expected '", t->name, "' [", width,
          ", cells], got [", t->ne[0], ", ", t->ne[1], ", ", t->ne[2], "]");
}

/// The numbers of an input of indices or positions.
inline void read_indices(const ggml_tensor* t, std::vector<index_t>& out) {
  expect_on_host(t);
  out.resize(static_cast<std::size_t>(t->ne[0]));
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = t->type == GGML_TYPE_I64
                 ? static_cast<index_t>(static_cast<const std::int64_t*>(t->data)[i])
                 : static_cast<const index_t*>(t->data)[i];
  }
}

/// The ROPE node whose rows a SET_ROWS node stores; null: they are not rotated.
/// Refused: rows that something else was done to after their rotation.
inline const ggml_tensor* rotation_behind(const ggml_tensor* set_rows) {
  const ggml_tensor* t = set_rows->src[0];
  while (t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_CONT) {
    t = t->src[0];
  }
  const ggml_tensor* const stored = t;
  while (t != nullptr && t->op != GGML_OP_ROPE && t->op != GGML_OP_MUL_MAT) {
    t = t->src[0];
  }
  const bool rotated = t != nullptr && t->op == GGML_OP_ROPE;
  expects(!rotated || t == stored,
          "llama.cpp: expected keys that are stored as they were rotated, ", "got '", stored->name,
          "', which was made of them");
  return rotated ? t : nullptr;
}

/// The rotation of a ROPE node; none where there is no node. The magnitude that YaRN multiplies
/// rows with is in the rows. Refused: pairs of another kind, YaRN in part.
inline rotary rope_of(const ggml_tensor* t) {
  if (t == nullptr) {
    return {};
  }
  const auto turned = parameter<index_t>(t, 1), mode = parameter<index_t>(t, 2);
  const auto base = parameter<float>(t, 5), scale = parameter<float>(t, 6),
             extrapolated = parameter<float>(t, 7);
  expects((mode == GGML_ROPE_TYPE_NORMAL || mode == GGML_ROPE_TYPE_NEOX) &&
              (extrapolated == 0.0F || extrapolated == 1.0F),
          "llama.cpp: expected RoPE of type normal or neox, and YaRN in full or not at all, got ",
          "type ", mode, " and an extrapolation factor of ", extrapolated);
  rotary r = (mode == GGML_ROPE_TYPE_NEOX ? rotary::halves(base) : rotary::interleaved(base));
  r = r.dims(turned);
  if (extrapolated == 1.0F) {
    r = r.yarn({.factor = 1 / double{scale},
                .original_context = parameter<index_t>(t, 4),
                .fast = parameter<float>(t, 9),
                .slow = parameter<float>(t, 10)});
  } else if (scale != 1.0F) {
    r = r.linear(1 / double{scale});
  }
  const ggml_tensor* const factors = t->src[2];  // of the wavelengths
  if (factors == nullptr) {
    return r;
  }
  expect_on_host(factors);
  std::vector<double> frequencies(static_cast<std::size_t>(turned / 2));
  r.frequencies(turned, frequencies);
  for (index_t p = 0; p < turned / 2; ++p) {
    frequencies[static_cast<std::size_t>(p)] /= double{*element(factors, p)};
  }
  return rotary::table(frequencies, r.pairs_as());
}

}  // namespace kvmeld::llama
