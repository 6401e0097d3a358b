// SPDX-License-Identifier: MIT
/// The card that the benches are held against: memory, time without L2, its own copy and matrix
/// rates.
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvmeld/cuda/device/device.cuh"

namespace card {

using namespace kvmeld;
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
  /// The first `n` elements.
  std::vector<T> host(std::size_t n) const {
    std::vector<T> x(n);
    check(cudaMemcpy(x.data(), data_, n * sizeof(T), cudaMemcpyDeviceToHost), "to host");
    return x;
  }
  std::vector<T> host() const { return host(n_); }

 private:
  T* data_ = nullptr;
  std::size_t n_;
};

/// What L2 holds before a run. `dirty`: lines just written, whose way back to memory the run pays
/// for, as it would behind another kernel; `clean`: lines just read.
enum class l2 { dirty, clean };

/// Reads 16 bytes a thread.
struct read_memory {
  static constexpr index_t threads = 1024;
  static constexpr bool of_heads = false;
  struct shared_memory {};
  const float* from;
  float* out;

  KVMELD_DEVICE void operator()(shared_memory&) const {
    const auto i = static_cast<std::ptrdiff_t>(block_start()) + cuda::thread_index();
    const auto x = cuda::load_16(from + i * 4);
    if (x[0] == 1.5F && x[1] == 2.5F && x[2] == 3.5F && x[3] == 4.5F) {  // never: so it is read
      *out = x[0];
    }
  }
  KVMELD_DEVICE static index_t block_start() {
    return static_cast<index_t>(cuda::block_index().x) * threads;
  }
};

/// Fills L2 with something else.
inline void flush(l2 how) {
  static const buffer<float> other(std::size_t{64} << 20);
  check(cudaMemsetAsync(other.data(), 1, other.size() * sizeof(float)), "flush");
  if (how == l2::clean) {
    const auto blocks = static_cast<unsigned>(other.size() / (4 * read_memory::threads));
    cuda::launch(read_memory{other.data(), other.data()}, {blocks}, nullptr);
  }
}

/// Times `run` alone, with L2 full of something else.
template <class Run>
double seconds(Run run, l2 how = l2::dirty) {
  static cudaEvent_t begin = nullptr, end = nullptr;
  if (begin == nullptr) {
    check(cudaEventCreate(&begin), "event"), check(cudaEventCreate(&end), "event");
  }
  flush(how);
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

/// mma.sync on registers alone: what the tensor cores give to kernels of this kind. Every chain has
/// numbers of its own, or the compiler would make one of all.
struct multiply_registers {
  static constexpr index_t threads = 256, rounds = 4096, chains = 8;
  static constexpr bool of_heads = false;
  struct shared_memory {};
  const unsigned* numbers;  // [chains, 6, threads] pairs of bfloat16
  float* out;

  KVMELD_DEVICE void operator()(shared_memory&) const {
    float c[chains][4] = {};
    unsigned a[chains][4], b[chains][2];
    KVMELD_UNROLL
    for (index_t i = 0; i < chains; ++i) {
      const unsigned* const mine = numbers + i * 6 * threads + cuda::thread_index();
      KVMELD_UNROLL
      for (index_t k = 0; k < 4; ++k) {
        a[i][k] = mine[k * threads];
      }
      b[i][0] = mine[4 * threads], b[i][1] = mine[5 * threads];
    }
    for (index_t r = 0; r < rounds; ++r) {
      KVMELD_UNROLL
      for (index_t i = 0; i < chains; ++i) {
        cuda::mma_16x8x16<bfloat16>(c[i], a[i], b[i]);
      }
    }
    float sum = 0;
    KVMELD_UNROLL
    for (index_t i = 0; i < chains; ++i) {
      sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
    }
    out[static_cast<index_t>(cuda::block_index().x) * threads + cuda::thread_index()] = sum;
  }
};

/// What the maker's data sheet gives for dense bfloat16 products, operations a second; 0: not
/// known.
inline double data_sheet_rate() {
  cudaDeviceProp card{};
  check(cudaGetDeviceProperties(&card, 0), "properties");
  const std::string name = card.name;
  struct sheet {
    const char* name;
    double teraflops;
  };
  for (const sheet& x : {sheet{"H100 PCIe", 756},
                         {"H100 NVL", 835},
                         {"H100", 989},
                         {"H200", 989},
                         {"A100", 312},
                         {"B200", 2250}}) {
    if (name.find(x.name) != std::string::npos) {
      return x.teraflops * 1e12;
    }
  }
  return 0;
}

inline double matrix_rate() {
  static const double rate = [] {
    constexpr unsigned blocks = 132 * 16;
    std::vector<unsigned> pairs(std::size_t{multiply_registers::chains} * 6 *
                                multiply_registers::threads);
    std::mt19937 random(1);
    std::normal_distribution<float> number;
    for (unsigned& x : pairs) {
      const bfloat16 two[2] = {__float2bfloat16(number(random)), __float2bfloat16(number(random))};
      std::memcpy(&x, two, sizeof x);
    }
    const buffer<unsigned> numbers(pairs);
    const buffer<float> out(std::size_t{blocks} * multiply_registers::threads);
    const double time = best_of(5, [&] {
      cuda::launch(multiply_registers{numbers.data(), out.data()}, {blocks}, nullptr);
    });
    const double measured = 2.0 * 16 * 8 * 16 * multiply_registers::chains *
                            multiply_registers::rounds * (multiply_registers::threads / 32) *
                            blocks / time,
                 most = data_sheet_rate();
    if (most > 0 && measured > most) {
      throw std::runtime_error("mma.sync at " + std::to_string(measured * 1e-12) +
                               " TFLOP/s, of which the card has " + std::to_string(most * 1e-12) +
                               ": the compiler has left products out");
    }
    return measured;
  }();
  return rate;
}

}  // namespace card
