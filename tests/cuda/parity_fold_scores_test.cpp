// fold by scores on the device is the library's: a prompt's scores, what they pin, and what decode
// steps after it keep. Scores around the last pin are drawn apart, so that rounding decides
// nothing.
#include <catch2/catch.hpp>
#include <memory>
#include <numeric>

#include "cuda/mirror.hpp"
#include "cuda/uneven_budgets.hpp"
#include "kvfold/cuda/compress.cuh"
#include "kvfold/cuda/observe.cuh"
#include "kvfold/cuda/policies/fold.cuh"
#include "kvfold/cuda/step.cuh"

namespace kvfold::cuda {
namespace {

using std::ptrdiff_t;

fold by_scores(fold p = {}) {
  p.pins = fold::pin_rule::scores;
  return p;
}

/// As `sharing` has it for `slots`.
fold shared(index_t slots, fold p = {.decode = {.queries = 8}}) { return p.sharing(slots); }

struct scores_case {
  cache_case shape;                    ///< the capacity is the prompt's and 30 more
  std::vector<index_t> chunks = {60};  ///< head `h` has 5 `h` tokens more before the first one's
  bool before = true;                  ///< do chunks know the queries before them?
  std::vector<index_t> active = {};    ///< heads that calls run; none: all
  bool heavy = false;                  ///< are there log-masses?
  index_t mute = -1;                   ///< a head whose values are 0, so that no score is above
  std::uint64_t seed = 1;
};

/// A prompt on both sides, scored.
template <class Scalar>
class scores_twin {
 public:
  using scalar = typename mirror<Scalar>::scalar;

  scores_twin(const fold& p, const scores_case& what)
      : policy(p),
        what_(what),
        c_(sized(what)),
        random_{what.seed},
        kv({.heads = c_.heads,
            .group = c_.group,
            .dim = c_.dim,
            .capacity = c_.capacity,
            .scale = c_.scale}),
        state(make_state(p, kv)),
        twin(p, kv, state, c_),
        heads_(run(what)),
        list_(what.active),
        own_(numbers(std::reduce(what.chunks.begin(), what.chunks.end()))),
        queries_(stored(own_)) {
    index_t begin = 0;
    for (const index_t n : what.chunks) {
      for (const index_t h : heads_) {
        append(h, n + (begin == 0 ? 5 * h : 0));
      }
      const ptrdiff_t first = ptrdiff_t{begin} * row();
      query_view<Scalar> own{own_.data() + first, n, ptrdiff_t{c_.group} * c_.dim, c_.dim, row()};
      own.before = what.before ? begin : 0;
      observe(policy, kv, state, head_selection(heads_), own);
      observe_device(begin, n, own.before);
      begin += n;
    }
  }

  /// On the device, `n` queries from `begin` on.
  void observe_device(index_t begin, index_t n, index_t before) {
    device_buffer<unsigned char> work(observe_workspace_bytes(policy, view(), n, before));
    cuda::observe(policy, view(), twin.device.state,
                  query_rows<scalar>{queries_.data() + begin * row(), n,
                                     ptrdiff_t{c_.group} * c_.dim, c_.dim, row(), nullptr, before},
                  {work.data(), work.size()}, order(what_.seed));
    CHECK((work.intact() && queries_.intact()));
  }
  /// Scores within `tolerance` of themselves and a thousandth of the head's largest.
  void check_scores(double tolerance) {
    twin.check_same(kv, state, std::numeric_limits<double>::infinity());
    for (const index_t h : heads_) {
      INFO("head " << h);
      const auto wanted = state[h].column(fold::prompt_score);
      const double most = *std::ranges::max_element(wanted);
      CHECK((h == what_.mute) == (most == 0));
      double worst = 0;
      for (std::size_t s = 0; s < wanted.size(); ++s) {
        const double a = twin.device.column(fold::prompt_score, h, static_cast<index_t>(s));
        worst = worse(worst,
                      std::abs(a - double{wanted[s]}) / (double{wanted[s]} + 1e-3 * most + 1e-30));
      }
      CHECK(worst <= tolerance);
    }
  }

  /// Are the last pin of each head and the best that is none so far apart?
  bool clear(const uneven_budgets& budgets, float apart) {
    for (const index_t h : heads_) {
      const auto score = state[h].column(fold::prompt_score);
      std::vector<float> free;
      for (index_t s = 0; s < kv.head(h).length(); ++s) {
        const search::protection always{policy.sinks, policy.prompt_recent,
                                        kv.head(h).tokens_total() - 1};
        if (!always(kv.head(h).position(s)) && score[static_cast<std::size_t>(s)] > 0) {
          free.push_back(score[static_cast<std::size_t>(s)]);
        }
      }
      std::ranges::sort(free, std::greater());
      const auto pins = static_cast<std::size_t>(policy.pinned().scored(budgets[h].target));
      if (pins > 0 && pins < free.size() && free[pins - 1] < (1 + apart) * free[pins]) {
        return false;
      }
    }
    return true;
  }

  /// Compressed on `count` reference queries behind the prompt: the same pins. `tolerance`: of all
  /// else; below 0 it is not compared.
  void check_compress(uneven_budgets& budgets, index_t count, double tolerance) {
    const auto rows = numbers(count);
    device_buffer<scalar> device(stored(rows));
    std::vector<index_t> at(static_cast<std::size_t>(count));
    std::iota(at.begin(), at.end(), 1000);
    device_buffer<index_t> position(at);
    const query_view<Scalar> asked{rows.data(), count, ptrdiff_t{c_.group} * c_.dim,
                                   c_.dim,      row(), at.data()};
    const index_t most = budgets.limits().most_target();
    device_buffer<unsigned char> work(workspace_bytes(policy, view(), count, most));
    const workspace space{work.data(), work.size()};
    cuda::compress(policy, view(), twin.device.state,
                   query_rows<scalar>{device.data(), count, asked.head, asked.group, asked.row,
                                      position.data()},
                   budgets.limits(), space, order(what_.seed));
    workspace_allocator from(space);
    const auto made = detail::allocate_prompt(from, detail::rule_of(policy, c_.dim),
                                              detail::shape_of(view(), count, most));
    for (std::size_t i = 0; i < heads_.size(); ++i) {
      const index_t h = heads_[i], n = kv.head(h).length();
      INFO("head " << h << ", target " << budgets[h].target);
      const bool changes = n > budgets[h].target;
      kvfold::workspace plans;
      observe(policy, kv.head(h), state[h], asked.of(static_cast<index_t>(i)));
      kvfold::compress(policy, kv.head(h), state[h], plans, budgets[h],
                       asked.of(static_cast<index_t>(i)));
      const index_t* const into = on_host(made.plan.divided.into) + ptrdiff_t{h} * c_.capacity;
      bool same = true;
      for (index_t s = 0; changes && s < n; ++s) {
        same = same && (into[s] == s) == (plans.scratch.marks[static_cast<std::size_t>(s)] ==
                                          fold_prompt::pinned);
      }
      CHECK(same);
    }
    if (tolerance >= 0) {
      twin.check_same(kv, state, tolerance);
    }
    CHECK((work.intact() && device.intact() && position.intact()));
  }

  /// Decode steps of all heads; then all are brought to two slots less without queries.
  void check_steps(uneven_budgets& budgets, index_t steps, double tolerance) {
    device_buffer<unsigned char> work(workspace_bytes(policy, view()));
    const workspace space{work.data(), work.size()};
    const auto nq = static_cast<std::size_t>(c_.heads * c_.group * c_.dim),
               nk = static_cast<std::size_t>(c_.heads * c_.dim);
    std::vector<float> out(nq);
    device_buffer<scalar> theirs(nq);
    for (index_t step = 0; step < steps; ++step) {
      INFO("step " << step);
      const auto q = draw(nq, 1), k = draw(nk, 1), v = draw(nk, 1);
      device_buffer<scalar> dq(stored(q)), dk(stored(k)), dv(stored(v));
      const std::vector<float> fq(q.begin(), q.end()), fk(k.begin(), k.end()),
          fv(v.begin(), v.end());
      kvfold::step(policy, kv, state, {fq, fk, fv}, budgets.host(), out);
      cuda::step(policy, view(), twin.device.state, dq.data(),
                 new_tokens<scalar>{dk.data(), dv.data()}, budgets.limits(), theirs.data(), space,
                 order(what_.seed));
      twin.check_same(kv, state, tolerance);
    }
    CHECK((work.intact() && theirs.intact()));
  }

  fold policy;

 private:
  static std::vector<index_t> run(const scores_case& what) {
    std::vector<index_t> heads = what.active;
    if (heads.empty()) {
      heads.resize(static_cast<std::size_t>(what.shape.heads));
      std::iota(heads.begin(), heads.end(), 0);
    }
    return heads;
  }
  static cache_case sized(const scores_case& what) {
    cache_case c = what.shape;
    c.capacity = std::reduce(what.chunks.begin(), what.chunks.end()) + 5 * c.heads + 30;
    return c;
  }
  cache_view<scalar> view() {
    const auto x = twin.device.view();
    return what_.active.empty() ? x
                                : x.with_active(list_.data(), static_cast<index_t>(list_.size()));
  }
  ptrdiff_t row() const { return static_cast<ptrdiff_t>(heads_.size()) * c_.group * c_.dim; }

  std::vector<Scalar> draw(std::size_t n, float scale) {
    std::vector<Scalar> x(n);
    for (Scalar& e : x) {
      e = static_cast<Scalar>(
          scale *
          (static_cast<float>(random_.below(1U << 20)) / static_cast<float>(1U << 19) - 1.0F));
    }
    return x;
  }
  /// Queries of all heads that are run.
  std::vector<Scalar> numbers(index_t count) {
    return draw(static_cast<std::size_t>(count * row()), 3);
  }
  template <class T>
  static std::vector<scalar> stored(const std::vector<T>& x) {
    std::vector<scalar> y;
    for (const T& e : x) {
      y.push_back(from_float<scalar>(static_cast<float>(e)));
    }
    return y;
  }

  /// `n` tokens of an engine's own prefill.
  void append(index_t h, index_t n) {
    auto& device = twin.device;
    const auto size = static_cast<std::size_t>(n * c_.dim);
    const auto k = draw(size, 1);
    std::vector<Scalar> v;
    for (index_t s = 0; s < n; ++s) {  // scores lie far apart
      const float wide = std::exp2(3 * static_cast<float>(draw(1, 1)[0]));
      const auto one = draw(static_cast<std::size_t>(c_.dim), h == what_.mute ? 0.0F : wide);
      v.insert(v.end(), one.begin(), one.end());
    }
    const index_t held = kv.head(h).length(), seen = kv.head(h).tokens_total();
    kv.append(h, k, v);
    state[h].extend(held + n);
    for (index_t s = held; s < held + n; ++s) {
      for (index_t i = 0; i < c_.dim; ++i) {
        device.key(h, s)[i] = from_float<scalar>(static_cast<float>(kv.head(h).key(s)[i]));
        device.value(h, s)[i] = from_float<scalar>(static_cast<float>(kv.head(h).value(s)[i]));
      }
      const float mass = what_.heavy ? 0.25F * static_cast<float>(random_.below(6)) : 0.0F;
      kv.head(h).log_mass(s) = mass, device.log_mass[device.at(h, s)] = mass;
      device.position[device.at(h, s)] = seen + s - held;
      device.column(fold::tokens, h, s) = 1, device.column(fold::prompt_score, h, s) = 0;
    }
    device.length[h] = held + n, device.tokens_total[h] = seen + n;
  }

  scores_case what_;
  cache_case c_;
  emulator::chance random_;

 public:
  cache<Scalar> kv;
  kvfold::state state;
  mirror<Scalar> twin;

 private:
  std::vector<index_t> heads_;
  device_buffer<index_t> list_;
  std::vector<Scalar> own_;  // the prompt's queries
  device_buffer<scalar> queries_;
};

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
  const fold p{.rope = {.base = 500'000,
                        .layout = rope::pairing::interleaved,
                        .llama3 = llama3_scaling{.original_context = 64}},
               .leverage_ridge = 0.01F};
  check_scores<float>({.shape = {.heads = 2, .dim = 33}, .seed = 731}, p);
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
  twin.observe_device(0, 60, 0);
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
  INFO("dim " << what.shape.dim << ", group " << what.shape.group << ", target " << first.target
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

TEST_CASE("a head without any score above 0 has its pins by leverage") {
  check_pins<float>(shared(24),
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

TEST_CASE("a share of what is not pinned is evicted, the best by score") {
  fold p = shared(24);
  for (const float share : {0.01F, 0.5F, 0.99F}) {  // none; half; all but a slot for each cluster
    p.evicted = share;
    check_pins<float>(p, {.shape = {.heads = 3, .dim = 16, .group = 2}, .mute = 1, .seed = 801},
                      {30}, 6, 3, 2e-4);
  }
  check_pins<Eigen::half>(p, {.shape = {.heads = 2, .dim = 64}, .seed = 802}, {30});
}

TEST_CASE("a workspace for fewer queries than were before is refused") {
  const fold p = by_scores();
  device_cache<float> kv({.heads = 1, .capacity = 60, .dim = 8}, {60}, 1,
                         {column_merge::sum, column_merge::max},
                         static_cast<index_t>(p.memory(8, 1, 60)));
  kv.state.initial[0] = 1, kv.state.initial[1] = 0;
  std::vector<float> q(60 * 8);
  device_buffer<unsigned char> work(observe_workspace_bytes(p, kv.view(), 10));
  CHECK_THROWS_WITH(cuda::observe(p, kv.view(), kv.state,
                                  query_rows<float>{q.data() + 50 * 8, 10, 0, 0, 8, nullptr, 50},
                                  {work.data(), work.size()}, order()),
                    Catch::Contains("bytes expected (observe_workspace_bytes)"));
}

}  // namespace
}  // namespace kvfold::cuda
