// SPDX-License-Identifier: MIT
/// Memory that is held only where it is in use.
#pragma once

#include <algorithm>  // std::min, std::ranges::count_if
#include <cstring>    // std::memset
#include <new>        // std::align_val_t
#include <utility>    // std::exchange, std::swap
#include <vector>

#if defined(__unix__) && !defined(__EMSCRIPTEN__) || defined(__APPLE__)
#define KVMELD_MAPS_MEMORY 1
#include <sys/mman.h>
#include <unistd.h>
#else
#define KVMELD_MAPS_MEMORY 0
#endif

#include "kvmeld/config.hpp"

namespace kvmeld::inline v0::detail {

/// Bytes, all 0 at first, at addresses that stay. On POSIX systems only addresses are reserved: a
/// page of the system's takes memory from its first write on, until it is given back. Huge
/// pages are declined, since one of 2 MiB would be held for its first byte. Blocks of less
/// than a page, and those of other systems, are allocated whole.
class reserved {
 public:
  reserved() = default;
  /// Refused: more bytes than the system has addresses for (`no_capacity`).
  explicit reserved(std::size_t size) : data_(allocate(size)), size_(size) {}
  reserved(reserved&& from) noexcept
      : data_(std::exchange(from.data_, nullptr)), size_(std::exchange(from.size_, 0)) {}
  reserved& operator=(reserved&& from) noexcept {
    std::swap(data_, from.data_), std::swap(size_, from.size_);
    return *this;
  }
  ~reserved() { free(data_, size_); }

  /// Aligned for vectors of any instruction set.
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

  /// Gives back the pages that are whole among bytes `from` to `to` − 1; these are 0 then. Bytes of
  /// other pages stay as they are.
  void release(std::size_t from, std::size_t to) { (void)released(from, to); }
  /// The same, and sets the bytes of other pages to 0.
  void clear(std::size_t from, std::size_t to) {
    const auto [first, last] = released(from, to);
    std::memset(data_ + from, 0, first - from), std::memset(data_ + last, 0, to - last);
  }

  /// Bytes that are in memory: of pages that were written to, or read.
  std::size_t held() const {
#if KVMELD_MAPS_MEMORY
#ifdef __APPLE__
    std::vector<char> pages((size_ + page() - 1) / page());
#else
    std::vector<unsigned char> pages((size_ + page() - 1) / page());
#endif
    if (is_mapped(size_) && ::mincore(data_, size_, pages.data()) == 0) {
      const auto held = std::ranges::count_if(pages, [](auto x) { return (x & 1) != 0; });
      return std::min(size_, page() * static_cast<std::size_t>(held));
    }
#endif
    return size_;
  }

  /// What `data` is allocated and freed by.
  static std::byte* allocate(std::size_t size) {
#if KVMELD_MAPS_MEMORY
    if (is_mapped(size)) {
      std::byte* const to = map(nullptr, size, 0);
      expects(errc::no_capacity, to != nullptr, "cache: expected addresses for ", size,
              " bytes, got none");
#ifdef MADV_NOHUGEPAGE
      (void)::madvise(to, size, MADV_NOHUGEPAGE);
#endif
      return to;
    }
#endif
    auto* const to = static_cast<std::byte*>(::operator new(size, aligned));
    std::memset(to, 0, size);
    return to;
  }
  static void free(std::byte* data, [[maybe_unused]] std::size_t size) {
#if KVMELD_MAPS_MEMORY
    if (data != nullptr && is_mapped(size)) {
      (void)::munmap(data, size);
      return;
    }
#endif
    ::operator delete(data, aligned);
  }

 private:
  static constexpr std::align_val_t aligned{64};

#if KVMELD_MAPS_MEMORY
  static std::size_t page() {
    static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    return bytes;
  }
  static bool is_mapped(std::size_t size) { return size >= page(); }
  static std::byte* map(void* at, std::size_t size, int flags) {
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    void* const to =
        ::mmap(at, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | flags, -1, 0);
    return to == MAP_FAILED ? nullptr : static_cast<std::byte*>(to);
  }
  static bool discard(std::byte* from, std::size_t size) {
#ifdef __linux__
    return ::madvise(from, size, MADV_DONTNEED) == 0;
#else
    return map(from, size, MAP_FIXED) != nullptr;  // elsewhere advice need not be followed
#endif
  }
#endif

  /// Of bytes `from` to `to` − 1, the first that was given back, and the first after these.
  std::pair<std::size_t, std::size_t> released(std::size_t from, std::size_t to) {
#if KVMELD_MAPS_MEMORY
    // Bytes of the last page after the end hold nothing.
    const std::size_t first = (from + page() - 1) / page() * page(),
                      last = to == size_ ? to : to / page() * page();
    if (is_mapped(size_) && first < last && discard(data_ + first, last - first)) {
      return {first, last};
    }
#endif
    return {to, to};
  }

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Of vectors whose memory the system has back as soon as they are destroyed: a heap keeps freed
/// blocks between those in use.
template <class T>
struct reserved_allocator {
  using value_type = T;

  reserved_allocator() = default;
  template <class U>
  reserved_allocator(const reserved_allocator<U>&) {}  // NOLINT: as allocators are made

  T* allocate(std::size_t n) { return reinterpret_cast<T*>(reserved::allocate(n * sizeof(T))); }
  void deallocate(T* data, std::size_t n) {
    reserved::free(reinterpret_cast<std::byte*>(data), n * sizeof(T));
  }
  bool operator==(const reserved_allocator&) const { return true; }
};
template <class T>
using reserved_vector = std::vector<T, reserved_allocator<T>>;

}  // namespace kvmeld::inline v0::detail
