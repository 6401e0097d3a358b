// SPDX-License-Identifier: MIT
// What a model computes and the kernels do not is refused by name.
#include <catch2/catch.hpp>
#include <string>
#include <string_view>

#include "cuda/order.hpp"
#include "kvmeld/cuda/attend.cuh"
#include "kvmeld/cuda/policies/ems.cuh"
#include "kvmeld/cuda/policies/evicting_rules.cuh"
#include "kvmeld/cuda/policies/fold.cuh"
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
  kvmeld::cuda::cache_view<float> kv;
  kv.heads = 2, kv.capacity = 16, kv.dim = 8, kv.spec = &plain;
  CHECK(workspace_bytes(oldest{}, kv, 8) > 0);
  const auto refuses = [&](const auto& policy, const std::string& message) {
    INFO(message);
    try {
      (void)workspace_bytes(policy, kv, 8);
      FAIL("not refused");
    } catch (const kvmeld::error& e) {
      CHECK_THAT(e.what(), Catch::Contains(message));
      return e.code();
    }
    return kvmeld::errc{};
  };
  const auto refuses_model = [&](const std::string& what, auto change) {
    kvmeld::attention_spec spec = plain;
    change(spec);
    kv.spec = &spec;
    CHECK(refuses(oldest{},
                  "cuda: expected no " + what + " (not carried out by the kernels), got one") ==
          kvmeld::errc::unsupported);
  };
  float x = 0;
  kvmeld::index_t n = 0;
  kv.keys.data = kv.values.data = kv.log_mass = &x, kv.position = kv.length = kv.next_position = &n;
  refuses_model("alibi_slopes", [](auto& s) { s.alibi_slopes = {1, 0.5F}; });
  refuses_model("window", [](auto& s) { s.window = 512; });
  refuses_model("value_dim other than key_dim", [](auto& s) { s.value_dim = 4; });

  kvmeld::attention_spec spec = plain;
  kv.spec = &spec;
  const auto refuses_terms = [&](const std::string& what) {
    CHECK(refuses(kvmeld::ems{}, "no " + what + " (not carried out by ems kernels), got one") ==
          kvmeld::errc::unsupported);
    CHECK(refuses(kvmeld::fold{}, "no " + what + " (not carried out by fold kernels), got one") ==
          kvmeld::errc::unsupported);
    CHECK(workspace_bytes(oldest{}, kv, 8) > 0);
  };
  spec.soft_cap = 30;
  refuses(oldest{}, "attention_spec's soft_cap and sink_logits, 30 and none, got 0 and none");
  kv.soft_cap = {30, kv.scale};
  refuses_terms("soft_cap");
  spec.soft_cap = 0, kv.soft_cap = {};
  spec.sink_logits = {0, 0};
  refuses(oldest{}, "soft_cap and sink_logits, 0 and some, got 0 and none");
  kv.sink_logits = &x;
  refuses_terms("sink_logits");
  spec.sink_logits = {}, kv.sink_logits = nullptr;
  spec.group = kv.group = 17;
  refuses_terms("group above 16");
  kv.soft_cap = {30, 2 * kv.scale};
  CHECK_THROWS_WITH(attend(kv, &x, &x, nullptr, {}, kvmeld::cuda::order()),
                    Catch::Contains("expected a soft_cap above 0 with the cache's scale, got 30"));
}

}  // namespace parity_refused_models_test
