// SPDX-License-Identifier: MIT
#include "engine/gguf/file.hpp"

#include <ggml.h>

#include <algorithm>  // std::ranges::find
#include <limits>

namespace engine::gguf {

file::file(const std::filesystem::path& path)
    : path_(path),
      in_(open_file(path)),
      values_(gguf_init_from_file(path.string().c_str(), {.no_alloc = true, .ctx = nullptr})) {
  if (!values_) {
    refuse("expected a GGUF file, got another format");
  }
}

std::int64_t file::key(const std::string& name, gguf_type type, const char* kind) const {
  const auto id = gguf_find_key(values_.get(), name.c_str());
  if (id < 0) {
    refuse("expected key \"", name, "\"");
  }
  if (const auto got = gguf_get_kv_type(values_.get(), id); got != type) {
    refuse("key \"", name, "\": expected ", kind, ", got ", gguf_type_name(got));
  }
  return id;
}

index_t file::count(const std::string& name, std::optional<index_t> otherwise) const {
  if (otherwise && !has(name)) {
    return *otherwise;
  }
  const auto n = gguf_get_val_u32(values_.get(), key(name, GGUF_TYPE_UINT32, "one u32"));
  if (n == 0 || n > static_cast<std::uint32_t>(std::numeric_limits<index_t>::max())) {
    refuse("key \"", name, "\": expected a count from 1 to ", std::numeric_limits<index_t>::max(),
           ", got ", n);
  }
  return static_cast<index_t>(n);
}

double file::number(const std::string& name, std::optional<double> otherwise) const {
  if (otherwise && !has(name)) {
    return *otherwise;
  }
  const double x = gguf_get_val_f32(values_.get(), key(name, GGUF_TYPE_FLOAT32, "one f32"));
  if (!(x > 0 && x < std::numeric_limits<double>::infinity())) {
    refuse("key \"", name, "\": expected a finite number above 0, got ", x);
  }
  return x;
}

std::string file::word(const std::string& name) const {
  return gguf_get_val_str(values_.get(), key(name, GGUF_TYPE_STRING, "a string"));
}

std::int64_t file::tensor(const std::string& name) const {
  const auto id = gguf_find_tensor(values_.get(), name.c_str());
  if (id < 0) {
    refuse("expected tensor \"", name, "\"");
  }
  return id;
}

index_t file::rows(const std::string& name) const {
  const auto n = gguf_get_tensor_ne(values_.get(), tensor(name))[1];
  if (n > std::numeric_limits<index_t>::max()) {
    refuse("tensor \"", name, "\": expected at most ", std::numeric_limits<index_t>::max(),
           " rows, got ", n);
  }
  return static_cast<index_t>(n);
}

row_major_matrix file::matrix(const std::string& name, index_t rows, index_t columns) const {
  row_major_matrix m(rows, columns);
  copy(name, rows, columns, m.data());
  return m;
}

row_vector file::vector(const std::string& name, index_t size) const {
  row_vector v(size);
  copy(name, 1, size, v.data());
  return v;
}

void file::copy(const std::string& name, index_t rows, index_t columns, float* out) const {
  const auto id = tensor(name);
  const std::int64_t* const size = gguf_get_tensor_ne(values_.get(), id);
  if (size[0] != columns || size[1] != rows || size[2] != 1 || size[3] != 1) {
    refuse("tensor \"", name, "\": expected shape [", rows, ", ", columns, "], got [", size[1],
           ", ", size[0], "]");
  }
  const auto type = gguf_get_tensor_type(values_.get(), id);
  const auto to_float = ggml_get_type_traits(type)->to_float;
  if (type != GGML_TYPE_F32 && to_float == nullptr) {
    refuse("tensor \"", name, "\": expected a type that ggml dequantises, got ",
           ggml_type_name(type));
  }
  const std::size_t begin = gguf_get_data_offset(values_.get()) +
                            gguf_get_tensor_offset(values_.get(), id),
                    bytes = gguf_get_tensor_size(values_.get(), id);
  std::vector<float> stored((bytes + sizeof(float) - 1) / sizeof(float));
  in_.seekg(static_cast<std::streamoff>(begin));
  in_.read(reinterpret_cast<char*>(stored.data()), static_cast<std::streamsize>(bytes));
  if (!in_) {
    refuse("tensor \"", name, "\": expected ", bytes, " bytes from byte ", begin,
           ", got a file of ", std::filesystem::file_size(path_), " bytes");
  }
  if (type == GGML_TYPE_F32) {
    std::ranges::copy(stored, out);
  } else {
    to_float(stored.data(), out, std::int64_t{rows} * columns);
  }
}

void file::expect_keys(const std::string& prefix, std::span<const std::string_view> known) const {
  for (std::int64_t id = 0; id < gguf_get_n_kv(values_.get()); ++id) {
    const std::string_view name = gguf_get_key(values_.get(), id);
    if (name.starts_with(prefix) &&
        std::ranges::find(known, name.substr(prefix.size())) == known.end()) {
      refuse("expected the keys of a plain llama, qwen or gemma, got \"", name, "\"");
    }
  }
}

void file::expect_tensors(std::size_t read) const {
  const auto all = as_size(gguf_get_n_tensors(values_.get()));
  if (all != read) {
    refuse("expected ", read, " tensors of a plain llama, qwen or gemma, got ", all,
           " (this engine has no MLP biases and no experts)");
  }
}

}  // namespace engine::gguf
