// invariant: what must be true in every state of the process, in every build. If it is not, the process aborts with a
// message (docs/errors.md). What a peer or a user's program can cause is no invariant: that is a Status.
#pragma once

namespace poseidon {

/// Writes the place and the text to stderr and aborts.
[[noreturn]] void break_down(const char* text, const char* file = __builtin_FILE(), int line = __builtin_LINE());

/// Aborts unless `holds`. `rule` says what must be true, such as "a syncer starts only when it is idle". It costs a
/// comparison, so it may stand on paths for every chunk or message, and not in loops over elements.
inline void invariant(bool holds, const char* rule, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (!holds) [[unlikely]]
    break_down(rule, file, line);
}

}  // namespace poseidon
