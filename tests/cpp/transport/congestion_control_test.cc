// BBR is replaced on short connections, and nothing else is.
#include "transport/tcp/congestion_control.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <future>
#include <string>

#include "conformance/transport_fixture.h"
#include "cpp/transport/connected_socket.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon::testing {
namespace {

bool set_congestion_control(int socket, const std::string& name) {
  return ::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
}

using CongestionControl = ConnectedSocket;

TEST_F(CongestionControl, OfBbrIsReplaced) {
  if (!set_congestion_control(socket_.get(), "bbr")) GTEST_SKIP() << "the system has no BBR";
  tcp::settle_congestion_control(socket_.get());
  EXPECT_EQ(own_sockets_detail::congestion_control_of(socket_.get()), "reno");
}

TEST_F(CongestionControl, OfAnotherKindStays) {
  // Not Reno, which is what BBR is replaced by.
  if (!set_congestion_control(socket_.get(), "cubic")) GTEST_SKIP() << "the system has no CUBIC";
  tcp::avoid_bbr(socket_.get());
  tcp::settle_congestion_control(socket_.get());
  EXPECT_EQ(own_sockets_detail::congestion_control_of(socket_.get()), "cubic");
}

TEST_F(CongestionControl, IsNeverBbrWhereItIsAvoidedBeforeTheConnection) {
  const FileDescriptor fresh(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!set_congestion_control(fresh.get(), "bbr")) GTEST_SKIP() << "the system has no BBR";
  tcp::avoid_bbr(fresh.get());
  EXPECT_EQ(own_sockets_detail::congestion_control_of(fresh.get()), "reno");
}

TEST_F(CongestionControl, OfFlowsIsNotBbr) {
  Loop loop("congestion");
  const auto transport = make_tcp_transport();
  std::promise<Result<std::shared_ptr<Flow>>> answer;
  auto listener = transport->listen(loop, own_loopback(), [](std::shared_ptr<Flow>) {});
  ASSERT_TRUE(listener.ok());
  transport->connect(loop, listener.value()->address(), Clock::now() + kPatience,
                     [&](Result<std::shared_ptr<Flow>> result) { answer.set_value(std::move(result)); });
  const auto flow = answer.get_future().get();
  ASSERT_TRUE(flow.ok()) << flow.status().message();
  std::size_t seen = 0;
  for (const OwnSocket& socket : own_sockets()) {
    if (socket.peer_address != flow.value()->peer_name()) continue;
    EXPECT_FALSE(socket.congestion_control.starts_with("bbr")) << socket.congestion_control;
    ++seen;
  }
  EXPECT_EQ(seen, 1U);
}

}  // namespace
}  // namespace poseidon::testing
