// SPDX-License-Identifier: MIT
/// A cache and state of the CPU's library, once more in device memory: for parity tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <type_traits>

#include "cuda/device_cache.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/policies/ems.hpp"
#include "support/all_heads.hpp"
#include "support/typed_cache.hpp"

namespace kvmeld::cuda {

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
template <>
struct device_scalar<kvmeld::q8_0> {
  using type = q8_0<float>;
};
/// The other way. The library has no fp8: floats, whose numbers must be fp8's.
template <class Scalar>
using host_scalar =
    std::conditional_t<in_blocks<Scalar>, kvmeld::q8_0,
                       std::conditional_t<std::is_same_v<Scalar, half>, Eigen::half,
                                          std::conditional_t<std::is_same_v<Scalar, bfloat16>,
                                                             Eigen::bfloat16, row_number<Scalar>>>>;

/// Writes a row of the library's, or numbers, as the device lays them out.
template <class Scalar, class Row>
void write_row(Scalar* to, const Row& from, index_t dim) {
  for (index_t i = 0; i < dim; ++i) {
    to[i] = from_float<Scalar>(static_cast<float>(from[i]));
  }
}
template <class Number>
void write_row(q8_0<Number>* to, const row<kvmeld::q8_0>& from, index_t dim) {
  for (index_t i = 0; i < dim; i += block_numbers) {
    const kvmeld::q8_0& block = from.data[i / block_numbers];
    std::memcpy(to + i, block.codes, sizeof block.codes);
    std::memcpy(to + padded<q8_0<Number>>(dim) + i / block_numbers * 2, &block.scale,
                sizeof block.scale);
  }
}
template <class Number>
void write_row(q8_0<Number>* to, const float* from, index_t dim) {
  std::vector<kvmeld::q8_0> blocks(static_cast<std::size_t>(row_size<kvmeld::q8_0>(dim)));
  kvmeld::detail::store_row(from, row<kvmeld::q8_0>{blocks.data()}, dim);
  write_row(to, row<kvmeld::q8_0>{blocks.data()}, dim);
}
/// A number that both sides read alike: the library has no rows in fp8, and rounds queries over
/// rows in q8_0 to 16 bits.
template <class Scalar>
float read_alike(float x) {
  if constexpr (detail::row_format<Scalar>::fp8) {
    return to_float(from_float<Scalar>(x));
  } else if constexpr (in_blocks<Scalar>) {
    return std::round(x * 0x1p12F) * 0x1p-12F;
  } else {
    return x;
  }
}
/// Rows that the library has merged in float, rounded once, as a storage of `Scalar` would.
template <class Scalar, class Cache>
void round_rows(Cache& kv) {
  if constexpr (detail::row_format<Scalar>::fp8) {
    for (index_t h = 0; h < kv.heads(); ++h) {
      const auto head = kv.head(h);
      for (index_t s = 0; s < head.length(); ++s) {
        for (const auto row : {head.key(s), head.value(s)}) {
          for (index_t i = 0; i < head.dim(); ++i) {
            row.data[i] = read_alike<Scalar>(row.data[i]);
          }
        }
      }
    }
  }
}
/// The distance of the code next to number `i` of a row, or more; 0: rows have no codes.
template <class Scalar>
double code_apart(const Scalar* row, index_t dim, index_t i) {
  if constexpr (in_blocks<Scalar>) {
    half scale;
    std::memcpy(&scale, row + padded<Scalar>(dim) + i / block_numbers * 2, sizeof scale);
    return 1.001 * double{to_float(scale)};
  } else if constexpr (narrow_rows<Scalar>) {
    return std::abs(double{to_float(row[i])}) / 7 + 0x1p-9;
  } else {
    return 0;
  }
}
/// An empty cache of that shape.
template <class Scalar>
fixtures::cache<Scalar> cache_of(const cache_case& c) {
  return fixtures::cache<Scalar>{{.heads = c.heads,
                                  .group = c.group,
                                  .dim = c.dim,
                                  .capacity = c.capacity,
                                  .scale = c.scale,
                                  .rope = c.rope == nullptr ? rotary() : *c.rope,
                                  .soft_cap = c.soft_cap,
                                  .sink_logits = c.sink_logits()}};
}

/// The device's copy of `kv` and `state`, for a policy `p`.
template <class Scalar, class Device = typename device_scalar<Scalar>::type>
struct mirror {
  using scalar = Device;
  device_cache<scalar> device;
  bool nan = false;        ///< may what is no number be none on both sides?
  bool means = false;      ///< ZSMerge: the CPU's memory has means in float, the device's none
  std::size_t places = 0;  ///< EMS: where in a state's memory the places of tokens begin

  template <class Policy>
  mirror(const Policy& p, fixtures::cache<Scalar>& kv, const fixtures::state& state,
         const cache_case& c)
      : device(c, lengths(kv), 1, folds(p), static_cast<index_t>(state[0].memory().size())) {
    device.spec = &kv.head(0).spec();
    means = p.name() == std::string_view("zsmerge") && !in_blocks<Device>;
    if constexpr (std::is_same_v<Policy, ems>) {  // behind counts and scratch
      places = counts + 1 + 2 * static_cast<std::size_t>(c.group);
    }
    float* initial = device.state.initial;
    for (const auto& x : kvmeld::declared(p).slot_stats()) {
      *initial++ = x.initial;
    }
    for (index_t h = 0; h < kv.heads(); ++h) {
      const auto head = kv.head(h);
      device.next_position[h] = head.next_position();
      std::copy_n(state[h].memory().begin(), state[h].memory().size(),
                  device.memory.host() + std::ptrdiff_t{h} * device.state.floats);
      for (index_t s = 0; s < head.length(); ++s) {
        write_row(device.key(h, s), head.key(s), c.dim);
        write_row(device.value(h, s), head.value(s), c.dim);
        device.log_mass[device.at(h, s)] = head.log_mass(s);
        device.position[device.at(h, s)] = head.position(s);
        for (index_t k = 0; k < state[h].slot_stats(); ++k) {
          device.column(k, h, s) = state[h].column(k)[static_cast<std::size_t>(s)];
        }
      }
    }
  }

  /// Brings the library's slots into the device's order, where both hold the same positions: a plan
  /// of many leaves those that stay where they are here, and moves all down there. Ties go by slot.
  void in_device_order(fixtures::cache<Scalar>& kv, fixtures::state& state) {
    auto rows = kv;
    auto columns = state;
    for (index_t h = 0; h < kv.heads(); ++h) {
      const head_ref head = kv.head(h), before = rows.head(h);
      std::map<index_t, index_t> slot;
      for (index_t s = 0; s < head.length(); ++s) {
        slot[before.position(s)] = s;
      }
      bool same = device.length[h] == head.length();
      for (index_t s = 0; same && s < head.length(); ++s) {
        same = slot.contains(device.position[device.at(h, s)]);
      }
      for (index_t s = 0; same && s < head.length(); ++s) {
        const index_t from = slot.at(device.position[device.at(h, s)]);
        kvmeld::detail::copy_row(head.key(s), before.key(from), head.dim());
        kvmeld::detail::copy_row(head.value(s), before.value(from), head.dim());
        head.log_mass(s) = before.log_mass(from), head.position(s) = before.position(from);
        for (index_t k = 0; k < state[h].slot_stats(); ++k) {
          state[h].column(k)[static_cast<std::size_t>(s)] =
              columns[h].column(k)[static_cast<std::size_t>(from)];
        }
      }
    }
  }

  /// The same slots, by position, and everything else within `tolerance`; but for one in a thousand
  /// numbers of narrow rows, which a merge may have rounded to the next code.
  void check_same(fixtures::cache<Scalar>& kv, fixtures::state& state, double tolerance) {
    in_device_order(kv, state);
    for (index_t h = 0; h < kv.heads(); ++h) {
      const auto head = kv.head(h);
      REQUIRE(device.length[h] == head.length());
      REQUIRE(device.next_position[h] == head.next_position());
      double worst = 0;
      std::size_t coded = 0, by_a_code = 0;
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
          const auto same_number = [&](const scalar* row, float b) {
            const float a = number_at(row, head.dim(), i);
            const double difference = std::abs(double{a} - double{b});
            const bool next = difference > tolerance * (std::abs(double{b}) + 1) &&
                              difference <= code_apart(row, head.dim(), i);
            coded += narrow_rows<scalar> ? 1 : 0, by_a_code += next ? 1 : 0;
            near(next ? b : a, b);
          };
          same_number(device.key(h, s), static_cast<float>(head.key(s)[i]));
          same_number(device.value(h, s), static_cast<float>(head.value(s)[i]));
        }
        for (index_t k = 0; k < state[h].slot_stats() - (places > 0 ? 1 : 0); ++k) {
          near(device.column(k, h, s), state[h].column(k)[static_cast<std::size_t>(s)]);
        }
      }
      const auto theirs = state[h].memory();
      const float* const ours =
          std::as_const(device.memory).host() + std::ptrdiff_t{h} * device.state.floats;
      bool same = places == 0 || same_tokens(ours, h, state[h], head.length(), near);
      const std::size_t both = places > 0 ? counts : means ? 0 : theirs.size();
      for (std::size_t i = 0; i < both; ++i) {
        near(ours[i], theirs[i]);
        if (std::fpclassify(theirs[i]) == FP_SUBNORMAL ||
            std::fpclassify(ours[i]) == FP_SUBNORMAL) {
          same = same && std::memcmp(&ours[i], &theirs[i], sizeof *ours) == 0;  // an integer's
        }
      }
      CHECK(same);
      CHECK(worst <= tolerance);
      CHECK(by_a_code * 1000 <= coded);
    }
    device.check_guards();
  }

  /// |A ∩ B| / |A ∪ B| of the positions kept, all heads.
  double jaccard(fixtures::cache<Scalar>& kv) {
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
  static constexpr std::size_t counts = 3;  // of EMS's table; then the free places' list

  /// EMS: has every slot the same tokens in the same order, wherever in the table they lie? The
  /// order in which places were freed goes by scores, and may go by their last bits.
  template <class Near>
  bool same_tokens(const float* memory, index_t h, const head_state& state, index_t length,
                   const Near& near) {
    enum { next = 4, position = 5, fields = 6 };
    const auto place = [this](const float* from, float link) {
      return from + places + (static_cast<std::size_t>(link) - 1) * fields;
    };
    for (index_t s = 0; s < length; ++s) {
      float ours = device.column(next, h, s),
            theirs = state.column(next)[static_cast<std::size_t>(s)];
      while (ours != 0 && theirs != 0) {
        const float *const a = place(memory, ours), *const b = place(state.memory().data(), theirs);
        for (std::size_t f = 0; f < next; ++f) {
          near(a[f], b[f]);
        }
        if (std::memcmp(a + position, b + position, sizeof *a) != 0) {
          return false;
        }
        ours = a[next], theirs = b[next];
      }
      if (ours != 0 || theirs != 0) {
        return false;
      }
    }
    return true;
  }
  static std::vector<index_t> lengths(fixtures::cache<Scalar>& kv) {
    std::vector<index_t> n;
    for (index_t h = 0; h < kv.heads(); ++h) {
      n.push_back(kv.head(h).length());
    }
    return n;
  }
  template <class Policy>
  static std::vector<slot_reduce> folds(const Policy& p) {
    std::vector<slot_reduce> f;
    for (const auto& c : kvmeld::declared(p).slot_stats()) {
      f.push_back(c.reduce);
    }
    return f;
  }
};

}  // namespace kvmeld::cuda
