#include "evaluate/policies.hpp"

namespace kvfold {

template void observe(const evaluate::any_policy&, const head_view<float>&, head_state&, workspace&,
                      observation);
template void observe(const evaluate::any_policy&, const head_view<float>&, head_state&,
                      const query_view<float>&);
template void plan(const evaluate::any_policy&, const head_view<float>&, const head_state&,
                   const query_view<float>&, index_t, merge_plan&);
template void compress(const evaluate::any_policy&, const head_view<float>&, head_state&,
                       workspace&, const budget&, const query_view<float>&);
template void step(const evaluate::any_policy&, const head_view<float>&, head_state&, workspace&,
                   const float*, const float*, const float*, const budget&, float*);

}  // namespace kvfold
