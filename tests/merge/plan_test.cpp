// SPDX-License-Identifier: MIT
// The core abstraction: the laws of merge_plan, and that `apply` in place makes of a head what the
// dense matrices of the oracle make of it, touching nothing else.
#include <catch2/catch.hpp>
#include <cstring>

#include "support/fixtures.hpp"
#include "support/placed.hpp"

namespace plan_test {

using fixtures::random_bits;
using fixtures::to_oracle;
using kvmeld::head_state;
using kvmeld::index_t;
using kvmeld::merge_plan;
using kvmeld::merge_source;
using kvmeld::slot_reduce;

std::size_t at(index_t i) { return static_cast<std::size_t>(i); }
index_t below(index_t n) { return std::uniform_int_distribution<index_t>(0, n - 1)(random_bits()); }

/// Rounding to storage, once: half a unit in the last place; float: a few dozen additions.
template <class Scalar>
constexpr double tolerance = std::same_as<Scalar, float>         ? 1e-5
                             : std::same_as<Scalar, Eigen::half> ? 0x1.01p-11
                                                                 : 0x1.01p-8;

/// A slot's keys and values, to the bit.
template <class Scalar>
std::vector<Scalar> row_of(const fixtures::head_view<Scalar>& head, index_t s) {
  std::vector<Scalar> row;
  for (index_t i = 0; i < head.dim(); ++i) {
    row.insert(row.end(), {head.key(s)[i], head.value(s)[i]});
  }
  return row;
}

/// A state with one column of each fold, full of numbers.
head_state numbered_state(index_t length, index_t capacity) {
  const kvmeld::slot_stat kinds[] = {
      {slot_reduce::sum}, {slot_reduce::max}, {slot_reduce::anchor, 7}};
  head_state state(kinds, 0, capacity);
  state.extend(length);
  for (index_t c = 0; c < state.slot_stats(); ++c) {
    const auto numbers = fixtures::normal(length);
    std::copy(numbers.begin(), numbers.end(), state.column(c).begin());
  }
  return state;
}

/// A lawful plan: slots dealt at random to `rows` rows and to nowhere (`dropped`: the share), every
/// row's anchor any of its slots; weights of all sorts.
merge_plan random_plan(index_t length, index_t rows, double dropped, bool weighted = true) {
  std::vector<std::vector<index_t>> dealt(at(rows));
  const index_t sure = below(length);
  for (index_t s = 0; s < length; ++s) {
    if (s == sure || !std::bernoulli_distribution(dropped)(random_bits())) {
      dealt[at(below(rows))].push_back(s);
    }
  }
  std::erase_if(dealt, [](const auto& row) { return row.empty(); });
  for (auto& row : dealt) {
    std::ranges::shuffle(row, random_bits());
  }
  std::ranges::sort(dealt, {}, [](const auto& row) { return row[0]; });
  const float weights[] = {1, 1, 0, -0.5F, 0.3F, 2};
  merge_plan plan;
  plan.reset(length);
  for (const auto& row : dealt) {
    for (const index_t s : row) {
      plan.add(weighted ? merge_source{s, weights[below(6)], weights[below(6)]} : merge_source{s});
    }
    plan.end_row(fixtures::normal(1)[0]);
  }
  return plan;
}

/// The hard shapes of a plan for `length` slots.
std::vector<merge_plan> plans_for(index_t length, index_t dim) {
  std::vector plans = {
      random_plan(length, length, 0, false),
      random_plan(length, length, 0.3),
      random_plan(length, 1, 0),          // many members in a row
      random_plan(length, 1, 1),          // all dropped but one
      random_plan(length, length, 0.5),   // rows of about one, with weights of their own
      random_plan(length, 3, 0.1),        // a few rows of many
      random_plan(length, 5 * length, 0)  // nothing dropped, hardly anything merged
  };
  plans[1].correct_values(fixtures::normal(plans[1].rows() * dim), dim);
  return plans;
}

oracle::dense_plan dense_of(const merge_plan& plan) {
  std::vector<oracle::plan_row> rows;
  for (index_t r = 0; r < plan.rows(); ++r) {
    rows.push_back({{}, static_cast<double>(plan.log_mass(r))});
    for (const merge_source& e : plan.row(r)) {
      rows.back().sources.push_back(
          {e.source, static_cast<double>(e.key_weight), static_cast<double>(e.value_weight)});
    }
  }
  oracle::mat correction;
  for (index_t r = 0; !plan.value_corrections().empty() && r < plan.rows(); ++r) {
    const auto delta = plan.value_correction(r);
    correction.emplace_back(delta.begin(), delta.end());
  }
  return oracle::dense(rows, plan.length(), correction);
}

/// A row's column: all of its sources folded, by the definition.
std::vector<std::vector<float>> folded_columns(const head_state& state, const merge_plan& plan) {
  std::vector<std::vector<float>> all;
  for (index_t c = 0; c < state.slot_stats(); ++c) {
    all.emplace_back();
    for (index_t r = 0; r < plan.rows(); ++r) {
      float x = state.column(c)[at(plan.anchor(r))];
      for (const merge_source& e : plan.row(r).subspan(1)) {
        const float y = state.column(c)[at(e.source)];
        x = state.reduce(c) == slot_reduce::sum   ? x + y
            : state.reduce(c) == slot_reduce::max ? std::max(x, y)
                                                  : x;
      }
      all.back().push_back(x);
    }
  }
  return all;
}

/// Everything that a slot is, to the bit.
template <class Head>
auto slot_of(const Head& head, const head_state& state, index_t s) {
  std::vector<float> columns{head.log_mass(s), static_cast<float>(head.position(s))};
  for (index_t c = 0; c < state.slot_stats(); ++c) {
    columns.push_back(state.column(c)[at(s)]);
  }
  return std::pair(row_of(head, s), columns);
}

/// LAWS: in place, `apply` makes what the dense matrices make; columns fold, positions are
/// anchors'; slots that stay do not move.
void apply_is_the_matrix_product(const merge_plan& plan, const kvmeld::kv_head auto& head) {
  using scalar = typename std::remove_cvref_t<decltype(head)>::scalar;
  check(plan);
  head_state state = numbered_state(head.length(), head.capacity());
  const oracle::head before = to_oracle(head), expected = apply_plan(before, dense_of(plan));
  const auto columns = folded_columns(state, plan);
  const index_t seen = head.next_position();
  std::vector<decltype(slot_of(head, state, 0))> slots;
  for (index_t s = 0; s < head.length(); ++s) {
    slots.push_back(slot_of(head, state, s));
  }
  apply(plan, head, state);
  REQUIRE(head.length() == plan.rows());
  CHECK(head.next_position() == seen);
  const oracle::head after = to_oracle(head);
  double worst = 0;
  const std::vector<index_t> slot = fixtures::placed(plan);
  for (index_t r = 0; r < plan.rows(); ++r) {
    const index_t s = slot[at(r)], anchor = plan.anchor(r);
    worst = std::max(worst, difference(after.slots[at(s)], expected.slots[at(r)]));
    CHECK(head.position(s) == before.slots[at(anchor)].position);
    for (index_t c = 0; c < state.slot_stats(); ++c) {
      CHECK(state.column(c)[at(s)] == columns[at(c)][at(r)]);
    }
    if (plan.changes_row(r)) {
      continue;
    }
    slots[at(anchor)].second[0] = plan.log_mass(r);
    CHECK(slot_of(head, state, s) == slots[at(anchor)]);
    CHECK((s == anchor || anchor >= plan.rows()));
  }
  CHECK(worst < tolerance<scalar>);
}

TEMPLATE_TEST_CASE("apply in place is the matrix product", "[plan]", float, Eigen::half,
                   Eigen::bfloat16) {
  for (const index_t dim : {1, 3, 64, 65, 130}) {
    for (const index_t length : {1, 2, 37}) {
      for (const merge_plan& plan : plans_for(length, dim)) {
        INFO("dim " << dim << ", " << length << " slots to " << plan.rows());
        auto kv = fixtures::random_cache<TestType>(length, dim, 1);
        apply_is_the_matrix_product(plan, kv.head(0));
      }
    }
  }
}

TEST_CASE("runs of kept slots are rows of one each, and no rows that change", "[plan]") {
  const auto log_mass = fixtures::normal(7);
  merge_plan runs, rows;
  runs.reset(12), rows.reset(12);
  for (merge_plan* plan : {&runs, &rows}) {
    plan->keep(0, log_mass[0]);
    plan->add({1, 0.5F, 1}), plan->end_row(2);
    if (plan == &runs) {
      plan->keep(3, std::span(log_mass).subspan(1, 4));
    } else {
      for (const index_t s : {3, 4, 5, 6}) {
        plan->keep(s, log_mass[at(s - 2)]);
      }
    }
    plan->add({8}), plan->add({7}), plan->end_row(3);
  }
  check(runs);
  REQUIRE(runs.rows() == rows.rows());
  std::vector<index_t> changed;
  runs.each_changed_row([&](index_t r) { changed.push_back(r); });
  CHECK(changed == std::vector<index_t>{1, 6});
  for (index_t r = 0; r < rows.rows(); ++r) {
    CHECK(std::ranges::equal(runs.row(r), rows.row(r)));
    CHECK(runs.log_mass(r) == rows.log_mass(r));
    CHECK(runs.changes_row(r) == (r == 1 || r == 6));
  }
  runs.add({9});
  CHECK_THROWS_WITH(runs.keep(10, log_mass), Catch::Contains("expected end_row first"));
  for (const index_t first : {8, 6, -1}) {  // past the end, again, before the first
    merge_plan bad;
    bad.reset(12), bad.keep(6, 0), bad.keep(first, log_mass);
    CHECK_THROWS(check(bad));
  }
}

TEST_CASE("means of the largest halves do not overflow", "[plan]") {
  fixtures::cache<Eigen::half> kv{{.heads = 1, .dim = 3, .capacity = 7}};
  kv.append(0, std::vector<float>(21, 65504.0F), std::vector<float>(21, -65504.0F));
  merge_plan plan;
  plan.reset(7);
  for (index_t s = 0; s < 7; ++s) {
    plan.add({s, 1.0F / 7, 1.0F / 7});
  }
  plan.end_row(std::log(7.0F));
  head_state state = numbered_state(7, 7);
  apply(plan, kv.head(0), state);
  for (index_t i = 0; i < 3; ++i) {
    CHECK(static_cast<float>(kv.head(0).key(0)[i]) == 65504.0F);
    CHECK(static_cast<float>(kv.head(0).value(0)[i]) == -65504.0F);
  }
}

TEMPLATE_TEST_CASE("eviction is row selection to the bit, and the identity changes no bit",
                   "[plan]", float, Eigen::half, Eigen::bfloat16) {
  const index_t length = 9, dim = 5;
  for (const bool all : {true, false}) {
    auto kv = fixtures::random_cache<TestType>(length, dim, 1);
    const auto head = kv.head(0);
    const float odd[] = {std::nanf("3"), -0.0F, 1e-40F, -INFINITY, 65504.0F};
    for (index_t i = 0; i < dim; ++i) {
      head.key(4)[i] = head.value(7)[i] = static_cast<TestType>(odd[i]);
    }
    head.log_mass(4) = 0.5F;
    std::vector<std::vector<TestType>> kept;
    std::vector<index_t> positions;
    merge_plan plan;
    plan.reset(length);
    for (index_t s = 0; s < length; ++s) {
      if (all || s == 0 || s == 3 || s == 4 || s == 7) {
        plan.keep(s, head.log_mass(s));
        kept.push_back(row_of(head, s)), positions.push_back(head.position(s));
      }
    }
    if (all) {
      plan = identity(head);
    }
    head_state state = numbered_state(length, length);
    const auto columns = folded_columns(state, plan);
    apply(plan, head, state);
    REQUIRE(head.length() == plan.rows());
    const std::vector<index_t> slot = fixtures::placed(plan);
    for (index_t r = 0; r < plan.rows(); ++r) {
      const index_t s = slot[at(r)];
      CHECK(std::memcmp(row_of(head, s).data(), kept[at(r)].data(), 2 * dim * sizeof(TestType)) ==
            0);
      CHECK(head.position(s) == positions[at(r)]);
      CHECK(head.log_mass(s) == (positions[at(r)] == 4 ? 0.5F : 0.0F));
      for (index_t c = 0; c < state.slot_stats(); ++c) {
        CHECK(state.column(c)[at(s)] == columns[at(c)][at(r)]);
      }
    }
  }
}

TEMPLATE_TEST_CASE("a plan for one slot less moves the last slot into the freed one alone",
                   "[plan]", float, Eigen::half) {
  const index_t length = 6, dim = 67;
  for (index_t removed = 0; removed < length; ++removed) {
    for (index_t into = -1; into < length; ++into) {  // −1: evicted
      if (removed == into) {
        continue;
      }
      auto kv = fixtures::random_cache<TestType>(length, dim, 1);
      const auto head = kv.head(0);
      head_state state = numbered_state(length, length + 1);
      std::vector<decltype(slot_of(head, state, 0))> before;
      merge_plan plan;
      plan.reset(length);
      for (index_t s = 0; s < length; ++s) {
        before.push_back(slot_of(head, state, s));
        if (s == into) {
          plan.add({s, 0.75F, 0.75F}), plan.add({removed, 0.25F, 0.25F}), plan.end_row(1.5F);
        } else if (s != removed) {
          plan.keep(s, 0);
        }
      }
      apply(plan, head, state);
      REQUIRE(head.length() == length - 1);
      for (index_t s = 0; s < length - 1; ++s) {
        const index_t from = s == removed ? length - 1 : s;
        CHECK((slot_of(head, state, s) == before[at(from)]) == (from != into));
      }
    }
  }
}

}  // namespace plan_test
