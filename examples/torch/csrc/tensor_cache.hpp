// SPDX-License-Identifier: MIT
/// A cache and its policy's state in an engine's tensors: nothing of it is kept here.
#pragma once

#include <algorithm>  // std::find_if
#include <cstddef>    // std::size_t
#include <cstdint>    // std::int64_t
#include <span>
#include <vector>

#include "cache_tensors.hpp"
#include "kvmeld/compress/workspace.hpp"
#include "kvmeld/peers.hpp"

namespace kvmeld_torch {

/// A `kv_cache` over tensors. A view.
class tensor_cache {
 public:
  /// Refused: lengths that cannot be.
  explicit tensor_cache(const cache_tensors& at) : at_(at) {
    for (index_t h = 0; h < heads(); ++h) {
      kvmeld::expects(at.length[h] >= 0 && at.length[h] <= at.capacity(h), "length: expected 0 to ",
                      at.capacity(h), " slots, got ", at.length[h], " of head ", h);
      kvmeld::expects(at.seen[h] >= at.length[h], "seen: expected at least ", at.length[h],
                      " tokens, got ", at.seen[h], " of head ", h);
      if (const auto newest = at.beside_of(h).newest; newest.count > 0) {  // found by positions
        kvmeld::expects(*newest.rounded >= 0 && *newest.rounded <= at.seen[h],
                        "rounded: expected 0 to ", at.seen[h], " tokens, got ", *newest.rounded,
                        " of head ", h);
        const index_t* const first = at.position + at.first(h);
        const index_t* const negative =
            std::find_if(first, first + at.length[h], [](index_t p) { return p < 0; });
        kvmeld::expects(negative == first + at.length[h],
                        "position: expected at least 0 in slots in use, got another in head ", h);
      }
    }
  }

  const cache_tensors& tensors() const { return at_; }
  index_t heads() const { return at_.shape.heads; }

  kvmeld::head_ref head(index_t h) const {
    const std::ptrdiff_t first = at_.first(h), row = at_.ends.empty() ? 0 : first;
    const kvmeld::slot_metadata slots{at_.log_mass + first, at_.position + first, at_.length + h,
                                      at_.seen + h};
    return {slots,
            at_.capacity(h),
            *at_.spec,
            h % at_.spec->kv_heads,
            at_.type,
            at_.keys.of(h, row),
            at_.values.of(h, row),
            {},
            at_.beside_of(h)};
  }

 private:
  cache_tensors at_;
};

static_assert(kvmeld::kv_cache<tensor_cache>);

/// The state of all heads over their tensors for one call; its lengths are written back at the end.
class tensor_states {
 public:
  /// Refused: tensors of another size than `policy` needs, lengths that cannot be, a model that it
  /// does not go with.
  tensor_states(const kvmeld::any_policy_or_peer& policy, const tensor_cache& cache,
                index_t workers)
      : at_(cache.tensors()), all_(made(policy, at_)), work_(workspaces(at_.shape, workers)) {}
  tensor_states(const tensor_states&) = delete;
  tensor_states& operator=(const tensor_states&) = delete;
  ~tensor_states() {
    for (index_t h = 0; h < at_.shape.heads; ++h) {
      std::int64_t* const row = at_.measured + h * at_.measured_row;
      row[0] = (*this)[h].length(), row[1] = (*this)[h].observed();
    }
  }

  kvmeld::head_state& operator[](index_t h) { return all_[static_cast<std::size_t>(h)]; }
  kvmeld::workspace& work(index_t worker = 0) { return work_[static_cast<std::size_t>(worker)]; }

 private:
  /// Memory to work in stays from call to call: a decode step allocates none.
  static std::vector<kvmeld::workspace>& workspaces(const tensor_shape& shape, index_t workers) {
    thread_local std::vector<kvmeld::workspace> all;
    all.resize(std::max(all.size(), static_cast<std::size_t>(workers)));
    for (index_t w = 0; w < workers; ++w) {
      all[static_cast<std::size_t>(w)].reserve(shape.group, shape.row_dim(), shape.capacity);
    }
    return all;
  }
  static std::vector<kvmeld::head_state> made(const kvmeld::any_policy_or_peer& policy,
                                              const cache_tensors& at) {
    kvmeld::check(policy, *at.spec);
    const auto kinds = kvmeld::declared(policy).slot_stats();
    kvmeld::expects(kinds.size() == static_cast<std::size_t>(at.column_count), policy.name(),
                    ": expected columns [heads, ", kinds.size(), ", capacity], got ",
                    at.column_count, " columns per head");
    std::vector<kvmeld::head_state> all;
    all.reserve(static_cast<std::size_t>(at.shape.heads));
    for (index_t h = 0; h < at.shape.heads; ++h) {
      const std::int64_t* const row = at.measured + h * at.measured_row;
      const index_t capacity = at.capacity(h);
      kvmeld::expects(row[0] >= 0 && row[0] <= at.length[h], "measured: expected 0 to ",
                      at.length[h], " slots, got ", row[0], " of head ", h);
      kvmeld::expects(row[2] > 0 && row[2] <= std::numeric_limits<index_t>::max(),
                      "measured: expected a capacity of at least 1 slot, got ", row[2], " of head ",
                      h);
      const auto laid_out = static_cast<index_t>(row[2]);
      const std::size_t memory =
          kvmeld::declared(policy).memory(at.shape.row_dim(), at.shape.group, laid_out);
      kvmeld::expects(
          at.length[h] < laid_out || kvmeld::declared(policy).memory(
                                         at.shape.row_dim(), at.shape.group, capacity) <= memory,
          policy.name(), ": expected memory for more than ", at.length[h],
          " slots, got memory for ", laid_out);
      kvmeld::expects(memory <= static_cast<std::size_t>(at.memory_row), policy.name(),
                      ": expected memory of at least ", memory, " floats per head, got ",
                      at.memory_row);
      all.emplace_back(kinds,
                       kvmeld::state_memory{
                           .columns = std::span(at.columns + at.first(h) * at.column_count,
                                                kinds.size() * static_cast<std::size_t>(capacity)),
                           .memory = std::span(at.memory + h * at.memory_row, memory),
                           .capacity = capacity,
                           .memory_capacity = laid_out,
                           .length = static_cast<index_t>(row[0]),
                           .queries = row[1]},
                       policy.name());
    }
    return all;
  }

  cache_tensors at_;
  std::vector<kvmeld::head_state> all_;
  std::vector<kvmeld::workspace>& work_;  // of the calling thread
};

}  // namespace kvmeld_torch
