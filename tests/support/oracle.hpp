// The whole oracle; see oracle_attention.hpp for what it is.
#pragma once

#include "oracle_attention.hpp"
#include "oracle_compare.hpp"
#include "oracle_plan.hpp"
#include "oracle_policies.hpp"
#include "oracle_rope.hpp"
#include "oracle_zsmerge.hpp"
