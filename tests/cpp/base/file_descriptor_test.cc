#include "base/file_descriptor.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>

namespace poseidon {
namespace {

/// Both ends of a connection within this machine.
struct Ends {
  Ends() {
    std::array<int, 2> fds{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()), 0);
    near = FileDescriptor(fds[0]);
    far = FileDescriptor(fds[1]);
  }
  FileDescriptor near;
  FileDescriptor far;
};

bool ends_within_a_second(int fd) {
  pollfd entry{fd, POLLIN, 0};
  char byte = 0;
  return ::poll(&entry, 1, 1000) == 1 && ::read(fd, &byte, 1) == 0;
}

int exit_code(pid_t child) {
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(FileDescriptor, AForkedChildHasItNoMore) {
  const Ends ends;
  const pid_t child = ::fork();
  if (child == 0) {
    int kind = 0;
    socklen_t size = sizeof kind;
    const bool is_socket = ::getsockopt(ends.near.get(), SOL_SOCKET, SO_TYPE, &kind, &size) == 0;
    // The number is taken, so that no object closes what the child opens.
    const bool is_taken = ::fcntl(ends.near.get(), F_GETFD) == FD_CLOEXEC;
    ::_exit(!is_socket && is_taken ? 0 : 1);
  }
  EXPECT_EQ(exit_code(child), 0);
}

TEST(FileDescriptor, AConnectionOfAKilledProcessEndsAlthoughItsChildLives) {
  std::array<int, 2> reports{};
  ASSERT_EQ(::pipe2(reports.data(), O_CLOEXEC), 0);
  const pid_t killed = ::fork();
  if (killed == 0) {
    std::array<int, 2> fds{};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()) != 0) ::_exit(1);
    const FileDescriptor own(fds[0]);
    const int others = ::dup(fds[1]);
    ::close(fds[1]);
    const pid_t child = ::fork();
    if (child == 0) {
      // It lives on, and sees what its parent's peer would see.
      const char seen = ends_within_a_second(others) ? 'y' : 'n';
      ::_exit(::write(reports[1], &seen, 1) == 1 ? 0 : 1);
    }
    ::raise(SIGKILL);
  }
  EXPECT_EQ(exit_code(killed), -1);
  ::close(reports[1]);
  char seen = 0;
  EXPECT_EQ(::read(reports[0], &seen, 1), 1);
  EXPECT_EQ(seen, 'y');
  ::close(reports[0]);
}

TEST(FileDescriptor, AConnectionEndsAlthoughAnotherProcessHasACopy) {
  Ends ends;
  const int copy = ::dup(ends.near.get());
  ends.near.reset();
  EXPECT_TRUE(ends_within_a_second(ends.far.get()));
  ::close(copy);
}

}  // namespace
}  // namespace poseidon
