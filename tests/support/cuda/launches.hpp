// SPDX-License-Identifier: MIT
/// Launches of the CUDA emulator: blocks in turn, each on what it may find in device memory.
#pragma once

#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/block.hpp"
#include "cuda/device_memory.hpp"
#include "cuda/overlaps.hpp"
#include "cuda/small_card.hpp"

namespace kvmeld::cuda {

/// The order in which threads and blocks run.
struct stream {
  std::uint64_t seed = 1;
};

/// A pending copy to the host: it arrives when the host asks for it a second time.
struct copied {
  std::vector<unsigned char> bytes;
  void* to = nullptr;
  bool asked = false;
};
using event = copied*;

struct extent {
  unsigned x = 1, y = 1, z = 1;
};

inline void wait_for_previous();

namespace detail {
template <class Part>
bool is_idle(const Part& part);  // idle.cuh
}

namespace emulator {
inline thread_local extent block_index, grid;
inline thread_local index_t threads_that_waited;

template <class Kernel>
void launch(const Kernel& kernel, extent blocks, stream order, bool early) {
  static_assert(std::is_trivially_copyable_v<Kernel> && Kernel::threads % 32 == 0);
  if (blocks.x > 0x7fffffffU || blocks.y > 0xffffU || blocks.z > 0xffffU) {
    throw error("launch: expected a grid of at most 2147483647, 65535 and 65535 blocks, got " +
                std::to_string(blocks.x) + ", " + std::to_string(blocks.y) + " and " +
                std::to_string(blocks.z));
  }
  chance random{order.seed * 2654435761U + 1};
  std::vector<unsigned> todo(std::size_t{blocks.x} * blocks.y * blocks.z);
  std::iota(todo.begin(), todo.end(), 0U);
  for (std::size_t i = todo.size(); i > 1; --i) {
    std::swap(todo[i - 1], todo[random.below(static_cast<std::uint32_t>(i))]);
  }
  if (traffic::current != nullptr && !todo.empty()) {
    ++traffic::current->launches;
    traffic::current->blocks += static_cast<std::int64_t>(todo.size());
  }
  emulator::grid = blocks;
  const emulator::device_open memory;
  changes late;  // what launches before may still have to write
  if (early) {
    late = changes(overlapped());
  } else {
    overlapped() = image();
  }
  const bool at_once = simultaneous_blocks::alive() > 0;
  const device_image before = at_once ? image() : device_image{};
  std::vector<changes> of_blocks;
  for (const unsigned b : todo) {
    emulator::block_index = {b % blocks.x, b / blocks.x % blocks.y, b / blocks.x / blocks.y};
    const auto shared = std::make_unique<typename Kernel::shared_memory>();
    threads_that_waited = 0;
    late.undo();
    block(
        Kernel::threads, random.state + b,
        [&kernel, &shared] { detail::is_idle(kernel) ? wait_for_previous() : kernel(*shared); },
        [&late] { late.redo(); })
        .run();
    if (early && threads_that_waited != Kernel::threads) {
      throw error("a kernel launched early: " + std::to_string(threads_that_waited) + " of " +
                  std::to_string(Kernel::threads) + " threads waited for the previous launch");
    }
    if (at_once) {
      changes mine(before);
      for (const changes& other : of_blocks) {
        if (mine.meets(other)) {
          throw error("race: two blocks of a launch write the same global memory");
        }
      }
      mine.undo();
      of_blocks.push_back(mine);
    }
  }
  for (changes& x : of_blocks) {
    x.redo();
  }
}

}  // namespace emulator

template <class Kernel>
bool fits() {
  return !Kernel::roomy || emulator::small_card::alive() == 0;
}
/// As an H100's 132 multiprocessors with 228 KiB each.
inline int blocks_at_once(std::size_t shared) {
  return 132 * static_cast<int>(228 * 1024 / (shared + 1024));
}
template <class Kernel>
void launch(const Kernel& kernel, extent blocks, stream order) {
  emulator::launch(kernel, blocks, order, false);
}
/// Launches run one after another, but until it waits the block of an early one finds what there
/// was before the launches that it may overlap.
template <class Kernel>
void launch_early(const Kernel& kernel, extent blocks, stream order) {
  emulator::launch(kernel, blocks, order, true);
}
template <class T>
void copy_to_host(T* host, const T* device, std::size_t count, event done, stream) {
  done->bytes.resize(count * sizeof(T)), done->to = host, done->asked = false;
  emulator::copy(done->bytes.data(), reinterpret_cast<const unsigned char*>(device),
                 done->bytes.size());
}
inline bool is_done(event done) {
  if (done->asked) {
    std::memcpy(done->to, done->bytes.data(), done->bytes.size());
  }
  return std::exchange(done->asked, true);
}
inline void let_next_start() {}
inline void wait_for_previous() {
  ++emulator::threads_that_waited;
  emulator::now().wait_for_launch();
}

}  // namespace kvmeld::cuda
