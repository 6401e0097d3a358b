// SPDX-License-Identifier: MIT
/// Every policy, and what has been compiled of them where the target `kvmeld::compiled` is linked
/// to.
#pragma once

#include "kvmeld/policies/attention_matching.hpp"
#include "kvmeld/policies/cam.hpp"
#include "kvmeld/policies/centroids.hpp"
#include "kvmeld/policies/compactor.hpp"
#include "kvmeld/policies/d2o.hpp"
#include "kvmeld/policies/ems.hpp"
#include "kvmeld/policies/expected_attention.hpp"
#include "kvmeld/policies/fold.hpp"
#include "kvmeld/policies/full_cache.hpp"
#include "kvmeld/policies/h2o.hpp"
#include "kvmeld/policies/hooks.hpp"
#include "kvmeld/policies/keepkv.hpp"
#include "kvmeld/policies/key_diff.hpp"
#include "kvmeld/policies/kvmerger.hpp"
#include "kvmeld/policies/kvzip.hpp"
#include "kvmeld/policies/random_tokens.hpp"
#include "kvmeld/policies/roco.hpp"
#include "kvmeld/policies/scissorhands.hpp"
#include "kvmeld/policies/snapkv.hpp"
#include "kvmeld/policies/streaming_llm.hpp"
#include "kvmeld/policies/tova.hpp"
#include "kvmeld/policies/zsmerge.hpp"
#include "kvmeld/score/attention.hpp"
#include "kvmeld/score/column_scores.hpp"

#ifdef KVMELD_COMPILED  // as that target defines it

namespace kvmeld {
inline namespace v0 {

namespace detail {

extern template struct hooks<full_cache>;
extern template struct hooks<streaming_llm>;
extern template struct hooks<h2o>;
extern template struct hooks<snapkv>;
extern template struct hooks<zsmerge>;
extern template struct hooks<d2o>;
extern template struct hooks<kvmerger>;
extern template struct hooks<ems>;
extern template struct hooks<keepkv>;
extern template struct hooks<attention_matching>;
extern template struct hooks<kvzip>;
extern template struct hooks<fold>;
extern template struct hooks<random_tokens>;
extern template struct hooks<tova>;
extern template struct hooks<roco>;
extern template struct hooks<scissorhands>;
extern template struct hooks<key_diff>;
extern template struct hooks<expected_attention>;
extern template struct hooks<centroids>;
extern template struct hooks<compactor>;
extern template struct hooks<cam>;

}  // namespace detail

extern template void attend(const head_ref&, const log_mass_of<head_ref>&, const float*, float*,
                            std::span<float>, std::span<float>, fused_similarity*);
extern template void column_scores(const head_ref&, const query_view<float>&, const column_options&,
                                   const column_sums&);

}  // namespace v0
}  // namespace kvmeld

#endif  // KVMELD_COMPILED
