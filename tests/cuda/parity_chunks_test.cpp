// SPDX-License-Identifier: MIT
// Prompts in chunks on the device are the library's: windows reach back over them, and what is
// remembered is spread over all.
#include <catch2/catch.hpp>

#include "cuda/mirror.hpp"
#include "cuda/policy_calls.hpp"
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/ems.cuh"
#include "kvmeld/cuda/policies/fold.cuh"
#include "kvmeld/cuda/policies/h2o.cuh"
#include "kvmeld/cuda/policies/keepkv.cuh"
#include "kvmeld/cuda/policies/kvmerger.cuh"
#include "kvmeld/cuda/policies/snapkv.cuh"
#include "kvmeld/cuda/policies/tova.cuh"
#include "kvmeld/cuda/policies/zsmerge.cuh"

namespace kvmeld::cuda {
namespace parity_chunks_test {

struct chunk_case {
  std::vector<index_t> chunks;
  index_t slots = 20;
  index_t group = 2;
  bool random = false;  ///< keys and values; else small integers
  bool apart = false;   ///< observed first, and compressed without queries
  bool packed = false;  ///< head `h` has 3 `h` fewer queries, at least 1, behind those of others
};

const fold scored{.recent = 4,
                  .decode = {.queries = 8},
                  .pins = fold::pin_rule::scores,
                  .prompt_recent = 4,
                  .score_share = 0.5F};

/// LAW: the CPU's observe, chunk by chunk, and compress behind each. Head `h` has 5 `h` tokens
/// more, before the first chunk's queries.
template <class Policy>
void check_chunks(const Policy& p, const chunk_case& what, std::uint64_t seed = 17) {
  INFO(p.name() << ", group " << what.group << ", target " << what.slots << ", seed " << seed);
  constexpr index_t dim = 8, heads = 3, capacity = 70;
  const index_t group = what.group;
  const cache_case c{.heads = heads, .capacity = capacity, .dim = dim, .group = group};
  fixtures::cache<float> kv(
      {.heads = heads, .group = group, .dim = dim, .capacity = capacity, .scale = c.scale});
  auto state = fixtures::make_state(p, kv);
  mirror<float> twin(p, kv, state, c);
  index_t all = 0;
  for (const index_t n : what.chunks) {
    all += n;
  }
  emulator::chance random{seed};
  const auto number = [&] {
    return static_cast<float>(random.below(1U << 20)) / static_cast<float>(1U << 19) - 1.0F;
  };
  std::vector<float> q(static_cast<std::size_t>(all * heads * group * dim));
  for (float& x : q) {
    x = number();
  }
  device_buffer<float> queries(q);
  device_buffer<unsigned char> work(workspace_bytes(p, twin.device.view(), capacity, 0, all));
  using calls = policy_calls<Policy, float>;
  const auto append = [&](index_t h, index_t n) {
    std::vector<float> keys(static_cast<std::size_t>(n * dim)), values(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) {
      keys[i] = what.random ? number() : whole(random, 2);
      values[i] = what.random ? number() : whole(random, 4);
    }
    auto& device = twin.device;
    const index_t held = kv.head(h).length(), seen = kv.head(h).next_position();
    kv.append(h, keys, values);
    state[h].extend(held + n);
    for (index_t s = 0; s < n; ++s) {  // an engine's own prefill
      std::copy_n(keys.data() + s * dim, dim, device.key(h, held + s));
      std::copy_n(values.data() + s * dim, dim, device.value(h, held + s));
      device.log_mass[device.at(h, held + s)] = 0,
                                          device.position[device.at(h, held + s)] = seen + s;
      for (index_t k = 0; k < state[h].slot_stats(); ++k) {
        device.column(k, h, held + s) = device.state.initial[k];
      }
    }
    device.length[h] = held + n, device.next_position[h] = seen + n;
  };
  index_t begin = 0;
  for (const index_t n : what.chunks) {
    INFO("chunk at " << begin);
    const float* const first = q.data() + begin * heads * group * dim;
    auto own = prompt_queries(first, n, heads, group, dim);
    own.before = begin;
    query_rows<float> device{queries.data() + begin * heads * group * dim,
                             n,
                             own.head,
                             own.group,
                             own.row,
                             nullptr,
                             begin};
    device_buffer<index_t> indptr(heads + 1);
    kvmeld::workspace plans;
    for (index_t h = 0; h < heads; ++h) {
      const index_t count = what.packed ? std::max(n - 3 * h, 1) : n, at = h == 0 ? 0 : indptr[h];
      indptr[0] = 0, indptr[h + 1] = at + count;
      append(h, count + (begin == 0 ? 5 * h : 0));
      const auto its = what.packed ? query_view<float>{first + at * group * dim, count, 0, dim,
                                                       std::ptrdiff_t{group} * dim}
                                   : own.of(h);
      observe(p, kv.head(h), state[h], its);
      kvmeld::compress(p, kv.head(h), state[h], plans, budget{what.slots},
                       what.apart ? query_view<float>{} : its);
    }
    if (what.packed) {
      device.head = 0, device.group = dim, device.row = std::ptrdiff_t{group} * dim;
      device.before = 0, device.indptr = indptr.data();
    }
    const workspace memory{work.data(), work.size()};
    if (what.apart) {
      calls::observe(p, twin.device.view(), twin.device.state, device, memory, order(seed));
    }
    calls::compress(p, twin.device.view(), twin.device.state,
                    what.apart ? query_rows<float>{} : device, budget{what.slots}, memory,
                    order(seed));
    twin.check_same(kv, state, 1e-5);
    begin += n;
  }
  CHECK((work.intact() && queries.intact()));
}

TEST_CASE("prompts in chunks") {
  check_chunks(h2o{}, {.chunks = {20, 17, 3}});
  check_chunks(tova{}, {.chunks = {20, 17, 3}});
  check_chunks(snapkv{.window = 8}, {.chunks = {20, 17, 3, 1}});  // windows reach back
  check_chunks(zsmerge{}, {.chunks = {20, 17, 3}});
  check_chunks(d2o{}, {.chunks = {20, 17, 3}});
  check_chunks(kvmerger{}, {.chunks = {20, 17, 3}});
  check_chunks(keepkv{.window = 8, .merge_first = false}, {.chunks = {20, 17, 3, 1}});
}

TEST_CASE("prompts in chunks: ems, shorter than its window") {
  for (const index_t group : {1, 4}) {
    // Tokens alone until the last chunk, whose window reaches back too; then entries are shared.
    check_chunks(ems{.window = 6},
                 {.chunks = {12, 3, 1, 5}, .slots = 19, .group = group, .random = true});
    ems p{.window = 6, .threshold = -1};
    check_chunks(p, {.chunks = {30, 3, 1, 9, 4}, .group = group, .random = true});
    p.combine = group_combine::max, p.table = 9;
    check_chunks(p, {.chunks = {30, 3, 1, 9, 4}, .group = group, .random = true});
  }
}

TEST_CASE("prompts in chunks: fold") {
  for (const index_t group : {1, 4}) {
    const fold p{.recent = 4, .decode = {.queries = 8}};
    check_chunks(p, {.chunks = {20, 17, 3, 1}, .group = group, .random = true});
    check_chunks(scored, {.chunks = {20, 17, 3, 1}, .group = group, .random = true});
  }
}

TEST_CASE("chunks observed, and compressed without queries") {
  const chunk_case apart{.chunks = {20, 17, 3, 1}, .random = true, .apart = true};
  check_chunks(h2o{}, apart);
  check_chunks(tova{}, apart);
  check_chunks(snapkv{.window = 8}, apart);
  check_chunks(zsmerge{}, apart);
  check_chunks(d2o{}, apart);
  check_chunks(kvmerger{}, apart);
  check_chunks(keepkv{.window = 8, .merge_first = false}, apart);
  check_chunks(ems{.window = 6, .threshold = -1}, apart);
  check_chunks(fold{.recent = 4, .decode = {.queries = 8}}, apart);
  check_chunks(scored, apart);
}

TEST_CASE("prompts of several lengths in one call") {
  const auto check = [](const auto& p, const auto& alone) {
    check_chunks(p, {.chunks = {40, 7}, .group = 1, .packed = true});
    check_chunks(alone,
                 {.chunks = {30, 1}, .group = 4, .random = true, .apart = true, .packed = true});
  };
  check(h2o{}, h2o{.combine = group_combine::max});
  check(tova{}, tova{});
  check(snapkv{.window = 8}, snapkv{.window = 8});
  check(zsmerge{}, zsmerge{});
  check(d2o{}, d2o{});
  check(kvmerger{}, kvmerger{});
  check(keepkv{.window = 8, .merge_first = false}, keepkv{.window = 8, .merge_first = false});
  const chunk_case observed{.chunks = {40, 7}, .random = true, .apart = true, .packed = true};
  check_chunks(ems{.window = 6}, observed);
  check_chunks(ems{.window = 6, .threshold = -1}, observed);
  check_chunks(fold{.recent = 4, .decode = {.queries = 8}}, observed);
  check_chunks(scored, observed);
}

TEST_CASE("observe refuses what is none") {
  device_cache<float> kv({.heads = 1, .capacity = 8, .dim = 8, .group = 1}, {4}, 1);
  CHECK_THROWS_WITH(
      (policy_calls<h2o, float>::observe({}, kv.view(), kv.state, {}, {}, {})),
      "kvmeld: cuda observe: expected at least 1 query and a count of at least 0 before them, "
      "got 0 and 0");
  const float q = 0;
  CHECK_THROWS_WITH(
      (policy_calls<h2o, float>::observe({}, kv.view(), kv.state,
                                         {.data = &q, .count = 262140, .before = 1}, {}, {})),
      "kvmeld: cuda observe: expected at most 262140 queries with those before them, "
      "got 262140 and 1");
  const index_t n = 0;
  CHECK_THROWS_WITH(
      (policy_calls<h2o, float>::observe(
          {}, kv.view(), kv.state, {.data = &q, .count = 1, .before = 1, .indptr = &n}, {}, {})),
      Catch::Contains("expected an indptr with at least 1 head, a log_sum_row"));
  CHECK_THROWS_WITH(
      (policy_calls<fold, float>::compress(
          {}, kv.view(), {}, {.data = &q, .count = 1, .indptr = &n}, budget{8}, {}, {})),
      Catch::Contains("indptr in observe and lookahead alone"));
}

}  // namespace parity_chunks_test
}  // namespace kvmeld::cuda
