// The behaviour of the in-process transport alone: it lends the sender's memory.

#include "conformance/transport_fixture.h"
#include "simulation/virtual_time.h"
#include "transport/inproc/inproc_transport.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;

class InprocLoan : public ::testing::Test {
 protected:
  void SetUp() override {
    Awaited<std::shared_ptr<Flow>> accepted;
    auto listener = transport_->listen(*receiver_loop_, "shard:0",
                                       [&accepted](std::shared_ptr<Flow> flow) { accepted.set(std::move(flow)); });
    ASSERT_TRUE(listener.ok());
    Awaited<std::shared_ptr<Flow>> connected;
    transport_->connect(*sender_loop_, listener.value()->address(), Clock::now() + kPatience,
                        [&](Result<std::shared_ptr<Flow>> flow) { connected.set(flow.value()); });
    sender_ = std::make_unique<End>(*sender_loop_, connected.get());
    receiver_ = std::make_unique<End>(*receiver_loop_, accepted.get());
    receiver_->recorder.keep_loans = true;
    sender_->receive();
    receiver_->receive();
  }

  std::unique_ptr<Transport> transport_ = make_inproc_transport();
  std::unique_ptr<Loop> sender_loop_ = std::make_unique<Loop>("sender");
  std::unique_ptr<Loop> receiver_loop_ = std::make_unique<Loop>("receiver");
  const Bytes payload_ = pattern(1000, 1);
  std::unique_ptr<End> sender_;
  std::unique_ptr<End> receiver_;
};

TEST_F_IN_VIRTUAL_TIME(InprocLoan, ThePayloadIsTheSendersMemory) {
  sender_->send(push_header(1), payload_);
  ASSERT_TRUE(receiver_->recorder.wait_messages(1));
  EXPECT_EQ(receiver_->recorder.messages()[0].data, payload_.data());
  receiver_->recorder.take_loans();
}

TEST_F_IN_VIRTUAL_TIME(InprocLoan, DoneWaitsForTheRelease) {
  sender_->send(push_header(1), payload_);
  ASSERT_TRUE(receiver_->recorder.wait_loans(1));
  pause_for(milliseconds(20));
  EXPECT_EQ(sender_->sends.done_count(), 0u);
  auto loans = receiver_->recorder.take_loans();
  loans[0]();
  ASSERT_TRUE(sender_->sends.wait_all());
  loans[0]();     // a second release
  loans.clear();  // and forgetting it: nothing more
  sender_->loop().call([] {});
  EXPECT_EQ(sender_->sends.codes()[ErrorCode::ok], 1u);
}

TEST_F_IN_VIRTUAL_TIME(InprocLoan, ForgettingTheReleaseReleases) {
  sender_->send(push_header(1), payload_);
  ASSERT_TRUE(receiver_->recorder.wait_loans(1));
  receiver_->recorder.take_loans();
  ASSERT_TRUE(sender_->sends.wait_all());
  EXPECT_EQ(sender_->sends.codes()[ErrorCode::ok], 1u);
}

TEST_F_IN_VIRTUAL_TIME(InprocLoan, TheSendersOwnCloseWaitsForItsMemory) {
  sender_->send(push_header(1), payload_);
  ASSERT_TRUE(receiver_->recorder.wait_loans(1));
  sender_->close(milliseconds(0));
  EXPECT_EQ(receiver_->recorder.wait_closed().code(), ErrorCode::peer_lost);
  pause_for(milliseconds(20));
  EXPECT_EQ(sender_->recorder.closed_count(), 0u);
  receiver_->recorder.take_loans();
  EXPECT_TRUE(sender_->recorder.wait_closed().ok());
  EXPECT_EQ(sender_->sends.codes()[ErrorCode::ok], 1u);
}

TEST_F_IN_VIRTUAL_TIME(InprocLoan, TheReceiversCloseLeavesTheLoanToItsHolder) {
  sender_->send(push_header(1), payload_);
  ASSERT_TRUE(receiver_->recorder.wait_loans(1));
  receiver_->close(milliseconds(0));
  EXPECT_TRUE(receiver_->recorder.wait_closed().ok());
  sender_->send(push_header(2), payload_);  // arrives nowhere
  pause_for(milliseconds(20));
  EXPECT_EQ(sender_->recorder.closed_count(), 0u);
  receiver_->recorder.take_loans();
  EXPECT_EQ(sender_->recorder.wait_closed().code(), ErrorCode::peer_lost);
  auto codes = sender_->sends.codes();
  EXPECT_EQ(codes[ErrorCode::ok], 1u);
  EXPECT_EQ(codes[ErrorCode::peer_lost], 1u);
}

TEST_F_IN_VIRTUAL_TIME(InprocLoan, AReleaseAfterTheSendersLoopHasGoneIsHarmless) {
  auto loop = std::make_unique<Loop>("short");
  Awaited<std::shared_ptr<Flow>> accepted;
  auto listener = transport_->listen(*receiver_loop_, "short:0",
                                     [&accepted](std::shared_ptr<Flow> flow) { accepted.set(std::move(flow)); });
  ASSERT_TRUE(listener.ok());
  transport_->connect(*loop, listener.value()->address(), Clock::now() + kPatience,
                      [this](Result<std::shared_ptr<Flow>> flow) {
                        flow.value()->send(push_header(1), {payload_}, [](const Status&) {});
                      });
  End end(*receiver_loop_, accepted.get());
  end.recorder.keep_loans = true;
  end.receive();
  ASSERT_TRUE(end.recorder.wait_loans(1));
  loop.reset();
  EXPECT_EQ(end.recorder.wait_closed().code(), ErrorCode::peer_lost);
  end.recorder.take_loans();
}

}  // namespace
}  // namespace poseidon::testing
