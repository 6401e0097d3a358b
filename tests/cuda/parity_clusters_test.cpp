// SPDX-License-Identifier: MIT
// A head's points in clusters on the device: seeds in pools, the nearest, means. Whole numbers, so
// that products and distances are exact and many of them equal: the library's clusters to the last.
#include <catch2/catch.hpp>

#include "cuda/device_cache.hpp"
#include "cuda/uneven_budgets.hpp"
#include "kvmeld/cuda/search/clusters.cuh"
#include "kvmeld/search/cluster.hpp"

namespace kvmeld::cuda {
namespace parity_clusters_test {

struct clusters_case {
  index_t dim;       ///< of keys and of values
  index_t capacity;  ///< of head 0; every further head has 37 slots less
  index_t slots, apart = 0;
  index_t pins = 20;  ///< every so many slots one is pinned
  int span = 4;       ///< numbers are 0 to this
  bool even = false;  ///< are weights all the same?
  index_t rounds = 3;
};

/// Slots of all heads on both sides.
class clusters_twin {
 public:
  clusters_twin(const clusters_case& what, index_t heads, std::uint64_t seed)
      : what_(what), heads_(heads) {
    emulator::chance random{seed};
    for (index_t h = 0; h < heads; ++h) {
      fill(h, what.capacity - 37 * h, random);
    }
  }

  void check(std::uint64_t seed) {
    uneven_budgets budgets({what_.slots}, what_.apart, heads_);
    const detail::clustered_points x{{points_.data(), square_.data(), what_.capacity, depth_},
                                     weight_.data(),
                                     {rows_.data(),
                                      kept_.data(),
                                      removed_.data(),
                                      kept_count_.data(),
                                      removed_count_.data(),
                                      into_.data(),
                                      {nearest_.data(), similarity_.data()},
                                      nullptr},
                                     {nullptr}};
    const detail::cluster_scratch work{{means_.data(), mean_square_.data(), what_.capacity, depth_},
                                       members_.data(),
                                       spare_.data(),
                                       by_slot_.data(),
                                       begin_.data()};
    const auto run = [&]<index_t Depth>(std::integral_constant<index_t, Depth>) {
      detail::cluster_points<Depth>(x, length_.data(),
                                    {seeds_.data(), gain_.data(), budgets.limits()}, work,
                                    what_.rounds, static_cast<unsigned>(heads_), order(seed));
    };
    what_.dim <= 128 ? run(std::integral_constant<index_t, 256>{})
                     : run(std::integral_constant<index_t, 512>{});
    for (index_t h = 0; h < heads_; ++h) {
      INFO("head " << h);
      check(h, budgets[h].slots);
    }
  }

 private:
  void fill(index_t h, index_t n, emulator::chance& random) {
    const auto at = [&](index_t s) { return std::ptrdiff_t{h} * what_.capacity + s; };
    length_[h] = n;
    for (index_t s = 0; s < n; ++s) {
      float square = 0;
      for (index_t i = 0; i < 2 * what_.dim; ++i) {
        const auto x = static_cast<float>(random.below(static_cast<std::uint32_t>(what_.span + 1)));
        const index_t column = i < what_.dim ? i : depth_ / 2 + i - what_.dim;
        points_[at(s) * depth_ + column] = from_float<half>(x);
        square += x * x;
      }
      square_[at(s)] = square;
      weight_[at(s)] = what_.even ? 1.0F : std::exp2(-static_cast<float>(random.below(6)));
      const bool pinned = what_.pins > 0 && s % what_.pins == 0;
      into_[at(s)] = pinned ? s : -1;
      auto& count = pinned ? kept_count_ : removed_count_;
      (pinned ? kept_ : removed_)[at(count[h])] = s;
      count[h] = count[h] + 1;
    }
  }

  void check(index_t h, index_t target) const {
    const index_t n = length_[h];
    const auto at = [&](index_t s) { return std::ptrdiff_t{h} * what_.capacity + s; };
    dense::matrix x(n, depth_);
    dense::vector weight(n);
    std::vector<char> pinned(static_cast<std::size_t>(n));
    index_t pins = 0;
    for (index_t s = 0; s < n; ++s) {
      for (index_t i = 0; i < depth_; ++i) {
        x(s, i) = to_float(points_[at(s) * depth_ + i]);
      }
      weight[s] = weight_[at(s)];
      const bool is = what_.pins > 0 && s % what_.pins == 0;
      pinned[static_cast<std::size_t>(s)] = is ? 1 : 0, pins += is ? 1 : 0;
    }
    const auto c = search::cluster(x, pinned, weight, target - pins, what_.rounds);
    REQUIRE(kept_count_[h] == target - pins);
    for (index_t i = 0; i < kept_count_[h]; ++i) {
      REQUIRE(kept_[at(i)] == c.seeds[static_cast<std::size_t>(i)]);
    }
    index_t wrong = 0;
    for (index_t e = 0; e < removed_count_[h]; ++e) {
      const index_t s = removed_[at(e)];
      const bool seed = into_[at(s)] == (s | detail::keep_evict_partition::fresh);
      wrong += !seed && nearest_[at(e)] != c.cluster[static_cast<std::size_t>(s)] ? 1 : 0;
    }
    CHECK(wrong == 0);
  }

  clusters_case what_;
  index_t heads_, depth_ = detail::point_rows::depth_of(what_.dim);
  std::size_t slots_ = static_cast<std::size_t>(heads_ * what_.capacity),
              numbers_ = slots_ * static_cast<std::size_t>(depth_),
              of_heads_ = static_cast<std::size_t>(heads_);
  device_buffer<half> points_{numbers_, 0}, means_{numbers_, 0xff};
  device_buffer<float> square_{slots_}, mean_square_{slots_}, weight_{slots_}, gain_{slots_},
      similarity_{slots_};
  device_buffer<index_t> kept_{slots_}, removed_{slots_}, into_{slots_}, nearest_{slots_},
      seeds_{slots_}, members_{slots_}, spare_{slots_}, by_slot_{slots_},
      begin_{slots_ + of_heads_};
  device_buffer<index_t> rows_{of_heads_, 0}, kept_count_{of_heads_, 0},
      removed_count_{of_heads_, 0}, length_{of_heads_, 0};
};

void check_clusters(const clusters_case& what, index_t heads, std::uint64_t seed) {
  INFO("dim " << what.dim << ", " << what.capacity << " slots, target " << what.slots
              << ", a pin of " << what.pins << ", seed " << seed);
  clusters_twin(what, heads, seed).check(seed);
}

TEST_CASE("clusters on the device are the library's") {
  check_clusters({.dim = 4, .capacity = 600, .slots = 190}, 2, 401);  // a pool of a part
  check_clusters({.dim = 4, .capacity = 600, .slots = 330, .apart = 100, .span = 1}, 2, 402);
  check_clusters({.dim = 33, .capacity = 300, .slots = 60, .even = true, .rounds = 1}, 2, 403);
  check_clusters({.dim = 130, .capacity = 130, .slots = 40, .rounds = 2}, 1, 404);
}

TEST_CASE("clusters on the device with nothing pinned, with few slots, with equal ones") {
  check_clusters({.dim = 8, .capacity = 400, .slots = 70, .pins = 0}, 2, 411);
  check_clusters({.dim = 8, .capacity = 400, .slots = 70, .pins = 0, .even = true}, 1, 412);
  check_clusters({.dim = 8, .capacity = 12, .slots = 11, .pins = 4}, 1, 413);
  check_clusters({.dim = 1, .capacity = 300, .slots = 200, .span = 2}, 1, 414);
  check_clusters({.dim = 8, .capacity = 3, .slots = 1, .pins = 0}, 1, 415);
}

TEST_CASE("clusters on the device of more slots than a block has threads for at once") {
  check_clusters({.dim = 2, .capacity = 4300, .slots = 450, .pins = 40, .span = 300, .rounds = 1},
                 1, 421);
}

}  // namespace parity_clusters_test
}  // namespace kvmeld::cuda
