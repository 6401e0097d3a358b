// SPDX-License-Identifier: MIT
/// A stream of tokens on the device alone: nothing is lost or broken on the way, and the same bytes
/// come of it a second time.
#pragma once

#include <cmath>
#include <cstdlib>
#include <set>

#include "cuda/mirror.hpp"
#include "cuda/policy_calls.hpp"

namespace kvmeld::cuda {

/// How many tokens: the hardware makes 10,000 in seconds, a sanitizer's or the emulator's step
/// takes some milliseconds.
inline index_t stream_steps() {
#ifdef __CUDACC__
  const char* const fewer = std::getenv("KVMELD_STREAM_STEPS");
  return fewer != nullptr ? std::atoi(fewer) : 10'000;
#else
  return 30;
#endif
}

/// A cache without tokens on the device, and a decode step's arguments.
template <class Policy>
struct device_stream {
  const Policy& policy;
  cache_case shape;
  budget limit;
  fixtures::cache<float> empty;
  fixtures::state state;
  mirror<float> twin;
  device_buffer<unsigned char> memory;
  device_buffer<float> q, k, v, out;
  device_buffer<index_t> list;    // of a graph: which heads, −1 for none
  device_buffer<budget> budgets;  // ... and what they may hold

  device_stream(const Policy& p, const cache_case& c, const budget& b)
      : policy(p),
        shape(c),
        limit(b),
        empty({.heads = c.heads, .group = c.group, .dim = c.dim, .capacity = c.capacity}),
        state(fixtures::make_state(p, empty)),
        twin(p, empty, state, c),
        memory(workspace_bytes(p, twin.device.view())),
        q(static_cast<std::size_t>(c.heads * c.group * c.dim)),
        k(static_cast<std::size_t>(c.heads * c.dim)),
        v(k.size()),
        out(q.size()),
        list(static_cast<std::size_t>(c.heads)),
        budgets(std::vector<budget>(list.size(), b)) {}

  /// The numbers of token `t`.
  void draw(index_t t) {
    emulator::chance random{static_cast<std::uint64_t>(t) + 1};
    for (device_buffer<float>* x : {&q, &k, &v}) {
      for (std::size_t i = 0; i < x->size(); ++i) {
        x->host()[i] = static_cast<float>(random.below(1U << 20)) / (1U << 19) - 1.0F;
      }
    }
  }
  /// Whatever a workspace holds before a call means nothing.
  void scribble(index_t t) { memory.fill(t % 2 == 0 ? 0xff : 0x11); }
  void step(const stream& on) { step(on, twin.device.view(), limit); }
  void step(const stream& on, const cache_view<float>& view, const head_budgets& limits) {
    policy_calls<Policy, float>::step(policy, view, twin.device.state, q.data(),
                                      {k.data(), v.data()}, limits, out.data(),
                                      {memory.data(), memory.size()}, on);
  }
  /// All that a step may change.
  auto bytes() const {
    const auto& d = twin.device;
    return std::vector{d.keys.bytes(),     d.values.bytes(), d.log_mass.bytes(),
                       d.position.bytes(), d.length.bytes(), d.next_position.bytes(),
                       d.columns.bytes(),  d.memory.bytes(), out.bytes()};
  }
};

template <class Policy>
void check_stream(const Policy& p, const cache_case& c, const budget& limit) {
  const index_t steps = stream_steps();
  INFO(p.name() << ", a stream of " << steps << " tokens, target " << limit.slots);
  device_stream<Policy> one(p, c, limit), again(p, c, limit);
  for (index_t t = 0; t < steps; ++t) {
    one.draw(t), again.draw(t);
    one.step(order(static_cast<std::uint64_t>(t) + 1));
    again.scribble(t);
    again.step(order(static_cast<std::uint64_t>(t) + 7));
    if (t % 1000 == 999 || t + 1 == steps) {  // to compare is to wait for the device
      REQUIRE(one.bytes() == again.bytes());
    }
  }
  auto& device = one.twin.device;
  bool finite = true;
  for (std::size_t i = 0; i < one.out.size(); ++i) {
    finite = finite && std::isfinite(one.out.host()[i]);
  }
  for (index_t h = 0; h < c.heads; ++h) {
    CHECK(device.next_position[h] == steps);
    CHECK(device.length[h] >= std::min(limit.slots / 2, steps));
    CHECK(device.length[h] < limit.trigger_length());
    std::set<index_t> positions;
    for (index_t s = 0; s < device.length[h]; ++s) {
      const index_t at = device.position[device.at(h, s)];
      CHECK((at >= 0 && at < steps));
      positions.insert(at);
      finite = finite && std::isfinite(device.log_mass[device.at(h, s)]);
      for (index_t i = 0; i < c.dim; ++i) {
        finite =
            finite && std::isfinite(device.key(h, s)[i]) && std::isfinite(device.value(h, s)[i]);
      }
    }
    CHECK(static_cast<index_t>(positions.size()) == device.length[h]);
  }
  CHECK(finite);
  device.check_guards();
  CHECK((one.memory.intact() && one.out.intact()));
}

#ifdef __CUDACC__
/// A step that was captured in a graph once is the step, whichever heads run in it, and whatever
/// budgets they have then.
template <class Policy>
void check_captured(const Policy& p, const cache_case& c, const budget& limit) {
  INFO(p.name() << " in a graph");
  device_stream<Policy> one(p, c, limit), again(p, c, limit);
  budget least = limit;
  least.slots -= limit.trigger > 0 ? 3 : 0;
  const auto step = [&](device_stream<Policy>& x, const stream& on) {
    x.step(on, x.twin.device.view().with_active(x.list.data(), c.heads),
           head_budgets::within(least, limit, x.budgets.data()));
  };
  const auto check = [](cudaError_t code) { REQUIRE(code == cudaSuccess); };
  cudaStream_t stream{};
  cudaGraph_t graph{};
  cudaGraphExec_t captured{};
  check(cudaStreamCreate(&stream));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));  // refuses to synchronise
  step(again, stream);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiateWithFlags(&captured, graph, 0));
  for (index_t t = 0; t < 200; ++t) {
    for (device_stream<Policy>* const x : {&one, &again}) {
      x->draw(t);
      for (index_t h = 0; h < c.heads; ++h) {
        x->list[h] = (t + h) % 3 == 0 ? -1 : (t / 7 + h) % c.heads;
        x->budgets[h].slots = limit.slots - (limit.trigger > 0 ? (t / 9 + h) % 4 : 0);
      }
    }
    step(one, order());
    two_sides::before_call();
    check(cudaGraphLaunch(captured, stream));
  }
  CHECK(one.bytes() == again.bytes());
  check(cudaGraphExecDestroy(captured));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(stream));
}
#endif

}  // namespace kvmeld::cuda
