// The store that rank 0 serves: keys, unauthenticated connections, limits, and the end of its server.
#include "rendezvous/tcp_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "conformance/handshakes.h"
#include "cpp/rendezvous/ports.h"
#include "rendezvous/store_protocol.h"
#include "rendezvous/store_server.h"

namespace poseidon {
namespace {

using std::chrono::milliseconds;
using testing::always;
using testing::contains;
using testing::free_port;
using testing::open_store;
using testing::test_options;

constexpr const char* kSecret = "a secret of some length";
constexpr const char* kOther = "another secret, as long";

Options rejoining(int rank, std::uint16_t port) {
  Options options = test_options(rank, 2, port);
  options.on_failure = OnFailure::rejoin;
  options.secret = kSecret;
  return options;
}

TEST(TcpStore, KeysAreSeenByAllAndTheLastValueCounts) {
  const auto port = free_port();
  const auto first = open_store(test_options(0, 2, port));
  const auto second = open_store(test_options(1, 2, port));
  ASSERT_TRUE(first && second);
  std::string value("with\0zero", 9);
  value.append(1 << 20, 'x');
  ASSERT_TRUE(second->set("key", value).ok());
  ASSERT_TRUE(first->set("empty", "").ok());
  EXPECT_TRUE(first->set("key", "another").ok());
  EXPECT_EQ(first->get("key", milliseconds(1000)).value(), "another");
  ASSERT_TRUE(first->set("key", value).ok());
  EXPECT_EQ(second->get("key", milliseconds(1000)).value(), value);
  EXPECT_EQ(second->get("empty", milliseconds(1000)).value(), "");
}

Options encrypted(int rank, std::uint16_t port) {
  Options options = test_options(rank, 2, port);
  options.secret = kSecret;
  options.tls = true;
  return options;
}

TEST(TcpStore, CarriesValuesOfAllSizesWithTlsToo) {
  if (!tls_available()) GTEST_SKIP() << "this build has no OpenSSL";
  const auto port = free_port();
  const auto first = open_store(encrypted(0, port));
  const auto second = open_store(encrypted(1, port));
  ASSERT_TRUE(first && second);
  for (const std::size_t size : {0u, 1u, 16'384u, 65'527u, 65'536u, 5'000'000u}) {
    const std::string value(size, static_cast<char>('a' + size % 26));
    ASSERT_TRUE(second->set("key", value).ok()) << size;
    EXPECT_EQ(first->get("key", milliseconds(5000)).value(), value) << size;
    EXPECT_EQ(second->get("key", milliseconds(5000)).value(), value) << size;
  }
  EXPECT_EQ(first->get("none", milliseconds(0)).status().code(), ErrorCode::timeout);
}

TEST(TcpStore, WhoWantsAnotherEncryptionIsToldSoAtOnce) {
  if (!tls_available()) GTEST_SKIP() << "this build has no OpenSSL";
  for (const bool served : {false, true}) {
    const auto port = free_port();
    Options first = encrypted(0, port);
    Options second = encrypted(1, port);
    first.tls = served;
    second.tls = !served;
    const auto store = open_store(first);
    const auto refused = open_tcp_store(second, always);
    EXPECT_EQ(refused.status().code(), ErrorCode::mismatch);
    EXPECT_TRUE(contains(refused.status(), served ? "has tls=on, this process tls=off" : "has tls=off, this process"))
        << refused.status().message();
  }
}

TEST(TcpStore, GetWaitsForTheKey) {
  const auto port = free_port();
  const auto first = open_store(test_options(0, 2, port));
  const auto second = open_store(test_options(1, 2, port));
  ASSERT_TRUE(first && second);
  std::thread late([&] {
    EXPECT_FALSE(first->get("what nobody sets", milliseconds(100)).ok());  // takes that long
    EXPECT_TRUE(first->set("late", "here").ok());
  });
  const auto value = second->get("late", milliseconds(5000));
  late.join();
  ASSERT_TRUE(value.ok());
  EXPECT_EQ(value.value(), "here");
}

TEST(TcpStore, GetEndsAtItsTimeoutAndNamesTheKey) {
  const auto store = open_store(test_options(0, 1, free_port()));
  ASSERT_TRUE(store);
  const auto begun = Clock::now();
  const auto value = store->get("nothing", milliseconds(150));
  const auto took = Clock::now() - begun;
  EXPECT_EQ(value.status().code(), ErrorCode::timeout);
  EXPECT_TRUE(contains(value.status(), "nothing"));
  EXPECT_GE(took, milliseconds(100));
  EXPECT_LT(took, milliseconds(2000));
  EXPECT_EQ(store->get("nothing", milliseconds(0)).status().code(), ErrorCode::timeout);
}

TEST(TcpStore, PortInUseIsNamed) {
  const auto port = free_port();
  const auto store = open_store(test_options(0, 2, port));
  const auto second = open_tcp_store(test_options(0, 2, port), always);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), ErrorCode::unreachable);
  EXPECT_TRUE(contains(second.status(), std::to_string(port)));
  EXPECT_TRUE(contains(second.status(), "MASTER_PORT"));
}

TEST(TcpStore, NobodyThereEndsAtTheTimeoutOrWhenInterrupted) {
  Options options = test_options(1, 2, free_port());
  options.timeout = milliseconds(300);
  const auto begun = Clock::now();
  const auto store = open_tcp_store(options, always);
  EXPECT_EQ(store.status().code(), ErrorCode::unreachable);
  EXPECT_TRUE(contains(store.status(), "rank 1"));
  EXPECT_LT(Clock::now() - begun, milliseconds(3000));
  options.timeout = std::chrono::seconds(60);
  EXPECT_EQ(open_tcp_store(options, [] { return false; }).status().code(), ErrorCode::aborted);
}

TEST(TcpStore, AddressThatDoesNotResolveIsNamed) {
  Options options = test_options(1, 2, free_port());
  options.master_addr = "no host has this name";
  options.timeout = milliseconds(300);  // in which the name might get an address
  const auto store = open_tcp_store(options, always);
  EXPECT_EQ(store.status().code(), ErrorCode::unreachable);
  EXPECT_TRUE(contains(store.status(), "no host has this name"));
}

TEST(TcpStore, UnauthenticatedConnectionsDoNotDisturbIt) {
  const auto port = free_port();
  const auto store = open_store(test_options(0, 1, port));
  ASSERT_TRUE(store);
  const std::string garbage(100'000, '\xff');
  const std::string oversized{'S', '\1', 0, 0, 0, '\xff', '\xff', '\xff', '\x7f'};
  for (const std::string& text : {garbage, oversized, std::string("S"), std::string("GET / HTTP/1.1\r\n\r\n")}) {
    const FileDescriptor unproven = testing::connected_socket(port);
    ASSERT_TRUE(unproven);
    (void)::send(unproven.get(), text.data(), text.size(), MSG_NOSIGNAL);
    const FileDescriptor member = testing::connected_socket(port);
    ASSERT_TRUE(testing::let_in(member.get(), wire::Purpose::store));
    (void)::send(member.get(), text.data(), text.size(), MSG_NOSIGNAL);
    EXPECT_TRUE(store->set("key " + std::to_string(text.size()), "value").ok());
    EXPECT_TRUE(store->get("key " + std::to_string(text.size()), milliseconds(1000)).ok());
  }
}

TEST(TcpStore, TellsWhenItsServerHasGone) {
  const auto port = free_port();
  auto first = open_store(test_options(0, 2, port));
  const auto second = open_store(test_options(1, 2, port));
  ASSERT_TRUE(first && second);
  first.reset();
  EXPECT_EQ(second->set("key", "value").code(), ErrorCode::unreachable);
  EXPECT_EQ(second->get("key", milliseconds(1000)).status().code(), ErrorCode::unreachable);
}

TEST(TcpStore, AnotherSecretIsRefusedAtOnce) {
  const auto port = free_port();
  Options options = test_options(0, 2, port);
  options.secret = kSecret;
  const auto first = open_store(options);
  ASSERT_TRUE(first);
  for (const char* secret : {kOther, ""}) {
    Options other = test_options(1, 2, port);
    other.secret = secret;
    const auto begun = Clock::now();
    const auto second = open_tcp_store(other, always);
    EXPECT_EQ(second.status().code(), ErrorCode::refused);
    EXPECT_TRUE(contains(second.status(), "POSEIDON_SECRET")) << second.status().message();
    EXPECT_LT(Clock::now() - begun, std::chrono::seconds(5));
  }
  options.rank = 1;
  const auto second = open_store(options);
  ASSERT_TRUE(second);
  EXPECT_TRUE(second->set("key", "value").ok());
}

TEST(TcpStore, ASecretThatIsNoneIsInvalid) {
  Options options = test_options(0, 1, free_port());
  options.secret = "short";
  EXPECT_EQ(open_tcp_store(options, always).status().code(), ErrorCode::invalid_argument);
}

TEST(TcpStore, ReconnectsToAReplacementOfItsServer) {
  const auto port = free_port();
  auto first = open_store(rejoining(0, port));
  const auto second = open_store(rejoining(1, port));
  ASSERT_TRUE(first && second);
  ASSERT_TRUE(second->set("key", "old").ok());
  first.reset();
  const auto begun = Clock::now();
  EXPECT_EQ(second->get("key", milliseconds(0)).status().code(), ErrorCode::unreachable);
  EXPECT_LT(Clock::now() - begun, milliseconds(1000)) << "a quick look";
  std::thread replacement([&] {
    std::this_thread::sleep_for(milliseconds(300));  // nobody serves meanwhile
    first = open_store(rejoining(0, port));
  });
  EXPECT_TRUE(second->set("other", "new").ok());
  replacement.join();
  EXPECT_EQ(second->get("key", milliseconds(0)).status().code(), ErrorCode::timeout) << "it begins empty";
  EXPECT_EQ(second->get("other", milliseconds(0)).value(), "new");
}

TEST(TcpStore, AnotherProcessOfItsHostServesInItsPlace) {
  const auto port = free_port();
  auto first = open_store(rejoining(0, port));
  auto second = open_store(rejoining(1, port));
  ASSERT_TRUE(first && second);
  first.reset();
  EXPECT_TRUE(second->set("key", "value").ok());
  const auto replacement = open_store(rejoining(0, port));
  ASSERT_TRUE(replacement) << "the port is taken";
  EXPECT_EQ(replacement->get("key", milliseconds(0)).value(), "value");
  second.reset();
  EXPECT_TRUE(replacement->set("key", "again").ok());
  EXPECT_EQ(replacement->get("key", milliseconds(0)).value(), "again");
}

TEST(TcpStore, GetWaitsForAReplacementUntilItsTimeout) {
  const auto port = free_port();
  auto first = open_store(rejoining(0, port));
  const auto second = open_store(rejoining(1, port));
  ASSERT_TRUE(first && second);
  first.reset();
  const auto address = tcp::resolve("127.0.0.1:" + std::to_string(port)).value()[0];
  const FileDescriptor silent = tcp::bind_and_listen(address);
  ASSERT_TRUE(silent);
  const auto begun = Clock::now();
  EXPECT_EQ(second->get("key", milliseconds(400)).status().code(), ErrorCode::unreachable);
  const auto took = Clock::now() - begun;
  EXPECT_GE(took, milliseconds(200));
  EXPECT_LT(took, milliseconds(3000));
}

TEST(TcpStore, AServerThatHangsIsAwayAndItsLateAnswersAreNotTaken) {
  const auto port = free_port();
  const auto address = tcp::resolve("127.0.0.1:" + std::to_string(port)).value()[0];
  const FileDescriptor listening = tcp::bind_and_listen(address);
  ASSERT_TRUE(listening);
  std::atomic<bool> ends = false;
  std::thread server([&] {  // lets in, and answers nothing
    std::vector<FileDescriptor> clients;
    while (!ends) {
      pollfd entry{listening.get(), POLLIN, 0};
      if (::poll(&entry, 1, 20) <= 0) continue;
      clients.emplace_back(::accept(listening.get(), nullptr, nullptr));
      testing::shake_hands(clients.back().get(), wire::Purpose::store, {}, wire::Handshake::Role::acceptor);
    }
  });
  {
    const auto store = open_store(test_options(1, 2, port));
    for (int i = 0; i < 2 && store; ++i) {
      const auto begun = Clock::now();
      EXPECT_EQ(store->get("key", milliseconds(0)).status().code(), ErrorCode::unreachable);
      EXPECT_LT(Clock::now() - begun, milliseconds(1000));
    }
  }
  ends = true;
  server.join();
}

TEST(TcpStore, HoldsNoMoreThanItsLimits) {
  const auto store = open_store(test_options(0, 1, free_port()));
  ASSERT_TRUE(store);
  const std::string large(store_protocol::kMaxValueBytes, 'x');
  EXPECT_EQ(store->set("key", large + "x").code(), ErrorCode::invalid_argument);
  EXPECT_EQ(store->set(std::string(store_protocol::kMaxKeyBytes + 1, 'k'), "").code(), ErrorCode::invalid_argument);
  std::size_t kept = 0;
  while (kept < 100 && store->set("key " + std::to_string(kept), large).ok()) ++kept;
  EXPECT_EQ(kept, StoreServer::kMostStoredBytes / large.size() - 1) << "the keys take room, too";
  const Status full = store->set("one more", large);
  EXPECT_EQ(full.code(), ErrorCode::refused);
  EXPECT_TRUE(contains(full, "full")) << full.message();
  EXPECT_TRUE(store->set("key 0", "small").ok()) << "what is there may be replaced";
  EXPECT_TRUE(store->set("one more", large).ok());
  EXPECT_EQ(store->get("key 0", milliseconds(0)).value(), "small");
}

TEST(TcpStore, WhoDoesNotReadItsAnswersFillsNoMemory) {
  const auto port = free_port();
  const auto store = open_store(test_options(0, 2, port));
  ASSERT_TRUE(store);
  ASSERT_TRUE(store->set("k", std::string(1u << 20, 'x')).ok());
  const FileDescriptor greedy = testing::connected_socket(port);
  ASSERT_TRUE(testing::let_in(greedy.get(), wire::Purpose::store));
  std::string requests;
  for (int i = 0; i < 5000; ++i) requests += std::string("G\1\0\0\0\0\0\0\0k", 10);
  ASSERT_GT(::send(greedy.get(), requests.data(), requests.size(), MSG_NOSIGNAL), 0);
  EXPECT_EQ(store->get("k", milliseconds(1000)).value().size(), 1u << 20);
  std::string answers(40u << 20, '\0');  // more than the server keeps unsent: it goes on when there is room again
  EXPECT_EQ(::recv(greedy.get(), answers.data(), answers.size(), MSG_WAITALL), static_cast<ssize_t>(answers.size()));
  EXPECT_EQ(answers.substr(4, 100), std::string(100, 'x'));
}

}  // namespace
}  // namespace poseidon
