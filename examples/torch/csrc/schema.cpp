// SPDX-License-Identifier: MIT
#include "schema.hpp"

#include <vector>

#include "arguments.hpp"
#include "kvmeld/memory/make_storage.hpp"
#include "operators.hpp"
#include "tensors.hpp"

namespace kvmeld_torch {
namespace {

/// Of a policy: columns, floats of memory, whether it decodes, whether it is bounded.
std::vector<std::int64_t> describe(const text& policy, std::int64_t dim, std::int64_t group,
                                   std::int64_t capacity) {
  return guarded([&]() -> std::vector<std::int64_t> {
    const auto& p = policy_of(policy);
    return {static_cast<std::int64_t>(kvmeld::declared(p).slot_stats().size()),
            static_cast<std::int64_t>(kvmeld::declared(p).memory(
                positive("dim", dim), positive("group", group), positive("capacity", capacity))),
            kvmeld::declared(p).supports_decode(), kvmeld::declared(p).evicts()};
  });
}

/// `[target, trigger]` of a head that holds at most `slots` between steps. Refused: fewer than the
/// policy can do with.
std::vector<std::int64_t> budget_within(const text& policy, std::int64_t slots) {
  return guarded([&]() -> std::vector<std::int64_t> {
    const auto& p = policy_of(policy);
    const index_t n = positive("slots", slots);
    kvmeld::check(p, {n}, n);
    const auto b = kvmeld::budget_within(p, n);
    return {b.slots, b.trigger};
  });
}

/// What rows of a storage take, by its text: bytes of a key and of a value, and of each head rows
/// in half and numbers of its keys' mean.
std::vector<std::int64_t> row_sizes(const text& rows, std::int64_t dim, std::int64_t value_dim) {
  return guarded([&]() -> std::vector<std::int64_t> {
    const auto type = kvmeld::make_storage(rows);
    const index_t of_key = positive("dim", dim), of_value = positive("dim", value_dim);
    return {static_cast<std::int64_t>(row_bytes(type.keys, of_key)),
            static_cast<std::int64_t>(row_bytes(type.values, of_value)),
            kvmeld::rows_in_half(type.newest), is_centred(type.keys) ? dim : 0};
  });
}

/// Of a slot that nothing was observed of, a number for each of the policy's columns.
std::vector<double> initial_columns(const text& policy) {
  return guarded([&] {
    std::vector<double> all;
    for (const auto& column : kvmeld::declared(policy_of(policy)).slot_stats()) {
      all.push_back(double{column.initial});
    }
    return all;
  });
}

}  // namespace

void declare(torch::Library& m) {
  // `cache`: keys, values, log_mass, position, length, seen, columns, memory, measured. Packed,
  // each head has its own capacity, the last number of its row of measured [heads, 4], and all have
  // their places in a row: keys and values [places, dim], log_mass and position [places], columns
  // [columns * places], of which each head's are [columns, its capacity]. On a GPU
  // keys and values may lie in an engine's pages [pages, slots, heads of a sequence, dim]; heads
  // are those of all sequences then, the capacity is a row of the table [sequences, pages of each]
  // in int32, which takes the place of measured. On the CPU rows may be in few bits: keys and
  // values are bytes then, and four tensors more have newest_keys and newest_values [heads, rows in
  // half, dim], key_mean [heads, dim, or 0 where keys are held as they are] in half, rounded
  // [heads] in int32. `terms`: what a model's attention has beside group and scale (`read_terms`),
  // on the CPU. `places`: heads in int32 on a GPU, -1 for none, which a graph reads when it is
  // replayed.
  m.def(
      "compress(str policy, Tensor(a!)[] cache, Tensor? queries, int[] budget, *, int[] "
      "trigger=[], Tensor? positions=None, int group=1, float scale=0., Tensor? terms=None) -> ()");
  m.def(
      "shared_scores(str policy, Tensor(a!)[] cache, *, int group=1, float scale=0., Tensor? "
      "terms=None) -> Tensor");
  m.def(
      "convert(Tensor(a!)[] to, Tensor[] cache, *, int group=1, float scale=0., Tensor? "
      "terms=None) -> ()");
  m.def("divide(str policy, Tensor scores, int slots) -> int[]");
  m.def(
      "observe(str policy, Tensor(a!)[] cache, Tensor queries, *, int before=0, int group=1, "
      "float scale=0., Tensor? terms=None) -> (Tensor, Tensor)");
  m.def(
      "observe_step(str policy, Tensor(a!)[] cache, Tensor probabilities, Tensor? "
      "log_sum_exp=None, Tensor? query=None, *, int group=1, float scale=0., Tensor? terms=None) "
      "-> ()");
  m.def(
      "step(str policy, Tensor(a!)[] cache, Tensor q, Tensor k, Tensor v, int[] budget, *, "
      "int[] trigger=[], int[]? heads=None, int group=1, float scale=0., Tensor? terms=None, "
      "Tensor? places=None) -> Tensor");
  m.def(
      "attend(str policy, Tensor[] cache, Tensor q, *, bool probabilities=False, int group=1, "
      "float scale=0., Tensor? terms=None) -> (Tensor, Tensor, Tensor)");
  m.def("describe(str policy, int dim, int group, int capacity) -> int[]", describe);
  m.def("row_sizes(str rows, int dim, int value_dim) -> int[]", row_sizes);
  m.def("initial_columns(str policy) -> float[]", initial_columns);
  m.def("budget_within(str policy, int slots) -> int[]", budget_within);
}

}  // namespace kvmeld_torch
