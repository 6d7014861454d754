// Every setting of the core. The table options.def says what each one means, which values are allowed and what is
// the default; this header makes the struct and the enumerations from it.
//
// The core reads no environment variables: python/poseidon/options/ resolves keyword, command line, environment,
// configuration file and default, in that order, and passes the result here.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace poseidon {

/// The largest values of Options::straggler_steps and Options::staleness.
inline constexpr std::uint32_t kMostStragglerSteps = 64;
inline constexpr std::uint32_t kMostStaleness = 1u << 20;

#define POSEIDON_VALUE(enumerator, name, help) enumerator,
#define POSEIDON_ENUM(type, help, values) enum class type : std::uint8_t { values };
#include "poseidon/options.def"  // IWYU pragma: keep

/// A value of an enumeration: what users write for it, and a sentence on what it does.
template <typename Enum>
struct Choice {
  Enum value;
  const char* name;
  const char* help;
};

/// choices_of(Medium()), …: all values of an enumeration, in the order of the table.
#define POSEIDON_VALUE(enumerator, name, help) {enumerator, name, help},
// NOLINTBEGIN(bugprone-macro-parentheses): a type cannot be in parentheses
#define POSEIDON_ENUM(type, help, values)                 \
  inline std::span<const Choice<type>> choices_of(type) { \
    using enum type;                                      \
    static constexpr Choice<type> all[] = {values};       \
    return all;                                           \
  }
// NOLINTEND(bugprone-macro-parentheses)
#include "poseidon/options.def"

/// What users write for `value`.
template <typename Enum>
std::string_view name_of(Enum value) {
  for (const auto& choice : choices_of(value))
    if (choice.value == value) return choice.name;
  return {};
}

/// The settings of one process. All processes of a job must agree on most of them; `Client::connect` checks that.
struct Options {
#define POSEIDON_OPTION(type, name, default_value, kind, help) type name = default_value;
#define POSEIDON_FIELD(type, name, default_value, help) type name = default_value;
#include "poseidon/options.def"
};

/// How long a process is waited for that runs and is late.
inline std::chrono::milliseconds longest_wait(const Options& options) {
  return options.late_timeout > options.timeout ? options.late_timeout : options.timeout;
}

/// Whether this build has OpenSSL, which Options::tls needs.
bool tls_available();

}  // namespace poseidon
