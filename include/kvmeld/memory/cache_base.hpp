// SPDX-License-Identifier: MIT
/// What all caches are: heads by layer and request, and for each what an engine has no place for.
#pragma once

#include <algorithm>  // std::equal
#include <limits>     // std::numeric_limits
#include <memory>     // std::shared_ptr
#include <span>
#include <vector>

#include "kvmeld/memory/attention_spec.hpp"
#include "kvmeld/memory/cache_records.hpp"
#include "kvmeld/memory/convert.hpp"
#include "kvmeld/memory/head_selection.hpp"
#include "kvmeld/memory/layout.hpp"
#include "kvmeld/memory/view.hpp"

namespace kvmeld::inline v0 {

/// The part of `cache`, `strided_cache` and `paged_cache` that is the same: a `kv_cache`.
///
/// Heads are flattened: head `(layer · requests + request) · kv_heads + k` is KV head `k`.
class cache_base {
 public:
  index_t layers() const { return extents_.layers; }
  index_t requests() const { return extents_.requests; }
  index_t kv_heads() const { return spec().kv_heads; }
  /// Slots per head.
  index_t capacity() const { return extents_.capacity; }
  /// What keys and values are held as.
  storage_pair type() const { return type_; }
  /// Are values the first numbers of the keys, in their memory, as of latent attention? Then values
  /// are not given: `append` and `step` take the keys' rows alone.
  bool one_memory() const { return one_memory_; }
  /// What the model computes in a layer; stays where it is when the cache moves.
  const attention_spec& spec(index_t layer = 0) const {
    return (*specs_)[specs_->size() == 1 ? 0 : as_size(layer)];
  }

  /// All of them: layers · requests · kv_heads.
  index_t heads() const { return records_.heads(); }
  /// The heads of one layer of one request. Refused: a layer or a request that is not there.
  head_selection heads(index_t layer, index_t request) const {
    return head_range{first_head(layer, request), kv_heads()};
  }
  /// ... of some requests, in their order. The list must live as long as the selection.
  head_selection heads(index_t layer, std::span<const index_t> requests) const {
    expects(requests.empty() || requests.data() != nullptr,
            "heads: expected a list of requests, got null");
    for (const index_t r : requests) {
      (void)first_head(layer, r);
    }
    return {first_head(layer, 0), kv_heads(), requests};
  }

  /// Head `h`, to be read and changed: not of a const cache. Refused: a head that is not there.
  head_ref head(index_t h) {
    const slot_metadata slots = records_.of(h);
    const index_t k = h % kv_heads(), sequence = h / kv_heads(), request = sequence % requests(),
                  layer = sequence / requests();
    return {slots,
            capacity(),
            spec(layer),
            k,
            type_,
            of_layer(keys_, layer, request, k),
            of_layer(values_, layer, request, k),
            table(h)};
  }
  head_ref head(index_t h) const = delete;  ///< who has a head may change it

  /// Appends tokens at their heads' next positions. `k [tokens, heads, key_dim]`,
  /// `v [tokens, heads, value_dim]`, none in one memory: of one layer of one request `[tokens,
  /// kv_heads, ...]`, of one token of several `[requests, kv_heads, ...]`. Refused, with nothing
  /// changed: another size, null, too few slots (`no_capacity`) or pages
  /// (`no_page`), heads that are not there or come twice, NaN or Inf where the model checks for it.
  void append(const head_selection& heads, const any_span& k, const any_span& v, index_t tokens) {
    expect_append(heads, k, v, tokens);
    append_rows(heads, k, v, tokens);
  }

  /// Takes in `tokens` rows of each head that follow its slots in use: the engine wrote them.
  /// Refused, with nothing changed: as in `append`.
  void commit(const head_selection& heads, index_t tokens) {
    expect_room("commit", heads, tokens);
    push_metadata(heads, tokens);
  }

  /// Bytes of the slots in use: keys, values, log-mass, positions.
  std::size_t bytes() const {
    const std::size_t slot = row_bytes(type_.keys, spec().key_dim) +
                             row_bytes(type_.values, own_value_dim()) + sizeof(float) +
                             sizeof(index_t);
    std::size_t sum = 0;
    for (index_t h = 0; h < heads(); ++h) {
      sum += as_size(length(h)) * slot;
    }
    return sum;
  }
  /// Bytes that the cache holds at present, in use or not: of slots that were in use once and were
  /// not given back, in whole pages of the system's. Rows of an engine's are not counted.
  std::size_t reserved_bytes() const { return records_.held(); }
  /// Gives back what head `h` holds beyond `slots` slots, and those in use; a compressor does so at
  /// the end of a prompt. Rows of an engine's stay its own. Refused: a head that is not there.
  void give_back(index_t h, index_t slots = 0) {
    (void)head(h);
    records_.give_back(h, slots);
  }

  /// Of a `cache` alone. Refused of others (`unsupported`): their rows are an engine's.
  /// @{
  void shrink(index_t /*capacity*/) const {
    expects(errc::unsupported, false,
            "shrink: expected a kvmeld::cache, which owns its rows, got a strided_cache or "
            "paged_cache: the engine frees what lies beyond length(), or free_pages");
  }
  void shrink(auto& /*meld*/, index_t capacity) const { shrink(capacity); }
  /// @}

 protected:
  /// What `append` refuses.
  void expect_append(const head_selection& heads, const any_span& k, const any_span& v,
                     index_t tokens) {
    expects(tokens >= 0, "append: expected at least 0 tokens, got ", tokens);
    detail::expect_size("append", "keys", k, {tokens, heads.count(), spec().key_dim});
    detail::expect_no_values("append", one_memory(), spec().value_dim, v);
    detail::expect_size("append", "values", v, {tokens, heads.count(), own_value_dim()});
    expect_room("append", heads, tokens);
    if (spec().check_finite) {
      expect_finite("append: expected finite keys", k);
      expect_finite("append: expected finite values", v);
    }
  }
  void append_rows(const head_selection& heads, const any_span& k, const any_span& v,
                   index_t tokens) {
    push_metadata(heads, tokens);
    const index_t count = heads.count();
    for (index_t i = 0; i < count; ++i) {
      const head_ref to = head(heads[i]);
      const index_t first = to.length() - tokens;
      const auto each = [&](const any_span& from, index_t dim, auto store) {
        from.visit([&](auto numbers) {
          for (index_t t = 0; t < tokens; ++t) {
            store(numbers.data() + (std::ptrdiff_t{t} * count + i) * dim, first + t);
          }
        });
      };
      each(k, to.dim(), [&](auto x, index_t s) { detail::store_row(x, to.key(s), to.dim()); });
      each(v, own_value_dim(), [&](auto x, index_t s) { to.store_value(x, s); });
    }
  }

  using spec_list = std::shared_ptr<const std::vector<attention_spec>>;

  cache_base(spec_list specs, const cache_extents& extents, storage_pair type)
      : specs_(std::move(specs)),
        extents_(extents),
        type_(type),
        records_(extents.layers * extents.requests * kv_heads(), extents.capacity, extents.requests,
                 kv_heads()) {}

  /// Specs with their defaults, one for all layers or one for each. Refused: what
  /// `attention_spec::checked` refuses, another number of specs, layers of different shapes.
  static spec_list checked(std::span<const attention_spec> specs, const cache_extents& extents) {
    expects(extents.layers > 0 && extents.requests > 0,
            "cache: expected at least 1 layer and 1 request, got ", extents.layers, " and ",
            extents.requests);
    expects(extents.capacity > 0, "cache: expected a capacity of at least 1 slot, got ",
            extents.capacity);
    expects(specs.size() == 1 || specs.size() == as_size(extents.layers),
            "cache: expected 1 attention_spec, or one for each of ", extents.layers,
            " layers, got ", specs.size());
    std::vector<attention_spec> all;
    for (const attention_spec& s : specs) {
      all.push_back(s.checked());
      const attention_spec &a = all.front(), &b = all.back();
      const auto same = [](const char* what, auto x, auto y) {
        expects(errc::unsupported, x == y, "cache: expected the same ", what,
                " in every layer, got ", x, " and ", y);
      };
      same("kv_heads", a.kv_heads, b.kv_heads), same("group", a.group, b.group);
      same("key_dim", a.key_dim, b.key_dim), same("value_dim", a.value_dim, b.value_dim);
      same("check_finite", int{a.check_finite}, int{b.check_finite});
    }
    const auto heads = std::int64_t{extents.layers} * extents.requests * all[0].kv_heads;
    expects(heads <= std::numeric_limits<index_t>::max(),
            "cache: expected fewer than 2^31 heads, got ", heads);
    return std::make_shared<const std::vector<attention_spec>>(std::move(all));
  }

  /// The shape of the rows, where they lie.
  void set_rows(const placed_rows& keys, const placed_rows& values) {
    keys_ = {keys}, values_ = {values};
  }
  /// The same of an engine's rows, in pages where there are tables. Refused: keys (or values) of
  /// two storages (`unsupported`), neither one memory nor one for each layer, layers apart whose
  /// rows share a byte, what `place_rows` refuses.
  void place(const char* call, const layer_rows& keys, const layer_rows& values,
             placed_tables tables = {}) {
    const index_t slots = tables.first.slots;
    const bool own_tables = slots > 0 && kv_heads() > 1 && tables.heads_each == 1;
    index_t limit = std::numeric_limits<index_t>::max();
    const auto placed = [&](const char* what, std::span<const rows> of, index_t dim) {
      expects(of.size() == 1 || of.size() == as_size(layers()), call, ": expected ", what,
              " of all layers in one, or of each of ", layers(), " layers, got ", of.size());
      cache_extents each = extents_;
      // Layers with tables of their own may take their pages from one pool.
      const auto* how = std::get_if<strides>(&of.front().how());
      const bool one_pool = tables.count > requests() && how != nullptr && how->layer == 0;
      each.layers = of.size() == 1 && !one_pool ? layers() : 1;
      std::vector<placed_rows> list;
      for (const rows& r : of) {
        expects(errc::unsupported, r.type() == of.front().type(), call, ": expected ", what,
                " of one storage in every layer, got two");
        index_t pages = 0;
        list.push_back(
            detail::place_rows(call, what, r, dim, spec(), each, slots, pages, own_tables));
        limit = std::min(limit, pages);
      }
      for (std::size_t b = 1; b < list.size(); ++b) {
        for (std::size_t a = 0; a < b; ++a) {
          const detail::axis outer = slots > 0 ? detail::axis{list[a].first.page, limit}
                                               : detail::axis{list[a].request, requests()};
          expects(!detail::share_bytes(of[a], of[b], list[a], outer, kv_heads(),
                                       slots > 0 ? slots : capacity(),
                                       row_size(of.front().type(), dim)),
                  call, ": expected ", what, " of each layer in memory of its own, got layers ", a,
                  " and ", b, " that share bytes");
        }
      }
      return list;
    };
    keys_ = placed("keys", keys.list(), spec().key_dim);
    const bool same =
        std::equal(keys.list().begin(), keys.list().end(), values.list().begin(),
                   values.list().end(), [](const rows& a, const rows& b) {
                     return a.data() == b.data() && a.type() == b.type() && a.how() == b.how();
                   });
    values_ = same ? keys_ : placed("values", values.list(), spec().value_dim);
    tables.first.limit = limit;
    tables_ = tables;
    one_memory_ = head(0).one_memory();
    for (index_t h = 1; h < heads(); ++h) {
      expects(head(h).one_memory() == one_memory_, call,
              ": expected values in the keys' memory in all heads or in none, got heads 0 and ", h);
    }
    if (one_memory_ || same) {
      detail::expect_latent(call, *specs_, type_.keys);
    }
  }
  /// Do pages of one number lie apart in rows of two layers? And in those of two heads?
  bool layers_apart() const {
    return keys_.size() > 1 || (keys_.front().layer != 0 && values_.front().layer != 0);
  }
  bool heads_apart() const { return keys_.front().head != 0 && values_.front().head != 0; }
  const placed_tables& tables() const { return tables_; }
  index_t length(index_t h) const { return records_.length(h); }
  const head_records& records() const { return records_; }
  void lower_capacity(index_t capacity) { extents_.capacity = capacity; }

  /// The pages of head `h`; none where rows are strided.
  page_table table(index_t h) const { return tables_.of(h); }

 private:
  /// Numbers of a value that are not its key's.
  index_t own_value_dim() const { return one_memory_ ? 0 : spec().value_dim; }

  static head_rows of_layer(const std::vector<placed_rows>& rows, index_t layer, index_t request,
                            index_t k) {
    return rows.size() == 1 ? rows[0].of(layer, request, k)
                            : rows[as_size(layer)].of(0, request, k);
  }
  index_t first_head(index_t layer, index_t request) const {
    expects(layer >= 0 && layer < layers(), "heads: expected a layer of 0 to ", layers() - 1,
            ", got ", layer);
    expects(request >= 0 && request < requests(), "heads: expected a request of 0 to ",
            requests() - 1, ", got ", request);
    return (layer * requests() + request) * kv_heads();
  }

  void push_metadata(const head_selection& heads, index_t tokens) {
    for (index_t i = 0; i < heads.count(); ++i) {
      const head_ref to = head(heads[i]);
      for (index_t t = 0; t < tokens; ++t) {
        to.push_metadata();
      }
    }
  }

  void expect_room(const char* what, const head_selection& heads, index_t tokens) {
    heads.check(what, this->heads());
    expects(tokens >= 0, what, ": expected at least 0 tokens, got ", tokens);
    for (index_t i = 0; i < heads.count(); ++i) {
      const head_ref to = head(heads[i]);
      to.expect_no_draft(what);
      expects(errc::no_capacity, tokens <= to.capacity() - to.length(), what, ": expected at most ",
              to.capacity() - to.length(), " tokens in head ", heads[i] % kv_heads(), " of layer ",
              heads[i] / kv_heads() / requests(), " (", to.length(), " of ", to.capacity(),
              " slots in use), got ", tokens);
      expects(errc::no_capacity, tokens <= std::numeric_limits<index_t>::max() - to.next_position(),
              what, ": expected positions below 2^31, got ", tokens, " tokens after ",
              to.next_position());
      to.expect_pages(to.length(), to.length() + tokens);
    }
  }

  spec_list specs_;
  cache_extents extents_;
  storage_pair type_;
  head_records records_;
  std::vector<placed_rows> keys_, values_;  // of all layers, or one of each
  placed_tables tables_;
  bool one_memory_ = false;
};

}  // namespace kvmeld::inline v0
