// SPDX-License-Identifier: MIT
/// Reference queries and a plan of fold's, for tests of how its rows are fitted.
#pragma once

#include <vector>

#include "cuda/device_cache.hpp"
#include "kvmeld/cuda/policies/fold/values.cuh"

namespace kvmeld::cuda {

/// Queries `[heads, group, count, dim]` that all heads but those with −1 in `planned` ask.
template <class Scalar>
struct asked_queries {
  cache_case c;
  index_t count;
  device_buffer<Scalar> q;
  device_buffer<index_t> planned;

  asked_queries(const cache_case& of, index_t n, std::vector<index_t> plans, std::uint64_t seed)
      : c(of),
        count(n),
        q(static_cast<std::size_t>(c.heads * c.group * n * c.dim)),
        planned(plans) {
    emulator::chance random{seed};
    for (std::size_t i = 0; i < q.size(); ++i) {
      q.host()[i] = from_float<Scalar>(static_cast<float>(random.below(401)) / 100 - 2);
    }
  }
  index_t all() const { return c.group * count; }
  detail::chosen_rows<Scalar> rows() {
    const std::ptrdiff_t member = std::ptrdiff_t{count} * c.dim;
    return {{q.data(), count, c.group * member, member, c.dim}, q.data(), count, planned.data()};
  }
  float at(index_t h, index_t i, index_t e) { return to_float(q[(h * all() + i) * c.dim + e]); }
};

/// A plan of fold's: every `apart`-th row is one pinned slot, the others are two slots each.
template <class Scalar>
struct planned_rows {
  index_t rows_of_head;
  device_buffer<index_t> rows, begin, into;
  device_buffer<merge_source> sources;
  device_buffer<float> log_mass, sum, mass;
  device_buffer<unsigned char> memory;
  detail::value_scratch work;

  planned_rows(const cache_case& c, index_t all, index_t count, std::uint64_t seed)
      : rows_of_head(count),
        rows(std::vector(static_cast<std::size_t>(c.heads), count)),
        begin(static_cast<std::size_t>(c.heads * (c.capacity + 1)), 0),
        into(slots(c), 0),
        sources(slots(c)),
        log_mass(slots(c), 0),
        sum(slots(c), 0),
        mass(slots(c), 0),
        memory(allocated({}, c, all, count).bytes),
        work(allocated({memory.data(), memory.size()}, c, all, count).work) {
    emulator::chance random{seed};
    rows[c.heads - 1] = -1;  // this head stays as it is
    for (index_t h = 0; h < c.heads; ++h) {
      index_t slot = 0;
      for (index_t r = 0; r < count; ++r) {
        begin[h * (c.capacity + 1) + r] = slot;
        const index_t size = pinned(r) ? 1 : 2;
        into[h * c.capacity + slot] = pinned(r) ? slot : slot | detail::keep_evict_partition::fresh;
        for (index_t e = 0; e < size; ++e, ++slot) {
          sources[h * c.capacity + slot] = {slot, 1, 1};
        }
        log_mass[h * c.capacity + r] = 0.25F * static_cast<float>(random.below(4));
      }
      begin[h * (c.capacity + 1) + count] = slot;
      for (index_t s = 0; s < c.capacity; ++s) {
        sum[h * c.capacity + s] = static_cast<float>(1 + random.below(100)) / 50;
        mass[h * c.capacity + s] = static_cast<float>(1 + random.below(100)) / 100;
      }
    }
  }
  static bool pinned(index_t r) { return r % 3 == 0; }
  plan_view view() { return {rows.data(), begin.data(), sources.data(), log_mass.data()}; }

 private:
  struct room {
    detail::value_scratch work;
    std::size_t bytes;
  };
  static std::size_t slots(const cache_case& c) {
    return static_cast<std::size_t>(c.heads * c.capacity);
  }
  static room allocated(workspace of, const cache_case& c, index_t all, index_t count) {
    workspace_allocator from(of);
    const detail::work_shape shape{
        c.heads, c.capacity, 1, c.dim, all, count, static_cast<index_t>(sizeof(Scalar))};
    const auto work = detail::allocate_values(from, shape, true);
    return {work, from.used()};
  }
};

}  // namespace kvmeld::cuda
