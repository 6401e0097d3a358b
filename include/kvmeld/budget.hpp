/// How many slots a head may hold.
#pragma once

#include "kvmeld/config.hpp"

namespace kvmeld {
inline namespace v0 {

/// Slots a head may hold: compressed to `slots` as soon as it holds `trigger`.
struct budget {
  index_t slots = 0;
  index_t trigger = 0;  ///< 0: slots + 1, so every decode step; more: now and then

  index_t trigger_length() const { return trigger == 0 ? slots + 1 : trigger; }
  /// Does a head of `length` slots have to be compressed?
  KVMELD_HD bool reached(index_t length) const { return length > slots && length >= trigger; }
};

}  // namespace v0
}  // namespace kvmeld
