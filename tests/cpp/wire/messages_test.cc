// Messages with a payload of their own form: hello and texts, and their invalid forms.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "wire/messages/collective.h"
#include "wire/messages/ending.h"
#include "wire/messages/hello.h"
#include "wire/messages/life.h"
#include "wire/messages/sending.h"

namespace poseidon::wire {
namespace {

using Bytes = std::vector<std::byte>;

Bytes bytes_of(const TextMessage& message) { return {message.payload().begin(), message.payload().end()}; }

TEST(Hello, OfAServerTellsItsOtherCores) {
  const Hello sent{2, 8, "a job", 3, {"10.0.0.1:5000", "[fe80::1]:6", "shm/1"}};
  const TextMessage message = sent.make();
  const Hello hello = Hello::read(message.header, message.payload());
  EXPECT_EQ(hello.rank, 2u);
  EXPECT_EQ(hello.worker_count, 8u);
  EXPECT_EQ(hello.job, "a job");
  EXPECT_EQ(hello.flow, 3u);
  EXPECT_EQ(hello.other_cores, sent.other_cores);
}

TEST(Hello, SaysWhichFlowOfWhichClass) {
  for (const std::uint32_t priority_class : {0u, 1u, 7u, 0xffffffffu}) {
    for (const std::uint32_t flow : {0u, 5u}) {
      const TextMessage message = Hello{1, 4, "a job", flow, {}, priority_class}.make();
      const Hello hello = Hello::read(message.header, message.payload());
      EXPECT_EQ(hello.priority_class, priority_class);
      EXPECT_EQ(hello.flow, flow);
      EXPECT_EQ(message.header.priority, kFirstPriority) << "nothing may come before a hello";
    }
  }
  EXPECT_EQ(Hello::read(Hello{3, 8, "a job"}.make().header, {}).priority_class, 0u);
}

TEST(Hello, NamesTheRunOfItsJob) {
  Hello sent{1, 4, "a job", 0, {"10.0.0.1:5001"}};
  sent.run = "0123456789abcdef";
  const TextMessage message = sent.make();
  const Hello hello = Hello::read(message.header, message.payload());
  EXPECT_EQ(hello.job, sent.job);
  EXPECT_EQ(hello.run, sent.run);
  EXPECT_EQ(hello.other_cores, sent.other_cores);
}

TEST(Hello, OfAServerTellsWhetherItSaves) {
  for (const bool saves : {false, true}) {
    Hello sent{1, 4, "a job", 0, {"10.0.0.1:5001"}};
    sent.saves = saves;
    const TextMessage message = sent.make();
    const Hello hello = Hello::read(message.header, message.payload());
    EXPECT_EQ(hello.saves, saves);
    EXPECT_EQ(hello.other_cores, sent.other_cores);
  }
}

TEST(Hello, OfAnyBytesIsRead) {
  std::mt19937_64 random(4);
  for (int i = 0; i < 2000; ++i) {
    Bytes bytes(random() % 64);
    for (auto& byte : bytes) byte = random() % 4 == 0 ? std::byte{'\n'} : static_cast<std::byte>(random());
    const Hello hello = Hello::read(Header{}, bytes);
    std::size_t size = hello.job.size();
    if (!hello.run.empty() || !hello.other_cores.empty()) size += 1 + hello.run.size();
    for (const auto& core : hello.other_cores) size += 1 + core.size();
    EXPECT_LE(size, bytes.size());
    EXPECT_GE(size + 2, bytes.size()) << "at most the last newline, and an empty run, are not told";
  }
}

TEST(Hello, HasTheJobsGeneration) {
  const TextMessage message = Hello{1, 2, "a", 0, {}, 0, 7}.make();
  EXPECT_EQ(Hello::read(message.header, message.payload()).generation, 7u);
  const Hello last{1, 2, "a", 0, {}, 0, std::numeric_limits<std::uint32_t>::max()};
  EXPECT_EQ(Hello::read(last.make().header, {}).generation, last.generation);
}

TEST(Hello, AJobsNameIsTextThatATerminalCanShow) {
  for (const std::string& name :
       {std::string("a"), std::string("a job.1"), std::string("ünicode 模型/1"), std::string(kMaxJobNameBytes, 'x')})
    EXPECT_TRUE(is_job_name(name)) << name;
  for (const std::string& name :
       {std::string(), std::string("a\nb"), std::string("a\n"), std::string("a\tb"), std::string("a\0b", 3),
        std::string("\x1b[2J"), std::string("\x7f"), std::string("\xff"), std::string("\xc2\x9b"),
        std::string("\xe2\x82"), std::string(257, 'x')})
    EXPECT_FALSE(is_job_name(name)) << ::testing::PrintToString(name);
}

TEST(Messages, HelloRoundTrip) {
  const TextMessage message = Hello{3, 8, "a job"}.make();
  EXPECT_EQ(message.header.payload_bytes, 6u) << "an empty run follows";
  const Hello hello = Hello::read(message.header, message.payload());
  EXPECT_EQ(hello.rank, 3u);
  EXPECT_EQ(hello.worker_count, 8u);
  EXPECT_EQ(hello.job, "a job");
  EXPECT_EQ(Hello::read(Hello{0, 1, ""}.make().header, {}).job, "");
}

TEST(Messages, PieceAndReadyRoundTrip) {
  Envelope about{.priority = 9, .rank = 3, .unit = 7, .chunk = 5};
  about.step = 1'000'000'007;
  Piece sent;
  sent.dtype = DType::bfloat16;
  sent.is_result = true;
  sent.total_bytes = std::uint64_t{5} << 33;
  sent.signature = 0xfedcba98u;
  const Header header = sent.make(about);
  EXPECT_EQ(header.kind, Kind::piece);
  EXPECT_EQ(header.step, about.step);
  EXPECT_EQ(Piece::read(header), sent);
  Piece message;
  message.is_sent = true;
  message.total_bytes = 100;
  message.offset_bytes = 60;
  message.tag = 0xffffffffu;
  EXPECT_EQ(Piece::read(message.make(about)), message);
  for (const bool is_sent : {false, true})
    EXPECT_EQ(Ready::read(Ready{is_sent, 5, 7, 9}.make(about)), (Ready{is_sent, 5, 7, 9}));
}

TEST(Messages, RateRoundTrip) {
  const Rate sent{12'345'678'901};
  const Header header = sent.make();
  EXPECT_EQ(header.kind, Kind::rate);
  EXPECT_EQ(header.priority, kFirstPriority) << "it overtakes data";
  EXPECT_EQ(Rate::read(header), sent);
}

TEST(Messages, HeartbeatAndWaitingRoundTrip) {
  const Heartbeat sent{7};
  EXPECT_EQ(sent.make().priority, kFirstPriority) << "it overtakes data";
  EXPECT_EQ(Heartbeat::read(sent.make()), sent);
  const TextMessage message = Waiting{"in step 3"}.make();
  EXPECT_EQ(message.header.kind, Kind::waiting);
  EXPECT_EQ(Waiting::read(message.payload()).text, "in step 3");
}

TEST(Messages, HoldRoundTrip) {
  const Hold sent{60'000};
  const Header header = sent.make();
  EXPECT_EQ(header.kind, Kind::hold);
  EXPECT_EQ(header.priority, kFirstPriority) << "it overtakes data";
  EXPECT_EQ(Hold::read(header), sent);
}

TEST(Messages, ErrorRoundTrip) {
  Header about;
  about.unit = 4;
  about.chunk = 5;
  about.step = 6;
  about.priority = 700;
  const TextMessage message = Refuse{{ErrorCode::timeout, "too late"}, {}}.make(about);
  EXPECT_EQ(message.header.priority, kFirstPriority) << "why it failed overtakes data";
  EXPECT_EQ(message.header.kind, Kind::refuse);
  EXPECT_EQ(message.header.unit, 4u);
  EXPECT_EQ(message.header.chunk, 5u);
  EXPECT_EQ(message.header.step, 6u);
  const Status status = Refuse::read(message.header, message.payload()).status;
  EXPECT_EQ(status.code(), ErrorCode::timeout);
  EXPECT_EQ(status.message(), "too late");
}

TEST(Messages, ARefusalMayNameTheRankThatHasLeft) {
  Envelope request;
  request.rank = 2;
  for (const std::optional<std::uint32_t> departed :
       {std::optional<std::uint32_t>(), std::optional(0u), std::optional(7u)}) {
    const TextMessage message = Refuse{{ErrorCode::peer_lost, "gone"}, departed}.make(request);
    EXPECT_EQ(message.header.rank, 2u) << "whom it is for";
    EXPECT_EQ(Refuse::read(message.header, message.payload()).departed_rank, departed);
  }
}

TEST(Messages, AnAbortSaysWhetherItIsPlanned) {
  for (const bool planned : {false, true}) {
    const TextMessage message = Abort{{ErrorCode::aborted, "why"}, planned}.make();
    EXPECT_EQ(message.header.priority, kFirstPriority);
    const Abort abort = Abort::read(message.header, message.payload());
    EXPECT_EQ(abort.planned, planned);
    EXPECT_EQ(abort.status.message(), "why");
  }
}

TEST(Messages, UnknownErrorCodesBecomeAborted) {
  Header header;
  for (const std::uint8_t code : {0, 10, 255}) {
    header.body[2] = std::byte{code};
    EXPECT_EQ(Refuse::read(header, {}).status.code(), ErrorCode::aborted);
    EXPECT_EQ(Abort::read(header, {}).status.code(), ErrorCode::aborted);
  }
}

TEST(Messages, LongTextsAreCut) {
  const std::string text(kMaxTextBytes + 1, 'x');
  EXPECT_EQ((Hello{0, 1, text}.make().payload().size()), kMaxTextBytes);
  const TextMessage message = Abort{{ErrorCode::aborted, text}}.make();
  EXPECT_EQ(message.payload().size(), kMaxTextBytes);
  EXPECT_EQ(message.header.payload_bytes, kMaxTextBytes);
  EXPECT_EQ((Hello{0, 1, std::string(kMaxTextBytes, 'x')}.make().payload().size()), kMaxTextBytes);
}

}  // namespace
}  // namespace poseidon::wire
