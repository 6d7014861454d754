#include "transport/ucx/ucx_transport.h"

#ifdef POSEIDON_HAVE_UCX

#include <map>
#include <mutex>

#include "transport/tcp/address.h"
#include "transport/ucx/context.h"
#include "transport/ucx/ucx_connector.h"
#include "transport/ucx/ucx_listener.h"
#include "transport/ucx/worker.h"

namespace poseidon {

namespace ucx {
namespace {

/// The worker of every loop that uses the transport. Thread-safe; workers are made on their loop.
class Workers {
 public:
  explicit Workers(Result<std::shared_ptr<const Context>> context) : context_(std::move(context)) {}

  /// On the loop's thread.
  Result<std::shared_ptr<Worker>> of(Loop& loop) {
    if (!context_.ok()) return context_.status();
    const std::lock_guard lock(mutex_);
    std::erase_if(workers_, [](const auto& entry) { return entry.second.expired(); });
    if (auto worker = workers_[&loop].lock()) return worker;
    auto opened = Worker::open(loop, context_.value());
    if (opened.ok()) workers_[&loop] = opened.value();
    return opened;
  }

 private:
  const Result<std::shared_ptr<const Context>> context_;
  std::mutex mutex_;
  // An ended loop's worker has expired before another loop can have the same address.
  std::map<const Loop*, std::weak_ptr<Worker>> workers_;  // guarded by mutex_
};

class UcxTransport final : public Transport {
 public:
  UcxTransport(const UcxSettings& settings, Admission admission)
      : workers_(std::make_shared<Workers>(Context::open(settings))), admission_(std::move(admission)) {}

  Result<std::unique_ptr<Listener>> listen(Loop& loop, const std::string& address,
                                           UcxListener::OnAccept on_accept) override {
    Result<std::unique_ptr<Listener>> listener = Status(ErrorCode::unreachable, "not asked yet");
    loop.call([&] {
      auto worker = workers_->of(loop);
      listener = worker.ok() ? UcxListener::listen(worker.value(), address, admission_, std::move(on_accept))
                             : worker.status().with_context("cannot listen on " + address);
    });
    return listener;
  }

  void connect(Loop& loop, const std::string& address, Clock::time_point deadline, UcxConnector::Done done) override {
    // Looked up here: a slow name server must not hold up the loop.
    auto candidates = tcp::resolve(address);
    if (!candidates.ok()) {
      loop.post(
          [done = std::move(done), status = candidates.status().with_context("cannot connect")] { done(status); });
      return;
    }
    loop.post([workers = workers_, admission = admission_, &loop, address, candidates = std::move(candidates.value()),
               deadline, done = std::move(done)] {
      auto worker = workers->of(loop);
      if (!worker.ok()) return done(worker.status().with_context("cannot connect to " + address));
      std::make_shared<UcxConnector>(loop, address, candidates, admission, deadline, done)->start(worker.value());
    });
  }

 private:
  const std::shared_ptr<Workers> workers_;
  const Admission admission_;
};

}  // namespace
}  // namespace ucx

bool ucx_available() { return true; }

std::unique_ptr<Transport> make_ucx_transport(const UcxSettings& settings, const Admission& admission) {
  return std::make_unique<ucx::UcxTransport>(settings, admission);
}

}  // namespace poseidon

#else

namespace poseidon {

bool ucx_available() { return false; }

std::unique_ptr<Transport> make_ucx_transport(const UcxSettings& /*settings*/, const Admission& /*admission*/) {
  return nullptr;
}

}  // namespace poseidon

#endif  // POSEIDON_HAVE_UCX
