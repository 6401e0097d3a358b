/// The policies that are compared.
#pragma once

#include <string>
#include <vector>

#include "custom_policy.hpp"
#include "kvfold/kvfold.hpp"

namespace evaluate {

using kvfold::index_t;

/// A policy of one's own takes part by being named here.
using any_policy = kvfold::basic_any_policy<kvfold::full_cache, kvfold::streaming_llm, kvfold::h2o,
                                            kvfold::snapkv, kvfold::zsmerge, custom::lowest_norm>;

struct named_policy {
  std::string name;
  any_policy policy;
};

/// All of them, with their default parameters.
inline std::vector<named_policy> all_policies() {
  const any_policy every[] = {kvfold::full_cache{}, kvfold::streaming_llm{}, kvfold::h2o{},
                              kvfold::snapkv{},     kvfold::zsmerge{},       custom::lowest_norm{}};
  std::vector<named_policy> list;
  for (const any_policy& p : every) {
    list.push_back({std::string(p.name()), p});
  }
  return list;
}

/// The one that all others are compared with.
inline any_policy full_cache() { return kvfold::full_cache{}; }

}  // namespace evaluate
