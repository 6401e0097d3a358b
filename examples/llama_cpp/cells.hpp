// SPDX-License-Identifier: MIT
/// The KV heads of a model's layers, over the engine's cells or over memory of their own.
#pragma once

#include <algorithm>  // std::copy_n, std::find_if
#include <map>
#include <span>
#include <utility>  // std::move
#include <vector>

#include "kvmeld/memory/cache.hpp"
#include "kvmeld/score/attention.hpp"
#include "llama_cpp/nodes.hpp"
#include "llama_cpp/setup.hpp"

namespace kvmeld::llama {

/// The keys and values that the engine keeps of one layer, as its graph names them. Strides are in
/// bytes.
struct engine_rows {
  ggml_tensor* keys = nullptr;    ///< `cache_k_lN` [cells, heads · dim]
  ggml_tensor* values = nullptr;  ///< `cache_v_lN`, likewise, or [heads · dim, cells]

  /// Of head `h`, a page for each cell. Without flash attention values lie transposed.
  static head_rows of(const ggml_tensor* t, index_t h, index_t dim, bool transposed) {
    if (t == nullptr) {
      return {};
    }
    const auto row = static_cast<std::ptrdiff_t>(t->nb[1]),
               element = static_cast<std::ptrdiff_t>(t->nb[0]),
               column = static_cast<std::ptrdiff_t>(t->ne[1]) * element,
               head = transposed ? dim * column
                                 : static_cast<std::ptrdiff_t>(ggml_row_size(t->type, dim)),
               cell = transposed ? element : row;
    return {static_cast<std::byte*>(t->data) + h * head, cell, transposed ? column : element, cell};
  }
};

/// One layer, besides its heads.
struct layer {
  attention_spec model;  ///< what the engine computes in it, as far as its graphs have said so far
  engine_rows engine = {};
  /// Which of its nodes the present micro-batch's graph had: that store its rows, the softmax or
  /// flash attention, that with the queries, that with the logits that were edited; and how many of
  /// its tokens the heads hold.
  struct {
    bool keys = false, values = false, scale = false, queries = false, edited = false;
    index_t taken = 0;
  } came = {};
  bool edited = false;  ///< do log-mass or holes have to go into the engine's logits?
  float factor = 1;     ///< of those logits, within the engine's softmax
};

/// What a head that keeps all was before its draft, and the draft's rows `[tokens, dim]`.
struct drafted_rows {
  head_mark before;
  std::vector<float> keys, values;
};

/// A `kv_cache` whose requests are the engine's sequences. Its layers are those that are
/// compressed; heads behind them are of the layers that keep all. Windowed layers are the engine's.
class layer_cache {
  static auto& at(auto& list, index_t i) { return list[static_cast<std::size_t>(i)]; }

 public:
  explicit layer_cache(const layers_setup& setup) : setup_(setup), records_(records_of(setup)) {
    index_t next = 0, whole = compressed_ = setup.count(part::compressed);
    for (index_t l = 0; l < std::ssize(setup.layers); ++l) {
      const part p = at(setup.layers, l);
      place_.push_back(p == part::windowed ? -1 : p == part::whole ? whole++ : next++);
      if (p != part::windowed) {
        held_.push_back(l);
      }
    }
    layers_.assign(held_.size(), {setup.spec});
    cells_.resize(own() ? 0 : as_size(setup.heads(), room()));
  }

  index_t layers() const { return compressed_; }
  index_t requests() const { return setup_.requests; }
  index_t kv_heads() const { return setup_.spec.kv_heads; }
  index_t heads() const { return compressed_ * requests() * kv_heads(); }

  /// Those of the model's layers that have heads here, in the model's order.
  std::span<const index_t> held() const { return held_; }
  bool holds(index_t l) const { return l >= 0 && l < std::ssize(place_) && at(place_, l) >= 0; }
  bool whole(index_t l) const { return at(place_, l) >= compressed_; }
  layer& of(index_t l) { return at(layers_, at(place_, l)); }
  head_range heads(index_t l, index_t request = 0) const {
    return {(at(place_, l) * requests() + request) * kv_heads(), kv_heads()};
  }
  index_t request_of(index_t h) const { return h / kv_heads() % requests(); }

  head_ref head(index_t h) { return head(h, own() ? nullptr : table(h)); }
  /// The same rows by another table of cells.
  head_ref head(index_t h, index_t* cells) {
    const layer& l = at(layers_, h / kv_heads() / requests());
    const auto engine = [&](ggml_tensor* t, bool transposed) {
      return engine_rows::of(t, h % kv_heads(), setup_.spec.key_dim, transposed);
    };
    const auto own = [&](std::byte* rows, storage type) {
      const std::size_t bytes = row_bytes(type, setup_.spec.key_dim);
      return head_rows{rows + as_size(h, room()) * bytes, static_cast<std::ptrdiff_t>(bytes),
                       static_cast<std::ptrdiff_t>(element_bytes(type))};
    };
    if (cells != nullptr) {
      return {records_.of(h),
              room(),
              l.model,
              h % kv_heads(),
              setup_.held,
              engine(l.engine.keys, false),
              engine(l.engine.values, true),
              {.pages = cells, .slots = 1}};
    }
    return {records_.of(h),
            room(),
            l.model,
            h % kv_heads(),
            setup_.held,
            own(records_.key_rows(), setup_.held.keys),
            own(records_.value_rows(), setup_.held.values),
            {},
            records_.beside(h)};
  }
  /// Repack: in which rows of the engine the slots of head `h` are.
  index_t* table(index_t h) { return cells_.data() + std::ptrdiff_t{h} * room(); }

  /// Takes in a token that the engine has in `cell`.
  void commit(index_t l, index_t cell) {
    expect_rows(l);
    for (index_t h = heads(l).first; h < heads(l).first + kv_heads(); ++h) {
      const head_ref to = head(h);
      if (to.length() < room()) {
        table(h)[to.length()] = cell;
      }
      to.push_metadata();
    }
  }

  /// The keys and values of cells, `[cells, heads, dim]`, as floats.
  void read(index_t l, std::span<const index_t> cells, std::vector<float>& keys,
            std::vector<float>& values) {
    expect_rows(l);
    const index_t width = kv_heads() * setup_.spec.key_dim;
    const auto copy = [&](const ggml_tensor* t, std::vector<float>& to) {
      const head_rows all = engine_rows::of(t, 0, width, false);
      to.resize(cells.size() * static_cast<std::size_t>(width));
      float* next = to.data();
      for (const index_t cell : cells) {
        to_floats(row<any_scalar>{all.slot(cell), all.element, setup_.storage}, width, next);
        next += width;
      }
    };
    copy(of(l).engine.keys, keys), copy(of(l).engine.values, values);
  }
  /// Own attention: appends such rows to heads `first` and on. With `out [tokens, heads · group,
  /// dim]`: each token attends to itself and all before.
  void append(index_t first, std::span<const float> keys, std::span<const float> values,
              std::span<const float> queries = {}, std::span<float> out = {}) {
    const index_t dim = setup_.spec.key_dim, all = static_cast<index_t>(keys.size()) / dim,
                  tokens = all / kv_heads();
    for (index_t k = 0; k < kv_heads(); ++k) {
      head(first + k).before_keys(tokens, [&](index_t t, float* x) {
        std::copy_n(keys.data() + std::ptrdiff_t{t * kv_heads() + k} * dim, dim, x);
      });
    }
    for (index_t i = 0; i < all; ++i) {
      const head_ref to = head(first + i % kv_heads());
      to.push_row(keys.data() + i * dim, values.data() + i * dim);
      if (!out.empty()) {
        kvmeld::attend(to, queries.data() + i * dim * to.group(),
                       out.data() + i * dim * to.group());
      }
    }
  }
  /// The same of a draft's tokens, which come one by one as those of steps do, until `accept`.
  void draft(index_t first, std::span<const float> keys, std::span<const float> values,
             std::span<const float> queries, std::span<float> out) {
    const std::size_t dim = static_cast<std::size_t>(setup_.spec.key_dim),
                      width = dim * static_cast<std::size_t>(kv_heads());
    for (index_t k = 0; k < kv_heads(); ++k) {
      drafts_[first + k] = {head(first + k).mark(), {}, {}};
    }
    for (std::size_t at = 0; at < keys.size(); at += width) {
      const auto token = [&](auto rows) { return rows.subspan(at, width); };
      const std::size_t group = queries.size() / keys.size();
      for (index_t k = 0; k < kv_heads(); ++k) {
        auto& [before, held_keys, held_values] = drafts_[first + k];
        const auto row = token(keys).subspan(static_cast<std::size_t>(k) * dim, dim);
        const auto value = token(values).subspan(static_cast<std::size_t>(k) * dim, dim);
        held_keys.insert(held_keys.end(), row.begin(), row.end());
        held_values.insert(held_values.end(), value.begin(), value.end());
      }
      append(first, token(keys), token(values), queries.subspan(at * group, width * group),
             out.empty() ? out : out.subspan(at * group, width * group));
    }
  }
  /// The first `kept` tokens of head `h`'s draft count, the others were never there.
  void accept(index_t h, index_t kept) {
    const auto [before, keys, values] = std::move(drafts_.at(h));
    drafts_.erase(h);
    const head_ref to = head(h);
    to.restore(before);
    for (std::ptrdiff_t at = 0; at < std::ptrdiff_t{kept} * setup_.spec.key_dim;
         at += setup_.spec.key_dim) {
      to.push(keys.data() + at, values.data() + at);
    }
  }
  /// Gives back what head `h` holds beyond `slots` slots, and those in use.
  void give_back(index_t h, index_t slots = 0) { records_.give_back(h, slots); }
  /// Bytes that are held of all heads, in whole pages of the system's: of the engine's none.
  std::size_t reserved_bytes() const { return records_.held(); }

  /// Repack: from now on `cells` alone are in use, one for each slot of the longest head or more.
  /// Rows in others move to those that their head has no row in.
  void move_to(std::span<const index_t> cells) {
    std::vector<char> stays, taken;
    std::vector<index_t> moved;
    for (const index_t cell : cells) {
      stays.resize(std::max(stays.size(), static_cast<std::size_t>(cell) + 1));
      at(stays, cell) = 1;
    }
    for (index_t h = 0; h < setup_.heads(); ++h) {
      const head_ref from = head(h);
      const auto in = std::span(table(h), static_cast<std::size_t>(from.length()));
      const auto lies_well = [&](index_t cell) {
        return cell < std::ssize(stays) && at(stays, cell) != 0;
      };
      taken.assign(stays.size(), 0);
      for (const index_t cell : in) {
        if (lies_well(cell)) {
          at(taken, cell) = 1;
        }
      }
      moved.assign(in.begin(), in.end());
      auto free = cells.begin();
      for (index_t& cell : moved) {
        if (!lies_well(cell)) {
          free = std::find_if(free, cells.end(), [&](index_t c) { return at(taken, c) == 0; });
          cell = *free++;
        }
      }
      kvmeld::detail::copy_slots(from, head(h, moved.data()));
      std::ranges::copy(moved, in.begin());
    }
  }

 private:
  bool own() const { return setup_.how == mode::own_attention; }
  index_t room() const { return setup_.capacity; }
  /// With own attention heads hold their rows too.
  static head_records records_of(const layers_setup& s) {
    if (s.how == mode::repack) {
      return {s.heads(), s.capacity};
    }
    const index_t dim = s.spec.key_dim;
    return {s.heads(),
            s.capacity,
            0,
            1,
            {row_bytes(s.held.keys, dim), row_bytes(s.held.values, dim)},
            s.held.newest,
            head_records::beside_of(s.held, s.spec)};
  }
  void expect_rows(index_t l) {
    expects(of(l).came.keys && of(l).came.values,
            "llama.cpp: expected the keys and values of every layer, got ", another_graph);
  }

  layers_setup setup_;
  index_t compressed_ = 0;
  std::map<index_t, drafted_rows> drafts_;  // of heads that keep all
  std::vector<index_t> place_;              // [layers of the model] in `layers_`; -1: windowed
  std::vector<index_t> held_;
  std::vector<layer> layers_;
  head_records records_;
  std::vector<index_t> cells_;  // [heads, capacity] in the engine
};

}  // namespace kvmeld::llama
