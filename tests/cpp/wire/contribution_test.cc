// Messages whose body lies in the header: encoding and decoding gives equal messages, and sizes do not overflow.
#include "wire/messages/contribution.h"

#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <random>

#include "wire/messages/stored.h"

namespace poseidon::wire {
namespace {

/// Encodes and decodes the header.
Header received(const Header& header) {
  std::array<std::byte, kHeaderBytes> bytes;
  encode(header, bytes);
  Header decoded;
  const Status status = decode(bytes, decoded);
  EXPECT_TRUE(status.ok()) << status.message();
  return decoded;
}

class Random {
 public:
  bool flag() { return random_() % 2 == 0; }
  std::uint32_t number() { return static_cast<std::uint32_t>(random_()); }
  std::uint64_t large() { return random_(); }
  DType dtype() { return static_cast<DType>(1 + random_() % 7); }
  Envelope envelope() {
    Envelope about;
    about.priority = static_cast<std::uint16_t>(random_() % kPriorityLevels);
    about.rank = number();
    about.unit = number();
    about.chunk = number();
    about.step = large();
    about.payload_bytes = number();
    return about;
  }

 private:
  std::mt19937_64 random_{5};
};

/// Checks that the envelope is unchanged, except for the kind.
void expect_about(const Header& header, Envelope about) {
  about.kind = header.kind;
  EXPECT_EQ(static_cast<const Envelope&>(header), about);
}

TEST(Messages, OfAStepRoundTrip) {
  Random random;
  for (int i = 0; i < 500; ++i) {
    const Kind kind = random.flag() ? Kind::push : random.flag() ? Kind::factors : Kind::rows;
    Contribution sent(kind, random.envelope());
    sent.dtype = random.dtype();
    sent.absent = random.flag();
    sent.dense = kind != Kind::push && random.flag();
    sent.transient = random.flag();
    sent.stored = random.flag();
    sent.wants_result = random.flag();
    sent.excluded_from_mean = random.flag();
    sent.float32_value = random.flag();
    sent.as_bfloat16 = random.flag();
    sent.worker_count = random.number();
    sent.divisor = random.number();
    sent.factor_count = random.number();
    if (kind == Kind::push) {
      sent.base = random.large();
    } else {
      sent.rows = random.number();
      sent.cols = random.number();
    }
    sent.rule_digest = random.number();
    EXPECT_EQ(Contribution::read(received(sent.make())), sent);

    const StepResult result{random.dtype(), random.flag(),   random.flag(),
                            random.flag(),  random.number(), random.number()};
    const Header answer = received(result.make(sent));
    EXPECT_EQ(answer.kind, Kind::result);
    EXPECT_EQ(StepResult::read(answer), result);
    expect_about(answer, sent);
  }
}

TEST(Messages, DifferencesAreCodedAsWhatTheyAre) {
  Envelope about;
  about.payload_bytes = 1000;
  const auto coding = [&](DType dtype, bool difference) {
    return coding_of(StepResult{.dtype = dtype, .difference = difference}.make(about));
  };
  EXPECT_EQ(coding(DType::float32, false), Coding::float32);
  EXPECT_EQ(coding(DType::float32, true), Coding::difference32);
  EXPECT_EQ(coding(DType::bfloat16, true), Coding::difference16);
  EXPECT_EQ(coding(DType::float16, true), Coding::difference16);
  EXPECT_EQ(coding(DType::float64, true), Coding::none);
  EXPECT_EQ(coding(DType::uint8, false), Coding::float32);
  EXPECT_EQ(coding(DType::int8_blocks, false), Coding::int8);
  EXPECT_EQ(coding(DType::int8_blocks, true), Coding::none);
}

TEST(Messages, AboutStoredArraysRoundTrip) {
  Random random;
  for (int i = 0; i < 500; ++i) {
    const Envelope about = random.envelope();
    const Assign assign{random.dtype(), random.number(), random.large(), random.flag()};
    const Pull pull{random.number(), random.flag()};
    const Restore restore{random.dtype(), random.large(), random.flag()};
    const Value value{random.dtype(), random.flag(), random.number(), random.large(), random.large()};
    EXPECT_EQ(Assign::read(received(assign.make(about))), assign);
    EXPECT_EQ(Pull::read(received(pull.make(about))), pull);
    EXPECT_EQ(Restore::read(received(restore.make(about))), restore);
    EXPECT_EQ(Value::read(received(value.make(about))), value);
    for (const Header& header : {assign.make(about), pull.make(about), restore.make(about), value.make(about)})
      expect_about(received(header), about);
  }
}

TEST(Kinds, EachHasANameAndADirection) {
  for (std::size_t number = 1; number < kKinds.size(); ++number) {
    const auto kind = static_cast<Kind>(number);
    EXPECT_STRNE(kind_name(kind), "");
    const std::uint64_t most = largest_payload(kind);
    bool travels_at_all = false;
    for (const Direction direction : {Direction::to_server, Direction::from_server, Direction::from_peer}) {
      const bool travels = handling_of(kind, direction) != Handling::never;
      travels_at_all = travels_at_all || travels;
      EXPECT_EQ(check_kind(kind, direction, most).ok(), travels) << kind_name(kind);
      EXPECT_EQ(check_kind(kind, direction, most + 1).code(), ErrorCode::mismatch) << kind_name(kind);
      if (direction != Direction::to_server)
        EXPECT_NE(handling_of(kind, direction), Handling::request) << "only servers take requests";
    }
    EXPECT_TRUE(travels_at_all) << kind_name(kind);
  }
  EXPECT_EQ(check_kind(Kind::none, Direction::to_server, 0).code(), ErrorCode::mismatch);
  EXPECT_EQ(largest_payload(Kind::push), kMaxPayloadBytes);
  EXPECT_EQ(largest_payload(Kind::hello), kMaxTextBytes);
  EXPECT_EQ(largest_payload(Kind::pull), 0u);
}

TEST(Sizes, OfFactorsAndMatrices) {
  Contribution factors;
  factors.dtype = DType::float64;
  factors.factor_count = 3;
  factors.rows = 5;
  factors.cols = 7;
  EXPECT_EQ(factors.factor_bytes(), 3u * (5 + 7) * 8);
  EXPECT_EQ(factors.matrix_bytes(), 5u * 7 * 8);
  factors.factor_count = 0;
  EXPECT_EQ(factors.factor_bytes(), 0u);
}

TEST(Sizes, ThatAreTooLargeAreNone) {
  Contribution factors;
  factors.rows = factors.cols = 0xffffffffu;
  factors.factor_count = 0xffffffffu;
  EXPECT_EQ(factors.factor_bytes(), std::nullopt);
  EXPECT_EQ(factors.matrix_bytes(), std::nullopt);
  factors.rows = 1u << 16;
  factors.cols = 1u << 16;
  factors.dtype = DType::float32;  // exactly the limit
  EXPECT_EQ(factors.matrix_bytes(), kMaxPayloadBytes);
  factors.cols += 1;
  EXPECT_EQ(factors.matrix_bytes(), std::nullopt);
  factors.factor_count = kUnboundedFactors;
  factors.rows = factors.cols = 1u << 20;
  EXPECT_EQ(factors.factor_bytes(), std::nullopt);
}

}  // namespace
}  // namespace poseidon::wire
