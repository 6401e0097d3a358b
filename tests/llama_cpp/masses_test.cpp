// SPDX-License-Identifier: MIT
// Log-mass and holes in the engine's logits, capped or not, against the library's own attention.
#include "llama_cpp/masses.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <random>

#include "llama_cpp/files.hpp"

namespace masses_test {

using namespace test;

TEST_CASE("llama.cpp: edited logits give the probabilities and log-sum-exp of kvmeld's attention") {
  constexpr index_t slots = 6, cells = 10, group = 2, dim = 16;
  const std::vector<index_t> table = {7, 2, 5, 0, 8, 4}, entries = {7, 2, 5, 0, 8, 4, 3, 6};
  std::mt19937 bits(9);
  std::normal_distribution<float> normal;
  for (const float cap : {0.0F, 1.5F, 30.0F}) {
    for (const bool sinks : {false, true}) {
      CAPTURE(cap, sinks);
      kvmeld::cache kv({.kv_heads = 1,
                        .group = group,
                        .key_dim = dim,
                        .scale = 0.5F,
                        .soft_cap = cap,
                        .sink_logits = sinks ? std::vector{0.5F, -1.0F} : std::vector<float>{}},
                       {.layers = 1, .capacity = slots});
      std::vector<float> k(slots * dim), v(k.size()), q(group * dim), out(q.size());
      for (auto* const rows : {&k, &v, &q}) {
        for (float& x : *rows) {
          x = normal(bits);
        }
      }
      kv.append(kv.heads(0, 0), k, v, slots);
      const auto head = kv.head(0);
      for (index_t s = 0; s < slots; ++s) {
        head.log_mass(s) = s % 2 == 0 ? 0.0F : 0.3F * static_cast<float>(s);
      }
      std::vector<float> wanted(group * slots), wanted_sum(group);
      kvmeld::attend(head, kvmeld::log_mass_of(head), q.data(), out.data(), wanted, wanted_sum);

      // The engine's logits, before the softmax's own factor: fresh cells and holes have some too.
      const float factor = cap > 0 ? 0.25F : head.scale();
      ggml_context* const memory = ggml_init({std::size_t{1} << 16, nullptr, false});
      ggml_tensor* const logits = ggml_new_tensor_3d(memory, GGML_TYPE_F32, cells, 1, group);
      for (index_t g = 0; g < group; ++g) {
        for (index_t cell = 0; cell < cells; ++cell) {
          *kvmeld::llama::element(logits, cell, 0, g) = 0.5F;
        }
        for (index_t s = 0; s < slots; ++s) {
          float dot = 0;
          for (index_t i = 0; i < dim; ++i) {
            dot +=
                q[static_cast<std::size_t>(g * dim + i)] * k[static_cast<std::size_t>(s * dim + i)];
          }
          *kvmeld::llama::element(logits, table[static_cast<std::size_t>(s)], 0, g) =
              cap > 0 ? cap / factor * std::tanh(head.scale() * dot / cap) : dot;
        }
      }
      const kvmeld::h2o p;
      const kvmeld::head_state state = kvmeld::make_head_state(p, head);
      CHECK(kvmeld::llama::has_mass(p, head, state));
      kvmeld::llama::edit_logits(p, head, state, table.data(), entries, logits, factor, 0);
      std::vector<float> got(group * slots), sum(group);
      for (index_t g = 0; g < group; ++g) {
        const auto x = [&](index_t cell) { return *kvmeld::llama::element(logits, cell, 0, g); };
        CHECK((x(3) == -INFINITY && x(6) == -INFINITY));
        CHECK((x(1) == 0.5F && x(9) == 0.5F));
        double all = sinks ? std::exp(double{head.of_group(head.spec().sink_logits)[g]}) : 0;
        for (const index_t cell : table) {
          all += std::exp(double{factor} * x(cell));
        }
        for (index_t s = 0; s < slots; ++s) {
          const auto i = static_cast<std::size_t>(g * slots + s);
          got[i] = static_cast<float>(
              std::exp(double{factor} * x(table[static_cast<std::size_t>(s)])) / all);
          CHECK(got[i] == Approx(wanted[i]).margin(1e-5));
        }
      }
      kvmeld::llama::log_sum_exp_of(p, head, state, got.data(), slots, q.data(), sum.data());
      for (std::size_t g = 0; g < group; ++g) {
        CHECK(sum[g] == Approx(wanted_sum[g]).margin(1e-4));
      }
      ggml_free(memory);
    }
  }
}

}  // namespace masses_test
