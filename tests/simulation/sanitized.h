// kSanitized: whether a sanitizer is in this build. Everything takes some ten times as long there.
#pragma once

namespace poseidon::testing {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace poseidon::testing
