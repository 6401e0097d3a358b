// SPDX-License-Identifier: MIT
/// Reference queries for policies that are run head by head on a whole prompt: a spread over its
/// own, or these moved to the positions to come. (A `compressor` chooses them chunk by chunk.)
#pragma once

#include <algorithm>  // std::min
#include <cstddef>    // std::ptrdiff_t
#include <vector>

#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/score/queries.hpp"

namespace evaluate {

using kvmeld::as_size;
using kvmeld::index_t;
using kvmeld::query_view;

/// Reference queries of all heads that own their memory, `[heads, group, count, dim]` in float.
class reference_queries {
 public:
  reference_queries(index_t heads, index_t group, index_t count, index_t dim)
      : group_(group), dim_(dim), position_(as_size(count)) {
    data_.resize(as_size(heads, group, count, dim));
  }

  index_t count() const { return static_cast<index_t>(position_.size()); }
  float* at(index_t h, index_t g, index_t i) {
    return data_.data() + ((std::ptrdiff_t{h} * group_ + g) * count() + i) * dim_;
  }
  index_t& position(index_t i) { return position_[as_size(i)]; }

  /// As policies take them; valid while this lives, so not to be had of a temporary.
  query_view<float> view() const& {
    const std::ptrdiff_t one = std::ptrdiff_t{count()} * dim_;
    return {data_.data(), count(), one * group_, one, dim_, position_.data()};
  }
  query_view<float> view() const&& = delete;

 private:
  index_t group_, dim_;
  std::vector<float> data_;
  std::vector<index_t> position_;
};

/// `count` of the prompt's own queries, evenly spread from query `first` on, at their own
/// positions. Fewer where the prompt has fewer.
template <class T>
reference_queries spread(kvmeld::kv_cache auto& kv, const query_view<T>& queries,
                         index_t count = 256, index_t first = kvmeld::score::blind_queries) {
  const auto head = kv.head(0);
  kvmeld::expects(queries.data != nullptr && queries.count > 0, "spread: expected queries");
  kvmeld::expects(count > 0, "spread: expected at least 1 query, got ", count);
  for (index_t h = 0; h < kv.heads(); ++h) {
    kvmeld::expects(kv.head(h).next_position() == head.next_position(),
                    "spread: expected heads of one prompt, which have seen ", head.next_position(),
                    " tokens, got ", kv.head(h).next_position());
  }
  first = std::min(first, queries.count - 1);
  const index_t n = std::min(count, queries.count - first);
  reference_queries out(kv.heads(), head.group(), n, head.dim());
  for (index_t i = 0; i < n; ++i) {
    const index_t t = kvmeld::score::spread_query(i, n, queries.count, first);
    out.position(i) = queries.position_of(t, head.next_position());
    for (index_t h = 0; h < kv.heads(); ++h) {
      for (index_t g = 0; g < head.group(); ++g) {
        kvmeld::to_floats(kvmeld::row<const T>{queries.of(h).at(g, t)}, head.dim(),
                          out.at(h, g, i));
      }
    }
  }
  return out;
}

/// Lookahead (ours): queries spread over the prompt, un-rotated and rotated again to the positions
/// to come, `N … N + horizon − 1` (see `future_positions`). A query's content repeats; its
/// rotation does not.
template <class T>
reference_queries lookahead(kvmeld::kv_cache auto& kv, const query_view<T>& queries,
                            const kvmeld::lookahead_options& options = {}) {
  options.ahead.validate("lookahead");
  const auto head = kv.head(0);
  reference_queries out = spread(kv, queries, options.count);
  const auto moved = [&](index_t i) {
    return head.next_position() + options.ahead(i, out.count());
  };
  for (index_t h = 0; h < kv.heads(); ++h) {
    kvmeld::rotation turn(kv.head(h).spec().rope, head.dim());
    for (index_t i = 0; i < out.count(); ++i) {
      turn.by(moved(i) - out.position(i));
      for (index_t g = 0; g < head.group(); ++g) {
        turn(out.at(h, g, i));
      }
    }
  }
  for (index_t i = 0; i < out.count(); ++i) {
    out.position(i) = moved(i);
  }
  return out;
}

}  // namespace evaluate
