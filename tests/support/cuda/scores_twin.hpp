// SPDX-License-Identifier: MIT
/// A prompt for fold by scores, on the device and in the library: scored in chunks, compressed,
/// decoded.
#pragma once

#include <numeric>

#include "cuda/mirror.hpp"
#include "cuda/policy_calls.hpp"
#include "cuda/uneven_budgets.hpp"
#include "kvmeld/compress/budgets.hpp"
#include "kvmeld/cuda/policies/fold.cuh"

namespace kvmeld::cuda {

struct scores_case {
  cache_case shape;  ///< the capacity is the prompt's and 30 more
  std::vector<index_t> chunks = {60};
  bool before = true;                ///< do chunks know the queries before them?
  index_t apart = 5;                 ///< tokens that every further head has more, before these
  std::vector<index_t> active = {};  ///< heads that calls run; none: all
  bool heavy = false;                ///< are there log-masses?
  index_t mute = -1;                 ///< a head whose values are 0, so that no score is above
  std::uint64_t seed = 1;
};

/// A prompt on both sides, scored.
template <class Scalar>
class scores_twin {
 public:
  using scalar = typename mirror<Scalar>::scalar;
  using calls = policy_calls<fold, scalar>;

  scores_twin(const fold& p, const scores_case& what)
      : policy(p),
        what_(what),
        c_(sized(what)),
        random_{what.seed},
        kv(cache_of<Scalar>(c_)),
        state(fixtures::make_state(p, kv)),
        twin(p, kv, state, c_),
        heads_(run(what)),
        list_(what.active),
        own_(numbers(std::reduce(what.chunks.begin(), what.chunks.end()))),
        queries_(stored(own_)) {
    index_t begin = 0;
    for (const index_t n : what.chunks) {
      for (const index_t h : heads_) {
        append(h, n + (begin == 0 ? what.apart * h : 0));
      }
      observe_both(begin, n, what.before ? begin : 0);
      begin += n;
    }
  }

  /// Scored once more, in one pass.
  void observe_again() {
    observe_both(0, std::reduce(what_.chunks.begin(), what_.chunks.end()), 0);
  }

  /// Any scores, of slots that were merged too.
  void draw_scores() {
    for (const index_t h : heads_) {
      for (index_t s = 0; s < kv.head(h).length(); ++s) {
        const float x = static_cast<float>(random_.below(1U << 20)) + 1;
        state[h].column(fold::prompt_score)[static_cast<std::size_t>(s)] = x;
        twin.device.column(fold::prompt_score, h, s) = x;
      }
    }
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
        const protection always{policy.sinks, policy.prompt_recent, kv.head(h).next_position() - 1};
        if (!always(kv.head(h).position(s)) && score[static_cast<std::size_t>(s)] > 0) {
          free.push_back(score[static_cast<std::size_t>(s)]);
        }
      }
      std::ranges::sort(free, std::greater());
      const auto pins = static_cast<std::size_t>(policy.pinned().scored(budgets[h].slots));
      if (pins > 0 && pins < free.size() && free[pins - 1] < (1 + apart) * free[pins]) {
        return false;
      }
    }
    return true;
  }

  /// Compressed on `count` reference queries after the prompt: the same pins. `tolerance`: of all
  /// else; below 0 it is not compared.
  template <class Budgets>
  void check_compress(Budgets& budgets, index_t count, double tolerance) {
    const auto rows = numbers(count);
    device_buffer<scalar> device(stored(rows));
    std::vector<index_t> at(static_cast<std::size_t>(count));
    std::iota(at.begin(), at.end(), 1000);
    device_buffer<index_t> position(at);
    const query_view<Scalar> asked{rows.data(), count, std::ptrdiff_t{c_.group} * c_.dim,
                                   c_.dim,      row(), at.data()};
    const index_t most = budgets.limits().most_target();
    device_buffer<unsigned char> work(workspace_bytes(policy, view(), count, most));
    const workspace space{work.data(), work.size()};
    calls::compress(policy, view(), twin.device.state,
                    {device.data(), count, asked.head, asked.group, asked.row, position.data()},
                    budgets.limits(), space, order(what_.seed));
    workspace_allocator from(space);
    const auto made = detail::allocate_prompt(from, detail::rule_of(policy, view()),
                                              detail::shape_of(view(), count, most));
    for (std::size_t i = 0; i < heads_.size(); ++i) {
      const index_t h = heads_[i], n = kv.head(h).length();
      INFO("head " << h << ", target " << budgets[h].slots);
      const bool changes = n > budgets[h].slots;
      kvmeld::workspace plans;
      observe(policy, kv.head(h), state[h], asked.of(static_cast<index_t>(i)));
      kvmeld::compress(policy, kv.head(h), state[h], plans, budgets[h],
                       asked.of(static_cast<index_t>(i)));
      const index_t* const into = on_host(made.plan.divided.into) + std::ptrdiff_t{h} * c_.capacity;
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

  /// As `docs/how-to/cuda.md` has it, by the device's scores: pins of each head, by one threshold.
  std::vector<index_t> pins_of_all(index_t slots, bool device) {
    std::vector<float> scores;
    const index_t n = kv.head(0).length();
    for (index_t h = 0; h < c_.heads; ++h) {
      for (index_t s = policy.sinks; s < n - policy.prompt_recent; ++s) {
        scores.push_back(device ? twin.device.column(fold::prompt_score, h, s)
                                : state[h].column(fold::prompt_score)[static_cast<std::size_t>(s)]);
      }
    }
    return global_budgets(scores, c_.heads, c_.heads * (slots - policy.slots_beside_pins()),
                          n - policy.slots_beside_pins() - 1);
  }

  /// Decode steps of all heads.
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
      fixtures::step(policy, kv, state, {fq, fk, fv}, budgets.host(), out);
      calls::step(policy, view(), twin.device.state, dq.data(), {dk.data(), dv.data()},
                  budgets.limits(), theirs.data(), space, order(what_.seed));
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
    c.capacity = std::reduce(what.chunks.begin(), what.chunks.end()) + what.apart * c.heads + 30;
    return c;
  }
  cache_view<scalar> view() {
    const auto x = twin.device.view();
    return what_.active.empty() ? x
                                : x.with_active(list_.data(), static_cast<index_t>(list_.size()));
  }
  std::ptrdiff_t row() const {
    return static_cast<std::ptrdiff_t>(heads_.size()) * c_.group * c_.dim;
  }

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

  /// `n` queries from `begin` on.
  void observe_both(index_t begin, index_t n, index_t before) {
    const std::ptrdiff_t first = begin * row();
    query_view<Scalar> own{own_.data() + first, n, std::ptrdiff_t{c_.group} * c_.dim, c_.dim,
                           row()};
    own.before = before;
    for (std::size_t i = 0; i < heads_.size(); ++i) {
      if (const index_t h = heads_[i]; kv.head(h).length() > 0) {
        observe(policy, kv.head(h), state[h], own.of(static_cast<index_t>(i)));
      }
    }
    device_buffer<unsigned char> work(observe_workspace_bytes(policy, view(), n, before));
    calls::observe(policy, view(), twin.device.state,
                   {queries_.data() + first, n, own.head, own.group, own.row, nullptr, before},
                   {work.data(), work.size()}, order(what_.seed));
    CHECK((work.intact() && queries_.intact()));
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
    const index_t held = kv.head(h).length(), seen = kv.head(h).next_position();
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
    device.length[h] = held + n, device.next_position[h] = seen + n;
  }

  scores_case what_;
  cache_case c_;
  emulator::chance random_;

 public:
  fixtures::cache<Scalar> kv;
  fixtures::state state;
  mirror<Scalar> twin;

 private:
  std::vector<index_t> heads_;
  device_buffer<index_t> list_;
  std::vector<Scalar> own_;  // the prompt's queries
  device_buffer<scalar> queries_;
};

}  // namespace kvmeld::cuda
