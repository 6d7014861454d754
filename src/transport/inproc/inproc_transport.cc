#include "transport/inproc/inproc_transport.h"

#include <map>
#include <mutex>
#include <utility>

#include "transport/connector.h"
#include "transport/inproc/inproc_flow.h"

namespace poseidon {

namespace inproc {
namespace {

struct Acceptor {
  Loop& loop;
  const OnAccept on_accept;
  bool open = true;  // used only by the loop's thread
};

/// The listeners of one transport and their addresses. Thread-safe.
class Registry {
 public:
  explicit Registry(std::string key_id) : key_id_(std::move(key_id)) {}

  /// Returns the address, with a number if it asked for any. ErrorCode::unreachable: the address is taken.
  Result<std::string> add(const std::string& address, const std::shared_ptr<Acceptor>& acceptor) {
    const std::lock_guard lock(mutex_);
    std::string name = address;
    if (name.ends_with(":0")) name.replace(name.size() - 1, 1, std::to_string(next_port_++));
    if (!acceptors_.emplace(name, acceptor).second) {
      return Status(ErrorCode::unreachable, "cannot listen on " + name + ": Address already in use");
    }
    return name;
  }

  void remove(const std::string& address) {
    const std::lock_guard lock(mutex_);
    acceptors_.erase(address);
  }

  /// Returns a new flow to the listener on `address`, or null if there is none.
  std::shared_ptr<Flow> connect(Loop& loop, const std::string& address) {
    // While the lock is held, the listener's loop exists, because a listener is removed before its loop is destroyed.
    const std::lock_guard lock(mutex_);
    const auto found = acceptors_.find(address);
    if (found == acceptors_.end()) return nullptr;
    const auto acceptor = found->second;
    const std::string name = concat("client ", next_client_++, " of ", address);
    auto [ours, theirs] = InprocFlow::make_pair(loop, address, acceptor->loop, name);
    ours->set_key_id(key_id_);
    theirs->set_key_id(key_id_);
    acceptor->loop.post([acceptor, flow = std::move(theirs)]() mutable {
      const auto accepted = std::move(flow);
      if (acceptor->open) acceptor->on_accept(accepted);
    });
    return ours;
  }

 private:
  const std::string key_id_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Acceptor>> acceptors_;
  int next_port_ = 1;
  int next_client_ = 1;
};

class InprocListener final : public Listener {
 public:
  InprocListener(std::shared_ptr<Registry> registry, std::shared_ptr<Acceptor> acceptor, std::string address)
      : registry_(std::move(registry)), acceptor_(std::move(acceptor)), address_(std::move(address)) {}
  ~InprocListener() override {
    acceptor_->loop.check_other_thread();
    registry_->remove(address_);
    acceptor_->loop.call([this] { acceptor_->open = false; });
  }
  const std::string& address() const override { return address_; }

 private:
  const std::shared_ptr<Registry> registry_;
  const std::shared_ptr<Acceptor> acceptor_;
  const std::string address_;
};

class InprocConnector final : public Connector {
 public:
  InprocConnector(std::shared_ptr<Registry> registry, Loop& loop, std::string address, Clock::time_point deadline,
                  OnConnect done)
      : Connector(loop, std::move(address), 1, deadline, std::move(done)), registry_(std::move(registry)) {}

  void attempt() override {
    loop_.check_thread();
    if (auto flow = registry_->connect(loop_, address_)) return finish(std::move(flow));
    failed("nobody listens there");
  }

 private:
  const std::shared_ptr<Registry> registry_;
};

class InprocTransport final : public Transport {
 public:
  explicit InprocTransport(std::string key_id) : registry_(std::make_shared<Registry>(std::move(key_id))) {}

  Result<std::unique_ptr<Listener>> listen(Loop& loop, const std::string& address, OnAccept on_accept) override {
    auto acceptor = std::make_shared<Acceptor>(Acceptor{loop, std::move(on_accept)});
    auto name = registry_->add(address, acceptor);
    if (!name.ok()) return name.status();
    return Result<std::unique_ptr<Listener>>(
        std::make_unique<InprocListener>(registry_, std::move(acceptor), std::move(name.value())));
  }

  void connect(Loop& loop, const std::string& address, Clock::time_point deadline, OnConnect done) override {
    auto connector = std::make_shared<InprocConnector>(registry_, loop, address, deadline, std::move(done));
    loop.post([connector] { connector->attempt(); });
  }

 private:
  const std::shared_ptr<Registry> registry_;
};

}  // namespace
}  // namespace inproc

std::unique_ptr<Transport> make_inproc_transport(std::string key_id) {
  return std::make_unique<inproc::InprocTransport>(std::move(key_id));
}

}  // namespace poseidon
