// SPDX-License-Identifier: MIT
/// One layer's KV heads, over the engine's cells or over memory of their own.
#pragma once

#include <algorithm>  // std::copy
#include <memory>     // std::shared_ptr
#include <vector>

#include "kvmeld/compress.hpp"
#include "kvmeld/memory/cache.hpp"
#include "llama_cpp/nodes.hpp"
#include "llama_cpp/setup.hpp"

namespace kvmeld::llama {

/// A `kv_head` whose slot `s` lies in row `cells[s]` of an engine's keys and values, as in pages of
/// one slot, or in row `s` where there are no `cells`.
class cell_head : public head_ref {
 public:
  cell_head(const slot_metadata& slots, index_t capacity, const attention_spec& model, storage type,
            const head_rows& keys, const head_rows& values, index_t* cells)
      : head_ref(slots, capacity, model, type, in_pages(keys), in_pages(values),
                 {.pages = cells, .slots = 1}),
        all_(slots, capacity, model, type, keys, values),
        cells_(cells) {}

  index_t cell(index_t s) const { return cells_ == nullptr ? s : cells_[s]; }
  row<any_scalar> key_in(index_t cell) const { return all_.key(cell); }
  row<any_scalar> value_in(index_t cell) const { return all_.value(cell); }

 private:
  static head_rows in_pages(head_rows rows) {
    rows.page = rows.row;
    return rows;
  }

  head_ref all_;  // slot = cell
  const index_t* cells_;
};

/// The keys and values that the engine keeps of one layer, as its graph names them. Strides are in
/// bytes.
struct engine_rows {
  ggml_tensor* keys = nullptr;    ///< `cache_k_lN` [cells, heads · dim]
  ggml_tensor* values = nullptr;  ///< `cache_v_lN`, likewise, or [heads · dim, cells]

  head_rows keys_of(index_t h, index_t dim) const { return rows_of(keys, h, dim); }
  /// Without flash attention values lie transposed.
  head_rows values_of(index_t h, index_t dim, bool transposed) const {
    if (!transposed) {
      return rows_of(values, h, dim);
    }
    const auto element = static_cast<std::ptrdiff_t>(values->nb[0]),
               row = static_cast<std::ptrdiff_t>(values->ne[1]) * element;
    return {data_of(values) + h * dim * row, element, row};
  }

 private:
  static std::byte* data_of(const ggml_tensor* t) { return static_cast<std::byte*>(t->data); }
  /// [cells, heads · dim]; a cell may be longer than that.
  static head_rows rows_of(const ggml_tensor* rows, index_t h, index_t dim) {
    const auto of_head = static_cast<std::ptrdiff_t>(ggml_row_size(rows->type, dim));
    return {data_of(rows) + h * of_head, static_cast<std::ptrdiff_t>(rows->nb[1]),
            static_cast<std::ptrdiff_t>(rows->nb[0])};
  }
};

/// Which of a layer's nodes the present micro-batch's graph had.
struct arrivals {
  bool keys = false, values = false;  ///< that store its rows
  bool scale = false;                 ///< of the softmax, or of flash attention
  bool queries = false;               ///< with its queries
};

/// All KV heads of one layer: a `kv_cache`, each head with its own length, budget and state.
class layer {
 public:
  struct slots {
    head_records records;
    head_state state;
    budget limit;
    std::vector<index_t> cells;   ///< [length] in the engine's memory
    std::vector<std::byte> rows;  ///< [2, capacity, dim] of their own; empty: the engine's
  };

  /// `own`: rows of its own, in the engine's `storage`, else the engine's.
  template <policy P>
  layer(const P& p, const layer_shape& shape, storage type, std::span<const budget> limits,
        std::span<const index_t> capacities, bool own)
      : model_(std::make_shared<attention_spec>(
            attention_spec{.kv_heads = shape.heads, .group = shape.group, .key_dim = shape.dim}
                .checked())),
        shape_(shape),
        storage_(type),
        own_(own) {
    for (std::size_t h = 0; h < limits.size(); ++h) {
      const index_t capacity = capacities[h];
      const auto room = static_cast<std::size_t>(capacity);
      heads_.push_back(
          {head_records(1, capacity),
           head_state(traits::columns(p), traits::memory(p, shape.dim, shape.group, capacity),
                      capacity, p.name(),
                      traits::memory_follows_capacity(p, shape.dim, shape.group, capacity)),
           limits[h],
           {},
           std::vector<std::byte>(own ? 2 * room * row_bytes(type, shape.dim) : 0)});
      heads_.back().cells.reserve(own ? 0 : room);
    }
  }

  index_t heads() const { return static_cast<index_t>(heads_.size()); }
  slots& at(index_t h) { return heads_[static_cast<std::size_t>(h)]; }
  cell_head head(index_t h) {
    slots& s = at(h);
    if (own_) {
      const auto row = static_cast<std::ptrdiff_t>(row_bytes(storage_, shape_.dim));
      const auto element = static_cast<std::ptrdiff_t>(element_bytes(storage_));
      const auto rows = [&](std::size_t first) {
        return head_rows{s.rows.data() + first, row, element};
      };
      return {s.records.of(0), s.records.capacity(),    *model_, storage_,
              rows(0),         rows(s.rows.size() / 2), nullptr};
    }
    return {s.records.of(0), s.records.capacity(),          *model_,
            storage_,        engine.keys_of(h, shape_.dim), engine.values_of(h, shape_.dim, true),
            s.cells.data()};
  }
  const layer_shape& shape() const { return shape_; }
  /// What the engine computes in this layer, as far as its graphs have said so far.
  attention_spec& model() { return *model_; }

  /// A token that the engine has in `cell`.
  void commit(index_t h, index_t cell) {
    expects(came.keys && came.values,
            "llama.cpp: expected the keys and values of every layer, got ", another_graph);
    if (!own_) {
      at(h).cells.push_back(cell);
    }
    const auto to = head(h);
    const index_t s = to.push_metadata();
    if (own_) {
      const auto copy = [&](row<any_scalar> x, const head_rows& theirs) {
        kvmeld::detail::copy_row(x, {theirs.slot(cell), theirs.element, storage_}, shape_.dim);
      };
      copy(to.key(s), engine.keys_of(h, shape_.dim));
      copy(to.value(s), engine.values_of(h, shape_.dim, false));
    }
    at(h).state.extend(to.length());
  }

  /// Throws unless all nodes of layer `l` came that a micro-batch of `tokens` needs: the attention
  /// that fills the heads, the one with the queries.
  void expect_complete(index_t l, index_t tokens, bool attention, bool queried) const {
    expects(came.scale && (!attention || taken == tokens) && (!queried || came.queries),
            "llama.cpp: expected all nodes of layer ", l, "'s attention, got ", another_graph);
  }

  /// Does a slot have log-mass, or a head fewer slots than `longest`?
  bool uneven(index_t longest) {
    for (index_t h = 0; h < heads(); ++h) {
      const auto one = head(h);
      bool found = one.length() < longest;
      for (index_t s = 0; s < one.length() && !found; ++s) {
        found = one.log_mass(s) != 0;
      }
      if (found) {
        return true;
      }
    }
    return false;
  }

  engine_rows engine;
  arrivals came;
  bool whole = false;          ///< left alone: keeps all, measures nothing
  bool edited = false;         ///< do log-mass or holes have to go into the engine's logits?
  index_t taken = 0;           ///< tokens of the present micro-batch that the heads hold
  std::vector<float> queries;  ///< of the present micro-batch [tokens, heads · group, dim]

 private:
  std::shared_ptr<attention_spec> model_;  // heads point to it, wherever the layer is moved to
  layer_shape shape_;
  storage storage_;
  bool own_;
  std::vector<slots> heads_;
};

}  // namespace kvmeld::llama
