// Payloads that the shared-memory transport lends, and which blocks it sends them in.
#include <algorithm>
#include <cstring>
#include <deque>
#include <random>
#include <thread>
#include <utility>

#include "conformance/transport_fixture.h"
#include "transport/shm/block_map.h"
#include "transport/shm/shm_transport.h"

namespace poseidon::testing {
namespace {

constexpr std::size_t kChunkBytes = 256u << 10;

TEST(BlockMap, TakesTheLowestRunThatIsLongEnough) {
  shm::BlockMap blocks;
  EXPECT_EQ(blocks.take(60), 0u);
  EXPECT_EQ(blocks.take(10), 60u);  // over the border of a word
  EXPECT_EQ(blocks.take(shm::kBlockCount - 70), 70u);
  EXPECT_EQ(blocks.take(1), std::nullopt);
  EXPECT_TRUE(blocks.give_back(60));
  EXPECT_EQ(blocks.take(11), std::nullopt);
  EXPECT_EQ(blocks.take(4), 60u);
  EXPECT_EQ(blocks.take(6), 64u);
  EXPECT_EQ(blocks.used_count(), shm::kBlockCount);
  EXPECT_TRUE(blocks.give_back(0));
  EXPECT_TRUE(blocks.give_back(60));
  EXPECT_EQ(blocks.take(64), 0u);  // neighbours have become one run
}

TEST(BlockMap, RefusesWhatItHasNotGiven) {
  shm::BlockMap blocks;
  EXPECT_EQ(blocks.take(5), 0u);
  for (const std::uint32_t first : {1u, 5u, shm::kBlockCount, 0xffffffffu}) EXPECT_FALSE(blocks.give_back(first));
  EXPECT_TRUE(blocks.give_back(0));
  EXPECT_FALSE(blocks.give_back(0));
  EXPECT_EQ(blocks.used_count(), 0u);
}

/// Keeps the borrowed payloads of the chunks that the test names, releases the others at once, and checks all of them.
class Keeper final : public Receiver {
 public:
  std::function<bool(std::uint32_t)> keeps = [](std::uint32_t) { return false; };

  static Bytes payload_of(std::uint32_t chunk, std::size_t size_bytes) { return pattern(size_bytes, chunk); }

  Result<std::span<std::byte>> accept(Flow&, const wire::Header& header, bool /*lent*/) override {
    place_ = Buffer(static_cast<std::size_t>(header.payload_bytes));
    expected_ = payload_of(header.chunk, place_.size());
    compared_bytes_ = 0;
    return place_.span();
  }
  void on_progress(Flow&, const wire::Header&, std::size_t received_bytes) override {
    const std::size_t begin = std::exchange(compared_bytes_, received_bytes);
    EXPECT_EQ(std::memcmp(place_.data() + begin, expected_.data() + begin, received_bytes - begin), 0);
    const std::lock_guard lock(mutex_);
    ++progress_count_;
  }
  Status on_message(Flow&, const wire::Header& header, std::span<const std::byte> payload,
                    std::function<void()> release) override {
    const Bytes expected = payload_of(header.chunk, payload.size());
    const std::lock_guard lock(mutex_);
    EXPECT_TRUE(std::equal(payload.begin(), payload.end(), expected.begin())) << header.chunk;
    ++message_count_;
    if (release) {
      ++lent_count_;
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(payload.data()) % 64, 0u);
      if (keeps(header.chunk)) kept_[header.chunk] = {payload, std::move(release)};
    }
    changed_.notify_all();
    return {};
  }
  void on_closed(Flow&, const Status&) override {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

  bool wait_messages(std::size_t count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] { return message_count_ >= count; });
  }
  bool wait_closed() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] { return closed_; });
  }
  std::size_t lent_count() {
    const std::lock_guard lock(mutex_);
    return lent_count_;
  }
  std::size_t progress_count() {
    const std::lock_guard lock(mutex_);
    return progress_count_;
  }
  /// Releases all kept payloads. Their bytes must be unchanged.
  std::vector<std::function<void()>> take_kept() {
    const std::lock_guard lock(mutex_);
    std::vector<std::function<void()>> releases;
    for (auto& [chunk, loan] : kept_) {
      const Bytes expected = payload_of(chunk, loan.first.size());
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), loan.first.begin())) << chunk;
      releases.push_back(std::move(loan.second));
    }
    kept_.clear();
    return releases;
  }

 private:
  Buffer place_;
  Bytes expected_;  // in place_
  std::size_t compared_bytes_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t message_count_ = 0;
  std::size_t lent_count_ = 0;
  std::size_t progress_count_ = 0;
  bool closed_ = false;
  std::map<std::uint32_t, std::pair<std::span<const std::byte>, std::function<void()>>> kept_;
};

/// A connected pair whose server end has a Keeper.
class ShmLoans : public ::testing::Test {
 protected:
  void SetUp() override {
    std::promise<std::shared_ptr<Flow>> accepted;
    auto listener = transport_->listen(*server_loop_, "loans:0",
                                       [&](std::shared_ptr<Flow> flow) { accepted.set_value(std::move(flow)); });
    ASSERT_TRUE(listener.ok()) << listener.status().message();
    std::promise<Result<std::shared_ptr<Flow>>> connected;
    transport_->connect(client_loop_, listener.value()->address(), Clock::now() + kPatience,
                        [&](Result<std::shared_ptr<Flow>> flow) { connected.set_value(std::move(flow)); });
    auto flow = connected.get_future().get();
    ASSERT_TRUE(flow.ok()) << flow.status().message();
    client_ = std::make_unique<End>(client_loop_, std::move(flow.value()));
    client_->receive();
    server_ = accepted.get_future().get();
  }
  void TearDown() override {
    client_.reset();
    if (server_ == nullptr) return;
    EXPECT_TRUE(keeper_.wait_closed());
    server_loop_->call([&] { server_.reset(); });
  }

  void receive(std::function<bool(std::uint32_t)> keeps) {
    keeper_.keeps = std::move(keeps);
    server_loop_->call([&] { server_->set_receiver(&keeper_); });
  }
  void send(std::uint32_t first_chunk, std::uint32_t count, std::size_t size_bytes) {
    for (std::uint32_t i = 0; i < count; ++i) {
      payloads_.push_back(Keeper::payload_of(first_chunk + i, size_bytes));
      client_->send(push_header(first_chunk + i), payloads_.back());
    }
  }

  std::deque<Bytes> payloads_;
  std::unique_ptr<Transport> transport_ = make_shm_transport();
  Keeper keeper_;
  Loop client_loop_{"client"};
  std::unique_ptr<Loop> server_loop_ = std::make_unique<Loop>("server");
  std::unique_ptr<End> client_;
  std::shared_ptr<Flow> server_;
};

TEST_F(ShmLoans, LendsUpToAQuarterAndCopiesWhatIsLarger) {
  receive([](std::uint32_t) { return false; });
  send(0, 1, shm::kAreaBytes / 4);
  ASSERT_TRUE(keeper_.wait_messages(1));
  EXPECT_EQ(keeper_.lent_count(), 1u);
  EXPECT_EQ(keeper_.progress_count(), 0u);
  send(1, 1, shm::kAreaBytes / 4 + 1);
  ASSERT_TRUE(keeper_.wait_messages(2));
  EXPECT_EQ(keeper_.lent_count(), 1u);
  EXPECT_GT(keeper_.progress_count(), 0u);
}

TEST_F(ShmLoans, KeptForeverTheyStopNobody) {
  const auto count = static_cast<std::uint32_t>(8 * shm::kAreaBytes / kChunkBytes);
  receive([](std::uint32_t) { return true; });
  send(0, count, kChunkBytes);
  ASSERT_TRUE(keeper_.wait_messages(count));
  const std::size_t lent = keeper_.lent_count();
  EXPECT_EQ(lent, shm::kAreaBytes / 2 / kChunkBytes);
  keeper_.take_kept().clear();
  send(count, 4, kChunkBytes);
  ASSERT_TRUE(keeper_.wait_messages(count + 4));
  EXPECT_EQ(keeper_.lent_count(), lent + 4);
}

TEST_F(ShmLoans, KeptHereAndThereTheyStopNoLargeMessage) {
  // Every second small payload is kept. So at first the free memory is in pieces of one block.
  const std::uint32_t small_count = shm::kBlockCount;
  receive([](std::uint32_t chunk) { return chunk % 2 == 0; });
  send(0, small_count, shm::kBlockBytes);
  send(small_count + 1, 1, shm::kAreaBytes / 4);
  send(small_count + 2, 1, 3 * shm::kAreaBytes);
  ASSERT_TRUE(keeper_.wait_messages(small_count + 2));
  EXPECT_FALSE(keeper_.take_kept().empty());
}

TEST_F(ShmLoans, MayBeReleasedInAnyOrderByAnyThread) {
  receive([](std::uint32_t) { return true; });
  std::mt19937 random(7);
  std::uint32_t sent = 0;
  for (int round = 0; round < 20; ++round) {
    send(sent, 12, kChunkBytes);
    sent += 12;
    ASSERT_TRUE(keeper_.wait_messages(sent));
    auto releases = keeper_.take_kept();
    std::shuffle(releases.begin(), releases.end(), random);
    const std::size_t half = releases.size() / 2;
    std::thread other([&] {
      for (std::size_t i = 0; i < half; ++i) releases[i]();
    });
    for (std::size_t i = half; i < releases.size(); ++i) releases[i] = nullptr;  // dropped, not called
    other.join();
    for (std::size_t i = 0; i < half; ++i) releases[i]();  // twice is once
  }
  EXPECT_GT(keeper_.lent_count(), 20u * 4);
}

TEST_F(ShmLoans, OutliveTheFlowAndItsLoop) {
  receive([](std::uint32_t) { return true; });
  send(0, 4, kChunkBytes);
  ASSERT_TRUE(keeper_.wait_messages(4));
  client_.reset();
  ASSERT_TRUE(keeper_.wait_closed());
  server_loop_->call([&] { server_.reset(); });
  server_loop_.reset();
  auto releases = keeper_.take_kept();
  EXPECT_EQ(releases.size(), 4u);
  for (const auto& release : releases) release();
}

}  // namespace
}  // namespace poseidon::testing
