// SPDX-License-Identifier: MIT
// What a model computes and the kernels do not is refused by name.
#include <catch2/catch.hpp>
#include <string>
#include <string_view>

#include "kvmeld/cuda/policies/evicting_rules.cuh"
#include "kvmeld/cuda/workspace.cuh"
#include "kvmeld/memory/attention_spec.hpp"

namespace parity_refused_models_test {

struct oldest {
  static constexpr std::string_view name() { return "oldest"; }
};

}  // namespace parity_refused_models_test

template <>
struct kvmeld::cuda::device_policy<parity_refused_models_test::oldest>
    : kvmeld::cuda::evicting_policy {
  static sum_rule rule(const parity_refused_models_test::oldest&, const attention_spec&) {
    return {};
  }
};

namespace parity_refused_models_test {

TEST_CASE("kernels refuse by name what they do not compute", "[errors]") {
  const kvmeld::attention_spec plain =
      kvmeld::attention_spec{.kv_heads = 2, .key_dim = 8}.checked();
  const auto bytes = [](const kvmeld::attention_spec& spec) {
    kvmeld::cuda::cache_view<float> kv;
    kv.heads = 2, kv.capacity = 16, kv.dim = 8, kv.spec = &spec;
    return kvmeld::cuda::workspace_bytes(oldest{}, kv, 8);
  };
  CHECK(bytes(plain) > 0);
  const auto refuses = [&](const std::string& what, auto change) {
    kvmeld::attention_spec spec = plain;
    change(spec);
    INFO(what);
    try {
      (void)bytes(spec);
      FAIL("not refused");
    } catch (const kvmeld::error& e) {
      CHECK(e.code() == kvmeld::errc::unsupported);
      CHECK_THAT(e.what(), Catch::Contains("cuda: expected no " + what +
                                           " (not carried out by the kernels), got one"));
    }
  };
  refuses("soft_cap", [](auto& s) { s.soft_cap = 30; });
  refuses("sink_logits", [](auto& s) { s.sink_logits = {0, 0}; });
  refuses("alibi_slopes", [](auto& s) { s.alibi_slopes = {1, 0.5F}; });
  refuses("window", [](auto& s) { s.window = 512; });
  refuses("value_dim other than key_dim", [](auto& s) { s.value_dim = 4; });
}

}  // namespace parity_refused_models_test
