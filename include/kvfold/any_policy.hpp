/// A policy chosen at run time, so that every head of every layer may have its own.
#pragma once

#include <string_view>
#include <utility>  // std::forward
#include <variant>
#include <vector>

#include "kvfold/policies/attention_matching.hpp"
#include "kvfold/policies/cam.hpp"
#include "kvfold/policies/centroids.hpp"
#include "kvfold/policies/compactor.hpp"
#include "kvfold/policies/d2o.hpp"
#include "kvfold/policies/ems.hpp"
#include "kvfold/policies/expected_attention.hpp"
#include "kvfold/policies/fold.hpp"
#include "kvfold/policies/full_cache.hpp"
#include "kvfold/policies/h2o.hpp"
#include "kvfold/policies/keepkv.hpp"
#include "kvfold/policies/key_diff.hpp"
#include "kvfold/policies/kvmerger.hpp"
#include "kvfold/policies/random_tokens.hpp"
#include "kvfold/policies/roco.hpp"
#include "kvfold/policies/scissorhands.hpp"
#include "kvfold/policies/snapkv.hpp"
#include "kvfold/policies/streaming_llm.hpp"
#include "kvfold/policies/tova.hpp"
#include "kvfold/policies/zsmerge.hpp"

namespace kvfold {

/// One of `Policies`, itself a policy. Each call is one `std::visit` per head, none per slot.
template <policy... Policies>
class basic_any_policy {
 public:
  template <class P>
  requires(std::same_as<P, Policies> || ...) basic_any_policy(P p)
      : policy_(std::move(p)) {}  // NOLINT: a policy is one of the alternatives

  /// One of each, with its default parameters.
  static std::vector<basic_any_policy> every() { return {Policies{}...}; }

  std::string_view name() const {
    return visit([](const auto& p) { return std::string_view(p.name()); });
  }
  std::vector<column> columns() const {
    return visit([](const auto& p) {
      const auto columns = traits::columns(p);
      return std::vector<column>(columns.begin(), columns.end());
    });
  }
  index_t column_count() const {
    return visit([](const auto& p) { return traits::column_count(p); });
  }
  std::size_t memory(index_t dim, index_t group, index_t capacity) const {
    return visit([&](const auto& p) { return traits::memory(p, dim, group, capacity); });
  }
  index_t least() const {
    return visit([](const auto& p) { return traits::least(p); });
  }
  index_t slack(index_t slots) const {
    return visit([&](const auto& p) { return traits::slack(p, slots); });
  }
  void validate() const {
    visit([](const auto& p) { traits::validate(p); });
  }
  group_combine combine() const {
    return visit([](const auto& p) { return traits::combine(p); });
  }
  bool bounded() const {
    return visit([](const auto& p) { return traits::bounded(p); });
  }
  bool decodes() const {
    return visit([](const auto& p) { return traits::decodes(p); });
  }
  bool measures() const {
    return visit([](const auto& p) { return traits::measures(p); });
  }
  bool plans_on_queries() const {
    return visit([](const auto& p) { return traits::plans_on_queries(p); });
  }

  void observe(const kv_head auto& head, head_state& state, const observation& seen) const {
    visit([&](const auto& p) { traits::observe(p, head, state, seen); });
  }
  template <class T>
  void observe(const kv_head auto& head, head_state& state, const query_view<T>& queries) const {
    visit([&](const auto& p) { traits::observe(p, head, state, queries); });
  }
  void plan(const kv_head auto& head, const head_state& state, index_t target,
            merge_plan& out) const {
    visit([&](const auto& p) { p.plan(head, state, target, out); });
  }
  template <class T>
  void plan(const kv_head auto& head, const head_state& state, const query_view<T>& queries,
            index_t target, merge_plan& out) const {
    visit([&](const auto& p) { traits::plan(p, head, state, queries, target, out); });
  }
  void ask(const kv_head auto& head, head_state& state, index_t target, probe& look) const {
    visit([&](const auto& p) { traits::ask(p, head, state, target, look); });
  }
  bool leaving(const kv_head auto& head, const head_state& state, index_t target, departure& out,
               const probe& seen = {}) const {
    return visit([&](const auto& p) { return traits::leaving(p, head, state, target, out, seen); });
  }
  template <class Change>
  void carry(const kv_head auto& head, head_state& state, const Change& change) const {
    visit([&](const auto& p) { traits::carry(p, head, state, change); });
  }
  void settle(const kv_head auto& head, head_state& state, index_t target) const {
    visit([&](const auto& p) { traits::settle(p, head, state, target); });
  }

  void attend(const kv_head auto& head, const head_state& state, const float* q, float* out,
              std::span<float> probabilities, std::span<float> log_sum_exp,
              probe* look = nullptr) const {
    visit([&](const auto& p) {
      traits::attend(p, head, state, q, out, probabilities, log_sum_exp, look);
    });
  }

  /// `f` is called with the policy inside.
  template <class F>
  decltype(auto) visit(F&& f) const {
    return std::visit(std::forward<F>(f), policy_);
  }
  template <class F>
  decltype(auto) visit(F&& f) {
    return std::visit(std::forward<F>(f), policy_);
  }

 private:
  std::variant<Policies...> policy_;
};

/// Every policy of the library, and `Own`: policies of one's own.
template <policy... Own>
using any_policy_with =
    basic_any_policy<full_cache, streaming_llm, h2o, snapkv, zsmerge, d2o, kvmerger, ems, keepkv,
                     attention_matching, fold, random_tokens, tova, roco, scissorhands, key_diff,
                     expected_attention, centroids, compactor, cam, Own...>;

using any_policy = any_policy_with<>;

static_assert(policy<any_policy>);

}  // namespace kvfold
