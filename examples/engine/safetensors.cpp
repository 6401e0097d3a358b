// SPDX-License-Identifier: MIT
#include "engine/safetensors.hpp"

#include <algorithm>  // std::min, std::sort
#include <array>
#include <bit>  // std::bit_cast, std::endian
#include <fstream>
#include <string_view>
#include <utility>

#include "engine/error.hpp"
#include "engine/json.hpp"

namespace engine {

namespace {

/// Bytes of a number; 0: the dtype is not known.
std::uint64_t bytes_of(const std::string& dtype) {
  constexpr std::array<std::pair<std::string_view, std::uint64_t>, 4> widths{
      {{" BOOL U8 I8 F8_E5M2 F8_E4M3 ", 1},
       {" I16 U16 F16 BF16 ", 2},
       {" I32 U32 F32 ", 4},
       {" I64 F64 ", 8}}};
  for (const auto& [names, width] : widths) {
    if (names.find(' ' + dtype + ' ') != std::string_view::npos) {
      return width;
    }
  }
  return 0;
}

/// Tensors need not be aligned in the file: through a small aligned buffer.
template <class Stored, class Convert>
void convert(std::istream& in, float* out, Eigen::Index count, Convert to_float) {
  std::array<Stored, 1024> buffer;
  for (Eigen::Index i = 0; i < count; i += std::ssize(buffer)) {
    const auto part = std::min<Eigen::Index>(std::ssize(buffer), count - i);
    in.read(reinterpret_cast<char*>(buffer.data()),
            part * static_cast<std::streamsize>(sizeof(Stored)));
    std::transform(buffer.begin(), buffer.begin() + part, out + i, to_float);
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

safetensors_file::safetensors_file(const std::filesystem::path& file)
    : safetensors_file(std::make_unique<std::ifstream>(open_file(file)), file) {}

safetensors_file::safetensors_file(std::unique_ptr<std::istream> in,
                                   const std::filesystem::path& file)
    : in_(std::move(in)), path_(file) {
  static_assert(std::endian::native == std::endian::little, "safetensors are little-endian");
  const auto header = read_header();
  for (const auto& [name, entry] : header.items()) {
    if (name != "__metadata__") {
      tensors_.emplace(name, checked(name, entry));
    }
  }
  expect_no_holes();
}

row_major_matrix safetensors_file::matrix(const std::string& name, index_t rows,
                                          index_t columns) const {
  const tensor& t = find(name, {rows, columns});
  row_major_matrix out(rows, columns);
  read(name, t, out.data(), out.size());
  return out;
}

row_vector safetensors_file::vector(const std::string& name, index_t size) const {
  const tensor& t = find(name, {size});
  row_vector out(size);
  read(name, t, out.data(), out.size());
  return out;
}

nlohmann::json safetensors_file::read_header() {
  in_->seekg(0, std::ios::end);
  const auto bytes = as_size(std::streamoff{in_->tellg()});
  in_->seekg(0);
  std::uint64_t length = 0;
  if (bytes < sizeof length) {
    throw format_error(path_, "expected at least 8 bytes, got ", bytes);
  }
  in_->read(reinterpret_cast<char*>(&length), sizeof length);
  const std::size_t room = bytes - sizeof length;
  constexpr std::uint64_t longest = 100'000'000;  // the format's own limit
  if (length > room || length > longest) {
    throw format_error(path_, "expected a header of at most ",
                       std::min<std::uint64_t>(room, longest), " bytes, got ", length);
  }
  first_ = sizeof length + length, size_ = room - length;
  std::string header(length, ' ');
  in_->read(header.data(), static_cast<std::streamsize>(length));
  return parse_object(header, path_);
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
  if (t.end > size_) {
    refuse("expected data_offsets within the file's ", size_, " bytes of data, got [", t.begin,
           ", ", t.end, "]");
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
  if (end != size_) {
    throw format_error(path_, "expected ", end, " bytes of tensors after the header, got ", size_);
  }
}

index_t safetensors_file::rows(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() || found->second.shape.empty()
             ? 0
             : static_cast<index_t>(found->second.shape.front());
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

void safetensors_file::read(const std::string& name, const tensor& t, float* out,
                            Eigen::Index count) const {
  in_->clear();
  in_->seekg(static_cast<std::streamoff>(first_ + t.begin));
  if (t.dtype == "F32") {
    convert<float>(*in_, out, count, [](float x) { return x; });
  } else if (t.dtype == "F16") {
    convert<Eigen::half>(*in_, out, count, [](Eigen::half x) { return static_cast<float>(x); });
  } else if (t.dtype == "BF16") {  // the upper half of a float
    convert<std::uint16_t>(*in_, out, count, [](std::uint16_t x) {
      return std::bit_cast<float>(std::uint32_t{x} << 16);
    });
  } else {
    throw format_error(path_, "tensor \"", name, "\": expected dtype F32, F16 or BF16, got ",
                       t.dtype);
  }
  if (!*in_) {
    throw format_error(path_, "tensor \"", name, "\": expected ", t.end - t.begin,
                       " bytes, got an error while reading them");
  }
}

checkpoint::checkpoint(const std::filesystem::path& folder) {
  const auto single = folder / "model.safetensors";
  const auto index = folder / "model.safetensors.index.json";
  if (std::filesystem::exists(single)) {
    shards_.emplace("", single);
  } else if (std::filesystem::exists(index)) {
    index_path_ = index;
    open_shards(folder);
  } else {
    throw format_error(folder,
                       "expected model.safetensors or model.safetensors.index.json in this "
                       "folder, got neither");
  }
}

void checkpoint::open_shards(const std::filesystem::path& folder) {
  const auto json = parse_object(read_file(index_path_), index_path_);
  const auto& map = json_fields(json, index_path_).object("weight_map");
  for (const auto& [name, value] : map.items()) {
    const std::string shard = value.is_string() ? value.get<std::string>() : "";
    // The name alone: an index must not lead out of its folder.
    if (shard.empty() || std::filesystem::path(shard).filename() != shard || shard == "..") {
      throw format_error(index_path_, "tensor \"", name, "\": expected a file name, got ",
                         describe(value));
    }
    if (!shards_.contains(shard)) {
      if (!std::filesystem::exists(folder / shard)) {
        throw format_error(index_path_, "expected shard \"", shard, "\" in the same folder");
      }
      shards_.emplace(shard, folder / shard);
    }
    const auto& file = shards_.at(shard);
    if (!file.contains(name)) {
      throw format_error(index_path_, "expected tensor \"", name, "\" in shard \"", shard, "\"");
    }
    holders_.emplace(name, &file);
  }
}

const safetensors_file& checkpoint::holder(const std::string& name) const {
  if (index_path_.empty()) {
    return shards_.begin()->second;
  }
  const auto found = holders_.find(name);
  if (found == holders_.end()) {
    throw format_error(index_path_, "expected tensor \"", name, "\" in a shard");
  }
  return *found->second;
}

}  // namespace engine
