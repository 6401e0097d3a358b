// SPDX-License-Identifier: MIT
// A policy of one's own under the adapter: it is shown all that there is of every token.
#include <catch2/catch.hpp>

#include "kvmeld/search/select.hpp"
#include "llama_cpp/files.hpp"

namespace own_policy_test {

using namespace test;
using kvmeld::llama::mode;

/// Keeps the latest tokens, and holds what it is shown to what head and query say.
struct onlooker {
  index_t* shown;    ///< tokens, of all heads
  double* farthest;  ///< from its own logits' log-sum-exp and probabilities

  static constexpr std::string_view name() { return "onlooker"; }

  void observe(const kvmeld::kv_head auto& head, kvmeld::head_state&,
               const kvmeld::observation& observed) const {
    ++*shown;
    const index_t n = head.length();
    std::vector<double> logits(static_cast<std::size_t>(n));
    for (index_t g = 0; g < head.group(); ++g) {
      double sum = 0;
      for (index_t s = 0; s < n; ++s) {
        double dot = 0;
        for (index_t i = 0; i < head.dim(); ++i) {
          dot += double{observed.query[g * head.dim() + i]} * static_cast<float>(head.key(s)[i]);
        }
        sum += std::exp(logits[static_cast<std::size_t>(s)] = head.scale() * dot);
      }
      const double whole = std::log(sum);
      const auto i = static_cast<std::size_t>(g);
      *farthest = std::max(*farthest, std::abs(whole - observed.log_sum_exp[i]));
      for (std::size_t s = 0; s < logits.size(); ++s) {
        const double p = observed.probabilities[i * logits.size() + s];
        *farthest = std::max(*farthest, std::abs(std::exp(logits[s] - whole) - p));
      }
    }
  }
  void plan(const kvmeld::kv_head auto& head, const kvmeld::head_state&, index_t target,
            kvmeld::slot_scratch& work, kvmeld::merge_plan& out) const {
    kvmeld::search::select(
        head.length(), target, [](index_t) { return false; },
        [&](index_t s) { return kvmeld::rank(static_cast<float>(head.position(s))); }, work);
    kvmeld::merge::keep_marked(head, work, out);
  }
};

TEST_CASE("llama.cpp: a policy of one's own is shown probabilities, log-sum-exp and queries") {
  twin models;
  const auto text = draw_tokens(192, models.shape.vocab);
  for (const mode how : {mode::repack, mode::own_attention}) {
    index_t shown = 0;
    double farthest = 0;
    kvmeld::llama::compressor kv(models.theirs.get(), onlooker{&shown, &farthest},
                                 {.how = how, .limits = {{.slots = 96}}});
    auto parameters = exact_parameters(256, 64);
    kv.attach(parameters);
    const llama_context_ptr context(llama_init_from_model(models.theirs.get(), parameters));
    REQUIRE(context != nullptr);
    kv.bind(context.get());
    for (index_t at = 0; at < 192; at += 64) {
      decode(context.get(), std::span(text).subspan(static_cast<std::size_t>(at), 64), at);
      kv.check();
    }
    CHECK(shown == 192 * 4);  // two layers of two KV heads
    CHECK(farthest < 1e-4);
    CHECK(kv.report().slots == 96);
  }
}

}  // namespace own_policy_test
