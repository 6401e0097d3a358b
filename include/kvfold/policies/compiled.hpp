/// Every policy, and what has been compiled of them where the target `kvfold::compiled` is linked
/// to.
#pragma once

#include "kvfold/policies/attention_matching.hpp"
#include "kvfold/policies/cam.hpp"
#include "kvfold/policies/centroids.hpp"
#include "kvfold/policies/compactor.hpp"
#include "kvfold/policies/d2o.hpp"
#include "kvfold/policies/ems.hpp"
#include "kvfold/policies/expected_attention.hpp"
#include "kvfold/policies/fold.hpp"
#include "kvfold/policies/full_cache.hpp"
#include "kvfold/policies/h2o.hpp"
#include "kvfold/policies/hooks.hpp"
#include "kvfold/policies/keepkv.hpp"
#include "kvfold/policies/key_diff.hpp"
#include "kvfold/policies/kvmerger.hpp"
#include "kvfold/policies/kvzip.hpp"
#include "kvfold/policies/random_tokens.hpp"
#include "kvfold/policies/roco.hpp"
#include "kvfold/policies/scissorhands.hpp"
#include "kvfold/policies/snapkv.hpp"
#include "kvfold/policies/streaming_llm.hpp"
#include "kvfold/policies/tova.hpp"
#include "kvfold/policies/zsmerge.hpp"
#include "kvfold/score/attention.hpp"
#include "kvfold/score/column_scores.hpp"

#ifdef KVFOLD_COMPILED  // as that target defines it

namespace kvfold {
inline namespace v0 {

namespace detail {

extern template struct hooks<full_cache, head_ref>;
extern template struct hooks<streaming_llm, head_ref>;
extern template struct hooks<h2o, head_ref>;
extern template struct hooks<snapkv, head_ref>;
extern template struct hooks<zsmerge, head_ref>;
extern template struct hooks<d2o, head_ref>;
extern template struct hooks<kvmerger, head_ref>;
extern template struct hooks<ems, head_ref>;
extern template struct hooks<keepkv, head_ref>;
extern template struct hooks<attention_matching, head_ref>;
extern template struct hooks<kvzip, head_ref>;
extern template struct hooks<fold, head_ref>;
extern template struct hooks<random_tokens, head_ref>;
extern template struct hooks<tova, head_ref>;
extern template struct hooks<roco, head_ref>;
extern template struct hooks<scissorhands, head_ref>;
extern template struct hooks<key_diff, head_ref>;
extern template struct hooks<expected_attention, head_ref>;
extern template struct hooks<centroids, head_ref>;
extern template struct hooks<compactor, head_ref>;
extern template struct hooks<cam, head_ref>;

}  // namespace detail

extern template void attend(const head_ref&, const log_mass_of<head_ref>&, const float*, float*,
                            std::span<float>, std::span<float>, key_comparison*);
extern template void column_scores(const head_ref&, const query_view<float>&, const column_options&,
                                   const column_sums&);

}  // namespace v0
}  // namespace kvfold

#endif  // KVFOLD_COMPILED
