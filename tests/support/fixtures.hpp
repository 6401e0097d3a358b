// SPDX-License-Identifier: MIT
// Random heads, once for the library and once for the oracle, and the way back to compare.
#pragma once

#include <catch2/catch.hpp>
#include <random>
#include <span>
#include <vector>

#include "kvmeld/kvmeld.hpp"
#include "oracle/oracle.hpp"
#include "support/all_heads.hpp"
#include "support/random.hpp"
#include "support/typed_cache.hpp"

namespace fixtures {

using kvmeld::index_t;

inline std::mt19937& random_bits() { return streams::floats; }

/// `n` normal numbers, times `scale`, which may be 0; `T` float, half or bfloat16.
template <class T = float>
std::vector<T> normal(index_t n, float scale = 1) {
  std::normal_distribution<float> gauss;
  std::vector<T> x(static_cast<std::size_t>(n));
  for (T& e : x) {
    e = static_cast<T>(scale * gauss(random_bits()));
  }
  return x;
}

/// `[rows, dim]` floats as the oracle's matrix.
template <class T>
oracle::mat to_mat(const T* data, index_t rows, index_t dim) {
  oracle::mat m;
  for (index_t r = 0; r < rows; ++r) {
    oracle::vec v;
    for (index_t i = 0; i < dim; ++i) {
      v.push_back(static_cast<double>(static_cast<float>(data[r * dim + i])));
    }
    m.push_back(v);
  }
  return m;
}

/// What a layer's spec says of the query heads of one of its KV heads.
inline oracle::terms terms_of(const kvmeld::attention_spec& spec, index_t kv_head = 0) {
  const auto own = [&](const std::vector<float>& all) {
    const auto first = all.begin() + (all.empty() ? 0 : kv_head * spec.group);
    return oracle::vec(first, all.empty() ? all.end() : first + spec.group);
  };
  return {.scale = static_cast<double>(spec.scale),
          .cap = static_cast<double>(spec.soft_cap),
          .sinks = own(spec.sink_logits),
          .slopes = own(spec.alibi_slopes),
          .window = spec.window};
}

/// A library's head as the oracle sees it, number `kv_head` of its layer; the policies' own fields
/// are left alone.
oracle::head to_oracle(const kvmeld::kv_head auto& head, index_t kv_head = 0) {
  oracle::head h = oracle::make_head(head.dim(), head.group(), terms_of(head.spec(), kv_head));
  h.value_dim = head.value_dim();
  for (index_t s = 0; s < head.length(); ++s) {
    oracle::slot slot;
    for (index_t i = 0; i < head.dim(); ++i) {
      slot.key.push_back(static_cast<double>(static_cast<float>(head.key(s)[i])));
    }
    for (index_t i = 0; i < head.value_dim(); ++i) {
      slot.value.push_back(static_cast<double>(static_cast<float>(head.value(s)[i])));
    }
    slot.log_mass = static_cast<double>(head.log_mass(s));
    slot.position = head.position(s);
    h.slots.push_back(slot);
  }
  h.next = head.next_position();
  return h;
}

/// Heads of `shape` with `tokens` random tokens each, drawn as `Scalar` and held in `Storage`.
template <class Scalar = float, class Storage = Scalar>
fixtures::cache<Storage> random_cache(index_t tokens, const cache_shape& shape) {
  fixtures::cache<Storage> kv{shape};
  for (index_t h = 0; h < shape.heads; ++h) {
    kv.append(h, normal<Scalar>(tokens * shape.dim),
              normal<Scalar>(tokens * (shape.value_dim == 0 ? shape.dim : shape.value_dim)));
  }
  return kv;
}
template <class Scalar = float, class Storage = Scalar>
fixtures::cache<Storage> random_cache(index_t tokens, index_t dim, index_t group,
                                      index_t capacity = 0, index_t heads = 1,
                                      const kvmeld::rotary& rope = default_rope,
                                      index_t value_dim = 0) {
  return random_cache<Scalar, Storage>(tokens, {.heads = heads,
                                                .group = group,
                                                .dim = dim,
                                                .capacity = capacity == 0 ? tokens + 1 : capacity,
                                                .rope = rope,
                                                .value_dim = value_dim});
}

/// `[queries, group, dim]`, wherever they lie.
template <class Query>
oracle::tensor to_tensor(const kvmeld::query_view<Query>& q, index_t group, index_t dim) {
  oracle::tensor all;
  for (index_t i = 0; i < q.count; ++i) {
    all.emplace_back();
    for (index_t g = 0; g < group; ++g) {
      all.back().push_back(to_mat(q.at(g, i), 1, dim)[0]);
    }
  }
  return all;
}

/// Queries `[n, group, dim]` of one head, for both sides.
struct queries {
  index_t count, group, dim;
  std::vector<float> data;

  queries(index_t n, index_t g, index_t d, float scale = 1)
      : count(n), group(g), dim(d), data(normal(n * g * d, scale)) {}
  kvmeld::query_view<float> view() const {
    return kvmeld::prompt_queries(data.data(), count, 1, group, dim);
  }
  oracle::tensor tensor() const { return to_tensor(view(), group, dim); }
};

/// Every bit of a head: keys, values, log-mass, positions of the slots in use.
std::vector<float> bytes_of(const kvmeld::kv_head auto& head) {
  std::vector<float> all;
  for (index_t s = 0; s < head.length(); ++s) {
    for (index_t i = 0; i < head.row_dim(); ++i) {
      if (i < head.dim()) {
        all.push_back(static_cast<float>(head.key(s)[i]));
      }
      if (i < head.value_dim()) {
        all.push_back(static_cast<float>(head.value(s)[i]));
      }
    }
    all.push_back(head.log_mass(s));
    all.push_back(static_cast<float>(head.position(s)));
  }
  return all;
}

}  // namespace fixtures
