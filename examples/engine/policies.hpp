/// The policies, compiled once: what takes a compiler a minute is in policies.cpp. A file that
/// includes this one finds it there when it runs `any_policy` over heads of floats.
#pragma once

#include "kvfold/kvfold.hpp"

namespace kvfold {

// What the verbs call, for types that hold an any_policy too.
extern template void any_policy::observe(const head_view<float>&, head_state&,
                                         const observation&) const;
extern template void any_policy::observe(const head_view<float>&, head_state&,
                                         const query_view<float>&) const;
extern template void any_policy::plan(const head_view<float>&, const head_state&, index_t,
                                      merge_plan&) const;
extern template void any_policy::plan(const head_view<float>&, const head_state&,
                                      const query_view<float>&, index_t, merge_plan&) const;
extern template void any_policy::predict_victim(const head_view<float>&, head_state&, index_t,
                                                key_comparison&) const;
extern template bool any_policy::choose_victim(const head_view<float>&, const head_state&, index_t,
                                               slot_removal&, const key_comparison&) const;
extern template void any_policy::update_memory(const head_view<float>&, head_state&,
                                               const slot_removal&) const;
extern template void any_policy::update_memory(const head_view<float>&, head_state&,
                                               const merge_plan&) const;
extern template void any_policy::after_compress(const head_view<float>&, head_state&,
                                                index_t) const;
extern template void any_policy::attend(const head_view<float>&, const head_state&, const float*,
                                        float*, std::span<float>, std::span<float>,
                                        key_comparison*) const;

// The verbs.
extern template void observe(const any_policy&, const head_view<float>&, head_state&, workspace&,
                             observation);
extern template void observe(const any_policy&, const head_view<float>&, head_state&,
                             const query_view<float>&);
extern template void plan(const any_policy&, const head_view<float>&, const head_state&,
                          const query_view<float>&, index_t, merge_plan&);
extern template void compress(const any_policy&, const head_view<float>&, head_state&, workspace&,
                              const budget&, const query_view<float>&);
extern template void step(const any_policy&, const head_view<float>&, head_state&, workspace&,
                          const float*, const float*, const float*, const budget&, float*);
extern template void check(const any_policy&, const budget&, index_t);
extern template head_state make_head_state(const any_policy&, const head_view<float>&);
extern template state make_state(const any_policy&, cache<float>&, const serial&);
extern template void compress(const any_policy&, cache<float>&, state&, const head_selection&,
                              const query_view<float>&, const budget&, const serial&);
extern template void compress(const any_policy&, cache<float>&, state&, const query_view<float>&,
                              const budget&, const serial&);
extern template void step(const any_policy&, cache<float>&, state&, const head_selection&,
                          const step_input&, const budget&, std::span<float>, const serial&);
extern template void step(const any_policy&, cache<float>&, state&, const step_input&,
                          const budget&, std::span<float>, const serial&);

// What most of them call, and those who use a head without a policy.
extern template void attend(const head_view<float>&, const float*, float*, std::span<float>,
                            std::span<float>, key_comparison*);
extern template void column_scores(const head_view<float>&, const query_view<float>&,
                                   const column_options&, const column_sums&);

}  // namespace kvfold
