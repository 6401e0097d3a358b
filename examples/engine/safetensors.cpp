// SPDX-License-Identifier: MIT
#include "engine/safetensors.hpp"

#include <algorithm>  // std::min, std::sort
#include <array>
#include <bit>      // std::bit_cast, std::endian
#include <cstring>  // std::memcpy
#include <string_view>
#include <utility>

#include "engine/error.hpp"
#include "engine/json.hpp"

namespace engine {

namespace {

std::uint64_t bytes_of(std::string_view dtype) {
  constexpr std::array<std::pair<std::string_view, std::uint64_t>, 14> widths{{{"BOOL", 1},
                                                                               {"U8", 1},
                                                                               {"I8", 1},
                                                                               {"F8_E5M2", 1},
                                                                               {"F8_E4M3", 1},
                                                                               {"I16", 2},
                                                                               {"U16", 2},
                                                                               {"F16", 2},
                                                                               {"BF16", 2},
                                                                               {"I32", 4},
                                                                               {"U32", 4},
                                                                               {"F32", 4},
                                                                               {"I64", 8},
                                                                               {"F64", 8}}};
  for (const auto& [name, width] : widths) {
    if (name == dtype) {
      return width;
    }
  }
  return 0;
}

/// Tensors need not be aligned in the file: through a small aligned buffer.
template <class Stored, class Convert>
void convert(std::span<const std::byte> bytes, std::span<float> out, Convert to_float) {
  std::array<Stored, 1024> buffer;
  for (std::size_t i = 0; i < out.size(); i += buffer.size()) {
    const std::size_t count = std::min(buffer.size(), out.size() - i);
    std::memcpy(static_cast<void*>(buffer.data()), bytes.data() + i * sizeof(Stored),
                count * sizeof(Stored));
    std::transform(buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(count),
                   out.begin() + static_cast<std::ptrdiff_t>(i), to_float);
  }
}

std::string text(const std::vector<std::uint64_t>& shape) {
  std::string list;
  for (const std::uint64_t n : shape) {
    list += (list.empty() ? "" : ", ") + std::to_string(n);
  }
  return "[" + list + "]";
}

}  // namespace

row_major_matrix safetensors_file::matrix(const std::string& name, index_t rows,
                                          index_t columns) const {
  const tensor& t = find(name, {rows, columns});
  row_major_matrix out(rows, columns);
  copy(name, t, {out.data(), static_cast<std::size_t>(out.size())});
  return out;
}

row_vector safetensors_file::vector(const std::string& name, index_t size) const {
  const tensor& t = find(name, {size});
  row_vector out(size);
  copy(name, t, {out.data(), static_cast<std::size_t>(out.size())});
  return out;
}

void safetensors_file::open(std::span<const std::byte> bytes) {
  static_assert(std::endian::native == std::endian::little, "safetensors are little-endian");
  const auto header = parse_header(bytes);
  for (const auto& [name, entry] : header.items()) {
    if (name != "__metadata__") {
      tensors_.emplace(name, checked(name, entry));
    }
  }
  expect_no_holes();
}

nlohmann::json safetensors_file::parse_header(std::span<const std::byte> bytes) {
  std::uint64_t length = 0;
  if (bytes.size() < sizeof length) {
    throw format_error(path_, "expected at least 8 bytes, got ", bytes.size());
  }
  std::memcpy(&length, bytes.data(), sizeof length);
  const std::size_t room = bytes.size() - sizeof length;
  constexpr std::uint64_t longest = 100'000'000;  // the format's own limit
  if (length > room || length > longest) {
    throw format_error(path_, "expected a header of at most ",
                       std::min<std::uint64_t>(room, longest), " bytes, got ", length);
  }
  data_ = bytes.subspan(sizeof length + length);
  const auto* const first = reinterpret_cast<const char*>(bytes.data() + sizeof length);
  return parse_object({first, length}, path_);
}

safetensors_file::tensor safetensors_file::checked(const std::string& name,
                                                   const nlohmann::json& entry) const {
  const auto refuse = [&](const auto&... parts) {
    throw format_error(path_, "tensor \"", name, "\": ", parts...);
  };
  const auto is_count = [](const nlohmann::json& x) { return x.is_number_unsigned(); };
  const auto is_counts = [&](const char* field) {
    return entry.contains(field) && entry.at(field).is_array() &&
           std::all_of(entry.at(field).begin(), entry.at(field).end(), is_count);
  };
  if (!entry.is_object() || !entry.contains("dtype") || !entry.at("dtype").is_string() ||
      !is_counts("shape") || !is_counts("data_offsets") || entry.at("data_offsets").size() != 2) {
    refuse("expected {\"dtype\": string, \"shape\": [counts], \"data_offsets\": [begin, end]}, ",
           "got another entry");
  }
  tensor t{.dtype = entry.at("dtype"),
           .shape = entry.at("shape"),
           .begin = entry.at("data_offsets")[0],
           .end = entry.at("data_offsets")[1]};
  if (t.begin > t.end) {
    refuse("expected ascending data_offsets, got [", t.begin, ", ", t.end, "]");
  }
  if (t.end > data_.size()) {
    refuse("expected data_offsets within the file's ", data_.size(), " bytes of data, got [",
           t.begin, ", ", t.end, "]");
  }
  // A dtype that is not asked for may be anything, and of any size.
  if (const std::uint64_t width = bytes_of(t.dtype); width != 0) {
    std::uint64_t size = width;
    bool overflow = false;
    for (const std::uint64_t n : t.shape) {
      overflow |= __builtin_mul_overflow(size, n, &size);
    }
    if (overflow || size != t.end - t.begin) {
      refuse("expected as many bytes as shape ", text(t.shape), " of ", t.dtype,
             " takes, got data_offsets [", t.begin, ", ", t.end, "]");
    }
  }
  return t;
}

void safetensors_file::expect_no_holes() const {
  std::vector<const std::pair<const std::string, tensor>*> order;
  for (const auto& entry : tensors_) {
    order.push_back(&entry);
  }
  std::sort(order.begin(), order.end(), [](auto a, auto b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  std::size_t end = 0;
  for (const auto* entry : order) {
    if (const std::size_t begin = entry->second.begin; begin != end) {
      throw format_error(path_, "tensor \"", entry->first, "\": expected offset ", end,
                         " (where the tensor before it ends), got ", begin, ", ",
                         begin < end ? "an overlap" : "a hole");
    }
    end = entry->second.end;
  }
  if (end != data_.size()) {
    throw format_error(path_, "expected ", end, " bytes of tensors after the header, got ",
                       data_.size());
  }
}

const safetensors_file::tensor& safetensors_file::find(const std::string& name,
                                                       std::initializer_list<index_t> shape) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    throw format_error(path_, "expected tensor \"", name, "\"");
  }
  const std::vector<std::uint64_t> expected(shape.begin(), shape.end());
  if (found->second.shape != expected) {
    throw format_error(path_, "tensor \"", name, "\": expected shape ", text(expected), ", got ",
                       text(found->second.shape));
  }
  return found->second;
}

void safetensors_file::copy(const std::string& name, const tensor& t, std::span<float> out) const {
  const auto bytes = data_.subspan(t.begin, t.end - t.begin);
  if (t.dtype == "F32") {
    convert<float>(bytes, out, [](float x) { return x; });
  } else if (t.dtype == "F16") {
    convert<Eigen::half>(bytes, out, [](Eigen::half x) { return static_cast<float>(x); });
  } else if (t.dtype == "BF16") {  // the upper half of a float
    convert<std::uint16_t>(
        bytes, out, [](std::uint16_t x) { return std::bit_cast<float>(std::uint32_t{x} << 16); });
  } else {
    throw format_error(path_, "tensor \"", name, "\": expected dtype F32, F16 or BF16, got ",
                       t.dtype);
  }
}

}  // namespace engine
