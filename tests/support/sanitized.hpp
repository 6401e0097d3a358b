// SPDX-License-Identifier: MIT
/// Whether AddressSanitizer is compiled in, for tests whose length is a matter of time.
#pragma once

namespace fixtures {

#if defined(__SANITIZE_ADDRESS__)  // g++
inline constexpr bool sanitized = true;
#elif defined(__has_feature)  // clang++
inline constexpr bool sanitized = __has_feature(address_sanitizer);
#else
inline constexpr bool sanitized = false;
#endif

}  // namespace fixtures
