// SPDX-License-Identifier: MIT
/// What kvmeld refuses: exceptions with a code that an engine can act on.
#pragma once

#include <concepts>   // std::integral
#include <cstdio>     // std::snprintf, std::fputs
#include <cstdlib>    // std::abort
#include <stdexcept>  // std::runtime_error
#include <string>
#include <string_view>

#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
#define KVMELD_EXCEPTIONS 1
#else
#define KVMELD_EXCEPTIONS 0
#endif

namespace kvmeld::inline v0 {

/// Why a call was refused.
enum class errc {
  invalid_argument,  ///< a mistake of the caller's: sizes, parameters, budgets, null
  no_capacity,       ///< a head's slots, or its positions, are all in use
  no_page,           ///< a page table has no page for a slot
  not_finite,        ///< NaN or Inf: in what comes in, where the cache checks, or in a plan
  unsupported,       ///< a policy cannot do it: decode, where it compresses prompts only
  corrupt_file,      ///< what `load` read is not what this cache saved, or `save`'s stream failed
};

#if !KVMELD_EXCEPTIONS
/// In a program without exceptions (`-fno-exceptions`), a refused call calls this, if it was set.
/// Unless it leaves (`std::longjmp`, `std::exit`), the message is printed to stderr and the program
/// aborted. To be set before other threads call anything.
inline void (*refusal_handler)(errc code, const char* message) = nullptr;
#endif

/// A call was refused. The message is "kvmeld: call: expected X, got Y", or only what was expected
/// where nothing was given. Nothing has changed, but for the cases that docs/reference/errors.md
/// lists.
class error : public std::runtime_error {
 public:
  /// `message`: "fn: expected X, got Y".
  error(errc code, const std::string& message) : std::runtime_error(message), code_(code) {}

  /// Why the call was refused: what an engine can act on.
  errc code() const noexcept { return code_; }

 private:
  errc code_;
};

/// A mistake of the caller's.
class invalid_argument : public error {
 public:
  using error::error;
};

/// A full head or cache: compress, or give it more memory.
class no_capacity : public error {
 public:
  using error::error;
};

namespace detail {

/// One piece of a message.
/// @{
inline void append(std::string& message, std::string_view text) { message += text; }
inline void append(std::string& message, double x) {
  char digits[32];
  (void)std::snprintf(digits, sizeof digits, "%g", x);
  message += digits;
}
template <std::integral T>
requires(!std::same_as<T, char> && !std::same_as<T, bool>) void append(std::string& message, T x) {
  message += std::to_string(x);
}
/// @}

/// Throws the type of `code`.
[[noreturn]] inline void raise(errc code, const std::string& message) {
#if KVMELD_EXCEPTIONS
  switch (code) {
    case errc::invalid_argument:
      throw invalid_argument(code, message);
    case errc::no_capacity:
      throw no_capacity(code, message);
    default:
      throw error(code, message);
  }
#else
  if (refusal_handler != nullptr) {
    refusal_handler(code, message.c_str());
  }
  (void)std::fputs((message + '\n').c_str(), stderr);
  std::abort();
#endif
}

/// Carries out `call`; where it throws, `undo` too.
void or_undo(const auto& call, [[maybe_unused]] const auto& undo) {
#if KVMELD_EXCEPTIONS
  try {
    call();
  } catch (...) {
    undo();
    throw;
  }
#else
  call();
#endif
}

/// Throws `error` with a message of these parts, texts or numbers.
template <class... Parts>
[[noreturn]] void refuse(errc code, Parts... parts) {
  std::string message = "kvmeld: ";
  (append(message, parts), ...);
  raise(code, message);
}

}  // namespace detail

/// Throws `error` with `code` unless `ok`:
/// `expects(errc::no_capacity, ok, "append: expected at most ", n, " tokens, got ", tokens)`.
/// The message is put together only when it is needed; parts are copied always, so that a view of a
/// `std::string` belongs here.
template <class... Parts>
void expects(errc code, bool ok, Parts... parts) {
  if (ok) [[likely]] {
    return;
  }
  detail::refuse(code, parts...);
}

/// The same with `errc::invalid_argument`.
template <class... Parts>
void expects(bool ok, Parts... parts) {
  if (ok) [[likely]] {
    return;
  }
  detail::refuse(errc::invalid_argument, parts...);
}

}  // namespace kvmeld::inline v0
