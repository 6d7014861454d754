// File descriptors: ownership, and the texts of their errors.
#pragma once

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace poseidon {

/// Owns one file descriptor. Move-only.
///
/// A child of fork() does not keep it: in the child its number is one of /dev/null. Otherwise the peers of a process
/// that is killed would not notice it while one of its children lives, because the connections would stay open.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd);
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
  /// Closes it. A connection is shut down before, so that it ends even if another process has a copy.
  void reset();

 private:
  int fd_ = -1;
};

/// The numbers that objects of FileDescriptor own at this moment. Any thread.
std::vector<int> owned_descriptors();

/// Whether a call on a non-blocking socket failed only because it would have had to block.
inline bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

/// "Connection refused" for ECONNREFUSED, …; thread-safe, unlike strerror.
inline std::string errno_text(int error) { return std::system_category().message(error); }

}  // namespace poseidon
