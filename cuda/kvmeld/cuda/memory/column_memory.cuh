// SPDX-License-Identifier: MIT
/// What `column_scores` works in, and how it splits a pass where rows are few.
#pragma once

#include <cstddef>  // std::size_t

#include "kvmeld/cuda/memory/workspace.cuh"

namespace kvmeld::cuda {

namespace detail {

/// What a block of `stream_columns` holds, and how many columns it streams at a time.
inline constexpr index_t stream_rows = 256, stream_columns_a_tile = 128;

/// As many parts of the columns as give two blocks to each of an H100's 132 multiprocessors, no
/// more than tiles. By shape alone: the same bytes whatever the device.
inline index_t column_parts(index_t heads, index_t rows, index_t columns) {
  constexpr index_t blocks_wanted = 256, most = 16;
  const index_t blocks = (heads < 1 ? 1 : heads) * ((rows + stream_rows - 1) / stream_rows);
  const index_t tiles = (columns + stream_columns_a_tile - 1) / stream_columns_a_tile;
  index_t parts = blocks < 1 ? 1 : (blocks_wanted + blocks - 1) / blocks;
  parts = parts < most ? parts : most;
  parts = parts < tiles ? parts : tiles;
  return parts < 1 ? 1 : parts;
}
/// Numbers of all parts of `n` rows: parts are fewer than 512 over the blocks, of 256 rows each.
inline std::size_t most_partial(std::size_t n) { return 16 * n < 131072 ? 16 * n : 131072; }

struct column_memory {
  float* log_sum_exp;       ///< [heads, group, queries]
  float* partial_log_sums;  ///< [parts, heads, group, queries]
  float* partial_sums;      ///< [parts, 3, heads, capacity]

  void allocate(workspace_allocator& from, index_t heads, index_t group, index_t queries,
                index_t capacity) {
    const auto n = static_cast<std::size_t>(heads),
               asked = n * static_cast<std::size_t>(group) * static_cast<std::size_t>(queries);
    log_sum_exp = from.take<float>(asked);
    partial_log_sums = from.take<float>(most_partial(asked));
    partial_sums = from.take<float>(3 * most_partial(n * static_cast<std::size_t>(capacity)));
  }
};

}  // namespace detail

/// Bytes of workspace for `column_scores`: the queries' log-sum-exp, and up to 2 MiB of partial
/// sums. No more for fewer queries.
inline std::size_t column_scores_workspace_bytes(index_t heads, index_t group, index_t queries,
                                                 index_t capacity) {
  workspace_allocator from;
  detail::column_memory{}.allocate(from, heads, group, queries, capacity);
  return from.used();
}

}  // namespace kvmeld::cuda
