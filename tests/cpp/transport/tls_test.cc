// The guarantees of TLS: nobody in the middle can read the bytes, change, repeat or cut them without notice, or switch
// TLS off.
#include <algorithm>
#include <atomic>
#include <thread>

#include "conformance/handshakes.h"
#include "conformance/transport_fixture.h"
#include "cpp/transport/relay.h"
#include "simulation/virtual_time.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Way = Relay::Way;
using Verdict = Relay::Verdict;

constexpr const char* kTlsSecret = "a secret of some length";
constexpr std::size_t kMiB = std::size_t{1} << 20;
// After this many bytes the handshakes are over, and messages follow.
constexpr std::size_t kAfterHandshakes = 2000;

/// A listener behind a relay, and the connections that it has accepted.
class Tls : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!tls_available()) GTEST_SKIP() << "this build has no OpenSSL";
    transport_ = make_tcp_transport(admission_with_tls(kTlsSecret));
    listen(*transport_);
  }
  void TearDown() override {
    client_.reset();
    server_.reset();
    relay_.reset();
    listener_.reset();
    loop_.call([this] { accepted_.clear(); });
  }

  void listen(Transport& transport) {
    auto listener = transport.listen(loop_, "127.0.0.1:0", [this](std::shared_ptr<Flow> flow) {
      accepted_.push_back(std::move(flow));
      ++accepted_count_;
    });
    ASSERT_TRUE(listener.ok()) << listener.status().message();
    listener_ = std::move(listener.value());
    relay_ = std::make_unique<Relay>(listener_->address());
  }
  void meddle(Relay::Meddle meddle) { relay_ = std::make_unique<Relay>(listener_->address(), std::move(meddle)); }

  Result<std::shared_ptr<Flow>> connect(Transport& transport, milliseconds patience = seconds(20)) {
    std::promise<Result<std::shared_ptr<Flow>>> answer;
    transport.connect(loop_, relay_->address(), Clock::now() + patience,
                      [&](Result<std::shared_ptr<Flow>> result) { answer.set_value(std::move(result)); });
    return answer.get_future().get();
  }

  /// Returns both ends of a connection through the relay. Both have receivers.
  void connect_both() {
    auto flow = connect(*transport_);
    ASSERT_TRUE(flow.ok()) << flow.status().message();
    client_ = std::make_unique<End>(loop_, std::move(flow.value()));
    EXPECT_TRUE(testing::eventually([this] { return accepted_count_ > 0; }));
    ASSERT_EQ(accepted_count_, 1);
    std::shared_ptr<Flow> accepted;
    loop_.call([&] { accepted = std::exchange(accepted_.front(), nullptr); });
    server_ = std::make_unique<End>(loop_, std::move(accepted));
    client_->receive();
    server_->receive();
  }

  Loop loop_{"tls"};
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Listener> listener_;
  std::vector<std::shared_ptr<Flow>> accepted_;  // the loop's
  std::atomic<int> accepted_count_ = 0;
  std::unique_ptr<Relay> relay_;
  std::unique_ptr<End> client_;
  std::unique_ptr<End> server_;
};

bool contains(const Bytes& bytes, std::span<const std::byte> what) { return !std::ranges::search(bytes, what).empty(); }

/// Whether any 16 bytes of the payload were visible to the relay.
bool shows(const Bytes& recorded, const Bytes& payload) {
  for (std::size_t at = 0; at + 16 <= payload.size(); at += 4096)
    if (contains(recorded, std::span(payload).subspan(at, 16))) return true;
  return false;
}

TEST_F(Tls, WhoListensInSeesNothing) {
  const Bytes there = pattern(100'000, 1);
  const Bytes back = pattern(50, 2);
  ASSERT_NO_FATAL_FAILURE(connect_both());
  client_->send(push_header(1), there);
  server_->send(push_header(2), back);
  ASSERT_TRUE(server_->recorder.wait_messages(1));
  ASSERT_TRUE(client_->recorder.wait_messages(1));
  EXPECT_EQ(server_->recorder.messages()[0].payload, there);
  EXPECT_GT(relay_->recorded(Way::there).size(), there.size());
  EXPECT_FALSE(shows(relay_->recorded(Way::there), there));
  EXPECT_FALSE(shows(relay_->recorded(Way::back), back));
  EXPECT_FALSE(contains(relay_->recorded(Way::there), bytes_of("PSD1"))) << "a header in plain text";
}

TEST_F(Tls, WithoutItWhoListensInSeesEverything) {
  transport_ = make_tcp_transport(admission_with(kTlsSecret));
  listen(*transport_);
  const Bytes there = pattern(100'000, 1);
  ASSERT_NO_FATAL_FAILURE(connect_both());
  client_->send(push_header(1), there);
  ASSERT_TRUE(server_->recorder.wait_messages(1));
  EXPECT_TRUE(shows(relay_->recorded(Way::there), there)) << "the test above proves nothing";
}

TEST_F(Tls, AChangedByteEndsTheConnectionAndReachesNobody) {
  for (const Way changed : {Way::there, Way::back}) {
    accepted_count_ = 0;
    loop_.call([this] { accepted_.clear(); });
    meddle([changed](Way way, std::size_t passed_bytes, Bytes& bytes) {
      const std::size_t at = passed_bytes + bytes.size() / 2;
      if (way == changed && passed_bytes > kAfterHandshakes && at > 100'000) bytes[bytes.size() / 2] ^= std::byte{1};
      return Verdict::pass;
    });
    ASSERT_NO_FATAL_FAILURE(connect_both());
    End& sender = changed == Way::there ? *client_ : *server_;
    End& receiver = changed == Way::there ? *server_ : *client_;
    const Bytes payload = pattern(kMiB, 1);
    const Bytes small = pattern(64u << 10, 2);
    sender.send(push_header(0), small);
    sender.send(push_header(1), payload);
    const Status status = receiver.recorder.wait_closed();
    EXPECT_EQ(status.code(), ErrorCode::peer_lost);
    EXPECT_NE(status.message().find("TLS: decryption failed"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(receiver.flow().peer_name()), std::string::npos) << status.message();
    EXPECT_LE(receiver.recorder.messages().size(), 1u);
    EXPECT_EQ(sender.recorder.wait_closed().code(), ErrorCode::peer_lost);
    client_.reset();
    server_.reset();
  }
}

TEST_F(Tls, WhatIsRepeatedEndsTheConnection) {
  const auto sent_bytes = std::make_shared<std::atomic<std::size_t>>(0);  // the relay ends after the test
  meddle([sent_bytes](Way way, std::size_t passed_bytes, Bytes& bytes) {
    if (way == Way::there && passed_bytes > kAfterHandshakes) {
      const Bytes once = bytes;
      bytes.insert(bytes.end(), once.begin(), once.end());
    }
    if (way == Way::there) *sent_bytes += bytes.size();
    return Verdict::pass;
  });
  ASSERT_NO_FATAL_FAILURE(connect_both());
  const Bytes payload = pattern(3000, 1);
  const std::size_t before = *sent_bytes;
  client_->send(push_header(0), payload);
  EXPECT_TRUE(eventually([&] { return *sent_bytes >= before + payload.size(); }));
  client_->send(push_header(1), payload);  // in a piece of its own
  const Status status = server_->recorder.wait_closed();
  EXPECT_EQ(status.code(), ErrorCode::peer_lost);
  EXPECT_NE(status.message().find("TLS"), std::string::npos) << status.message();
  EXPECT_LE(server_->recorder.messages().size(), 2u);
}

TEST_F(Tls, AnEndThatThePeerHasNotSaidIsACut) {
  std::atomic<bool> cut = false;
  meddle([&cut](Way, std::size_t, Bytes&) { return cut ? Verdict::cut : Verdict::pass; });
  ASSERT_NO_FATAL_FAILURE(connect_both());
  const Bytes payload = pattern(100, 1);
  client_->send(push_header(0), payload);
  ASSERT_TRUE(server_->recorder.wait_messages(1));
  cut = true;
  client_->send(push_header(1), payload);
  const Status status = server_->recorder.wait_closed();
  EXPECT_EQ(status.code(), ErrorCode::peer_lost);
  EXPECT_NE(status.message().find("without the end of TLS"), std::string::npos) << status.message();
  EXPECT_EQ(server_->recorder.messages().size(), 1u);
}

TEST_F(Tls, AnEndThatThePeerHasSaidIsNone) {
  ASSERT_NO_FATAL_FAILURE(connect_both());
  client_->close(seconds(20));
  const Status status = server_->recorder.wait_closed();
  EXPECT_NE(status.message().find("(closed by the peer)"), std::string::npos) << status.message();
}

TEST_F(Tls, AChangedHandshakeLetsNobodyIn) {
  // The proofs have passed the relay, and the first byte of TLS has not.
  constexpr std::size_t kProofs = wire::kOpeningBytes + wire::kAnswerBytes;
  for (const Way changed : {Way::there, Way::back}) {
    const std::size_t first = changed == Way::there ? kProofs : wire::kChallengeBytes;
    meddle([=](Way way, std::size_t passed_bytes, Bytes& bytes) {
      if (way == changed && passed_bytes + bytes.size() > first + 60) bytes.back() ^= std::byte{1};
      return Verdict::pass;
    });
    const auto flow = connect(*transport_, milliseconds(300));
    ASSERT_FALSE(flow.ok());
    EXPECT_EQ(flow.status().code(), ErrorCode::unreachable);
    EXPECT_NE(flow.status().message().find("TLS"), std::string::npos) << flow.status().message();
  }
  EXPECT_EQ(accepted_count_, 0);
}

TEST_F(Tls, BothEndsHaveToWantIt) {
  const auto plain = make_tcp_transport(admission_with(kTlsSecret));
  const auto refused = connect(*plain);
  EXPECT_EQ(refused.status().code(), ErrorCode::mismatch);
  EXPECT_NE(refused.status().message().find(relay_->address() + " has tls=on, this process tls=off"), std::string::npos)
      << refused.status().message();

  listen(*plain);
  const auto other = connect(*transport_);
  EXPECT_EQ(other.status().code(), ErrorCode::mismatch);
  EXPECT_NE(other.status().message().find("has tls=off, this process tls=on"), std::string::npos)
      << other.status().message();
  EXPECT_EQ(accepted_count_, 0);
}

TEST_F(Tls, NobodyInTheMiddleTalksThemOutOfIt) {
  // Tells each end that the other one has not asked for TLS.
  meddle([](Way, std::size_t passed_bytes, Bytes& bytes) {
    constexpr std::size_t kEncryptionAt = 6;
    if (passed_bytes == 0) bytes.at(kEncryptionAt) = std::byte{0};
    return Verdict::pass;
  });
  const auto flow = connect(*transport_);
  EXPECT_EQ(flow.status().code(), ErrorCode::refused) << "the proof covers it";
  EXPECT_EQ(accepted_count_, 0);
}

TEST_F(Tls, AnotherSecretIsRefusedBeforeAnyTls) {
  const auto other = make_tcp_transport(admission_with_tls("another secret, as long"));
  EXPECT_EQ(connect(*other).status().code(), ErrorCode::refused);
  EXPECT_LE(relay_->recorded(Way::there).size(), wire::kOpeningBytes) << "not even a hello of TLS";
  EXPECT_EQ(accepted_count_, 0);
}

TEST_F(Tls, ARecordedConnectionOpensNothingAgain) {
  const Bytes payload = pattern(1000, 1);
  ASSERT_NO_FATAL_FAILURE(connect_both());
  client_->send(push_header(0), payload);
  ASSERT_TRUE(server_->recorder.wait_messages(1));
  const Bytes recorded = relay_->recorded(Way::there);
  const auto where = tcp::resolve(listener_->address()).value()[0];
  const FileDescriptor replayer(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::connect(replayer.get(), where.get(), where.size_bytes), 0);
  ASSERT_EQ(::send(replayer.get(), recorded.data(), recorded.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(recorded.size()));
  Bytes answer(64u << 10);
  ssize_t got = 1;
  std::size_t answered_bytes = 0;
  while ((got = ::recv(replayer.get(), answer.data(), answer.size(), 0)) > 0)
    answered_bytes += static_cast<std::size_t>(got);
  EXPECT_LE(answered_bytes, wire::kChallengeBytes);
  EXPECT_EQ(accepted_count_, 1);
  EXPECT_EQ(server_->recorder.messages().size(), 1u);
}

TEST_F(Tls, UnauthenticatedConnectionsAreClosedWithoutAnAnswer) {
  constexpr std::array<std::uint8_t, 6> kClientHello{0x16, 0x03, 0x01, 0x00, 0xc4, 0x01};
  const auto where = tcp::resolve(listener_->address()).value()[0];
  const FileDescriptor unproven(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::connect(unproven.get(), where.get(), where.size_bytes), 0);
  ASSERT_GT(::send(unproven.get(), kClientHello.data(), kClientHello.size(), MSG_NOSIGNAL), 0);
  std::byte byte;
  EXPECT_LE(::recv(unproven.get(), &byte, 1, 0), 0);
}

TEST_F(Tls, CountsTheBytesOfMessagesAndNotItsOwn) {
  const Bytes payload = pattern(200'000, 1);
  ASSERT_NO_FATAL_FAILURE(connect_both());
  client_->send(push_header(0), payload);
  ASSERT_TRUE(server_->recorder.wait_messages(1));
  loop_.call([&] {
    EXPECT_EQ(client_->flow().traffic().bytes_sent, payload.size() + wire::kHeaderBytes);
    EXPECT_EQ(server_->flow().traffic().bytes_received, payload.size() + wire::kHeaderBytes);
  });
}

TEST_F(Tls, WaitsForALateReceiver) {
  const Bytes payload = pattern(40'000, 1);
  auto flow = connect(*transport_);
  ASSERT_TRUE(flow.ok()) << flow.status().message();
  client_ = std::make_unique<End>(loop_, std::move(flow.value()));
  client_->receive();
  for (std::uint32_t i = 0; i < 3; ++i) client_->send(push_header(i), payload);
  EXPECT_TRUE(testing::eventually([this] { return accepted_count_ > 0; }));
  EXPECT_TRUE(client_->sends.wait_all());  // all of it is there
  std::shared_ptr<Flow> accepted;
  loop_.call([&] { accepted = std::exchange(accepted_.front(), nullptr); });
  server_ = std::make_unique<End>(loop_, std::move(accepted));
  server_->receive();
  ASSERT_TRUE(server_->recorder.wait_messages(3));
  EXPECT_EQ(server_->recorder.messages()[2].payload, payload);
}

TEST(TlsOption, NeedsASecretAndOpenSsl) {
  Options options;
  options.tls = true;
  const auto without = admission_of(options);
  EXPECT_EQ(without.status().code(), ErrorCode::invalid_argument);
  EXPECT_NE(without.status().message().find("POSEIDON_SECRET"), std::string::npos) << without.status().message();
  options.secret = kTlsSecret;
  const auto with = admission_of(options);
  EXPECT_EQ(with.ok(), tls_available());
  if (!with.ok()) EXPECT_NE(with.status().message().find("no OpenSSL"), std::string::npos) << with.status().message();
}

}  // namespace
}  // namespace poseidon::testing
