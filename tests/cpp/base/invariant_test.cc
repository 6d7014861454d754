// invariant: the process ends with the place and the rule.
#include "base/invariant.h"

#include <gtest/gtest.h>

#include <memory>

#include "base/buffer.h"
#include "base/buffer_pool.h"
#include "base/memory_budget.h"
#include "kernel/kernel.h"
#include "transport/level_queue.h"

namespace poseidon {
namespace {

class InvariantDeathTest : public ::testing::Test {
 protected:
  InvariantDeathTest() { ::testing::GTEST_FLAG(death_test_style) = "threadsafe"; }
};

TEST_F(InvariantDeathTest, OneThatIsBrokenEndsTheProcessWithItsPlaceAndItsRule) {
  invariant(true, "one is one");
  EXPECT_DEATH(invariant(false, "two is three"),
               "poseidon: broken invariant at tests/cpp/base/invariant_test.cc:[0-9]+: two is three");
  EXPECT_DEATH(break_down("nothing comes here"), "invariant_test.cc:[0-9]+: nothing comes here");
}

TEST_F(InvariantDeathTest, MemoryGoesBackOnce) {
  Buffer buffer(8);
  buffer.resize(4);
  EXPECT_DEATH(buffer.resize(9), "src/base/buffer.h:[0-9]+: a buffer is resized within its capacity");
  const auto pool = std::make_shared<BufferPool>();
  EXPECT_DEATH(pool->give_back(std::move(buffer)), "a buffer goes back once, to the pool from which it was taken");
  pool->charge(8);
  EXPECT_DEATH(pool->release(9), "a pool releases no more than it has charged");
  EXPECT_DEATH(pool->end_keep(1), "keeps");
  pool->release(8);
  MemoryBudget budget(0);
  EXPECT_DEATH(budget.release(1), "a budget releases no more than was charged to it");
}

TEST_F(InvariantDeathTest, QueuesAndKernelsCheckTheirPreconditions) {
  LevelQueue<int> queue;
  EXPECT_DEATH(queue.pop(), "a value is taken from a queue that has one");
  EXPECT_DEATH(queue.push(wire::kPriorityLevels, 1), "a message's level is below");
  EXPECT_DEATH(kernel::sum({}, nullptr, 0, DType::float32, 1), "a sum has inputs and a divisor");
  EXPECT_DEATH(kernel::finish_sum(nullptr, nullptr, 0, DType::float32, 0), "a sum has a divisor");
  EXPECT_DEATH(kernel::factor_product({}, nullptr, DType::float32, 2, 2, 0, 3, 1, false), "rows of a product");
}

}  // namespace
}  // namespace poseidon
