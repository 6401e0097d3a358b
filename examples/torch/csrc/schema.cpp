// torch.ops.kvfold: what there is, on any device.
#include <torch/library.h>

#include <string>
#include <vector>

#include "tensors.hpp"

namespace kvfold_torch {
namespace {

using text = std::string;

/// Of a policy: columns, floats of memory, the least budget, and whether it decodes, measures,
/// plans on queries, is bounded.
std::vector<std::int64_t> describe(const text& policy, std::int64_t dim, std::int64_t group,
                                   std::int64_t capacity) {
  return guarded([&]() -> std::vector<std::int64_t> {
    const auto& p = policy_of(policy, {});
    const auto small = [](const char* what, std::int64_t x) {
      kvfold::expects(x > 0 && x < 1'000'000'000, what, ": 1 to 1e9 expected, ", x, " came");
      return static_cast<index_t>(x);
    };
    return {p.column_count(),
            static_cast<std::int64_t>(
                p.memory(small("dim", dim), small("group", group), small("capacity", capacity))),
            p.min_budget(),
            p.decodes(),
            p.measures(),
            p.plans_on_queries(),
            p.bounded()};
  });
}

/// `[target, trigger]` of a head that holds at most `slots` between steps.
std::vector<std::int64_t> budget_within(const text& policy, std::int64_t slots) {
  return guarded([&]() -> std::vector<std::int64_t> {
    kvfold::expects(slots > 0 && slots < 1'000'000'000, "slots: 1 to 1e9 expected, ", slots,
                    " came");
    const auto b = kvfold::budget_within(policy_of(policy, {}), static_cast<index_t>(slots));
    return {b.target, b.trigger};
  });
}

}  // namespace

TORCH_LIBRARY(kvfold, m) {
  // `cache`: keys, values, log_mass, position, length, seen, columns, memory, measured.
  m.def(
      "compress(str policy, Tensor(a!)[] cache, Tensor? queries, int[] budget, *, int[] "
      "trigger=[], "
      "Tensor? positions=None, int before=0, int[]? heads=None, int group=1, float scale=0., "
      "float[] rope=[]) -> ()");
  m.def(
      "observe(str policy, Tensor(a!)[] cache, Tensor queries, *, Tensor? positions=None, "
      "int before=0, int[]? heads=None, int group=1, float scale=0., float[] rope=[]) -> ()");
  m.def(
      "observe_step(str policy, Tensor(a!)[] cache, Tensor probabilities, Tensor? "
      "log_sum_exp=None, "
      "Tensor? query=None, *, int group=1, float scale=0., float[] rope=[]) -> ()");
  m.def(
      "step(str policy, Tensor(a!)[] cache, Tensor q, Tensor k, Tensor v, int[] budget, *, "
      "int[] trigger=[], int[]? heads=None, int group=1, float scale=0., float[] rope=[]) -> "
      "Tensor");
  m.def(
      "attend(str policy, Tensor[] cache, Tensor q, *, bool probabilities=False, int group=1, "
      "float scale=0., float[] rope=[]) -> (Tensor, Tensor, Tensor)");
  m.def(
      "column_scores(Tensor[] cache, Tensor queries, *, Tensor? positions=None, int window=0, "
      "float decay=1., str combine='sum', int group=1, float scale=0.) -> Tensor");
  m.def(
      "plan(str policy, Tensor[] cache, int[] budget, *, Tensor? queries=None, "
      "Tensor? positions=None, int group=1, float scale=0., float[] rope=[]) -> Tensor[]");
  m.def(
      "apply(str policy, Tensor(a!)[] cache, Tensor[] plan, *, int[] budget=[], int group=1, float "
      "scale=0., "
      "float[] rope=[]) -> ()");
  m.def(
      "foresight(Tensor[] cache, Tensor queries, *, int count=256, int group=1, float[] rope=[]) "
      "-> "
      "(Tensor, Tensor)");
  m.def("describe(str policy, int dim, int group, int capacity) -> int[]", describe);
  m.def("budget_within(str policy, int slots) -> int[]", budget_within);
}

}  // namespace kvfold_torch
