// SPDX-License-Identifier: MIT
/// A prompt brought to a tenth of its slots by every policy, against its causal attention: whole,
/// its parts (plan and apply once the scores are there; apply alone), and its growth.
#include <Eigen/Core>
#include <cstring>
#include <string>
#include <string_view>

#include "../examples/evaluate/reference_queries.hpp"
#include "causal_attention.hpp"
#include "kvmeld/peers.hpp"
#include "peak_memory.hpp"
#include "spec.hpp"

namespace {

using kvmeld::index_t;
std::size_t size(index_t n) { return static_cast<std::size_t>(n); }

/// A prompt after prefill: `[tokens, heads · group, dim]` queries, a full cache.
struct prompt {
  explicit prompt(const benchmark::State& state)
      : tokens(static_cast<index_t>(state.range(0))),
        heads(static_cast<index_t>(state.range(1))),
        dim(static_cast<index_t>(state.range(2))),
        group(static_cast<index_t>(state.range(3))),
        queries(bench::gaussian(size(tokens) * size(heads * group * dim), 1)),
        full(bench::spec(heads, group, dim), {.capacity = tokens}) {
    for (index_t h = 0; h < heads; ++h) {
      const auto seed = static_cast<unsigned>(2 * h);
      full.append(kvmeld::head_range{h, 1}, bench::gaussian(size(tokens) * size(dim), seed + 2),
                  bench::gaussian(size(tokens) * size(dim), seed + 3), tokens);
    }
  }

  kvmeld::query_view<float> own() const {
    return kvmeld::prompt_queries(queries.data(), tokens, heads, group, dim);
  }
  kvmeld::queries given() const { return {queries, tokens, full.spec()}; }
  kvmeld::budget budget() const { return {.slots = tokens / 10}; }
  std::size_t bytes() const { return sizeof(float) * 2 * size(tokens) * size(heads * dim); }

  bench::rows_in_place rows(const kvmeld::row<kvmeld::any_scalar>& first) const {
    return {first.as<float>().data, tokens, dim, Eigen::OuterStride<>(dim)};
  }
  /// `f(queries, stride, keys, values, offset)` for every KV head.
  template <class F>
  void each_head(F f) {
    const std::ptrdiff_t stride = std::ptrdiff_t{heads} * group * dim;
    for (index_t h = 0; h < heads; ++h) {
      const std::ptrdiff_t offset = std::ptrdiff_t{h} * group * dim;
      f(queries.data() + offset, stride, rows(full.head(h).key(0)), rows(full.head(h).value(0)),
        offset);
    }
  }

  index_t tokens, heads, dim, group;
  std::vector<float> queries;
  kvmeld::cache full;
};

/// The baseline of most: the attention that a policy saves from, on the same prompt.
struct attention_of {
  explicit attention_of(prompt& of) : p(of), attend(of.group, of.dim), out(of.queries.size()) {}
  void operator()() {
    p.each_head([&](const float* q, auto stride, const auto& k, const auto& v, auto offset) {
      attend(q, stride, k, v, out.data() + offset);
    });
    benchmark::DoNotOptimize(out.data());
  }
  prompt& p;
  bench::causal_attention attend;
  std::vector<float> out;
};

void attention(benchmark::State& state) {
  prompt p(state);
  bench::causal_attention blocks(p.group, p.dim);
  bench::versus(state, "vs_products", attention_of(p), [&] {
    p.each_head([&](const float* q, auto stride, const auto& k, const auto& v, auto) {
      blocks.products(q, stride, k, v);
    });
  });
}

/// A policy's cache and what compresses it, put back before every measurement.
template <class Policy>
struct compressed {
  compressed(const Policy& policy, prompt& p) : kv(p.full), meld(kv, policy, p.budget()) {}
  void operator()(const prompt& p) {
    meld.prompt(kv.heads(0, 0), p.given());
    meld.end_prompt(0);
  }
  void put_back(const prompt& p) {
    meld.clear(0);
    kv = p.full;
  }
  kvmeld::cache kv;
  kvmeld::compressor<Policy> meld;
};

/// The same head by head, for the parts.
template <class Policy>
struct scene {
  scene(const Policy& policy, prompt& p) : kv(p.full) {
    for (index_t h = 0; h < p.heads; ++h) {
      pristine.push_back(kvmeld::make_head_state(policy, kv.head(h)));
    }
    memory = pristine;
    work.reserve(kv.head(0));
  }
  void put_back(const prompt& p) {
    kv = p.full;
    memory = pristine;
  }
  kvmeld::cache kv;
  std::vector<kvmeld::head_state> pristine, memory;
  kvmeld::workspace work;
};

/// Policies with a table of tokens: as large as the budget can use.
template <class Policy>
Policy fitted(Policy policy, const prompt& p) {
  if constexpr (requires { policy.table; }) {
    policy.table = static_cast<index_t>(policy.gamma * static_cast<float>(p.budget().slots));
  }
  return policy;
}

template <class Policy>
void compress(benchmark::State& state, const Policy& defaults) {
  prompt p(state);
  const auto policy = fitted(defaults, p);
  compressed<Policy> s(policy, p);
  const auto work = [&] { s(p); };
  const auto peak = bench::peak_bytes(work);
  bench::versus(state, "vs_attention", work, attention_of(p), [&] { s.put_back(p); });
  state.counters["bytes_per_token"] = static_cast<double>(peak) / p.tokens;
}

/// `prompt_scores` of all heads, exact or `screened` in 8 bits; `given`: with the rows' log-sum-exp
/// of the prefill, whose numbers do not change the time.
void scores(benchmark::State& state, bool given, bool screened) {
  prompt p(state);
  std::vector<float> out(size(p.tokens));
  const std::vector<float> log_sum_exp(given ? size(p.group * p.tokens) : 0);
  bench::versus(
      state, "vs_attention",
      [&] {
        for (index_t h = 0; h < p.heads; ++h) {
          auto own = p.own().of(h);
          own.log_sum_exp = given ? log_sum_exp.data() : nullptr;
          kvmeld::prompt_scores(p.full.head(h), own, {.screened = screened}, out);
          benchmark::DoNotOptimize(out.data());
        }
      },
      attention_of(p));
}

/// `plan` and `apply` of all heads; what `observe` measures is there already.
template <class Policy>
void given_scores(benchmark::State& state, const Policy& defaults) {
  prompt p(state);
  const auto policy = fitted(defaults, p);
  scene<Policy> s(policy, p);
  const auto queries = evaluate::spread(s.kv, p.own(), 32);
  for (index_t h = 0; h < p.heads; ++h) {
    kvmeld::observe(policy, s.kv.head(h), s.pristine[size(h)], queries.view().of(h));
  }
  bench::versus(
      state, "vs_attention",
      [&] {
        for (index_t h = 0; h < p.heads; ++h) {
          kvmeld::compress(policy, s.kv.head(h), s.memory[size(h)], s.work, p.budget(),
                           queries.view().of(h));
        }
      },
      attention_of(p), [&] { s.put_back(p); });
}

/// `apply` alone, against copying the rows that the plan names.
template <class Policy>
void apply(benchmark::State& state, const Policy& policy) {
  prompt p(state);
  scene<Policy> s(policy, p);
  const auto queries = evaluate::spread(s.kv, p.own(), 32);
  std::vector<kvmeld::merge_plan> plans(size(p.heads));
  std::size_t rows = 0;
  for (index_t h = 0; h < p.heads; ++h) {
    auto& plan = plans[size(h)];
    kvmeld::observe(policy, s.kv.head(h), s.pristine[size(h)], queries.view().of(h));
    kvmeld::plan(policy, s.kv.head(h), s.pristine[size(h)], queries.view().of(h), p.budget().slots,
                 s.work.scratch, plan);
    for (index_t r = 0; r < plan.rows(); ++r) {
      rows += plan.row(r).size();
    }
  }
  const std::vector<float> from(2 * rows * size(p.dim), 1);
  std::vector<float> to(from.size());
  bench::versus(
      state, "vs_memcpy",
      [&] {
        for (index_t h = 0; h < p.heads; ++h) {
          kvmeld::apply(policy, plans[size(h)], s.kv.head(h), s.memory[size(h)], s.work.scratch);
        }
      },
      [&] {
        std::memcpy(to.data(), from.data(), sizeof(float) * from.size());
        benchmark::DoNotOptimize(to.data());
      },
      [&] { s.put_back(p); });
}

/// `compress` of policies that take time in proportion to the prompt, against copying the cache.
template <class Policy>
void growth(benchmark::State& state, const Policy& policy) {
  prompt p(state);
  compressed<Policy> s(policy, p);
  const std::vector<float> from(p.bytes() / sizeof(float), 1);
  std::vector<float> to(from.size());
  double total = 0;
  bench::versus(
      state, "vs_memcpy", [&] { total += bench::seconds([&] { s(p); }); },
      [&] {
        std::memcpy(to.data(), from.data(), p.bytes());
        benchmark::DoNotOptimize(to.data());
      },
      [&] { s.put_back(p); });
  const double calls = static_cast<double>(state.iterations()) + 1;  // the first one is not counted
  state.counters["ns_per_token"] = 1e9 * total / calls / p.tokens;
}

void sized(benchmark::internal::Benchmark* b, const std::vector<std::int64_t>& tokens,
           const std::vector<std::int64_t>& heads) {
  b->ArgNames({"tokens", "heads", "dim", "group"})
      ->ArgsProduct({tokens, heads, {128}, {4}})
      ->UseManualTime()
      ->Iterations(bench::pairs)
      ->Unit(benchmark::kMillisecond);
}

/// All heads cost the same: one of the 8 tells the ratio, and 4096 tokens on all of them prove it.
void prompts(benchmark::internal::Benchmark* b) {
  sized(b, {1024, 2048, 4096}, {1});
  sized(b, {4096}, {8});
}
void long_prompts(benchmark::internal::Benchmark* b) {
  sized(b, {1024, 4096, 16384, 65536, 131072}, {1});
}

template <class Policy, class Run, class Sizes>
void add(std::string_view what, std::string_view name, const Policy& policy, Run run, Sizes sizes) {
  const auto full = std::string(what) + "/" + std::string(name) + "/f32";
  sizes(benchmark::RegisterBenchmark(
      full.c_str(), [policy, run](benchmark::State& state) { run(state, policy); }));
}

template <class Policy>
void add_policy(std::string_view name, const Policy& policy) {
  add("compress", name, policy, compress<Policy>, prompts);
  using std::same_as, kvmeld::fold, kvmeld::attention_matching;  // these fit, and score nothing
  if constexpr (!same_as<Policy, fold> && !same_as<Policy, attention_matching>) {
    add("given_scores", name, policy, given_scores<Policy>, prompts);
  }
}

template <class... Policies>
void add_policies(const Policies&... policies) {
  (add_policy(policies.name(), policies), ...);
}
template <class... Policies>
void add_apply(const Policies&... policies) {
  (add("apply", policies.name(), policies, apply<Policies>, long_prompts), ...);
}
template <class... Policies>
void add_growth(const Policies&... policies) {
  (add("growth", policies.name(), policies, growth<Policies>, long_prompts), ...);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace kvmeld;
  bench::check_causal_attention();
  bench::take_pairs(argc, argv);
  bench::processor_time = bench::take_flag(argc, argv, "--processor_time");
  prompts(benchmark::RegisterBenchmark("attention/f32", attention));
  add_policies(streaming_llm{}, random_tokens{}, key_diff{}, snapkv{}, tova{}, h2o{}, roco{},
               scissorhands{}, cam{}, expected_attention{}, compactor{}, zsmerge{}, d2o{},
               kvmerger{}, ems{}, keepkv{}, centroids{}, fold{}, attention_matching{});
  add_policy("fold:pins=1", fold{.pins = fold::pin_rule::scores});
  for (const bool screened : {false, true}) {
    const std::string name = screened ? "screened_scores" : "scores";
    for (const bool given : {false, true}) {
      const std::string full = name + (given ? "_given_log_sum_exp" : "") + "/f32";
      auto* const b = benchmark::RegisterBenchmark(full.c_str(), scores, given, screened);
      prompts(b), sized(b, {16384}, {1});
    }
  }
  add_policy("attention_matching:omp", attention_matching{.omp = true});
  add_apply(h2o{}, zsmerge{}, kvmerger{});
  add_growth(streaming_llm{}, random_tokens{}, key_diff{}, snapkv{}, tova{}, expected_attention{});
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 2;
  }
  benchmark::RunSpecifiedBenchmarks();
}
