// SPDX-License-Identifier: MIT
/// Memory that the host and the device each have a copy of. What the host has changed goes to the
/// device before the next call (`before_call`), what a call has changed comes back when the host
/// looks. Copies are made only then, and nothing but a look waits for the device.
///
/// On the emulator the device's copy is memory of its own too: a test that forgets which side it is
/// on fails there first, and under AddressSanitizer a host that reads the device's memory is seen.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda {

namespace device_side {

#ifdef __CUDACC__

inline unsigned char* allocate(std::size_t bytes) {
  void* p = nullptr;
  detail::check(cudaMalloc(&p, bytes < 1 ? 1 : bytes), "cudaMalloc", __FILE__, __LINE__);
  return static_cast<unsigned char*>(p);
}
inline void release(unsigned char* p) { cudaFree(p); }
inline void write(unsigned char* to, const unsigned char* from, std::size_t bytes) {
  // The source is staged before this returns: the host may write there again at once.
  detail::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice), "to the device", __FILE__,
                __LINE__);
}
inline void read(unsigned char* to, const unsigned char* from, std::size_t bytes) {
  detail::check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "to the host", __FILE__,
                __LINE__);
}
inline void fill(unsigned char* to, int byte, std::size_t bytes) {
  detail::check(cudaMemsetAsync(to, byte, bytes), "cudaMemset", __FILE__, __LINE__);
}

#else

using emulator::allocate, emulator::release, emulator::fill;
inline void write(unsigned char* to, const unsigned char* from, std::size_t bytes) {
  emulator::copy(to, from, bytes);
}
inline void read(unsigned char* to, const unsigned char* from, std::size_t bytes) {
  emulator::copy(to, from, bytes);
}

#endif

}  // namespace device_side

/// So many bytes on both sides.
class two_sides {
 public:
  two_sides(std::size_t bytes, int fill)
      : host_(bytes, static_cast<unsigned char>(fill)), device_(device_side::allocate(bytes)) {
    all().push_back(this);
  }
  two_sides(const two_sides&) = delete;
  two_sides& operator=(const two_sides&) = delete;
  ~two_sides() {
    all().erase(std::find(all().begin(), all().end(), this));
    device_side::release(device_);
  }

  std::size_t size() const { return host_.size(); }
  unsigned char* device() const { return device_; }
  /// To read from.
  const unsigned char* host() const {
    if (newer_ == side::device) {
      device_side::read(host_.data(), device_, host_.size());
      newer_ = side::none;
    }
    return host_.data();
  }
  /// To write to.
  unsigned char* host() {
    std::as_const(*this).host();
    newer_ = side::host;
    return host_.data();
  }
  /// Sets the first `bytes` on the device, in the order of calls.
  void fill(int byte, std::size_t bytes) {
    upload();
    device_side::fill(device_, byte, bytes);
    newer_ = side::device;
  }

  static std::vector<two_sides*>& all() {
    static std::vector<two_sides*> list;
    return list;
  }
  /// A call may read and write everything on the device.
  static void before_call() {
    for (two_sides* x : all()) {
      x->upload();
      x->newer_ = side::device;
    }
  }

 private:
  enum class side { none, host, device };

  void upload() {
    if (newer_ == side::host) {
      device_side::write(device_, host_.data(), host_.size());
    }
  }

  mutable std::vector<unsigned char> host_;
  unsigned char* device_;
  mutable side newer_ = side::host;
};

/// What the device has at `p`, for the host to read.
template <class T>
const T* on_host(const T* p) {
  const auto* const at = reinterpret_cast<const unsigned char*>(p);
  for (const two_sides* x : two_sides::all()) {
    if (at >= x->device() && at < x->device() + x->size()) {
      return reinterpret_cast<const T*>(x->host() + (at - x->device()));
    }
  }
  return nullptr;
}

}  // namespace kvmeld::cuda
