// SPDX-License-Identifier: MIT
// Column sums against double loops: every scalar, dim, group and combination, counts around whole
// tiles, slots in any order, positions given or not, the log-sum-exp given or not.
#include "kvmeld/cuda/score/column_scores.cuh"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>

#include "cuda/device_cache.hpp"

namespace kvmeld::cuda {
namespace column_scores_test {

struct sums_case {
  index_t count = 20;
  index_t window = 7;
  float decay = 0.9F;
  group_combine combine = group_combine::sum;
  bool positions = false;  // given, in no order; for odd seeds each head has its own
  bool log_sums = false;   // given
  double tolerance = 2e-5;
  std::vector<index_t> active = {};  // heads that the call runs; none: all
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
  for (std::ptrdiff_t i = 0; i < static_cast<std::ptrdiff_t>(q.size()); ++i) {
    q[i] = from_float<Scalar>(0.25F * whole(random, 4));
  }
  const std::ptrdiff_t apart = seed % 2 == 0 ? 0 : what.count;  // a head's to the next's
  device_buffer<index_t> position(static_cast<std::size_t>(c.heads * what.count));
  for (index_t i = 0; i < c.heads * what.count; ++i) {
    position[i] = static_cast<index_t>(random.below(static_cast<std::uint32_t>(c.capacity)));
  }
  for (index_t h = 0; h < c.heads; ++h) {  // swap slots: their order means nothing
    const index_t n = lengths[static_cast<std::size_t>(h)];
    for (index_t s = 0; s < n; s += seed % 2 == 0 ? 1 : 7) {
      const auto other = static_cast<index_t>(random.below(static_cast<std::uint32_t>(n)));
      std::swap(kv.position[kv.at(h, s)], kv.position[kv.at(h, other)]);
    }
  }
  const query_rows<Scalar> rows{q.data(),
                                what.count,
                                std::ptrdiff_t{c.group} * what.count * stride,
                                std::ptrdiff_t{what.count} * stride,
                                stride,
                                what.positions ? position.data() : nullptr,
                                0,
                                apart};
  device_buffer<index_t> active(what.active);
  auto view = kv.view();
  std::vector<index_t> heads = what.active;
  if (heads.empty()) {
    heads.resize(static_cast<std::size_t>(c.heads));
    std::iota(heads.begin(), heads.end(), 0);
  } else {
    view = view.with_active(active.data(), static_cast<index_t>(active.size()));
  }
  std::vector<double> total(kv.slots()), window(kv.slots()), decayed(kv.slots());
  std::vector<double> largest(kv.slots());
  device_buffer<float> lse(static_cast<std::size_t>(c.heads * c.group * what.count));
  for (std::size_t place = 0; place < heads.size(); ++place) {
    const index_t h = heads[place], n = lengths[static_cast<std::size_t>(h)];
    const std::ptrdiff_t of_head = static_cast<std::ptrdiff_t>(place) * rows.head;
    for (index_t i = 0; i < what.count; ++i) {
      const index_t at = what.positions ? position[static_cast<std::ptrdiff_t>(place) * apart + i]
                                        : kv.next_position[h] - what.count + i;
      std::vector<double> all(static_cast<std::size_t>(n));
      for (index_t g = 0; g < c.group; ++g) {
        std::vector<double> p(static_cast<std::size_t>(n));
        double max = c.sinks ? 0.0 : -1e300, sum = 0;
        for (index_t s = 0; s < n; ++s) {
          double dot = 0;
          for (index_t k = 0; k < c.dim; ++k) {
            dot += double{to_float(q[of_head + g * rows.group + i * rows.row + k])} *
                   double{to_float(kv.key(h, s)[k])};
          }
          p[static_cast<std::size_t>(s)] = c.logit(dot) + double{kv.log_mass[kv.at(h, s)]};
          if (kv.position[kv.at(h, s)] <= at) {
            max = std::max(max, p[static_cast<std::size_t>(s)]);
          }
        }
        for (index_t s = 0; s < n; ++s) {
          auto& x = p[static_cast<std::size_t>(s)];
          x = kv.position[kv.at(h, s)] <= at ? std::exp(x - max) : 0.0;
          sum += x;
        }
        sum += c.sink(h, g, max);
        lse[(std::ptrdiff_t{h} * c.group + g) * what.count + i] =
            sum > 0 ? static_cast<float>(max + std::log(sum)) : lowest_score;
        for (std::size_t s = 0; s < p.size(); ++s) {
          const double x = sum > 0 ? p[s] / sum : 0.0;
          all[s] = what.combine == group_combine::max ? std::max(all[s], x) : all[s] + x;
          auto& most = largest[static_cast<std::size_t>(kv.at(h, 0)) + s];
          most = std::max(most, x);
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
  device_buffer<float> t(kv.slots(), 0), w(kv.slots(), 0), d(kv.slots(), 0), u(kv.slots(), 0),
      m(kv.slots(), 0);
  device_buffer<unsigned char> memory(
      column_scores_workspace_bytes(c.heads, c.group, what.count, c.capacity));
  const column_options options{what.window, what.decay, what.combine,
                               what.log_sums ? lse.data() : nullptr};
  const workspace space{memory.data(), memory.size()};
  const auto sums = [&](const column_sums& to, std::uint64_t turn) {
    column_scores(view, rows, options, to, space, order(seed + turn));
  };
  sums({t.data(), w.data(), d.data(), m.data()}, 0);
  double worst = 0;
  const auto compare = [&](const device_buffer<float>& a, const std::vector<double>& b) {
    for (std::size_t s = 0; s < b.size(); ++s) {
      const double error =
          std::abs(double{a[static_cast<std::ptrdiff_t>(s)]} - b[s]) / (std::abs(b[s]) + 1);
      worst = worse(worst, error);
    }
  };
  compare(t, total), compare(w, window), compare(d, decayed), compare(m, largest);
  sums({.total = u.data()}, 1);
  CHECK(t.bytes() == u.bytes());
  if (seed % 3 == 0) {
    sums({.window = w.data()}, 2), sums({.decayed = d.data()}, 3);  // each alone
    compare(w, window), compare(d, decayed);
  }
  CHECK(worst <= what.tolerance);
  CHECK((t.intact() && w.intact() && d.intact() && m.intact()));
  CHECK((memory.intact() && q.intact()));
  kv.check_guards();
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

TEST_CASE("column sums on tensor cores take every group, in tiles and in parts") {
  std::uint64_t seed = 500;
  const auto both = [&](const cache_case& c, const sums_case& what, std::vector<index_t> lengths) {
    seed % 2 == 0 ? check_sums<half>(c, what, lengths, seed)
                  : check_sums<bfloat16>(c, what, lengths, seed);
    ++seed;
  };
  for (index_t group = 1; group <= 16; ++group) {
    const index_t dim = 32 * (1 + group % 4);
    both({.heads = 1, .capacity = 140, .dim = dim, .group = group, .paged = group % 3 == 0},
         {.count = 41, .positions = group % 5 == 1}, {139});
  }
  // Rows of two blocks, columns in three parts, the last of them short; one part where heads are
  // many; heads of every length.
  both({.heads = 1, .capacity = 300, .dim = 64}, {.count = 300, .window = 40}, {300});
  both({.heads = 1, .capacity = 300, .dim = 96, .group = 2, .paged = true, .page = 3},
       {.count = 270}, {267});
  both({.heads = 3, .capacity = 290, .dim = 128}, {.count = 7, .window = 3}, {290, 1, 0});
  both({.heads = 3, .capacity = 130, .dim = 72, .group = 3}, {.count = 130, .active = {2, 0}},
       {129, 130, 33});
  both({.heads = 3, .capacity = 60, .dim = 40, .group = 2}, {.count = 20, .active = {2, 0}},
       {60, 47, 33});
  both({.heads = 1, .capacity = 60, .dim = 40, .group = 40}, {.count = 20}, {60});
  CHECK(detail::column_parts(257, 256, 4096) == 1);
}

TEST_CASE("column sums hold at large logits, at any scale, and far back in a decay") {
  const cache_case c{.heads = 1, .capacity = 150, .dim = 64};
  const auto scaled = [&](float scale) {
    cache_case x = c;
    x.scale = scale;
    return x;
  };
  // Logits of 1e4 are floats to 1e-3.
  check_sums<half>(scaled(700), {.count = 150, .tolerance = 5e-3}, {150}, 600);
  check_sums<bfloat16>(scaled(-700), {.count = 150, .tolerance = 5e-3}, {149}, 601);
  check_sums<half>(scaled(0), {.count = 40}, {150}, 602);
  check_sums<bfloat16>(scaled(1e-20F), {.count = 40}, {150}, 603);
  check_sums<half>(c, {.count = 150, .window = 140, .decay = 0.25F}, {150}, 604);
}

TEST_CASE("column sums cap logits and count sinks, on tensor cores and not") {
  const auto both = [](cache_case c, const sums_case& what, std::uint64_t seed) {
    c.soft_cap = 2, c.sinks = true;
    const std::vector<index_t> lengths{c.capacity, c.capacity / 3};
    check_sums<half>(c, what, lengths, seed);
    check_sums<float>(c, what, lengths, seed + 1);
  };
  both({.capacity = 140, .dim = 40, .group = 3}, {.count = 41}, 700);
  both({.capacity = 300, .dim = 64}, {.count = 300, .window = 40}, 703);  // in parts
  both({.capacity = 33, .dim = 33, .group = 2, .odd = 3}, {.combine = group_combine::max}, 705);
}

TEST_CASE("a chunk's window reaches back to the queries before it") {
  device_cache<half> kv({.heads = 2, .capacity = 60, .dim = 40}, {60, 60}, 7);
  emulator::chance random{8};
  device_buffer<half> q(std::size_t{2} * 60 * 40);
  for (std::ptrdiff_t i = 0; i < static_cast<std::ptrdiff_t>(q.size()); ++i) {
    q[i] = from_float<half>(0.25F * whole(random, 4));
  }
  const query_rows<half> prompt{q.data(), 60, 60 * 40, 60 * 40, 40};
  query_rows<half> chunk = prompt;
  chunk.data += 50 * 40, chunk.count = 10, chunk.before = 50;
  device_buffer<float> a(kv.slots(), 0), b(kv.slots(), 0);
  device_buffer<unsigned char> memory(column_scores_workspace_bytes(2, 1, 60, 60));
  const workspace space{memory.data(), memory.size()};
  column_scores(kv.view(), prompt.reference(25), {}, {a.data()}, space, order());
  column_scores(kv.view(), chunk.reference(25), {}, {b.data()}, space, order());
  CHECK(a.bytes() == b.bytes());
  double sum = 0;
  for (std::ptrdiff_t s = 0; s < 60; ++s) {
    sum += double{a[s]};
  }
  CHECK(std::abs(sum - 25) < 1e-4);
}

TEST_CASE("column sums refuse what does not fit") {
  device_cache<float> kv({.dim = 32}, {3, 3}, 1);
  float x = 0;
  const query_rows<float> q{&x, 1, 0, 0, 0};
  CHECK_THROWS_WITH(column_scores(kv.view(), q, {}, {&x}, {}, order()),
                    Catch::Contains("expected a workspace of 15872 bytes"));
  CHECK_THROWS_WITH(column_scores(kv.view(), {}, {}, {&x}, {}, order()),
                    Catch::Contains("expected at least 1 query, got 0"));
  CHECK_THROWS_WITH(column_scores(kv.view(), q, {.decay = 0}, {&x}, {}, order()),
                    Catch::Contains("expected a decay in (0, 1], got 0"));
}

}  // namespace column_scores_test
}  // namespace kvmeld::cuda
