// What both files of every consumer include: the headers of one policy, or the single header.
#pragma once

#ifdef CONSUMER_SINGLE_HEADER
#include "kvfold.hpp"
#else
#include "kvfold/cache.hpp"
#include "kvfold/compress.hpp"
#include "kvfold/policies/h2o.hpp"
#endif

/// Decodes `tokens` pseudo-random tokens within 16 slots; the sum of all outputs.
double decode(int tokens);
