// File descriptors: ownership, and the texts of their errors.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

namespace poseidon {

/// Owns one file descriptor. Move-only.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~FileDescriptor() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

/// Whether a call on a non-blocking socket failed only because it would have had to block.
inline bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

/// "Connection refused" for ECONNREFUSED, …; thread-safe, unlike strerror.
inline std::string errno_text(int error) { return std::system_category().message(error); }

}  // namespace poseidon
