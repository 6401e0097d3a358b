// The parts of fold's fit of values against double loops.
#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "cuda/device_cache.hpp"
#include "kvfold/cuda/policies/fold/values.cuh"

namespace kvfold::cuda {
namespace {

/// Queries `[heads, group, count, dim]` that all heads but those with −1 in `planned` ask.
template <class Scalar>
struct asked_queries {
  cache_case c;
  index_t count;
  device_buffer<Scalar> q;
  device_buffer<index_t> planned;

  asked_queries(const cache_case& of, index_t n, std::vector<index_t> plans, std::uint64_t seed)
      : c(of),
        count(n),
        q(static_cast<std::size_t>(c.heads * c.group * n * c.dim)),
        planned(plans) {
    emulator::chance random{seed};
    for (std::size_t i = 0; i < q.size(); ++i) {
      q.host()[i] = from_float<Scalar>(static_cast<float>(random.below(401)) / 100 - 2);
    }
  }
  index_t all() const { return c.group * count; }
  detail::chosen_rows<Scalar> rows() {
    const std::ptrdiff_t member = std::ptrdiff_t{count} * c.dim;
    return {{q.data(), count, c.group * member, member, c.dim}, q.data(), count, planned.data()};
  }
  float at(index_t h, index_t i, index_t e) { return to_float(q[(h * all() + i) * c.dim + e]); }
};

template <class Scalar>
void check_outputs(cache_case c, std::vector<index_t> lengths, index_t count, std::uint64_t seed) {
  INFO("dim " << c.dim << ", group " << c.group << ", paged " << c.paged << ", seed " << seed);
  c.scale = 1 / std::sqrt(static_cast<float>(c.dim));
  device_cache<Scalar> kv(c, lengths, seed);
  std::vector<index_t> plans(lengths.size(), 0);
  plans.back() = -1;
  asked_queries<Scalar> asked(c, count, plans, seed + 1);
  const auto size = static_cast<std::size_t>(c.heads * asked.all());
  device_buffer<float> lse(size), out(std::vector(size * static_cast<std::size_t>(c.dim), 7.0F));
  std::vector<double> wanted;
  for (index_t h = 0; h < c.heads; ++h) {
    const index_t n = lengths[static_cast<std::size_t>(h)];
    for (index_t q = 0; q < asked.all(); ++q) {
      std::vector<double> logit, output(static_cast<std::size_t>(c.dim), 0.0);
      double sum = 0;
      for (index_t s = 0; s < n; ++s) {
        double dot = 0;
        for (index_t e = 0; e < c.dim; ++e) {
          dot += double{asked.at(h, q, e)} * double{to_float(kv.key(h, s)[e])};
        }
        logit.push_back(double{c.scale} * dot + double{kv.log_mass[kv.at(h, s)]});
        sum += std::exp(logit.back());
      }
      lse[h * asked.all() + q] = static_cast<float>(std::log(sum));
      for (index_t s = 0; s < n; ++s) {
        for (index_t e = 0; e < c.dim; ++e) {
          output[static_cast<std::size_t>(e)] +=
              std::exp(logit[static_cast<std::size_t>(s)] - std::log(sum)) *
              double{to_float(kv.value(h, s)[e])};
        }
      }
      wanted.insert(wanted.end(), output.begin(), output.end());
    }
  }
  detail::outputs_of(kv.view(), asked.rows(), lse.data(), out.data(), order(seed));
  const auto first = out.bytes();
  detail::outputs_of(kv.view(), asked.rows(), lse.data(), out.data(), order(seed + 1));
  CHECK(out.bytes() == first);
  CHECK((out.intact() && lse.intact()));
  kv.check_guards();
  double worst = 0, largest = 0;
  const std::size_t last = wanted.size() - wanted.size() / static_cast<std::size_t>(c.heads);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const double x = double{out[static_cast<std::ptrdiff_t>(i)]};
    if (i >= last) {
      worst = x == 7 ? worst : 1e30;  // this head stays as it is
    } else {
      worst = std::max(worst, std::isfinite(x) ? std::abs(x - wanted[i]) : 1e30);
      largest = std::max(largest, std::abs(wanted[i]));
    }
  }
  CHECK(worst <= 1e-5 * largest);
}

TEST_CASE("reference outputs are as good as float, whatever the scalar") {
  check_outputs<half>({.heads = 2, .capacity = 70, .dim = 40, .group = 2}, {70, 9}, 40, 1);
  check_outputs<bfloat16>({.heads = 2, .capacity = 65, .dim = 128, .paged = true}, {65, 64}, 20, 2);
  check_outputs<half>({.heads = 2, .capacity = 33, .dim = 168}, {33, 5}, 5, 3);
  check_outputs<half>({.heads = 2, .capacity = 33, .dim = 33}, {33, 5}, 5, 4);  // not aligned
  check_outputs<float>({.heads = 2, .capacity = 40, .dim = 32}, {40, 5}, 20, 5);
}

}  // namespace
}  // namespace kvfold::cuda
