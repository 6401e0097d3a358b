// SPDX-License-Identifier: MIT
/// One decoded token: attention alone against the two matrix-vector products it cannot do without,
/// and `step` of every policy against attention alone.
#include <Eigen/Core>
#include <algorithm>
#include <concepts>
#include <random>
#include <string>
#include <string_view>

#include "kvmeld/peers.hpp"
#include "spec.hpp"
#include "topic.hpp"
#include "versus.hpp"

namespace {

using kvmeld::index_t;

/// What keys and values are held as, as `evaluate` names it.
struct named_storage {
  const char* name;
  kvmeld::storage_pair type;
};

/// A cache with `slots` tokens in every head, and tokens to come. The heads hold the same numbers,
/// each in memory of its own. Each is a request, which can be copied.
struct scene {
  explicit scene(const benchmark::State& state,
                 const kvmeld::storage_pair& type = kvmeld::storage::f32)
      : slots(static_cast<index_t>(state.range(0))),
        heads(static_cast<index_t>(state.range(1))),
        dim(static_cast<index_t>(state.range(2))),
        group(static_cast<index_t>(state.range(3))),
        kv(bench::spec(1, group, dim), {.requests = heads,
                                        .capacity = slots + 1,
                                        .keys = type.keys,
                                        .values = type.values,
                                        .newest = type.newest}),
        q(bench::gaussian(size(heads) * size(group) * size(dim), 1)),
        k(bench::gaussian(size(heads) * size(dim), 2)),
        v(bench::gaussian(size(heads) * size(dim), 3)),
        out(q.size()) {
    const auto keys = bench::gaussian(size(slots) * size(dim), 4);
    const auto values = bench::gaussian(size(slots) * size(dim), 5);
    for (index_t h = 0; h < heads; ++h) {
      kv.append(kvmeld::head_range{h, 1}, keys, values, slots);
    }
  }

  void attend() {
    for (index_t h = 0; h < heads; ++h) {
      const std::ptrdiff_t first = std::ptrdiff_t{h} * group * dim;
      kvmeld::attend(kv.head(h), q.data() + first, out.data() + first);
    }
    benchmark::DoNotOptimize(out.data());
  }

  std::int64_t bytes() const {
    return heads * static_cast<std::int64_t>(kvmeld::head_bytes(kv.type(), dim, dim, slots));
  }

  static std::size_t size(index_t n) { return static_cast<std::size_t>(n); }

  index_t slots, heads, dim, group;
  kvmeld::cache kv;
  std::vector<float> q, k, v, out;
};

void attend(benchmark::State& state, const kvmeld::storage_pair& type) {
  using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  scene s(state, type);
  // [heads · slots, dim] floats, whatever the cache holds: what the products cost an engine at
  // best.
  const matrix keys = matrix::Random(s.heads * s.slots, s.dim);
  const matrix values = matrix::Random(s.heads * s.slots, s.dim);
  const matrix queries = matrix::Random(s.heads * s.group, s.dim);
  Eigen::VectorXf logits(s.slots), out(s.dim);
  const auto products = [&] {
    for (index_t i = 0; i < s.heads * s.group; ++i) {
      const index_t first = i / s.group * s.slots;
      logits.noalias() = keys.middleRows(first, s.slots) * queries.row(i).transpose();
      out.noalias() = values.middleRows(first, s.slots).transpose() * logits;
      benchmark::DoNotOptimize(out.data());
    }
  };
  bench::versus(
      state, "vs_products", [&] { s.attend(); }, products);
  state.SetBytesProcessed(state.iterations() * s.bytes());
}

/// Attention over rows in fewer bits against the same over floats.
void storage(benchmark::State& state, const kvmeld::storage_pair& type) {
  scene s(state, type), floats(state);
  bench::versus(
      state, "vs_float", [&] { s.attend(); }, [&] { floats.attend(); });
  state.SetBytesProcessed(state.iterations() * s.bytes());
}

/// What is decoded: numbers at random, or a text with a topic, whose tokens are alike.
enum class tokens_of { chance, topic };

/// Tokens decoded one after another within a budget of `slots`, by heads that have `decoded` so
/// many since their prompt; each step against attention over the same heads alone, just before it.
/// Policies that free several slots at once do so in the cycle that is one iteration; the counter
/// is the mean over it.
template <class Policy>
void step(benchmark::State& state, const Policy& policy, index_t decoded,
          tokens_of kind = tokens_of::chance) {
  scene s(state);
  const kvmeld::budget budget = kvmeld::budget_within(policy, s.slots);
  constexpr index_t references = 32, tokens = 512;
  const auto size = scene::size;
  kvmeld::compressor meld(s.kv, policy, budget);
  std::mt19937 generator(6);
  std::normal_distribution<float> normal;
  const auto draw = [&](std::size_t n) {
    std::vector<float> x(n);
    std::generate(x.begin(), x.end(), [&] { return normal(generator); });
    return x;
  };
  const auto make_room = [&](index_t h) {  // for the policy that never compresses
    if (s.kv.head(h).length() > s.slots) {
      meld.clear(h), s.kv.commit(kvmeld::head_range{h, 1}, s.slots);  // its rows are still there
    }
  };
  const auto first = s.kv.heads(0, 0);
  meld.prompt(first, kvmeld::queries(draw(references * size(s.group) * size(s.dim)), references,
                                     s.kv.spec()));
  meld.end_prompt(0);
  bench::topic_stream x(s.dim, s.group, 0.5F);
  const auto next = [&] {
    if (kind == tokens_of::topic) {
      return x.next();
    }
    for (auto* const numbers : {&x.q, &x.k, &x.v}) {
      *numbers = draw(numbers->size());
    }
  };
  for (index_t t = 0; t < decoded; ++t) {
    next();
    meld.step(first, {x.q, x.k, x.v}, std::span(s.out).first(x.q.size()));
    make_room(0);
  }
  for (index_t h = 1; h < s.heads; ++h) {
    meld.copy(0, h);
  }
  const std::size_t row = size(s.heads) * size(s.dim);
  std::vector<float> q, k, v;  // [tokens, heads, ...]
  q.reserve(tokens * size(s.group) * row), k.reserve(tokens * row), v.reserve(tokens * row);
  for (index_t t = 0; t < tokens; ++t) {
    for (index_t h = 0; h < s.heads; ++h) {
      if (h == 0 || kind == tokens_of::chance) {
        next();
      }
      q.insert(q.end(), x.q.begin(), x.q.end());
      k.insert(k.end(), x.k.begin(), x.k.end());
      v.insert(v.end(), x.v.begin(), x.v.end());
    }
  }
  std::size_t at = 0;
  const auto one_token = [&] {
    const std::size_t t = at++ % tokens;
    meld.step(kvmeld::head_range{0, s.heads},
              {std::span(q).subspan(t * size(s.group) * row, size(s.group) * row),
               std::span(k).subspan(t * row, row), std::span(v).subspan(t * row, row)},
              s.out);
    for (index_t h = 0; h < s.heads; ++h) {
      make_room(h);
    }
  };
  const index_t cycle = std::max(budget.trigger_length() - budget.slots, 1);
  bench::versus(
      state, "vs_attention", one_token, [&] { s.attend(); }, bench::nothing{}, cycle);
  state.counters["state_to_cache"] =
      static_cast<double>(meld.state(0).bytes()) /
      static_cast<double>(size(s.kv.head(0).length()) * size(s.dim) * 2 * sizeof(float));
  state.SetBytesProcessed(state.iterations() * s.bytes());
}

void sizes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"slots", "heads", "dim", "group"})
      ->ArgsProduct({{256, 1024, 4096}, {32}, {128}, {1}})
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

/// One head, ever more slots, right after a prompt.
void growing(benchmark::internal::Benchmark* b) {
  b->ArgNames({"slots", "heads", "dim", "group"})
      ->ArgsProduct({{4096, 16384, 65536, 131072}, {1}, {128}, {1}})
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

void register_attend(const named_storage& held) {
  const std::string name = held.name;
  const auto of = [&](auto f) { return [f, type = held.type](auto& state) { f(state, type); }; };
  if (held.type.newest == 0) {
    sizes(benchmark::RegisterBenchmark(("attend/" + name).c_str(), of(attend)));
  }
  if (held.type == kvmeld::storage::f32) {
    return;
  }
  benchmark::RegisterBenchmark(("storage/" + name).c_str(), of(storage))
      ->ArgNames({"slots", "heads", "dim", "group"})
      ->ArgsProduct({{256, 1024, 4096}, {8, 32}, {128}, {1, 4, 7}})
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

template <class Policy>
void register_step(std::string_view policy_name, const Policy& policy) {
  const auto name = "step/" + std::string(policy_name) + "/f32";
  sizes(benchmark::RegisterBenchmark(name.c_str(), [policy](benchmark::State& state) {
    step(state, policy, 2 * static_cast<index_t>(state.range(0)));
  }));
  const auto long_text = "topic/" + std::string(policy_name) + "/f32";
  benchmark::RegisterBenchmark(long_text.c_str(),
                               [policy](benchmark::State& state) {
                                 step(state, policy, 6 * static_cast<index_t>(state.range(0)),
                                      tokens_of::topic);
                               })
      ->ArgNames({"slots", "heads", "dim", "group"})
      ->ArgsProduct({{256, 1024}, {32}, {128}, {1}})
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

template <class... Policies>
void register_growth(const Policies&... policies) {
  (growing(benchmark::RegisterBenchmark(
       ("growth/" + std::string(policies.name()) + "/f32").c_str(),
       [policies](benchmark::State& state) { step(state, policies, 0); })),
   ...);
}

template <class... Policies>
void register_steps(const Policies&... policies) {
  (register_step(policies.name(), policies), ...);
}

}  // namespace

int main(int argc, char** argv) {
  using kvmeld::storage;
  for (const named_storage& held : {named_storage{"f32", storage::f32},
                                    {"f16", storage::f16},
                                    {"bf16", storage::bf16},
                                    {"q8_0", storage::q8_0},
                                    {"q4_0", storage::q4_0},
                                    {"k8v4", {storage::k8, storage::q4_0, 16}},
                                    {"k6v4", {storage::k6, storage::q4_0, 16}},
                                    {"k4v4", {storage::k4, storage::q4_0, 16}}}) {
    register_attend(held);
  }
  register_steps(kvmeld::full_cache{}, kvmeld::streaming_llm{}, kvmeld::h2o{}, kvmeld::snapkv{},
                 kvmeld::zsmerge{}, kvmeld::d2o{}, kvmeld::kvmerger{}, kvmeld::ems{},
                 kvmeld::keepkv{}, kvmeld::fold{}, kvmeld::random_tokens{}, kvmeld::tova{},
                 kvmeld::roco{}, kvmeld::scissorhands{}, kvmeld::r_kv{}, kvmeld::key_diff{},
                 kvmeld::expected_attention{}, kvmeld::triattention{}, kvmeld::centroids{},
                 kvmeld::compactor{}, kvmeld::cam{});
  register_growth(kvmeld::full_cache{}, kvmeld::streaming_llm{}, kvmeld::h2o{}, kvmeld::zsmerge{},
                  kvmeld::d2o{}, kvmeld::keepkv{});
  // What the choice at run time costs. (any_policy would be compiled here with all policies.)
  register_step("any_policy(h2o)",
                kvmeld::basic_any_policy<kvmeld::h2o, kvmeld::snapkv>{kvmeld::h2o{}});
  bench::processor_time = bench::take_flag(argc, argv, "--processor_time");
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 2;
  }
  benchmark::RunSpecifiedBenchmarks();
}
