/// One layer's KV heads, over the engine's cells or over memory of their own.
#pragma once

#include <algorithm>  // std::copy
#include <memory>     // std::shared_ptr
#include <vector>

#include "kvmeld/compress.hpp"
#include "kvmeld/memory/cache.hpp"
#include "llama_cpp/nodes.hpp"

namespace kvmeld::llama {

/// A `kv_head` whose slot `s` lies in row `cells[s]` of an engine's keys and values, as in pages of
/// one slot, or in row `s` where there are no `cells`.
class cell_head : public head_ref {
 public:
  cell_head(const head_base& base, scalar_type storage, const layout& keys, const layout& values,
            index_t* cells)
      : head_ref(base, storage, in_pages(keys), in_pages(values), {.pages = cells, .slots = 1}),
        all_(base, storage, keys, values),
        cells_(cells) {}

  index_t cell(index_t s) const { return cells_ == nullptr ? s : cells_[s]; }
  row<any_scalar> key_in(index_t cell) const { return all_.key(cell); }
  row<any_scalar> value_in(index_t cell) const { return all_.value(cell); }

  using own_type = cell_head;
  const head_ref& ref() const { return *this; }

 private:
  static layout in_pages(layout rows) {
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

  head_ref::layout keys_of(index_t h, index_t dim) const { return rows_of(keys, h, dim); }
  /// Without flash attention values lie transposed.
  head_ref::layout values_of(index_t h, index_t dim, bool transposed) const {
    if (!transposed) {
      return rows_of(values, h, dim);
    }
    const auto element = static_cast<std::ptrdiff_t>(values->nb[0]),
               row = static_cast<std::ptrdiff_t>(values->ne[1]) * element;
    return {data_of(values) + h * dim * row, 0, element, row};
  }

 private:
  static std::byte* data_of(const ggml_tensor* t) { return static_cast<std::byte*>(t->data); }
  /// [cells, heads · dim]; a cell may be longer than that.
  static head_ref::layout rows_of(const ggml_tensor* rows, index_t h, index_t dim) {
    const auto of_head = static_cast<std::ptrdiff_t>(ggml_row_size(rows->type, dim));
    return {data_of(rows) + h * of_head, 0, static_cast<std::ptrdiff_t>(rows->nb[1]),
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
    cache_metadata records;
    head_state state;
    budget limit;
    std::vector<index_t> cells;   ///< [length] in the engine's memory
    std::vector<std::byte> rows;  ///< [2, capacity, dim] of their own; empty: the engine's
  };

  /// `own`: rows of its own, in the engine's `storage`, else the engine's.
  template <policy P>
  layer(const P& p, const cache_shape& shape, scalar_type storage, std::span<const budget> limits,
        std::span<const index_t> capacities, bool own)
      : model_(std::make_shared<attention_spec>(
            attention_spec{.kv_heads = shape.heads, .group = shape.group, .key_dim = shape.dim}
                .checked())),
        shape_(shape),
        storage_(storage),
        own_(own) {
    for (std::size_t h = 0; h < limits.size(); ++h) {
      cache_shape one = shape;
      one.heads = 1;
      one.capacity = capacities[h];
      const std::size_t room = static_cast<std::size_t>(one.capacity);
      heads_.push_back(
          {cache_metadata(one),
           head_state(traits::columns(p), traits::memory(p, one.dim, one.group, one.capacity),
                      one.capacity, p.name(),
                      traits::memory_follows_capacity(p, one.dim, one.group, one.capacity)),
           limits[h],
           {},
           std::vector<std::byte>(own ? 2 * room * row_bytes(storage, one.dim) : 0)});
      heads_.back().cells.reserve(own ? 0 : room);
    }
  }

  index_t heads() const { return static_cast<index_t>(heads_.size()); }
  slots& at(index_t h) { return heads_[static_cast<std::size_t>(h)]; }
  cell_head head(index_t h) {
    slots& s = at(h);
    const head_base base(s.records.of(0), s.records.shape().capacity, *model_);
    if (own_) {
      const auto row = static_cast<std::ptrdiff_t>(row_bytes(storage_, shape_.dim));
      const std::ptrdiff_t element =
          row / (storage_ == scalar_type::q8_0 ? row_size<q8_0>(shape_.dim) : shape_.dim);
      const auto rows = [&](std::size_t first) {
        return head_ref::layout{s.rows.data() + first, 0, row, element};
      };
      return {base, storage_, rows(0), rows(s.rows.size() / 2), nullptr};
    }
    return {base, storage_, engine.keys_of(h, shape_.dim), engine.values_of(h, shape_.dim, true),
            s.cells.data()};
  }
  const cache_shape& shape() const { return shape_; }
  /// What the engine computes in this layer, as far as its graphs have said so far.
  attention_spec& model() { return *model_; }

  /// A token that the engine has in `cell`.
  void adopt(index_t h, index_t cell) {
    expects(came.keys && came.values,
            "llama.cpp: expected the keys and values of every layer, got ", another_graph);
    if (!own_) {
      at(h).cells.push_back(cell);
    }
    const auto to = head(h);
    const index_t s = to.push_metadata();
    if (own_) {
      const head_ref theirs(to, storage_, engine.keys_of(h, shape_.dim),
                            engine.values_of(h, shape_.dim, false));
      kvmeld::detail::copy_row(to.key(s), theirs.key(cell), shape_.dim);
      kvmeld::detail::copy_row(to.value(s), theirs.value(cell), shape_.dim);
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
  cache_shape shape_;
  scalar_type storage_;
  bool own_;
  std::vector<slots> heads_;
};

}  // namespace kvmeld::llama
