// What the parts refuse: the exception says what was expected and what came, and nothing changes.
#include <catch2/catch.hpp>
#include <functional>

#include "support/fixtures.hpp"

namespace {

using fixtures::normal;
using kvmeld::cache;
using kvmeld::cache_shape;
using kvmeld::index_t;
using kvmeld::layout;
using kvmeld::merge_plan;
using kvmeld::strided_view;

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

}  // namespace

TEST_CASE("shapes that no cache can have are refused", "[errors]") {
  struct bad {
    cache_shape shape;
    std::string message;
  };
  const bad table[] = {
      {{.heads = 0, .dim = 4, .capacity = 8}, "at least 1 head expected, 0 came"},
      {{.heads = -2, .dim = 4, .capacity = 8}, "-2 came"},
      {{.heads = 1, .dim = 0, .capacity = 8}, "dim 1 to 4096 expected, 0 came"},
      {{.heads = 1, .dim = -4, .capacity = 8}, "-4 came"},
      {{.heads = 1, .dim = 4097, .capacity = 8}, "4097 came"},
      {{.heads = 1, .group = 0, .dim = 4, .capacity = 8}, "at least 1 query head expected, 0 came"},
      {{.heads = 1, .dim = 4, .capacity = 0}, "at least 1 slot expected, 0 came"},
      {{.heads = 1, .dim = 4, .capacity = -1}, "-1 came"},
      {{.heads = 1, .dim = 4, .capacity = 8, .scale = -1}, "finite scale above 0 expected"},
      {{.heads = 1, .dim = 4, .capacity = 8, .scale = INFINITY}, "inf came"},
      {{.heads = 1, .dim = 4, .capacity = 8, .scale = bad_floats[0]}, "nan came"}};
  float x = 0;
  for (const bad& row : table) {
    refuses(row.message, [&] { cache<float>{row.shape}; });
    refuses(row.message, [&] { strided_view<float>(row.shape, {&x, 4, 4}, {&x, 4, 4}); });
  }
  refuses("7 query heads on 2 KV heads", [] { (void)cache_shape::group_of(7, 2); });
  for (const auto& [q, k] : {std::pair{0, 1}, {4, 0}, {-4, -2}, {2, 4}}) {
    refuses(std::to_string(q) + " query heads on " + std::to_string(k) + " KV heads came",
            [&, a = q, b = k] { (void)cache_shape::group_of(a, b); });
  }
}

TEST_CASE("layouts whose rows lie on one another are refused", "[errors]") {
  const cache_shape shape{.heads = 2, .dim = 4, .capacity = 8};
  std::vector<float> x(1000);
  const layout<float> good = layout<float>::head_token_dim(x.data(), 8, 4);
  const auto bad = [&](const layout<float>& l, const std::string& came) {
    refuses("keys", [&] { strided_view<float>(shape, l, good); });
    refuses("values", [&] { strided_view<float>(shape, good, l); });
    refuses(came, [&] { strided_view<float>(shape, l, good); });
  };
  CHECK_NOTHROW(strided_view<float>(shape, good, {x.data(), 32, 1, 8}));
  bad({nullptr, 32, 4}, "null came");
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
  std::vector<float> x = normal(36);
  strided_view<float> view({.heads = 2, .dim = 4, .capacity = 8},
                           layout<float>::token_head_dim(x.data(), 2, 4),
                           layout<float>::token_head_dim(x.data(), 2, 4));
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
  bad("append: keys and values [tokens, 4] expected, 5 and 5 numbers came", all.first(5),
      all.first(5));
  bad("8 and 4 numbers came", all.first(8), all.first(4));
  bad("at most 7 more tokens fit, 8 came", all.first(32), all.first(32));
  bad("null came", {static_cast<float*>(nullptr), 4}, all.first(4));
  bad("null came", all.first(4), {static_cast<float*>(nullptr), 4});
  const std::size_t huge = std::size_t{1} << 34;  // tokens beyond int32; never read
  bad(std::to_string(huge) + " came", {x.data(), 4 * huge}, {x.data(), 4 * huge});
  for (const float nonsense : bad_floats) {
    x[6] = nonsense;
    bad("append: keys: finite numbers expected", all.first(8), all.last(8));
    bad("append: values: finite numbers expected", all.last(8), all.first(8));
  }
  refuses("head: 0 to 1 expected, 2 came", [&] { (void)kv.head(2); });
  refuses("-1 came", [&] { (void)view.head(-1); });
  refuses(
      "0 to 1 slots expected, 2 came", [&] { kv.head(0).truncate(2); }, everything);
  refuses(
      "-1 came", [&] { kv.head(0).truncate(-1); }, everything);
  refuses(
      "at most 8 tokens expected, 9 came", [&] { view.adopt(1, 9); }, everything);
  refuses(
      "-1 came", [&] { view.adopt(1, -1); }, everything);
  view.adopt(1, 8);
  refuses(
      "all 8 slots are in use", [&] { view.head(1).push(x.data(), x.data()); }, everything);
  index_t length = 0, seen = most - 1, position[2] = {};
  float mass[2] = {};
  const kvmeld::head_view<float> old({x.data(), 0, 4}, {x.data(), 0, 4},
                                     {mass, position, &length, &seen}, {2, 4});
  refuses(
      "int32", [&] { append_rows(old, all.last(8), all.last(8)); }, everything);
  CHECK((length == 0 && seen == most - 1));
  seen = most;
  refuses(
      "int32", [&] { old.push(x.data() + 8, x.data() + 8); }, everything);
  CHECK((length == 0 && seen == most));
}

TEST_CASE("check names what is wrong with a plan", "[plan][errors]") {
  struct bad {
    std::function<void(merge_plan&)> make;
    std::string message;
  };
  const bad table[] = {
      {[](merge_plan& p) { p.keep(0, 0), p.add({2}), p.add({0}), p.end_row(0); },
       "each source once expected, row 1 repeats 0"},
      {[](merge_plan& p) { p.add({1}), p.add({1}), p.end_row(0); }, "row 0 repeats 1"},
      {[](merge_plan& p) { p.keep(3, 0), p.keep(2, 0); },
       "ascending anchors expected, row 1 has anchor 2 after 3"},
      {[](merge_plan& p) { p.keep(3, 0), p.keep(3, 0); }, "row 1 has anchor 3 after 3"},
      {[](merge_plan& p) { p.keep(0, 0), p.keep(6, 0); }, "sources 0 to 5 expected, row 1 names 6"},
      {[](merge_plan& p) { p.add({0}), p.add({-1}), p.end_row(0); }, "row 0 names -1"},
      {[](merge_plan& p) { p.keep(-1, 0); }, "-1"},
      {[](merge_plan& p) { p.keep(0, 0), p.end_row(0); }, "row 1 has no source"},
      {[](merge_plan& p) {
         p.add({4, bad_floats[0], 1}), p.end_row(0);
       },
       "source 4 nan and 1"},
      {[](merge_plan& p) {
         p.add({4, 1, INFINITY}), p.end_row(0);
       },
       "source 4 1 and inf"},
      {[](merge_plan& p) { p.keep(0, bad_floats[0]); }, "finite log-mass expected, row 0 has nan"},
      {[](merge_plan& p) { p.keep(0, -INFINITY); }, "row 0 has -inf"}};
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
  refuses("a value correction [2, 3] expected, 5 numbers came",
          [&] { plan.correct_values(std::vector<float>(5), 3); });
  refuses("0 numbers came", [&] { plan.correct_values(std::vector<float>{}, 0); });
  CHECK_FALSE(plan.has_correction());
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
  refuses("row", [&] { check(plan); });
}

TEST_CASE("compose and apply refuse plans that do not fit", "[plan][errors]") {
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
  refuses("compose: a second plan of 5 slots expected, 6 came", [&] { compose(other, five); });
  refuses(
      "apply: a plan of 5 slots expected, 6 came", [&] { apply(other, head, state); }, everything);
  other.reset(5);
  other.keep(1, 0);
  other.correct_values(std::vector<float>{1, 2, 3, 4}, 4);
  refuses(
      "a correction of dim 3 expected, 4 came", [&] { apply(other, head, state); }, everything);
  merge_plan corrected = five;
  corrected.correct_values(std::vector<float>(15), 3);
  refuses("corrections of one dim expected, 3 and 4 came", [&] { compose(other, corrected); });
  other.reset(5);
  other.keep(5, 0);  // the product would read past the first plan
  refuses("names 5", [&] { compose(other, five); });
  refuses(
      "names 5", [&] { apply(other, head, state); }, everything);
  for (const auto& [removed, into, came] : {std::tuple{5, 0, "5 came"},
                                            {-2, 0, "-2 came"},
                                            {0, 5, "5 came"},
                                            {0, -2, "-2 came"},
                                            {3, 3, "3 came"}}) {
    const kvmeld::slot_removal d{removed, into, 0.5F, 0.5F, 1};
    refuses(
        came, [&] { apply(d, head, state); }, everything);
  }
  kvmeld::head_state small({}, 0, 4);
  refuses(
      "state: made for 4 slots, 5 came", [&] { apply(five, head, small); }, everything);
}
