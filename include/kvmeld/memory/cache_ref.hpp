// SPDX-License-Identifier: MIT
/// A cache of any kind behind two pointers: what a compressor is compiled for once.
#pragma once

#include "kvmeld/memory/view.hpp"

namespace kvmeld {
inline namespace v0 {
namespace detail {

/// Heads in the order `(layer · requests + request) · kv_heads + head`. A reference: the cache must
/// outlive it.
class cache_ref {
 public:
  template <class Cache>
  explicit cache_ref(Cache& kv)
      : kv_(&kv),
        head_(
            [](void* cache, index_t h) -> head_ref { return static_cast<Cache*>(cache)->head(h); }),
        layers_(kv.layers()),
        requests_(kv.requests()),
        kv_heads_(kv.kv_heads()) {}

  /// Is it this cache?
  bool is(const void* cache) const { return kv_ == cache; }
  head_ref head(index_t h) const { return head_(kv_, h); }
  index_t layers() const { return layers_; }
  index_t requests() const { return requests_; }
  index_t heads() const { return layers_ * requests_ * kv_heads_; }

  /// Heads of one request, over all layers.
  index_t per_request() const { return layers_ * kv_heads_; }
  /// The `i`-th of them, `[layers, kv_heads]`.
  index_t of_request(index_t request, index_t i) const {
    return (i / kv_heads_ * requests_ + request) * kv_heads_ + i % kv_heads_;
  }
  /// Which of its request's heads `h` is, and which request that is.
  index_t in_request(index_t h) const {
    return h / (requests_ * kv_heads_) * kv_heads_ + h % kv_heads_;
  }
  index_t request_of(index_t h) const { return h / kv_heads_ % requests_; }

 private:
  void* kv_;
  head_ref (*head_)(void*, index_t);
  index_t layers_, requests_, kv_heads_;
};

}  // namespace detail
}  // namespace v0
}  // namespace kvmeld
