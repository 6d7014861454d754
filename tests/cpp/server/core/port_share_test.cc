#include "server/core/port_share.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace poseidon {
namespace {

constexpr double kSeconds = 0.05;

/// Workers that send as fast as they may to a port, and a switch that has no memory.
class Port {
 public:
  explicit Port(double bytes_per_second) : bytes_per_second_(bytes_per_second) {}

  void set_rate(double bytes_per_second) { bytes_per_second_ = bytes_per_second; }
  /// Without a limit 4 % is lost and the port idles half of the time.
  std::uint64_t step(std::size_t senders, double other_loss = 0) {
    const double sent = share_ == 0 ? bytes_per_second_ : static_cast<double>(share_ * senders);
    const double loss = share_ == 0 ? 0.04 : std::max(0.0, 1 - bytes_per_second_ / sent);
    const double came = share_ == 0 ? bytes_per_second_ * (senders < 4 ? 1 : 0.5) : std::min(sent, bytes_per_second_);
    PortShare::Window window{.length = PortShare::kWindow, .sender_count = senders};
    window.received_bytes = static_cast<std::uint64_t>(came * kSeconds);
    window.packets = static_cast<std::uint64_t>(sent * kSeconds / 1448);
    const double lost = std::max(senders < 4 ? 0.0 : loss, other_loss);
    window.lost_packets = static_cast<std::uint64_t>(static_cast<double>(window.packets) * lost);
    share_ = port_share_.update(window);
    return share_;
  }
  std::uint64_t run(int windows, std::size_t senders, double other_loss = 0) {
    for (int i = 0; i < windows; ++i) step(senders, other_loss);
    return share_;
  }

 private:
  PortShare port_share_;
  double bytes_per_second_;
  std::uint64_t share_ = 0;
};

TEST(PortShare, FindsThePortsRateAndStaysThere) {
  Port port(20e6);
  port.run(200, 16);
  for (int i = 0; i < 400; ++i) {
    const auto together = static_cast<double>(port.step(16)) * 16;
    EXPECT_GT(together, 0.94 * 20e6);
    EXPECT_LT(together, 1.03 * 20e6);
  }
}

TEST(PortShare, FollowsAPortThatBecomesSlowerOrFaster) {
  Port port(20e6);
  port.run(200, 8);
  port.set_rate(17e6);
  EXPECT_NEAR(static_cast<double>(port.run(100, 8)) * 8, 17e6, 0.6e6);
  port.set_rate(25e6);
  EXPECT_NEAR(static_cast<double>(port.run(800, 8)) * 8, 25e6, 0.7e6);
}

TEST(PortShare, LimitsNobodyWithoutLossOrAmongFew) {
  PortShare quiet;
  PortShare::Window window{.length = PortShare::kWindow, .received_bytes = 1'000'000, .packets = 700};
  window.sender_count = 16;
  for (int i = 0; i < 100; ++i) EXPECT_EQ(quiet.update(window), 0u);
  PortShare few;
  window.lost_packets = 100;
  window.sender_count = PortShare::kFewestSenders - 1;
  for (int i = 0; i < 100; ++i) EXPECT_EQ(few.update(window), 0u);
}

TEST(PortShare, AFewLostPacketsAreNoReasonForALimit) {
  PortShare share;
  PortShare::Window window{.length = PortShare::kWindow, .received_bytes = 20'000, .packets = 20};
  window.sender_count = 16;
  window.lost_packets = 3;
  for (int i = 0; i < 100; ++i) EXPECT_EQ(share.update(window), 0u);
}

TEST(PortShare, TheLastSendersGetThePortWithinAFewWindows) {
  Port port(20e6);
  const auto of_sixteen = port.run(200, 16);
  EXPECT_GT(port.run(4, 5), 3 * of_sixteen);
  EXPECT_EQ(port.run(4, 1), 0u) << "one sender has the port, and no limit";
  EXPECT_LT(port.run(1, 16), 1.1 * static_cast<double>(of_sixteen)) << "what was found is kept";
}

TEST(PortShare, LossThatDoesNotComeFromThePortCannotStopTheWorkers) {
  Port port(20e6);
  port.run(50, 16);
  EXPECT_GT(static_cast<double>(port.run(2000, 16, 0.03)) * 16, 7.9e6) << "0.8 of the 10 MB/s that came in";
}

}  // namespace
}  // namespace poseidon
