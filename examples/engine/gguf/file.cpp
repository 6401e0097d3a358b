#include "engine/gguf/file.hpp"

#include <ggml.h>

#include <algorithm>  // std::ranges::find
#include <cstring>    // std::memcpy
#include <limits>

namespace engine::gguf {

file::file(const std::filesystem::path& path)
    : path_(path),
      mapped_(path),
      values_(gguf_init_from_file(path.string().c_str(), {.no_alloc = true, .ctx = nullptr})) {
  if (!values_) {
    refuse("a GGUF file expected, this is none");
  }
}

std::int64_t file::key(const std::string& name, gguf_type type, const char* kind) const {
  const auto id = gguf_find_key(values_.get(), name.c_str());
  if (id < 0) {
    refuse("key \"", name, "\" expected, it is not there");
  }
  if (const auto came = gguf_get_kv_type(values_.get(), id); came != type) {
    refuse("key \"", name, "\": ", kind, " expected, ", gguf_type_name(came), " came");
  }
  return id;
}

index_t file::count(const std::string& name) const {
  const auto n = gguf_get_val_u32(values_.get(), key(name, GGUF_TYPE_UINT32, "one u32"));
  if (n == 0 || n > static_cast<std::uint32_t>(std::numeric_limits<index_t>::max())) {
    refuse("key \"", name, "\": a positive number of things expected, ", n, " came");
  }
  return static_cast<index_t>(n);
}

double file::number(const std::string& name) const {
  const double x = gguf_get_val_f32(values_.get(), key(name, GGUF_TYPE_FLOAT32, "one f32"));
  if (!(x > 0 && x < std::numeric_limits<double>::infinity())) {
    refuse("key \"", name, "\": a positive number expected, ", x, " came");
  }
  return x;
}

std::string file::word(const std::string& name) const {
  return gguf_get_val_str(values_.get(), key(name, GGUF_TYPE_STRING, "a string"));
}

index_t file::rows(const std::string& name) const {
  const auto id = gguf_find_tensor(values_.get(), name.c_str());
  if (id < 0) {
    refuse("tensor \"", name, "\" expected, it is not there");
  }
  const auto n = gguf_get_tensor_ne(values_.get(), id)[1];
  if (n > std::numeric_limits<index_t>::max()) {
    refuse("tensor \"", name, "\": rows that an index counts expected, ", n, " came");
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
  const auto id = gguf_find_tensor(values_.get(), name.c_str());
  if (id < 0) {
    refuse("tensor \"", name, "\" expected, it is not there");
  }
  const std::int64_t* const size = gguf_get_tensor_ne(values_.get(), id);
  if (size[0] != columns || size[1] != rows || size[2] != 1 || size[3] != 1) {
    refuse("tensor \"", name, "\": shape [", rows, ", ", columns, "] expected, [", size[1], ", ",
           size[0], "] came");
  }
  const auto type = gguf_get_tensor_type(values_.get(), id);
  const std::size_t begin = gguf_get_data_offset(values_.get()) +
                            gguf_get_tensor_offset(values_.get(), id),
                    bytes = gguf_get_tensor_size(values_.get(), id);
  if (begin > mapped_.bytes().size() || bytes > mapped_.bytes().size() - begin) {
    refuse("tensor \"", name, "\": ", bytes, " bytes at ", begin, " expected, the file ends at ",
           mapped_.bytes().size());
  }
  const std::byte* const data = mapped_.bytes().data() + begin;
  if (type == GGML_TYPE_F32) {
    std::memcpy(out, data, bytes);
    return;
  }
  const auto to_float = ggml_get_type_traits(type)->to_float;
  if (to_float == nullptr) {
    refuse("tensor \"", name, "\": a type that ggml dequantises expected, ", ggml_type_name(type),
           " came");
  }
  to_float(data, out, std::int64_t{rows} * columns);
}

void file::expect_keys(const std::string& prefix,
                       std::initializer_list<std::string_view> known) const {
  for (std::int64_t id = 0; id < gguf_get_n_kv(values_.get()); ++id) {
    const std::string_view name = gguf_get_key(values_.get(), id);
    if (name.starts_with(prefix) &&
        std::ranges::find(known, name.substr(prefix.size())) == known.end()) {
      refuse("key \"", name, "\": not known to this engine, a plain llama or qwen2 expected");
    }
  }
}

void file::expect_tensors(std::size_t read) const {
  const auto all = static_cast<std::size_t>(gguf_get_n_tensors(values_.get()));
  if (all != read) {
    refuse(read, " tensors of a plain llama or qwen2 expected, ", all,
           " came: biases of the MLP, experts, norms of queries and keys are not known to this "
           "engine");
  }
}

}  // namespace engine::gguf
