/// Version, index type and errors: what every other header starts from.
#pragma once

#include <cstdint>    // std::int32_t
#include <sstream>    // std::ostringstream
#include <stdexcept>  // std::invalid_argument

#define KVFOLD_VERSION_MAJOR 0
#define KVFOLD_VERSION_MINOR 1
#define KVFOLD_VERSION_PATCH 0

/// What compiles for the host and, by nvcc, for the device too.
#ifdef __CUDACC__
#define KVFOLD_HD __host__ __device__
#else
#define KVFOLD_HD
#endif

namespace kvfold {

/// Heads, slots, rows, dimensions, positions. Signed, so that differences are what they seem.
using index_t = std::int32_t;

/// What was expected and what came. Whoever throws it has changed nothing.
class invalid_argument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// Refuses bad input: `expects(ok, "attend: ", "probabilities [2, 5] expected, ", n, " floats
/// came")`. The message is put together only when it is needed.
template <class... Parts>
inline void expects(bool ok, const Parts&... parts) {
  if (ok) [[likely]] {
    return;
  }
  std::ostringstream message;
  message << "kvfold: ";
  (message << ... << parts);
  throw invalid_argument(message.str());
}

}  // namespace kvfold
