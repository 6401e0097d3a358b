// SPDX-License-Identifier: MIT
/// One step on the device that evicts a slot of every head, on numbers of the test's own, and what
/// became of the slots: for policies that merge the evicted slot into its nearest.
#pragma once

#include <cmath>

#include "cuda/device_cache.hpp"
#include "cuda/policy_calls.hpp"
#include "kvmeld/policies/declared.hpp"

namespace kvmeld::cuda {

template <class Scalar, class Policy>
struct one_step {
  Policy policy;
  cache_case shape;
  std::vector<index_t> lengths;
  device_cache<Scalar> kv;
  device_buffer<Scalar> q, k, v, out;
  device_buffer<unsigned char> work;
  std::vector<budget> limits;
  device_buffer<budget> limits_there;

  /// Every head is at its target. Scores, log-masses and rows by `seed`: whole numbers, or any.
  one_step(const Policy& p, const cache_case& c, const std::vector<index_t>& held, bool whole_rows,
           std::uint64_t seed)
      : policy(p),
        shape(c),
        lengths(held),
        kv(c, held, seed, merges(p),
           static_cast<index_t>(kvmeld::declared(p).memory(c.dim, 1, c.capacity))),
        q(size(c.group)),
        k(size(1)),
        v(size(1)),
        out(size(c.group)),
        work(workspace_bytes(p, kv.view())),
        limits(targets(held)),
        limits_there(limits) {
    emulator::chance random{seed + 1};
    const auto fraction = [&] {
      return static_cast<float>(random.below(1U << 16)) / (1U << 15) - 1.0F;
    };
    index_t column = 0;
    for (const auto& x : kvmeld::declared(p).slot_stats()) {
      kv.state.initial[column++] = x.initial;
    }
    for (auto* rows : {&q, &k, &v}) {
      for (std::size_t i = 0; i < rows->size(); ++i) {
        rows->host()[i] = from_float<Scalar>(whole_rows ? whole(random, 2) : fraction());
      }
    }
    for (index_t h = 0; h < c.heads; ++h) {
      for (index_t s = 0; s < c.capacity; ++s) {
        for (index_t i = 0; i < kv.state.count; ++i) {
          kv.column(i, h, s) = fraction() + 2;
        }
        for (index_t i = 0; i < c.dim && !whole_rows; ++i) {
          kv.key(h, s)[i] = from_float<Scalar>(fraction());
          kv.value(h, s)[i] = from_float<Scalar>(fraction());
        }
      }
    }
  }
  std::size_t size(index_t rows) const {
    return static_cast<std::size_t>(shape.heads * rows * shape.dim);
  }
  /// Slot `s` is to be evicted, whatever is attended to.
  void lower(index_t h, index_t s) {
    kv.column(0, h, s) = -100;
    if (kv.state.count > 1) {
      kv.column(1, h, s) = 1e6F;  // keepkv: the estimate's weight
    }
  }
  void run(std::uint64_t seed = 1) { run(kv.view(), seed); }
  void run(const cache_view<Scalar>& view, std::uint64_t seed) {
    work.fill(0xff);
    policy_calls<Policy, Scalar>::step(policy, view, kv.state, q.data(), {k.data(), v.data()},
                                       head_budgets(limits, limits_there.data()), out.data(),
                                       {work.data(), work.size()}, order(seed));
    kv.check_guards();
    CHECK((work.intact() && out.intact()));
  }
  /// The slot that was evicted: where the step's own token lies, or would.
  index_t evicted(index_t h) const {
    const index_t n = lengths[static_cast<std::size_t>(h)];
    for (index_t s = 0; s < n; ++s) {
      if (kv.position[kv.at(h, s)] == kv.next_position[h] - 1) {
        return s;
      }
    }
    return n;
  }
  /// All that a step leaves.
  auto bytes() const {
    return std::vector{kv.keys.bytes(),    kv.values.bytes(), kv.log_mass.bytes(),
                       kv.columns.bytes(), kv.memory.bytes(), kv.position.bytes(),
                       kv.length.bytes(),  out.bytes(),       kv.next_position.bytes()};
  }

 private:
  static std::vector<slot_reduce> merges(const Policy& p) {
    std::vector<slot_reduce> all;
    for (const auto& x : kvmeld::declared(p).slot_stats()) {
      all.push_back(x.reduce);
    }
    return all;
  }
  static std::vector<budget> targets(const std::vector<index_t>& held) {
    std::vector<budget> all;
    for (const index_t n : held) {
      all.push_back({.slots = n});
    }
    return all;
  }
};

}  // namespace kvmeld::cuda
