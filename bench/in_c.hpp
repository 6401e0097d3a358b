// SPDX-License-Identifier: MIT
/// A step through the C interface, apart from those that it is compared with.
#pragma once

#include <functional>

namespace bench {

/// One head of `dim` that h2o brings to `slots` when it holds `trigger`. Rows of token `t` are at
/// `t * dim`; `count` is given what is to be counted: `tokens` steps, once the head is full.
void step_in_c(int dim, int slots, int trigger, int tokens, const float* q, const float* k,
               const float* v, float* out,
               const std::function<void(const std::function<void()>&)>& count);

}  // namespace bench
