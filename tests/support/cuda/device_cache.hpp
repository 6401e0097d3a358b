// SPDX-License-Identifier: MIT
/// Caches for the CUDA tests: strided or paged, with guards behind everything, filled by a seed.
#pragma once

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda/order.hpp"
#include "cuda/row_numbers.hpp"
#include "kvmeld/cuda/view.cuh"

namespace kvmeld {
inline namespace v0 {
class rotary;
}
}  // namespace kvmeld

namespace kvmeld::cuda {

/// `n` elements on both sides: in a heap block of their own (AddressSanitizer sees the first byte
/// after it), or, without that, with a guard behind them that `intact` looks at.
template <class T>
class device_buffer {
 public:
  static constexpr std::size_t guard = 64;  // bytes

  explicit device_buffer(std::size_t n, int fill = 0xcd)
      : count_(n), bytes_(n * sizeof(T)), both_(bytes_ + guard_bytes(), fill) {
    std::fill_n(both_.host() + bytes_, guard_bytes(), static_cast<unsigned char>(0x5a));
  }
  explicit device_buffer(const std::vector<T>& x) : device_buffer(x.size()) {
    if (!x.empty()) {
      std::memcpy(both_.host(), x.data(), bytes_);
    }
  }

  /// On the device: for calls.
  T* data() { return reinterpret_cast<T*>(both_.device()); }
  /// On the host, as the calls before have left it; what is not const may be written.
  T* host() { return reinterpret_cast<T*>(both_.host()); }
  const T* host() const { return reinterpret_cast<const T*>(both_.host()); }
  T& operator[](std::ptrdiff_t i) { return host()[i]; }
  const T& operator[](std::ptrdiff_t i) const { return host()[i]; }
  std::size_t size() const { return count_; }
  /// Sets every byte, in the order of calls.
  void fill(int byte) { both_.fill(byte, bytes_); }

  /// Is everything behind it as it was?
  bool intact() const {
    const unsigned char* const behind = both_.host() + bytes_;
    return std::all_of(behind, behind + guard_bytes(), [](unsigned char x) { return x == 0x5a; });
  }
  std::vector<unsigned char> bytes() const { return {both_.host(), both_.host() + bytes_}; }

 private:
  static std::size_t guard_bytes() {
#ifdef KVMELD_FIBERS_ASAN
    return 0;
#else
    return guard;
#endif
  }
  std::size_t count_, bytes_;
  two_sides both_;
};

/// `check` with a number of one scalar: the three take turns, where all with everything would
/// repeat itself.
template <class Check>
void in_turn(std::uint64_t turn, Check check) {
  if (turn % 3 == 0) {
    check(float{});
  } else if (turn % 3 == 1) {
    check(half{});
  } else {
    check(bfloat16{});
  }
}

/// The larger of two errors, NaN above all.
inline double worse(double a, double b) { return a != a ? a : b <= a ? a : b; }

struct cache_case {
  index_t heads = 2;
  index_t capacity = 40;
  index_t dim = 32;
  index_t group = 1;
  bool paged = false;
  index_t odd = 0;         ///< elements between rows, so that they are not aligned
  bool sequences = false;  ///< as `paged` in any case: heads of a sequence lie side by side
  float scale = 0.125F;
  index_t page = 4;              ///< slots of a page
  const rotary* rope = nullptr;  ///< of the keys, for the CPU's library; null: as the fixtures
  index_t spare = 0;             ///< behind the capacity, in arrays of `cache_view`
  float soft_cap = 0;            ///< as of `attention_spec`
  bool sinks = false;            ///< has every query head a sink?

  /// `[heads · group]`, or none.
  std::vector<float> sink_logits() const {
    std::vector<float> x(static_cast<std::size_t>(sinks ? heads * group : 0));
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<float>(i * 7 % 5) - 1.5F;
    }
    return x;
  }
  /// The sum of exponentials over e^max that a softmax begins with.
  double sink(index_t h, index_t g, double max) const {
    return sinks ? std::exp(double{sink_logits()[static_cast<std::size_t>(h * group + g)]} - max)
                 : 0;
  }
  /// A model's logit of a product, but for the log-mass.
  double logit(double dot) const {
    const double l = double{scale} * dot, cap = double{soft_cap};
    return cap == 0 ? l : cap * std::tanh(l / cap);
  }
  index_t stride() const { return capacity + spare; }
  /// Heads that share a sequence's slots, or its pages: all, or two of an even number.
  index_t together() const { return !paged && !sequences ? 1 : heads % 2 == 0 ? 2 : heads; }
};

/// A cache with its own memory and a state of `columns` columns.
template <class Scalar>
struct device_cache {
  cache_case shape;
  std::ptrdiff_t side, row;  // a head beside the next, a slot after another
  index_t pages;
  device_buffer<Scalar> keys, values;
  device_buffer<index_t> table;
  device_buffer<float> log_mass;
  device_buffer<index_t> position, length, next_position;
  device_buffer<float> columns, memory, sinks;
  state_view state;
  const attention_spec* spec = nullptr;  ///< as of `cache_view`

  device_cache(const cache_case& c, const std::vector<index_t>& lengths, std::uint64_t seed,
               std::vector<slot_reduce> folds = {}, index_t floats = 0)
      : shape(c),
        side(row_elements<Scalar>(c.dim) + c.odd),
        row(side * c.together()),
        pages((c.capacity + c.page - 1) / c.page),
        keys(elements()),
        values(elements()),
        table(static_cast<std::size_t>(c.heads / c.together() * pages)),
        log_mass(slots()),
        position(slots()),
        length(lengths),
        next_position(lengths),
        columns(slots() * folds.size()),
        memory(static_cast<std::size_t>(c.heads * floats), 0),
        sinks(c.sink_logits()) {
    emulator::chance random{seed};
    if constexpr (!in_blocks<Scalar>) {
      for (std::size_t i = 0; i < keys.size(); ++i) {
        keys.host()[i] = from_float<Scalar>(whole(random, 4));
        values.host()[i] = from_float<Scalar>(whole(random, 8));
      }
    }
    for (std::size_t i = 0; i < table.size(); ++i) {  // pages in an order of their own
      table.host()[i] = static_cast<index_t>((i * 7 + 3) % table.size());
    }
    std::vector<char> used(table.size(), 0);
    for (std::size_t i = 0; i < table.size(); ++i) {  // ... each once
      index_t p = table.host()[i];
      while (used[static_cast<std::size_t>(p)] != 0) {
        p = (p + 1) % static_cast<index_t>(table.size());
      }
      used[static_cast<std::size_t>(p)] = 1;
      table.host()[i] = p;
    }
    for (index_t h = 0; h < c.heads; ++h) {
      for (index_t s = c.capacity; s < c.stride(); ++s) {  // no kernel reads these
        log_mass[at(h, s)] = NAN, position[at(h, s)] = -1;
      }
      for (index_t s = 0; s < c.capacity; ++s) {
        if constexpr (in_blocks<Scalar>) {
          fill_blocks(key(h, s), c.dim, random), fill_blocks(value(h, s), c.dim, random);
        }
        log_mass[at(h, s)] = 0.25F * static_cast<float>(random.below(4));
        position[at(h, s)] = s;
        for (std::size_t k = 0; k < folds.size(); ++k) {
          columns[static_cast<std::ptrdiff_t>(k * slots()) + at(h, s)] =
              static_cast<float>(random.below(16));
        }
      }
    }
    state = {.columns = columns.data(),
             .count = static_cast<index_t>(folds.size()),
             .column_stride = static_cast<std::ptrdiff_t>(slots()),
             .head_stride = c.stride(),
             .memory = memory.data(),
             .floats = floats,
             .memory_stride = floats};
    for (std::size_t k = 0; k < folds.size(); ++k) {
      state.merges[k] = folds[k];
    }
  }

  std::size_t slots() const { return static_cast<std::size_t>(shape.heads * shape.stride()); }
  std::ptrdiff_t at(index_t h, index_t s) const { return std::ptrdiff_t{h} * shape.stride() + s; }
  float& column(index_t c, index_t h, index_t s) {
    return columns[static_cast<std::ptrdiff_t>(slots()) * c + at(h, s)];
  }
  Scalar* key(index_t h, index_t s) { return keys.host() + offset(h, s); }
  Scalar* value(index_t h, index_t s) { return values.host() + offset(h, s); }

  cache_view<Scalar> view() {
    const auto plane_of = [&](Scalar* data) {
      const plane<Scalar> alone{.data = data, .head = row * shape.capacity, .row = row};
      const plane<Scalar> sequences{.data = data,
                                    .head = side,
                                    .row = row,
                                    .heads = shape.together(),
                                    .sequence = row * shape.capacity};
      const plane<Scalar> paged{.data = data,
                                .head = side,
                                .row = row,
                                .heads = shape.together(),
                                .table = table.data(),
                                .pages = pages,
                                .slots = shape.page,
                                .page = row * shape.page};
      return shape.paged ? paged : shape.sequences ? sequences : alone;
    };
    return {plane_of(keys.data()),
            plane_of(values.data()),
            log_mass.data(),
            position.data(),
            length.data(),
            next_position.data(),
            shape.heads,
            shape.capacity,
            shape.dim,
            shape.group,
            shape.scale,
            spec,
            nullptr,
            0,
            shape.stride(),
            {shape.soft_cap, shape.scale},
            shape.sinks ? sinks.data() : nullptr};
  }

  void check_guards() const {
    CHECK((keys.intact() && values.intact() && table.intact() && log_mass.intact() &&
           position.intact() && length.intact() && next_position.intact() && columns.intact() &&
           memory.intact() && sinks.intact()));
  }

 private:
  std::size_t elements() const {
    const index_t sequences = shape.heads / shape.together(),
                  rows = sequences * (shape.paged ? pages * shape.page : shape.capacity);
    return static_cast<std::size_t>(rows * row);
  }
  std::ptrdiff_t offset(index_t h, index_t s) const {
    const index_t sequence = h / shape.together();
    const std::ptrdiff_t first = h % shape.together() * side;
    if (!shape.paged) {
      return first + (std::ptrdiff_t{sequence} * shape.capacity + s) * row;
    }
    const index_t page = table[std::ptrdiff_t{sequence} * pages + s / shape.page];
    return first + (std::ptrdiff_t{page} * shape.page + s % shape.page) * row;
  }
};

}  // namespace kvmeld::cuda
