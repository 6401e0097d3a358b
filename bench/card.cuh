/// The card that the benches are held against: memory, time without L2, its own copy and matrix
/// rates; and a cache on it.
#pragma once

#include <algorithm>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvfold/cuda/compress.cuh"
#include "kvfold/traits.hpp"

namespace card {

using namespace kvfold;
using cuda::bfloat16;

inline void check(cudaError_t code, const char* what) {
  if (code != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
  }
}

/// Device memory of `n` elements.
template <class T>
class buffer {
 public:
  explicit buffer(std::size_t n) : n_(n) {
    check(cudaMalloc(reinterpret_cast<void**>(&data_), n * sizeof(T)), "cudaMalloc");
    check(cudaMemset(data_, 0, n * sizeof(T)), "cudaMemset");
  }
  explicit buffer(const std::vector<T>& x) : buffer(x.size()) { *this = x; }
  buffer(const buffer&) = delete;
  ~buffer() { cudaFree(data_); }
  void operator=(const std::vector<T>& x) {
    if (x.size() != n_) {
      check(cudaFree(data_), "cudaFree");
      n_ = x.size();
      check(cudaMalloc(reinterpret_cast<void**>(&data_), n_ * sizeof(T)), "cudaMalloc");
    }
    check(cudaMemcpy(data_, x.data(), n_ * sizeof(T), cudaMemcpyHostToDevice), "to device");
  }
  T* data() const { return data_; }
  std::size_t size() const { return n_; }
  std::vector<T> host() const {
    std::vector<T> x(n_);
    check(cudaMemcpy(x.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost), "to host");
    return x;
  }

 private:
  T* data_ = nullptr;
  std::size_t n_;
};

inline std::vector<bfloat16> normal(std::size_t n, float scale = 1) {
  static std::mt19937 random(1);
  std::normal_distribution<float> number(0, scale);
  std::vector<bfloat16> x(std::min(n, std::size_t{1} << 20));
  for (bfloat16& y : x) {
    y = __float2bfloat16(number(random));
  }
  const std::size_t period = x.size();
  x.resize(n);
  for (std::size_t i = period; i < n; ++i) {
    x[i] = x[i - period];
  }
  return x;
}

/// Times `run` alone, with L2 full of something else.
template <class Run>
double seconds(Run run) {
  static const buffer<char> other(std::size_t{256} << 20);
  static cudaEvent_t begin = nullptr, end = nullptr;
  if (begin == nullptr) {
    check(cudaEventCreate(&begin), "event"), check(cudaEventCreate(&end), "event");
  }
  check(cudaMemsetAsync(other.data(), 1, other.size()), "flush");
  check(cudaEventRecord(begin), "event");
  run();
  check(cudaEventRecord(end), "event");
  check(cudaEventSynchronize(end), "run");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin, end), "event");
  return static_cast<double>(ms) * 1e-3;
}

template <class Run>
double best_of(int n, Run run) {
  double best = 1e9;
  for (int i = 0; i < n; ++i) {
    best = std::min(best, seconds(run));
  }
  return best;
}

/// Bytes a second that a device-to-device copy of 1 GiB reads and writes.
inline double copy_rate() {
  static const double rate = [] {
    const std::size_t bytes = std::size_t{1} << 30;
    const buffer<char> a(bytes), b(bytes);
    return 2.0 * static_cast<double>(bytes) / best_of(10, [&] {
             check(cudaMemcpyAsync(b.data(), a.data(), bytes, cudaMemcpyDeviceToDevice), "copy");
           });
  }();
  return rate;
}

/// mma.sync on registers alone: what the tensor cores give to kernels of this kind.
struct multiply_registers {
  static constexpr index_t threads = 256, rounds = 4096, chains = 8;
  struct shared_memory {};
  float* out;

  KVFOLD_DEVICE void operator()(shared_memory&) const {
    float c[chains][4] = {};
    const unsigned a[4] = {1, 2, 3, 4}, b[2] = {5, 6};
    for (index_t r = 0; r < rounds; ++r) {
      KVFOLD_UNROLL
      for (index_t i = 0; i < chains; ++i) {
        cuda::mma_16x8x16<bfloat16>(c[i], a, b);
      }
    }
    float sum = 0;
    KVFOLD_UNROLL
    for (index_t i = 0; i < chains; ++i) {
      sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
    }
    out[static_cast<index_t>(cuda::block_index().x) * threads + cuda::thread_index()] = sum;
  }
};

inline double matrix_rate() {
  static const double rate = [] {
    constexpr unsigned blocks = 132 * 16;
    const buffer<float> out(std::size_t{blocks} * multiply_registers::threads);
    const double time =
        best_of(5, [&] { cuda::launch(multiply_registers{out.data()}, {blocks}, nullptr); });
    return 2.0 * 16 * 8 * 16 * multiply_registers::chains * multiply_registers::rounds *
           (multiply_registers::threads / 32) * blocks / time;
  }();
  return rate;
}

struct cache_shape {
  index_t heads, length, capacity, dim = 128, group = 4;
};

/// A cache with random contents, and everything that is asked of it.
struct cache_on_device {
  cache_shape shape;
  std::vector<index_t> lengths;
  std::vector<float> fresh;  // columns
  buffer<bfloat16> keys, values, q, k, v, out;
  buffer<float> log_mass, columns, memory;
  buffer<index_t> position, length, seen;

  explicit cache_on_device(const cache_shape& s)
      : shape(s),
        lengths(static_cast<std::size_t>(s.heads), s.length),
        fresh(cuda::most_columns * slots()),
        keys(normal(slots() * n(s.dim))),
        values(normal(slots() * n(s.dim))),
        q(normal(n(s.heads * s.group * s.dim))),
        k(normal(n(s.heads * s.dim))),
        v(normal(n(s.heads * s.dim))),
        out(n(s.heads * s.group * s.dim)),
        log_mass(slots()),
        columns(cuda::most_columns * slots()),
        memory(n(s.heads) * 4),
        position(slots()),
        length(lengths),
        seen(lengths) {
    reset();
  }
  static std::size_t n(index_t x) { return static_cast<std::size_t>(x); }
  std::size_t slots() const { return n(shape.heads) * n(shape.capacity); }
  /// As it was, but for the rows' contents.
  void reset() {
    std::vector<index_t> order(slots());
    for (std::size_t i = 0; i < order.size(); ++i) {
      order[i] = static_cast<index_t>(i % n(shape.capacity));
    }
    position = order, length = lengths, seen = lengths;
    check(cudaMemset(log_mass.data(), 0, slots() * sizeof(float)), "reset");
    columns = fresh;
    check(cudaMemset(memory.data(), 0, memory.size() * sizeof(float)), "reset");
  }
  cuda::cache_view<bfloat16> view() const {
    const std::ptrdiff_t head = std::ptrdiff_t{shape.capacity} * shape.dim;
    return {{keys.data(), head, shape.dim},
            {values.data(), head, shape.dim},
            log_mass.data(),
            position.data(),
            length.data(),
            seen.data(),
            shape.heads,
            shape.capacity,
            shape.dim,
            shape.group,
            1 / std::sqrt(static_cast<float>(shape.dim))};
  }
  /// The state of a policy, as it is before anything was observed.
  template <class Policy>
  cuda::state_view state(const Policy& p) {
    cuda::state_view s;
    for (const auto& c : traits::columns(p)) {
      s.fold[s.count] = c.fold, s.initial[s.count] = c.initial;
      std::fill_n(fresh.begin() + s.count * static_cast<std::ptrdiff_t>(slots()), slots(),
                  c.initial);
      ++s.count;
    }
    const std::size_t floats = traits::memory(p, shape.dim, shape.group, shape.capacity);
    memory = std::vector<float>(n(shape.heads) * std::max(floats, std::size_t{1}));
    reset();
    s.columns = columns.data(), s.memory = memory.data();
    s.floats = static_cast<index_t>(floats);
    return s;
  }
  /// Bytes of K and V in use.
  double bytes() const { return 2.0 * shape.heads * shape.length * shape.dim * sizeof(bfloat16); }
};

}  // namespace card
