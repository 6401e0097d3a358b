// SPDX-License-Identifier: MIT
/// The thin layer that kernels stand on. It has two implementations: nvcc's, which is the hardware,
/// and an emulator for every other compiler (`tests/support/cuda`), on which the same kernels run
/// without a GPU.
///
/// A kernel is a trivially copyable value, passed to the device as it is:
///
///     struct add_one {
///       static constexpr index_t threads = 256;   // of a block, a multiple of 32
///       struct shared_memory {                    // of a block; whatever it holds at first
///         shared_array<float, 256> tile;
///       };
///       float* x;                                 // [n]
///       KVMELD_DEVICE void operator()(shared_memory& shared) const { ... }
///     };
///     launch(add_one{x}, {.x = blocks}, stream);
///
/// `static constexpr index_t resident`, where a kernel has it, says how many blocks a
/// multiprocessor is to hold at once: fewer registers a thread.
///
/// `static constexpr bool roomy = true`: the kernel takes more than the 99 KiB of shared memory
/// that a block has on every card, and another is launched where it does not `fits<Kernel>()`.
///
/// What a kernel may call (`mask`: the lanes of the warp that take part; all by default):
///
///     thread_index(), lane(), warp()              0 <= thread_index() < threads
///     block_index(), grid()                       .x, .y, .z; as an `index_t`: block_y(), grid_y()
///     sync_block()                                all threads of the block, none missing
///     sync_warp(mask)                             orders shared memory within the warp
///     shuffle(x, from, mask)                      x of lane `from`
///     shuffle_xor(x, distance, mask)              x of lane `lane() ^ distance`
///     ballot(yes, mask)                           a bit for every lane
///     equal_lanes(x, mask)                        the lanes that have the same integer
///     lowest_lane(lanes), count_lanes(lanes)      of such bits; the lowest of not none
///     reduce_sum(x, width), reduce_max(x, width)  over groups of `width` lanes, a power of two;
///                                                 a butterfly, the same bits in every lane
///     reduce_min(n)                               of an integer, over the warp
///     add_shared(element, n), add_global(p, n)    atomic on integers; what was there before
///     load_16(p), store_16(p, x)                  a `vector_16`: 16 bytes of global memory
///     array.vector(i), array.set_vector(i, x)     ... and of shared memory
///     load_words(p), array.words(i)               the same 16 bytes as four registers
///     copy_async(array, i, from, bytes)           16 bytes to shared memory, zeros after `bytes`
///     copy_async<reads::once>(...)                ... that L2 need not keep
///     commit_async(), wait_async<n>()             ... until all groups but the last n are there
///     prefetch(p)                                 the bytes about p will be read soon
///     array.pair(i), load_pair(p), pair_of(a, b)  two 16-bit elements in a register
///     low_of<T>(x), high_of<T>(x)                 ... and each of them
///     min_pairs<half>(x, y)                       the lesser of each; no NaN
///     store_pair(p, a, b)                         two floats at a multiple of 8 bytes
///     load_matrices(array, i)                     four 8 × 8 matrices of 16-bit elements: `i` of
///                                                 lane l is where row l mod 8 of matrix l / 8
///                                                 begins, a multiple of 8; lane l gets columns
///                                                 2 (l mod 4) and the next of row l / 4 of each
///     load_matrices_transposed(array, i)          ... of each matrix's transpose
///     transposed(x)                               of one matrix that lies so over the lanes
///     mma_16x8x16<T>(c, a, b)                     c += a b on the tensor cores, T half or bfloat16
///     thread_fence()                              earlier writes are seen by all blocks
///                                                 before later ones
///     to_float(x), from_float<T>(x)               of float, half, bfloat16
///     fp8_to_float(bits), fp8_from_float(x)       of e4m3: no number beyond 448
///     multiply_add(a, b, c)                       a · b + c of float, rounded once
///     exp2_approx(x), log2_approx(x)              2^x and log2 x of float, to about 2^-22; a
///                                                 result or an x below 2^-126 is 0
///     exponential(x), logarithm(x), square_root(x)
///                                                 of float, double
///     inverse_square_root(x)                      of float, to about 2^-22
///     cosine_pi(x), sine_pi(x)                    of π x; float, |x| ≤ 1
///     power(x, y), nearest_integer(x)             of double
///     let_next_start(), wait_for_previous()       see `launch_early`
///
/// `KVMELD_DEVICE` is for what kernels alone may call, `KVMELD_HD` for what tests and users may
/// call on the host too. nvcc lets a template call the former on the host, where the program ends
/// without a word: `tests/cuda/host_calls` refuses such objects.
///
/// `shared_union<A, B>` is the same shared memory, first as an `A`, then as a `B`, both arrays.
/// Registers have no addresses: a loop over an array of them is `unrolled<N>(use)`, loops within
/// each other `unrolled<M, N>(use)`, and `KVMELD_UNROLL` marks one with a condition or a step of
/// its own. Instructions that run once are read from memory: a loop that is to stay short carries
/// `KVMELD_ROLLED`.
///
/// `stream`, `event`, `fits`, `blocks_at_once`, `launch`, `launch_early`, `copy_to_host` and
/// `is_done` are the host's side: asynchronous, and `cuda_error` when refused. A kernel launched
/// early may begin while the launch before it still runs, once all that one's blocks have called
/// `let_next_start` or ended; every thread calls `wait_for_previous` before it touches what that
/// launch touches.
#pragma once

#include <type_traits>  // std::integral_constant

#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/memory/head_state.hpp"
#include "kvmeld/score/observation.hpp"
#include "kvmeld/search/rules.hpp"

#ifdef __CUDACC__
#define KVMELD_DEVICE __device__
#define KVMELD_UNROLL _Pragma("unroll")
#define KVMELD_ROLLED _Pragma("unroll 1")
#include "kvmeld/cuda/device/hardware.cuh"
#elif __has_include("cuda/emulator.hpp")
#define KVMELD_DEVICE
#define KVMELD_UNROLL
#define KVMELD_ROLLED
#include "cuda/emulator.hpp"
#else
#error "kvmeld::cuda: expected nvcc, or kvmeld's tests/support in the include path for the emulator"
#endif

namespace kvmeld::cuda {

/// e^x = 2^(x · log2 e), ln x = log2 x · ln 2.
inline constexpr float log2_e = 1.4426950408889634F, ln_2 = 0.6931471805599453F;

KVMELD_DEVICE inline index_t block_y() { return static_cast<index_t>(block_index().y); }
KVMELD_DEVICE inline index_t block_z() { return static_cast<index_t>(block_index().z); }
KVMELD_DEVICE inline index_t grid_y() { return static_cast<index_t>(grid().y); }
KVMELD_DEVICE inline index_t grid_z() { return static_cast<index_t>(grid().z); }
/// Blocks along a grid, for `n` of something of which a block takes `each`.
inline unsigned blocks_of(index_t n, index_t each = 1) {
  return static_cast<unsigned>((n + each - 1) / each);
}

/// `f(std::integral_constant)` of the least of `Depth` and `Depths`, which ascend, in which rows of
/// `dim` find room.
template <index_t Depth, index_t... Depths, class F>
auto with_depth(index_t dim, F f) {
  if constexpr (sizeof...(Depths) > 0) {
    if (dim > Depth) {
      return with_depth<Depths...>(dim, f);
    }
  }
  return f(std::integral_constant<index_t, Depth>{});
}

/// `use(m)` for all `m < M`, one after the other.
template <index_t M, class Use>
KVMELD_DEVICE void unrolled(Use use) {
  KVMELD_UNROLL
  for (index_t m = 0; m < M; ++m) {
    use(m);
  }
}
/// ... `use(m, n)` with all `n < N` for each, or `use(m, n, i)`.
template <index_t M, index_t N, class Use>
KVMELD_DEVICE void unrolled(Use use) {
  unrolled<M>([&](index_t m) { unrolled<N>([&](index_t n) { use(m, n); }); });
}
template <index_t M, index_t N, index_t I, class Use>
KVMELD_DEVICE void unrolled(Use use) {
  unrolled<M, N>([&](index_t m, index_t n) { unrolled<I>([&](index_t i) { use(m, n, i); }); });
}

/// `use(s, stage)` for `s` of `0 .. steps−1`, when what `load(s, stage)` started to copy to one of
/// `Stages` in turn is there for the block, which has used up what lay there before. Loads run
/// ahead by all stages but one.
template <index_t Stages, class Load, class Use>
KVMELD_DEVICE void each_staged(index_t steps, Load load, Use use) {
  const auto start = [&](index_t s, index_t stage) {
    if (s < steps) {
      load(s, stage);
    }
    commit_async();
  };
  unrolled<Stages - 1>([&](index_t s) { start(s, s); });
  KVMELD_ROLLED
  for (index_t s = 0, stage = 0; s < steps; ++s) {
    wait_async<Stages - 2>();
    sync_block();
    start(s + Stages - 1, stage == 0 ? Stages - 1 : stage - 1);
    use(s, stage);
    stage = stage == Stages - 1 ? 0 : stage + 1;
  }
  wait_async<0>();
}

}  // namespace kvmeld::cuda

#include "kvmeld/cuda/device/idle.cuh"
