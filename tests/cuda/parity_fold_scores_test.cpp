// SPDX-License-Identifier: MIT
// fold by scores on the device is the library's: a prompt's scores, what they pin, and what decode
// steps after it keep. Scores around the last pin are drawn apart, so that rounding decides
// nothing.
#include <catch2/catch.hpp>
#include <memory>

#include "cuda/scores_twin.hpp"

namespace kvmeld::cuda {
namespace parity_fold_scores_test {

fold by_scores(fold p = {}) {
  p.pins = fold::pin_rule::scores, p.screened = false;  // a device has no products of 8 bits
  return p;
}

/// As `sharing` has it for `slots`.
fold shared(index_t slots, fold p = {.decode = {.queries = 8}}) { return p.sharing(slots); }

template <class Scalar>
constexpr double score_tolerance = 1e-5;
template <>
constexpr double score_tolerance<Eigen::half> = 2e-3;  // queries are rounded when they are moved
template <>
constexpr double score_tolerance<Eigen::bfloat16> = 1.2e-2;

template <class Scalar>
void check_scores(const scores_case& what, const fold& p = {}) {
  INFO("dim " << what.shape.dim << ", group " << what.shape.group << ", seed " << what.seed);
  scores_twin<Scalar>(by_scores(p), what).check_scores(score_tolerance<Scalar>);
}
template <class Check>
void in_scalars(std::uint64_t turn, Check check) {
  if (turn % 3 == 0) {
    check(float{});
  } else if (turn % 3 == 1) {
    check(Eigen::half{});
  } else {
    check(Eigen::bfloat16{});
  }
}

TEST_CASE("a prompt's scores take every scalar, dim and group") {
  std::uint64_t seed = 700;
  for (const index_t dim : {1, 8, 32, 33, 64, 100, 128}) {
    for (const index_t group : {1, 4}) {
      in_scalars(seed, [&](auto x) {
        check_scores<decltype(x)>({.shape = {.heads = 2,
                                             .dim = dim,
                                             .group = group,
                                             .paged = group == 4,
                                             .odd = seed % 5 == 0 ? 3 : 0},
                                   .heavy = group == 4,
                                   .seed = seed});
      });
      ++seed;
    }
  }
  check_scores<float>({.shape = {.heads = 1, .dim = 256}, .chunks = {20}, .seed = 720});
  check_scores<Eigen::half>(
      {.shape = {.heads = 1, .dim = 160, .group = 2}, .chunks = {20}, .seed = 721});
  check_scores<Eigen::bfloat16>({.shape = {.heads = 1, .dim = 256}, .chunks = {20}, .seed = 722});
  check_scores<Eigen::half>(
      {.shape = {.heads = 1, .dim = 40}, .chunks = {300}, .seed = 723});  // in parts
  check_scores<float>({.shape = {.heads = 2, .dim = 16, .group = 2}, .chunks = {1}, .seed = 724});
}

TEST_CASE(
    "a prompt's scores with other ropes and ridges, of some heads, of a head without values") {
  const rotary rope = rotary::interleaved(500'000).llama3({.original_context = 64});
  check_scores<float>({.shape = {.heads = 2, .dim = 33, .rope = &rope}, .seed = 731},
                      {.leverage_ridge = 0.01F});
  check_scores<float>(
      {.shape = {.heads = 4, .dim = 16, .group = 2}, .active = {3, 1}, .seed = 732});
  check_scores<Eigen::half>({.shape = {.heads = 4, .dim = 64}, .active = {2, 0}, .seed = 733});
  check_scores<float>({.shape = {.heads = 2, .dim = 16}, .mute = 1, .seed = 734});
}

TEST_CASE("scores of chunks are those of one pass with all queries, or the largest so far") {
  for (const bool before : {true, false}) {
    check_scores<float>({.shape = {.heads = 2, .dim = 16, .group = 4},
                         .chunks = {20, 17, 3, 1},
                         .before = before,
                         .seed = 741});
    check_scores<Eigen::half>({.shape = {.heads = 2, .dim = 32},
                               .chunks = {40, 1, 9},
                               .before = before,
                               .heavy = true,
                               .seed = 742});
  }
  // Once more in one pass: the same bits.
  scores_twin<float> twin(
      by_scores(), {.shape = {.heads = 2, .dim = 16, .group = 2}, .chunks = {31, 29}, .seed = 743});
  const auto chunks = twin.twin.device.columns.bytes();
  twin.observe_again();
  CHECK(twin.twin.device.columns.bytes() == chunks);
}

/// A prompt scored and compressed, redrawn until its pins are clear.
template <class Scalar>
std::unique_ptr<scores_twin<Scalar>> clear_twin(const fold& p, scores_case what,
                                                const uneven_budgets& budgets) {
  for (int tries = 0;; ++tries, what.seed += 1000) {
    auto twin = std::make_unique<scores_twin<Scalar>>(p, what);
    if (twin->clear(budgets, 4 * static_cast<float>(score_tolerance<Scalar>))) {
      return twin;
    }
    REQUIRE(tries < 100);
  }
}

template <class Scalar>
void check_pins(const fold& p, const scores_case& what, const budget& first, index_t apart = 0,
                index_t steps = 0, double tolerance = -1) {
  INFO("dim " << what.shape.dim << ", group " << what.shape.group << ", target " << first.slots
              << ", seed " << what.seed);
  uneven_budgets budgets(first, apart, what.shape.heads);
  const auto twin = clear_twin<Scalar>(p, what, budgets);
  twin->check_compress(budgets, 24, tolerance);
  if (steps > 0) {
    twin->check_steps(budgets, steps, tolerance);
  }
}

TEST_CASE("a prompt's pins are the best by score") {
  const fold p = shared(24);
  check_pins<float>(p, {.shape = {.heads = 2, .dim = 32, .group = 4}, .seed = 751}, {30}, 0, 0,
                    1e-4);
  check_pins<float>(p, {.shape = {.heads = 1, .dim = 33}, .heavy = true, .seed = 752}, {30}, 0, 0,
                    1e-4);
  check_pins<Eigen::half>(
      p, {.shape = {.heads = 2, .dim = 64, .group = 4, .paged = true}, .seed = 753}, {30});
  check_pins<Eigen::half>(
      p, {.shape = {.heads = 1, .dim = 40, .odd = 3}, .heavy = true, .seed = 754}, {27});
  check_pins<Eigen::bfloat16>(p, {.shape = {.heads = 2, .dim = 128}, .seed = 755}, {30});
  check_pins<Eigen::bfloat16>(p, {.shape = {.heads = 1, .dim = 160}, .chunks = {40}, .seed = 756},
                              {30});
  check_pins<float>(p, {.shape = {.heads = 1, .dim = 256}, .chunks = {40}, .seed = 757}, {30}, 0, 0,
                    1e-4);
  check_pins<float>(p,
                    {.shape = {.heads = 4, .dim = 16, .group = 2}, .active = {3, 1}, .seed = 758},
                    {30}, 0, 0, 1e-4);
  check_pins<float>(
      p, {.shape = {.heads = 2, .dim = 16, .group = 4}, .chunks = {30, 21, 9}, .seed = 759}, {30},
      0, 0, 1e-4);
  check_pins<float>(by_scores({.share = 0.3F, .prompt = {.ridge = 0}, .score_share = 0.4F}),
                    {.shape = {.heads = 2, .dim = 16}, .seed = 760}, {30}, 0, 0, 1e-4);
}

TEST_CASE("heads with all, with no and with some pins in one launch") {
  const fold p = shared(24);
  const index_t none = p.slots_beside_pins();
  const scores_case what{.shape = {.heads = 4, .dim = 32, .group = 2}, .seed = 761};
  check_pins<float>(p, what, {none}, -20, 0, 1e-4);      // 0, 20, 40, 60: of 75 tokens, above all
  check_pins<float>(p, what, {none + 45}, 15, 0, 1e-4);  // 45, 30, 15, 0
  check_pins<Eigen::half>(p, what, {none}, -20);
  check_pins<Eigen::half>(p, what, {none + 45}, 15);
}

TEST_CASE("slots that were merged are not pinned, whatever is looked up in them") {
  uneven_budgets first({44}, 6, 2), then({41}, 6, 2);
  const fold p{.decode = {.queries = 8}, .score_share = 0.3F};  // many clusters of a few
  scores_twin<float> twin(shared(24, p),
                          {.shape = {.heads = 2, .dim = 16, .group = 2}, .seed = 763});
  twin.check_compress(first, 24, 1e-4);
  twin.draw_scores();
  twin.check_compress(then, 24, 2e-4);
}

struct given_budgets {
  std::vector<budget> host;
  device_buffer<budget> device{host};

  const budget& operator[](index_t h) const { return host[static_cast<std::size_t>(h)]; }
  head_budgets limits() { return {host, device.data()}; }
};

TEST_CASE("pins by one threshold over all heads") {
  constexpr index_t slots = 24;
  scores_twin<float> twin(shared(slots),
                          {.shape = {.heads = 4, .dim = 16, .group = 2}, .apart = 0, .seed = 765});
  const auto pins = twin.pins_of_all(slots, true);
  CHECK(pins == twin.pins_of_all(slots, false));
  std::vector<budget> host;
  for (const index_t more : pins) {
    host.push_back({twin.policy.slots_beside_pins() + more});
  }
  const auto [least, most] = std::ranges::minmax(pins);
  CHECK(most > least);
  given_budgets budgets{host};
  twin.check_compress(budgets, 24, 1e-4);
}

TEST_CASE("a head without any score above 0 has its pins by leverage") {
  const fold p{.prompt = {.outlier = 0}, .decode = {.queries = 8}};  // every key is an outlier
  check_pins<float>(shared(24, p),
                    {.shape = {.heads = 3, .dim = 16, .group = 2}, .mute = 1, .seed = 771}, {30}, 0,
                    5, 1e-4);
}

TEST_CASE("prompts that fit, and a prompt of one token") {
  check_pins<float>(shared(24), {.shape = {.heads = 2, .dim = 16}, .chunks = {20}, .seed = 781},
                    {30}, 0, 0, 1e-4);
  check_pins<float>(shared(24), {.shape = {.heads = 1, .dim = 16}, .chunks = {1}, .seed = 782},
                    {30}, 0, 0, 1e-4);
}

TEST_CASE("decode keeps the prompt's best by score, and by leverage what came behind it") {
  fold p = shared(28, {.recent = 6, .decode = {.queries = 8}});
  check_pins<float>(p, {.shape = {.heads = 2, .dim = 32, .group = 2}, .seed = 791}, {36, 40}, 0, 40,
                    2e-4);
  check_pins<float>(p, {.shape = {.heads = 3, .dim = 16}, .seed = 792}, {40, 43}, 6, 30, 2e-4);
  p.clusters = 0, p.decode.period = 2;
  check_pins<float>(p, {.shape = {.heads = 1, .dim = 33, .group = 4}, .seed = 793}, {36}, 0, 30,
                    2e-4);
  check_pins<Eigen::half>(
      p, {.shape = {.heads = 1, .dim = 32, .group = 2, .paged = true}, .seed = 794}, {36, 40}, 0,
      12, 4e-3);
}

TEST_CASE("pins of heads with more than their share have the gain, and steps keep it") {
  fold p = shared(10, {.recent = 3, .decode = {.queries = 8}});
  p.gain = 1;
  const index_t none = p.slots_beside_pins();
  const scores_case what{.shape = {.heads = 4, .dim = 32, .group = 2}, .mute = 2, .seed = 811};
  check_pins<float>(p, what, {none}, -13, 12, 2e-4);  // 0, 13, 26, 39 pins; one head by leverage
  check_pins<Eigen::half>(p, {.shape = {.heads = 2, .dim = 64}, .heavy = true, .seed = 812},
                          {none + 30}, 0, 0, 4e-3);
}

TEST_CASE("a workspace for fewer queries than were before is refused") {
  const fold p = by_scores();
  device_cache<float> kv({.heads = 1, .capacity = 60, .dim = 8}, {60}, 1,
                         {slot_reduce::sum, slot_reduce::max},
                         static_cast<index_t>(kvmeld::declared(p).memory(8, 1, 60)));
  kv.state.initial[0] = 1, kv.state.initial[1] = 0;
  std::vector<float> q(60 * 8);
  device_buffer<unsigned char> work(observe_workspace_bytes(p, kv.view(), 10));
  CHECK_THROWS_WITH((policy_calls<fold, float>::observe(
                        p, kv.view(), kv.state, {q.data() + 50 * 8, 10, 0, 0, 8, nullptr, 50},
                        {work.data(), work.size()}, order())),
                    Catch::Contains("bytes (observe_workspace_bytes)"));
}

}  // namespace parity_fold_scores_test
}  // namespace kvmeld::cuda
