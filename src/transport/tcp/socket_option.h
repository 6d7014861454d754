// Options of a socket whose value is a number.
#pragma once

#include <sys/socket.h>

namespace poseidon::tcp {

/// Returns false, with errno set, if the kernel does not take the option.
inline bool try_option(int fd, int level, int name, int value) {
  return ::setsockopt(fd, level, name, &value, sizeof(value)) == 0;
}

/// Sets an option that only tunes the connection. A kernel that lacks it still carries the flow.
inline void set_option(int fd, int level, int name, int value) {
  static_cast<void>(try_option(fd, level, name, value));
}

}  // namespace poseidon::tcp
