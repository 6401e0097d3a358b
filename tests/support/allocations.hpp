// SPDX-License-Identifier: MIT
// Allocations of the test program so far, all of them: policies/stream_test.cpp counts.
#pragma once

#include <atomic>
#include <cstddef>

namespace fixtures {

extern std::atomic<std::size_t> allocations;

}  // namespace fixtures
