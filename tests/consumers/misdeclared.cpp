// A policy whose `observe` is not const: it must not compile, or it would never be called.
#include <kvfold/compress.hpp>
#include <kvfold/memory/cache.hpp>

struct forgetful {
  static constexpr std::string_view name() { return "forgetful"; }
  void plan(const kvfold::kv_head auto&, const kvfold::head_state&, kvfold::index_t,
            kvfold::slot_scratch&, kvfold::merge_plan&) const {}
  void observe(const kvfold::kv_head auto&, kvfold::head_state&, const kvfold::observation&) {}
};

kvfold::state state_of(kvfold::cache<float>& kv) { return kvfold::make_state(forgetful{}, kv); }
