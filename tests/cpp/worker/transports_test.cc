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

TEST(Transports, OtherLoopsMoveTheBytesOfTcpAlone) {
  Options options;
  options.worker_cores = 2;
  for (const Medium medium : {Medium::automatic, Medium::tcp, Medium::shm}) {
    options.transport = medium;
    const auto made = make_transports(options);
    ASSERT_TRUE(made.ok()) << made.status().message();
    EXPECT_EQ(made.value().of_client().front(), made.value().spread.front());
    EXPECT_NE(made.value().of_client().front(), made.value().networks.front());
  }
  options.transport = Medium::ucx;
  const Status status = check_transport(options);
  EXPECT_EQ(status.code(), ErrorCode::invalid_argument);
  EXPECT_NE(status.message().find("worker_cores is 2"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace poseidon
