// SPDX-License-Identifier: MIT
// The whole oracle; see oracle_attention.hpp for what it is.
#pragma once

#include "oracle/attention.hpp"
#include "oracle/attention_matching.hpp"
#include "oracle/baselines.hpp"
#include "oracle/budgets.hpp"
#include "oracle/compare.hpp"
#include "oracle/d2o.hpp"
#include "oracle/ems.hpp"
#include "oracle/fold.hpp"
#include "oracle/keepkv.hpp"
#include "oracle/kvmerger.hpp"
#include "oracle/kvzip.hpp"
#include "oracle/linear.hpp"
#include "oracle/lookahead.hpp"
#include "oracle/lookahead_max.hpp"
#include "oracle/match.hpp"
#include "oracle/nnls.hpp"
#include "oracle/plan.hpp"
#include "oracle/policies.hpp"
#include "oracle/rope.hpp"
#include "oracle/zsmerge.hpp"
