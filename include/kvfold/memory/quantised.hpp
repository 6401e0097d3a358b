/// A second cache in int8 with a scale for every few elements: plans are carried out on it, too.
#pragma once

#include <algorithm>  // std::max
#include <cmath>      // std::lround
#include <cstdint>    // std::int8_t
#include <span>

#include "kvfold/memory/view.hpp"

namespace kvfold {
inline namespace v0 {

/// A key or value `[dim]` in int8: element `i` is `codes[i] · scales[i / group]`. The conversion to
/// int8 is symmetric: a group's scale is its largest magnitude / 127, so an element is off by at
/// most half a scale.
struct int8_row {
  std::int8_t* codes;
  float* scales;
  index_t group;

  float operator[](index_t i) const { return static_cast<float>(codes[i]) * scales[i / group]; }
};

/// Copies `x [dim]` into `out` as floats.
inline void to_floats(int8_row x, index_t dim, float* out) {
  for (index_t i = 0; i < dim; ++i) {
    out[i] = x[i];
  }
}

/// `x [dim]` as int8, a scale per group. NaN and Inf have no code: they make their group NaN.
inline void from_floats(const float* x, index_t dim, int8_row out) {
  expects(out.group > 0, "int8: groups of at least 1 element expected, ", out.group, " came");
  constexpr float unknown = std::numeric_limits<float>::quiet_NaN();
  for (index_t begin = 0; begin < dim; begin += out.group) {
    const index_t end = std::min(begin + out.group, dim);
    float most = 0;
    for (index_t i = begin; i < end; ++i) {
      most = std::isfinite(x[i]) ? std::max(most, std::abs(x[i])) : unknown;
      if (std::isnan(most)) {
        break;
      }
    }
    // By division: the inverse of a tiny scale would be infinite.
    const float scale = most / 127.0F;
    out.scales[begin / out.group] = scale;
    for (index_t i = begin; i < end; ++i) {
      const float code = std::isnan(scale) ? 1.0F : scale > 0 ? x[i] / scale : 0.0F;
      out.codes[i] = static_cast<std::int8_t>(std::lround(std::clamp(code, -127.0F, 127.0F)));
    }
  }
}

inline void copy_row(int8_row to, int8_row from, index_t dim) {
  std::copy_n(from.codes, dim, to.codes);
  std::copy_n(from.scales, (dim + to.group - 1) / to.group, to.scales);
}

/// One head's slots in int8, over an engine's own memory: codes `[capacity, dim]`, scales
/// `[capacity, ⌈dim / group⌉]` each, log-mass and positions `[capacity]`. A model of `slot_rows`:
/// it follows another cache's plans. A view, as `head_view` is.
struct int8_head {
  std::int8_t *keys, *values;
  float *key_scales, *value_scales;
  float* masses;
  index_t* positions;
  index_t* slots;  ///< in use
  index_t size;    ///< dim
  index_t group;   ///< elements that share a scale

  index_t length() const { return *slots; }
  index_t dim() const { return size; }
  int8_row key(index_t s) const { return at(keys, key_scales, s); }
  int8_row value(index_t s) const { return at(values, value_scales, s); }
  float& log_mass(index_t s) const { return masses[s]; }
  index_t& position(index_t s) const { return positions[s]; }
  void truncate(index_t length) const {
    expects(length >= 0 && length <= *slots, "truncate: 0 to ", *slots, " slots expected, ", length,
            " came");
    *slots = length;
  }

 private:
  int8_row at(std::int8_t* codes, float* scales, index_t s) const {
    return {codes + std::ptrdiff_t{s} * size,
            scales + std::ptrdiff_t{s} * ((size + group - 1) / group), group};
  }
};

static_assert(slot_rows<int8_head> && slot_rows<head_view<float>>);

}  // namespace v0
}  // namespace kvfold
