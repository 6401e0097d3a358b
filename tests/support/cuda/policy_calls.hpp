// SPDX-License-Identifier: MIT
/// What parity tests call of a policy: `observe`, `compress` and `step`, and the comparisons with
/// the library that many of them share. On the emulator all this is compiled once for the library's
/// policies (tests/cuda/compiled): kernels are what takes long.
#pragma once

#include <cstdint>

#include "kvmeld/cuda/compress.cuh"
#include "kvmeld/cuda/observe.cuh"
#include "kvmeld/cuda/step.cuh"

namespace kvmeld {
inline namespace v0 {
struct d2o;
struct ems;
struct fold;
struct h2o;
struct keepkv;
struct kvmerger;
struct snapkv;
struct streaming_llm;
struct tova;
struct zsmerge;
}  // namespace v0
}  // namespace kvmeld

namespace kvmeld::cuda {

struct cache_case;
struct prompt_case;
struct stream_case;

template <class Policy, class Scalar>
struct policy_calls {
  static void observe(const Policy& p, const cache_view<Scalar>& cache, const state_view& state,
                      const query_rows<row_number<Scalar>>& queries, workspace memory,
                      const stream& on);
  static void compress(const Policy& p, const cache_view<Scalar>& cache, const state_view& state,
                       const query_rows<row_number<Scalar>>& queries, const head_budgets& limits,
                       workspace memory, const stream& on);
  static void step(const Policy& p, const cache_view<Scalar>& cache, const state_view& state,
                   const row_number<Scalar>* queries, const new_tokens<row_number<Scalar>>& fresh,
                   const head_budgets& limits, row_number<Scalar>* out, workspace memory,
                   const stream& on);
  static void step(const Policy& p, const cache_view<Scalar>& cache, const state_view& state,
                   const step_attention<row_number<Scalar>>& attended, const head_budgets& limits,
                   workspace memory, const stream& on);
  static void accept(const Policy& p, const cache_view<Scalar>& cache, const state_view& state,
                     const row_number<Scalar>* queries,
                     const new_tokens<row_number<Scalar>>& drafted, index_t tokens,
                     const index_t* accepted, const head_budgets& limits, row_number<Scalar>* out,
                     index_t* list, workspace memory, const stream& on);

  /// prompt_parity.hpp
  static void check_compress(const Policy& p, cache_case c, const prompt_case& what,
                             double tolerance, std::uint64_t seed);
  /// step_parity.hpp
  static void check_steps(const Policy& p, const cache_case& c, const stream_case& what,
                          double tolerance, std::uint64_t seed);
};

template <class Policy, class Scalar>
void policy_calls<Policy, Scalar>::observe(const Policy& p, const cache_view<Scalar>& cache,
                                           const state_view& state,
                                           const query_rows<row_number<Scalar>>& queries,
                                           workspace memory, const stream& on) {
  cuda::observe(p, cache, state, queries, memory, on);
}

template <class Policy, class Scalar>
void policy_calls<Policy, Scalar>::compress(const Policy& p, const cache_view<Scalar>& cache,
                                            const state_view& state,
                                            const query_rows<row_number<Scalar>>& queries,
                                            const head_budgets& limits, workspace memory,
                                            const stream& on) {
  cuda::compress(p, cache, state, queries, limits, memory, on);
}

template <class Policy, class Scalar>
void policy_calls<Policy, Scalar>::step(const Policy& p, const cache_view<Scalar>& cache,
                                        const state_view& state, const row_number<Scalar>* queries,
                                        const new_tokens<row_number<Scalar>>& fresh,
                                        const head_budgets& limits, row_number<Scalar>* out,
                                        workspace memory, const stream& on) {
  cuda::step(p, cache, state, queries, fresh, limits, out, memory, on);
}

template <class Policy, class Scalar>
void policy_calls<Policy, Scalar>::step(const Policy& p, const cache_view<Scalar>& cache,
                                        const state_view& state,
                                        const step_attention<row_number<Scalar>>& attended,
                                        const head_budgets& limits, workspace memory,
                                        const stream& on) {
  cuda::step(p, cache, state, attended, limits, memory, on);
}

template <class Policy, class Scalar>
void policy_calls<Policy, Scalar>::accept(const Policy& p, const cache_view<Scalar>& cache,
                                          const state_view& state,
                                          const row_number<Scalar>* queries,
                                          const new_tokens<row_number<Scalar>>& drafted,
                                          index_t tokens, const index_t* accepted,
                                          const head_budgets& limits, row_number<Scalar>* out,
                                          index_t* list, workspace memory, const stream& on) {
  cuda::accept(p, cache, state, queries, drafted, tokens, accepted, limits, out, list, memory, on);
}

#ifndef __CUDACC__  // nvcc compiles each test with what it calls, on more cores
extern template struct policy_calls<streaming_llm, float>;
extern template struct policy_calls<streaming_llm, half>;
extern template struct policy_calls<streaming_llm, bfloat16>;
extern template struct policy_calls<h2o, float>;
extern template struct policy_calls<h2o, half>;
extern template struct policy_calls<h2o, bfloat16>;
extern template struct policy_calls<tova, float>;
extern template struct policy_calls<tova, half>;
extern template struct policy_calls<tova, bfloat16>;
extern template struct policy_calls<snapkv, float>;
extern template struct policy_calls<snapkv, half>;
extern template struct policy_calls<snapkv, bfloat16>;
extern template struct policy_calls<zsmerge, float>;
extern template struct policy_calls<zsmerge, half>;
extern template struct policy_calls<zsmerge, bfloat16>;
extern template struct policy_calls<d2o, float>;
extern template struct policy_calls<d2o, half>;
extern template struct policy_calls<d2o, bfloat16>;
extern template struct policy_calls<keepkv, float>;
extern template struct policy_calls<keepkv, half>;
extern template struct policy_calls<keepkv, bfloat16>;
extern template struct policy_calls<kvmerger, float>;
extern template struct policy_calls<kvmerger, half>;
extern template struct policy_calls<kvmerger, bfloat16>;
extern template struct policy_calls<ems, float>;
extern template struct policy_calls<ems, half>;
extern template struct policy_calls<ems, bfloat16>;
extern template struct policy_calls<fold, float>;
extern template struct policy_calls<fold, half>;
extern template struct policy_calls<fold, bfloat16>;
extern template struct policy_calls<streaming_llm, q8_0<float>>;
extern template struct policy_calls<h2o, q8_0<float>>;
extern template struct policy_calls<snapkv, q8_0<float>>;
extern template struct policy_calls<h2o, fp8_e4m3<float>>;
extern template struct policy_calls<zsmerge, q8_0<float>>;
extern template struct policy_calls<zsmerge, fp8_e4m3<float>>;
extern template struct policy_calls<kvmerger, q8_0<float>>;
extern template struct policy_calls<kvmerger, fp8_e4m3<float>>;
extern template struct policy_calls<d2o, q8_0<float>>;
extern template struct policy_calls<d2o, fp8_e4m3<float>>;
extern template struct policy_calls<keepkv, q8_0<float>>;
extern template struct policy_calls<keepkv, fp8_e4m3<float>>;
extern template struct policy_calls<fold, q8_0<float>>;
extern template struct policy_calls<fold, fp8_e4m3<float>>;
extern template struct policy_calls<ems, q8_0<float>>;
extern template struct policy_calls<ems, fp8_e4m3<float>>;
#endif

}  // namespace kvmeld::cuda
