// Marks of packets: the options, the settings of the socket, and the packets themselves.
#include "transport/traffic_class.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <netpacket/packet.h>
#include <sys/socket.h>

#include <array>
#include <future>
#include <set>
#include <string>
#include <utility>

#include "base/file_descriptor.h"
#include "conformance/transport_fixture.h"
#include "cpp/transport/own_sockets.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon::testing {
namespace {

TEST(TrafficClassOf, TheDefaultOptionsMarkTheFirstOfTwoClasses) {
  const Options options;
  EXPECT_EQ(traffic_class_of(options, 0).dscp, 46);
  EXPECT_EQ(traffic_class_of(options, 0).socket_priority, 6);
  EXPECT_EQ(traffic_class_of(options, 1).dscp, 0);
  EXPECT_EQ(traffic_class_of(options, 1).socket_priority, 0);
}

TEST(TrafficClassOf, OneClassIsBestEffort) {
  Options options;
  options.priority_classes = 1;
  options.dscp = {0};
  EXPECT_EQ(traffic_class_of(options, 0).dscp, 0);
  EXPECT_EQ(traffic_class_of(options, 0).socket_priority, 0);
}

TEST(TrafficClassOf, ClassesThatTheOptionsDoNotKnowAreTheLast) {
  Options options;
  options.priority_classes = 3;
  options.dscp = {46, 34, 0};
  for (const std::size_t beyond : {std::size_t{3}, std::size_t{7}, std::size_t{0xffffffff}}) {
    EXPECT_EQ(traffic_class_of(options, beyond).dscp, 0);
    EXPECT_EQ(traffic_class_of(options, beyond).socket_priority, 0);
  }
  options.dscp = {26};
  EXPECT_EQ(traffic_class_of(options, 2).dscp, 26) << "one mark for all";
  options.dscp.clear();
  EXPECT_EQ(traffic_class_of(options, 0).dscp, 0) << "no marks";
  EXPECT_EQ(traffic_class_of(options, 0).socket_priority, 6);
}

TEST(TrafficClassOf, SocketPrioritiesAreThoseThatDefaultQueuesServeInThisOrder) {
  for (int classes = 2; classes <= 8; ++classes) {
    Options options;
    options.priority_classes = classes;
    for (int i = 0; i < classes; ++i) {
      const int expected = i == 0 ? 6 : i + 1 == classes ? 0 : 4;
      EXPECT_EQ(traffic_class_of(options, static_cast<std::size_t>(i)).socket_priority, expected) << i;
    }
  }
}

/// The TCP packets of the loopback device to or from a port. Needs the right to listen to a network (CAP_NET_RAW).
class LoopbackCapture {
 public:
  explicit LoopbackCapture(int port)
      : port_(port), socket_(::socket(AF_PACKET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, htons(ETH_P_ALL))) {
    sockaddr_ll loopback{};
    loopback.sll_family = AF_PACKET;
    loopback.sll_protocol = htons(ETH_P_ALL);
    loopback.sll_ifindex = static_cast<int>(::if_nametoindex("lo"));
    if (!socket_) return;
    keep_port();
    hold_all();
    if (::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&loopback), sizeof loopback) != 0) socket_.reset();
  }

  bool permitted() const { return static_cast<bool>(socket_); }

  /// The code points of the TCP packets with data, since the last call: to the port, and from it.
  std::pair<std::set<int>, std::set<int>> code_points() {
    std::pair<std::set<int>, std::set<int>> found;
    std::array<std::uint8_t, 128> packet{};
    for (;;) {
      const ssize_t got = ::recv(socket_.get(), packet.data(), packet.size(), MSG_TRUNC);
      if (got < 0) return found;
      const bool v6 = packet[0] >> 4 == 6;
      const std::size_t tcp_at = v6 ? 40 : std::size_t{packet[0] & 0xfu} * 4;
      if (packet[v6 ? 6 : 9] != IPPROTO_TCP) continue;
      const auto number = [&](std::size_t at) { return packet[at] << 8 | packet[at + 1]; };
      const std::size_t headers = tcp_at + static_cast<std::size_t>(packet[tcp_at + 12] >> 4) * 4;
      if (static_cast<std::size_t>(got) <= headers) continue;
      const int traffic_class = v6 ? (packet[0] & 0xf) << 4 | packet[1] >> 4 : packet[1];
      if (number(tcp_at + 2) == port_) found.first.insert(traffic_class >> 2);
      if (number(tcp_at) == port_) found.second.insert(traffic_class >> 2);
    }
  }

 private:
  /// The kernel drops other packets first: those of other tests would fill the socket's buffer.
  void keep_port() {
    const auto port = static_cast<std::uint32_t>(port_);
    std::array<sock_filter, 12> filter{{
        BPF_STMT(BPF_LD | BPF_B | BPF_ABS, 0),
        BPF_STMT(BPF_ALU | BPF_RSH | BPF_K, 4),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 6, 0, 2),
        BPF_STMT(BPF_LDX | BPF_W | BPF_IMM, 40),
        BPF_JUMP(BPF_JMP | BPF_JA, 1, 0, 0),
        BPF_STMT(BPF_LDX | BPF_B | BPF_MSH, 0),  // the length of IPv4's header
        BPF_STMT(BPF_LD | BPF_H | BPF_IND, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, port, 2, 0),
        BPF_STMT(BPF_LD | BPF_H | BPF_IND, 2),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, port, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, 0xffff),
        BPF_STMT(BPF_RET | BPF_K, 0),
    }};
    const sock_fprog program{filter.size(), filter.data()};
    EXPECT_EQ(::setsockopt(socket_.get(), SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program), 0);
  }

  /// Each packet is charged with all memory that belongs to it, which the default of 200 KB may be too small for.
  void hold_all() {
    const int bytes = 4 << 20;
    if (::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes) != 0)
      ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
  }

  const int port_;
  FileDescriptor socket_;
};

struct Family {
  std::string name;
  std::string listen_on;
  std::string connect_to;  // the host; empty: what the listener says
};

class TcpMarks : public ::testing::TestWithParam<Family> {
 protected:
  void SetUp() override {
    auto accepted = std::make_shared<std::promise<std::shared_ptr<Flow>>>();
    auto listener = transport_->listen(
        loop_, GetParam().listen_on, [accepted](std::shared_ptr<Flow> flow) { accepted->set_value(std::move(flow)); });
    ASSERT_TRUE(listener.ok()) << listener.status().message();
    std::string address = listener.value()->address();
    const std::string port = address.substr(address.rfind(':'));
    port_ = std::stoi(port.substr(1));
    if (!GetParam().connect_to.empty()) address = GetParam().connect_to + port;
    std::promise<Result<std::shared_ptr<Flow>>> connected;
    transport_->connect(loop_, address, Clock::now() + kPatience,
                        [&](Result<std::shared_ptr<Flow>> flow) { connected.set_value(std::move(flow)); });
    auto flow = connected.get_future().get();
    ASSERT_TRUE(flow.ok()) << flow.status().message();
    client_ = std::make_unique<End>(loop_, std::move(flow.value()));
    server_ = std::make_unique<End>(loop_, accepted->get_future().get());
    client_->receive();
    server_->receive();
  }

  Status mark(End& end, const TrafficClass& traffic_class) {
    Status status;
    loop_.call([&] { status = end.flow().set_traffic_class(traffic_class); });
    return status;
  }

  /// Sends one message in each direction.
  void exchange() {
    ++count_;
    client_->send(push_header(1), payload_);
    server_->send(push_header(2), payload_);
    ASSERT_TRUE(server_->recorder.wait_messages(count_));
    ASSERT_TRUE(client_->recorder.wait_messages(count_));
  }

  /// Returns the end whose peer has this port.
  OwnSocket socket_to_port() const {
    for (const OwnSocket& socket : own_sockets())
      if (socket.peer_address.ends_with(":" + std::to_string(port_))) return socket;
    ADD_FAILURE() << "no connection to port " << port_;
    return {};
  }

  const Bytes payload_ = pattern(20'000, 1);
  std::unique_ptr<Transport> transport_ = make_tcp_transport();
  Loop loop_{"marks"};
  int port_ = 0;
  std::size_t count_ = 0;
  std::unique_ptr<End> client_;
  std::unique_ptr<End> server_;
};

TEST_P(TcpMarks, AreInThePacketsOfTheEndThatIsMarked) {
  LoopbackCapture capture(port_);
  if (!capture.permitted()) GTEST_SKIP() << "capturing packets needs CAP_NET_RAW";
  ASSERT_TRUE(mark(*client_, {46, 6}).ok());
  exchange();
  EXPECT_EQ(capture.code_points(), (std::pair(std::set{46}, std::set{0})));
  ASSERT_TRUE(mark(*server_, {10, 0}).ok());
  exchange();
  EXPECT_EQ(capture.code_points(), (std::pair(std::set{46}, std::set{10})));
  ASSERT_TRUE(mark(*client_, {0, 0}).ok());
  exchange();
  EXPECT_EQ(capture.code_points(), (std::pair(std::set{0}, std::set{10}))) << "a mark may be taken back";
}

TEST_P(TcpMarks, TheSocketHasItsPriority) {
  EXPECT_EQ(socket_to_port().priority, 0);
  ASSERT_TRUE(mark(*client_, {46, 6}).ok());
  EXPECT_EQ(socket_to_port().priority, 6);
  ASSERT_TRUE(mark(*client_, {46, 0}).ok());
  EXPECT_EQ(socket_to_port().priority, 0) << "whatever the mark would make of it";
  EXPECT_EQ(socket_to_port().dscp, 46);
}

TEST_P(TcpMarks, OfAClosedFlowAreNothing) {
  client_->close(std::chrono::milliseconds(0));
  EXPECT_TRUE(client_->recorder.wait_closed().ok());
  EXPECT_TRUE(mark(*client_, {46, 6}).ok());
}

INSTANTIATE_TEST_SUITE_P(Families, TcpMarks,
                         ::testing::Values(Family{"v4", "127.0.0.1:0", ""}, Family{"v6", "[::1]:0", ""},
                                           Family{"v4_of_v6", "[::]:0", "127.0.0.1"}),
                         [](const auto& tested) { return tested.param.name; });

class TcpMarksRefused : public TcpMarks {};

TEST_P(TcpMarksRefused, AreNamedAndTheFlowGoesOn) {
  const Status status = mark(*client_, {64, 0});  // is no code point: IPv6 refuses it
  EXPECT_EQ(status.code(), ErrorCode::refused);
  EXPECT_NE(status.message().find("DSCP 64"), std::string::npos) << status.message();
  exchange();
}

INSTANTIATE_TEST_SUITE_P(Families, TcpMarksRefused, ::testing::Values(Family{"v6", "[::1]:0", ""}),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace poseidon::testing
