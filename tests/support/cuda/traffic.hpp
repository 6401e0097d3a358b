// SPDX-License-Identifier: MIT
/// What kernels move on the CUDA emulator, counted as the hardware would serve it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "kvmeld/config.hpp"

namespace kvmeld::cuda::emulator {

/// Counts from its construction to its end what launches of this thread do. Accesses of global
/// memory are those that go through the thin layer, 16 bytes or a pair at a time: rows of keys,
/// values and queries. Plain dereferences are not counted: the numbers beside rows (log-mass,
/// positions, scores, plans), outputs, and rows that are not aligned.
///
/// The n-th accesses of a warp's lanes since all of them met are one of the hardware's.
class traffic {
 public:
  struct moved {
    std::int64_t bytes = 0;    ///< that lanes asked for
    std::int64_t sectors = 0;  ///< of 32 bytes, that warps' accesses touched
  };
  /// An array of global memory; it begins with a sector, as what cudaMalloc gives does.
  struct watched {
    std::uintptr_t begin = 0, end = 0;
    moved loaded, stored;
  };
  enum class kind : std::size_t { load, store, shared_load };

  traffic() : outer_(current) { current = this; }
  traffic(const traffic&) = delete;
  traffic& operator=(const traffic&) = delete;
  ~traffic() { current = outer_; }

  /// Counts what lies in `bytes` bytes from `p` on for itself; what lies nowhere comes to `others`.
  void watch(const void* p, std::size_t bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(p);
    arrays_.push_back({begin, begin + bytes, {}, {}});
  }
  /// In the order of `watch`.
  const watched& of(std::size_t array) const { return arrays_[array]; }
  const watched& others() const { return others_; }

  std::int64_t shared_loads = 0;    ///< of warps, as many as their bytes need: 128 at once
  std::int64_t bank_conflicts = 0;  ///< what they took beyond that
  std::int64_t mmas = 0;            ///< of warps
  std::int64_t barriers = 0;        ///< of blocks
  index_t launches = 0;             ///< of grids that are not empty
  std::int64_t blocks = 0;          ///< of all of them
  /// Of the thread that has most of them: copies of 16 bytes in flight at once, and times that a
  /// thread waited for copies.
  std::size_t copies_at_once = 0, waits = 0;

  // For the emulator.

  void access(kind what, index_t thread, std::uintptr_t at, std::size_t bytes) {
    const auto t = static_cast<std::size_t>(thread);
    if (bytes > 0) {
      pending_.resize(std::max(pending_.size(), t + 1));
      pending_[t][static_cast<std::size_t>(what)].push_back({at, bytes});
    }
  }
  /// The lanes of the warp that begins with thread `first` have met, or ended.
  void settle(std::size_t first) {
    for (const kind what : {kind::load, kind::store, kind::shared_load}) {
      const auto k = static_cast<std::size_t>(what);
      std::vector<part> together;
      for (std::size_t n = 0;; ++n) {
        together.clear();
        for (std::size_t t = first; t < std::min(first + 32, pending_.size()); ++t) {
          if (n < pending_[t][k].size()) {
            together.push_back({t - first, pending_[t][k][n]});
          }
        }
        if (together.empty()) {
          break;
        }
        what == kind::shared_load ? settle_shared(together) : settle_global(together, what);
      }
      for (std::size_t t = first; t < std::min(first + 32, pending_.size()); ++t) {
        pending_[t][k].clear();
      }
    }
  }

  static inline thread_local traffic* current = nullptr;

 private:
  struct place {
    std::uintptr_t at;
    std::size_t bytes;
  };
  struct part {
    std::size_t lane;
    place of;
  };

  void settle_global(const std::vector<part>& together, kind what) {
    std::set<std::pair<watched*, std::uintptr_t>> sectors;
    for (const part& x : together) {
      watched& array = array_of(x.of.at);
      moved& to = what == kind::load ? array.loaded : array.stored;
      to.bytes += static_cast<std::int64_t>(x.of.bytes);
      // An access lies within a sector.
      to.sectors += sectors.insert({&array, (x.of.at - array.begin) / 32}).second ? 1 : 0;
    }
  }
  watched& array_of(std::uintptr_t at) {
    for (watched& x : arrays_) {
      if (x.begin <= at && at < x.end) {
        return x;
      }
    }
    return others_;
  }

  /// As many lanes at once as 128 bytes serve: all with 4 bytes, 8 with 16. They take as long as
  /// the bank of which they want most different words.
  void settle_shared(const std::vector<part>& together) {
    const std::size_t at_once = std::min<std::size_t>(32, 128 / together.front().of.bytes);
    for (auto x = together.begin(); x != together.end();) {
      std::array<std::set<std::uintptr_t>, 32> words;
      const std::size_t group = x->lane / at_once;
      for (; x != together.end() && x->lane / at_once == group; ++x) {
        for (std::size_t b = 0; b < x->of.bytes; b += 4) {
          const std::uintptr_t word = (x->of.at + b) / 4;
          words[word % 32].insert(word);
        }
      }
      std::size_t most = 0;
      for (const auto& of_bank : words) {
        most = std::max(most, of_bank.size());
      }
      ++shared_loads, bank_conflicts += static_cast<std::int64_t>(most) - 1;
    }
  }

  traffic* outer_;
  std::vector<watched> arrays_;
  watched others_;
  std::vector<std::array<std::vector<place>, 3>> pending_;  // by thread
};

}  // namespace kvmeld::cuda::emulator
