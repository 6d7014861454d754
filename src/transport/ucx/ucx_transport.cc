#include "transport/ucx/ucx_transport.h"

#include <algorithm>

#include "transport/traffic_class.h"

#ifdef POSEIDON_HAVE_UCX

#include <map>
#include <mutex>

#include "transport/tcp/address.h"
#include "transport/ucx/context.h"
#include "transport/ucx/engine.h"
#include "transport/ucx/ucx_connector.h"
#include "transport/ucx/ucx_listener.h"

namespace poseidon {

namespace ucx {
namespace {

/// The engine of every loop that uses the transport. Thread-safe. Each engine is made on its loop.
class Engines {
 public:
  explicit Engines(Result<std::shared_ptr<const Context>> context) : context_(std::move(context)) {}

  /// Only the loop's thread calls it.
  Result<std::shared_ptr<Engine>> of(Loop& loop) {
    if (!context_.ok()) return context_.status();
    const std::lock_guard lock(mutex_);
    std::erase_if(engines_, [](const auto& entry) { return entry.second.expired(); });
    if (auto engine = engines_[&loop].lock()) return engine;
    auto opened = Engine::open(loop, context_.value());
    if (opened.ok()) engines_[&loop] = opened.value();
    return opened;
  }

 private:
  const Result<std::shared_ptr<const Context>> context_;
  std::mutex mutex_;
  // When another loop has the same address, the engine of the ended loop has already expired.
  std::map<const Loop*, std::weak_ptr<Engine>> engines_;  // guarded by mutex_
};

class UcxTransport final : public Transport {
 public:
  UcxTransport(const UcxSettings& settings, Admission admission)
      : engines_(std::make_shared<Engines>(Context::open(settings))), admission_(std::move(admission)) {}

  Result<std::unique_ptr<Listener>> listen(Loop& loop, const std::string& address, OnAccept on_accept) override {
    return loop.call([&]() -> Result<std::unique_ptr<Listener>> {
      auto engine = engines_->of(loop);
      if (!engine.ok()) return engine.status().with_context("cannot listen on " + address);
      return UcxListener::listen(engine.value(), address, admission_, std::move(on_accept));
    });
  }

  void connect(Loop& loop, const std::string& address, Clock::time_point deadline, OnConnect done) override {
    // The look-up is done here, because a slow name server must not block the loop.
    auto candidates = tcp::resolve(address);
    if (!candidates.ok()) return cannot_connect(loop, std::move(done), candidates.status());
    loop.post([engines = engines_, credentials = admission_.credentials, &loop, address,
               candidates = std::move(candidates.value()), deadline, done = std::move(done)] {
      auto engine = engines->of(loop);
      if (!engine.ok()) return done(engine.status().with_context("cannot connect to " + address));
      std::make_shared<UcxConnector>(engine.value(), loop, address, candidates, credentials, deadline, done)->attempt();
    });
  }

 private:
  const std::shared_ptr<Engines> engines_;
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

namespace poseidon {

namespace {

/// Returns the UCX settings for a priority class. RoCE's traffic class is the DSCP and two more bits, which say that
/// ECN is understood. InfiniBand's service levels rise with the urgency.
UcxSettings settings_of(const Options& options, int priority_class) {
  if (priority_class == kNoPriorityClass) return {};
  const int dscp = traffic_class_of(options, static_cast<std::size_t>(priority_class)).dscp;
  const int service_level = std::min(7, options.priority_classes - 1 - priority_class);
  if (dscp == 0 && service_level == 0) return {};
  return {{"IB_TRAFFIC_CLASS", std::to_string(dscp << 2 | 2)}, {"IB_SL", std::to_string(service_level)}};
}

}  // namespace

Status check_ucx(const Options& options) {
  if (options.tls)
    return {ErrorCode::invalid_argument,
            "transport=ucx cannot encrypt, as tls=on asks; use transport=auto or tcp, or tls=off"};
  if (!ucx_available())
    return {ErrorCode::invalid_argument, "transport=ucx, but this build has no UCX; see docs/ucx.md"};
  return {};
}

std::unique_ptr<Transport> make_ucx_transport_for_class(const Options& options, int priority_class,
                                                        const Admission& admission) {
  return make_ucx_transport(settings_of(options, priority_class), admission);
}

}  // namespace poseidon
