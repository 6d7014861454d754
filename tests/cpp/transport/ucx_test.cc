// The behaviour of the UCX transport that the conformance suite does not test.
#include <gtest/gtest.h>

#include <future>
#include <string>

#include "conformance/transport_fixture.h"
#include "transport/ucx/arrivals.h"
#include "transport/ucx/ucx_transport.h"

namespace poseidon {
namespace {

using ucx::Arrival;
using ucx::Arrivals;

Arrival numbered(std::uint32_t chunk) {
  Arrival arrival;
  arrival.header.chunk = chunk;
  return arrival;
}

TEST(UcxArrivals, GivesMessagesInTheOrderOfTheirNumbers) {
  Arrivals arrivals;
  EXPECT_EQ(arrivals.front(), nullptr);
  for (const std::uint32_t number : {2u, 0u, 3u}) EXPECT_TRUE(arrivals.insert(number, numbered(number)));
  ASSERT_NE(arrivals.front(), nullptr);
  EXPECT_EQ(arrivals.take().header.chunk, 0u);
  EXPECT_EQ(arrivals.front(), nullptr) << "number 1 has not come";
  EXPECT_EQ(arrivals.next(), 1u);
  EXPECT_TRUE(arrivals.insert(1, numbered(1)));
  for (std::uint32_t number = 1; number < 4; ++number) EXPECT_EQ(arrivals.take().header.chunk, number);
  EXPECT_EQ(arrivals.next(), 4u);
}

TEST(UcxArrivals, RefusesNumbersThatNoSenderWouldGive) {
  Arrivals arrivals;
  EXPECT_TRUE(arrivals.insert(0, numbered(0)));
  EXPECT_TRUE(arrivals.insert(5, numbered(5)));
  EXPECT_FALSE(arrivals.insert(5, numbered(5))) << "twice";
  arrivals.take();
  EXPECT_FALSE(arrivals.insert(0, numbered(0))) << "delivered already";
  EXPECT_FALSE(arrivals.insert(std::uint64_t{1} << 40, numbered(1))) << "too far ahead";
  EXPECT_FALSE(arrivals.insert(~std::uint64_t{0}, numbered(1)));
}

TEST(UcxArrivals, EmptiesItselfOfWhatIsHere) {
  Arrivals arrivals;
  arrivals.insert(0, numbered(0));
  arrivals.insert(2, numbered(2));
  const auto all = arrivals.take_all();
  ASSERT_EQ(all.size(), 3u);
  EXPECT_TRUE(all[0] && !all[1] && all[2]);
  EXPECT_EQ(arrivals.front(), nullptr);
}

TEST(UcxTransport, IsThereExactlyWhenTheBuildHasUcx) { EXPECT_EQ(make_ucx_transport() != nullptr, ucx_available()); }

/// Returns the status of listening and of connecting with this setting.
void expect_rejected(const std::string& name, const std::string& value) {
  const auto transport = make_ucx_transport({{name, value}});
  Loop loop("ucx");
  const auto listener = transport->listen(loop, "127.0.0.1:0", [](std::shared_ptr<Flow>) {});
  ASSERT_FALSE(listener.ok());
  EXPECT_EQ(listener.status().code(), ErrorCode::invalid_argument) << listener.status().message();
  std::promise<Status> connected;
  transport->connect(loop, "127.0.0.1:9", Clock::now(),
                     [&](Result<std::shared_ptr<Flow>> flow) { connected.set_value(flow.status()); });
  EXPECT_EQ(connected.get_future().get().code(), ErrorCode::invalid_argument);
}

TEST(UcxTransport, SaysWhichSettingUcxRejects) {
  if (!ucx_available()) GTEST_SKIP() << "this build has no UCX";
  expect_rejected("RNDV_THRESH", "many");
  expect_rejected("TLS", "no_such_transport");
}

/// Sends a message from one end of a connection to the other, both over this transport.
void expect_to_work(Transport& transport) {
  Loop loop("ucx");
  std::promise<std::shared_ptr<Flow>> accepted;
  auto listener =
      transport.listen(loop, "127.0.0.1:0", [&](std::shared_ptr<Flow> flow) { accepted.set_value(std::move(flow)); });
  ASSERT_TRUE(listener.ok()) << listener.status().message();
  std::promise<Result<std::shared_ptr<Flow>>> connected;
  transport.connect(loop, listener.value()->address(), Clock::now() + testing::kPatience,
                    [&](Result<std::shared_ptr<Flow>> flow) { connected.set_value(std::move(flow)); });
  auto flow = connected.get_future().get();
  ASSERT_TRUE(flow.ok()) << flow.status().message();
  testing::End client(loop, std::move(flow.value()));
  testing::End server(loop, accepted.get_future().get());
  client.receive();
  server.receive();
  const testing::Bytes payload = testing::pattern(100'000, 1);
  client.send(testing::push_header(1), payload);
  ASSERT_TRUE(server.recorder.wait_messages(1));
  EXPECT_TRUE(server.recorder.messages()[0].payload == payload);
}

TEST(UcxTransport, MarksOfRdmaDevicesDoNotDisturbWhereThereAreNone) {
  if (!ucx_available()) GTEST_SKIP() << "this build has no UCX";
  ::testing::internal::CaptureStdout();  // where UCX warns
  expect_to_work(*make_ucx_transport({{"TLS", "tcp"}, {"IB_TRAFFIC_CLASS", "184"}, {"IB_SL", "1"}}));
  const std::string said = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(said.find("IB_"), std::string::npos) << said;
}

}  // namespace
}  // namespace poseidon
