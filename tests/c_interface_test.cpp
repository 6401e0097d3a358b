// SPDX-License-Identifier: MIT
// The C interface gives the C++ interface's bits: outputs, and all that is saved of a request.
// tests/c/interface.c has its functions and refusals.
#include <kvmeld.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <numbers>
#include <sstream>
#include <string>
#include <vector>

#include "kvmeld/peers.hpp"
#include "support/fixtures.hpp"

namespace c_interface_test {

using fixtures::normal;
using kvmeld::index_t;
using any = kvmeld::any_policy_or_peer;

constexpr index_t layers = 2, requests = 2, heads = 2, group = 2, dim = 64, tokens = 80, slots = 40,
                  capacity = 128;

kvmeld_attention_spec plain() {
  kvmeld_attention_spec spec{};
  spec.size = sizeof spec;
  spec.kv_heads = heads, spec.group = group, spec.key_dim = dim;
  return spec;
}
kvmeld::attention_spec plain_cpp() { return {.kv_heads = heads, .group = group, .key_dim = dim}; }

kvmeld_numbers floats(const std::vector<float>& x) { return {x.data(), x.size(), KVMELD_F32}; }

std::size_t write(void* to, const void* data, std::size_t size) {
  static_cast<std::string*>(to)->append(static_cast<const char*>(data), size);
  return size;
}

/// A cache and its compressor by each interface, which make the same calls.
class both {
 public:
  both(std::vector<kvmeld_attention_spec> c, const std::vector<kvmeld::attention_spec>& cpp,
       const std::string& policy, const kvmeld::budget& b, kvmeld::cache_options o = {})
      : kv_(cpp, options(o)), meld_(kv_, kvmeld::make_policy<any>(policy), b) {
    kvmeld_cache_options extents{};
    extents.size = sizeof extents;
    extents.layers = layers, extents.requests = requests, extents.capacity = capacity;
    extents.keys = static_cast<int>(o.keys), extents.values = static_cast<int>(o.values);
    extents.newest = o.newest;
    c_kv_ = kvmeld_cache_new(c.data(), c.size(), &extents, &error_);
    kvmeld_budget budget{};
    budget.size = sizeof budget;
    budget.slots = b.slots, budget.trigger = b.trigger, budget.slack = b.slack,
    budget.bytes = b.size;
    budget.sharing = b.is_shared ? KVMELD_SHARED : KVMELD_EACH;
    c_meld_ = kvmeld_compressor_new(c_kv_, policy.c_str(), &budget, KVMELD_STEP_ATTENDS, &error_);
    INFO(error_.message);
    REQUIRE(c_meld_ != nullptr);
  }
  both(const both&) = delete;
  both& operator=(const both&) = delete;
  ~both() { kvmeld_compressor_free(c_meld_), kvmeld_cache_free(c_kv_); }

  void prompt(index_t request, index_t count) {
    for (index_t layer = 0; layer < layers; ++layer) {
      rows(count);
      const auto of = kv_.heads(layer, request);
      kv_.append(of, k_, v_, count);
      meld_.prompt(of, kvmeld::queries(q_, count, kv_.spec()));
      kvmeld_queries queries{};
      queries.size = sizeof queries;
      queries.q = floats(q_), queries.tokens = count;
      REQUIRE_FALSE(
          kvmeld_append(c_kv_, layer, &request, 1, floats(k_), floats(v_), count, nullptr));
      REQUIRE_FALSE(kvmeld_prompt(c_meld_, layer, request, &queries, nullptr, nullptr));
    }
  }
  void end_prompt(index_t request) {
    meld_.end_prompt(request);
    REQUIRE_FALSE(kvmeld_end_prompt(c_meld_, request, nullptr, nullptr));
  }
  void copy(index_t from, index_t to) {
    meld_.copy(from, to);
    REQUIRE_FALSE(kvmeld_copy(c_meld_, to, c_meld_, from, nullptr));
  }
  void step(const std::vector<index_t>& active) {
    const auto count = static_cast<index_t>(active.size());
    for (index_t layer = 0; layer < layers; ++layer) {
      rows(count);
      meld_.step(kv_.heads(layer, active), {q_, k_, v_}, out_);
      const auto in = input();
      REQUIRE_FALSE(kvmeld_step(c_meld_, layer, active.data(), active.size(), &in, c_out_.data(),
                                c_out_.size(), nullptr, nullptr));
      CHECK(same_outputs());
    }
  }
  void draft(index_t request, index_t count, index_t accepted) {
    for (index_t layer = 0; layer < layers; ++layer) {
      rows(count);
      meld_.draft(kv_.heads(layer, request), {q_, k_, v_}, out_, count);
      const auto in = input();
      REQUIRE_FALSE(
          kvmeld_draft(c_meld_, layer, request, &in, count, c_out_.data(), c_out_.size(), nullptr));
      CHECK(same_outputs());
    }
    meld_.accept(request, accepted);
    REQUIRE_FALSE(kvmeld_accept(c_meld_, request, accepted, nullptr));
  }
  /// Rows, states, lengths, and what the model computes.
  void check_saved(index_t request) {
    std::ostringstream file;
    meld_.save(file, request);
    std::string c;
    REQUIRE_FALSE(kvmeld_save(c_meld_, request, write, &c, nullptr));
    CHECK(c.size() > 100);
    CHECK(c == file.str());
    std::size_t bytes = 0, reserved = 0;
    REQUIRE_FALSE(kvmeld_cache_bytes(c_kv_, &bytes, &reserved, nullptr));
    CHECK(bytes == kv_.bytes());
    CHECK(reserved == kv_.reserved_bytes());
    REQUIRE_FALSE(kvmeld_compressor_bytes(c_meld_, &bytes, &reserved, nullptr));
    CHECK(bytes == meld_.bytes());
    CHECK(reserved == meld_.reserved_bytes());
  }

 private:
  static kvmeld::cache_options options(kvmeld::cache_options o) {
    o.layers = layers, o.requests = requests, o.capacity = capacity;
    return o;
  }
  void rows(index_t count) {
    q_ = normal(count * heads * group * dim);
    k_ = normal(count * heads * dim), v_ = normal(count * heads * kv_.spec().value_dim);
    out_.assign(kvmeld::as_size(count * heads * group * kv_.spec().value_dim), 0);
    c_out_ = out_;
  }
  kvmeld_step_input input() const {
    kvmeld_step_input in{};
    in.size = sizeof in;
    in.q = floats(q_), in.k = floats(k_), in.v = floats(v_);
    return in;
  }
  bool same_outputs() const {
    return std::memcmp(out_.data(), c_out_.data(), out_.size() * sizeof(float)) == 0;
  }

  kvmeld::cache kv_;
  kvmeld::compressor<any> meld_;
  kvmeld_error error_ = {};
  kvmeld_cache* c_kv_ = nullptr;
  kvmeld_compressor* c_meld_ = nullptr;
  std::vector<float> q_, k_, v_, out_, c_out_;
};

TEST_CASE("C interface: every policy gives the C++ interface's bits", "[c]") {
  using kvmeld::storage;
  for (const any& policy : any::every()) {
    for (const auto& [keys, values, newest] :
         {std::tuple{storage::f32, storage::f32, 0}, {storage::k8, storage::q4_0, 16}}) {
      const std::string name(policy.name());
      CAPTURE(name, newest);
      both x({plain()}, {plain_cpp()}, name, budget_within(policy, slots),
             {.keys = keys, .values = values, .newest = newest});
      x.prompt(0, tokens / 2), x.prompt(0, tokens / 2);
      x.end_prompt(0);
      x.copy(0, 1);
      if (kvmeld::declared(policy).supports_decode()) {
        for (int t = 0; t < 12; ++t) {
          x.step({1, 0});
        }
        x.draft(0, 3, 2);
      }
      x.check_saved(0), x.check_saved(1);
    }
  }
}

TEST_CASE("C interface: what a model computes is said in full", "[c]") {
  using kvmeld::rotary;
  const bool in_bytes = GENERATE(false, true);
  kvmeld_attention_spec c = plain();
  kvmeld::attention_spec cpp = plain_cpp();
  const auto sinks = normal(heads * group), slopes = normal(heads * group);
  const std::vector<double> table(dim / 4, std::numbers::pi);
  SECTION("scale, cap, sinks, dims") {
    c.scale = cpp.scale = 0.3F, c.soft_cap = cpp.soft_cap = 30, c.value_dim = cpp.value_dim = 32;
    c.sink_logits = sinks.data(), cpp.sink_logits = sinks;
  }
  SECTION("slopes") { c.alibi_slopes = slopes.data(), cpp.alibi_slopes = slopes; }
  SECTION("interleaved, some dims, last") {
    c.rope = KVMELD_INTERLEAVED, c.rope_base = 500, c.rope_dims = 16, c.rope_last = 1;
    cpp.rope = rotary::interleaved(500).dims(16).last();
  }
  SECTION("linear") {
    c.rope = KVMELD_HALVES, c.rope_base = 500, c.rope_scaling = KVMELD_LINEAR, c.rope_factor = 4;
    cpp.rope = rotary::halves(500).linear(4);
  }
  SECTION("llama3, by default") {
    c.rope = KVMELD_HALVES, c.rope_base = 5e5, c.rope_scaling = KVMELD_LLAMA3, c.rope_factor = 32;
    cpp.rope = rotary::halves(5e5).llama3({.factor = 32});
  }
  SECTION("llama3") {
    c.rope = KVMELD_HALVES, c.rope_base = 5e5, c.rope_scaling = KVMELD_LLAMA3, c.rope_factor = 32;
    c.rope_low = 2, c.rope_high = 5, c.rope_context = 4096;
    cpp.rope =
        rotary::halves(5e5).llama3({.factor = 32, .low = 2, .high = 5, .original_context = 4096});
  }
  SECTION("yarn, by default") {
    c.rope = KVMELD_HALVES, c.rope_base = 1e4, c.rope_scaling = KVMELD_YARN, c.rope_factor = 4;
    cpp.rope = rotary::halves(1e4).yarn({.factor = 4});
  }
  SECTION("yarn") {
    c.rope = KVMELD_HALVES, c.rope_base = 1e4, c.rope_scaling = KVMELD_YARN, c.rope_factor = 4;
    c.rope_fast = 20, c.rope_slow = 2, c.rope_context = 2048, c.rope_parts_of_pairs = 1;
    cpp.rope = rotary::halves(1e4).yarn(
        {.factor = 4, .original_context = 2048, .fast = 20, .slow = 2, .truncate = false});
  }
  SECTION("a table") {
    c.rope = KVMELD_INTERLEAVED, c.rope_table = table.data(), c.rope_table_count = table.size();
    cpp.rope = rotary::table(table, rotary::pairing::interleaved);
  }
  // The second layer has a window.
  kvmeld_attention_spec c_window = c;
  kvmeld::attention_spec cpp_window = cpp;
  c_window.window = cpp_window.window = 24;
  both x({c, c_window}, {cpp, cpp_window}, "h2o:recent=0.3",
         in_bytes ? kvmeld::budget::shared_bytes(20'000, /*slack=*/8)
                  : kvmeld::budget::shared(slots, /*slack=*/8));
  x.prompt(1, tokens);
  x.end_prompt(1);
  for (int t = 0; t < 12; ++t) {
    x.step({1});
  }
  x.check_saved(1);
}

}  // namespace c_interface_test
