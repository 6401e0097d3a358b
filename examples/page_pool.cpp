// SPDX-License-Identifier: MIT
// A pool of pages with one page table for all KV heads of a layer, as serving engines have. Two
// requests take turns: what the first one's compression frees is what the second one is read into.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "kvmeld/kvmeld.hpp"

namespace {

using kvmeld::index_t;

constexpr index_t layers = 4, kv_heads = 4, group = 2, dim = 64, slots = 16;  // of a page
constexpr index_t requests = 2, prompt = 512, entries = prompt / slots, mean = 64, slack = 48;
constexpr index_t pages = layers * entries + layers * (mean + slack) / slots;  // one of each
const kvmeld::attention_spec spec{.kv_heads = kv_heads, .group = group, .key_dim = dim};

/// `[pages, slots, kv_heads, dim]`, of all layers: a page belongs to the layer that has taken it.
const kvmeld::strides one_pool{.head = dim, .row = kv_heads * dim, .page = slots * kv_heads * dim};

std::size_t numbers(index_t rows) { return static_cast<std::size_t>(rows) * dim; }

/// Standard normal numbers in place of a model's: the further a layer, the sharper it attends.
std::vector<float> rows(index_t count, index_t layer) {
  static std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.6F + 0.4F * static_cast<float>(layer));
  std::vector<float> x(numbers(count));
  for (float& y : x) {
    y = normal(random);
  }
  return x;
}

class pool {
 public:
  pool() {
    for (index_t p = pages - 1; p >= 0; --p) {
      free_.push_back(p);
    }
  }

  void serve() {
    for (index_t r = 0; r < requests; ++r) {
      read(r);
      std::printf("request %d: %d tokens in", r, prompt);
      for (index_t l = 0; l < layers; ++l) {
        std::printf(" %d", kv_.head(kv_.heads(l, r)[0]).length());
      }
      std::printf(" slots of layers 0 to %d; %zu of %d pages free\n", layers - 1, free_.size(),
                  pages);
    }
    for (index_t t = 0; t < slack; ++t) {
      step();
    }
    std::printf("%d tokens later: %zu of %d pages free\n", slack, free_.size(), pages);
    for (index_t r = 0; r < requests; ++r) {
      meld_.clear(r);
      give_back(r);
    }
    std::printf("both ended: %zu of %d pages free\n", free_.size(), pages);
  }

 private:
  /// Enters pages for `tokens` more of a layer's heads in its table.
  void take_pages(index_t layer, index_t r, index_t tokens) {
    const index_t length = kv_.head(kv_.heads(layer, r)[0]).length();
    for (index_t i = 0; i < entries; ++i) {
      index_t& entry = table_[static_cast<std::size_t>((layer * requests + r) * entries + i)];
      if (entry < 0 && i * slots < length + tokens) {
        entry = free_.back();
        free_.pop_back();
      }
    }
  }
  /// Returns the pages behind a request's slots.
  void give_back(index_t r) {
    for (index_t l = 0; l < layers; ++l) {
      const auto unused = kv_.free_pages(kv_.heads(l, r));
      const auto first = static_cast<std::size_t>(unused.data() - table_.data());
      for (std::size_t i = first; i < first + unused.size(); ++i) {
        if (table_[i] >= 0) {
          free_.push_back(table_[i]);
          table_[i] = -1;
        }
      }
    }
  }
  void read(index_t r) {
    for (index_t l = 0; l < layers; ++l) {
      const auto heads = kv_.heads(l, r);
      take_pages(l, r, prompt);
      kv_.append(heads, rows(prompt * kv_heads, l), rows(prompt * kv_heads, l), prompt);
      meld_.prompt(heads, kvmeld::queries(rows(prompt * kv_heads * group, 0), prompt, spec));
    }
    meld_.end_prompt(r);
    give_back(r);
  }
  void step() {
    const std::vector<index_t> active = {0, 1};
    std::vector<float> out(numbers(requests * kv_heads * group));
    for (index_t l = 0; l < layers; ++l) {
      for (const index_t r : active) {
        take_pages(l, r, 1);
      }
      const auto q = rows(requests * kv_heads * group, 0), k = rows(requests * kv_heads, l),
                 v = rows(requests * kv_heads, l);
      meld_.step(kv_.heads(l, active), {q, k, v}, out);
    }
  }

  std::vector<index_t> free_;
  std::vector<index_t> table_ = std::vector<index_t>(layers * requests * entries, -1);
  std::vector<float> k_ = std::vector<float>(numbers(pages * slots * kv_heads)), v_ = k_;
  kvmeld::paged_cache kv_{spec,
                          {.layers = layers, .requests = requests, .capacity = prompt},
                          kvmeld::rows(k_, one_pool),
                          kvmeld::rows(v_, one_pool),
                          {.pages = table_, .slots = slots}};
  kvmeld::compressor<kvmeld::fold> meld_{kv_, kvmeld::fold{},
                                         kvmeld::budget::shared_by_layer(mean, slack)};
};

}  // namespace

int main() { pool().serve(); }
