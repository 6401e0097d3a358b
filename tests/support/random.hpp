// SPDX-License-Identifier: MIT
// The streams of random bits that the tests draw their data from.
#pragma once

#include <random>

namespace streams {

inline std::mt19937 floats;      // fixtures::normal
inline std::mt19937_64 doubles;  // oracle::normal

/// From the beginning: what main.cpp does before every run of a test case, so that its data are its
/// own, whichever tests and sections ran before.
inline void restart() {
  floats.seed(20261120);
  doubles.seed(20240611);
}

}  // namespace streams
