#include <gtest/gtest.h>

#include "poseidon/measure.h"

namespace poseidon {
namespace {

TEST(MultiplyAddsPerSecond, IsThatOfSomeProcessor) {
  const double rate = multiply_adds_per_second();
  EXPECT_GT(rate, 1e6);   // a sanitizer makes it slow
  EXPECT_LT(rate, 1e13);  // 1000 threads' worth
}

}  // namespace
}  // namespace poseidon
