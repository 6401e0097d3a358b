// SPDX-License-Identifier: MIT
#include "tensors.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>  // std::ranges::copy, std::ranges::sort
#include <array>
#include <string>

namespace kvmeld_torch {

using kvmeld::expects;

namespace {

std::string text_of(at::IntArrayRef sizes) {
  std::string text = "[";
  for (const std::int64_t n : sizes) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(n);
  }
  return text + "]";
}

void expect_on(at::Device device, const char* what, const at::Tensor& x) {
  if (!x.defined() || x.device() != device) {
    expects(false, what, ": expected a tensor on ",
            device.is_cpu() ? std::string("the CPU") : device.str(), ", got one on ",
            x.defined() ? x.device().str() : std::string("nothing"));
  }
}

void expect_sizes(const char* what, const at::Tensor& x, at::IntArrayRef sizes) {
  if (x.sizes() != sizes) {
    expects(false, what, ": expected ", text_of(sizes), ", got ", text_of(x.sizes()));
  }
}

void expect_type(const char* what, const at::Tensor& x, at::ScalarType type) {
  expects(x.scalar_type() == type, what, ": expected ", at::toString(type), ", got ",
          at::toString(x.scalar_type()));
}

kvmeld::storage storage_in(const char* what, const at::Tensor& x) {
  using kvmeld::storage;
  const auto type = x.scalar_type();
  expects(type == at::kFloat || type == at::kHalf || type == at::kBFloat16, what,
          ": expected Float, Half or BFloat16, got ", at::toString(type));
  return type == at::kFloat ? storage::f32 : type == at::kHalf ? storage::f16 : storage::bf16;
}

/// `[heads, capacity, dim]`, `[pages, slots, heads, dim]` or packed `[places, dim]` of any strides,
/// but no two elements in one place.
tensor_rows layout_of(const char* what, const at::Tensor& x) {
  std::array<std::size_t, 4> axis = {0, 1, 2, 3};
  const auto axes = std::span(axis).first(static_cast<std::size_t>(x.dim()));
  std::ranges::sort(axes, {}, [&](std::size_t i) { return x.strides()[i]; });
  std::int64_t reach = 1;
  for (const std::size_t i : axes) {
    if (x.sizes()[i] > 1 && x.strides()[i] < reach) {
      expects(false, what, ": expected strides that do not overlap, got ", text_of(x.strides()),
              " for ", text_of(x.sizes()));
    }
    reach += (x.sizes()[i] - 1) * x.strides()[i];
  }
  const auto size = static_cast<std::int64_t>(x.element_size());
  const auto stride = [&](std::int64_t dim) { return x.stride(dim) * size; };
  const bool paged = x.dim() == 4, packed = x.dim() == 2;
  return {static_cast<std::byte*>(x.data_ptr()), packed ? 0 : stride(paged ? 2 : 0),
          stride(packed ? 0 : 1), stride(-1), paged ? stride(0) : 0};
}

/// Messages are put together where a call is refused alone: a decode step checks thirty things.
void expect_dense(at::Device device, const char* what, const at::Tensor& x, at::IntArrayRef sizes) {
  expect_on(device, what, x);
  expect_sizes(what, x, sizes);
  if (!x.is_contiguous()) {
    expects(false, what, ": expected a contiguous tensor, got strides ", text_of(x.strides()));
  }
}

template <class T>
T* data_of(at::Device device, const char* what, const at::Tensor& x, at::ScalarType type,
           at::IntArrayRef sizes) {
  expect_dense(device, what, x, sizes);
  expect_type(what, x, type);
  return static_cast<T*>(x.data_ptr());
}

index_t index_of(const char* what, std::int64_t x, std::int64_t least) {
  expects(x >= least && x <= std::numeric_limits<index_t>::max(), what, ": expected at least ",
          least, ", got ", x);
  return static_cast<index_t>(x);
}

/// How the pages of keys `[pages, slots, heads of a sequence, dim]` are found.
page_tensors pages_of(at::Device device, const at::Tensor& keys, const at::Tensor& table,
                      const at::Tensor& length) {
  if (table.dim() != 2 || length.dim() != 1 || length.size(0) != table.size(0) * keys.size(2)) {
    expects(false, "table: expected [sequences, pages] and lengths of ", keys.size(2),
            " heads of each sequence, got ", text_of(table.sizes()), " and ",
            text_of(length.sizes()));
  }
  return {.table = data_of<index_t>(device, "table", table, at::kInt, table.sizes()),
          .pages = index_of("table", table.size(1), 1),
          .heads = index_of("heads", keys.size(2), 1),
          .slots = index_of("slots", keys.size(1), 1)};
}

/// Where the places of each head end among all `places`, by `measured [heads, 4]`.
std::vector<std::ptrdiff_t> ends_of(std::span<const std::int64_t> measured, std::int64_t places) {
  std::vector<std::ptrdiff_t> ends;
  std::int64_t end = 0;
  for (std::size_t i = 3; i < measured.size(); i += 4) {
    expects(measured[i] > 0 && measured[i] <= places - end,
            "measured: expected capacities of at least 1 slot, of all heads ", places, ", got ",
            measured[i], " of head ", ends.size());
    ends.push_back(end += measured[i]);
  }
  expects(end == places, "measured: expected capacities of ", places, " slots of all heads, got ",
          end);
  return ends;
}

/// What rows of `dim` numbers are that take so many bytes, less their head's mean or not.
kvmeld::storage few_bits_in(const char* what, const at::Tensor& x, index_t dim, bool centred) {
  using kvmeld::storage;
  const auto bytes = static_cast<std::size_t>(x.size(-1));
  for (const storage type : {storage::q8_0, storage::q4_0, storage::k8, storage::k6, storage::k4}) {
    if (is_centred(type) == centred && row_bytes(type, dim) == bytes) {
      const bool even = x.stride(-1) == 1 && x.stride(-2) % 2 == 0 &&
                        reinterpret_cast<std::uintptr_t>(x.data_ptr()) % 2 == 0;
      expects(even, what, ": expected rows whose bytes are side by side, at even places");
      return type;
    }
  }
  kvmeld::detail::refuse(kvmeld::errc::invalid_argument, what, ": expected rows of ", dim,
                         " numbers in few bits, got ", bytes, " bytes each");
}

/// Rows in few bits: what the heads have beside their slots, whose shapes say what the rows are.
void read_few_bits(at::TensorList cache, at::Device device, cache_tensors& out) {
  const auto at = [&](part p) -> const at::Tensor& { return cache[static_cast<std::size_t>(p)]; };
  const std::int64_t heads = out.shape.heads, dim = out.shape.dim, value_dim = out.shape.value_dim,
                     in_half = at(part::newest_keys).size(1),
                     means = at(part::key_mean).dim() == 2 ? at(part::key_mean).size(1) : 0;
  const auto newest =
      static_cast<index_t>(std::max<std::int64_t>(in_half - kvmeld::first_in_half, 0));
  expects(in_half == kvmeld::rows_in_half(newest) && newest <= kvmeld::most_newest,
          "newest_keys: expected none, or ", kvmeld::first_in_half, " rows and up to ",
          kvmeld::most_newest, " newest ones, got ", in_half);
  const auto half = [&](const char* what, part p, at::IntArrayRef sizes) {
    return data_of<at::Half>(device, what, at(p), at::kHalf, sizes);
  };
  auto* const keys = half("newest_keys", part::newest_keys, {heads, in_half, dim});
  auto* const values = half("newest_values", part::newest_values, {heads, in_half, value_dim});
  auto* const mean = half("key_mean", part::key_mean, {heads, means == 0 ? 0 : dim});
  auto* const rounded = data_of<index_t>(device, "rounded", at(part::rounded), at::kInt, {heads});
  const at::Tensor &key_rows = at(part::keys), &value_rows = at(part::values);
  out.type = {few_bits_in("keys", key_rows, out.shape.dim, means > 0),
              few_bits_in("values", value_rows, out.shape.value_dim, false), newest};
  out.keys.element = static_cast<std::ptrdiff_t>(element_bytes(out.type.keys));
  out.values.element = static_cast<std::ptrdiff_t>(element_bytes(out.type.values));
  if (newest > 0) {
    out.beside.newest = {reinterpret_cast<std::byte*>(keys), reinterpret_cast<std::byte*>(values),
                         newest, rounded};
  }
  out.beside.key_mean = means > 0 ? reinterpret_cast<Eigen::half*>(mean) : nullptr;
}

}  // namespace

cache_tensors tensors_of(at::TensorList cache, const model_shape& model, at::Device device) {
  const bool in_few_bits = cache.size() == parts_in_few_bits;
  expects(cache.size() == parts || in_few_bits, "cache: expected ", parts, " tensors, or ",
          parts_in_few_bits, " of rows in few bits, got ", cache.size());
  const auto at = [&](part p) -> const at::Tensor& { return cache[static_cast<std::size_t>(p)]; };
  const at::Tensor &keys = at(part::keys), &values = at(part::values);
  cache_tensors out;
  for (const auto& [what, x] : {std::pair<const char*, const at::Tensor&>{"keys", keys},
                                std::pair<const char*, const at::Tensor&>{"values", values}}) {
    expect_on(device, what, x);
    if (in_few_bits) {
      expect_type(what, x, at::kByte);
    } else {
      out.type = storage_in(what, x);
    }
    if (x.dim() < 2 || x.dim() > 4) {
      expects(false, what, ": expected [heads, capacity, dim], got ", text_of(x.sizes()));
    }
  }
  const bool paged = keys.dim() == 4, packed = keys.dim() == 2;
  expect_type("values", values, keys.scalar_type());
  std::array<std::int64_t, 4> sizes = {};
  const auto axes = static_cast<std::size_t>(keys.dim());
  std::ranges::copy(keys.sizes(), sizes.begin());
  sizes[axes - 1] = values.size(-1);
  expect_sizes("values", values, {sizes.data(), axes});
  page_tensors& pages = out.paged;
  if (paged) {
    pages = pages_of(device, keys, at(part::measured), at(part::length));
  }
  const std::int64_t heads = paged || packed ? at(part::length).numel() : keys.size(0),
                     places = packed  ? keys.size(0)
                              : paged ? heads * pages.pages * pages.slots
                                      : heads * keys.size(1);
  if (!paged) {
    out.measured_row = packed ? 4 : 3;
    out.measured = data_of<std::int64_t>(device, "measured", at(part::measured), at::kLong,
                                         {heads, out.measured_row});
  }
  std::int64_t capacity = heads > 0 ? places / heads : 0;
  if (packed) {
    out.ends = ends_of({out.measured, static_cast<std::size_t>(heads * 4)}, places);
    capacity = 0;
    for (index_t h = 0; h < heads; ++h) {
      capacity = std::max<std::int64_t>(capacity, out.capacity(h));
    }
  }
  const at::Tensor& key_numbers = in_few_bits ? at(part::newest_keys) : keys;
  const at::Tensor& value_numbers = in_few_bits ? at(part::newest_values) : values;
  expects(key_numbers.dim() >= 2 && value_numbers.dim() >= 2 && (!in_few_bits || !paged),
          "newest_keys: expected [heads, rows, dim], got another rank, or pages");
  out.shape = {.heads = index_of("heads", heads, 1),
               .group = index_of("group", model.group, 1),
               .dim = index_of("dim", key_numbers.size(-1), 1),
               .value_dim = index_of("dim", value_numbers.size(-1), 1),
               .capacity = index_of("capacity", capacity, 1)};
  kvmeld::attention_spec spec{.kv_heads = out.shape.heads,
                              .group = out.shape.group,
                              .key_dim = out.shape.dim,
                              .value_dim = out.shape.value_dim,
                              .scale = static_cast<float>(model.scale)};
  if (model.terms && model.terms->defined()) {
    const at::Tensor& terms = *model.terms;
    read_terms({data_of<double>(at::kCPU, "terms", terms, at::kDouble, {terms.numel()}),
                static_cast<std::size_t>(terms.numel())},
               spec);
  }
  out.spec = std::make_shared<const kvmeld::attention_spec>(spec.checked());
  out.keys = layout_of("keys", keys), out.values = layout_of("values", values);
  if (in_few_bits) {
    read_few_bits(cache, device, out);
  }
  const std::array<std::int64_t, 2> by_head = {heads, capacity}, in_a_row = {places, 0};
  const at::IntArrayRef slots = packed ? at::IntArrayRef(in_a_row.data(), 1) : by_head;
  out.log_mass = data_of<float>(device, "log_mass", at(part::log_mass), at::kFloat, slots);
  out.position = data_of<index_t>(device, "position", at(part::position), at::kInt, slots);
  out.length = data_of<index_t>(device, "length", at(part::length), at::kInt, {heads});
  out.seen = data_of<index_t>(device, "seen", at(part::seen), at::kInt, {heads});
  const at::Tensor &columns = at(part::columns), &memory = at(part::memory);
  if (columns.dim() != (packed ? 1 : 3)) {
    expects(false, "columns: expected ",
            packed ? "[columns * places]" : "[heads, columns, capacity]", ", got ",
            text_of(columns.sizes()));
  }
  const std::int64_t count = packed ? columns.numel() / places : columns.size(1);
  out.column_count = index_of("columns", count, 0);
  out.columns =
      packed ? data_of<float>(device, "columns", columns, at::kFloat, {count * places})
             : data_of<float>(device, "columns", columns, at::kFloat, {heads, count, capacity});
  if (memory.dim() != 2) {
    expects(false, "memory: expected [heads, floats], got ", text_of(memory.sizes()));
  }
  constexpr std::int64_t line = 16;  // floats
  expects(
      memory.size(1) % line == 0 && reinterpret_cast<std::uintptr_t>(memory.data_ptr()) % 64 == 0,
      "memory: expected rows of whole cache lines (", line, " floats), got ", memory.size(1));
  out.memory = data_of<float>(device, "memory", memory, at::kFloat, {heads, memory.size(1)});
  out.memory_row = memory.size(1);
  return out;
}

tensor_cache cache_of(at::TensorList cache, const model_shape& model) {
  expects(cache.empty() || cache[0].dim() != 4,
          "keys: expected [heads, capacity, dim] on the CPU, got pages");
  return tensor_cache(tensors_of(cache, model, at::kCPU));
}

query_tensors::query_tensors(const tensor_shape& shape, const std::optional<at::Tensor>& queries,
                             const std::optional<at::Tensor>& positions, std::int64_t before,
                             at::ScalarType dtype, at::Device device) {
  if (!queries || !queries->defined() || queries->numel() == 0) {
    return;
  }
  expect_on(device, "queries", *queries);
  (void)storage_in("queries", *queries);
  if (queries->dim() != 4) {
    expects(false, "queries: expected [heads, group, count, dim], got ", text_of(queries->sizes()));
  }
  const std::int64_t all = queries->size(2);
  expect_sizes("queries", *queries, {shape.heads, shape.group, all, shape.dim});
  expects(before >= 0 && before <= all, "queries: expected 0 to ", all, " queries before, got ",
          before);
  data_ = queries->to(dtype);
  if (data_.stride(3) != 1) {
    data_ = data_.contiguous();
  }
  const auto* const first = static_cast<const char*>(data_.const_data_ptr());
  rows_ = {.data = first + before * data_.stride(2) * data_.element_size(),
           .count = index_of("queries", all - before, 0),
           .head = data_.stride(0),
           .group = data_.stride(1),
           .row = data_.stride(2),
           .position = nullptr,
           .before = static_cast<index_t>(before)};
  if (positions && positions->defined()) {
    expects(before == 0, "queries: expected either positions or queries before, got both");
    positions_ = *positions;
    rows_.position = data_of<index_t>(device, "positions", positions_, at::kInt, {all});
  }
}

void expect_rows(const char* what, const at::Tensor& x, at::IntArrayRef sizes, at::Device device) {
  expect_dense(device, what, x, sizes);
  storage_in(what, x);
}

const index_t* places_of(const at::Tensor& x, at::Device device) {
  return data_of<index_t>(device, "places", x, at::kInt, {x.numel()});
}

const float* floats_of(const char* what, const at::Tensor& x, at::IntArrayRef sizes) {
  return data_of<float>(at::kCPU, what, x, at::kFloat, sizes);
}

kvmeld::any_span numbers_of(const at::Tensor& x) {
  const auto as = [&](auto scalar) {
    return kvmeld::any_span(std::span(static_cast<const decltype(scalar)*>(x.const_data_ptr()),
                                      static_cast<std::size_t>(x.numel())));
  };
  return x.scalar_type() == at::kFloat  ? as(0.0F)
         : x.scalar_type() == at::kHalf ? as(Eigen::half())
                                        : as(Eigen::bfloat16());
}

}  // namespace kvmeld_torch
