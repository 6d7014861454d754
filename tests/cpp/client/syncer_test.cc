// Syncer: factors that come before this worker has started its step.
#include "client/syncer.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "wire/messages/contribution.h"

namespace poseidon {
namespace {

constexpr std::size_t kRows = 4;
constexpr std::size_t kCols = 6;

/// Rank 0 of three, with a layer whose scheme is chosen anew for every step.
class SyncerTest : public ::testing::Test {
 protected:
  SyncerTest() {
    layer_.name = "weights";
    layer_.rows = kRows;
    layer_.cols = kCols;
    unit_.name = layer_.name;
    unit_.size_bytes = values_.size() * sizeof(float);
    cluster_.worker_count = 3;
    cluster_.server_count = 1;
    links_.worker_count = 3;
    links_.pool = std::make_shared<BufferPool>();
    links_.recorder = &recorder_;
    syncer_ = std::make_unique<Syncer>(unit_, layer_, false, cluster_, links_, [this](Syncer&) { ++done_count_; });
    syncer_->set_factor_count(wire::kUnboundedFactors);  // so the next step takes ps
  }

  /// Rank 1's factors of this step.
  static wire::Header factors_of(std::uint64_t step) {
    wire::Contribution factors;
    factors.kind = wire::Kind::factors;
    factors.rank = 1;
    factors.step = step;
    factors.rows = kRows;
    factors.cols = kCols;
    factors.factor_count = 2;
    factors.payload_bytes = 2 * (kRows + kCols) * sizeof(float);
    return factors.make();
  }

  void start() {
    DenseGradient gradient;
    gradient.data = std::as_bytes(std::span(values_));
    syncer_->start(Push{.gradient = gradient, .destination = std::as_writable_bytes(std::span(values_))});
  }

  std::vector<float> values_ = std::vector<float>(kRows * kCols);
  Layer layer_;
  Unit unit_;
  Cluster cluster_;
  FlightRecorder recorder_;
  Links links_;
  std::unique_ptr<Syncer> syncer_;
  int done_count_ = 0;
};

TEST_F(SyncerTest, FactorsAreAcceptedOneStepAheadAndOnce) {
  for (const bool lent : {false, true}) {
    EXPECT_EQ(syncer_->accept(factors_of(0), lent).status().code(), ErrorCode::mismatch);
    EXPECT_EQ(syncer_->accept(factors_of(2), lent).status().code(), ErrorCode::mismatch);
  }
  EXPECT_TRUE(syncer_->accept(factors_of(1), true).ok());
  for (const bool lent : {false, true})
    EXPECT_NE(syncer_->accept(factors_of(1), lent).status().message().find("came twice"), std::string::npos);
}

TEST_F(SyncerTest, AStepWithoutFactorsFailsIfTheyHaveBegunToArrive) {
  ASSERT_TRUE(syncer_->accept(factors_of(1), false).ok());
  start();
  const Status& status = syncer_->exchange().progress.status;
  EXPECT_EQ(status.code(), ErrorCode::mismatch);
  EXPECT_NE(status.message().find("a peer has sent factors in step 1"), std::string::npos) << status.message();
  EXPECT_EQ(done_count_, 1);
}

}  // namespace
}  // namespace poseidon
