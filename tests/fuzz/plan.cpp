// SPDX-License-Identifier: MIT
// Plans of anything: refused by check, and then by apply with nothing changed; or carried out, to
// the rows that two loops in double make of them.
#include <cmath>
#include <limits>

#include "bytes.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/merge/apply.hpp"
#include "support/placed.hpp"
#include "support/typed_cache.hpp"

namespace {

using kvmeld::index_t;

constexpr index_t dim = 3, capacity = 12;

std::vector<float> everything(const fixtures::head_view<float>& head) {
  std::vector<float> all;
  all.reserve(static_cast<std::size_t>(capacity * (2 * dim + 2)));
  for (index_t s = 0; s < head.length(); ++s) {
    all.insert(all.end(), head.key(s).data, head.key(s).data + dim);
    all.insert(all.end(), head.value(s).data, head.value(s).data + dim);
    all.insert(all.end(), {head.log_mass(s), static_cast<float>(head.position(s))});
  }
  return all;
}

/// Does `call` refuse, with nothing changed?
bool refused(const fixtures::head_view<float>& head, const auto& call) {
  const auto before = everything(head);
  try {
    call();
    return false;
  } catch (const kvmeld::error&) {
    fuzz::must(fuzz::same(everything(head), before), "nothing changed when refused");
    return true;
  }
}

/// The keys of `plan`'s rows (`values`: the values) as it says, before it is carried out: what is
/// summed, and the sum of the terms' sizes. `[rows, dim]`
struct expected_rows {
  std::vector<double> sum, size;
  std::vector<index_t> slot;  // [rows]

  expected_rows(const kvmeld::merge_plan& plan, const fixtures::head_view<float>& head, bool values)
      : slot(fixtures::placed(plan)) {
    for (index_t r = 0; r < plan.rows(); ++r) {
      const auto delta = values ? plan.value_correction(r) : plan.key_correction(r);
      for (index_t i = 0; i < dim; ++i) {
        double x = delta.empty() ? 0.0 : double{delta[static_cast<std::size_t>(i)]};
        double all = std::abs(x);
        for (const kvmeld::merge_source& e : plan.row(r)) {
          const auto row = values ? head.value(e.source) : head.key(e.source);
          const double term = double{values ? e.value_weight : e.key_weight} * double{row[i]};
          x += term, all += std::abs(term);
        }
        sum.push_back(x), size.push_back(all);
      }
    }
  }
  void hold(const fixtures::head_view<float>& head, bool values) const {
    for (std::size_t n = 0; n < sum.size(); ++n) {
      const index_t s = slot[n / dim], i = static_cast<index_t>(n) % dim;
      const double x = values ? head.value(s)[i] : head.key(s)[i];
      // Terms that are no numbers, or overflow in float, promise nothing.
      const bool tame = size[n] < double{std::numeric_limits<float>::max()} / 2;
      fuzz::must(!tame || std::abs(x - sum[n]) <= 1e-5 * size[n] + 1e-37, "the plan's rows");
    }
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::bytes in(data, size);
  fixtures::cache<float> kv{{.heads = 1, .dim = dim, .capacity = capacity}};
  const auto head = kv.head(0);
  for (int t = in.below(capacity + 1); t > 0; --t) {
    const auto x = static_cast<float>(t);
    kv.append(0, std::vector<float>{x, 2, -3 * x}, std::vector<float>{1 / x, x * x, 5 - x});
  }
  const kvmeld::slot_stat columns[] = {{kvmeld::slot_reduce::sum, 1}};
  kvmeld::head_state state(columns, 0, capacity);
  kvmeld::merge_plan plan;
  plan.reset(in.below(4) == 0 ? static_cast<index_t>(in.next<std::int8_t>()) : head.length());
  while (!in.empty()) {
    switch (in.below(7)) {
      case 0:
        plan.end_row(in.number());
        break;
      case 1:
        refused(head, [&] { plan.correct_values(in.numbers(plan.rows() * dim), dim); });
        break;
      case 2:
        refused(head, [&] { plan.correct_keys(in.numbers(in.below(40)), in.below(5)); });
        break;
      case 3:
        plan.keep(in.below(capacity), in.number());
        break;
      default:
        plan.add({static_cast<index_t>(in.next<std::int8_t>() % 16), in.number(), in.number()});
    }
  }
  const bool lawful = !refused(head, [&] { check(plan); });
  std::vector<index_t> positions;
  std::vector<expected_rows> expected;  // of keys, of values
  if (lawful && plan.length() == head.length()) {
    for (index_t r = 0; r < plan.rows(); ++r) {
      positions.push_back(head.position(plan.anchor(r)));
    }
    const auto of_head = [&](index_t correction) { return correction == 0 || correction == dim; };
    if (of_head(plan.key_dim()) && of_head(plan.value_dim())) {
      expected = {{plan, head, false}, {plan, head, true}};
    }
  }
  if (refused(head, [&] { apply(plan, head, state); })) {
    fuzz::must(!lawful || plan.length() != head.length() || plan.key_dim() != dim ||
                   plan.value_dim() != dim,
               "lawful, not refused");
  } else {
    fuzz::must(lawful && head.length() == plan.rows() && state.length() == plan.rows(), "rows");
    const auto slot = fixtures::placed(plan);
    for (index_t r = 0; r < plan.rows(); ++r) {
      const index_t s = slot[static_cast<std::size_t>(r)];
      fuzz::must(head.log_mass(s) == plan.log_mass(r), "log-mass");  // finite: it was checked
      fuzz::must(head.position(s) == positions[static_cast<std::size_t>(r)], "positions");
    }
    expected.at(0).hold(head, false), expected.at(1).hold(head, true);
  }
  return 0;
}
