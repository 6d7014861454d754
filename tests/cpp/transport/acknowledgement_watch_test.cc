#include "transport/tcp/acknowledgement_watch.h"

#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "base/file_descriptor.h"
#include "cpp/transport/own_sockets.h"
#include "simulation/virtual_time.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;
using tcp::AcknowledgementWatch;
using Finding = AcknowledgementWatch::Finding;

/// Two ends of a connection in this process.
struct Ends {
  FileDescriptor sender;
  FileDescriptor receiver;
};

Ends connected_ends() {
  const FileDescriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener.get(), any, size) != 0 || ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), any, &size) != 0)
    return {};
  Ends ends{FileDescriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), {}};
  if (::connect(ends.sender.get(), any, size) != 0) return {};
  ends.receiver = FileDescriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  return ends;
}

/// Looks until the finding is another one than `waiting`, or the time is over.
Finding look_for(AcknowledgementWatch& watch, int socket, milliseconds time) {
  const auto latest = Clock::now() + time;
  Finding finding = watch.look(socket);
  const auto is_over = [&] {
    finding = watch.look(socket);
    return finding != Finding::waiting || Clock::now() >= latest;
  };
  EXPECT_TRUE(testing::eventually(is_over, std::chrono::ceil<milliseconds>(watch.interval())));
  return finding;
}

TEST(AcknowledgementWatch, AnEndWhoseMachineAnswersNothingIsLostAfterTheTime) {
  const Ends ends = connected_ends();
  ASSERT_TRUE(ends.sender && ends.receiver);
  ASSERT_TRUE(cut_off(ends.receiver.get()));
  AcknowledgementWatch watch(ends.sender.get(), milliseconds(800));
  EXPECT_EQ(watch.look(ends.sender.get()), Finding::idle);
  ASSERT_EQ(::send(ends.sender.get(), "x", 1, 0), 1);
  const auto begun = Clock::now();
  EXPECT_EQ(look_for(watch, ends.sender.get(), milliseconds(5'000)), Finding::lost);
  EXPECT_GE(Clock::now() - begun, milliseconds(800));
  EXPECT_LT(Clock::now() - begun, milliseconds(1'500));
}

TEST(AcknowledgementWatch, AnEndThatTakesNothingIsNotLostWhileItsMachineAnswers) {
  const Ends ends = connected_ends();
  ASSERT_TRUE(ends.sender && ends.receiver);
  AcknowledgementWatch watch(ends.sender.get(), milliseconds(800));
  const std::array<char, 1 << 16> bytes{};
  while (::send(ends.sender.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
  }
  EXPECT_EQ(look_for(watch, ends.sender.get(), milliseconds(2'500)), Finding::waiting);
}

TEST(AcknowledgementWatch, AConnectionThatIsNotWatchedHasNoInterval) {
  const Ends ends = connected_ends();
  ASSERT_TRUE(ends.sender);
  EXPECT_EQ(AcknowledgementWatch(ends.sender.get(), milliseconds(0)).interval().count(), 0);
}

}  // namespace
}  // namespace poseidon::testing
