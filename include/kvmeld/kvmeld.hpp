// SPDX-License-Identifier: MIT
/// kvmeld: KV-cache compression policies for LLM inference engines. Includes everything but
/// <kvmeld/peers.hpp>, the policies to compare with.
#pragma once

#include "kvmeld/any_policy.hpp"             // IWYU pragma: export
#include "kvmeld/compress/budgets.hpp"       // IWYU pragma: export
#include "kvmeld/compress/one_head.hpp"      // IWYU pragma: export
#include "kvmeld/compressor.hpp"             // IWYU pragma: export
#include "kvmeld/make_policy.hpp"            // IWYU pragma: export
#include "kvmeld/memory/attention_spec.hpp"  // IWYU pragma: export
#include "kvmeld/memory/cache.hpp"           // IWYU pragma: export
#include "kvmeld/memory/make_storage.hpp"    // IWYU pragma: export
#include "kvmeld/memory/rotation.hpp"        // IWYU pragma: export
#include "kvmeld/memory/row.hpp"             // IWYU pragma: export
#include "kvmeld/memory/view.hpp"            // IWYU pragma: export
#include "kvmeld/merge/apply.hpp"            // IWYU pragma: export
#include "kvmeld/merge/pages.hpp"            // IWYU pragma: export
#include "kvmeld/merge/plan.hpp"             // IWYU pragma: export
#include "kvmeld/policies/declared.hpp"      // IWYU pragma: export
#include "kvmeld/score/attention.hpp"        // IWYU pragma: export
#include "kvmeld/score/column_scores.hpp"    // IWYU pragma: export
#include "kvmeld/score/prompt_scores.hpp"    // IWYU pragma: export
#include "kvmeld/score/queries.hpp"          // IWYU pragma: export

#ifdef KVMELD_COMPILED  // as the target kvmeld::compiled defines it, which has these
namespace kvmeld::inline v0 {

extern template class detail::head_policies<any_policy>;
extern template class detail::open_heads<any_policy>;
extern template class compressor<any_policy>;

}  // namespace kvmeld::inline v0
#endif
