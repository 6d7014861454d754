// What every transport test needs: a receiver that records, one end of a flow, and a connected pair.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/thread.h"
#include "conformance/free_port.h"
#include "transport/transport.h"
#include "wire/messages/contribution.h"

namespace poseidon::testing {

inline constexpr std::chrono::seconds kPatience{30};

using Bytes = std::vector<std::byte>;

/// Returns bytes that differ by position and seed, so that a test notices a shifted or swapped piece. As float32 they
/// are numbers of similar magnitudes, which shrink when they are coded.
inline Bytes pattern(std::size_t size_bytes, std::uint32_t seed) {
  Bytes bytes(size_bytes);
  std::uint32_t state = seed * 2654435761u + 1;
  for (std::size_t i = 0; i < size_bytes; ++i) {
    state = state * 1664525u + 1013904223u;
    bytes[i] = static_cast<std::byte>(i % 4 == 3 ? 0x3c | (state >> 24 & 0x83) : state >> 24);
  }
  return bytes;
}

inline wire::Header push_header(std::uint32_t chunk) {
  wire::Contribution push;
  push.chunk = chunk;
  return push.make();
}

struct Received {
  wire::Header header;
  Bytes payload;
  const std::byte* data = nullptr;  // the address of the payload
};

/// Records everything. The test's thread waits for it. The calls come on one loop.
class Recorder final : public Receiver {
 public:
  // Set these before the flow gets the receiver.
  Status refuse_header;   // what accept() returns
  Status refuse_message;  // what on_message returns
  bool keep_loans = false;
  std::function<void(Flow&, const Received&)> on_received;

  bool may_receive(Flow&, const wire::Header&) override {
    const std::lock_guard lock(mutex_);
    ++asked_count_;
    changed_.notify_all();
    return open_;
  }

  Result<std::span<std::byte>> accept(Flow&, const wire::Header& header, bool /*lent*/) override {
    {
      const std::lock_guard lock(mutex_);
      EXPECT_FALSE(std::exchange(accepted_, true)) << "two headers before a message";
      ++accepted_count_;
    }
    if (!refuse_header.ok()) return refuse_header;
    place_ = Buffer(static_cast<std::size_t>(header.payload_bytes));
    return place_.span();
  }

  Status on_message(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
                    std::function<void()> release) override {
    Received received{header, Bytes(payload.begin(), payload.end()), payload.data()};
    if (release && !keep_loans) release();
    if (on_received) on_received(flow, received);
    const std::lock_guard lock(mutex_);
    EXPECT_TRUE(closed_.empty()) << "a message after on_closed";
    EXPECT_TRUE(std::exchange(accepted_, false)) << "a message that accept() has not seen";
    messages_.push_back(std::move(received));
    if (release && keep_loans) loans_.push_back(std::move(release));
    changed_.notify_all();
    return refuse_message;
  }

  void on_closed(Flow&, const Status& status) override {
    const std::lock_guard lock(mutex_);
    closed_.push_back(status);
    changed_.notify_all();
  }

  /// Sets what may_receive returns from now on.
  void let_come(bool open) {
    const std::lock_guard lock(mutex_);
    open_ = open;
  }
  bool wait_asked(std::size_t count) {
    return wait([&] { return asked_count_ >= count; });
  }
  bool wait_messages(std::size_t count) {
    return wait([&] { return messages_.size() >= count; });
  }
  bool wait_loans(std::size_t count) {
    return wait([&] { return loans_.size() >= count; });
  }
  /// Returns the status of on_closed. The test fails if on_closed does not come.
  Status wait_closed() {
    const bool came = wait([&] { return !closed_.empty(); });
    EXPECT_TRUE(came) << "on_closed did not come";
    const std::lock_guard lock(mutex_);
    return closed_.empty() ? Status(ErrorCode::timeout, "on_closed did not come") : closed_.front();
  }
  std::vector<Received> messages() {
    const std::lock_guard lock(mutex_);
    return messages_;
  }
  std::size_t closed_count() {
    const std::lock_guard lock(mutex_);
    return closed_.size();
  }
  std::size_t accepted_count() {
    const std::lock_guard lock(mutex_);
    return accepted_count_;
  }
  std::vector<std::function<void()>> take_loans() {
    const std::lock_guard lock(mutex_);
    return std::exchange(loans_, {});
  }

 private:
  template <typename Condition>
  bool wait(Condition condition) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, condition);
  }

  Buffer place_;
  std::mutex mutex_;
  Condition changed_;
  bool open_ = true;
  std::size_t asked_count_ = 0;
  bool accepted_ = false;  // the message that comes next
  std::size_t accepted_count_ = 0;
  std::vector<Received> messages_;
  std::vector<Status> closed_;
  std::vector<std::function<void()>> loans_;
};

/// Records how often, and with what status, every `done` ran. Thread-safe.
class SendLog {
 public:
  std::function<void(const Status&)> entry() {
    const std::lock_guard lock(mutex_);
    const std::size_t id = results_.size();
    results_.emplace_back();
    return [this, id](const Status& status) {
      const std::lock_guard inner(mutex_);
      results_[id].push_back(status);
      changed_.notify_all();
    };
  }
  bool wait_all() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] {
      return std::all_of(results_.begin(), results_.end(), [](const auto& result) { return !result.empty(); });
    });
  }
  std::size_t done_count() {
    const std::lock_guard lock(mutex_);
    std::size_t count = 0;
    for (const auto& result : results_) count += result.size();
    return count;
  }
  /// Checks that every send was done exactly once. Returns how many ended with each code.
  std::map<ErrorCode, std::size_t> codes() {
    const std::lock_guard lock(mutex_);
    std::map<ErrorCode, std::size_t> count;
    for (const auto& result : results_) {
      EXPECT_EQ(result.size(), 1u);
      for (const Status& status : result) ++count[status.code()];
    }
    return count;
  }

 private:
  std::mutex mutex_;
  Condition changed_;
  std::vector<std::vector<Status>> results_;
};

/// A flow with its recorder and its log, for use from the test's thread. Its destructor closes the flow.
class End {
 public:
  End(Loop& loop, std::shared_ptr<Flow> flow) : loop_(loop), flow_(std::move(flow)) {}
  ~End() {
    loop_.call([&] { flow_->close(std::chrono::milliseconds(0)); });
    if (receiving_) {
      EXPECT_NE(recorder.wait_closed().code(), ErrorCode::timeout);
      loop_.call([] {});  // a second on_closed would have been posted by now
      EXPECT_EQ(recorder.closed_count(), 1u);
    }
    loop_.call([&] { flow_.reset(); });
    EXPECT_TRUE(sends.wait_all());
    sends.codes();
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;

  void receive() {
    receiving_ = true;
    loop_.call([&] { flow_->set_receiver(&recorder); });
  }
  void send(const wire::Header& header, std::vector<std::span<const std::byte>> payload) {
    loop_.post(
        [this, header, payload = std::move(payload), done = sends.entry()] { flow_->send(header, payload, done); });
  }
  void send(const wire::Header& header, const Bytes& payload) {
    send(header, std::vector<std::span<const std::byte>>{payload});
  }
  void close(std::chrono::milliseconds linger) {
    loop_.call([&] { flow_->close(linger); });
  }
  Loop& loop() { return loop_; }
  Flow& flow() { return *flow_; }

  Recorder recorder;
  SendLog sends;

 private:
  Loop& loop_;
  std::shared_ptr<Flow> flow_;
  bool receiving_ = false;
};

/// A free address at a loopback address of this process alone: tests run in several processes at once. Not for UCX,
/// which reaches only the address that the interface has.
inline std::string own_loopback() {
  const auto process = static_cast<unsigned>(::getpid());
  return "127." + std::to_string(1 + (process >> 16) % 200) + "." + std::to_string((process >> 8) % 256) + "." +
         std::to_string(1 + process % 254) + ":0";
}

/// One transport under test.
struct TransportCase {
  std::string name;
  std::unique_ptr<Transport> (*make)();
  std::string any_address;    // an address that listens on a free address
  bool counts_bytes = false;  // bytes_sent and bytes_received count what crosses the network
  bool one_loop = false;      // both ends are on the same loop
  // Messages that nothing can overtake: they have begun, but the medium has not taken them.
  std::size_t begun_count = 1;
  bool codes = false;  // payloads travel coded
};

struct Pair {
  std::unique_ptr<Listener> listener;
  std::unique_ptr<End> client;
  std::unique_ptr<End> server;
};

class TransportTest : public ::testing::TestWithParam<TransportCase> {
 protected:
  Loop& client_loop() { return client_loop_; }
  Loop& server_loop() { return GetParam().one_loop ? client_loop_ : server_loop_; }
  Transport& transport() { return *transport_; }

  /// Connects within the given time and waits for the answer.
  Result<std::shared_ptr<Flow>> connect(const std::string& address, std::chrono::milliseconds patience) {
    std::promise<Result<std::shared_ptr<Flow>>> answer;
    transport_->connect(client_loop(), address, Clock::now() + patience,
                        [&](Result<std::shared_ptr<Flow>> result) { answer.set_value(std::move(result)); });
    return answer.get_future().get();
  }

  /// Returns an address that nobody listens at, and that nobody takes while the test runs. A port that was just left
  /// is no such address: the kernel gives it to the next outgoing connection of any process.
  std::string vacant_address() {
    const std::string& any = GetParam().any_address;
    if (any.find('.') != std::string::npos || any.starts_with('['))
      return any.substr(0, any.rfind(':') + 1) + std::to_string(free_port());
    const auto listener = transport().listen(server_loop(), any, [](std::shared_ptr<Flow>) {});
    EXPECT_TRUE(listener.ok()) << listener.status().message();
    return listener.ok() ? listener.value()->address() : any;
  }

  /// Returns a connected pair without receivers.
  Pair connected_pair() {
    Pair pair;
    auto accepted = std::make_shared<std::promise<std::shared_ptr<Flow>>>();
    auto listener = transport_->listen(server_loop(), GetParam().any_address, [accepted](std::shared_ptr<Flow> flow) {
      accepted->set_value(std::move(flow));
    });
    EXPECT_TRUE(listener.ok()) << listener.status().message();
    pair.listener = std::move(listener.value());
    auto flow = connect(pair.listener->address(), kPatience);
    EXPECT_TRUE(flow.ok()) << flow.status().message();
    pair.client = std::make_unique<End>(client_loop(), std::move(flow.value()));
    pair.server = std::make_unique<End>(server_loop(), accepted->get_future().get());
    return pair;
  }

  /// Returns a connected pair with both ends receiving.
  Pair receiving_pair() {
    Pair pair = connected_pair();
    pair.client->receive();
    pair.server->receive();
    return pair;
  }

 private:
  // Tests hold flows and listeners in local variables, so these are destroyed before their loops.
  std::unique_ptr<Transport> transport_ = GetParam().make();
  Loop client_loop_{"client"};
  Loop server_loop_{"server"};
};

}  // namespace poseidon::testing
