// Lost packets are sent again soon on short connections, where the kernel permits it.
#include "transport/tcp/retransmission.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <optional>

#include "cpp/transport/connected_socket.h"

namespace poseidon::testing {
namespace {

constexpr int kLeastTimeoutUs = 45;     // TCP_RTO_MIN_US
constexpr int kAcknowledgementUs = 46;  // TCP_DELACK_MAX_US

/// Returns an option in microseconds. None on a kernel that does not know it.
std::optional<int> microseconds_of(int socket, int option) {
  int value = 0;
  socklen_t size = sizeof value;
  if (::getsockopt(socket, IPPROTO_TCP, option, &value, &size) != 0) return std::nullopt;
  return value;
}

using Retransmission = ConnectedSocket;

TEST_F(Retransmission, ComesSoonerOnShortConnections) {
  const auto before = microseconds_of(socket_.get(), kLeastTimeoutUs);
  if (!before) GTEST_SKIP() << "the kernel is older than Linux 6.15";
  tcp::shorten_timeout(socket_.get());
  const auto timeout = microseconds_of(socket_.get(), kLeastTimeoutUs);
  const auto acknowledgement = microseconds_of(socket_.get(), kAcknowledgementUs);
  EXPECT_GT(*before, *timeout);
  EXPECT_EQ(timeout, 20'000);
  EXPECT_LT(acknowledgement, timeout) << "or packets would be sent again that have only not been acknowledged yet";
}

TEST_F(Retransmission, LeavesASocketAloneThatIsNoTcpConnection) {
  const FileDescriptor other(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  tcp::shorten_timeout(other.get());
  EXPECT_EQ(microseconds_of(other.get(), kLeastTimeoutUs), std::nullopt);
}

}  // namespace
}  // namespace poseidon::testing
