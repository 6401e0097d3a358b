// SPDX-License-Identifier: MIT
// What fold's scores are multiplied by: how far a token stands out in all heads of a model.
//
// Readings that the library follows:
//  - The mean is over the heads that measured a slot for the token, the leverage of a head over its
//    mean counts; of a head whose keys are all alike it counts as 1.
//  - A slot's token is the one at its position, whatever else it holds.
#pragma once

#include <map>

#include "oracle/lookahead.hpp"

namespace oracle {

/// u_t ^ exponent, by position, of the heads of a model that share slots.
inline std::map<int, double> leverage_weights(const std::vector<head>& heads, const rope& rotation,
                                              double exponent, double ridge = 1) {
  std::map<int, vec> all;
  for (const head& h : heads) {
    const vec lever = leverage(unrotated_keys(h, rotation), ridge);
    double sum = 0;
    for (const double l : lever) sum += l;
    for (std::size_t j = 0; j < lever.size(); ++j)
      all[h.slots[j].position].push_back(
          sum > 0 ? lever[j] * static_cast<double>(lever.size()) / sum : 1);
  }
  std::map<int, double> weights;
  for (const auto& [position, of_heads] : all) {
    double u = 0;
    for (const double x : of_heads) u += x / static_cast<double>(of_heads.size());
    weights[position] = std::pow(u, exponent);
  }
  return weights;
}

}  // namespace oracle
