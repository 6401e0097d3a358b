// SPDX-License-Identifier: MIT
// What the parts refuse: the message says "expected X, got Y", and nothing changes.
#include <catch2/catch.hpp>
#include <functional>

#include "support/fixtures.hpp"

namespace errors_test {

using fixtures::cache;
using fixtures::cache_shape;
using fixtures::layout;
using fixtures::normal;
using fixtures::strided_view;
using kvmeld::attention_spec;
using kvmeld::index_t;
using kvmeld::merge_plan;

constexpr index_t most = std::numeric_limits<index_t>::max();
const float bad_floats[] = {std::nanf(""), INFINITY, -INFINITY};

/// LAW: `call` throws `error` with `message` in it, and `everything()` is as before.
void refuses(
    const std::string& message, const std::function<void()>& call,
    const std::function<std::vector<float>()>& everything = [] { return std::vector<float>(); }) {
  const auto before = everything();
  CHECK_THROWS_AS(call(), kvmeld::error);
  CHECK_THROWS_WITH(call(), Catch::Contains("kvmeld: ") && Catch::Contains(message));
  const bool unchanged = everything() == before;
  CHECK(unchanged);
}

TEST_CASE("shapes that no cache can have are refused", "[errors]") {
  struct bad {
    cache_shape shape;
    std::string message;
  };
  const bad table[] = {
      {{.heads = 0, .dim = 4, .capacity = 8}, "expected at least 1 KV head, got 0"},
      {{.heads = -2, .dim = 4, .capacity = 8}, "got -2"},
      {{.heads = 1, .dim = 0, .capacity = 8}, "expected a key_dim of 1 to 4096, got 0"},
      {{.heads = 1, .dim = -4, .capacity = 8}, "got -4"},
      {{.heads = 1, .dim = 4097, .capacity = 8}, "got 4097"},
      {{.heads = 1, .group = 0, .dim = 4, .capacity = 8},
       "expected a group of at least 1 query head, got 0"},
      {{.heads = 1, .dim = 4, .capacity = 0}, "expected a capacity of at least 1 slot, got 0"},
      {{.heads = 1, .dim = 4, .capacity = -1}, "got -1"},
      {{.heads = 1, .dim = 4, .capacity = 8, .scale = -1}, "expected a finite scale above 0"},
      {{.heads = 1, .dim = 4, .capacity = 8, .scale = INFINITY}, "got inf"},
      {{.heads = 1, .dim = 4, .capacity = 8, .scale = bad_floats[0]}, "got nan"},
      {{.heads = 1, .dim = 4, .capacity = 8, .rope = kvmeld::rotary::halves(9).dims(6)},
       "expected at most 4 rotated dimensions, got 6"}};
  float x = 0;
  for (const bad& row : table) {
    refuses(row.message, [&] { cache<float>{row.shape}; });
    refuses(row.message, [&] { strided_view<float>(row.shape, {&x, 4, 4}, {&x, 4, 4}); });
  }
  refuses("got 7 on 2", [] { (void)attention_spec::group_of(7, 2); });
  for (const auto& [q, k] : {std::pair{0, 1}, {4, 0}, {-4, -2}, {2, 4}}) {
    refuses("got " + std::to_string(q) + " on " + std::to_string(k),
            [&, a = q, b = k] { (void)attention_spec::group_of(a, b); });
  }
}

TEST_CASE("layouts whose rows lie on one another are refused", "[errors]") {
  const cache_shape shape{.heads = 2, .dim = 4, .capacity = 8};
  std::vector<float> x(1000);
  const layout<float> good = layout<float>::head_token_dim(x.data(), 8, 4);
  const auto bad = [&](const layout<float>& l, const std::string& got) {
    refuses("keys", [&] { strided_view<float>(shape, l, good); });
    refuses("values", [&] { strided_view<float>(shape, good, l); });
    refuses(got, [&] { strided_view<float>(shape, l, good); });
  };
  CHECK_NOTHROW(strided_view<float>(shape, good, {x.data(), 32, 1, 8}));
  bad({nullptr, 32, 4}, "got null");
  bad({x.data(), 32, 3}, "row stride 3");
  bad({x.data(), 32, 0}, "row stride 0");
  bad({x.data(), 32, -4}, "row stride -4");
  bad({x.data(), 32, 4, 0}, "element stride 0");
  bad({x.data(), 32, 4, -1}, "element stride -1");
  bad({x.data(), 32, 7, 2}, "element stride 2");
  bad({x.data(), 32, 1, 7}, "element stride 7");
  bad({x.data(), 0, 4}, "head stride");
  bad({x.data(), 31, 4}, "head stride 31");  // [head, token, dim]: heads overlap by a row's element
  bad({x.data(), 3, 8}, "head stride 3");    // [token, head, dim]: heads overlap
}

TEST_CASE("tokens that do not fit are refused", "[errors]") {
  cache<float> kv{{.heads = 2, .dim = 4, .capacity = 8, .check_finite = true}};
  std::vector<float> x = normal(36), values(64);
  strided_view<float> view({.heads = 2, .dim = 4, .capacity = 8},
                           layout<float>::token_head_dim(x.data(), 2, 4),
                           layout<float>::token_head_dim(values.data(), 2, 4));
  const auto everything = [&] {
    auto all = fixtures::bytes_of(kv.head(0));
    all.push_back(static_cast<float>(view.head(1).length()));
    return all;
  };
  const auto bad = [&](const std::string& message, std::span<const float> k,
                       std::span<const float> v) {
    refuses(
        message, [&] { kv.append(0, k, v); }, everything);
  };
  const std::span<const float> all(x);
  kv.append(0, all.first(4), all.first(4));
  bad("append: expected keys [2, 1, 4] (8 numbers), got 5", all.first(5), all.first(5));
  bad("append: expected values [2, 1, 4] (8 numbers), got 4", all.first(8), all.first(4));
  bad("append: expected at most 7 tokens", all.first(32), all.first(32));
  bad("got null", {static_cast<float*>(nullptr), 4}, all.first(4));
  bad("got null", all.first(4), {static_cast<float*>(nullptr), 4});
  const std::size_t huge = std::size_t{1} << 34;  // tokens beyond int32; never read
  bad("got " + std::to_string(4 * huge), {x.data(), 4 * huge}, {x.data(), 4 * huge});
  for (const float nonsense : bad_floats) {
    x[6] = nonsense;
    bad("append: expected finite keys, got ", all.first(8), all.last(8));
    bad("append: expected finite values, got ", all.last(8), all.first(8));
  }
  refuses("head: expected 0 to 1, got 2", [&] { (void)kv.head(2); });
  refuses("got -1", [&] { (void)view.head(-1); });
  refuses(
      "expected 0 to 1 slots, got 2", [&] { kv.head(0).truncate(2); }, everything);
  refuses(
      "got -1", [&] { kv.head(0).truncate(-1); }, everything);
  refuses(
      "expected at most 8 tokens", [&] { view.commit(1, 9); }, everything);
  refuses(
      "got -1", [&] { view.commit(1, -1); }, everything);
  view.commit(1, 8);
  refuses(
      "push: expected a free slot, got all 8 slots in use",
      [&] { view.head(1).push(x.data(), x.data()); }, everything);
  const auto old = kv.head(1);
  old.restore(0, most - 1);
  refuses(
      "append: expected positions below 2^31, got 2 tokens after 2147483646",
      [&] { kv.append(1, all.last(8), all.last(8)); }, everything);
  CHECK((old.length() == 0 && old.next_position() == most - 1));
  old.restore(0, most);
  refuses(
      "push: expected fewer than 2147483647 tokens in total, got 2147483647",
      [&] { old.push(x.data() + 8, x.data() + 8); }, everything);
  CHECK((old.length() == 0 && old.next_position() == most));
}

TEST_CASE("check names what is wrong with a plan", "[plan][errors]") {
  struct bad {
    std::function<void(merge_plan&)> make;
    std::string message;
  };
  const bad table[] = {
      {[](merge_plan& p) { p.keep(0, 0), p.add({2}), p.add({0}), p.end_row(0); },
       "expected each source once, got 0 again in row 1"},
      {[](merge_plan& p) { p.add({1}), p.add({1}), p.end_row(0); }, "got 1 again in row 0"},
      {[](merge_plan& p) { p.keep(3, 0), p.keep(2, 0); },
       "expected ascending anchors, got 2 after 3 in row 1"},
      {[](merge_plan& p) { p.keep(3, 0), p.keep(3, 0); }, "got 3 after 3 in row 1"},
      {[](merge_plan& p) { p.keep(0, 0), p.keep(6, 0); },
       "expected sources 0 to 5, got 6 in row 1"},
      {[](merge_plan& p) { p.add({0}), p.add({-1}), p.end_row(0); }, "got -1 in row 0"},
      {[](merge_plan& p) { p.keep(-1, 0); }, "-1"},
      {[](merge_plan& p) { p.keep(0, 0), p.end_row(0); },
       "expected at least 1 source in row 1, got 0"},
      {[](merge_plan& p) {
         p.add({4, bad_floats[0], 1}), p.end_row(0);
       },
       "expected finite weights, got nan and 1 for source 4 of row 0"},
      {[](merge_plan& p) {
         p.add({4, 1, INFINITY}), p.end_row(0);
       },
       "got 1 and inf for source 4 of row 0"},
      {[](merge_plan& p) { p.keep(0, bad_floats[0]); },
       "expected a finite log-mass, got nan in row 0"},
      {[](merge_plan& p) { p.keep(0, -INFINITY); }, "got -inf in row 0"}};
  for (const bad& row : table) {
    merge_plan plan;
    plan.reset(6);
    row.make(plan);
    CHECK_THROWS_AS(check(plan), kvmeld::error);
    CHECK_THROWS_WITH(check(plan), Catch::Contains(row.message));
  }
  merge_plan plan;
  CHECK_NOTHROW(check(plan));  // no slots, no rows
  plan.reset(6);
  CHECK_NOTHROW(check(plan));  // all dropped
  plan.keep(0, -30), plan.add({2, -1, 0}), plan.add({1}), plan.end_row(30);
  CHECK_NOTHROW(check(plan));
}

TEST_CASE("check refuses broken corrections and half a row", "[plan][errors]") {
  merge_plan plan;
  plan.reset(4);
  plan.keep(0, 0), plan.keep(2, 0);
  refuses("expected a value correction [2, 3], got 5 numbers",
          [&] { plan.correct_values(std::vector<float>(5), 3); });
  refuses("got 0 numbers", [&] { plan.correct_values(std::vector<float>{}, 0); });
  CHECK((plan.key_corrections().empty() && plan.value_corrections().empty()));
  for (const float bad : bad_floats) {
    plan.correct_values(std::vector<float>{0, 0, 0, bad}, 2);
    refuses("correction", [&] { check(plan); });
  }
  plan.correct_values(std::vector<float>{0, 0, 0, 0}, 2);
  CHECK_NOTHROW(check(plan));
  plan.keep(3, 0);  // after its corrections were given
  refuses("correction", [&] { check(plan); });
  plan.reset(4);
  plan.keep(0, 0), plan.add({1});  // and never ended
  refuses("expected end_row after the sources of row 1", [&] { check(plan); });
}

TEST_CASE("apply refuses plans that do not fit", "[plan][errors]") {
  auto kv = fixtures::random_cache(5, 3, 1);
  const auto head = kv.head(0);
  kvmeld::head_state state = kvmeld::make_head_state(kvmeld::h2o{}, head);
  state.extend(5);
  std::ranges::fill(state.column(0), 7.0F);
  const auto everything = [&] {
    auto all = fixtures::bytes_of(head);
    all.insert(all.end(), state.column(0).begin(), state.column(0).end());
    return all;
  };
  const merge_plan five = identity(head);
  merge_plan other;
  other.reset(6);
  refuses(
      "apply: expected a plan of 5 slots, got 6", [&] { apply(other, head, state); }, everything);
  other.reset(5);
  other.keep(1, 0);
  other.correct_values(std::vector<float>{1, 2, 3, 4}, 4);
  refuses(
      "expected a value correction of dim 3, got 4", [&] { apply(other, head, state); },
      everything);
  other.reset(5);
  other.keep(5, 0);  // a source past the head
  refuses(
      "expected sources 0 to 4, got 5 in row 0", [&] { apply(other, head, state); }, everything);
  kvmeld::head_state small({}, 0, 4);
  refuses(
      "state: expected at most 4 slots, got 5", [&] { apply(five, head, small); }, everything);
}

TEST_CASE("attend refuses what it cannot do, and writes nothing", "[attend][errors]") {
  auto kv = fixtures::random_cache(5, 3, 2);
  cache<float> careful{{.heads = 1, .group = 2, .dim = 3, .capacity = 5, .check_finite = true}};
  cache<float> empty{{.heads = 1, .group = 2, .dim = 3, .capacity = 5}};
  careful.append(0, normal(3), normal(3));
  std::vector<float> q(6, 1.0F), out(6, 7.0F), p(10, 7.0F), lse(2, 7.0F);
  const auto refuses = [&](cache<float>& c, const float* query, float* to,
                           std::size_t probabilities, std::size_t sums,
                           const std::string& message) {
    const auto call = [&] {
      attend(c.head(0), query, to, std::span(p).first(probabilities), std::span(lse).first(sums));
    };
    CHECK_THROWS_AS(call(), kvmeld::error);
    CHECK_THROWS_WITH(call(), Catch::Contains(message));
    for (const auto* untouched : {&out, &p, &lse}) {
      CHECK(std::ranges::count(*untouched, 7.0F) == std::ssize(*untouched));
    }
  };
  refuses(empty, q.data(), out.data(), 0, 0, "expected at least 1 slot, got an empty head");
  refuses(kv, nullptr, out.data(), 0, 0, "expected q [2, 3] and out [2, 3], got null");
  refuses(kv, q.data(), nullptr, 0, 0, "got null");
  refuses(kv, q.data(), out.data(), 9, 0, "expected probabilities [2, 5], got 9 floats");
  refuses(kv, q.data(), out.data(), 5, 0, "got 5 floats");
  refuses(kv, q.data(), out.data(), 0, 1, "expected log_sum_exp [2], got 1 floats");
  for (const float bad : bad_floats) {
    for (std::size_t i = 0; i < 6; ++i) {
      q[i] = bad;
      refuses(careful, q.data(), out.data(), 0, 0, std::string(" at element ") + std::to_string(i));
      q[i] = 1;
    }
  }
}

}  // namespace errors_test
