// Tap: stands between workers and a server. It passes everything on and records it. It can hold back what comes from
// the server.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/transport.h"
#include "wire/messages/hello.h"

namespace poseidon::testing {

class Tap {
 public:
  struct Seen {
    std::size_t connection = 0;
    bool to_server = false;
    wire::Header header;
    // Of the connection, from its hello:
    std::uint32_t rank = 0;
    std::uint32_t flow = 0;
    std::uint32_t priority_class = 0;
  };

  explicit Tap(std::string server_address) : server_address_(std::move(server_address)) {
    auto listener =
        transport_->listen(*loop_, "127.0.0.1:0", [this](std::shared_ptr<Flow> flow) { accept(std::move(flow)); });
    EXPECT_TRUE(listener.ok()) << listener.status().message();
    listener_ = std::move(listener.value());
  }
  ~Tap() {
    listener_.reset();
    loop_.reset();  // closes the open connections
  }
  Tap(const Tap&) = delete;
  Tap& operator=(const Tap&) = delete;

  const std::string& address() const { return listener_->address(); }

  /// Returns all messages so far, in the order in which they came.
  std::vector<Seen> seen() const {
    const std::lock_guard lock(mutex_);
    return seen_;
  }

  /// Holds back everything for the workers on connections of this class, until release().
  void hold(std::uint32_t priority_class) {
    loop_->call([&] {
      for (Wire& wire : wires_) wire.hold(priority_class);
    });
  }
  void release() {
    loop_->call([&] {
      for (Wire& wire : wires_) wire.release();
    });
  }
  /// Sends a message without a payload to all workers, as if it came from the server.
  void tell_workers(const wire::Header& header) {
    loop_->call([&] {
      for (Wire& wire : wires_) wire.tell(header);
    });
  }

 private:
  /// A worker's connection, and the connection to the server that belongs to it.
  class Wire final : public Receiver {
   public:
    Wire(Tap& tap, std::size_t number, std::shared_ptr<Flow> worker)
        : tap_(tap), number_(number), worker_(std::move(worker)) {}

    void join(std::shared_ptr<Flow> server) {
      server_ = std::move(server);
      server_->set_receiver(this);
      worker_->set_receiver(this);
    }

    Result<std::span<std::byte>> accept(Flow& flow, const wire::Header& header, bool /*lent*/) override {
      auto& payload = &flow == server_.get() ? from_server_ : from_worker_;
      payload = std::make_shared<Buffer>(static_cast<std::size_t>(header.payload_bytes));
      return payload->span();
    }

    Status on_message(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
                      std::function<void()>) override {
      const bool to_server = &flow == worker_.get();
      if (to_server && header.kind == wire::Kind::hello) hello_ = wire::Hello::read(header, payload);
      tap_.write_down({number_, to_server, header, hello_.rank, hello_.flow, hello_.priority_class});
      auto buffer = std::exchange(to_server ? from_worker_ : from_server_, nullptr);
      pass(to_server, [header, payload, buffer](Flow& to) { to.send(header, {payload}, [buffer](const Status&) {}); });
      return {};
    }

    void on_closed(Flow& flow, const Status&) override {
      pass(&flow == worker_.get(), [](Flow& to) { to.close(std::chrono::seconds(5)); });
    }

    void hold(std::uint32_t priority_class) { holds_ = holds_ || hello_.priority_class == priority_class; }
    void tell(const wire::Header& header) {
      worker_->send(header, {}, [](const Status&) {});
    }
    void release() {
      holds_ = false;
      for (const auto& what : std::exchange(held_, {})) what(*worker_);
    }

   private:
    void pass(bool to_server, std::function<void(Flow&)> what) {
      if (!to_server && holds_) return held_.push_back(std::move(what));
      what(to_server ? *server_ : *worker_);
    }

    Tap& tap_;
    const std::size_t number_;
    const std::shared_ptr<Flow> worker_;
    std::shared_ptr<Flow> server_;
    std::shared_ptr<Buffer> from_worker_;
    std::shared_ptr<Buffer> from_server_;
    wire::Hello hello_;
    bool holds_ = false;
    std::vector<std::function<void(Flow&)>> held_;  // messages for the worker
  };

  void accept(std::shared_ptr<Flow> worker) {
    Wire& wire = wires_.emplace_back(*this, wires_.size(), std::move(worker));
    transport_->connect(*loop_, server_address_, Clock::now() + std::chrono::seconds(5),
                        [&wire](Result<std::shared_ptr<Flow>> server) {
                          ASSERT_TRUE(server.ok()) << server.status().message();
                          wire.join(std::move(server.value()));
                        });
  }

  void write_down(const Seen& seen) {
    const std::lock_guard lock(mutex_);
    seen_.push_back(seen);
  }

  const std::string server_address_;
  const std::unique_ptr<Transport> transport_ = make_tcp_transport();
  mutable std::mutex mutex_;
  std::vector<Seen> seen_;
  std::list<Wire> wires_;  // only the loop thread uses it
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<Loop> loop_ = std::make_unique<Loop>("tap");
};

}  // namespace poseidon::testing
