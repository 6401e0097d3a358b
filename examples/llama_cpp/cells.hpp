/// One layer's KV heads, over the engine's cells or over memory of their own.
#pragma once

#include <algorithm>  // std::copy
#include <vector>

#include "kvfold/compress.hpp"
#include "kvfold/memory/cache.hpp"
#include "llama_cpp/nodes.hpp"

namespace kvfold::llama {

/// A `kv_head` whose slot `s` lies in row `cells[s]` of an engine's keys and values, or in row `s`
/// where there are no `cells`.
template <storage_scalar Scalar>
class cell_head : public head_base {
 public:
  using scalar = Scalar;

  cell_head(const layout<Scalar>& keys, const layout<Scalar>& values, const index_t* cells,
            const slot_metadata& slots, const head_shape& shape)
      : head_base(slots, shape), keys_(keys), values_(values), cells_(cells) {}

  index_t cell(index_t s) const { return cells_ == nullptr ? s : cells_[s]; }
  row<Scalar> key(index_t s) const { return key_in(cell(s)); }
  row<Scalar> value(index_t s) const { return value_in(cell(s)); }
  row<Scalar> key_in(index_t cell) const { return {keys_.slot(cell), keys_.element}; }
  row<Scalar> value_in(index_t cell) const { return {values_.slot(cell), values_.element}; }

 private:
  layout<Scalar> keys_, values_;
  const index_t* cells_;
};

/// The keys and values that the engine keeps of one layer, as its graph names them.
struct engine_rows {
  ggml_tensor* keys = nullptr;    ///< `cache_k_lN` [cells, heads · dim]
  ggml_tensor* values = nullptr;  ///< `cache_v_lN`, likewise, or [heads · dim, cells]

  template <storage_scalar Scalar>
  layout<Scalar> keys_of(index_t h, index_t dim) const {
    return rows_of<Scalar>(keys, h, dim);
  }
  /// Without flash attention values lie transposed.
  template <storage_scalar Scalar>
  layout<Scalar> values_of(index_t h, index_t dim, bool transposed) const {
    if (!transposed) {
      return rows_of<Scalar>(values, h, dim);
    }
    const auto cells = static_cast<index_t>(values->ne[1]);
    return layout<Scalar>::head_dim_token(static_cast<Scalar*>(values->data), cells, dim).of(h);
  }

 private:
  /// [cells, heads · dim]; a cell may be longer than that.
  template <storage_scalar Scalar>
  static layout<Scalar> rows_of(const ggml_tensor* rows, index_t h, index_t dim) {
    const auto cell = static_cast<std::ptrdiff_t>(rows->nb[1] / sizeof(Scalar));
    return layout<Scalar>{static_cast<Scalar*>(rows->data), dim, cell}.of(h);
  }
};

/// Which of a layer's nodes the present micro-batch's graph had.
struct arrivals {
  bool keys = false, values = false;  ///< that store its rows
  bool scale = false;                 ///< of the softmax, or of flash attention
  bool queries = false;               ///< with its queries
};

/// All KV heads of one layer: a `kv_cache`, each head with its own length, budget and state.
template <storage_scalar Scalar>
class layer {
 public:
  struct slots {
    cache_metadata records;
    head_state state;
    budget limit;
    std::vector<index_t> cells;  ///< [length] in the engine's memory
    std::vector<Scalar> rows;    ///< [2, capacity, dim] of their own; empty: the engine's
  };

  /// `own`: rows of its own, else the engine's.
  template <policy P>
  layer(const P& p, const cache_shape& shape, std::span<const budget> limits,
        std::span<const index_t> capacities, bool own)
      : shape_(shape), own_(own) {
    for (std::size_t h = 0; h < limits.size(); ++h) {
      cache_shape one = shape;
      one.heads = 1;
      one.capacity = capacities[h];
      const std::size_t room = static_cast<std::size_t>(one.capacity);
      heads_.push_back(
          {cache_metadata(one),
           head_state(traits::columns(p), traits::memory(p, one.dim, one.group, one.capacity),
                      one.capacity, p.name()),
           limits[h],
           {},
           std::vector<Scalar>(own ? 2 * room * static_cast<std::size_t>(one.dim) : 0)});
      heads_.back().cells.reserve(own ? 0 : room);
    }
  }

  index_t heads() const { return static_cast<index_t>(heads_.size()); }
  slots& at(index_t h) { return heads_[static_cast<std::size_t>(h)]; }
  cell_head<Scalar> head(index_t h) {
    slots& s = at(h);
    auto extent = s.records.extent();
    extent.scale = scale;
    const auto records = s.records.of(0);
    if (own_) {
      const auto rows = [&](std::size_t first) {
        return layout<Scalar>::head_token_dim(s.rows.data() + first, extent.capacity, shape_.dim);
      };
      return {rows(0), rows(s.rows.size() / 2), nullptr, records, extent};
    }
    return {engine.keys_of<Scalar>(h, shape_.dim), engine.values_of<Scalar>(h, shape_.dim, true),
            s.cells.data(), records, extent};
  }
  const cache_shape& shape() const { return shape_; }

  /// A token that the engine has in `cell`.
  void adopt(index_t h, index_t cell) {
    expects(
        came.keys && came.values,
        "llama.cpp: keys and values of every layer expected, some did not come: ", another_graph);
    if (!own_) {
      at(h).cells.push_back(cell);
    }
    const auto to = head(h);
    const index_t s = to.push_metadata();
    if (own_) {
      const auto keys = engine.keys_of<Scalar>(h, shape_.dim),
                 values = engine.values_of<Scalar>(h, shape_.dim, false);
      std::copy_n(keys.slot(cell), shape_.dim, to.key(s).data);
      std::copy_n(values.slot(cell), shape_.dim, to.value(s).data);
    }
    at(h).state.extend(to.length());
  }

  /// Throws unless all nodes of layer `l` came that a micro-batch of `tokens` needs: the attention
  /// that fills the heads, the one with the queries.
  void expect_complete(index_t l, index_t tokens, bool attention, bool queried) const {
    expects(came.scale && (!attention || taken == tokens) && (!queried || came.queries),
            "llama.cpp: the nodes of layer ", l,
            "'s attention expected, not all came: ", another_graph);
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
  float scale = 0;             ///< of the engine's logits
  bool whole = false;          ///< left alone: keeps all, measures nothing
  bool edited = false;         ///< do log-mass or holes have to go into the engine's logits?
  index_t taken = 0;           ///< tokens of the present micro-batch that the heads hold
  std::vector<float> queries;  ///< of the present micro-batch [tokens, heads · group, dim]

 private:
  cache_shape shape_;
  bool own_;
  std::vector<slots> heads_;
};

}  // namespace kvfold::llama
