// SPDX-License-Identifier: MIT
/// Caches: one that owns its memory, one over an engine's rows, one over an engine's pages; and for
/// each head what an engine has no place for.
#pragma once

#include <algorithm>  // std::min, std::max, std::equal
#include <array>
#include <atomic>
#include <limits>  // std::numeric_limits
#include <memory>  // std::unique_ptr, std::shared_ptr
#include <mutex>
#include <numeric>  // std::accumulate
#include <span>
#include <vector>

#include "kvmeld/memory/attention_spec.hpp"
#include "kvmeld/memory/convert.hpp"
#include "kvmeld/memory/layout.hpp"
#include "kvmeld/memory/reserved.hpp"
#include "kvmeld/memory/view.hpp"

namespace kvmeld::inline v0 {

/// What a cache holds of heads: log-mass, position, lengths, and the rows of a cache that owns
/// them. With `requests`, of layers of `kv_heads` heads each, also which have a draft open.
class head_records {
 public:
  /// `rows`: bytes of a key and of a value; 0: they are an engine's. Of each head beside its slots:
  /// `newest` rows in half, and `beside` bytes of their keys, their values, the mean of its keys.
  head_records(index_t heads, index_t capacity, index_t requests = 0, index_t kv_heads = 1,
               std::array<std::size_t, 2> rows = {}, index_t newest = 0,
               std::array<std::size_t, 3> beside = {})
      : heads_(heads),
        capacity_(capacity),
        kv_heads_(kv_heads),
        newest_(newest),
        slot_bytes_{sizeof(float), sizeof(index_t), rows[0], rows[1]},
        beside_bytes_(beside),
        length_(as_size(heads)),
        next_position_(as_size(heads)),
        kept_(as_size(heads)),
        rounded_(newest > 0 ? as_size(heads) : 0),
        drafts_(as_size(requests)) {
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      memory_[i] = detail::reserved(as_size(heads, capacity) * slot_bytes_[i]);
    }
    for (std::size_t i = 0; i < beside_.size(); ++i) {
      beside_[i] = detail::reserved(as_size(heads) * beside[i]);
    }
  }
  /// Bytes of a head beside its slots, in the order in which the constructor takes them.
  static std::array<std::size_t, 3> beside_of(const storage_pair& type,
                                              const attention_spec& spec) {
    const std::size_t key = row_bytes(storage::f16, spec.key_dim),
                      value = row_bytes(storage::f16, spec.value_dim),
                      newest = as_size(rows_in_half(type.newest));
    return {in_blocks(type.keys) ? newest * key : 0, in_blocks(type.values) ? newest * value : 0,
            is_centred(type.keys) ? key : 0};
  }
  /// A copy has the slots in use alone, no drafts, and nothing that a compressor knows of.
  head_records(const head_records& from)
      : head_records(from.heads_, from.capacity_, static_cast<index_t>(from.drafts_.size()),
                     from.kv_heads_, {from.slot_bytes_[keys], from.slot_bytes_[values]},
                     from.newest_, from.beside_bytes_) {
    length_ = from.length_, next_position_ = from.next_position_, rounded_ = from.rounded_;
    for (index_t h = 0; h < heads_; ++h) {
      for (std::size_t i = 0; i < beside_.size() && length(h) > 0; ++i) {
        const std::size_t bytes = beside_bytes_[i], first = as_size(h) * bytes;
        std::copy_n(from.beside_[i].data() + first, bytes, beside_[i].data() + first);
      }
      for (std::size_t i = 0; i < memory_.size(); ++i) {
        const std::size_t first = as_size(h, capacity_) * slot_bytes_[i];
        std::copy_n(from.memory_[i].data() + first, as_size(length(h)) * slot_bytes_[i],
                    memory_[i].data() + first);
      }
    }
  }
  head_records(head_records&&) noexcept = default;
  head_records& operator=(head_records&&) noexcept = default;
  ~head_records() = default;

  index_t heads() const { return heads_; }        ///< of all layers and requests
  index_t capacity() const { return capacity_; }  ///< slots per head
  /// Where rows lie, `[heads, capacity]`.
  std::byte* key_rows() const { return memory_[keys].data(); }
  std::byte* value_rows() const { return memory_[values].data(); }  ///< those of values
  /// Slots in use of a head that is there.
  index_t length(index_t h) const { return length_[as_size(h)]; }
  /// Refused: a head that is not there.
  slot_metadata of(index_t h) {
    expects(h >= 0 && h < heads_, "head: expected 0 to ", heads_ - 1, ", got ", h);
    const auto i = as_size(h), first = i * as_size(capacity_);
    std::atomic<index_t>* const drafts =
        drafts_.empty() ? nullptr : &drafts_[as_size(h / kv_heads_) % drafts_.size()];
    return {reinterpret_cast<float*>(memory_[log_mass].data()) + first,
            reinterpret_cast<index_t*>(memory_[position].data()) + first,
            &length_[i],
            &next_position_[i],
            &kept_[i],
            drafts};
  }

  /// Of a head that is there.
  rows_beside beside(index_t h) {
    const auto at = [&](std::size_t i) {
      return beside_bytes_[i] == 0 ? nullptr : beside_[i].data() + as_size(h) * beside_bytes_[i];
    };
    rows_beside of;
    if (newest_ > 0) {
      of.newest = {at(newest_keys), at(newest_values), newest_, &rounded_[as_size(h)]};
    }
    of.key_mean = reinterpret_cast<Eigen::half*>(at(key_mean));
    return of;
  }

  /// Gives back what head `h` holds beyond `slots` slots, and those in use.
  void give_back(index_t h, index_t slots) {
    const auto used = std::min(capacity_, std::max(slots, length(h)));
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      memory_[i].release((as_size(h, capacity_) + as_size(used)) * slot_bytes_[i],
                         as_size(h + 1, capacity_) * slot_bytes_[i]);
    }
    for (std::size_t i = 0; i < beside_.size() && used == 0; ++i) {
      beside_[i].release(as_size(h) * beside_bytes_[i], as_size(h + 1) * beside_bytes_[i]);
    }
  }
  /// Bytes that are held, lengths aside.
  std::size_t held() const {
    const auto all = [](std::size_t sum, const auto& m) { return sum + m.held(); };
    return std::accumulate(beside_.begin(), beside_.end(),
                           std::accumulate(memory_.begin(), memory_.end(), std::size_t{0}, all),
                           all);
  }

 private:
  enum { log_mass, position, keys, values, kinds };
  enum { newest_keys, newest_values, key_mean };

  index_t heads_, capacity_, kv_heads_, newest_;
  std::array<std::size_t, kinds> slot_bytes_;
  std::array<std::size_t, 3> beside_bytes_;
  std::array<detail::reserved, kinds> memory_;  // [heads, capacity] each
  std::array<detail::reserved, 3> beside_;      // [heads, rows in half] keys, values; [heads] means
  std::vector<index_t> length_, next_position_, kept_, rounded_;
  std::vector<std::atomic<index_t>> drafts_;  // [requests]
};

/// How many tables have each page in use, by which a cache refuses changes. Calls of several
/// threads may count at the same time, each those of its own heads, which may share a table.
class page_counts {
 public:
  page_counts() = default;
  /// Pages of one number are counted apart where they are other rows, in heads of several layers or
  /// in several heads of one. Nothing is counted where there is one table for such rows.
  page_counts(const placed_tables& tables, const cache_extents& e, index_t kv_heads,
              bool layers_apart, bool heads_apart)
      : all_(tables), requests_(e.requests), kv_heads_(kv_heads) {
    layers_apart = layers_apart && tables.count > e.requests;
    of_head_ = heads_apart ? 1 : 0;
    of_layer_ = layers_apart ? (heads_apart ? kv_heads : 1) : 0;
    const index_t places = (layers_apart ? e.layers : 1) * (heads_apart ? kv_heads : 1);
    if (tables.count > places) {
      tables_ = std::vector<std::atomic<index_t>>(as_size(places, tables.first.limit));
      counted_.resize(as_size(tables.count) * as_size(tables.stride), page_table::no_page);
      used_.resize(as_size(e.layers * e.requests * kv_heads));
      locks_ = std::make_unique<std::mutex[]>(as_size(tables.count));
    }
  }

  bool empty() const { return tables_.empty(); }  ///< does it count none?
  /// Do several tables have this page of head `h` in use?
  bool shared(index_t h, index_t page) {
    return is_page(page) && tables_with(h, page).load(std::memory_order_relaxed) > 1;
  }
  /// Head `h` has the first `used` entries of its table in use, whatever the table lists there by
  /// now. What is in use before and after is counted at any time.
  void take(index_t h, index_t used) {
    if (!empty()) {
      const std::lock_guard lock(lock_of(h));
      used_[as_size(h)] = used;
      count(h, 0, used, true);
    }
  }
  /// The same, and of its table's entries no others than those that some head has in use.
  void take_only(index_t h, index_t used, index_t entries) {
    if (!empty()) {
      const std::lock_guard lock(lock_of(h));
      used_[as_size(h)] = used;
      all_.each_sharing(h, static_cast<index_t>(used_.size()),
                        [&](index_t i) { used = std::max(used, used_[as_size(i)]); });
      count(h, 0, used, true);
      count(h, used, entries, false);
    }
  }

 private:
  std::mutex& lock_of(index_t h) { return locks_[as_size(h / all_.heads_each % all_.count)]; }
  void count(index_t h, index_t first, index_t last, bool in_use) {
    const page_table own = all_.of(h);
    index_t* const counted = counted_.data() + (own.pages - all_.first.pages);
    for (const bool comes : {true, false}) {
      for (index_t i = first; i < last; ++i) {
        const index_t page = in_use && is_page(own.pages[i]) ? own.pages[i] : page_table::no_page;
        index_t& was = counted[i];
        if (comes && page != was && page != page_table::no_page) {
          tables_with(h, page).fetch_add(1, std::memory_order_relaxed);
        } else if (!comes && page != was) {
          if (was != page_table::no_page) {
            tables_with(h, was).fetch_sub(1, std::memory_order_relaxed);
          }
          was = page;
        }
      }
    }
  }
  bool is_page(index_t page) const { return page >= 0 && page < all_.first.limit; }
  std::atomic<index_t>& tables_with(index_t h, index_t page) {
    const index_t place = h / kv_heads_ / requests_ * of_layer_ + h % kv_heads_ * of_head_;
    return tables_[as_size(place, all_.first.limit) + as_size(page)];
  }

  placed_tables all_;
  index_t requests_ = 1, kv_heads_ = 1, of_layer_ = 0, of_head_ = 0;
  std::vector<std::atomic<index_t>> tables_;  // [places, pages]
  std::vector<index_t> counted_;              // as the tables were when last counted
  std::vector<index_t> used_;                 // [heads] entries of its table, as last counted
  std::unique_ptr<std::mutex[]> locks_;       // [tables] for these two
};

/// The part of `cache`, `strided_cache` and `paged_cache` that is the same: a `kv_cache`.
///
/// Heads are flattened: head `(layer · requests + request) · kv_heads + k` is KV head `k`.
class cache_base {
 public:
  index_t layers() const { return extents_.layers; }      ///< that it holds
  index_t requests() const { return extents_.requests; }  ///< sequences that it holds at once
  index_t kv_heads() const { return spec().kv_heads; }    ///< of a layer
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
            table(h),
            records_.beside(h)};
  }
  head_ref head(index_t h) const = delete;  ///< who has a head may change it

  /// Appends tokens at their heads' next positions. `k [tokens, heads, key_dim]`,
  /// `v [tokens, heads, value_dim]`, none in one memory: of one layer of one request `[tokens,
  /// kv_heads, ...]`, of one token of several `[requests, kv_heads, ...]`. Refused, with nothing
  /// changed: another size, null, too few slots (`no_capacity`) or pages
  /// (`no_page`), heads that are not there or are given twice, NaN or Inf where the model checks
  /// for it.
  void append(const head_selection& heads, const any_span& k, const any_span& v, index_t tokens) {
    append(heads, k, v, tokens, [] {});
  }

  /// Takes in `tokens` rows of each head that follow its slots in use: the engine wrote them.
  /// Refused, with nothing changed: as in `append`.
  void commit(const head_selection& heads, index_t tokens) {
    expects(errc::unsupported, type_.newest == 0,
            "commit: expected no newest rows in half, which append writes, got ", type_.newest);
    expects(errc::unsupported, !is_centred(type_.keys),
            "commit: expected keys that are held as they are, got k8, k6 or k4, of which append "
            "knows the mean");
    expect_room("commit", heads, tokens);
    push_metadata(heads, tokens);
  }

  /// Bytes of the slots in use: keys, values, log-mass, positions, newest rows.
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (index_t h = 0; h < heads(); ++h) {
      sum += head_bytes(type_, spec().key_dim, own_value_dim(), length(h)) +
             as_size(length(h)) * (sizeof(float) + sizeof(index_t));
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
  /// `expect_more`: what is refused in addition.
  void append(const head_selection& heads, const any_span& k, const any_span& v, index_t tokens,
              const auto& expect_more) {
    expects(tokens >= 0, "append: expected at least 0 tokens, got ", tokens);
    detail::expect_size("append", "keys", k, {tokens, heads.count(), spec().key_dim});
    detail::expect_no_values("append", one_memory(), spec().value_dim, v);
    detail::expect_size("append", "values", v, {tokens, heads.count(), own_value_dim()});
    expect_room("append", heads, tokens);
    if (spec().check_finite) {
      expect_finite("append: expected finite keys", k);
      expect_finite("append: expected finite values", v);
    }
    expect_more();
    const index_t count = heads.count();
    for (index_t i = 0; i < count && is_centred(type_.keys); ++i) {
      head(heads[i]).before_keys(tokens, [&, n = spec().key_dim](index_t t, float* x) {
        k.copy_floats((std::ptrdiff_t{t} * count + i) * n, n, x);
      });
    }
    push_metadata(heads, tokens);
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

  using spec_list = std::shared_ptr<const std::vector<attention_spec>>;  ///< of all layers

  /// Of checked specs; `own`: bytes per slot of keys and values that it owns.
  cache_base(spec_list specs, const cache_extents& extents, storage_pair type,
             std::array<std::size_t, 2> own = {})
      : specs_(std::move(specs)),
        extents_(extents),
        type_(type),
        records_(extents.layers * extents.requests * kv_heads(), extents.capacity, extents.requests,
                 kv_heads(), own, type.newest, head_records::beside_of(type, spec())) {}

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
    const auto each = std::int64_t{extents.layers} * extents.requests;
    expects(each <= std::numeric_limits<index_t>::max() / all[0].kv_heads,
            "cache: expected fewer than 2^31 heads, got ", each, " times ", all[0].kv_heads);
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
  /// Do pages of one number lie apart in rows of two layers?
  bool layers_apart() const {
    return keys_.size() > 1 || (keys_.front().layer != 0 && values_.front().layer != 0);
  }
  /// ... in those of two heads?
  bool heads_apart() const { return keys_.front().head != 0 && values_.front().head != 0; }
  const placed_tables& tables() const { return tables_; }         ///< of pages
  index_t length(index_t h) const { return records_.length(h); }  ///< slots in use
  const head_records& records() const { return records_; }        ///< what is kept per slot
  void lower_capacity(index_t capacity) { extents_.capacity = capacity; }  ///< slots per head

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
      head(heads[i]).push_metadata(tokens);
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

/// How large a cache with memory of its own is, and what it holds keys and values as.
struct cache_options {
  index_t layers = 1;             ///< of the model, or of this process
  index_t requests = 1;           ///< sequences held at once
  index_t capacity = 0;           ///< slots per head
  storage keys = storage::f32;    ///< what keys are held as
  storage values = storage::f32;  ///< what values are held as
  /// Rows of each head, 0 to 64, that are held in half while no newer ones are there: of those in
  /// blocks, which lose most where they are the newest (of a prompt's 4-bit rows four fifths). With
  /// any, those of the first four tokens stay in half too.
  /// Numbers, of values in `q4_0` once rotated, must be below 65,520 then.
  index_t newest = 0;
};

/// Keys `[heads, capacity, key_dim]` and values `[heads, capacity, value_dim]`, owned.
///
///     kvmeld::cache kv(spec, {.layers = 32, .requests = 8, .capacity = 4096});
///     kv.append(kv.heads(layer, request), k, v, tokens);   // [tokens, kv_heads, ...] each
///
/// `spec`: of all layers, or a span with one for each, of which rope and scale may differ.
/// Refused: shapes that cannot be.
class cache : public cache_base {
 public:
  /// One spec for all layers.
  cache(const attention_spec& spec, const cache_options& o) : cache(std::span(&spec, 1), o) {}
  /// One spec for each layer.
  cache(std::span<const attention_spec> specs, const cache_options& o)
      : cache(cache_base::checked(specs, {o.layers, o.requests, o.capacity}), o) {}
  /// With rows of its own, copied.
  cache(const cache& other) : cache_base(other) { place(); }
  cache(cache&&) noexcept = default;
  /// With rows of its own, copied.
  cache& operator=(const cache& other) {
    cache copy = other;
    return *this = std::move(copy);
  }
  cache& operator=(cache&&) noexcept = default;
  ~cache() = default;

  /// Lowers the capacity of all heads to `capacity` slots and gives the rest back. Rows stay where
  /// they are; views of heads keep the capacity that they were made with.
  /// Refused, with nothing changed: more slots than there are, fewer than a head holds.
  void shrink(index_t capacity) {
    expects(capacity > 0 && capacity <= this->capacity(), "shrink: expected a capacity of 1 to ",
            this->capacity(), " slots, got ", capacity);
    for (index_t h = 0; h < heads(); ++h) {
      expects(errc::no_capacity, length(h) <= capacity, "shrink: expected a capacity of at least ",
              length(h), " slots, got ", capacity);
    }
    lower_capacity(capacity);
    for (index_t h = 0; h < heads(); ++h) {
      give_back(h);
    }
  }
  /// The same for a cache that `meld` compresses, whose budgets it must hold: `kv.shrink(meld,
  /// 96)`.
  template <class Compressor>
  void shrink(Compressor& meld, index_t capacity) {
    meld.shrink(*this, capacity);
  }

 private:
  cache(const spec_list& specs, const cache_options& o)
      : cache_base(specs, {o.layers, o.requests, o.capacity},
                   storage_pair(o.keys, o.values, o.newest).checked(),
                   {row_bytes(o.keys, specs->front().key_dim),
                    row_bytes(o.values, specs->front().value_dim)}) {
    place();
  }
  void place() {
    const auto at = [&](std::byte* data, storage type, index_t dim) {
      const auto row = static_cast<std::ptrdiff_t>(row_bytes(type, dim)),
                 element = static_cast<std::ptrdiff_t>(element_bytes(type)),
                 head = records().capacity() * row, request = kv_heads() * head;
      return placed_rows{data, requests() * request, request, head, {data, row, element}};
    };
    set_rows(at(records().key_rows(), type().keys, spec().key_dim),
             at(records().value_rows(), type().values, spec().value_dim));
  }
};

/// A `kv_cache` over an engine's own keys and values; log-mass, positions and lengths are kept
/// here. Tokens that are already in the engine's memory are taken in with `commit`.
///
///     kvmeld::strided_cache over(spec, {.layers = 1, .requests = 1, .capacity = cells},
///                                kvmeld::rows(k, kvmeld::layout::nhd),
///                                kvmeld::rows(v, kvmeld::layout::nhd));
///
/// An engine that allocates each layer apart gives a `std::vector<kvmeld::rows>`, one of each.
/// Movable, not copyable: two views of the same rows would each count their own slots. Refused: as
/// of `cache`, memory that is too small for the layout, and rows that overlap: of one layer, or of
/// two that are given apart. Such layers may interleave, as in an engine that holds `[slots,
/// layers]` rows, if they are laid out alike. Keys are not compared with values.
class strided_cache : public cache_base {
 public:
  strided_cache(strided_cache&&) = default;
  strided_cache& operator=(strided_cache&&) = default;
  /// One spec for all layers.
  strided_cache(const attention_spec& spec, const cache_extents& extents, const layer_rows& keys,
                const layer_rows& values)
      : strided_cache(std::span(&spec, 1), extents, keys, values) {}
  /// One spec for each layer.
  strided_cache(std::span<const attention_spec> specs, const cache_extents& extents,
                const layer_rows& keys, const layer_rows& values)
      : cache_base(checked(specs, extents), extents, {keys.type(), values.type()}) {
    place("strided_cache", keys, values);
  }
};

/// A `kv_cache` over an engine's pages; log-mass, positions and lengths are kept here. The engine
/// enters a page in the table before a slot needs it.
///
///     kvmeld::paged_cache kv(spec, {.layers = 32, .requests = 8, .capacity = 4096},
///                            kvmeld::rows(k, kvmeld::layout::pages_nhd),
///                            kvmeld::rows(v, kvmeld::layout::pages_nhd),
///                            {.pages = block_tables, .slots = 16});
///
/// Tables of several requests may list the same pages, as those of a common prefix, until a call of
/// `append` or of a compressor would change rows in them: the cache counts the tables that have a
/// page in use, and refuses; `compressor::seal` keeps a prefix from being changed. A page that a
/// table lists no longer counts until the next call for its request: `free_pages`, say, or `clear`.
/// Rows that are pushed to a head, or changed by the functions of one head, are the caller's to
/// keep apart.
///
/// Movable, not copyable, as `strided_cache`. Refused: as there, a capacity of no whole pages,
/// tables of another size.
class paged_cache : public cache_base {
 public:
  paged_cache(paged_cache&&) = default;
  paged_cache& operator=(paged_cache&&) = default;
  /// One spec for all layers.
  paged_cache(const attention_spec& spec, const cache_extents& extents, const layer_rows& keys,
              const layer_rows& values, const page_tables& tables)
      : paged_cache(std::span(&spec, 1), extents, keys, values, tables) {}
  /// One spec for each layer.
  paged_cache(std::span<const attention_spec> specs, const cache_extents& extents,
              const layer_rows& keys, const layer_rows& values, const page_tables& tables)
      : cache_base(checked(specs, extents), extents, {keys.type(), values.type()}) {
    expects(tables.pages.data() != nullptr, "paged_cache: expected page tables, got null");
    expects(tables.slots > 0 && capacity() % tables.slots == 0,
            "paged_cache: expected a capacity of whole pages, got ", capacity(),
            " slots in pages of ", tables.slots);
    place("paged_cache", keys, values, shared(tables));
    const bool own_tables = kv_heads() > 1 && this->tables().heads_each == 1;
    counts_ = page_counts(this->tables(), extents, kv_heads(), layers_apart(),
                          own_tables && heads_apart());
  }

  /// As of every cache. Refused too: pages to write to that another table has in use.
  void append(const head_selection& heads, const any_span& k, const any_span& v, index_t tokens) {
    const auto each = [&](const auto& use) {
      for (index_t i = 0; i < heads.count(); ++i) {
        use(heads[i]);
      }
    };
    const auto expect_own = [&](index_t h) {
      expect_own_pages("append", h, length(h), length(h) + tokens);
    };
    cache_base::append(heads, k, v, tokens, [&] {  // refused, it leaves the counts as they were
      detail::or_undo([&] { each(expect_own); }, [&] { each([&](index_t h) { count_pages(h); }); });
    });
  }
  /// As of every cache: rows of a prefix may lie in pages that other tables have too.
  void commit(const head_selection& heads, index_t tokens) {
    cache_base::commit(heads, tokens);
    for (index_t i = 0; i < heads.count(); ++i) {
      counts_.take(heads[i], taken(heads[i]));
    }
  }

  using cache_base::table;

  /// Do two heads share a page table?
  bool share_table(index_t a, index_t b) const { return table(a).pages == table(b).pages; }
  /// Pages that the table of head `h` has for slots in use, of this head and of those that share
  /// it. No others count as in use from here on. Needs these heads to itself. Refused: a head that
  /// is not there.
  index_t pages(index_t h) {
    (void)head(h);
    index_t most = 0;
    tables().each_sharing(h, heads(), [&](index_t i) {
      most = std::max(most, taken(i));
      counts_.take(i, taken(i));
    });
    count_pages(h);
    return most;
  }
  /// Counts anew which pages the heads of a table have in use, head `h` by its length, the others
  /// as their last calls left them. Threads may, each for heads of its own.
  void count_pages(index_t h) { counts_.take_only(h, taken(h), capacity() / table(h).slots); }
  /// The table's entries after those: after a compression, the pages that it has freed, and what
  /// was −1 before.
  std::span<const index_t> free_pages(index_t h) {
    const index_t used = pages(h);
    const page_table own = table(h);
    return std::span<const index_t>(own.pages, as_size(capacity() / own.slots))
        .subspan(as_size(used));
  }
  /// The same for heads that share a table: those of a layer and request, or of a request.
  /// Refused: heads of several tables.
  std::span<const index_t> free_pages(const head_selection& heads) {
    heads.check("free_pages", this->heads());
    for (index_t i = 0; i < heads.count(); ++i) {
      expects(share_table(heads[i], heads[0]),
              "free_pages: expected heads of one table, got several");
    }
    return heads.count() > 0 ? free_pages(heads[0]) : std::span<const index_t>();
  }

  /// Refused: a call that changes rows of slots `from` to `to` − 1 of head `h` in a page that
  /// another table has in use. Where head `like` has the page for the same slots, it may. O(pages)
  /// of the head; of other requests, reads and writes the counts alone, which are atomic.
  void expect_own_pages(const char* call, index_t h, index_t from, index_t to, index_t like = -1) {
    if (counts_.empty()) {
      return;
    }
    const page_table own = table(h);
    const index_t last = own.taken_by(to);
    const auto first_shared = [&] {
      for (index_t i = from / own.slots; i < last && from < to; ++i) {
        if (counts_.shared(h, own.pages[i]) && (like < 0 || table(like).pages[i] != own.pages[i])) {
          return own.pages[i];
        }
      }
      return page_table::no_page;
    };
    const index_t most = std::max(last, taken(h));
    counts_.take(h, most);
    if (first_shared() == page_table::no_page) {
      return;
    }
    count_pages(h);  // the engine may have put the table in another order since
    counts_.take(h, most);
    const index_t page = first_shared();
    expects(page == page_table::no_page, call,
            ": expected pages that no other table has in use where rows are changed, got page ",
            page, " in a table of head ", h);
  }

 private:
  /// Entries of its table that head `h` has in use.
  index_t taken(index_t h) const { return table(h).taken_by(length(h)); }

  /// Which heads share a table, by how many tables there are.
  placed_tables shared(const page_tables& t) const {
    const std::ptrdiff_t one = capacity() / t.slots, stride = t.stride == 0 ? one : t.stride;
    expects(stride >= one, "paged_cache: expected a stride of at least ", one, " pages, got ",
            stride);
    const index_t per_request = requests(), per_layer = layers() * per_request;
    const auto size = static_cast<std::ptrdiff_t>(t.pages.size());
    const std::ptrdiff_t tables = size % stride == 0 ? size / stride : 0;
    placed_tables placed{{t.pages.data(), t.slots}, stride, 1, heads()};
    for (const index_t count : {per_layer, per_request}) {
      if (tables == count) {
        placed.heads_each = kv_heads(), placed.count = count;
      }
    }
    expects(tables == placed.count, "paged_cache: expected ", per_request, " (requests), ",
            per_layer, " (layers, requests) or ", heads(),
            " (layers, requests, KV heads) tables of ", stride, " pages, got ", size, " entries");
    return placed;
  }

  page_counts counts_;  // none where tables cannot meet
};

}  // namespace kvmeld::inline v0
