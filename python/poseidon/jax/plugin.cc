// XLA's handlers for poseidon.jax: push and pull of one layer. It reaches the client by c_exchange.h
// alone.
//
// Neither handler blocks. A push copies the gradient out, because XLA uses its memory again, and starts the exchange.
// A pull is asynchronous: the port's thread waits for the exchange, writes the result, and completes the Future.
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "poseidon/c_exchange.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr std::size_t kTextBytes = 1024;

ffi::Future failed(const std::string& text) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ffi::Error::Internal(text));
  return future;
}

struct Layer {
  std::vector<std::byte> staging;
  std::vector<std::byte> left, right;  // factors
  bool in_flight = false;              // from its push until its result is written
};

struct PullRequest {
  std::uint32_t layer;
  void* destination;
  std::size_t size_bytes;
  ffi::Promise promise;
};

/// One client. Its thread completes pulls in the order in which they came.
class Port {
 public:
  explicit Port(const PoseidonExchange& client) : client_(client), thread_([this] { complete_pulls(); }) {}

  /// Completes what is under way, and ends the thread.
  ~Port() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  ffi::Error push(std::uint32_t layer, std::uint32_t divisor, ffi::AnyBuffer gradient) {
    return start(layer, [&](Layer& of, char* text) {
      copy(gradient, of.staging);
      return client_.start(client_.client, layer, of.staging.data(), of.staging.size(), divisor,
                           POSEIDON_NOT_FACTORABLE, text, kTextBytes);
    });
  }

  /// The gradient transpose(left) x right. Without rows this rank takes part and contributes nothing.
  ffi::Error push_factors(std::uint32_t layer, std::uint32_t divisor, ffi::AnyBuffer left, ffi::AnyBuffer right,
                          std::size_t size_bytes) {
    const auto count = static_cast<std::uint64_t>(left.dimensions()[0]);
    return start(layer, [&](Layer& of, char* text) {
      of.staging.assign(size_bytes, std::byte{});
      if (count == 0)
        return client_.start_absent(client_.client, layer, of.staging.data(), size_bytes, divisor, text, kTextBytes);
      copy(left, of.left);
      copy(right, of.right);
      return client_.start_factors(client_.client, layer, of.left.data(), of.right.data(), count, of.staging.data(),
                                   size_bytes, divisor, text, kTextBytes);
    });
  }

  PoseidonLook* find_look(std::int64_t number) const { return client_.find_look(client_.client, number); }

  ffi::Future pull(std::uint32_t layer, void* destination, std::size_t size_bytes) {
    ffi::Promise promise;
    ffi::Future future(promise);
    {
      const std::lock_guard lock(mutex_);
      if (!layers_[layer].in_flight) return failed("poseidon: a mean was pulled of a gradient that was not pushed");
      requests_.push_back({layer, destination, size_bytes, std::move(promise)});
    }
    wake_.notify_one();
    return future;
  }

 private:
  /// XLA uses the memory of its arrays again.
  static void copy(ffi::AnyBuffer from, std::vector<std::byte>& to) {
    to.resize(from.size_bytes());
    if (!to.empty()) std::memcpy(to.data(), from.untyped_data(), to.size());
  }

  /// `begin(layer, text)` starts the exchange, and returns 0 or writes why it cannot.
  template <typename Begin>
  ffi::Error start(std::uint32_t layer, const Begin& begin) {
    Layer* of = nullptr;
    {
      const std::lock_guard lock(mutex_);
      of = &layers_[layer];  // references stay valid
      if (of->in_flight)
        return ffi::Error::Internal(
            "poseidon: a gradient was pushed again before its mean was there; two steps on the same parameters run at "
            "the same time: let the second depend on what the first returns");
      of->in_flight = true;
    }
    char text[kTextBytes];
    if (begin(*of, text) == 0) return ffi::Error::Success();
    const std::lock_guard lock(mutex_);
    of->in_flight = false;
    return ffi::Error::Internal("poseidon: " + std::string(text));
  }

  void complete_pulls() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return closing_ || !requests_.empty(); });
      if (requests_.empty()) return;
      PullRequest request = std::move(requests_.front());
      requests_.pop_front();
      Layer& layer = layers_[request.layer];
      lock.unlock();
      complete(request, layer);
      lock.lock();
    }
  }

  void complete(PullRequest& request, Layer& layer) {
    char text[kTextBytes];
    const bool failed = client_.wait(client_.client, request.layer, text, kTextBytes) != 0;
    if (!failed && request.size_bytes != 0) std::memcpy(request.destination, layer.staging.data(), request.size_bytes);
    {
      const std::lock_guard lock(mutex_);
      layer.in_flight = false;  // before anything that depends on the result can push again
    }
    if (failed)
      request.promise.SetError(ffi::Error::Internal("poseidon: " + std::string(text)));
    else
      request.promise.SetAvailable();
  }

  const PoseidonExchange client_;
  std::mutex mutex_;  // guards what follows, except the staging memory of a layer in flight
  std::condition_variable wake_;
  std::unordered_map<std::uint32_t, Layer> layers_;
  std::deque<PullRequest> requests_;
  bool closing_ = false;
  std::thread thread_;
};

std::mutex ports_mutex;
std::unordered_map<std::int64_t, std::shared_ptr<Port>> ports;

std::shared_ptr<Port> port_of(std::int64_t number) {
  const std::lock_guard lock(ports_mutex);
  const auto found = ports.find(number);
  return found == ports.end() ? nullptr : found->second;
}

constexpr const char* kLeftJob =
    "poseidon: shut_down: this function was compiled for a job that this process has left; compile it again";

ffi::Error push(ffi::AnyBuffer gradient, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer> same,
                ffi::Result<ffi::AnyBuffer> token, std::int64_t port, std::int64_t layer, std::int64_t divisor) {
  const auto to = port_of(port);
  if (to == nullptr) return ffi::Error::Internal(kLeftJob);
  if (same->untyped_data() != gradient.untyped_data())
    std::memcpy(same->untyped_data(), gradient.untyped_data(), gradient.size_bytes());
  std::memset(token->untyped_data(), 0, token->size_bytes());
  return to->push(static_cast<std::uint32_t>(layer), static_cast<std::uint32_t>(divisor), gradient);
}

/// `place` is as large as the gradient. A pull writes the mean there; until then it has no value.
ffi::Error push_factors(ffi::AnyBuffer left, ffi::AnyBuffer right, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer> place,
                        ffi::Result<ffi::AnyBuffer> token, std::int64_t port, std::int64_t layer,
                        std::int64_t divisor) {
  const auto to = port_of(port);
  if (to == nullptr) return ffi::Error::Internal(kLeftJob);
  std::memset(token->untyped_data(), 0, token->size_bytes());
  return to->push_factors(static_cast<std::uint32_t>(layer), static_cast<std::uint32_t>(divisor), left, right,
                          place->size_bytes());
}

ffi::Future pull(ffi::AnyBuffer, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer> mean, ffi::Result<ffi::AnyBuffer> done,
                 std::int64_t port, std::int64_t layer) {
  const auto from = port_of(port);
  std::memset(done->untyped_data(), 0, done->size_bytes());
  if (from != nullptr) return from->pull(static_cast<std::uint32_t>(layer), mean->untyped_data(), mean->size_bytes());
  return failed(kLeftJob);
}

/// The parameters with which a call of value_and_grad begins are what they are to be.
ffi::Error look(ffi::AnyBuffer, ffi::RemainingArgs params, ffi::Result<ffi::AnyBuffer> token, std::int64_t port,
                std::int64_t number) {
  const auto of = port_of(port);
  PoseidonLook* const look = of == nullptr ? nullptr : of->find_look(number);
  if (look == nullptr) return ffi::Error::Internal(kLeftJob);
  std::memset(token->untyped_data(), 0, token->size_bytes());
  std::vector<const void*> arrays;
  std::vector<std::uint64_t> sizes_bytes;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto param = params.get<ffi::AnyBuffer>(i);
    if (!param.has_value()) return ffi::Error::Internal("poseidon: a parameter is no array");
    arrays.push_back(param->untyped_data());
    sizes_bytes.push_back(param->size_bytes());
  }
  char text[kTextBytes];
  if (poseidon_begin_step(look, arrays.data(), sizes_bytes.data(), arrays.size(), text, sizeof text) == 0)
    return ffi::Error::Success();
  return ffi::Error::Internal("poseidon: " + std::string(text));
}

ffi::Error turn(ffi::AnyBuffer value, ffi::Token, ffi::Result<ffi::AnyBuffer> same, ffi::Result<ffi::Token>,
                std::int64_t port) {
  if (port_of(port) == nullptr) return ffi::Error::Internal(kLeftJob);
  std::memcpy(same->untyped_data(), value.untyped_data(), value.size_bytes());
  return ffi::Error::Success();
}

/// The rest of what every handler of a layer takes: two results, the port's number and the layer's.
template <typename Arguments>
auto of_layer(Arguments arguments) {
  return std::move(arguments)
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Attr<std::int64_t>("port")
      .template Attr<std::int64_t>("layer");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    poseidon_push, push,
    of_layer(ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()).Attr<std::int64_t>("divisor"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    poseidon_push_factors, push_factors,
    of_layer(ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>())
        .Attr<std::int64_t>("divisor"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(poseidon_pull, pull,
                              of_layer(ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(poseidon_look, look,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::int64_t>("port")
                                  .Attr<std::int64_t>("look"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    poseidon_turn, turn,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::Token>().Ret<ffi::AnyBuffer>().Ret<ffi::Token>().Attr<std::int64_t>(
        "port"));

/// Opens a port to `client` under a number that was not used before. Returns whether the plugin knows this version of
/// the interface.
extern "C" int poseidon_open(std::int64_t number, const PoseidonExchange* client) {
  if (client->version != POSEIDON_EXCHANGE_VERSION) return 0;
  const std::lock_guard lock(ports_mutex);
  ports[number] = std::make_shared<Port>(*client);
  return 1;
}

/// Closes a port when its pulls are complete. Its client must live until then.
extern "C" void poseidon_close(std::int64_t number) {
  std::shared_ptr<Port> closing;
  {
    const std::lock_guard lock(ports_mutex);
    if (const auto found = ports.find(number); found != ports.end()) {
      closing = std::move(found->second);
      ports.erase(found);
    }
  }
}
