// SPDX-License-Identifier: MIT
/// What kvmeld refuses: exceptions with a code that an engine can act on.
#pragma once

#include <concepts>  // std::integral
#include <cstdio>    // std::snprintf
#include <initializer_list>
#include <stdexcept>  // std::runtime_error
#include <string>
#include <string_view>

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

/// A call was refused. The message is "kvmeld: call: expected X, got Y", or only what was expected
/// where nothing was given. Nothing has changed, but for the cases that docs/reference/errors.md
/// lists: numbers that no one checked may let `apply` refuse a plan in the middle of a step.
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

/// One piece of a message: text, or a number that `refuse` writes out.
class message_part {
 public:
  message_part(std::string_view text) : kind_(kind::text), text_(text) {}  // NOLINT: pieces mix
  message_part(const char* text) : message_part(std::string_view(text)) {}
  message_part(const std::string& text) : message_part(std::string_view(text)) {}
  message_part(double x) : kind_(kind::number), number_(x) {}
  template <std::integral T>
  requires(!std::same_as<T, char> && !std::same_as<T, bool>) message_part(T x)
      : kind_(T(-1) < T(0) ? kind::integer : kind::natural), integer_(static_cast<long long>(x)) {}

  void append_to(std::string& message) const {
    char digits[32];
    switch (kind_) {
      case kind::text:
        message += text_;
        return;
      case kind::integer:
        (void)std::snprintf(digits, sizeof digits, "%lld", integer_);
        break;
      case kind::natural:
        (void)std::snprintf(digits, sizeof digits, "%llu",
                            static_cast<unsigned long long>(integer_));
        break;
      case kind::number:
        (void)std::snprintf(digits, sizeof digits, "%g", number_);
        break;
    }
    message += digits;
  }

 private:
  enum class kind { text, integer, natural, number } kind_;
  std::string_view text_;
  long long integer_ = 0;
  double number_ = 0;
};

[[noreturn]] inline void refuse(errc code, std::initializer_list<message_part> parts) {
  std::string message = "kvmeld: ";
  for (const message_part& part : parts) {
    part.append_to(message);
  }
  switch (code) {
    case errc::invalid_argument:
      throw invalid_argument(code, message);
    case errc::no_capacity:
      throw no_capacity(code, message);
    default:
      throw error(code, message);
  }
}

}  // namespace detail

/// Throws `error` with `code` unless `ok`:
/// `expects(errc::no_capacity, ok, "append: expected at most ", n, " tokens, got ", tokens)`.
/// The message is put together only when it is needed.
template <class... Parts>
void expects(errc code, bool ok, const Parts&... parts) {
  if (ok) [[likely]] {
    return;
  }
  detail::refuse(code, {parts...});
}

/// The same with `errc::invalid_argument`.
template <class... Parts>
void expects(bool ok, const Parts&... parts) {
  expects(errc::invalid_argument, ok, parts...);
}

}  // namespace kvmeld::inline v0
