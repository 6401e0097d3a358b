// SPDX-License-Identifier: MIT
// Products and sums over rows in blocks, at the width of a vector against one by one, as the file
// sees them that includes this.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "kvmeld/memory/cache.hpp"
#include "kvmeld/score/codes.hpp"

namespace {  // NOLINT(google-build-namespaces): one for each instruction set

/// Rows `[count, dim]` of a cache, and as many queries and weights as a test names.
template <kvmeld::block_scalar Block>
struct codes_scene {
  kvmeld::index_t dim, queries, count;
  kvmeld::cache kv;
  std::vector<float> q, p;

  codes_scene(kvmeld::index_t of_rows, kvmeld::index_t of_queries, kvmeld::index_t slots)
      : dim(of_rows),
        queries(of_queries),
        count(slots),
        kv({.kv_heads = 1, .key_dim = dim}, {.capacity = count,
                                             .keys = kvmeld::storage_of<Block>,
                                             .values = kvmeld::storage_of<Block>}),
        q(draw(queries * dim)),
        p(draw(queries * kvmeld::score::tile_slots)) {
    kv.append(kv.heads(0, 0), draw(count * dim), draw(count * dim), count);
    for (float& weight : p) {
      weight = std::exp(3 * weight);
    }
  }

  kvmeld::score::code_rows<Block> rows(bool keys) {
    const kvmeld::head_ref head = kv.head(0);
    return {head, 0, count,
            [&](kvmeld::index_t s) { return keys ? head.keys_from(s) : head.values_from(s); }};
  }
  kvmeld::score::rounded_queries rounded() const {
    kvmeld::score::rounded_queries x;
    x.assign(q.data(), queries, dim);
    return x;
  }

  /// `q · k` and `Σ p v` as attention computes them.
  std::vector<float> dots() {
    std::vector<float> x(kvmeld::as_size(queries, kvmeld::score::tile_slots));
    kvmeld::score::qk_codes(rounded(), rows(true), x.data(), kvmeld::score::tile_slots);
    return x;
  }
  std::vector<float> sums() {
    std::vector<float> x(kvmeld::as_size(queries, dim), 1.0F);
    kvmeld::score::pv_codes(p.data(), kvmeld::score::tile_slots, queries, rows(false), dim,
                            x.data());
    return x;
  }

  /// Are they those of one row and one block after the other, to the bit?
  bool as_one_by_one() {
    constexpr kvmeld::index_t next = kvmeld::score::tile_slots, block = Block::size;
    const auto keys = rows(true), values = rows(false);
    const auto in_16_bits = rounded();
    std::vector<float> expected_dots(dots().size()), expected_sums(sums().size(), 1.0F);
    for (kvmeld::index_t g = 0; g < queries; ++g) {
      for (kvmeld::index_t s = 0; s < count; ++s) {
        expected_dots[kvmeld::as_size(g * next + s)] =
            kvmeld::score::dot_codes(in_16_bits.codes(g, 0), keys[s], in_16_bits.blocks()) *
            in_16_bits.scale(g);
      }
      for (kvmeld::index_t i = 0; i < dim; i += block) {
        kvmeld::score::sum_codes(p.data() + g * next, values, i / block, std::min(block, dim - i),
                                 expected_sums.data() + g * dim + i);
      }
    }
    return dots() == expected_dots && sums() == expected_sums;
  }

 private:
  static std::vector<float> draw(kvmeld::index_t n) {
    static std::mt19937 generator(7);
    std::normal_distribution<float> normal;
    std::vector<float> x(kvmeld::as_size(n));
    std::generate(x.begin(), x.end(), [&] { return normal(generator); });
    return x;
  }
};

}  // namespace
