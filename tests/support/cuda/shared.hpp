// SPDX-License-Identifier: MIT
/// Shared memory of the CUDA emulator: heap blocks that begin as NaN, know their bounds, and notice
/// when two threads touch an element, one of them writing, with no barrier between.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/accesses.hpp"

namespace kvmeld::cuda {

/// Sixteen bytes, as one access moves them.
template <class T>
struct alignas(16) vector_16 {
  static constexpr index_t size = static_cast<index_t>(16 / sizeof(T));
  T data[size];

  T& operator[](index_t i) { return data[i]; }
  const T& operator[](index_t i) const { return data[i]; }
};

namespace emulator {

/// The last writer of an element and its readers since, and in which interval between barriers.
struct touched {
  struct access {
    std::int32_t thread = -1, barriers = -1, epoch = -1;

    static access now(const block& b) {
      return {static_cast<std::int32_t>(b.thread()), static_cast<std::int32_t>(b.barriers()),
              static_cast<std::int32_t>(b.epoch())};
    }
    bool before(const block& b) const {  // is a barrier between it and now?
      return thread < 0 || thread == b.thread() || barriers != b.barriers() ||
             (thread / 32 == b.thread() / 32 && epoch != b.epoch());
    }
  };
  access writer, reader;  ///< `reader`: the last,
  access lane;            ///< before it another of the same warp,
  access other;           ///< before these one of another warp

  void read(const block& b) {
    if (!writer.before(b)) {
      report(b, "reads", writer, "wrote");
    }
    const access mine = access::now(b);
    // The next writer of an interval conflicts with one of the three, if with any.
    if (reader.thread / 32 != mine.thread / 32) {
      other = reader, lane = {};
    } else if (reader.thread != mine.thread) {
      lane = reader;
    }
    reader = mine;
  }
  void write(const block& b) {
    if (!writer.before(b)) {
      report(b, "writes", writer, "wrote");
    }
    for (const access& a : {reader, lane, other}) {
      if (!a.before(b)) {
        report(b, "writes", a, "read");
      }
    }
    writer = access::now(b);
  }

 private:
  [[noreturn]] static void report(const block& b, const char* does, const access& a,
                                  const char* did) {
    b.fail(std::string("race: ") + does + " what thread " + std::to_string(a.thread) + " " + did +
           " in shared memory, with no barrier between");
  }
};

/// Bytes of shared memory, and what has touched each granule of them.
class shared_bytes {
 public:
  /// Granules are as large as elements, or a power of two that divides these.
  shared_bytes(std::size_t bytes, std::size_t element)
      : bytes_(bytes, 0xff), shift_(std::countr_zero(element)), touched_(bytes >> shift_) {}

  template <class T>
  T read(std::size_t at) {
    each_granule(at, sizeof(T), [](touched& x) { x.read(now()); });
    return get<T>(at);
  }
  template <class T>
  void write(std::size_t at, const T& x) {
    each_granule(at, sizeof(T), [](touched& y) { y.write(now()); });
    set(at, x);
  }
  template <class T>
  T get(std::size_t at) const {
    T x;
    std::memcpy(static_cast<void*>(&x), bytes_.data() + at, sizeof(T));
    return x;
  }
  template <class T>
  void set(std::size_t at, const T& x) {
    std::memcpy(bytes_.data() + at, static_cast<const void*>(&x), sizeof(T));
  }

 private:
  template <class Touch>
  void each_granule(std::size_t at, std::size_t bytes, Touch touch) {
    for (std::size_t g = at >> shift_; g < (at + bytes) >> shift_; ++g) {
      touch(touched_[g]);
    }
  }

  std::vector<unsigned char> bytes_;
  int shift_;
  std::vector<touched> touched_;
};

}  // namespace emulator

template <class T, index_t N>
class shared_array {
 public:
  static constexpr std::size_t element = sizeof(T), bytes = sizeof(T) * N;

  shared_array() : memory_(std::make_shared<emulator::shared_bytes>(bytes, element)) {}
  explicit shared_array(std::shared_ptr<emulator::shared_bytes> memory)
      : memory_(std::move(memory)) {}
  shared_array(const shared_array&) = delete;
  shared_array& operator=(const shared_array&) = delete;

  /// An element: what is read and written through it is noticed.
  class reference {
   public:
    reference(shared_array& array, index_t i) : array_(array), i_(i) {}
    reference(const reference&) = default;
    operator T() const {
      array_.count(i_, sizeof(T));
      return array_.get(i_);
    }
    const reference& operator=(T x) const {
      array_.set(i_, x);
      return *this;
    }
    const reference& operator=(const reference& x) const { return *this = static_cast<T>(x); }
    const reference& operator+=(T x) const { return *this = static_cast<T>(*this) + x; }

   private:
    shared_array& array_;
    index_t i_;
  };

  reference operator[](index_t i) { return {*this, i}; }

  vector_16<T> vector(index_t i) const {
    expect_vector(i);
    count(i, 16);
    vector_16<T> x;
    for (index_t j = 0; j < x.size; ++j) {
      x[j] = get(i + j);
    }
    return x;
  }
  void set_vector(index_t i, const vector_16<T>& x) {
    expect_vector(i);
    for (index_t j = 0; j < x.size; ++j) {
      set(i + j, x[j]);
    }
  }

  /// Two 16-bit elements as a register holds them.
  std::uint32_t pair(index_t i) const {
    count(i, 4);
    return pair_of_row(i);
  }
  /// ... of a row that `vector` has loaded for all lanes.
  std::uint32_t pair_of_row(index_t i) const {
    static_assert(sizeof(T) == 2);
    if (i % 2 != 0) {
      emulator::now().fail("shared memory: expected an even index for a pair, got " +
                           std::to_string(i));
    }
    const T x[2] = {get(i), get(i + 1)};
    std::uint32_t bits = 0;
    std::memcpy(&bits, x, sizeof bits);
    return bits;
  }

  /// Sixteen bytes as four registers hold them.
  vector_16<unsigned> words(index_t i) const {
    const auto x = vector(i);
    vector_16<unsigned> bits;
    std::memcpy(static_cast<void*>(&bits), &x, sizeof bits);
    return bits;
  }

  /// Atomic: no race.
  T add(index_t i, T n) {
    const T before = memory_->get<T>(place(i));
    memory_->set(place(i), static_cast<T>(before + n));
    return before;
  }

 private:
  T get(index_t i) const { return memory_->read<T>(place(i)); }
  void set(index_t i, T x) { memory_->write(place(i), x); }
  /// Banks go by the place in the array: arrays begin at multiples of 16 bytes, all lanes alike.
  static void count(index_t i, std::size_t size) {
    emulator::count(emulator::traffic::kind::shared_load,
                    static_cast<std::uintptr_t>(i) * sizeof(T), size);
  }
  static std::size_t place(index_t i) {
    expect_index(i);
    return static_cast<std::size_t>(i) * sizeof(T);
  }
  static void expect_index(index_t i) {
    if (i < 0 || i >= N) {
      emulator::now().fail("shared memory: expected an index of 0 to " + std::to_string(N - 1) +
                           ", got " + std::to_string(i));
    }
  }
  static void expect_vector(index_t i) {
    if (i % vector_16<T>::size != 0) {
      emulator::now().fail("shared memory: expected an index that is a multiple of " +
                           std::to_string(vector_16<T>::size) + " for a vector, got " +
                           std::to_string(i));
    }
  }

  std::shared_ptr<emulator::shared_bytes> memory_;
};

/// The same shared memory, first as an `A`, then as a `B`: a race between the two is noticed too.
template <class A, class B>
class shared_union {
  std::shared_ptr<emulator::shared_bytes> memory_ = std::make_shared<emulator::shared_bytes>(
      std::max(A::bytes, B::bytes), std::min(A::element, B::element));

 public:
  A first{memory_};
  B then{memory_};
};

}  // namespace kvmeld::cuda
