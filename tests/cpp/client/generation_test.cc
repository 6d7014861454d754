// Generations of a job: whole clients that lose one another, find each other again and go on.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "cpp/client/cluster.h"
#include "cpp/rendezvous/memory_store.h"
#include "cpp/server/server_fixture.h"
#include "poseidon/server.h"
#include "rendezvous/members.h"
#include "simulation/virtual_time.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;
using Connected = Result<std::unique_ptr<Client>>;

constexpr std::size_t kSize = 5000;

Options options_of(int slot, int slot_count, OnFailure on_failure, std::uint32_t last = 0) {
  Options options = test_options(slot, slot_count, 1);
  options.on_failure = on_failure;
  options.generation = last;
  options.run = "a run";
  return options;
}

std::future<Connected> begin_to_connect(MemoryStore& store, const Options& options) {
  return std::async(std::launch::async, [&store, options] { return Client::connect(options, store.open(), always); });
}

/// Runs all of these at the same time.
std::vector<std::unique_ptr<Client>> connect_all(MemoryStore& store, const std::vector<Options>& all) {
  std::vector<std::future<Connected>> connecting;
  for (const Options& options : all) connecting.push_back(begin_to_connect(store, options));
  std::vector<std::unique_ptr<Client>> clients;
  for (auto& one : connecting) {
    auto client = one.get();
    EXPECT_TRUE(client.ok()) << client.status().message();
    clients.push_back(client.ok() ? std::move(client.value()) : nullptr);
  }
  return clients;
}

void each(std::vector<std::unique_ptr<Client>>& clients, const std::function<void(std::size_t, Client&)>& body) {
  run_ranks(static_cast<int>(clients.size()), [&](int i) {
    const auto index = static_cast<std::size_t>(i);
    ASSERT_NE(clients[index], nullptr);
    body(index, *clients[index]);
  });
}

/// Sums 1 over all ranks in a new layer. Returns the error otherwise.
Result<float> add_ones(Client& client, const std::string& name = "ones") {
  auto added = client.add_layers({vector_layer(name, kSize)}, false, always);
  if (!added.ok()) return added.status();
  std::vector<float> values(kSize, 1.0F);
  if (Status status = client.start(added.value().first_layer, bytes_of(values), 1); !status.ok()) return status;
  if (Status status = client.wait_all(always); !status.ok()) return status;
  EXPECT_EQ(values, std::vector<float>(kSize, values[0]));
  return values[0];
}

void expect_sum(Client& client, float sum) {
  const auto result = add_ones(client);
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result.value(), sum);
}

class Generations : public ::testing::TestWithParam<Medium> {};

TEST_P(Generations, AReplacementTakesTheLostRanksPlaceQuickly) {
  MemoryStore store;
  std::vector<Options> all;
  for (int slot = 0; slot < 4; ++slot) {
    all.push_back(options_of(slot, 4, OnFailure::rejoin));
    all.back().transport = GetParam();
  }
  auto clients = connect_all(store, all);
  each(clients, [](std::size_t slot, Client& client) {
    EXPECT_EQ(client.generation(), 1u);
    EXPECT_FALSE(client.joining());
    EXPECT_EQ(client.rank(), static_cast<int>(slot));
    expect_sum(client, 4);
  });
  const auto begun = Clock::now();
  clients[2]->abort("killed");
  each(clients, [](std::size_t, Client& client) { EXPECT_FALSE(add_ones(client, "more").ok()); });
  run_ranks(4, [&](int slot) { clients[static_cast<std::size_t>(slot)].reset(); });
  for (const std::size_t survivor : {0, 1, 3}) all[survivor].generation = 1;
  clients = connect_all(store, all);
  EXPECT_LT(Clock::now() - begun, milliseconds(1500));
  each(clients, [](std::size_t slot, Client& client) {
    EXPECT_EQ(client.generation(), 2u);
    EXPECT_EQ(client.joining(), slot == 2);
    EXPECT_EQ(client.rank(), static_cast<int>(slot));
    expect_sum(client, 4);
  });
}

INSTANTIATE_TEST_SUITE_P(Media, Generations, ::testing::Values(Medium::automatic, Medium::tcp));

/// Takes part in the rendezvous and then dies, so nobody listens at its address.
std::future<Result<Membership>> meet_and_die(MemoryStore& store, const Options& options) {
  return std::async(std::launch::async, [&store, options] {
    const std::string nowhere = "127.0.0.1:" + std::to_string(free_port());
    return meet(*store.open(), options, {"elsewhere", {nowhere}, nowhere, {}, {}}, always);
  });
}

TEST(Rejoining, AReplacementIsNotWaitedForByThoseThatStillConnectToItsPredecessor) {
  MemoryStore store;
  auto dead = meet_and_die(store, options_of(1, 2, OnFailure::rejoin));
  auto survivor = begin_to_connect(store, options_of(0, 2, OnFailure::rejoin));
  ASSERT_TRUE(dead.get().ok());
  auto clients = connect_all(store, {options_of(1, 2, OnFailure::rejoin)});
  auto first = survivor.get();
  ASSERT_TRUE(first.ok()) << first.status().message();
  clients.push_back(std::move(first.value()));
  each(clients, [](std::size_t, Client& client) {
    EXPECT_EQ(client.generation(), 2u);
    EXPECT_FALSE(client.joining()) << "nobody was ever connected";
    expect_sum(client, 2);
  });
}

TEST(Rejoining, AFailureOnTheWayDoesNotEndTheCall) {
  MemoryStore store;
  auto all = std::vector{options_of(0, 3, OnFailure::rejoin, 4), options_of(1, 3, OnFailure::rejoin, 4)};
  auto dead = meet_and_die(store, options_of(2, 3, OnFailure::rejoin, 4));
  auto first = begin_to_connect(store, all[0]);
  auto second = begin_to_connect(store, all[1]);
  ASSERT_TRUE(dead.get().ok());
  ASSERT_TRUE(eventually([&] { return generation_wanted(*store.open(), "default") >= 6; }));
  auto clients = connect_all(store, {options_of(2, 3, OnFailure::rejoin)});
  for (auto* other : {&first, &second}) {
    auto client = other->get();
    ASSERT_TRUE(client.ok()) << client.status().message();
    clients.push_back(std::move(client.value()));
  }
  each(clients, [](std::size_t index, Client& client) {
    EXPECT_EQ(client.generation(), 6u);
    EXPECT_EQ(client.joining(), index == 0);
    expect_sum(client, 3);
  });
}

TEST(Rejoining, CanBeInterrupted) {
  MemoryStore store;
  const auto client = Client::connect(options_of(1, 2, OnFailure::rejoin, 1), store.open(), [] { return false; });
  EXPECT_EQ(client.status().code(), ErrorCode::aborted);
  EXPECT_TRUE(contains(client.status(), "interrupted")) << client.status().message();
}

TEST(Rejoining, WhoIsInAnotherGenerationIsNotLetIn) {
  MemoryStore store;
  const std::string nowhere = "127.0.0.1:" + std::to_string(free_port());
  auto other = std::async(std::launch::async, [&] {
    return meet(*store.open(), options_of(1, 2, OnFailure::rejoin), {"elsewhere", {nowhere}, nowhere, {}, {}}, always);
  });
  Options options = options_of(0, 2, OnFailure::rejoin);
  options.transport = Medium::tcp;
  std::atomic<bool> goes_on{true};
  auto connecting = std::async(std::launch::async, [&] {
    return Client::connect(options, store.open(), [&goes_on] { return goes_on.load(); });
  });
  const auto met = other.get();
  ASSERT_TRUE(met.ok()) << met.status().message();
  ServerWithWorkers intruder(make_tcp_transport());
  for (const std::uint32_t generation : {0u, 2u}) {
    const auto end = intruder.connect_to(met.value().members[0].peer_address);
    end->receive();
    intruder.say_hello(*end, {1, 2, "default", 0, {}, 0, generation});
    EXPECT_EQ(end->recorder.wait_closed().code(), ErrorCode::peer_lost);
    EXPECT_TRUE(end->recorder.messages().empty());
  }
  goes_on = false;
  EXPECT_EQ(connecting.get().status().code(), ErrorCode::aborted);
}

TEST(Shrinking, ToOneWorkerAndGrowingAgain) {
  MemoryStore store;
  auto all = std::vector{options_of(0, 2, OnFailure::shrink), options_of(1, 2, OnFailure::shrink)};
  for (Options& options : all) options.timeout = milliseconds(3000);
  auto clients = connect_all(store, all);
  each(clients, [](std::size_t, Client& client) { expect_sum(client, 2); });
  clients[0]->abort("killed");
  EXPECT_FALSE(add_ones(*clients[1], "more").ok());
  clients.clear();
  all[1].generation = 1;
  auto alone = connect_all(store, {all[1]});
  ASSERT_NE(alone[0], nullptr);
  EXPECT_EQ(alone[0]->world_size(), 1);
  EXPECT_EQ(alone[0]->rank(), 0);
  EXPECT_FALSE(alone[0]->joining());
  expect_sum(*alone[0], 1);
  auto newcomer = begin_to_connect(store, all[0]);
  ASSERT_TRUE(eventually([&] { return generation_wanted(*store.open(), "default") > alone[0]->generation(); }));
  all[1].generation = alone[0]->generation();
  alone[0]->abort("a worker joins");
  alone.clear();
  clients = connect_all(store, {all[1]});
  auto first = newcomer.get();
  ASSERT_TRUE(first.ok()) << first.status().message();
  EXPECT_TRUE(first.value()->joining());
  clients.push_back(std::move(first.value()));
  each(clients, [](std::size_t index, Client& client) {
    EXPECT_EQ(client.generation(), 3u);
    EXPECT_EQ(client.rank(), index == 0 ? 1 : 0);
    expect_sum(client, 2);
  });
}

TEST(Shrinking, WhoDiedAfterTheRendezvousIsLeftOut) {
  MemoryStore store;
  ASSERT_TRUE(store.open()->set("poseidon/default/generation", "1").ok());
  auto survivor = options_of(0, 2, OnFailure::shrink, 1);
  survivor.timeout = milliseconds(2500);
  auto other = survivor;
  other.rank = 1;
  auto dead = meet_and_die(store, other);
  auto clients = connect_all(store, {survivor});
  ASSERT_TRUE(dead.get().ok());
  ASSERT_NE(clients[0], nullptr);
  EXPECT_EQ(clients[0]->generation(), 3u);
  EXPECT_EQ(clients[0]->world_size(), 1);
  expect_sum(*clients[0], 1);
}

TEST(Shrinking, MinWorkersMustBePossible) {
  for (const int min_workers : {-1, 3}) {
    MemoryStore store;
    Options options = options_of(0, 2, OnFailure::shrink);
    options.min_workers = min_workers;
    const auto client = Client::connect(options, store.open(), always);
    EXPECT_EQ(client.status().code(), ErrorCode::invalid_argument);
    EXPECT_TRUE(contains(client.status(), "min_workers is " + std::to_string(min_workers)));
  }
}

TEST(DedicatedServer, SeesTheGenerationsOfAJobFollowEachOther) {
  Options listening;
  listening.interfaces = {"127.0.0.1"};
  auto server = Server::listen(listening, 0);
  ASSERT_TRUE(server.ok()) << server.status().message();
  MemoryStore store;
  std::vector<Options> all;
  for (int slot = 0; slot < 3; ++slot) {
    all.push_back(options_of(slot, 3, OnFailure::rejoin));
    all.back().servers = {server.value()->address()};
  }
  for (std::uint32_t generation = 1; generation <= 3; ++generation) {
    auto clients = connect_all(store, all);
    each(clients, [&](std::size_t, Client& client) {
      EXPECT_EQ(client.generation(), generation);
      expect_sum(client, 3);
    });
    clients[1]->abort("killed");
    for (Options& options : all) options.generation = generation;
    all[1].generation = 0;
  }
}

/// Workers of which some die while they meet, connect, add a layer or exchange it. Each is replaced by a new one, until
/// all have done everything in one generation.
class Mortals {
 public:
  Mortals(int slot_count, std::uint64_t seed, int deaths)
      : slot_count_(slot_count), deaths_left_(deaths), random_(seed) {}

  void run() {
    run_ranks(slot_count_, [this](int slot) {
      for (std::uint32_t last = 0; !over_;) last = live(slot, last);
    });
  }

  std::uint32_t generation() const { return generation_; }

 private:
  enum class Death : std::uint8_t { none, in_rendezvous, connected, exchanging };

  /// Runs one process or, with `last`, its next try. Returns its generation, or 0 after its death.
  std::uint32_t live(int slot, std::uint32_t last) {
    const auto [death, moment] = draw();
    const auto store = store_.open(death == Death::in_rendezvous ? moment : -1);
    auto client = Client::connect(options_of(slot, slot_count_, OnFailure::rejoin, last), store,
                                  [&store] { return store->alive(); });
    if (!client.ok()) return store->alive() ? last : 0;
    Client& worker = *client.value();
    if (death == Death::connected) {
      worker.abort("killed");
      return 0;
    }
    std::thread killer([&worker, death = death, moment = moment] {
      if (death != Death::exchanging) return;
      for (int turns = 20 * moment; turns > 0; --turns) std::this_thread::yield();  // somewhere in the exchange
      worker.abort("killed");
    });
    const auto sum = add_ones(worker);
    killer.join();
    if (death == Death::exchanging) return 0;
    if (sum.ok()) {
      EXPECT_EQ(sum.value(), static_cast<float>(slot_count_));
      await_others(*store, worker);
    }
    return worker.generation();
  }

  std::pair<Death, int> draw() {
    const std::lock_guard lock(mutex_);
    if (deaths_left_ == 0) return {Death::none, 0};
    --deaths_left_;
    return {static_cast<Death>(std::uniform_int_distribution(0, 3)(random_)),
            std::uniform_int_distribution(1, 40)(random_)};
  }

  /// Leaves the membership when all have come so far, or when it has ended.
  void await_others(Store& store, const Client& worker) {
    {
      const std::lock_guard lock(mutex_);
      if (++done_[worker.generation()] == slot_count_) {
        generation_ = worker.generation();
        over_ = true;
      }
    }
    EXPECT_TRUE(eventually(
        [&] { return over_ || !worker.status().ok() || generation_wanted(store, "default") != worker.generation(); }));
  }

  const int slot_count_;
  MemoryStore store_;
  std::atomic<bool> over_{false};
  std::atomic<std::uint32_t> generation_{0};
  std::mutex mutex_;  // of the rest
  int deaths_left_;
  std::mt19937_64 random_;
  std::map<std::uint32_t, int> done_;  // how many have, by generation
};

TEST(Mortals, GoOnWhereverOneDies) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    Mortals mortals(3, seed, 12);
    mortals.run();
    EXPECT_GT(mortals.generation(), 1u) << "seed " << seed;
  }
}

/// A process that connects and exchanges on command, until it is killed. It is forked before the test has threads.
class ChildRank {
 public:
  explicit ChildRank(const Options& options) {
    std::array<int, 2> pipe{};
    if (::pipe(pipe.data()) != 0) return;
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(pipe[1]);
      char go = 0;
      if (::read(pipe[0], &go, 1) == 1) live(options);
      ::_exit(0);
    }
    ::close(pipe[0]);
    start_ = FileDescriptor(pipe[1]);
  }
  ~ChildRank() { kill(); }
  ChildRank(const ChildRank&) = delete;
  ChildRank& operator=(const ChildRank&) = delete;

  void start() { EXPECT_EQ(::write(start_.get(), "g", 1), 1); }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
  }

 private:
  static void live(const Options& options) {
    const auto store = open_store(options, always);
    if (!store.ok()) return;
    auto client = Client::connect(options, store.value(), always);
    if (!client.ok() || !add_ones(*client.value()).ok()) return;
    for (;;) ::pause();
  }

  pid_t pid_ = 0;
  FileDescriptor start_;
};

TEST(Rejoining, TheStoreComesBackWithRankZerosReplacement) {
  Options options = options_of(0, 2, OnFailure::rejoin);
  options.master_port = free_port();
  ChildRank first(options);
  ChildRank replacement(options);
  options.rank = 1;
  first.start();
  const auto store = open_store(options, always);
  ASSERT_TRUE(store.ok()) << store.status().message();
  auto client = Client::connect(options, store.value(), always);
  ASSERT_TRUE(client.ok()) << client.status().message();
  expect_sum(*client.value(), 2);
  first.kill();
  const auto lost = add_ones(*client.value(), "more");
  EXPECT_EQ(lost.status().code(), ErrorCode::peer_lost) << lost.status().message();
  options.generation = client.value()->generation();
  client.value().reset();
  replacement.start();
  client = Client::connect(options, store.value(), always);
  ASSERT_TRUE(client.ok()) << client.status().message();
  EXPECT_EQ(client.value()->generation(), 2u);
  expect_sum(*client.value(), 2);
}

}  // namespace
}  // namespace poseidon::testing
