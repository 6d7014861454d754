// Errors of shared memory alone: a peer that writes invalid data, a wrong greeting, wrong addresses.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <array>
#include <bit>
#include <cstring>
#include <random>

#include "conformance/handshakes.h"
#include "conformance/transport_fixture.h"
#include "transport/shm/local_socket.h"
#include "transport/shm/segment.h"
#include "transport/shm/shm_transport.h"

namespace poseidon::testing {
namespace {

/// A flow whose peer is the test itself, which writes any bytes to the shared memory.
class ShmRawPeer : public ::testing::Test {
 protected:
  void SetUp() override {
    listener_ = listen();
    ASSERT_TRUE(connect_socket());
    auto files = shm::Segment::make_files();
    ASSERT_TRUE(files.ok()) << files.status().message();
    ASSERT_TRUE(shm::send_files(peer_.get(), files.value()));
    auto segment = shm::Segment::open(std::move(files.value()), true);
    ASSERT_TRUE(segment.ok()) << segment.status().message();
    segment_ = segment.value();
    end_ = std::make_unique<End>(loop_, accepted_->get_future().get());
    end_->receive();
  }

  std::unique_ptr<Listener> listen() {
    accepted_ = std::make_shared<std::promise<std::shared_ptr<Flow>>>();
    auto listener = transport_->listen(loop_, "raw-peer:0", [accepted = accepted_](std::shared_ptr<Flow> flow) {
      accepted->set_value(std::move(flow));
    });
    EXPECT_TRUE(listener.ok()) << listener.status().message();
    return std::move(listener.value());
  }
  bool connect_socket() {
    const auto name = shm::socket_name(listener_->address());
    peer_ = shm::make_socket();
    return ::connect(peer_.get(), name.value().get(), name.value().size_bytes) == 0 && let_in(peer_.get());
  }

  shm::Lane& lane() { return segment_->outgoing(); }
  void wake() {
    std::atomic<std::uint32_t> asleep{1};
    segment_->wake_peer(asleep);
  }
  void publish(const shm::Descriptor& descriptor) {
    const std::uint64_t written = lane().descriptors_written.load();
    std::memcpy(&lane().descriptors[written % shm::kDescriptorCount], &descriptor, sizeof(descriptor));
    lane().descriptors_written.store(written + 1);
    wake();
  }
  static shm::Descriptor descriptor(std::uint64_t payload_bytes, std::uint64_t data_bytes) {
    shm::Descriptor made;
    wire::Header header = push_header(1);
    header.payload_bytes = payload_bytes;
    wire::encode(header, made.header);
    made.data_bytes = data_bytes;
    return made;
  }
  void expect_mismatch() {
    const Status status = end_->recorder.wait_closed();
    EXPECT_EQ(status.code(), ErrorCode::mismatch);
    EXPECT_NE(status.message().find(end_->flow().peer_name()), std::string::npos) << status.message();
    EXPECT_TRUE(end_->recorder.messages().empty());
  }
  /// Checks that the other side closes the connection without accepting it.
  void expect_hung_up() {
    std::byte byte;
    ASSERT_EQ(::fcntl(peer_.get(), F_SETFL, 0), 0);
    EXPECT_LE(::recv(peer_.get(), &byte, 1, 0), 0);
  }

  std::unique_ptr<Transport> transport_ = make_shm_transport();
  Loop loop_{"shm test"};
  std::shared_ptr<std::promise<std::shared_ptr<Flow>>> accepted_;
  std::unique_ptr<Listener> listener_;
  FileDescriptor peer_;
  std::shared_ptr<shm::Segment> segment_;
  std::unique_ptr<End> end_;
};

TEST_F(ShmRawPeer, AGoodDescriptorIsDelivered) {
  publish(descriptor(1000, 1000));
  ASSERT_TRUE(end_->recorder.wait_messages(1));
}

TEST_F(ShmRawPeer, AGarbageHeaderIsAMismatch) {
  shm::Descriptor bad = descriptor(10, 10);
  bad.header.fill(std::byte{0x41});
  publish(bad);
  expect_mismatch();
}

TEST_F(ShmRawPeer, AnUnknownKindIsAMismatch) {
  shm::Descriptor bad = descriptor(10, 10);
  bad.kind = static_cast<shm::Descriptor::Kind>(3);
  publish(bad);
  expect_mismatch();
}

TEST_F(ShmRawPeer, BlocksOutsideTheAreaAreAMismatch) {
  shm::Descriptor bad = descriptor(shm::kBlockBytes + 1, shm::kBlockBytes + 1);
  bad.first_block = shm::kBlockCount - 1;
  publish(bad);
  expect_mismatch();
}

TEST_F(ShmRawPeer, AFirstBlockOutsideTheAreaIsAMismatch) {
  shm::Descriptor bad = descriptor(0, 0);
  bad.first_block = 0xffffffffu;
  publish(bad);
  expect_mismatch();
}

TEST_F(ShmRawPeer, MoreDataThanTheAreaHoldsIsAMismatch) {
  publish(descriptor(~std::uint64_t{0} - 100, ~std::uint64_t{0} - 100));
  expect_mismatch();
}

TEST_F(ShmRawPeer, MoreDataThanThePayloadIsAMismatch) {
  publish(descriptor(10, 11));
  expect_mismatch();
}

TEST_F(ShmRawPeer, APieceOfNothingIsAMismatch) {
  publish(descriptor(10, 0));
  expect_mismatch();
}

TEST_F(ShmRawPeer, APieceWithoutAMessageIsAMismatch) {
  shm::Descriptor bad = descriptor(10, 10);
  bad.kind = shm::Descriptor::Kind::piece;
  publish(bad);
  expect_mismatch();
}

TEST_F(ShmRawPeer, AMessageInsideAnotherIsAMismatch) {
  publish(descriptor(100, 10));
  publish(descriptor(0, 0));
  expect_mismatch();
}

TEST_F(ShmRawPeer, ALastPieceThatIsTooLongIsAMismatch) {
  publish(descriptor(100, 90));
  shm::Descriptor bad = descriptor(0, 11);
  bad.kind = shm::Descriptor::Kind::piece;
  publish(bad);
  expect_mismatch();
}

TEST_F(ShmRawPeer, ACounterThatJumpsIsAMismatch) {
  lane().descriptors_written.store(shm::kDescriptorCount + 1);
  wake();
  expect_mismatch();
}

TEST_F(ShmRawPeer, ACounterThatGoesBackIsAMismatch) {
  lane().descriptors_written.store(~std::uint64_t{0});
  wake();
  expect_mismatch();
}

TEST_F(ShmRawPeer, ReadingMoreThanWasSentIsAMismatch) {
  segment_->incoming().descriptors_read.store(1000);
  const Bytes payload = pattern(10, 1);
  end_->send(push_header(1), payload);
  expect_mismatch();
}

TEST_F(ShmRawPeer, ReturningBlocksThatWereNotSentIsAMismatch) {
  segment_->incoming().returns[0].store(17);
  segment_->incoming().returns_written.store(1);
  const Bytes payload = pattern(10, 1);
  end_->send(push_header(1), payload);
  expect_mismatch();
}

TEST_F(ShmRawPeer, ReturningTooManyBlocksIsAMismatch) {
  segment_->incoming().returns_written.store(~std::uint64_t{0});
  const Bytes payload = pattern(10, 1);
  end_->send(push_header(1), payload);
  expect_mismatch();
}

TEST_F(ShmRawPeer, BytesOnTheSocketAreAMismatch) {
  ASSERT_EQ(::send(peer_.get(), "x", 1, MSG_NOSIGNAL), 1);
  expect_mismatch();
}

TEST_F(ShmRawPeer, ACutMessageIsAPeerLost) {
  publish(descriptor(2u << 20, 1000));
  peer_.reset();
  const Status status = end_->recorder.wait_closed();
  EXPECT_EQ(status.code(), ErrorCode::peer_lost);
  EXPECT_NE(status.message().find("in the middle of a message"), std::string::npos) << status.message();
}

TEST_F(ShmRawPeer, WhatThePeerSaidBeforeItWentIsDelivered) {
  for (int i = 0; i < 3; ++i) publish(descriptor(0, 0));
  peer_.reset();
  EXPECT_EQ(end_->recorder.wait_closed().code(), ErrorCode::peer_lost);
  EXPECT_EQ(end_->recorder.messages().size(), 3u);
}

/// A descriptor without a valid kind.
shm::Descriptor noise(std::mt19937& random) {
  std::array<std::uint32_t, sizeof(shm::Descriptor) / 4> words;
  for (std::uint32_t& word : words) word = static_cast<std::uint32_t>(random());
  return std::bit_cast<shm::Descriptor>(words);
}

TEST_F(ShmRawPeer, NoNonsenseInTheSharedMemoryDoesHarm) {
  std::mt19937 random(11);
  const Bytes payload = pattern(100'000, 1);
  for (int round = 0; round < 60; ++round) {
    // Partly valid descriptors test more of the checks than random bytes do.
    for (std::uint64_t i = 0; i < 8; ++i) {
      shm::Descriptor made = descriptor(random() % 40'000, random() % 40'000);
      made.first_block = static_cast<std::uint32_t>(random() % (shm::kBlockCount + 1));
      if (random() % 4 == 0) made.data_bytes = 0;
      if (random() % 3 == 0) made.kind = shm::Descriptor::Kind::piece;
      if (random() % 8 == 0) made = noise(random);
      publish(made);
    }
    segment_->incoming().returns[random() % shm::kBlockCount].store(static_cast<std::uint32_t>(random() % 300));
    if (random() % 2 == 0) segment_->incoming().returns_written.fetch_add(random() % 3);
    if (random() % 2 == 0) segment_->incoming().descriptors_read.fetch_add(random() % 3);
    end_->send(push_header(1), payload);
    for (int turn = 0; turn < 3; ++turn) loop_.call([] {});  // the loop looks for events in between
    end_.reset();                                            // checks that every send and on_closed came once
    listener_.reset();
    SetUp();
  }
}

TEST_F(ShmRawPeer, WhoGreetsOtherwiseIsHungUpOn) {
  ASSERT_TRUE(connect_socket());
  ASSERT_EQ(::send(peer_.get(), "good day", 8, MSG_NOSIGNAL), 8);
  expect_hung_up();
}

TEST_F(ShmRawPeer, MoreFilesThanAskedForAreClosed) {
  ASSERT_TRUE(connect_socket());
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  const std::array<int, 4> files{ends[1], ends[1], ends[1], ends[1]};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(files))> control{};
  std::array<char, 24> bytes{};
  iovec text{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &text;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(files));
  std::memcpy(CMSG_DATA(rights), files.data(), sizeof(files));
  ASSERT_EQ(::sendmsg(peer_.get(), &message, MSG_NOSIGNAL), 24);
  expect_hung_up();
  ::close(ends[1]);
  char byte = 0;
  EXPECT_EQ(::read(ends[0], &byte, 1), 0) << "nobody holds the other end any more";
  ::close(ends[0]);
}

TEST_F(ShmRawPeer, AnEventDescriptorThatIsNoneIsAMismatch) {
  end_.reset();
  listener_.reset();
  listener_ = listen();
  auto files = shm::Segment::make_files();
  ASSERT_TRUE(files.ok());
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  files.value().acceptor_wake = FileDescriptor(ends[0]);
  ::close(ends[1]);  // at its end for ever
  ASSERT_TRUE(connect_socket());
  ASSERT_TRUE(shm::send_files(peer_.get(), files.value()));
  end_ = std::make_unique<End>(loop_, accepted_->get_future().get());
  end_->receive();
  expect_mismatch();
}

TEST_F(ShmRawPeer, MemoryThatCouldShrinkIsHungUpOn) {
  auto files = shm::Segment::make_files();
  ASSERT_TRUE(files.ok());
  const FileDescriptor sealed(::dup(files.value().memory.get()));
  struct stat found {};
  ASSERT_EQ(::fstat(sealed.get(), &found), 0);
  files.value().memory = FileDescriptor(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(files.value().memory.get(), found.st_size), 0);
  ASSERT_TRUE(connect_socket());
  ASSERT_TRUE(shm::send_files(peer_.get(), files.value()));
  expect_hung_up();
}

TEST_F(ShmRawPeer, MemoryOfAnotherSizeIsHungUpOn) {
  auto files = shm::Segment::make_files();
  ASSERT_TRUE(files.ok());
  const int memory = ::memfd_create("small", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  files.value().memory = FileDescriptor(memory);
  ASSERT_EQ(::ftruncate(memory, 4096), 0);
  ASSERT_EQ(::fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
  ASSERT_TRUE(connect_socket());
  ASSERT_TRUE(shm::send_files(peer_.get(), files.value()));
  expect_hung_up();
}

/// Returns the status of a short attempt to connect to `address`.
Status shm_connect_error(const std::string& address) {
  const auto transport = make_shm_transport();
  Loop loop("connect");
  std::promise<Status> answer;
  transport->connect(loop, address, Clock::now() + std::chrono::milliseconds(50),
                     [&](Result<std::shared_ptr<Flow>> flow) { answer.set_value(flow.status()); });
  return answer.get_future().get();
}

TEST(ShmAddress, MustFitASocketName) {
  const auto transport = make_shm_transport();
  Loop loop("listen");
  for (const std::string& text : {std::string(), std::string(108, 'x')}) {
    EXPECT_EQ(transport->listen(loop, text, [](std::shared_ptr<Flow>) {}).status().code(), ErrorCode::invalid_argument);
    EXPECT_EQ(shm_connect_error(text).code(), ErrorCode::invalid_argument);
  }
  std::string name = std::to_string(::getpid());
  name.resize(107, 'x');
  const auto longest = transport->listen(loop, name, [](std::shared_ptr<Flow>) {});
  EXPECT_TRUE(longest.ok()) << longest.status().message();
}

TEST(ShmAddress, FreeNamesDiffer) {
  const auto transport = make_shm_transport();
  Loop loop("listen");
  const auto first = transport->listen(loop, ":0", [](std::shared_ptr<Flow>) {});
  const auto second = transport->listen(loop, ":0", [](std::shared_ptr<Flow>) {});
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE(first.value()->address(), second.value()->address());
}

}  // namespace
}  // namespace poseidon::testing
