#include "base/file_descriptor.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace poseidon {

namespace {

// Linux allows no more in a process, unless fs.nr_open was raised. Children keep those above.
constexpr std::size_t kMostTracked = std::size_t{1} << 20;
constexpr std::size_t kBits = 64;

// A bit for each descriptor that an object owns. A child of fork() reads it where no lock may be taken.
std::array<std::atomic<std::uint64_t>, kMostTracked / kBits> owned;
std::atomic<std::size_t> used_words{0};  // from the beginning of `owned`
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// Runs in a child of fork(), which has one thread and may call only functions that are safe in signal handlers. The
/// numbers stay taken, so that the copies of the parent's objects close nothing of the child's own.
void leave_to_parent() {
  const int error = errno;
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  const std::size_t end = used_words.load();
  for (std::size_t word = 0; word < end; ++word) {
    for (std::uint64_t bits = owned[word].load(); bits != 0; bits &= bits - 1) {
      const auto fd = static_cast<int>(word * kBits) + std::countr_zero(bits);
      if (nothing < 0 || ::dup3(nothing, fd, O_CLOEXEC) < 0) ::close(fd);
    }
  }
  if (nothing >= 0) ::close(nothing);
  errno = error;
}

void track(int fd) {
  [[maybe_unused]] static const int registered = ::pthread_atfork(nullptr, nullptr, leave_to_parent);
  const auto number = static_cast<std::size_t>(fd);
  if (number >= kMostTracked) return;
  const std::size_t words = number / kBits + 1;
  for (std::size_t now = used_words.load(); now < words && !used_words.compare_exchange_weak(now, words);) {
  }
  owned[number / kBits].fetch_or(std::uint64_t{1} << number % kBits);
}

void forget(int fd) {
  const auto number = static_cast<std::size_t>(fd);
  if (number < kMostTracked) owned[number / kBits].fetch_and(~(std::uint64_t{1} << number % kBits));
}

}  // namespace

std::vector<int> owned_descriptors() {
  std::vector<int> found;
  const std::size_t end = used_words.load();
  for (std::size_t word = 0; word < end; ++word)
    for (std::uint64_t bits = owned[word].load(); bits != 0; bits &= bits - 1)
      found.push_back(static_cast<int>(word * kBits) + std::countr_zero(bits));
  return found;
}

FileDescriptor::FileDescriptor(int fd) : fd_(fd) {
  if (fd_ >= 0) track(fd_);
}

void FileDescriptor::reset() {
  if (fd_ < 0) return;
  ::shutdown(fd_, SHUT_RDWR);  // fails without an effect where it is no socket
  forget(fd_);                 // before another thread may get the number
  ::close(std::exchange(fd_, -1));
}

}  // namespace poseidon
