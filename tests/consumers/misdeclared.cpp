// SPDX-License-Identifier: MIT
// A policy whose `observe` is not const: it must not compile, or it would never be called.
#include <kvmeld/compressor.hpp>
#include <kvmeld/memory/cache.hpp>

struct forgetful {
  static constexpr std::string_view name() { return "forgetful"; }
  void plan(const kvmeld::kv_head auto&, const kvmeld::head_state&, kvmeld::index_t,
            kvmeld::slot_scratch&, kvmeld::merge_plan&) const {}
  void observe(const kvmeld::kv_head auto&, kvmeld::head_state&, const kvmeld::observation&) {}
};

void compress(kvmeld::cache& kv) { kvmeld::compressor meld(kv, forgetful{}, kvmeld::budget{8}); }
