// The list of all policies that laws run over, each with an example that small heads can hold.
#pragma once

#include <tuple>

#include "kvfold/kvfold.hpp"

namespace fixtures {

using policies = std::tuple<kvfold::full_cache, kvfold::streaming_llm, kvfold::h2o, kvfold::snapkv,
                            kvfold::zsmerge, kvfold::fold>;

template <class Policy>
Policy example() {
  if constexpr (std::same_as<Policy, kvfold::snapkv>) {
    return {.window = 8};
  } else if constexpr (std::same_as<Policy, kvfold::zsmerge>) {
    return {.proximity = 0.2F, .residual = 3};
  } else {
    return {};
  }
}

/// Does its first column rank slots? fold's counts tokens.
template <class Policy>
constexpr bool ranks_by_column() {
  return !std::same_as<Policy, kvfold::fold>;
}

template <class Policy>
kvfold::index_t sinks_of(const Policy& p) {
  if constexpr (requires { p.sinks; }) {
    return p.sinks;
  } else {
    return 0;
  }
}

}  // namespace fixtures
