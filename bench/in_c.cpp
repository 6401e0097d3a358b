// SPDX-License-Identifier: MIT
#include "in_c.hpp"

#include <kvmeld.h>

#include <cstdlib>  // std::exit

namespace bench {

void step_in_c(int dim, int slots, int trigger, int tokens, const float* q, const float* k,
               const float* v, float* out,
               const std::function<void(const std::function<void()>&)>& count) {
  const int full = trigger - 1;
  kvmeld_attention_spec spec{};
  spec.size = sizeof spec, spec.kv_heads = 1, spec.key_dim = dim;
  kvmeld_cache_options options{};
  options.size = sizeof options, options.capacity = full + tokens;
  kvmeld_budget budget{};
  budget.size = sizeof budget, budget.slots = slots, budget.trigger = trigger;
  kvmeld_cache* const kv = kvmeld_cache_new(&spec, 1, &options, nullptr);
  kvmeld_compressor* const meld =
      kvmeld_compressor_new(kv, "h2o", &budget, KVMELD_STEP_ATTENDS, nullptr);
  kvmeld_error error{};
  const int32_t request = 0;
  const auto n = static_cast<std::size_t>(dim);
  const auto decode = [&](int first, int last) {
    for (int t = first; t < last; ++t) {
      const auto row = [&](const float* x) { return kvmeld_numbers{x + t * dim, n, KVMELD_F32}; };
      const kvmeld_step_input in{sizeof in, row(q), row(k), row(v), nullptr, 0};
      if (kvmeld_step(meld, 0, &request, 1, &in, out, n, nullptr, &error) != KVMELD_OK) {
        std::exit(1);
      }
    }
  };
  decode(0, full);
  count([&] { decode(full, full + tokens); });
  kvmeld_compressor_free(meld), kvmeld_cache_free(kv);
}

}  // namespace bench
