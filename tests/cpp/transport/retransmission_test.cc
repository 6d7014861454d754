// Lost packets are sent again soon on short connections, where the kernel permits it.
#include "transport/tcp/retransmission.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "cpp/transport/connected_socket.h"

namespace poseidon::testing {
namespace {

constexpr int kLeastTimeoutUs = 45;     // TCP_RTO_MIN_US
constexpr int kAcknowledgementUs = 46;  // TCP_DELACK_MAX_US

/// Returns an option in microseconds. -1 on a kernel that does not know it.
int microseconds_of(int socket, int name) { return own_sockets_detail::option(socket, IPPROTO_TCP, name); }

using Retransmission = ConnectedSocket;

TEST_F(Retransmission, ComesSoonerOnShortConnections) {
  const int before = microseconds_of(socket_.get(), kLeastTimeoutUs);
  if (before < 0) GTEST_SKIP() << "the kernel is older than Linux 6.15";
  tcp::shorten_timeout(socket_.get());
  const int timeout = microseconds_of(socket_.get(), kLeastTimeoutUs);
  const int acknowledgement = microseconds_of(socket_.get(), kAcknowledgementUs);
  EXPECT_GT(before, timeout);
  EXPECT_EQ(timeout, 20'000);
  EXPECT_GE(acknowledgement, 0);
  EXPECT_LT(acknowledgement, timeout) << "or packets would be sent again that have only not been acknowledged yet";
}

TEST_F(Retransmission, LeavesASocketAloneThatIsNoTcpConnection) {
  const FileDescriptor other(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  tcp::shorten_timeout(other.get());
  EXPECT_EQ(microseconds_of(other.get(), kLeastTimeoutUs), -1);
}

}  // namespace
}  // namespace poseidon::testing
