// SPDX-License-Identifier: MIT
// Baselines that no method should lose to: by attention, by keys alone, by chance.
//
// Common readings: sinks are the positions below `sinks`, recent ones the last `window` positions;
// both are kept, then the rest by score, ties to the lower slot, NaN last. The token that has just
// come competes as soon as it is outside the window. Column sums are over the group (sum).
#pragma once

#include "oracle/centroids.hpp"
#include "oracle/evictors.hpp"
#include "oracle/key_baselines.hpp"
#include "oracle/r_kv.hpp"
#include "oracle/triattention.hpp"
