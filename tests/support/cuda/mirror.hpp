/// A cache and state of the CPU's library, once more in device memory: for parity tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <set>

#include "cuda/device_cache.hpp"
#include "kvfold/compress.hpp"
#include "kvfold/memory/cache.hpp"
#include "kvfold/policies/ems.hpp"

namespace kvfold::cuda {

template <class Scalar>
struct device_scalar {
  using type = float;
};
template <>
struct device_scalar<Eigen::half> {
  using type = half;
};
template <>
struct device_scalar<Eigen::bfloat16> {
  using type = bfloat16;
};

/// The device's copy of `kv` and `state`, for a policy `p`.
template <class Scalar>
struct mirror {
  using scalar = typename device_scalar<Scalar>::type;
  device_cache<scalar> device;
  bool nan = false;                            ///< may what is no number be none on both sides?
  std::size_t scratch = 0, after_scratch = 0;  ///< of a state's memory: means nothing
  std::size_t place = 0;  ///< floats after it of which the last is an integer's bits; 0: unknown

  template <class Policy>
  mirror(const Policy& p, cache<Scalar>& kv, const kvfold::state& state, const cache_case& c)
      : device(c, lengths(kv), 1, folds(p), static_cast<index_t>(state[0].memory().size())) {
    if constexpr (std::is_same_v<Policy, ems>) {  // the CPU's scratch: two numbers a query head
      scratch = 4, after_scratch = 4 + 2 * static_cast<std::size_t>(c.group);
      place = 6;
    }
    float* initial = device.state.initial;
    for (const auto& x : traits::columns(p)) {
      *initial++ = x.initial;
    }
    for (index_t h = 0; h < kv.heads(); ++h) {
      const auto head = kv.head(h);
      device.tokens_total[h] = head.tokens_total();
      std::copy_n(state[h].memory().begin(), state[h].memory().size(),
                  device.memory.host() + std::ptrdiff_t{h} * device.state.floats);
      for (index_t s = 0; s < head.length(); ++s) {
        for (index_t i = 0; i < c.dim; ++i) {
          device.key(h, s)[i] = from_float<scalar>(static_cast<float>(head.key(s)[i]));
          device.value(h, s)[i] = from_float<scalar>(static_cast<float>(head.value(s)[i]));
        }
        device.log_mass[device.at(h, s)] = head.log_mass(s);
        device.position[device.at(h, s)] = head.position(s);
        for (index_t k = 0; k < state[h].columns(); ++k) {
          device.column(k, h, s) = state[h].column(k)[static_cast<std::size_t>(s)];
        }
      }
    }
  }

  /// Slot by slot the same positions, and everything else within `tolerance`.
  void check_same(cache<Scalar>& kv, const kvfold::state& state, double tolerance) {
    for (index_t h = 0; h < kv.heads(); ++h) {
      const auto head = kv.head(h);
      REQUIRE(device.length[h] == head.length());
      REQUIRE(device.tokens_total[h] == head.tokens_total());
      double worst = 0;
      const auto near = [&worst, this](float a, float b) {
        if (nan && a != a && b != b) {
          return;
        }
        const double difference = std::abs(double{a} - double{b});
        worst = worse(worst, difference / (std::abs(double{b}) + 1));
      };
      for (index_t s = 0; s < head.length(); ++s) {
        REQUIRE(device.position[device.at(h, s)] == head.position(s));
        near(device.log_mass[device.at(h, s)], head.log_mass(s));
        for (index_t i = 0; i < head.dim(); ++i) {
          near(to_float(device.key(h, s)[i]), static_cast<float>(head.key(s)[i]));
          near(to_float(device.value(h, s)[i]), static_cast<float>(head.value(s)[i]));
        }
        for (index_t k = 0; k < state[h].columns(); ++k) {
          near(device.column(k, h, s), state[h].column(k)[static_cast<std::size_t>(s)]);
        }
      }
      bool same = true;
      for (std::size_t i = 0; i < state[h].memory().size(); ++i) {
        if (i >= scratch && i < after_scratch) {
          continue;
        }
        const float ours =
            device.memory[std::ptrdiff_t{h} * device.state.floats + static_cast<index_t>(i)];
        const float theirs = state[h].memory()[i];
        near(ours, theirs);
        const bool bits = place > 0 ? i >= after_scratch && (i - after_scratch) % place == place - 1
                                    : std::fpclassify(theirs) == FP_SUBNORMAL ||
                                          std::fpclassify(ours) == FP_SUBNORMAL;
        if (bits) {
          same = same && std::memcmp(&ours, &theirs, sizeof ours) == 0;  // an integer's
        }
      }
      CHECK(same);
      CHECK(worst <= tolerance);
    }
    device.check_guards();
  }

  /// |A ∩ B| / |A ∪ B| of the positions kept, all heads.
  double jaccard(cache<Scalar>& kv) {
    std::size_t both = 0, either = 0;
    for (index_t h = 0; h < kv.heads(); ++h) {
      std::set<index_t> a, b;
      for (index_t s = 0; s < kv.head(h).length(); ++s) {
        a.insert(kv.head(h).position(s));
      }
      for (index_t s = 0; s < device.length[h]; ++s) {
        b.insert(device.position[device.at(h, s)]);
      }
      for (const index_t x : a) {
        both += b.count(x);
      }
      either += a.size() + b.size();
    }
    return static_cast<double>(both) / static_cast<double>(either - both);
  }

 private:
  static std::vector<index_t> lengths(cache<Scalar>& kv) {
    std::vector<index_t> n;
    for (index_t h = 0; h < kv.heads(); ++h) {
      n.push_back(kv.head(h).length());
    }
    return n;
  }
  template <class Policy>
  static std::vector<column_merge> folds(const Policy& p) {
    std::vector<column_merge> f;
    for (const auto& c : traits::columns(p)) {
      f.push_back(c.fold);
    }
    return f;
  }
};

}  // namespace kvfold::cuda
