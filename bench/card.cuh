/// The card that the benches are held against: memory, time without L2, its own copy and matrix
/// rates.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvfold/cuda/device/device.cuh"

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

}  // namespace card
