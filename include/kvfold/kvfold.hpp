/// kvfold: KV-cache compression policies for LLM inference engines. Includes everything.
#pragma once

#include "kvfold/any_policy.hpp"     // IWYU pragma: export
#include "kvfold/append_only.hpp"    // IWYU pragma: export
#include "kvfold/apply.hpp"          // IWYU pragma: export
#include "kvfold/attend.hpp"         // IWYU pragma: export
#include "kvfold/cache.hpp"          // IWYU pragma: export
#include "kvfold/column_scores.hpp"  // IWYU pragma: export
#include "kvfold/compose.hpp"        // IWYU pragma: export
#include "kvfold/compress.hpp"       // IWYU pragma: export
#include "kvfold/layer_budgets.hpp"  // IWYU pragma: export
#include "kvfold/paged.hpp"          // IWYU pragma: export
#include "kvfold/plan.hpp"           // IWYU pragma: export
#include "kvfold/policy.hpp"         // IWYU pragma: export
#include "kvfold/quantised.hpp"      // IWYU pragma: export
#include "kvfold/queries.hpp"        // IWYU pragma: export
#include "kvfold/reference.hpp"      // IWYU pragma: export
#include "kvfold/rope.hpp"           // IWYU pragma: export
#include "kvfold/serialize.hpp"      // IWYU pragma: export
#include "kvfold/state.hpp"          // IWYU pragma: export
#include "kvfold/view.hpp"           // IWYU pragma: export
