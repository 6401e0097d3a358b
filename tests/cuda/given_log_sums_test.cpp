// SPDX-License-Identifier: MIT
// Column sums on the log-sum-exp that the prefill's attention left.
#include <catch2/catch.hpp>
#include <cmath>

#include "cuda/device_cache.hpp"
#include "kvmeld/cuda/score/column_scores.cuh"

namespace kvmeld::cuda {
namespace given_log_sums_test {

/// Column sums in memory of the test's own.
template <class Scalar>
std::vector<float> sums_of(device_cache<Scalar>& kv, const cache_view<Scalar>& view,
                           const query_rows<Scalar>& queries) {
  device_buffer<float> out(kv.slots(), 0);
  device_buffer<unsigned char> memory(
      column_scores_workspace_bytes(view.heads, view.group, queries.count, view.capacity));
  column_scores(view, queries, {}, {out.data()}, {memory.data(), memory.size()}, order());
  return {std::as_const(out).host(), std::as_const(out).host() + kv.slots()};
}

TEST_CASE("a prefill's log-sum-exp is taken, by place, and windows take theirs of it") {
  constexpr index_t count = 20, group = 2, dim = 40;
  device_cache<half> kv({.heads = 3, .capacity = 60, .dim = dim, .group = group}, {60, 47, 33}, 7);
  emulator::chance random{8};
  device_buffer<half> q(std::size_t{2} * group * count * dim);
  for (std::ptrdiff_t i = 0; i < static_cast<std::ptrdiff_t>(q.size()); ++i) {
    q[i] = from_float<half>(0.25F * whole(random, 4));
  }
  device_buffer<index_t> list(std::vector<index_t>{2, 0});
  const auto view = kv.view().with_active(list.data(), 2);
  query_rows<half> queries{q.data(), count, group * count * dim, count * dim, dim};
  device_buffer<float> by_head(std::size_t{3} * group * count),
      left(std::size_t{2} * group * count);
  detail::log_sums(view, queries, {}, by_head.data(), order());
  for (std::ptrdiff_t i = 0; i < group * count; ++i) {
    left[i] = std::as_const(by_head)[2 * group * count + i];
    left[group * count + i] = std::as_const(by_head)[i];
  }
  const auto wanted = sums_of(kv, view, queries), late = sums_of(kv, view, queries.reference(7));
  queries.log_sum_exp = left.data();
  CHECK(sums_of(kv, view, queries) == wanted);
  const auto window = sums_of(kv, view, queries.reference(7));
  device_buffer<index_t> indptr(std::vector<index_t>{0, count});
  query_rows<half> packed = queries;  // of one prompt, in a call for longer ones
  packed.count = count + 4, packed.indptr = indptr.data(), packed.heads = 2;
  packed.log_sum_row = count;
  const auto of_packed = sums_of(kv, view, packed);
  packed.log_sum_exp = nullptr;
  const auto computed = sums_of(kv, view, packed);
  double worst = 0;
  for (std::size_t s = 0; s < late.size(); ++s) {
    worst = worse(worst, std::abs(double{window[s]} - double{late[s]}));
    worst = worse(worst, std::abs(double{of_packed[s]} - double{wanted[s]}));
    worst = worse(worst, std::abs(double{computed[s]} - double{wanted[s]}));
  }
  CHECK(worst < 1e-5);
  queries.before = 5, queries.data += 5 * dim, queries.count = 15;
  CHECK(queries.reference(17).log_sum_exp == nullptr);  // not of those before
  CHECK(queries.reference(15).log_sum_exp == left.data());
  for (std::ptrdiff_t i = 0; i < 2 * group * count; ++i) {
    left[i] += 1;  // it is used
  }
  queries = {q.data(), count, group * count * dim, count * dim, dim};
  queries.log_sum_exp = left.data();
  CHECK(std::abs(sums_of(kv, view, queries)[3] * std::exp(1.0F) - wanted[3]) < 1e-5F);
}

}  // namespace given_log_sums_test
}  // namespace kvmeld::cuda
