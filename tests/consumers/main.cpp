// SPDX-License-Identifier: MIT
// The second file that includes the headers: what is not inline would be there twice.
#include <cstdio>
#include <stdexcept>

#include "engine.hpp"

int main() {
  try {
    kvmeld::cache none({.kv_heads = 0, .key_dim = 8}, {.capacity = 17});
  } catch (const kvmeld::invalid_argument& refused) {
    std::printf("kvmeld %d.%d.%d: %.9g; %s\n", KVMELD_VERSION_MAJOR, KVMELD_VERSION_MINOR,
                KVMELD_VERSION_PATCH, decode(100), refused.what());
    return 0;
  }
  return 1;
}
