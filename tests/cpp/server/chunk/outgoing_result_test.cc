#include "server/chunk/outgoing_result.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cpp/server/chunk/contributions.h"
#include "transport/coded_payload.h"

namespace poseidon::testing {
namespace {

constexpr std::size_t kCount = 30'000;  // several segments, the last one shorter

/// The values of a message that is coded already.
Bytes decoded(const RecordingRequester::Sent& message) {
  Bytes values(message.header.payload_bytes);
  std::span<const std::byte> rest = message.payload;
  for (std::size_t done = 0; done < values.size();) {
    const std::size_t plain_bytes = std::min(kSegmentBytes, values.size() - done);
    const auto size = segment_bytes(rest, plain_bytes);
    EXPECT_TRUE(size.ok() && size.value());
    if (!size.ok() || !size.value()) return {};
    EXPECT_TRUE(
        decode_segment(message.header.coding, rest.first(*size.value()), std::span(values).subspan(done, plain_bytes))
            .ok());
    rest = rest.subspan(*size.value());
    done += plain_bytes;
  }
  EXPECT_TRUE(rest.empty());
  return values;
}

class OutgoingResults : public ::testing::Test {
 protected:
  std::shared_ptr<const Buffer> values_of(bool noise) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    auto values = pool_->take_shared(kCount * sizeof(float));
    for (std::size_t i = 0; i < kCount; ++i) {
      const auto word = static_cast<std::uint32_t>(random());
      const float value = normal(random);
      std::memcpy(values->data() + i * sizeof(float), noise ? static_cast<const void*>(&word) : &value, sizeof(float));
    }
    return values;
  }

  std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>();
  const wire::Header header_ = wire::StepResult{}.make({});
  RecordingRequester workers_[3];
};

TEST_F(OutgoingResults, AreCodedOnceForAllWhoseConnectionsCode) {
  const auto values = values_of(false);
  workers_[0].coding = workers_[2].coding = true;
  for (RecordingRequester& worker : workers_) worker.keep = true;
  OutgoingResult result(values, 3, *pool_, nullptr);
  for (RecordingRequester& worker : workers_) result.send(worker, header_);
  for (const std::size_t coding : {0U, 2U}) {
    const auto& message = workers_[coding].sent.front();
    EXPECT_EQ(message.header.coding, Coding::float32);
    EXPECT_LT(message.payload.size(), values->size() * 9 / 10);
    EXPECT_TRUE(std::ranges::equal(decoded(message), values->span()));
  }
  EXPECT_EQ(workers_[0].sent.front().kept, workers_[2].sent.front().kept) << "one and the same memory";
  EXPECT_EQ(workers_[1].sent.front().header.coding, Coding::none);
  EXPECT_EQ(workers_[1].sent.front().kept, values);
}

TEST_F(OutgoingResults, AreCodedByTheConnectionIfOneWorkerGetsThem) {
  workers_[0].coding = true;
  OutgoingResult result(values_of(false), 1, *pool_, nullptr);
  result.send(workers_[0], header_);
  EXPECT_EQ(workers_[0].sent.front().header.coding, Coding::none);
}

TEST_F(OutgoingResults, ThatDoNotShrinkGoAsTheyAre) {
  const auto values = values_of(true);
  for (RecordingRequester& worker : workers_) worker.coding = worker.keep = true;
  OutgoingResult result(values, 3, *pool_, nullptr);
  for (RecordingRequester& worker : workers_) result.send(worker, header_);
  for (RecordingRequester& worker : workers_) EXPECT_EQ(worker.sent.front().kept, values);
}

TEST_F(OutgoingResults, GoAsTheyAreIfThereIsNoRoomToCodeThem) {
  const auto pool = std::make_shared<BufferPool>(std::make_shared<MemoryBudget>(1000));
  const auto values = values_of(false);
  for (RecordingRequester& worker : workers_) worker.coding = worker.keep = true;
  OutgoingResult result(values, 3, *pool, nullptr);
  for (RecordingRequester& worker : workers_) result.send(worker, header_);
  for (RecordingRequester& worker : workers_) EXPECT_EQ(worker.sent.front().kept, values);
}

}  // namespace
}  // namespace poseidon::testing
