// SPDX-License-Identifier: MIT
// Column sums, lookahead and matching for each scalar, as nvcc compiles them for the hardware.
#include "kvmeld/cuda/score/column_scores.cuh"
#include "kvmeld/cuda/score/lookahead.cuh"
#include "kvmeld/cuda/search/match.cuh"
#include "kvmeld/memory/attention_spec.hpp"

namespace kvmeld::cuda {

template <class Scalar>
struct every_kernel {
  static void call(const cache_view<Scalar>& cache, const slot_lists& slots, const matches& out,
                   workspace memory, stream stream) {
    column_scores(cache, query_rows<Scalar>{}, {}, {}, memory, stream);
    lookahead(cache, query_rows<Scalar>{}, {}, static_cast<Scalar*>(nullptr), nullptr, stream);
    lookahead(cache_view<q8_0<Scalar>>{}, {}, {}, static_cast<Scalar*>(nullptr), nullptr, stream);
    match(dot_similarity{}, cache, slots, slots, out, memory, stream);
    match(cosine_similarity{}, cache, slots, slots, out, memory, stream);
  }
};

template struct every_kernel<KVMELD_SCALAR>;

}  // namespace kvmeld::cuda
