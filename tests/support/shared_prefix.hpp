// SPDX-License-Identifier: MIT
// An engine whose requests share the pages of a sealed prefix, or have each their own.
#pragma once

#include <vector>

#include "kvmeld/compressor.hpp"
#include "support/fixtures.hpp"

namespace shared_prefix {

using fixtures::normal;
using kvmeld::budget, kvmeld::errc, kvmeld::index_t;
using floats = std::vector<float>;

inline constexpr index_t layers = 2, requests = 4, kv_heads = 2, group = 2, dim = 8, slots = 4,
                         pages = 16;
inline const kvmeld::attention_spec spec = [] {
  kvmeld::attention_spec s{.kv_heads = kv_heads, .group = group, .key_dim = dim};
  s.rope = kvmeld::rotary::halves(10'000);
  return s;
}();

inline floats rows_of(index_t n) { return normal(n * kv_heads * dim); }
inline floats queries_of(index_t n) { return normal(n * kv_heads * group * dim); }

/// Rows of one layer: so many tokens.
struct tokens {
  index_t count;
  floats q, k, v;

  explicit tokens(index_t n) : count(n), q(queries_of(n)), k(rows_of(n)), v(rows_of(n)) {}
};

/// An engine of requests in pages. `shares`: the pages of a copied prefix are listed by all, else
/// each request has its own.
struct engine {
  bool shares;
  floats keys, values;
  std::vector<index_t> table, pool;
  kvmeld::paged_cache kv;
  kvmeld::compressor<kvmeld::any_policy_or_peer> meld;

  engine(bool shared, const kvmeld::any_policy_or_peer& policy, const budget& b)
      : shares(shared),
        keys(static_cast<std::size_t>(layers * requests * pages * slots * kv_heads * dim)),
        values(keys),
        table(static_cast<std::size_t>(requests * pages), kvmeld::page_table::no_page),
        kv(spec, {.layers = layers, .requests = requests, .capacity = slots * pages},
           kvmeld::rows(keys, kvmeld::layout::pages_nhd),
           kvmeld::rows(values, kvmeld::layout::pages_nhd), {.pages = table, .slots = slots}),
        meld(kv, policy, b) {
    for (index_t p = requests * pages; p-- > 0;) {
      pool.push_back(p);
    }
  }
  index_t& entry(index_t r, index_t i) { return table[static_cast<std::size_t>(r * pages + i)]; }
  kvmeld::head_ref head(index_t layer, index_t r, index_t h = 0) {
    return kv.head(kv.heads(layer, r)[h]);
  }
  /// Pages for `n` more tokens; and back, those that a call has freed.
  void grow(index_t r, index_t n) {
    index_t longest = 0;
    for (index_t l = 0; l < layers; ++l) {
      for (index_t h = 0; h < kv_heads; ++h) {
        longest = std::max(longest, head(l, r, h).length());
      }
    }
    for (index_t i = 0; i * slots < longest + n; ++i) {
      if (entry(r, i) < 0) {
        entry(r, i) = pool.back(), pool.pop_back();
      }
    }
  }
  void give_back(index_t r) {
    for (const index_t& page : kv.free_pages(kv.heads(0, r)[0])) {
      if (page >= 0) {
        pool.push_back(page);
        table[static_cast<std::size_t>(&page - table.data())] = kvmeld::page_table::no_page;
      }
    }
  }

  void append(index_t r, const std::vector<tokens>& x) {
    grow(r, x[0].count);
    for (index_t l = 0; l < layers; ++l) {
      const tokens& t = x[static_cast<std::size_t>(l)];
      kv.append(kv.heads(l, r), t.k, t.v, t.count);
    }
  }
  void prompt(index_t r, const std::vector<tokens>& x) {
    append(r, x);
    for (index_t l = 0; l < layers; ++l) {
      const tokens& t = x[static_cast<std::size_t>(l)];
      meld.prompt(kv.heads(l, r), kvmeld::queries(t.q, t.count, spec));
    }
    meld.end_prompt(r);
    give_back(r);
  }
  floats step(index_t r, const std::vector<tokens>& x) {
    grow(r, 1);
    floats all;
    for (index_t l = 0; l < layers; ++l) {
      const tokens& t = x[static_cast<std::size_t>(l)];
      floats out(t.q.size());
      meld.step(kv.heads(l, r), {t.q, t.k, t.v}, out);
      all.insert(all.end(), out.begin(), out.end());
    }
    give_back(r);
    return all;
  }
  floats draft(index_t r, const std::vector<tokens>& x, index_t accepted) {
    grow(r, x[0].count);
    floats all;
    for (index_t l = 0; l < layers; ++l) {
      const tokens& t = x[static_cast<std::size_t>(l)];
      floats out(t.q.size());
      meld.draft(kv.heads(l, r), {t.q, t.k, t.v}, out, t.count);
      all.insert(all.end(), out.begin(), out.end());
    }
    meld.accept(r, accepted);
    give_back(r);
    return all;
  }
  void clear(index_t r) {
    meld.clear(r);
    for (index_t i = 0; i < pages; ++i) {
      index_t& page = entry(r, i);
      const bool shared = shares && r > 0 && page >= 0 && page == entry(0, i);
      if (page >= 0 && !shared) {
        pool.push_back(page);
      }
      page = kvmeld::page_table::no_page;
    }
  }
  /// Request `to` becomes what `from` is; where pages are shared, those of the sealed prefix stay.
  void copy(index_t from, index_t to) {
    clear(to);
    for (index_t i = 0; shares && i < meld.sealed(kv.heads(0, from)[0]) / slots; ++i) {
      entry(to, i) = entry(from, i);
    }
    for (index_t l = 0; l < layers; ++l) {
      grow(to, head(l, from).length());
    }
    meld.copy(from, to);
  }
  floats bytes(index_t r) {
    floats all;
    for (index_t l = 0; l < layers; ++l) {
      for (index_t h = 0; h < kv_heads; ++h) {
        const floats own = fixtures::bytes_of(head(l, r, h));
        all.insert(all.end(), own.begin(), own.end());
      }
    }
    return all;
  }
};

inline std::vector<tokens> each_layer(index_t n) { return std::vector<tokens>(layers, tokens(n)); }

}  // namespace shared_prefix
