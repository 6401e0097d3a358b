// What both files of every consumer include: the headers of some policies, or the single header.
#pragma once

#if defined(CONSUMER_SINGLE_HEADER)
#include "kvfold.hpp"
#elif defined(KVFOLD_COMPILED)
#include "kvfold/kvfold.hpp"
#else
#include "kvfold/compress.hpp"
#include "kvfold/memory/cache.hpp"
#include "kvfold/policies/d2o.hpp"
#include "kvfold/policies/h2o.hpp"
#include "kvfold/policies/zsmerge.hpp"
#endif

/// Decodes `tokens` pseudo-random tokens within 24 slots under several policies; the sum of all
/// outputs.
double decode(int tokens);
