// Which connections the transports accept. An unauthenticated connection can do nothing.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <thread>

#include "base/file_descriptor.h"
#include "conformance/handshakes.h"
#include "conformance/transport_fixture.h"
#include "simulation/virtual_time.h"
#include "transport/entrance.h"
#include "transport/shm/local_socket.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/address.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/ucx/ucx_transport.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Made = std::unique_ptr<Transport>;

constexpr const char* kSecret = "a secret of some length";
constexpr const char* kOther = "another secret, as long";

Admission impatient(milliseconds patience, const std::string& secrets = {}) {
  Admission admission = admission_with(secrets);
  admission.patience = patience;
  return admission;
}

/// The result of connecting, and how long it took.
struct Outcome {
  Result<std::shared_ptr<Flow>> flow;
  Clock::duration took;
};

Outcome connect(Transport& transport, Loop& loop, const std::string& address, milliseconds patience) {
  const auto begun = Clock::now();
  std::promise<Result<std::shared_ptr<Flow>>> answer;
  transport.connect(loop, address, begun + patience,
                    [&](Result<std::shared_ptr<Flow>> flow) { answer.set_value(std::move(flow)); });
  auto flow = answer.get_future().get();
  return {std::move(flow), Clock::now() - begun};
}

/// The media that authenticate, each with the given secrets.
struct MediumCase {
  std::string name;
  Made (*make)(const Admission&);
  std::string address;
};

Made make_tcp(const Admission& admission) { return make_tcp_transport(admission); }
Made make_shm(const Admission& admission) { return make_shm_transport(admission); }
Made make_ucx(const Admission& admission) { return make_ucx_transport({{"TLS", "tcp"}}, admission); }

std::vector<MediumCase> media() {
  std::vector<MediumCase> all{{"tcp", make_tcp, "127.0.0.1:0"}, {"shm", make_shm, "unauthenticated:0"}};
  if (ucx_available()) all.push_back({"ucx", make_ucx, "127.0.0.1:0"});
  return all;
}

class Secrets : public ::testing::TestWithParam<MediumCase> {
 protected:
  Made with(const std::string& secrets) { return GetParam().make(admission_with(secrets)); }
  Loop loop_{"entrance"};
};

TEST_P(Secrets, OfAnotherIsRefusedAtOnceAndTheListenerNeverHearsOfIt) {
  for (const auto& [ours, theirs] :
       std::vector<std::pair<std::string, std::string>>{{kSecret, kOther}, {"", kSecret}, {kSecret, ""}}) {
    const Made listening = with(theirs);
    const Made connecting = with(ours);
    std::atomic<int> accepted = 0;
    auto listener = listening->listen(loop_, GetParam().address, [&](std::shared_ptr<Flow>) { ++accepted; });
    ASSERT_TRUE(listener.ok()) << listener.status().message();
    const auto outcome = connect(*connecting, loop_, listener.value()->address(), seconds(30));
    EXPECT_EQ(outcome.flow.status().code(), ErrorCode::refused) << outcome.flow.status().message();
    EXPECT_NE(outcome.flow.status().message().find("POSEIDON_SECRET"), std::string::npos);
    EXPECT_NE(outcome.flow.status().message().find(listener.value()->address()), std::string::npos)
        << outcome.flow.status().message();
    EXPECT_LT(outcome.took, seconds(5));
    listener.value().reset();
    EXPECT_EQ(accepted, 0);
  }
}

TEST_P(Secrets, TellTheFlowsOfTwoTenantsApart) {
  const Made listening = with(std::string(kSecret) + "\n" + kOther);
  std::vector<std::string> accepted;  // the loop's
  auto listener = listening->listen(loop_, GetParam().address,
                                    [&](const std::shared_ptr<Flow>& flow) { accepted.push_back(flow->key_id()); });
  ASSERT_TRUE(listener.ok()) << listener.status().message();
  std::vector<std::string> connected;
  for (const char* secret : {kSecret, kOther, kSecret}) {
    const Made connecting = with(secret);
    auto outcome = connect(*connecting, loop_, listener.value()->address(), seconds(30));
    ASSERT_TRUE(outcome.flow.ok()) << outcome.flow.status().message();
    connected.push_back(outcome.flow.value()->key_id());
    loop_.call([&] { outcome.flow.value().reset(); });
  }
  EXPECT_EQ(connected[0], connected[2]);
  EXPECT_NE(connected[0], connected[1]);
  EXPECT_EQ(connected[0], admission_with(kSecret).credentials.own().name);
  const auto all_in = [&] {
    std::size_t count = 0;
    loop_.call([&] { count = accepted.size(); });
    return count == connected.size();
  };
  EXPECT_TRUE(testing::eventually(all_in));
  loop_.call([&] { EXPECT_EQ(accepted, connected); });
}

TEST_P(Secrets, AFlowWithoutOneHasNoKeyId) {
  const Made transport = with("");
  std::promise<std::shared_ptr<Flow>> accepted;
  auto listener = transport->listen(loop_, GetParam().address,
                                    [&](std::shared_ptr<Flow> flow) { accepted.set_value(std::move(flow)); });
  ASSERT_TRUE(listener.ok());
  auto outcome = connect(*transport, loop_, listener.value()->address(), seconds(30));
  ASSERT_TRUE(outcome.flow.ok());
  auto other = accepted.get_future().get();
  EXPECT_EQ(outcome.flow.value()->key_id(), "");
  EXPECT_EQ(other->key_id(), "");
  loop_.call([&] {
    outcome.flow.value().reset();
    other.reset();
  });
}

INSTANTIATE_TEST_SUITE_P(Media, Secrets, ::testing::ValuesIn(media()),
                         [](const auto& tested) { return tested.param.name; });

/// A listener, and plain sockets that connect to it.
class TcpDoor : public ::testing::Test {
 protected:
  void open(const Admission& admission) {
    transport_ = make_tcp_transport(admission);
    auto listener = transport_->listen(loop_, "127.0.0.1:0", [this](std::shared_ptr<Flow> flow) {
      ++accepted_;
      last_ = std::move(flow);
    });
    ASSERT_TRUE(listener.ok()) << listener.status().message();
    listener_ = std::move(listener.value());
    where_ = tcp::resolve(listener_->address()).value()[0];
  }
  void TearDown() override {
    listener_.reset();
    loop_.call([this] { last_.reset(); });
  }

  /// Returns a blocking socket that is connected from 127.0.0.`source`.
  FileDescriptor knock(std::uint8_t source = 1) {
    FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in from{};
    from.sin_family = AF_INET;
    from.sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + source);
    EXPECT_EQ(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&from), sizeof from), 0);
    EXPECT_EQ(::connect(socket.get(), where_.get(), where_.size_bytes), 0) << errno_text(errno);
    return socket;
  }
  static bool say(const FileDescriptor& socket, std::span<const std::byte> bytes) {
    return ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }
  /// Whether the other side closes the connection in time without an answer.
  static bool hung_up(const FileDescriptor& socket, milliseconds patience = seconds(10)) {
    pollfd entry{socket.get(), POLLIN, 0};
    if (::poll(&entry, 1, static_cast<int>(patience.count())) <= 0) return false;
    std::byte byte;
    return ::recv(socket.get(), &byte, 1, MSG_DONTWAIT) <= 0;
  }

  Loop loop_{"door"};
  Made transport_;
  std::unique_ptr<Listener> listener_;
  tcp::SocketAddress where_;
  std::atomic<int> accepted_ = 0;
  std::shared_ptr<Flow> last_;  // the loop's
};

TEST_F(TcpDoor, HangsUpOnGarbageWithoutAWord) {
  open(admission_with(kSecret));
  const char request[] = "GET / HTTP/1.1\r\nHost: example.org\r\n\r\n";
  for (const Bytes& garbage :
       {pattern(4096, 3), Bytes{std::byte{'X'}},
        Bytes(std::as_bytes(std::span(request)).begin(), std::as_bytes(std::span(request)).end())}) {
    const FileDescriptor unproven = knock();
    ASSERT_TRUE(say(unproven, garbage));
    EXPECT_TRUE(hung_up(unproven));
  }
  EXPECT_EQ(accepted_, 0);
}

TEST_F(TcpDoor, AMessageWithoutAHandshakeIsGarbage) {
  open(admission_with(""));
  std::array<std::byte, wire::kHeaderBytes> header{};
  wire::encode(push_header(1), header);
  const FileDescriptor unproven = knock();
  ASSERT_TRUE(say(unproven, header));
  EXPECT_TRUE(hung_up(unproven));
  EXPECT_EQ(accepted_, 0);
}

TEST_F(TcpDoor, HangsUpOnTheSilentAndOnThoseWhoDrip) {
  open(impatient(milliseconds(300), kSecret));
  const auto begun = Clock::now();
  const FileDescriptor silent = knock();
  const FileDescriptor dripping = knock();
  wire::Handshake handshake(wire::Handshake::Role::connector, wire::Purpose::flow, admission_with(kSecret).credentials,
                            wire::random_nonce());
  bool open = true;
  for (const std::byte byte : handshake.take_outgoing()) {
    open = open && say(dripping, std::span(&byte, 1)) && !hung_up(dripping, milliseconds(20));
  }
  EXPECT_FALSE(open) << "it let somebody take " << wire::kOpeningBytes * 20 << " ms";
  EXPECT_TRUE(hung_up(silent));
  EXPECT_LT(Clock::now() - begun, seconds(5));
  EXPECT_EQ(accepted_, 0);
}

TEST_F(TcpDoor, HangsUpAfterAWrongAnswer) {
  open(admission_with(kSecret));
  EXPECT_EQ(shake_hands(knock().get(), wire::Purpose::flow, kOther), wire::Handshake::State::unproven);
  const FileDescriptor liar = knock();
  wire::Handshake handshake(wire::Handshake::Role::connector, wire::Purpose::flow, admission_with(kSecret).credentials,
                            wire::random_nonce());
  ASSERT_TRUE(say(liar, handshake.take_outgoing()));
  Bytes challenge(wire::kChallengeBytes);
  ASSERT_EQ(::recv(liar.get(), challenge.data(), challenge.size(), MSG_WAITALL),
            static_cast<ssize_t>(challenge.size()));
  ASSERT_TRUE(say(liar, Bytes(wire::kAnswerBytes)));
  EXPECT_TRUE(hung_up(liar));
  EXPECT_EQ(accepted_, 0);
}

TEST_F(TcpDoor, KeepsWhatFollowsTheHandshakeInOnePiece) {
  Recorder recorder;
  transport_ = make_tcp_transport(admission_with(kSecret));
  std::shared_ptr<Flow> accepted;
  auto listener = transport_->listen(loop_, "127.0.0.1:0", [&](std::shared_ptr<Flow> flow) {
    accepted = std::move(flow);
    accepted->set_receiver(&recorder);
  });
  ASSERT_TRUE(listener.ok());
  where_ = tcp::resolve(listener.value()->address()).value()[0];
  const FileDescriptor peer = knock();
  wire::Handshake handshake(wire::Handshake::Role::connector, wire::Purpose::flow, admission_with(kSecret).credentials,
                            wire::random_nonce());
  ASSERT_TRUE(say(peer, handshake.take_outgoing()));
  Bytes challenge(wire::kChallengeBytes);
  ASSERT_EQ(::recv(peer.get(), challenge.data(), challenge.size(), MSG_WAITALL),
            static_cast<ssize_t>(challenge.size()));
  handshake.receive(challenge);
  const auto answer = handshake.take_outgoing();
  const Bytes payload = pattern(1000, 7);
  wire::Header header = push_header(5);
  header.payload_bytes = payload.size();
  Bytes all(answer.begin(), answer.end());
  all.resize(all.size() + wire::kHeaderBytes);
  wire::encode(header, std::span(all).last<wire::kHeaderBytes>());
  all.insert(all.end(), payload.begin(), payload.end());
  ASSERT_TRUE(say(peer, all));
  ASSERT_TRUE(recorder.wait_messages(1));
  EXPECT_EQ(recorder.messages()[0].payload, payload);
  loop_.call([&] { accepted->close(milliseconds(0)); });
  EXPECT_TRUE(recorder.wait_closed().ok());
  loop_.call([&] { accepted.reset(); });
}

TEST(PendingLimits, HaveRoomForAllWorkersOfTheJobFromOneMachine) {
  Options options;
  options.world_size = 100;
  options.priority_classes = 2;
  options.flows = 3;
  const auto admission = admission_of(options);
  ASSERT_TRUE(admission.ok());
  EXPECT_EQ(admission.value().pending_limits.of_one_source, 600u);
  EXPECT_GE(admission.value().pending_limits.all, 600u);
  options.world_size = 0;  // a dedicated server
  EXPECT_EQ(admission_of(options).value().pending_limits.of_one_source, PendingLimits().of_one_source);
}

TEST_F(TcpDoor, HoldsNoMoreThanAQuarterFromOneSource) {
  open(impatient(seconds(60), kSecret));
  constexpr std::size_t kTooMany = PendingLimits().of_one_source + 20;
  const FileDescriptor elsewhere = knock(3);
  std::vector<FileDescriptor> crowd;
  for (std::size_t i = 0; i < kTooMany; ++i) crowd.push_back(knock(2));
  for (std::size_t i = 0; i < 20; ++i) EXPECT_TRUE(hung_up(crowd[i])) << i;
  for (std::size_t i = 20; i < kTooMany; ++i) EXPECT_FALSE(hung_up(crowd[i], milliseconds(0))) << i;
  EXPECT_FALSE(hung_up(elsewhere, milliseconds(0)));
}

TEST_F(TcpDoor, HoldsNoMoreThanSoManyInAll) {
  open(impatient(seconds(60), kSecret));
  std::vector<FileDescriptor> crowd;
  for (std::size_t i = 0; i < PendingLimits().all + 20; ++i)
    crowd.push_back(knock(static_cast<std::uint8_t>(2 + i % 8)));
  for (std::size_t i = 0; i < 20; ++i) EXPECT_TRUE(hung_up(crowd[i])) << i;
  for (std::size_t i = 20; i < crowd.size(); ++i) EXPECT_FALSE(hung_up(crowd[i], milliseconds(0))) << i;
}

TEST_F(TcpDoor, AFloodDisturbsNeitherAFlowNorWhoComesThen) {
  open(admission_with(kSecret));
  auto outcome = connect(*transport_, loop_, listener_->address(), seconds(30));
  ASSERT_TRUE(outcome.flow.ok()) << outcome.flow.status().message();
  End sender(loop_, std::move(outcome.flow.value()));
  sender.receive();
  EXPECT_TRUE(testing::eventually([this] { return accepted_ > 0; }));
  std::shared_ptr<Flow> accepted;
  loop_.call([&] { accepted = std::exchange(last_, nullptr); });
  End receiver(loop_, std::move(accepted));
  receiver.receive();

  std::atomic<bool> flooded = false;
  std::thread flood([&] {
    std::vector<FileDescriptor> crowd;
    for (std::size_t i = 0; i < 1000; ++i) {
      crowd.push_back(knock(static_cast<std::uint8_t>(2 + i % 8)));
      if (i % 2 == 0) (void)say(crowd.back(), pattern(100, 1));
    }
    flooded = true;
  });
  const Bytes payload = pattern(64u << 10, 1);
  std::uint32_t sent = 0;
  for (; sent < 50 || !flooded; ++sent) {
    sender.send(push_header(sent), payload);
    ASSERT_TRUE(receiver.recorder.wait_messages(sent + 1));
    if (sent % 20 != 10) continue;
    auto late = connect(*transport_, loop_, listener_->address(), seconds(30));
    EXPECT_TRUE(late.flow.ok()) << late.flow.status().message();
    loop_.call([&] { late.flow.value().reset(); });
  }
  flood.join();
  EXPECT_GE(receiver.recorder.messages().size(), 50u);
}

TEST(TcpConnect, SaysWhenTheOtherSideIsNoPoseidon) {
  const auto any = tcp::resolve("127.0.0.1:0").value()[0];
  const FileDescriptor listening = tcp::bind_and_listen(any);
  const std::string address = tcp::to_text(tcp::local_address(listening.get()));
  std::thread server([&] {
    pollfd entry{listening.get(), POLLIN, 0};
    ASSERT_GT(::poll(&entry, 1, 10'000), 0);
    const FileDescriptor client(::accept(listening.get(), nullptr, nullptr));
    EXPECT_GT(::send(client.get(), "HTTP/1.1 400 Bad Request\r\n", 26, MSG_NOSIGNAL), 0);
    std::byte byte;
    while (::recv(client.get(), &byte, 1, 0) > 0) {
    }
  });
  Loop loop("connect");
  const auto transport = make_tcp_transport();
  const auto outcome = connect(*transport, loop, address, seconds(30));
  EXPECT_EQ(outcome.flow.status().code(), ErrorCode::mismatch);
  EXPECT_NE(outcome.flow.status().message().find(address), std::string::npos) << outcome.flow.status().message();
  EXPECT_LT(outcome.took, seconds(5));
  server.join();
}

TEST(TcpConnect, TriesAgainWhenTheOtherSideGoesInTheHandshake) {
  const auto any = tcp::resolve("127.0.0.1:0").value()[0];
  FileDescriptor listening = tcp::bind_and_listen(any);
  const std::string address = tcp::to_text(tcp::local_address(listening.get()));
  Loop loop("connect");
  const auto transport = make_tcp_transport(admission_with(kSecret));
  std::promise<Result<std::shared_ptr<Flow>>> answer;
  transport->connect(loop, address, Clock::now() + seconds(30),
                     [&](Result<std::shared_ptr<Flow>> flow) { answer.set_value(std::move(flow)); });
  pollfd entry{listening.get(), POLLIN, 0};
  ASSERT_GT(::poll(&entry, 1, 10'000), 0);
  { const FileDescriptor client(::accept(listening.get(), nullptr, nullptr)); }
  listening.reset();
  auto listener = transport->listen(loop, address, [](std::shared_ptr<Flow>) {});
  ASSERT_TRUE(listener.ok()) << listener.status().message();
  auto flow = answer.get_future().get();
  EXPECT_TRUE(flow.ok()) << flow.status().message();
  loop.call([&] { flow = Status(ErrorCode::shut_down, "over"); });
}

TEST(ShmDoor, HangsUpOnGarbageAndOnTheSilent) {
  const auto transport = make_shm_transport(impatient(milliseconds(200), kSecret));
  Loop loop("door");
  std::atomic<int> accepted = 0;
  auto listener = transport->listen(loop, "door:0", [&](std::shared_ptr<Flow>) { ++accepted; });
  ASSERT_TRUE(listener.ok());
  const auto name = shm::socket_name(listener.value()->address());
  for (const char* text : {"good day", ""}) {
    const FileDescriptor unproven = shm::make_socket();
    ASSERT_EQ(::connect(unproven.get(), name.value().get(), name.value().size_bytes), 0);
    if (*text != 0) ASSERT_EQ(::send(unproven.get(), text, 8, MSG_NOSIGNAL), 8);
    pollfd entry{unproven.get(), POLLIN, 0};
    ASSERT_GT(::poll(&entry, 1, 5'000), 0);
    std::byte byte;
    EXPECT_LE(::recv(unproven.get(), &byte, 1, 0), 0);
  }
  listener.value().reset();
  EXPECT_EQ(accepted, 0);
}

TEST(Sources, AreHostsOrTheNetworksOfIpv6) {
  const auto source = [](const char* address) { return tcp::source_of(tcp::resolve(address).value()[0]); };
  EXPECT_EQ(source("10.0.0.1:1"), source("10.0.0.1:2"));
  EXPECT_NE(source("10.0.0.1:1"), source("10.0.0.2:1"));
  EXPECT_EQ(source("[2001:db8::1]:1"), source("[2001:db8::2:0:0:7]:9"));
  EXPECT_NE(source("[2001:db8::1]:1"), source("[2001:db8:0:1::1]:1"));
  EXPECT_NE(source("[::ffff:10.0.0.1]:1"), source("[::ffff:10.0.0.2]:1"));
}

}  // namespace
}  // namespace poseidon::testing
