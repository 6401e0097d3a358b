// SPDX-License-Identifier: MIT
/// Benches of a prompt: column sums, leverage, compressing it, carrying plans out. Arguments:
/// heads, tokens, for column sums the group.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cache_on_device.cuh"
#include "kvmeld/cuda/compress.cuh"
#include "kvmeld/cuda/policies/fold.cuh"
#include "kvmeld/cuda/policies/streaming_llm.cuh"
#include "measure.cuh"

namespace card {

/// What of a prompt asks: all of it, with the log-sum-exp given or not, or its last 32 queries.
enum class asked { all, log_sums_given, window };

inline void column_scores(benchmark::State& state, asked what) {
  const auto n = static_cast<index_t>(state.range(1));
  prompt p(static_cast<index_t>(state.range(0)), n, static_cast<index_t>(state.range(2)));
  auto view = p.kv.view();
  std::vector<float> log_sums;
  if (what == asked::log_sums_given) {  // of logits that are all about 0
    view.scale = 1e-9F;
    for (index_t i = 0; i < view.heads * view.group * n; ++i) {
      log_sums.push_back(std::log(static_cast<float>(i % n + 1)));
    }
  }
  const buffer<float> given(log_sums);
  const auto rows = what == asked::window ? p.rows().reference(32) : p.rows();
  const cuda::column_options options{.log_sum_exp = log_sums.empty() ? nullptr : given.data()};
  const buffer<char> memory(
      cuda::column_scores_workspace_bytes(view.heads, view.group, rows.count, view.capacity));
  const buffer<float> total(p.kv.slots());
  const auto run = [&] {
    cuda::column_scores(view, rows, options, {.total = total.data()},
                        {memory.data(), memory.size()}, nullptr);
  };
  run();
  double sum = 0;  // of one head: every query's probabilities sum to 1
  const auto sums = total.host(cache_on_device::n(n));
  for (std::size_t s = 0; s < cache_on_device::n(n); ++s) {
    sum += static_cast<double>(sums[s]);
  }
  const index_t asking = rows.count * view.group;
  if (!(std::abs(sum - asking) < 1e-3 * asking)) {
    return state.SkipWithError("the column sums do not sum to the queries");
  }
  const double causal = what == asked::window ? 32.0 * n : 0.5 * n * n,
               products = what == asked::log_sums_given ? 1 : 2;
  report_operations(state, 2 * products * view.heads * view.group * causal * 128,
                    measure(state, run));
}

/// Leverage of all keys, as `fold` pins by it.
inline void leverage(benchmark::State& state) {
  const auto heads = static_cast<index_t>(state.range(0)), n = static_cast<index_t>(state.range(1));
  prompt p(heads, n, 4);
  const auto columns = p.kv.state(fold{});
  const auto view = p.kv.view();
  const auto rule = cuda::detail::rule_of(fold{}, view);
  cuda::detail::leverage_scratch work{};
  cuda::workspace_allocator count;
  work.allocate(count, cuda::detail::shape_of(view));
  const buffer<char> memory(count.used());
  cuda::workspace_allocator from({memory.data(), memory.size()});
  work.allocate(from, cuda::detail::shape_of(view));
  const buffer<float> out(p.kv.slots());
  const buffer<index_t> planned(cache_on_device::n(heads));
  work.leverage = out.data();
  const auto run = [&] {
    cuda::detail::leverage_of_keys(view, columns, rule, kvmeld::budget{.slots = 0}, false, nullptr,
                                   planned.data(), work, nullptr);
  };
  run();
  double mean = 0;  // of x / (x + 1) over the eigenvalues, which are about 1, times 128
  for (const float x : out.host(cache_on_device::n(n))) {
    mean += static_cast<double>(x) / n;
  }
  if (!(mean > 50 && mean < 64.5)) {
    return state.SkipWithError("leverage is not that of normal keys");
  }
  measure(state, run);
}

/// A prompt to a quarter, by its queries or by the scores that are there already.
template <class Policy>
void compress(benchmark::State& state, const Policy& policy, bool asks = true) {
  const auto n = static_cast<index_t>(state.range(1)), target = n / 4;
  prompt p(static_cast<index_t>(state.range(0)), n, 4);
  const auto columns = p.kv.state(policy);
  const auto view = p.kv.view();
  // fold's reference queries are a choice, the others' are the prompt.
  auto queries = std::is_same_v<Policy, fold> ? p.rows().reference(256) : p.rows();
  queries.before = 0;
  if (!asks) {
    queries = {};
  }
  const buffer<char> memory(workspace_bytes(policy, view, queries.count, target));
  const cuda::workspace work{memory.data(), memory.size()};
  const auto run = [&] {
    cuda::compress(policy, view, columns, queries, {.slots = target}, work, nullptr);
  };
  run();
  const index_t left = p.kv.length.host()[0];
  if (left > target || left < target / 2) {
    return state.SkipWithError("a head is not at its budget after compress");
  }
  measure(state, run, l2::dirty, [&] { p.kv.reset(); });
}

/// A plan of `rows` rows of every head, of which each takes in the sources after those before it.
struct plan_on_device {
  buffer<index_t> rows, begin;
  buffer<merge_source> sources;
  buffer<float> mass;

  /// `ends[r]`: where row `r`'s sources end, among all slots in their order.
  plan_on_device(const cache_shape& s, const std::vector<index_t>& ends,
                 const std::vector<float>& weights)
      : rows(std::vector<index_t>(cache_on_device::n(s.heads), static_cast<index_t>(ends.size()))),
        begin(begins(s, ends)),
        sources(edges(s, ends, weights)),
        mass(cache_on_device::n(s.heads) * cache_on_device::n(s.capacity)) {}
  cuda::plan_view view() const { return {rows.data(), begin.data(), sources.data(), mass.data()}; }

 private:
  static std::vector<index_t> begins(const cache_shape& s, const std::vector<index_t>& ends) {
    const auto stride = cache_on_device::n(s.capacity + 1);
    std::vector<index_t> x(cache_on_device::n(s.heads) * stride);
    for (std::size_t h = 0; h < cache_on_device::n(s.heads); ++h) {
      std::copy(ends.begin(), ends.end(), x.begin() + static_cast<std::ptrdiff_t>(h * stride + 1));
    }
    return x;
  }
  static std::vector<merge_source> edges(const cache_shape& s, const std::vector<index_t>& ends,
                                         const std::vector<float>& weights) {
    const auto stride = cache_on_device::n(s.capacity);
    std::vector<merge_source> x(cache_on_device::n(s.heads) * stride);
    for (std::size_t h = 0; h < cache_on_device::n(s.heads); ++h) {
      index_t slot = 0;
      for (std::size_t r = 0; r < ends.size(); ++r) {
        for (; slot < ends[r]; ++slot) {
          x[h * stride + cache_on_device::n(slot)] = {slot, weights[r], weights[r]};
        }
      }
    }
    return x;
  }
};

/// Carries out a plan whose row `row` is the mean of the slots `from … to − 1`.
inline double applied(benchmark::State& state, cache_on_device& kv, const plan_on_device& plan,
                      index_t row, index_t from, index_t to) {
  const auto columns = kv.state(streaming_llm{});
  const auto at = [&](index_t slot) { return cache_on_device::n(slot) * 128; };
  const auto before = kv.keys.host(at(to));
  const auto run = [&] { cuda::apply(plan.view(), kv.view(), columns, nullptr); };
  run();
  const auto after = kv.keys.host(at(row + 1));
  double want = 0;
  for (index_t s = from; s < to; ++s) {
    want += static_cast<double>(__bfloat162float(before[at(s)])) / (to - from);
  }
  const double is = static_cast<double>(__bfloat162float(after[at(row)]));
  if (!(std::abs(is - want) < 0.02 * (0.1 + std::abs(want)))) {
    state.SkipWithError("a row is not the mean of what it takes in");
    return 0;
  }
  return measure(state, run, l2::dirty, [&] { kv.reset(); });
}

/// Every second row goes into the one before it: half of the rows move.
inline void apply_half(benchmark::State& state) {
  const auto heads = static_cast<index_t>(state.range(0)), n = static_cast<index_t>(state.range(1));
  cache_on_device kv({heads, n, n});
  std::vector<index_t> ends;
  for (index_t r = 0; r < n / 2; ++r) {
    ends.push_back(2 * r + 2);
  }
  const plan_on_device plan(kv.shape, ends, std::vector<float>(ends.size(), 0.5F));
  const double time = applied(state, kv, plan, 1, 2, 4);
  if (time > 0) {
    report_bytes(state, 1.5 * kv.bytes(), time);  // every row read, half of them written
  }
}

/// One row takes in all slots but 1,023, as a residual slot does.
inline void apply_long_row(benchmark::State& state) {
  const auto heads = static_cast<index_t>(state.range(0)), n = static_cast<index_t>(state.range(1));
  cache_on_device kv({heads, n, n});
  std::vector<index_t> ends;
  std::vector<float> weights(1023, 1.0F);
  for (index_t r = 0; r < 1023; ++r) {
    ends.push_back(r + 1);
  }
  ends.push_back(n), weights.push_back(1 / static_cast<float>(n - 1023));
  const plan_on_device plan(kv.shape, ends, weights);
  applied(state, kv, plan, 1023, 1023, n);
}

}  // namespace card
