// Float modes and limits that a thread or process inherits, and that it must set itself.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cfenv>
#include <future>
#include <limits>
#include <string>

#include "base/descriptor_limit.h"
#include "base/executor.h"
#include "base/float_mode.h"
#include "base/wipe.h"
#include "transport/loop.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace poseidon {
namespace {

/// Whether the hardware keeps the subnormal half of the smallest normal number in the current mode.
bool keeps_denormals() {
  volatile float small = std::numeric_limits<float>::min();
  volatile float half = small / 2;
  return half != 0 && half + half == small;
}

#if defined(__x86_64__)
TEST(FloatMode, OfLoopsAndExecutorsIsNotThatOfTheirMaker) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // as torch.set_flush_denormal does
  EXPECT_FALSE(keeps_denormals());
  {
    Loop loop("floats");
    bool kept = false;
    loop.call([&kept] { kept = keeps_denormals(); });
    EXPECT_TRUE(kept);
    Executor executor(1);
    std::promise<bool> answer;
    executor.run(
        1, [&answer](std::size_t) { answer.set_value(keeps_denormals()); }, [] {});
    EXPECT_TRUE(answer.get_future().get());
  }
  EXPECT_FALSE(keeps_denormals()) << "the maker's own is left alone";
  _mm_setcsr(before);
}
#endif

/// Runs `body` in a separate process, so that its limits do not affect others. Returns its result.
template <typename Body>
int in_a_child(const Body& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool set_descriptor_limit(rlim_t soft, rlim_t hard) {
  const rlimit limit{soft, hard};
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

rlim_t soft_descriptor_limit() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return limit.rlim_cur;
}

TEST(DescriptorLimit, IsRaisedAsFarAsItHasToBe) {
  EXPECT_EQ(in_a_child([] {
              if (!set_descriptor_limit(64, 4000)) return 1;
              if (!make_room_for_descriptors(1000).ok()) return 2;
              if (soft_descriptor_limit() < 1000 || soft_descriptor_limit() >= 4000) return 3;
              if (!make_room_for_descriptors(3900).ok()) return 4;
              return soft_descriptor_limit() == 4000 ? 0 : 5;
            }),
            0);
}

TEST(DescriptorLimit, ThatIsTooLowIsSaid) {
  EXPECT_EQ(in_a_child([] {
              if (!set_descriptor_limit(64, 128)) return 1;
              const Status status = make_room_for_descriptors(1000);
              if (status.code() != ErrorCode::invalid_argument) return 2;
              const bool clear = status.message().find("1000") != std::string::npos &&
                                 status.message().find("ulimit -Hn") != std::string::npos;
              return clear ? 0 : 3;
            }),
            0);
}

TEST(Wipe, LeavesNothing) {
  std::string secret = "a secret that is longer than what a string keeps in itself";
  const char* const memory = secret.data();
  const std::size_t size = secret.size();
  wipe(secret);
  EXPECT_TRUE(secret.empty());
  for (std::size_t i = 0; i < size; ++i) EXPECT_EQ(memory[i], 0);
}

}  // namespace
}  // namespace poseidon
