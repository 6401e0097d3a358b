// SPDX-License-Identifier: MIT
// The state of policies in device memory: made from a policy's columns, any strides, and refused
// before any launch where it is another policy's.
#include <catch2/catch.hpp>

#include "cuda/mirror.hpp"
#include "cuda/policy_calls.hpp"
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/ems.cuh"
#include "kvmeld/cuda/policies/fold.cuh"
#include "kvmeld/cuda/policies/full_cache.cuh"
#include "kvmeld/cuda/policies/h2o.cuh"
#include "kvmeld/cuda/policies/keepkv.cuh"
#include "kvmeld/cuda/policies/kvmerger.cuh"
#include "kvmeld/cuda/policies/snapkv.cuh"
#include "kvmeld/cuda/policies/streaming_llm.cuh"
#include "kvmeld/cuda/policies/tova.cuh"
#include "kvmeld/cuda/policies/zsmerge.cuh"
#include "kvmeld/cuda/state.cuh"

namespace kvmeld::cuda {
namespace parity_state_test {

constexpr cache_case shape{.heads = 3, .capacity = 41, .dim = 8, .group = 2};

/// LAW: a state is as the CPU's library has it before anything was observed, and what the rule says
/// it needs is what the policy has.
template <class Policy>
void check_made(const Policy& p) {
  INFO(p.name());
  device_cache<float> kv(shape, {20, 0, 41}, 1);
  device_buffer<unsigned char> memory(state_bytes(p, kv.view()));
  const state_view state = make_state_view(p, kv.view(), {memory.data(), memory.size()}, order());
  const auto columns = kvmeld::declared(p).slot_stats();
  REQUIRE(state.count == static_cast<index_t>(columns.size()));
  const auto rule = detail::rule_of(p, kv.view());
  CHECK(std::remove_const_t<decltype(rule)>::columns == state.count);
  CHECK(static_cast<std::size_t>(state.floats) ==
        kvmeld::declared(p).memory(shape.dim, shape.group, shape.capacity));
  if constexpr (requires { rule.memory(shape.dim, shape.group, shape.capacity); }) {
    CHECK(rule.memory(shape.dim, shape.group, shape.capacity) ==
          kvmeld::declared(p).memory(shape.dim, shape.group, shape.capacity));
  } else if (p.name() != zsmerge::name()) {  // the device keeps no means in float: it rounds each
    CHECK(state.floats == 0);
  }
  bool same = true;
  for (index_t h = 0; h < shape.heads; ++h) {
    for (index_t c = 0; c < state.count; ++c) {
      const auto& column = columns[static_cast<std::size_t>(c)];
      same = same && state.merges[c] == column.reduce && state.initial[c] == column.initial;
      for (index_t s = 0; s < shape.capacity; ++s) {
        same = same && on_host(state.column(c, h))[s] == column.initial;
      }
    }
    for (index_t i = 0; i < state.floats; ++i) {
      same = same && on_host(state.memory_of(h))[i] == 0;
    }
  }
  CHECK(same);
  CHECK(memory.intact());
}

TEST_CASE("state: made for every policy") {
  check_made(full_cache{}), check_made(streaming_llm{}), check_made(h2o{}), check_made(tova{});
  check_made(snapkv{}), check_made(zsmerge{}), check_made(d2o{}), check_made(keepkv{});
  check_made(kvmerger{}), check_made(ems{}), check_made(fold{});
  device_cache<float> kv(shape, {0, 0, 0}, 1);
  device_buffer<unsigned char> memory(state_bytes(h2o{}, kv.view()) - 1);
  CHECK_THROWS_WITH(make_state_view(h2o{}, kv.view(), {memory.data(), memory.size()}, order()),
                    Catch::Contains("state_bytes"));
  CHECK_THROWS_AS(make_state_view(h2o{}, kv.view(), {}, order()), kvmeld::error);
}

/// Steps and a prompt on a cache and its state.
template <class Policy>
struct decoder {
  device_cache<float> kv;
  device_buffer<unsigned char> work;
  device_buffer<float> q, k, v, out, queries;

  explicit decoder(const Policy& p)
      : kv(shape, {40, 12, 30}, 5),
        work(workspace_bytes(p, kv.view(), 6)),
        q(static_cast<std::size_t>(shape.heads * shape.group * shape.dim)),
        k(static_cast<std::size_t>(shape.heads * shape.dim)),
        v(k.size()),
        out(q.size()),
        queries(6 * q.size()) {
    emulator::chance random{3};
    for (device_buffer<float>* x : {&q, &k, &v, &queries}) {
      for (std::size_t i = 0; i < x->size(); ++i) {
        x->host()[i] = whole(random, 2);
      }
    }
  }
  void step(const Policy& p, const state_view& state, index_t target) {
    policy_calls<Policy, float>::step(p, kv.view(), state, q.data(), {k.data(), v.data()},
                                      budget{target}, out.data(), {work.data(), work.size()},
                                      order());
  }
  void compress(const Policy& p, const state_view& state, index_t target) {
    const std::ptrdiff_t row = shape.heads * shape.group * shape.dim;
    const query_rows<float> rows{queries.data(), 6, shape.group * shape.dim, shape.dim, row};
    policy_calls<Policy, float>::compress(p, kv.view(), state, rows, budget{target},
                                          {work.data(), work.size()}, order());
  }
  auto bytes() const {
    return std::vector{kv.keys.bytes(),     kv.values.bytes(), kv.log_mass.bytes(),
                       kv.position.bytes(), kv.length.bytes(), out.bytes()};
  }
};

/// LAW: strides change nothing. Here heads lie far apart, and columns of one side by side.
template <class Policy>
void check_strides(const Policy& p, index_t target) {
  INFO(p.name());
  decoder<Policy> one(p), again(p);
  device_buffer<unsigned char> memory(state_bytes(p, one.kv.view()));
  const state_view made =
      make_state_view(p, one.kv.view(), {memory.data(), memory.size()}, order());
  state_view strided = made;
  strided.column_stride = shape.capacity + 3;
  strided.head_stride = strided.column_stride * max_columns + 1;
  strided.memory_stride = made.floats + 5;
  device_buffer<float> columns(static_cast<std::size_t>(strided.head_stride * shape.heads)),
      floats(static_cast<std::size_t>(strided.memory_stride * shape.heads));
  strided.columns = columns.data(), strided.memory = floats.data();
  clear(strided, again.kv.view(), order());
  one.compress(p, made, target), again.compress(p, strided, target);
  for (index_t t = 0; t < 6; ++t) {
    one.step(p, made, target), again.step(p, strided, target);
  }
  one.compress(p, made, target - 2), again.compress(p, strided, target - 2);
  CHECK(one.bytes() == again.bytes());
  bool same = true, untouched = true;
  for (index_t h = 0; h < shape.heads; ++h) {
    for (index_t c = 0; c < made.count; ++c) {
      same = same &&
             std::equal(on_host(made.column(c, h)), on_host(made.column(c, h)) + one.kv.length[h],
                        on_host(strided.column(c, h)));
      unsigned behind = 0;
      std::memcpy(&behind, on_host(strided.column(c, h)) + shape.capacity, sizeof behind);
      untouched = untouched && behind == 0xcdcdcdcd;
    }
    same = same && (made.floats == 0 ||
                    std::equal(on_host(made.memory_of(h)), on_host(made.memory_of(h)) + made.floats,
                               on_host(strided.memory_of(h))));
  }
  CHECK((same && untouched));
  CHECK((memory.intact() && columns.intact() && floats.intact()));
  one.kv.check_guards(), again.kv.check_guards();
}

TEST_CASE("state: any strides") {
  check_strides(h2o{}, 20);
  check_strides(snapkv{.window = 6}, 20);
  check_strides(zsmerge{.residual = 2}, 20);
  check_strides(d2o{}, 20);
  check_strides(keepkv{}, 20);
  check_strides(kvmerger{}, 20);
  check_strides(ems{.window = 6}, 20);
  check_strides(fold{.recent = 4, .decode = {.queries = 4, .stride = 2}}, 20);
}

/// LAW: a refused call has changed nothing.
template <class Policy>
void check_refused(const Policy& p, const state_view& state, const std::string& message) {
  INFO(p.name() << ": " << message);
  decoder<Policy> x(p);
  const auto before = x.bytes();
  CHECK_THROWS_WITH(x.step(p, state, 20), Catch::Contains(message));
  CHECK_THROWS_WITH(x.compress(p, state, 20), Catch::Contains(message));
  CHECK_THROWS_AS(x.step(p, state, 20), kvmeld::error);
  CHECK(x.bytes() == before);
}

TEST_CASE("state: another policy's is refused before any launch") {
  device_cache<float> kv(shape, {0, 0, 0}, 1);
  const auto made = [&](const auto& p, device_buffer<unsigned char>& memory) {
    return make_state_view(p, kv.view(), {memory.data(), memory.size()}, order());
  };
  device_buffer<unsigned char> of_zsmerge(state_bytes(zsmerge{}, kv.view())),
      of_d2o(state_bytes(d2o{}, kv.view())), of_h2o(state_bytes(h2o{}, kv.view()));
  state_view state = made(h2o{}, of_h2o);
  check_refused(zsmerge{}, state, "expected zsmerge with a state of 3 columns, got 1");
  state = made(zsmerge{}, of_zsmerge);
  state.columns = nullptr;
  check_refused(zsmerge{}, state, "expected the columns of a state, got null");
  state = made(zsmerge{}, of_zsmerge);
  state.head_stride = shape.capacity - 1;
  check_refused(zsmerge{}, state, "a head_stride of at least 41");
  state = made(zsmerge{}, of_zsmerge);
  state.initial[1] += 1;
  check_refused(zsmerge{}, state, "initial number of column 1");
  state = made(d2o{}, of_d2o);
  state.merges[0] = slot_reduce::sum;
  check_refused(d2o{}, state, "d2o's merge and initial number of column 0");
  state = made(d2o{}, of_d2o);
  state.memory = nullptr;
  check_refused(d2o{}, state, "memory of a state");
  state = made(d2o{}, of_d2o);
  state.floats = 1;
  check_refused(d2o{}, state, "expected a state of 2 floats of memory per head, got 1");
}

TEST_CASE("state: attend_observe refuses fewer columns and less memory than its rule has") {
  decoder<h2o> x(h2o{});
  device_buffer<unsigned char> memory(state_bytes(h2o{}, x.kv.view()));
  const state_view one =
      make_state_view(h2o{}, x.kv.view(), {memory.data(), memory.size()}, order());
  const auto observe = [&](const auto& rule, const state_view& state) {
    attend_observe(rule, x.kv.view(), state, x.q.data(), x.out.data(), nullptr,
                   {x.work.data(), x.work.size()}, order());
  };
  const auto before = x.bytes();
  CHECK_THROWS_WITH(observe(zsmerge_rule{}, one),
                    Catch::Contains("expected a state of 3 to 5 columns, got 1"));
  CHECK_THROWS_WITH(observe(sum_rule{}, state_view{}), Catch::Contains("columns"));
  state_view two = one;
  two.count = 2, two.columns = nullptr;
  CHECK_THROWS_WITH(observe(window_rule{}, two), Catch::Contains("got null"));
  CHECK_THROWS_WITH(observe(d2o_rule{}, one), Catch::Contains("2 floats of memory per head"));
  CHECK(x.bytes() == before);
  CHECK_NOTHROW(observe(sum_rule{}, one));
}

}  // namespace parity_state_test
}  // namespace kvmeld::cuda
