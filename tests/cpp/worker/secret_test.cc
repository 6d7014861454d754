// Whole workers with the same secret, with different secrets, and without one.
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cpp/client/cluster.h"
#include "poseidon/server.h"

namespace poseidon::testing {
namespace {

constexpr const char* kSecret = "a secret of some length";
constexpr const char* kOther = "another secret, as long";

/// Exchanges the same numbers on every rank.
void expect_usable(TestCluster& cluster) {
  const auto layer = cluster.add({vector_layer("weights", 5000)});
  cluster.each([&](std::size_t rank, Client& client) {
    std::vector<float> data(5000, static_cast<float>(rank));
    const auto count = static_cast<std::uint32_t>(cluster.clients.size());
    ASSERT_TRUE(client.start(layer, bytes_of(data), count).ok());
    const Status status = client.wait(layer, always);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(data[4999], static_cast<float>(count - 1) / 2);
  });
}

/// Returns an IPv4 address of this machine that others can reach, or empty text if there is none.
std::string outer_address() {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return "";
  std::string found;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    const bool usable = (one->ifa_flags & IFF_UP) != 0 && (one->ifa_flags & IFF_LOOPBACK) == 0;
    if (!usable || one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET) continue;
    std::array<char, INET_ADDRSTRLEN> text{};
    const auto& address = reinterpret_cast<const sockaddr_in*>(one->ifa_addr)->sin_addr;
    if (::inet_ntop(AF_INET, &address, text.data(), text.size()) != nullptr) found = text.data();
  }
  ::freeifaddrs(all);
  return found;
}

/// Returns how many notices of the first two ranks are about the secret.
std::vector<std::ptrdiff_t> notices_of_no_secret(const std::vector<Options>& options) {
  std::vector<std::ptrdiff_t> counts;
  const TestCluster cluster(options);
  for (const auto& client : cluster.clients) {
    const auto notices = client ? client->notices() : std::vector<std::string>();
    counts.push_back(std::ranges::count_if(
        notices, [](const std::string& text) { return text.find("no secret") != std::string::npos; }));
  }
  return counts;
}

void expect_usable_over_every_medium(bool tls) {
  for (const Medium medium : {Medium::automatic, Medium::tcp}) {
    auto all = cluster_options(3);
    for (auto& options : all) {
      options.secret = kSecret;
      options.tls = tls;
      options.transport = medium;
      options.server_cores = 2;
    }
    TestCluster cluster(all);
    ASSERT_TRUE(cluster.connected());
    expect_usable(cluster);
  }
}

TEST(WorkersWithASecret, ExchangeOverEveryMedium) { expect_usable_over_every_medium(false); }

TEST(WorkersWithASecret, ExchangeOverTls) {
  if (!tls_available()) GTEST_SKIP() << "this build has no OpenSSL";
  expect_usable_over_every_medium(true);
}

TEST(WorkersWithASecret, AreToldThatUcxHasNoTls) {
  if (!tls_available()) GTEST_SKIP() << "this build has no OpenSSL";
  Options options = test_options(0, 1, free_port());
  options.secret = kSecret;
  options.tls = true;
  options.transport = Medium::ucx;
  for (const Status& status :
       {Client::connect(options, nullptr, always).status(), Server::listen(options, 0).status()}) {
    EXPECT_EQ(status.code(), ErrorCode::invalid_argument);
    EXPECT_NE(status.message().find("tls=off"), std::string::npos) << status.message();
  }
}

TEST(WorkersWithASecret, ShareAServerWithOtherTenants) {
  Options served;
  served.secret = std::string(kOther) + "\n" + kSecret;
  const auto server = Server::listen(served, 0);
  ASSERT_TRUE(server.ok()) << server.status().message();
  EXPECT_TRUE(server.value()->address().starts_with("127.0.0.1:")) << "unless it is told otherwise";
  const auto of_tenant = [&](const char* secret) {
    auto all = cluster_options(2);
    for (auto& options : all) {
      options.secret = secret;
      options.servers = {server.value()->address()};
    }
    return all;
  };
  TestCluster one(of_tenant(kSecret));
  TestCluster other(of_tenant(kOther));  // of the same name
  ASSERT_TRUE(one.connected() && other.connected());
  expect_usable(one);
  expect_usable(other);
}

TEST(WorkersWithASecret, RefuseOneWithAnother) {
  auto all = cluster_options(2);
  all[0].secret = kSecret;
  all[1].secret = kOther;
  all[0].timeout = std::chrono::seconds(2);  // it waits for a rank 1 that knows its secret
  run_ranks(2, [&](int rank) {
    const auto client = Client::connect(all[static_cast<std::size_t>(rank)], nullptr, always);
    EXPECT_EQ(client.status().code(), rank == 0 ? ErrorCode::timeout : ErrorCode::refused) << client.status().message();
  });
}

TEST(WorkersWithASecret, SayThatAShortOneIsNone) {
  Options options = test_options(0, 1, free_port());
  options.secret = "short";
  EXPECT_EQ(Client::connect(options, nullptr, always).status().code(), ErrorCode::invalid_argument);
  EXPECT_EQ(Server::listen(options, 0).status().code(), ErrorCode::invalid_argument);
}

TEST(WorkersWithoutASecret, SayOnceThatOthersCanReachThem) {
  const std::string outer = outer_address();
  if (outer.empty()) GTEST_SKIP() << "this machine has only loopback";
  auto all = cluster_options(2);
  EXPECT_EQ(notices_of_no_secret(all), (std::vector<std::ptrdiff_t>{0, 0})) << "nobody else reaches loopback";
  all = cluster_options(2);
  for (auto& options : all) options.interfaces = {outer};
  EXPECT_EQ(notices_of_no_secret(all), (std::vector<std::ptrdiff_t>{1, 0}));
  all = cluster_options(2);
  for (auto& options : all) {
    options.interfaces = {outer};
    options.secret = kSecret;
  }
  EXPECT_EQ(notices_of_no_secret(all), (std::vector<std::ptrdiff_t>{0, 0}));
}

}  // namespace
}  // namespace poseidon::testing
