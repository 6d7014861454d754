// Errors of TCP alone: peers that send invalid data, cut streams, wrong addresses, a lack of descriptors.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <array>
#include <thread>

#include "base/file_descriptor.h"
#include "conformance/handshakes.h"
#include "conformance/transport_fixture.h"
#include "transport/tcp/address.h"
#include "transport/tcp/tcp_flow.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;

/// A flow of the transport whose peer is a plain socket of the test.
class TcpRawPeer : public ::testing::Test {
 protected:
  void SetUp() override {
    auto accepted = std::make_shared<std::promise<std::shared_ptr<Flow>>>();
    auto listener = transport_->listen(
        loop_, "127.0.0.1:0", [accepted](std::shared_ptr<Flow> flow) { accepted->set_value(std::move(flow)); });
    ASSERT_TRUE(listener.ok()) << listener.status().message();
    const auto where = tcp::resolve(listener.value()->address());
    ASSERT_TRUE(where.ok());
    peer_ = FileDescriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::connect(peer_.get(), where.value()[0].get(), where.value()[0].size_bytes), 0);
    ASSERT_TRUE(let_in(peer_.get()));
    end_ = std::make_unique<End>(loop_, accepted->get_future().get());
    end_->receive();
  }

  void write(std::span<const std::byte> bytes) {
    ASSERT_EQ(::send(peer_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }

  static std::array<std::byte, wire::kHeaderBytes> encoded(std::uint64_t payload_bytes) {
    wire::Header header = push_header(1);
    header.payload_bytes = payload_bytes;
    std::array<std::byte, wire::kHeaderBytes> bytes;
    wire::encode(header, bytes);
    return bytes;
  }

  std::unique_ptr<Transport> transport_ = make_tcp_transport();
  Loop loop_{"tcp test"};
  FileDescriptor peer_;
  std::unique_ptr<End> end_;
};

TEST_F(TcpRawPeer, GarbageIsAMismatch) {
  write(pattern(4096, 3));
  const Status status = end_->recorder.wait_closed();
  EXPECT_EQ(status.code(), ErrorCode::mismatch);
  EXPECT_NE(status.message().find(end_->flow().peer_name()), std::string::npos) << status.message();
}

TEST_F(TcpRawPeer, AnotherProtocolIsAMismatch) {
  const char request[] = "GET / HTTP/1.1\r\nHost: example.org\r\nUser-Agent: a browser that lost its way\r\n\r\n";
  write(std::as_bytes(std::span(request)));
  EXPECT_EQ(end_->recorder.wait_closed().code(), ErrorCode::mismatch);
}

TEST_F(TcpRawPeer, AnOversizedPayloadIsAMismatch) {
  write(encoded(wire::kMaxPayloadBytes + 1));
  EXPECT_EQ(end_->recorder.wait_closed().code(), ErrorCode::mismatch);
}

TEST_F(TcpRawPeer, ACutHeaderIsAPeerLost) {
  const auto header = encoded(0);
  write(std::span(header).first(30));
  peer_.reset();
  const Status status = end_->recorder.wait_closed();
  EXPECT_EQ(status.code(), ErrorCode::peer_lost);
  EXPECT_NE(status.message().find("in the middle of a message"), std::string::npos) << status.message();
}

TEST_F(TcpRawPeer, ACutPayloadIsAPeerLost) {
  write(encoded(1000));
  write(pattern(999, 1));
  peer_.reset();
  const Status status = end_->recorder.wait_closed();
  EXPECT_EQ(status.code(), ErrorCode::peer_lost);
  EXPECT_NE(status.message().find("in the middle of a message"), std::string::npos) << status.message();
  EXPECT_TRUE(end_->recorder.messages().empty());
}

TEST_F(TcpRawPeer, AnOrderlyEndIsAPeerLostToo) {
  write(encoded(0));
  peer_.reset();
  const Status status = end_->recorder.wait_closed();
  EXPECT_EQ(status.code(), ErrorCode::peer_lost);
  EXPECT_NE(status.message().find("(closed by the peer)"), std::string::npos) << status.message();
  EXPECT_EQ(end_->recorder.messages().size(), 1u);
}

TEST_F(TcpRawPeer, AResetIsAPeerLostThatSaysSo) {
  const sockaddr nobody{AF_UNSPEC, {}};  // a connection to nobody is given up at once
  ASSERT_EQ(::connect(peer_.get(), &nobody, sizeof(nobody)), 0);
  const Status status = end_->recorder.wait_closed();
  EXPECT_EQ(status.code(), ErrorCode::peer_lost);
  EXPECT_NE(status.message().find("reset"), std::string::npos) << status.message();
}

TEST_F(TcpRawPeer, MessagesMayArriveByteByByte) {
  const Bytes payload = pattern(100, 1);
  for (int message = 0; message < 3; ++message) {
    for (const std::byte one : encoded(payload.size())) write(std::span(&one, 1));
    for (const std::byte one : payload) write(std::span(&one, 1));
  }
  ASSERT_TRUE(end_->recorder.wait_messages(3));
  for (const auto& message : end_->recorder.messages()) EXPECT_EQ(message.payload, payload);
}

TEST_F(TcpRawPeer, WhatThePeerSaidBeforeItWentIsDeliveredEvenIfSendingFails) {
  const Bytes large = pattern(32u << 20, 1);
  write(encoded(0));
  peer_.reset();  // with what we send unread: a reset
  for (std::uint32_t i = 0; i < 4; ++i) end_->send(push_header(i), large);
  EXPECT_EQ(end_->recorder.wait_closed().code(), ErrorCode::peer_lost);
  EXPECT_EQ(end_->recorder.messages().size(), 1u);
  ASSERT_TRUE(end_->sends.wait_all());
}

TEST_F(TcpRawPeer, CloseGivesUpOnAPeerThatDoesNotRead) {
  const Bytes large = pattern(32u << 20, 1);
  end_->send(push_header(1), large);
  const auto before = Clock::now();
  end_->close(milliseconds(100));
  EXPECT_TRUE(end_->recorder.wait_closed().ok());
  EXPECT_LT(Clock::now() - before, std::chrono::seconds(5));
  ASSERT_TRUE(end_->sends.wait_all());
  EXPECT_EQ(end_->sends.codes()[ErrorCode::shut_down], 1u);
}

TEST_F(TcpRawPeer, CloseDropsWhatStillArrives) {
  end_->loop().post([&] { end_->flow().close(std::chrono::seconds(20)); });
  const Bytes payload = pattern(1u << 20, 1);
  std::byte end_of_stream;
  EXPECT_EQ(::recv(peer_.get(), &end_of_stream, 1, 0), 0);
  write(encoded(payload.size()));
  write(payload);
  peer_.reset();
  EXPECT_TRUE(end_->recorder.wait_closed().ok());
  EXPECT_TRUE(end_->recorder.messages().empty());
}

/// Returns the error of listen or connect for an address.
Status listen_error(const std::string& address) {
  const auto transport = make_tcp_transport();
  Loop loop("listen");
  return transport->listen(loop, address, [](std::shared_ptr<Flow>) {}).status();
}

Status connect_error(const std::string& address) {
  const auto transport = make_tcp_transport();
  Loop loop("connect");
  std::promise<Status> answer;
  transport->connect(loop, address, Clock::now() + milliseconds(100),
                     [&](Result<std::shared_ptr<Flow>> flow) { answer.set_value(flow.status()); });
  return answer.get_future().get();
}

TEST(TcpAddress, RejectsWhatIsNotHostAndPort) {
  for (const char* text : {"", ":", "host", "host:", ":1", "host:port", "host:-1", "host:65536", "host:1x", "::1:80",
                           "[::1]", "[]:1", "1.2.3.4:1 "}) {
    EXPECT_EQ(listen_error(text).code(), ErrorCode::invalid_argument) << text;
    EXPECT_EQ(connect_error(text).code(), ErrorCode::invalid_argument) << text;
  }
}

TEST(TcpAddress, AnUnknownNameIsUnreachable) {
  const Status status = connect_error("no-such-host.invalid:1");
  EXPECT_EQ(status.code(), ErrorCode::unreachable);
  EXPECT_NE(status.message().find("no-such-host.invalid:1"), std::string::npos) << status.message();
}

TEST(TcpAddress, AnAddressOfAnotherMachineCannotBeListenedOn) {
  const Status status = listen_error("192.0.2.1:0");
  EXPECT_EQ(status.code(), ErrorCode::unreachable);
  EXPECT_NE(status.message().find("192.0.2.1:0"), std::string::npos) << status.message();
}

TEST(TcpAddress, ReadsAndWritesBothFamilies) {
  for (const char* text : {"127.0.0.1:29500", "[::1]:29500", "0.0.0.0:1"}) {
    const auto found = tcp::resolve(text);
    ASSERT_TRUE(found.ok()) << found.status().message();
    EXPECT_EQ(tcp::to_text(found.value()[0]), text);
  }
  const auto named = tcp::resolve("localhost:80");
  ASSERT_TRUE(named.ok()) << named.status().message();
}

TEST(TcpConnect, ARefusalSaysSo) {
  // A bound socket that does not listen keeps the port free of others.
  const FileDescriptor bound(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto any = tcp::resolve("127.0.0.1:0");
  ASSERT_EQ(::bind(bound.get(), any.value()[0].get(), any.value()[0].size_bytes), 0);
  const std::string address = tcp::to_text(tcp::local_address(bound.get()));
  const Status status = connect_error(address);
  EXPECT_EQ(status.code(), ErrorCode::unreachable);
  EXPECT_NE(status.message().find(address), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("refused"), std::string::npos) << status.message();
}

TEST(TcpListen, AcceptsAgainAfterRunningOutOfDescriptors) {
  const auto transport = make_tcp_transport();
  Loop loop("descriptors");
  auto accepted = std::make_shared<std::promise<std::shared_ptr<Flow>>>();
  auto listener = transport->listen(loop, "127.0.0.1:0",
                                    [accepted](std::shared_ptr<Flow> flow) { accepted->set_value(std::move(flow)); });
  ASSERT_TRUE(listener.ok());
  const auto where = tcp::resolve(listener.value()->address());
  const FileDescriptor client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  // No descriptor is left for the accepted end.
  rlimit old_limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &old_limit), 0);
  const rlimit none_left{static_cast<rlim_t>(client.get()) + 1, old_limit.rlim_max};
  std::vector<FileDescriptor> fillers;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none_left), 0);
  for (FileDescriptor filler(::dup(client.get())); filler; filler = FileDescriptor(::dup(client.get()))) {
    fillers.push_back(std::move(filler));
  }
  EXPECT_EQ(::connect(client.get(), where.value()[0].get(), where.value()[0].size_bytes), 0);
  auto flow = accepted->get_future();
  EXPECT_EQ(flow.wait_for(milliseconds(50)), std::future_status::timeout);
  fillers.clear();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &old_limit), 0);
  EXPECT_TRUE(let_in(client.get()));
  ASSERT_EQ(flow.wait_for(std::chrono::seconds(5)), std::future_status::ready);
  auto got = flow.get();
  loop.call([&] { got.reset(); });
}

}  // namespace
}  // namespace poseidon::testing
