#include "transport/spread/spread_transport.h"

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "transport/spread/loop_gate.h"
#include "transport/spread/spread_flow.h"

namespace poseidon {

namespace spread {
namespace {

/// Used on the near loop.
struct Acceptor {
  const OnAccept on_accept;
  bool open = true;
};

class SpreadListener final : public Listener {
 public:
  SpreadListener(std::unique_ptr<Listener> beneath, Loop& near, std::shared_ptr<Acceptor> acceptor)
      : beneath_(std::move(beneath)), near_(near), acceptor_(std::move(acceptor)) {}
  ~SpreadListener() override {
    near_.check_other_thread();
    beneath_.reset();
    near_.call([this] { acceptor_->open = false; });
  }
  const std::string& address() const override { return beneath_->address(); }

 private:
  std::unique_ptr<Listener> beneath_;
  Loop& near_;
  const std::shared_ptr<Acceptor> acceptor_;
};

class SpreadTransport final : public Transport {
 public:
  SpreadTransport(Transport& beneath, std::size_t loop_count) : beneath_(beneath) {
    for (std::size_t i = 0; i < loop_count; ++i) loops_.push_back(std::make_unique<Loop>(concat("psd-bytes-", i)));
  }

  Result<std::unique_ptr<Listener>> listen(Loop& near, const std::string& address, OnAccept on_accept) override {
    Loop& far = next_loop();
    auto acceptor = std::make_shared<Acceptor>(Acceptor{std::move(on_accept)});
    auto beneath =
        beneath_.listen(far, address, [&near, &far, gate = gate_of(near), acceptor](std::shared_ptr<Flow> flow) {
          auto made = SpreadFlow::make(near, gate, far, std::move(flow));
          gate->post([acceptor, made] {
            if (acceptor->open) acceptor->on_accept(made);
          });
        });
    if (!beneath.ok()) return beneath.status();
    return Result<std::unique_ptr<Listener>>(
        std::make_unique<SpreadListener>(std::move(beneath.value()), near, std::move(acceptor)));
  }

  void connect(Loop& near, const std::string& address, Clock::time_point deadline, OnConnect done) override {
    Loop& far = next_loop();
    beneath_.connect(far, address, deadline,
                     [&near, &far, gate = gate_of(near), done = std::move(done)](Result<std::shared_ptr<Flow>> flow) {
                       Result<std::shared_ptr<Flow>> made = flow.status();
                       if (flow.ok())
                         made = std::shared_ptr<Flow>(SpreadFlow::make(near, gate, far, std::move(flow.value())));
                       gate->post([done, made] { done(made); });
                     });
  }

 private:
  Loop& next_loop() { return *loops_[next_++ % loops_.size()]; }

  std::shared_ptr<LoopGate> gate_of(Loop& near) {
    const std::lock_guard lock(mutex_);
    auto& gate = gates_[&near];
    if (!gate || gate->closed()) gate = LoopGate::of(near);  // another loop may have the place of one that has ended
    return gate;
  }

  Transport& beneath_;
  std::mutex mutex_;
  std::map<const Loop*, std::shared_ptr<LoopGate>> gates_;  // guarded by mutex_
  std::vector<std::unique_ptr<Loop>> loops_;
  std::atomic<std::size_t> next_{0};
};

}  // namespace
}  // namespace spread

std::unique_ptr<Transport> make_spread_transport(Transport& beneath, std::size_t loop_count) {
  return std::make_unique<spread::SpreadTransport>(beneath, loop_count);
}

}  // namespace poseidon
