// A cache as its bits, and as the bytes that it is saved to.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "kvfold/serialize.hpp"
#include "support/fixtures.hpp"

namespace fixtures {

using words = std::vector<std::uint32_t>;

/// The bits of all that a cache and its state hold: NaN and integers in floats compare too.
words everything(kvfold::kv_cache auto& kv, const kvfold::state& state) {
  words all;
  const auto add = [&](float x) { all.push_back(std::bit_cast<std::uint32_t>(x)); };
  for (index_t h = 0; h < kv.heads(); ++h) {
    const auto head = kv.head(h);
    for (index_t s = 0; s < head.length(); ++s) {
      for (index_t i = 0; i < head.dim(); ++i) {
        add(static_cast<float>(head.key(s)[i])), add(static_cast<float>(head.value(s)[i]));
      }
      add(head.log_mass(s));
      all.push_back(static_cast<std::uint32_t>(head.position(s)));
    }
    all.push_back(static_cast<std::uint32_t>(head.seen()));
    for (index_t c = 0; c < state[h].columns(); ++c) {
      std::ranges::for_each(state[h].column(c), add);
    }
    std::ranges::for_each(state[h].memory(), add);
    all.push_back(static_cast<std::uint32_t>(state[h].observed()));
  }
  return all;
}

std::string saved(const kvfold::policies auto& policy, kvfold::kv_cache auto& kv,
                  kvfold::state& state) {
  std::ostringstream out;
  kvfold::save(out, policy, kv, state);
  return out.str();
}

}  // namespace fixtures
