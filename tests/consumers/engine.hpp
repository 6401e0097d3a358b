// SPDX-License-Identifier: MIT
// What both files of every consumer include: the headers of a policy, or the single header.
#pragma once

#if defined(CONSUMER_SINGLE_HEADER)
#include "kvmeld.hpp"
#elif defined(KVMELD_COMPILED)
#include "kvmeld/kvmeld.hpp"
#else
#include "kvmeld/compressor.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/policies/d2o.hpp"
#endif

/// Decodes `tokens` pseudo-random tokens within 24 slots under D2O; the sum of all
/// outputs.
double decode(int tokens);
