// Column sums against double loops: every scalar, dim, group and combination, counts around whole
// tiles, slots in any order, positions given or not, the log-sum-exp given or not.
#include "kvfold/cuda/score/column_scores.cuh"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

#include "cuda/device_cache.hpp"

namespace kvfold::cuda {
namespace {

struct sums_case {
  index_t count = 20;
  index_t window = 7;
  float decay = 0.9F;
  group_combine combine = group_combine::sum;
  bool positions = false;  // given, in no order
  bool log_sums = false;   // given
};

template <class Scalar>
void check_sums(const cache_case& c, const sums_case& what, std::vector<index_t> lengths,
                std::uint64_t seed) {
  INFO("dim " << c.dim << ", group " << c.group << ", length " << lengths[0] << ", queries "
              << what.count << ", seed " << seed);
  device_cache<Scalar> kv(c, lengths, seed);
  emulator::chance random{seed + 3};
  const index_t stride = c.dim + c.odd;
  device_buffer<Scalar> q(static_cast<std::size_t>(c.heads * c.group * what.count * stride));
  for (std::size_t i = 0; i < q.size(); ++i) {
    q.host()[i] = from_float<Scalar>(0.25F * whole(random, 4));
  }
  device_buffer<index_t> position(static_cast<std::size_t>(what.count));
  for (index_t i = 0; i < what.count; ++i) {
    position[i] = static_cast<index_t>(random.below(static_cast<std::uint32_t>(c.capacity)));
  }
  for (index_t h = 0; h < c.heads; ++h) {  // swap a few slots: their order means nothing
    for (index_t s = 0; s + 5 < lengths[static_cast<std::size_t>(h)]; s += 7) {
      std::swap(kv.position[kv.at(h, s)], kv.position[kv.at(h, s + 5)]);
    }
  }
  const query_rows<Scalar> rows{q.data(),
                                what.count,
                                std::ptrdiff_t{c.group} * what.count * stride,
                                std::ptrdiff_t{what.count} * stride,
                                stride,
                                what.positions ? position.data() : nullptr};
  std::vector<double> total(kv.slots()), window(kv.slots()), decayed(kv.slots());
  device_buffer<float> lse(static_cast<std::size_t>(c.heads * c.group * what.count));
  for (index_t h = 0; h < c.heads; ++h) {
    const index_t n = lengths[static_cast<std::size_t>(h)];
    for (index_t i = 0; i < what.count; ++i) {
      const index_t at = what.positions ? position[i] : kv.tokens_total[h] - what.count + i;
      std::vector<double> all(static_cast<std::size_t>(n));
      for (index_t g = 0; g < c.group; ++g) {
        std::vector<double> p(static_cast<std::size_t>(n));
        double max = -1e300, sum = 0;
        for (index_t s = 0; s < n; ++s) {
          double dot = 0;
          for (index_t k = 0; k < c.dim; ++k) {
            dot += double{to_float((q.host() + h * rows.head + g * rows.group + i * rows.row)[k])} *
                   double{to_float(kv.key(h, s)[k])};
          }
          p[static_cast<std::size_t>(s)] = double{c.scale} * dot + double{kv.log_mass[kv.at(h, s)]};
          if (kv.position[kv.at(h, s)] <= at) {
            max = std::max(max, p[static_cast<std::size_t>(s)]);
          }
        }
        for (index_t s = 0; s < n; ++s) {
          auto& x = p[static_cast<std::size_t>(s)];
          x = kv.position[kv.at(h, s)] <= at ? std::exp(x - max) : 0.0;
          sum += x;
        }
        lse[(std::ptrdiff_t{h} * c.group + g) * what.count + i] =
            sum > 0 ? static_cast<float>(max + std::log(sum)) : lowest_score;
        for (std::size_t s = 0; s < p.size(); ++s) {
          const double x = sum > 0 ? p[s] / sum : 0.0;
          all[s] = what.combine == group_combine::max ? std::max(all[s], x) : all[s] + x;
        }
      }
      for (std::size_t s = 0; s < all.size(); ++s) {
        const double x = all[s] / (what.combine == group_combine::mean ? c.group : 1);
        const auto to = static_cast<std::size_t>(kv.at(h, 0)) + s;
        total[to] += x;
        window[to] += i >= what.count - what.window ? x : 0.0;
        decayed[to] += x * std::pow(double{what.decay}, what.count - 1 - i);
      }
    }
  }
  device_buffer<float> t(kv.slots(), 0), w(kv.slots(), 0), d(kv.slots(), 0), u(kv.slots(), 0);
  device_buffer<unsigned char> memory(column_scores_workspace_bytes(c.heads, c.group, what.count));
  const column_options options{what.window, what.decay, what.combine,
                               what.log_sums ? lse.data() : nullptr};
  const workspace space{memory.data(), memory.size()};
  column_scores(kv.view(), rows, options, {t.data(), w.data(), d.data()}, space, order(seed));
  column_scores(kv.view(), rows, options, {u.data()}, space, order(seed + 1));
  CHECK(t.bytes() == u.bytes());
  CHECK((t.intact() && w.intact() && d.intact() && memory.intact() && q.intact()));
  kv.check_guards();
  double worst = 0;
  for (std::size_t s = 0; s < total.size(); ++s) {
    const auto near = [&](float a, double b) {
      worst = worse(worst, std::abs(double{a} - b) / (std::abs(b) + 1));
    };
    near(t.host()[s], total[s]), near(w.host()[s], window[s]), near(d.host()[s], decayed[s]);
  }
  CHECK(worst <= 2e-5);
}

TEST_CASE("the tile product deals tensor core registers as the hardware does") {
  // Through column sums of one query: any register in another place changes them.
  check_sums<half>({.heads = 1, .capacity = 131, .dim = 48}, {.count = 1}, {131}, 1);
  check_sums<bfloat16>({.heads = 1, .capacity = 131, .dim = 48}, {.count = 1}, {131}, 2);
}

TEST_CASE("column sums take every dim, scalar, group and combination") {
  std::uint64_t seed = 10;
  for (const index_t dim : {32, 40, 64, 33, 100, 128}) {
    for (const auto combine : {group_combine::sum, group_combine::mean, group_combine::max}) {
      if (dim > 64 && combine != group_combine::sum) {
        continue;
      }
      const cache_case c{.heads = dim > 64 ? 1 : 2,
                         .capacity = 70,
                         .dim = dim,
                         .group = dim == 64 ? 5 : 2,
                         .paged = combine == group_combine::sum,
                         .odd = dim % 8 == 0 ? 0 : 3};
      sums_case what{.combine = combine, .positions = dim == 40, .log_sums = dim == 32};
      in_turn(seed++, [&](auto x) {  // 4 dims: every combination meets every scalar
        check_sums<decltype(x)>(c, what, {67, 9}, seed);
      });
    }
  }
  for (index_t group = 1; group <= 16; ++group) {
    in_turn(seed++, [&](auto x) {
      check_sums<decltype(x)>({.heads = 1, .capacity = 33, .dim = 8, .group = group},
                              {.count = 20, .combine = group_combine::mean}, {33}, seed);
    });
  }
  const cache_case deep{.heads = 1, .capacity = 70, .dim = 256};
  check_sums<float>(deep, {}, {70}, seed++);
  check_sums<half>(deep, {}, {70}, seed++);
  check_sums<bfloat16>(deep, {}, {70}, seed++);
}

TEST_CASE("column sums take every count of slots and queries around whole tiles") {
  std::uint64_t seed = 300;
  for (const index_t n : {1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257}) {
    const cache_case c{.heads = 2, .capacity = n, .dim = 16};
    check_sums<float>(c, {.count = std::max(n / 2, 1)}, {n, 0}, seed++);
    check_sums<half>(c, {.count = n, .window = n / 3}, {n, n / 2}, seed++);
  }
}

TEST_CASE("column sums refuse what does not fit") {
  device_cache<float> kv({.dim = 32}, {3, 3}, 1);
  float x = 0;
  const query_rows<float> q{&x, 1, 0, 0, 0};
  CHECK_THROWS_WITH(column_scores(kv.view(), q, {}, {&x}, {}, order()),
                    Catch::Contains("a workspace of 8 bytes expected"));
  CHECK_THROWS_WITH(column_scores(kv.view(), {}, {}, {&x}, {}, order()),
                    Catch::Contains("at least 1 query expected, 0 came"));
  CHECK_THROWS_WITH(column_scores(kv.view(), q, {.decay = 0}, {&x}, {}, order()),
                    Catch::Contains("a decay in (0, 1] expected, 0 came"));
}

}  // namespace
}  // namespace kvfold::cuda
