/// What `kvfold::compiled` has compiled once: every policy over heads of floats. `kvfold.hpp`
/// includes this where `KVFOLD_COMPILED` is defined, as that target does for those who link to it.
#pragma once

#include "kvfold/any_policy.hpp"
#include "kvfold/attend.hpp"
#include "kvfold/score/column_scores.hpp"

namespace kvfold {

namespace detail {

extern template struct hooks<full_cache, head_view<float>>;
extern template struct hooks<streaming_llm, head_view<float>>;
extern template struct hooks<h2o, head_view<float>>;
extern template struct hooks<snapkv, head_view<float>>;
extern template struct hooks<zsmerge, head_view<float>>;
extern template struct hooks<d2o, head_view<float>>;
extern template struct hooks<kvmerger, head_view<float>>;
extern template struct hooks<ems, head_view<float>>;
extern template struct hooks<keepkv, head_view<float>>;
extern template struct hooks<attention_matching, head_view<float>>;
extern template struct hooks<fold, head_view<float>>;
extern template struct hooks<random_tokens, head_view<float>>;
extern template struct hooks<tova, head_view<float>>;
extern template struct hooks<roco, head_view<float>>;
extern template struct hooks<scissorhands, head_view<float>>;
extern template struct hooks<key_diff, head_view<float>>;
extern template struct hooks<expected_attention, head_view<float>>;
extern template struct hooks<centroids, head_view<float>>;
extern template struct hooks<compactor, head_view<float>>;
extern template struct hooks<cam, head_view<float>>;
extern template struct hooks<any_policy, head_view<float>>;

}  // namespace detail

extern template void attend(const head_view<float>&, const float*, float*, std::span<float>,
                            std::span<float>, key_comparison*);
extern template void column_scores(const head_view<float>&, const query_view<float>&,
                                   const column_options&, const column_sums&);

}  // namespace kvfold
