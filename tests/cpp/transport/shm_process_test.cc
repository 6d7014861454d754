// Shared memory between processes, of which one is killed while it writes, or belongs to another user.
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <array>
#include <csignal>
#include <utility>

#include "conformance/transport_fixture.h"
#include "transport/shm/local_socket.h"
#include "transport/shm/shm_transport.h"

namespace poseidon::testing {
namespace {

using std::chrono::seconds;

constexpr std::size_t kMebibyte = std::size_t{1} << 20;
constexpr std::size_t kSentBytes = 256u << 10;

std::string test_name(const char* what) { return "psd-test-" + std::to_string(::getpid()) + "-" + what; }

/// Runs `body` in a child process, and its result is the exit status. Create it before this process has threads,
/// because it forks. The destructor kills a child that still runs.
class Child {
 public:
  explicit Child(const std::function<int()>& body) : pid_(::fork()) {
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::_exit(body());
  }
  ~Child() { kill(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void kill() {
    if (pid_ > 0) ::kill(pid_, SIGKILL);
    wait();
  }
  int wait() {
    int status = -1;
    if (pid_ > 0) ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t pid_;
};

/// Runs in another process: connects to `address` and sends every payload back until the flow ends.
class Echo final : public Receiver {
 public:
  static int run(const std::string& address) {
    const auto transport = make_shm_transport();
    Loop loop("echo");
    Echo echo;
    transport->connect(loop, address, Clock::now() + kPatience, [&](Result<std::shared_ptr<Flow>> flow) {
      if (!flow.ok()) ::_exit(1);
      flow.value()->set_receiver(&echo);
    });
    return echo.ended_.get_future().get().code() == ErrorCode::peer_lost ? 0 : 2;
  }

  Result<std::span<std::byte>> accept(Flow&, const wire::Header& header, bool /*lent*/) override {
    place_ = Buffer(static_cast<std::size_t>(header.payload_bytes));
    return place_.span();
  }
  Status on_message(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
                    std::function<void()>) override {
    const auto copy = std::make_shared<Bytes>(payload.begin(), payload.end());
    flow.send(header, {*copy}, [copy](const Status&) {});
    return {};
  }
  void on_closed(Flow&, const Status& status) override { ended_.set_value(status); }

 private:
  Buffer place_;
  std::promise<Status> ended_;
};

/// Returns the flow that a child process opens to `address`.
std::shared_ptr<Flow> accept_one(Transport& transport, Loop& loop, const std::string& address) {
  std::promise<std::shared_ptr<Flow>> accepted;
  const auto listener =
      transport.listen(loop, address, [&](std::shared_ptr<Flow> flow) { accepted.set_value(std::move(flow)); });
  EXPECT_TRUE(listener.ok()) << listener.status().message();
  auto flow = accepted.get_future();
  EXPECT_EQ(flow.wait_for(kPatience), std::future_status::ready);
  return flow.get();
}

TEST(ShmProcess, ExchangesWithAnother) {
  const std::string address = test_name("echo");
  Child child([&] { return Echo::run(address); });
  const auto transport = make_shm_transport();
  Loop loop("parent");
  std::vector<Bytes> payloads;
  for (std::uint32_t i = 0; i < 60; ++i) payloads.push_back(pattern(i * 47'111, i));
  payloads.push_back(pattern(20 * kMebibyte, 1));
  {
    End end(loop, accept_one(*transport, loop, address));
    end.receive();
    for (std::uint32_t i = 0; i < payloads.size(); ++i) end.send(push_header(i), payloads[i]);
    ASSERT_TRUE(end.recorder.wait_messages(payloads.size()));
    const auto messages = end.recorder.messages();
    for (std::size_t i = 0; i < payloads.size(); ++i) EXPECT_EQ(messages[i].payload, payloads[i]);
  }
  EXPECT_EQ(child.wait(), 0);
}

TEST(ShmProcess, ABusyOneThatIsKilledIsNoticedWithinASecond) {
  const Bytes payload = pattern(kSentBytes, 1);
  for (int round = 0; round < 5; ++round) {
    const std::string address = test_name("busy");
    Child child([&] { return Echo::run(address); });
    const auto transport = make_shm_transport();
    Loop loop("parent");
    End end(loop, accept_one(*transport, loop, address));
    end.recorder.on_received = [&](Flow& flow, const Received& received) {
      flow.send(received.header, {payload}, end.sends.entry());
    };
    end.receive();
    for (std::uint32_t i = 0; i < 40; ++i) end.send(push_header(i), payload);
    ASSERT_TRUE(end.recorder.wait_messages(50 * static_cast<std::size_t>(round + 1)));
    child.kill();
    const auto killed = Clock::now();
    EXPECT_EQ(end.recorder.wait_closed().code(), ErrorCode::peer_lost);
    EXPECT_LT(Clock::now() - killed, seconds(1));
  }
}

/// Kills the child when the first part of its message is there.
class Killer final : public Receiver {
 public:
  explicit Killer(Child& child) : child_(child) {}

  Result<std::span<std::byte>> accept(Flow&, const wire::Header& header, bool /*lent*/) override {
    place_ = Buffer(static_cast<std::size_t>(header.payload_bytes));
    return place_.span();
  }
  void on_progress(Flow&, const wire::Header&, std::size_t) override {
    child_.kill();
    killed_ = Clock::now();
  }
  Status on_message(Flow&, const wire::Header&, std::span<const std::byte>, std::function<void()>) override {
    ADD_FAILURE() << "a whole message";
    return {};
  }
  void on_closed(Flow&, const Status& status) override {
    EXPECT_LT(Clock::now() - killed_, seconds(1));
    ended_.set_value(status);
  }
  Status wait_closed() { return ended_.get_future().get(); }

 private:
  Child& child_;
  Buffer place_;
  Clock::time_point killed_;
  std::promise<Status> ended_;
};

TEST(ShmProcess, OneKilledInMidMessageIsNoticedWithinASecond) {
  const std::string address = test_name("killed");
  Child child([&] {
    const auto transport = make_shm_transport();
    Loop loop("child");
    const Bytes payload = pattern(64 * kMebibyte, 1);
    std::promise<int> done;
    transport->connect(loop, address, Clock::now() + kPatience, [&](Result<std::shared_ptr<Flow>> flow) {
      if (!flow.ok()) return done.set_value(1);
      flow.value()->send(push_header(1), {payload}, [&](const Status&) { done.set_value(2); });
    });
    return done.get_future().get();
  });
  const auto transport = make_shm_transport();
  Loop loop("parent");
  Killer killer(child);
  auto flow = accept_one(*transport, loop, address);
  loop.call([&] { flow->set_receiver(&killer); });
  const Status status = killer.wait_closed();
  EXPECT_EQ(status.code(), ErrorCode::peer_lost);
  EXPECT_NE(status.message().find("in the middle of a message"), std::string::npos) << status.message();
  loop.call([&] { flow.reset(); });
}

constexpr uid_t kSomebodyElse = 65534;

TEST(ShmProcess, AnotherUsersIsHungUpOn) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become somebody else";
  const auto name = shm::socket_name(test_name("other-user"));
  Child child([&] {
    if (::setuid(kSomebodyElse) != 0) return 1;
    const FileDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET, 0));
    while (::connect(socket.get(), name.value().get(), name.value().size_bytes) != 0) ::usleep(1000);
    std::byte byte;
    return ::recv(socket.get(), &byte, 1, 0) <= 0 ? 0 : 2;
  });
  const auto transport = make_shm_transport();
  Loop loop("listener");
  const auto listener = transport->listen(loop, test_name("other-user"), [](std::shared_ptr<Flow>) {
    ADD_FAILURE() << "accepted a process of another user";
  });
  ASSERT_TRUE(listener.ok()) << listener.status().message();
  EXPECT_EQ(child.wait(), 0);
}

TEST(ShmProcess, AnotherUsersListenerIsUnreachable) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become somebody else";
  const std::string address = test_name("listener");
  const auto name = shm::socket_name(address);
  std::array<int, 2> listening{};
  ASSERT_EQ(::pipe(listening.data()), 0);
  Child child([&] {
    if (::setuid(kSomebodyElse) != 0) return 1;
    const FileDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET, 0));
    if (::bind(socket.get(), name.value().get(), name.value().size_bytes) != 0) return 2;
    if (::listen(socket.get(), 16) != 0 || ::write(listening[1], "", 1) != 1) return 3;
    ::pause();
    return 0;
  });
  const FileDescriptor writing(listening[1]);
  const FileDescriptor reading(listening[0]);
  std::byte byte;
  ASSERT_EQ(::read(reading.get(), &byte, 1), 1);
  const auto transport = make_shm_transport();
  Loop loop("connect");
  std::promise<Status> answer;
  transport->connect(loop, address, Clock::now() + std::chrono::milliseconds(200),
                     [&](Result<std::shared_ptr<Flow>> flow) { answer.set_value(flow.status()); });
  const Status status = answer.get_future().get();
  EXPECT_EQ(status.code(), ErrorCode::unreachable);
  EXPECT_NE(status.message().find(address), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("another user"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace poseidon::testing
