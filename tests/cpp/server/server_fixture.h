// A server and workers that speak to it message by message.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "conformance/transport_fixture.h"
#include "cpp/server/chunk/contributions.h"
#include "server/server_impl.h"
#include "wire/messages/contribution.h"
#include "wire/messages/hello.h"

namespace poseidon::testing {

/// The workers are destroyed before the server, so what they sent stays until then.
class ServerWithWorkers {
 public:
  explicit ServerWithWorkers(std::unique_ptr<Transport> transport) : transport_(std::move(transport)) {}

  /// options.world_size 0 means a dedicated server. An `address` that ends in 0 means any port.
  void start(const Options& options, const std::string& address) {
    server = std::make_unique<ServerImpl>(options);
    const Status status = server->listen(*transport_, address);
    ASSERT_TRUE(status.ok()) << status.message();
  }

  std::unique_ptr<End> connect(std::size_t core = 0) {
    auto end = connect_to(server->last_addresses().at(core));
    end->receive();
    return end;
  }

  /// Returns a connection that does not receive.
  std::unique_ptr<End> connect_to(const std::string& address) {
    std::promise<std::shared_ptr<Flow>> connected;
    transport_->connect(*loop_, address, Clock::now() + std::chrono::seconds(5),
                        [&](Result<std::shared_ptr<Flow>> flow) { connected.set_value(flow.value()); });
    return std::make_unique<End>(*loop_, connected.get_future().get());
  }

  Transport& transport() { return *transport_; }

  void say_hello(End& worker, const wire::Hello& hello) {
    texts_.push_back(hello.make());
    worker.send(texts_.back().header, {texts_.back().payload()});
  }

  std::unique_ptr<End> join(std::uint32_t rank, std::uint32_t worker_count, const std::string& job = "default",
                            std::size_t core = 0, std::uint32_t flow = 0, std::uint32_t priority_class = 0) {
    auto worker = connect(core);
    say_hello(*worker, {rank, worker_count, job, flow, {}, priority_class});
    EXPECT_EQ(message(*worker, 1).header.kind, wire::Kind::hello);
    return worker;
  }

  /// Connects a rank again whose connection has been closed at its own end. The server refuses it until it has noticed
  /// the close.
  std::unique_ptr<End> join_again(std::uint32_t rank, std::uint32_t worker_count) {
    for (const auto deadline = Clock::now() + std::chrono::seconds(5);;) {
      auto worker = connect();
      say_hello(*worker, {rank, worker_count, "default", 0, {}, 0});
      if (message(*worker, 1).header.kind == wire::Kind::hello) return worker;
      EXPECT_LT(Clock::now(), deadline);
      if (Clock::now() >= deadline) return worker;
    }
  }

  void send(End& worker, const wire::Header& header, Bytes payload) {
    payloads_.push_back(std::move(payload));
    worker.send(header, payloads_.back());
  }
  void send(End& worker, const wire::Contribution& push, Bytes payload) {
    send(worker, push.make(), std::move(payload));
  }
  void push(End& worker, const wire::Contribution& push, const Floats& values) { send(worker, push, bytes_of(values)); }

  /// Returns the `count`-th message that came.
  static Received message(End& worker, std::size_t count) {
    EXPECT_TRUE(worker.recorder.wait_messages(count));
    const auto messages = worker.recorder.messages();
    return messages.size() >= count ? messages[count - 1] : Received{};
  }

  std::unique_ptr<ServerImpl> server;

 private:
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Loop> loop_ = std::make_unique<Loop>("workers");
  std::deque<Bytes> payloads_;
  std::deque<wire::TextMessage> texts_;
};

inline Floats floats_of(const Received& message) { return values_of(message.payload); }

inline std::string text_of(const Received& message) {
  return {reinterpret_cast<const char*>(message.payload.data()), message.payload.size()};
}

}  // namespace poseidon::testing
