// SPDX-License-Identifier: MIT
/// Decoding on the device and by the library: the same slots leave, ties included, on numbers whose
/// dot products are exact.
#pragma once

#include "cuda/step_stream.hpp"
#include "cuda/uneven_budgets.hpp"

namespace kvmeld::cuda {

enum class data { integers, random };

inline float number(emulator::chance& random, data kind) {
  return kind == data::integers
             ? whole(random, 2)
             : static_cast<float>(random.below(1U << 20)) / static_cast<float>(1U << 19) - 1.0F;
}

/// Whose attention a step observes: the kernels', or an engine's own.
enum class attends { kernels, engine };

/// `steps` of decoding from a prompt of `prompt` tokens. Every further head begins with a token
/// less than its budget says, which is `apart` slots less.
struct stream_case {
  index_t prompt;
  budget limit;
  index_t steps;
  data kind;
  index_t apart;
  attends by = attends::kernels;
  bool varies = false;  ///< budgets, from step to step
  bool mixed = false;   ///< every second head's trigger is its target + 1
};

/// An engine's own attention: each head's new rows are written behind its slots, where there is
/// room, and ln Σ exp of its logits into `out [heads, group]`.
template <class Scalar>
void attend_by_loops(device_cache<Scalar>& kv, const float* q, const float* k, const float* v,
                     float* out) {
  const cache_case& c = kv.shape;
  for (index_t h = 0; h < c.heads; ++h) {
    const index_t n = kv.length[h];
    if (n < c.capacity) {
      write_row(kv.key(h, n), k + h * c.dim, c.dim),
          write_row(kv.value(h, n), v + h * c.dim, c.dim);
    }
    for (index_t g = 0; g < c.group; ++g) {
      double sum = c.sink(h, g, 0);
      for (index_t s = 0; s < std::min(n + 1, c.capacity); ++s) {
        double dot = 0;
        for (index_t i = 0; i < c.dim; ++i) {
          dot +=
              double{q[(h * c.group + g) * c.dim + i]} * double{number_at(kv.key(h, s), c.dim, i)};
        }
        const double mass = s < n ? double{kv.log_mass[kv.at(h, s)]} : 0.0;
        sum += std::exp(c.logit(dot) + mass);
      }
      out[h * c.group + g] = static_cast<float>(std::log(sum));
    }
  }
}

/// Decodes on the device and by the library, and compares them.
template <class Policy, class scalar>
void policy_calls<Policy, scalar>::check_steps(const Policy& p, const cache_case& c,
                                               const stream_case& what, double tolerance,
                                               std::uint64_t seed) {
  using Scalar = host_scalar<scalar>;
  using number_type = row_number<scalar>;
  const budget& limit = what.limit;
  const data kind = what.kind;
  INFO(p.name() << ", dim " << c.dim << ", group " << c.group << ", prompt " << what.prompt
                << ", target " << limit.slots << ", seed " << seed);
  uneven_budgets budgets(limit, what.apart, c.heads, what.mixed);
  emulator::chance random{seed};
  auto kv = cache_of<Scalar>(c);
  auto state = fixtures::make_state(p, kv);
  const auto scalars = [&](index_t n) {
    std::vector<host_scalar<number_type>> x(static_cast<std::size_t>(n));
    for (auto& e : x) {
      e = static_cast<host_scalar<number_type>>(read_alike<scalar>(number(random, kind)));
    }
    return x;
  };
  for (index_t h = 0; h < c.heads; ++h) {
    const index_t n = std::max(what.prompt - h - what.apart * h, index_t{0});
    const auto k = scalars(n * c.dim), v = scalars(n * c.dim);
    kv.append(h, k, v);
    state[h].extend(n);
    for (index_t k0 = 0; k0 < state[h].slot_stats() && k0 < 1; ++k0) {  // scores, many of them tied
      for (float& x : state[h].column(k0)) {
        x = static_cast<float>(random.below(3));
      }
    }
  }
  for (index_t h = 0; h < c.heads; ++h) {  // as `compress` leaves it
    kvmeld::declared(p).after_compress(kv.head(h), state[h], budgets[h].slots);
  }
  mirror<Scalar, scalar> twin(p, kv, state, c);
  device_buffer<unsigned char> memory(workspace_bytes(p, twin.device.view()));
  const auto nq = c.heads * c.group * c.dim, nk = c.heads * c.dim;
  device_buffer<number_type> q(static_cast<std::size_t>(nq)), k(static_cast<std::size_t>(nk)),
      v(static_cast<std::size_t>(nk)), out(static_cast<std::size_t>(nq));
  device_buffer<float> log_sums(static_cast<std::size_t>(c.heads * c.group));
  std::vector<float> fq(q.size()), fk(k.size()), fv(v.size()), fout(q.size());
  double agreed = 1, worst = 0;
  for (index_t step = 0; step < what.steps; ++step) {
    const auto fill = [&](std::vector<float>& to, device_buffer<number_type>& device, float scale) {
      for (std::size_t i = 0; i < to.size(); ++i) {
        device.host()[i] =
            from_float<number_type>(read_alike<scalar>(scale * number(random, kind)));
        to[i] = to_float(device.host()[i]);
      }
    };
    if (what.varies) {
      budgets.vary(step);
    }
    fill(fq, q, step % 5 == 3 ? 0.0F : 1.0F), fill(fk, k, 1), fill(fv, v, 1);
    fixtures::step(p, kv, state, {fq, fk, fv}, budgets.host(), fout);
    round_rows<scalar>(kv);
    const auto on = seed + static_cast<std::uint64_t>(step);
    if (what.by == attends::engine) {
      attend_by_loops(twin.device, fq.data(), fk.data(), fv.data(), log_sums.host());
      policy_calls::step(p, twin.device.view(), twin.device.state, {q.data(), log_sums.data()},
                         budgets.limits(), {memory.data(), memory.size()}, order(on));
    } else {
      policy_calls::step(p, twin.device.view(), twin.device.state, q.data(), {k.data(), v.data()},
                         budgets.limits(), out.data(), {memory.data(), memory.size()}, order(on));
    }
    if (kind == data::integers) {
      INFO("step " << step);
      twin.check_same(kv, state, tolerance);
    }
    twin.in_device_order(kv, state);
    agreed = std::min(agreed, twin.jaccard(kv));
    for (std::size_t i = 0; i < fout.size() && what.by == attends::kernels; ++i) {
      const double x = double{fout[i]};
      worst = worse(worst, std::abs(double{to_float(out.host()[i])} - x) / (std::abs(x) + 1));
    }
  }
  CHECK(agreed >= 0.999);
  CHECK(worst <= tolerance);
  CHECK((memory.intact() && out.intact()));
}

template <class Scalar, class Policy>
void check_steps(const Policy& p, const cache_case& c, index_t prompt, const budget& limit,
                 index_t steps, data kind, double tolerance, std::uint64_t seed, index_t apart = 0,
                 attends by = attends::kernels) {
  policy_calls<Policy, typename device_scalar<Scalar>::type>::check_steps(
      p, c, {prompt, limit, steps, kind, apart, by}, tolerance, seed);
}

template <class Policy>
void check_decode(const Policy& p, index_t target, std::uint64_t seed) {
  const cache_case c{.heads = 2, .capacity = target + 1, .dim = 32, .group = 2};
  check_steps<float>(p, c, target + 1 - 2, {target}, 24, data::integers, 1e-5, seed);
  check_steps<float>(p, c, 0, {target}, target + 8, data::integers, 1e-5, seed + 1);
  auto paged = c;
  paged.paged = true, paged.group = 4, paged.dim = 40, paged.capacity = target + 4;
  check_steps<Eigen::half>(p, paged, target, {target}, 8, data::integers, 1e-3, seed + 2);
  check_steps<Eigen::bfloat16>(p, paged, target, {target}, 8, data::integers, 1.6e-2, seed + 3);
  check_steps<float>(p, c, target, {target}, 30, data::random, 1e-5, seed + 4);
  check_stream(p, c, {target});
}

}  // namespace kvmeld::cuda
