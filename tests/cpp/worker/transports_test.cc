// The table of transports: every value of Options::transport has its row.
#include "worker/transports.h"

#include <gtest/gtest.h>

#include "poseidon/options.h"

namespace poseidon {
namespace {

TEST(Transports, EveryMediumHasThoseThatItNeedsOrAnError) {
  for (const auto& choice : choices_of(Medium())) {
    Options options;
    options.transport = choice.value;
    const auto made = make_transports(options);
    if (!made.ok()) {
      EXPECT_EQ(made.status().code(), ErrorCode::invalid_argument) << choice.name;
      EXPECT_EQ(choice.value, Medium::ucx) << "only UCX may be missing from a build";
      continue;
    }
    const bool per_class = choice.value == Medium::ucx;
    EXPECT_EQ(made.value().networks.size(), per_class ? 2U : 1U) << choice.name;
    for (const auto& network : made.value().networks) EXPECT_NE(network, nullptr) << choice.name;
    const bool shares_memory = choice.value == Medium::automatic || choice.value == Medium::shm;
    EXPECT_EQ(made.value().shm != nullptr, shares_memory) << choice.name;
  }
}

}  // namespace
}  // namespace poseidon
