/// kvfold: KV-cache compression policies for LLM inference engines. Includes everything.
#pragma once

#include "kvfold/any_policy.hpp"           // IWYU pragma: export
#include "kvfold/attend.hpp"               // IWYU pragma: export
#include "kvfold/compress.hpp"             // IWYU pragma: export
#include "kvfold/global_budgets.hpp"       // IWYU pragma: export
#include "kvfold/layer_budgets.hpp"        // IWYU pragma: export
#include "kvfold/make_policy.hpp"          // IWYU pragma: export
#include "kvfold/memory/cache.hpp"         // IWYU pragma: export
#include "kvfold/memory/paged.hpp"         // IWYU pragma: export
#include "kvfold/memory/q8_0.hpp"          // IWYU pragma: export
#include "kvfold/memory/rope.hpp"          // IWYU pragma: export
#include "kvfold/memory/view.hpp"          // IWYU pragma: export
#include "kvfold/merge/append_only.hpp"    // IWYU pragma: export
#include "kvfold/merge/apply.hpp"          // IWYU pragma: export
#include "kvfold/merge/compose.hpp"        // IWYU pragma: export
#include "kvfold/merge/pages.hpp"          // IWYU pragma: export
#include "kvfold/merge/plan.hpp"           // IWYU pragma: export
#include "kvfold/policy.hpp"               // IWYU pragma: export
#include "kvfold/score/column_scores.hpp"  // IWYU pragma: export
#include "kvfold/score/prompt_scores.hpp"  // IWYU pragma: export
#include "kvfold/score/queries.hpp"        // IWYU pragma: export
#include "kvfold/score/reference.hpp"      // IWYU pragma: export
#include "kvfold/serialize.hpp"            // IWYU pragma: export
#include "kvfold/state.hpp"                // IWYU pragma: export
