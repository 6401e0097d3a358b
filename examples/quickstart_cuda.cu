// SPDX-License-Identifier: MIT
// Compresses one prompt's cache on the GPU and decodes a token on it. The middle of main is the
// snippet of docs/how-to/cuda.md. Without a device it says so and exits with 77.
#include <cstdio>
#include <new>
#include <random>
#include <vector>

#include "kvmeld/cuda/compress.cuh"
#include "kvmeld/cuda/policies/h2o.cuh"
#include "kvmeld/cuda/state.cuh"
#include "kvmeld/cuda/step.cuh"

namespace {

/// Device memory, filled from the host.
template <class T>
struct on_device {
  T* data = nullptr;

  explicit on_device(const std::vector<T>& x) : on_device(x.size()) {
    cudaMemcpy(data, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice);
  }
  explicit on_device(std::size_t n) {
    if (cudaMalloc(reinterpret_cast<void**>(&data), n * sizeof(T)) != cudaSuccess) {
      throw std::bad_alloc{};
    }
    cudaMemset(data, 0, n * sizeof(T));
  }
  on_device(const on_device&) = delete;
  on_device& operator=(const on_device&) = delete;
  ~on_device() { cudaFree(data); }
};

std::vector<half> normal(std::size_t n) {
  static std::mt19937 random(1);
  std::normal_distribution<float> number;
  std::vector<half> x(n);
  for (half& y : x) {
    y = __float2half(number(random));
  }
  return x;
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no CUDA device");
    return 77;
  }
  namespace cuda = kvmeld::cuda;
  constexpr int heads = 8, group = 4, dim = 128, prompt = 2048, capacity = 4096;
  constexpr std::size_t slots = std::size_t{heads} * capacity;
  const on_device<half> keys(normal(slots * dim)), values(normal(slots * dim));
  std::vector<int> order(slots);
  for (std::size_t i = 0; i < slots; ++i) {
    order[i] = static_cast<int>(i % capacity);
  }
  const on_device<int> position(order), length(std::vector<int>(heads, prompt)),
      seen(std::vector<int>(heads, prompt));
  const on_device<float> log_mass(slots);
  const on_device<half> prompt_queries(normal(std::size_t{prompt} * heads * group * dim)),
      q(normal(std::size_t{heads} * group * dim)), k(normal(std::size_t{heads} * dim)),
      v(normal(std::size_t{heads} * dim)), out(std::size_t{heads} * group * dim);
  const cudaStream_t stream = nullptr;

  // clang-format off
  const cuda::plane<half> k_rows{keys.data, std::ptrdiff_t{capacity} * dim, dim};     // or paged
  const cuda::plane<half> v_rows{values.data, std::ptrdiff_t{capacity} * dim, dim};
  const cuda::cache_view<half> kv{k_rows, v_rows, log_mass.data, position.data, length.data, seen.data,
                                  heads, capacity, dim, group, 0.088F};
  const cuda::query_rows<half> queries{prompt_queries.data, prompt, group * dim, dim, heads * group * dim};

  const kvmeld::h2o policy{.recent = 0.25F};
  const on_device<char> scores(state_bytes(policy, kv));
  const cuda::state_view state = make_state_view(policy, kv, {scores.data, state_bytes(policy, kv)}, stream);
  const on_device<char> memory(workspace_bytes(policy, kv, prompt));
  const cuda::workspace work{memory.data, workspace_bytes(policy, kv, prompt)};

  compress(policy, kv, state, queries, {.slots = 205}, work, stream);                // 2048 → 205 slots a head
  step(policy, kv, state, q.data, cuda::new_tokens<half>{k.data, v.data}, {.slots = 205}, out.data,
       work, stream);                                                                 // one token
  // clang-format on
  int left = 0, tokens = 0;
  cudaMemcpy(&left, length.data, sizeof left, cudaMemcpyDeviceToHost);
  cudaMemcpy(&tokens, seen.data, sizeof tokens, cudaMemcpyDeviceToHost);
  const cudaError_t failed = cudaGetLastError();
  std::printf("%d tokens in %d slots a head (%s)\n", tokens, left, cudaGetErrorString(failed));
  return failed == cudaSuccess && left == 205 && tokens == prompt + 1 ? 0 : 1;
}
