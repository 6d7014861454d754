// Buffers, their pool and the executor.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <future>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "base/buffer.h"
#include "base/buffer_pool.h"
#include "base/executor.h"
#include "base/file_descriptor.h"
#include "base/memory_budget.h"
#include "poseidon/dtype.h"
#include "poseidon/status.h"

namespace poseidon {
namespace {

TEST(Buffer, IsAlignedToCacheLines) {
  for (const std::size_t size_bytes : {0u, 1u, 63u, 64u, 65u, 1u << 20}) {
    Buffer buffer(size_bytes);
    ASSERT_TRUE(buffer);
    EXPECT_EQ(buffer.size(), size_bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 64, 0u);
    std::ranges::fill(buffer.span(), std::byte{0xAB});
  }
  EXPECT_FALSE(Buffer());
}

TEST(Buffer, MovingKeepsTheMemory) {
  Buffer first(100);
  const std::byte* memory = first.data();
  const Buffer second = std::move(first);
  EXPECT_EQ(second.data(), memory);
  EXPECT_EQ(second.size(), 100u);
}

TEST(BufferPool, GivesBackTheSameMemoryForTheSameSize) {
  const auto pool = std::make_shared<BufferPool>();
  Buffer buffer = pool->take(1000);
  const std::byte* memory = buffer.data();
  pool->give_back(std::move(buffer));
  EXPECT_NE(pool->take(799).data(), memory) << "too small for so much memory";
  EXPECT_NE(pool->take(1001).data(), memory);
  Buffer again = pool->take(1000);
  EXPECT_EQ(again.data(), memory);
  EXPECT_NE(pool->take(1000).data(), memory);
}

TEST(BufferPool, GivesALittleMoreMemoryThanIsAskedFor) {
  const auto budget = std::make_shared<MemoryBudget>(1000);
  const auto pool = std::make_shared<BufferPool>(budget);
  Buffer buffer = pool->take(1000);
  const std::byte* memory = buffer.data();
  pool->give_back(std::move(buffer));
  Buffer smaller = pool->try_take(800);
  EXPECT_EQ(smaller.data(), memory);
  EXPECT_EQ(smaller.size(), 800u);
  EXPECT_FALSE(pool->has_room(1)) << "all of it is in use";
  pool->give_back(std::move(smaller));
  EXPECT_EQ(pool->take(1000).data(), memory) << "nothing of it is lost";
}

// The factors of a layer with 4 kB per row. Only the number of rows varies.
TEST(BufferPool, SizesThatVaryDoNotAddUp) {
  constexpr std::size_t kRowBytes = 4096;
  constexpr std::size_t kMostRows = 20'000;
  const auto budget = std::make_shared<MemoryBudget>(0);
  const auto pool = std::make_shared<BufferPool>(budget);
  std::minstd_rand random(1);
  for (int step = 0; step < 2000; ++step) {
    Buffer first = pool->take(kRowBytes * (1 + random() % kMostRows));
    Buffer second = pool->take(kRowBytes * (1 + random() % kMostRows));
    pool->give_back(std::move(first));
    pool->give_back(std::move(second));
    ASSERT_LE(budget->used_bytes(), 3 * 2 * kRowBytes * kMostRows);
  }
}

TEST(BufferPool, DropsWhatHasNotBeenUsedForTheLongest) {
  const auto pool = std::make_shared<BufferPool>();
  constexpr std::size_t kMost = BufferPool::kLeastFreeBytes;
  const auto use = [&pool](std::size_t size_bytes) {
    Buffer buffer = pool->take(size_bytes);
    const std::byte* memory = buffer.data();
    pool->give_back(std::move(buffer));
    return memory;
  };
  const std::byte* often = use(kMost / 4);
  for (const std::size_t once : {kMost / 3, kMost / 2 - 1, kMost / 5, kMost / 7}) {
    use(once);
    EXPECT_EQ(use(kMost / 4), often);
    EXPECT_LE(pool->free_bytes(), kMost);
  }
}

TEST(BufferPool, SharedBuffersReturnAndMayOutliveTheOwner) {
  auto pool = std::make_shared<BufferPool>();
  auto shared = pool->take_shared(64);
  const std::byte* memory = shared->data();
  auto second = shared;
  shared.reset();
  EXPECT_NE(pool->take(64).data(), memory);
  second.reset();
  EXPECT_EQ(pool->take(64).data(), memory);
  auto late = pool->take_shared(64);
  pool.reset();
  std::ranges::fill(late->span(), std::byte{1});
}

TEST(Buffer, IsEmptyWhereTheMachineHasNoSuchMemory) {
  EXPECT_FALSE(Buffer::try_make(std::size_t{1} << 60));
  EXPECT_EQ(Buffer::try_make(100).size(), 100u);
}

TEST(MemoryBudget, ChargesWhatFitsAndNotAByteMore) {
  MemoryBudget budget(100);
  EXPECT_TRUE(budget.try_charge(60));
  EXPECT_FALSE(budget.try_charge(41));
  EXPECT_TRUE(budget.has_room(40));
  EXPECT_FALSE(budget.has_room(~std::size_t{0})) << "no sum overflows";
  EXPECT_TRUE(budget.try_charge(40));
  budget.charge(1);
  EXPECT_FALSE(budget.has_room(0)) << "past the limit";
  budget.release(101);
  EXPECT_EQ(budget.used_bytes(), 0u);
}

TEST(MemoryBudget, OfNoLimitHasRoomForAll) {
  MemoryBudget budget(0);
  EXPECT_TRUE(budget.try_charge(std::size_t{1} << 62));
  EXPECT_TRUE(budget.has_room(~std::size_t{0}));
}

TEST(MemoryBudget, OfAPartIsChargedToTheWholeToo) {
  const auto whole = std::make_shared<MemoryBudget>(100);
  MemoryBudget first(80, whole);
  MemoryBudget second(0, whole);
  EXPECT_TRUE(first.try_charge(70));
  EXPECT_FALSE(first.try_charge(20)) << "its own limit";
  EXPECT_FALSE(second.try_charge(31)) << "the whole's";
  EXPECT_EQ(second.used_bytes(), 0u);
  EXPECT_EQ(whole->used_bytes(), 70u);
  EXPECT_TRUE(second.try_charge(30));
  EXPECT_FALSE(first.has_room(1));
  second.charge(5);
  EXPECT_EQ(whole->used_bytes(), 105u);
  second.release(35);
  EXPECT_TRUE(first.has_room(10));
  first.release(70);
  EXPECT_EQ(whole->used_bytes(), 0u);
}

TEST(MemoryBudget, ThreadsTogetherStayWithinIt) {
  constexpr std::size_t kLimit = 1000;
  MemoryBudget budget(kLimit);
  std::atomic<std::size_t> most{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&budget, &most] {
      for (int round = 0; round < 20'000; ++round) {
        if (!budget.try_charge(300)) continue;
        std::size_t seen = most.load();
        const std::size_t used = budget.used_bytes();
        while (seen < used && !most.compare_exchange_weak(seen, used)) {
        }
        budget.release(300);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_LE(most.load(), kLimit);
  EXPECT_GE(most.load(), 300u);
  EXPECT_EQ(budget.used_bytes(), 0u);
}

TEST(BufferPool, CountsWhatItHoldsAndDropsWhatIsFreeFirst) {
  const auto budget = std::make_shared<MemoryBudget>(1000);
  auto pool = std::make_shared<BufferPool>(budget);
  Buffer first = pool->try_take(600);
  ASSERT_TRUE(first);
  EXPECT_FALSE(pool->try_take(500)) << "in use";
  pool->give_back(std::move(first));
  EXPECT_EQ(budget->used_bytes(), 600u) << "free, but held";
  EXPECT_TRUE(pool->has_room(1000));
  EXPECT_EQ(budget->used_bytes(), 0u);
  Buffer second = pool->try_take(600);
  pool->give_back(std::move(second));
  EXPECT_TRUE(pool->try_take(600)) << "the free one";
  const auto third = pool->take(600);  // what cannot be refused
  EXPECT_EQ(budget->used_bytes(), 1200u);
  EXPECT_FALSE(pool->has_room(0));
  auto late = pool->take_shared(50);
  pool.reset();
  EXPECT_GT(budget->used_bytes(), 0u) << "its last buffer keeps it";
  late.reset();
  EXPECT_EQ(budget->used_bytes(), 0u);
}

TEST(BufferPool, KeepsOnlyWhatLeavesRoomForTheMostThatWasNeeded) {
  const auto budget = std::make_shared<MemoryBudget>(1000);
  const auto pool = std::make_shared<BufferPool>(budget);
  Buffer first = pool->try_take(300);
  Buffer second = pool->try_take(300);
  pool->give_back(std::move(second));
  ASSERT_TRUE(pool->try_keep(300)) << "the first one";
  EXPECT_EQ(budget->used_bytes(), 900u) << "both, and one in place of the first";
  EXPECT_FALSE(pool->try_keep(101));
  EXPECT_FALSE(budget->try_charge(101)) << "others have what is left";
  EXPECT_TRUE(budget->try_charge(100));
  Buffer other = pool->try_take(600);
  EXPECT_TRUE(other) << "of another size, as much as was needed";
  EXPECT_FALSE(pool->has_room(1));
  pool->give_back(std::move(other));
  pool->give_back(std::move(first));
  pool->end_keep(300);
  EXPECT_TRUE(pool->has_room(900));
  EXPECT_EQ(budget->used_bytes(), 100u);
}

TEST(Executor, RunsEveryPartOnceAndThenDone) {
  Executor executor(3);
  for (const std::size_t part_count : {0u, 1u, 2u, 100u}) {
    std::vector<std::atomic<int>> runs(part_count);
    std::promise<int> finished;
    executor.run(
        part_count, [&](std::size_t part) { ++runs[part]; },
        [&] {
          finished.set_value(
              std::accumulate(runs.begin(), runs.end(), 0, [](int total, const auto& n) { return total + n.load(); }));
        });
    EXPECT_EQ(finished.get_future().get(), static_cast<int>(part_count));
    for (const auto& count : runs) EXPECT_EQ(count.load(), 1);
  }
}

TEST(Executor, OneThreadKeepsTheOrder) {
  Executor executor(1);
  std::mutex mutex;
  std::vector<std::size_t> order;
  std::promise<void> finished;
  for (std::size_t job = 0; job < 20; ++job) {
    executor.run(
        2,
        [&, job](std::size_t part) {
          const std::lock_guard lock(mutex);
          order.push_back(job * 2 + part);
        },
        [&, job] {
          if (job == 19) finished.set_value();
        });
  }
  finished.get_future().wait();
  EXPECT_TRUE(std::ranges::is_sorted(order));
  EXPECT_EQ(order.size(), 40u);
}

TEST(Executor, DestroyingItRunsWhatItWasGiven) {
  std::atomic<int> done_count{0};
  {
    Executor executor(2);
    for (int job = 0; job < 50; ++job)
      executor.run(
          3, [](std::size_t) {}, [&] { ++done_count; });
  }
  EXPECT_EQ(done_count.load(), 50);
}

TEST(FileDescriptor, ClosesOnceAndMoves) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  {
    FileDescriptor reader(ends[0]);
    FileDescriptor moved = std::move(reader);
    EXPECT_FALSE(reader);  // NOLINT(bugprone-use-after-move): the state after a move is the contract
    EXPECT_EQ(moved.get(), ends[0]);
    const FileDescriptor writer(ends[1]);
    EXPECT_EQ(::write(writer.get(), "x", 1), 1);
  }
  EXPECT_EQ(::write(ends[1], "x", 1), -1);
}

TEST(Status, ContextComesBeforeTheMessageAndOkStaysOk) {
  EXPECT_TRUE(Status().with_context("anything").ok());
  const Status status = Status(ErrorCode::timeout, "late").with_context("rank 3");
  EXPECT_EQ(status.code(), ErrorCode::timeout);
  EXPECT_EQ(status.message(), "rank 3: late");
  EXPECT_EQ(error_code_name(ErrorCode::peer_lost), "peer_lost");
  EXPECT_EQ(dtype_name(DType::bfloat16), "bfloat16");
  EXPECT_EQ(dtype_name(static_cast<DType>(99)), "unknown");
}

}  // namespace
}  // namespace poseidon
