// What a worker does where shared memory is forbidden.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <string>

#include "worker/transports.h"

namespace poseidon {
namespace {

/// From now on this process may not make shared memory, as in some containers.
bool forbid_shared_memory() {
  std::array<sock_filter, 4> program{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog filter{program.size(), program.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

TEST(Transports, AutoGoesOnWithoutSharedMemoryAndShmSaysSo) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {  // the filter stays until the process ends
    if (!forbid_shared_memory()) ::_exit(77);
    Options options;
    const auto made = make_transports(options);
    if (!made.ok() || made.value().shm != nullptr || made.value().networks.empty()) ::_exit(1);
    options.transport = Medium::shm;
    const auto refused = make_transports(options);
    if (refused.ok() || refused.status().message().find("use transport=auto") == std::string::npos) ::_exit(2);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "this system has no filters of system calls";
  EXPECT_EQ(WEXITSTATUS(status), 0);
  const auto here = make_transports(Options());
  ASSERT_TRUE(here.ok());
  EXPECT_NE(here.value().shm, nullptr);
}

}  // namespace
}  // namespace poseidon
