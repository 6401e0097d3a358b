// SPDX-License-Identifier: MIT
// Joins of leaders against a slow walk along them, on numbers whose products are exact.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>

#include "cuda/device_cache.hpp"
#include "kvmeld/cuda/policies/keepkv/join_leaders.cuh"

namespace kvmeld::cuda {
namespace leaders_test {

/// Lists of a head each: the first `held` slots of a shuffled order lead from the start.
struct joining {
  device_buffer<index_t> rows, kept, removed, held, joiners, into, nearest, ends;
  device_buffer<float> score, similarity, norm;

  template <class Scalar>
  joining(device_cache<Scalar>& kv, index_t lead, std::uint64_t seed)
      : rows(heads(kv), 0),
        kept(kv.slots()),
        removed(kv.slots()),
        held(heads(kv)),
        joiners(heads(kv)),
        into(kv.slots(), 0xff),
        nearest(kv.slots(), 0x11),
        ends(kv.slots() + heads(kv)),
        score(kv.slots()),
        similarity(kv.slots()),
        norm(kv.slots()) {
    emulator::chance random{seed};
    for (index_t h = 0; h < kv.shape.heads; ++h) {
      const index_t n = kv.length[h];
      std::vector<index_t> order(static_cast<std::size_t>(n));
      std::iota(order.begin(), order.end(), 0);
      for (index_t i = n - 1; i > 0; --i) {
        std::swap(order[static_cast<std::size_t>(i)],
                  order[random.below(static_cast<std::uint32_t>(i + 1))]);
      }
      held[h] = std::min(lead, n), joiners[h] = n - held[h];
      ends[std::ptrdiff_t{h} * (kv.shape.capacity + 1)] = held[h];
      for (index_t i = 0; i < n; ++i) {
        const index_t s = order[static_cast<std::size_t>(i)];
        i < held[h] ? kept[kv.at(h, i)] = s : removed[kv.at(h, i - held[h])] = s;
      }
    }
  }
  template <class Scalar>
  static std::size_t heads(const device_cache<Scalar>& kv) {
    return static_cast<std::size_t>(kv.shape.heads);
  }
  detail::keep_evict_partition of() {
    return {rows.data(),
            kept.data(),
            removed.data(),
            held.data(),
            joiners.data(),
            into.data(),
            {nearest.data(), score.data()},
            similarity.data()};
  }
  bool intact() const {
    return kept.intact() && removed.intact() && into.intact() && nearest.intact() &&
           ends.intact() && score.intact() && similarity.intact() && norm.intact();
  }
};

/// Does every slot go where the walk sends it? Counts those that join.
template <class Scalar>
bool walked(device_cache<Scalar>& kv, const joining& lists, const joining& before, float least,
            index_t h, index_t& joined) {
  const auto product = [&](index_t a, index_t b) {
    float dot = 0;
    for (index_t i = 0; i < kv.shape.dim; ++i) {
      dot += to_float(kv.key(h, a)[i]) * to_float(kv.key(h, b)[i]);
    }
    return dot;
  };
  const auto inverse = [&](index_t s) {
    const float square = product(s, s);
    return square > 0 ? 1 / std::sqrt(square) : 0.0F;
  };
  std::vector<std::pair<index_t, float>> leaders;
  for (index_t i = 0; i < before.held[h]; ++i) {
    const index_t s = before.kept[kv.at(h, i)];
    leaders.emplace_back(s, inverse(s));
  }
  bool ok = true;
  for (index_t e = 0; e < before.joiners[h]; ++e) {
    const index_t s = before.removed[kv.at(h, e)];
    index_t best = -1;
    float most = 0;
    for (const auto& [to, number] : leaders) {
      const float x = product(s, to) * number;
      if (best < 0 || x > most || (x == most && to < best)) {
        best = to, most = x;
      }
    }
    const float cosine = most * inverse(s);
    const bool joins = best >= 0 && cosine >= least;
    ok = ok && lists.into[kv.at(h, s)] == (joins ? best : s);
    ok = ok && (!joins || lists.similarity[kv.at(h, s)] == cosine);
    if (!joins) {
      leaders.emplace_back(s, inverse(s));
    }
    joined += joins ? 1 : 0;
  }
  return ok;
}

template <class Scalar>
void check_joins(const cache_case& c, std::vector<index_t> lengths, index_t held, float least,
                 std::uint64_t seed) {
  INFO("dim " << c.dim << ", length " << lengths[0] << ", held " << held << ", least " << least
              << ", seed " << seed);
  device_cache<Scalar> kv(c, lengths, seed);
  emulator::chance random{seed + 1};
  for (index_t h = 0; h < c.heads; ++h) {
    for (index_t s = 0; s < lengths[static_cast<std::size_t>(h)]; ++s) {
      const index_t twin = static_cast<index_t>(random.below(static_cast<std::uint32_t>(s + 1)));
      const auto alike = random.below(3);  // many keys are the same, or nearly so; some are zero
      for (index_t i = 0; alike > 0 && i < c.dim; ++i) {
        kv.key(h, s)[i] =
            from_float<Scalar>(s % 7 == 0 ? 0.0F
                                          : to_float(kv.key(h, twin)[i]) +
                                                (alike == 2 && i == s % c.dim ? 1.0F : 0.0F));
      }
    }
  }
  joining lists(kv, held, seed), before(kv, held, seed);
  detail::join(kv.view(), lists.of(), lists.ends.data(), lists.norm.data(), least, order(seed));
  CHECK(lists.intact());
  kv.check_guards();
  index_t joined = 0;
  for (index_t h = 0; h < c.heads; ++h) {
    CHECK(walked(kv, lists, before, least, h, joined));
  }
  CHECK((joined > 0 || lengths[0] < held + 20));
}

TEST_CASE("joins take every number of joiners and leaders around whole tiles") {
  std::uint64_t seed = 1;
  for (const index_t n : {1, 2, 63, 64, 65, 127, 128, 129, 200, 260}) {
    for (const index_t held : {0, 1, 130}) {
      const float least = seed % 2 == 0 ? 0.9F : 0.2F;
      in_turn(seed, [&](auto x) {
        check_joins<decltype(x)>({.capacity = n, .dim = 16}, {n, n / 2}, held, least, seed);
      });
      ++seed;
    }
  }
}

TEST_CASE("joins take every dim, scalar and layout") {
  std::uint64_t seed = 100;
  for (const index_t dim : {8, 33, 64, 100, 128, 160, 256}) {
    const cache_case c{.heads = 1,
                       .capacity = 150,
                       .dim = dim,
                       .paged = dim % 3 == 1,
                       .odd = dim % 8 == 0 ? 0 : 3};
    check_joins<float>(c, {150}, 10, 0.8F, seed++);
    check_joins<half>(c, {150}, 10, 0.8F, seed++);
    check_joins<bfloat16>(c, {140}, 10, 0.8F, seed++);
  }
}

}  // namespace leaders_test
}  // namespace kvmeld::cuda
