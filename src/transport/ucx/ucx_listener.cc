#ifdef POSEIDON_HAVE_UCX

#include "transport/ucx/ucx_listener.h"

#include <netinet/in.h>

#include <list>
#include <utility>
#include <vector>

#include "base/pinned.h"
#include "transport/entrance.h"
#include "transport/tcp/address.h"
#include "transport/ucx/ucx_flow.h"

namespace poseidon::ucx {

namespace {

tcp::SocketAddress address_of(const sockaddr_storage& storage) {
  tcp::SocketAddress address;
  address.storage = storage;
  address.size_bytes = storage.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  return address;
}

}  // namespace

/// Runs on the loop until its listener is destroyed.
class UcxListener::Acceptor : public std::enable_shared_from_this<Acceptor>, private Pinned {
 public:
  Acceptor(std::shared_ptr<Engine> engine, Admission admission, OnAccept on_accept)
      : engine_(std::move(engine)), admission_(std::move(admission)), on_accept_(std::move(on_accept)) {}

  ~Acceptor() {
    while (!pending_.empty()) close_pending(pending_.begin());
    for (const ucp_conn_request_h request : waiting_) ::ucp_listener_reject(listener_, request);
    if (listener_ != nullptr) ::ucp_listener_destroy(listener_);
  }

  ucs_status_t bind(const tcp::SocketAddress& address) {
    ucp_listener_params_t params{};
    params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
    params.sockaddr.addr = address.get();
    params.sockaddr.addrlen = address.size_bytes;
    params.conn_handler.cb = [](ucp_conn_request_h request, void* self) {
      static_cast<Acceptor*>(self)->on_request(request);
    };
    params.conn_handler.arg = this;
    return ::ucp_listener_create(engine_->get(), &params, &listener_);
  }

  Result<std::string> address() const {
    ucp_listener_attr_t attributes{};
    attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
    if (const ucs_status_t status = ::ucp_listener_query(listener_, &attributes); status != UCS_OK) {
      return Status(ErrorCode::unreachable, "UCX does not tell the listener's address: " + ucx::text_of(status));
    }
    return tcp::to_text(address_of(attributes.sockaddr));
  }

 private:
  /// A pending connection, which has not proved yet that it knows the secret.
  struct Pending {
    std::shared_ptr<UcxFlow> flow;
    std::string source;
    Loop::TimerId timer = 0;
  };
  using Place = std::list<Pending>::iterator;

  /// UCX calls this from inside its progress function.
  void on_request(ucp_conn_request_h request) {
    waiting_.push_back(request);
    engine_->defer([weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->accept_all();
    });
  }

  void accept_all() {
    for (const ucp_conn_request_h request : std::exchange(waiting_, {})) accept(request);
  }

  void accept(ucp_conn_request_h request) {
    ucp_conn_request_attr_t attributes{};
    attributes.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR;
    const bool known = ::ucp_conn_request_query(request, &attributes) == UCS_OK;
    const tcp::SocketAddress client = known ? address_of(attributes.client_address) : tcp::SocketAddress();
    const std::string source = tcp::source_of(client);
    if (const auto old = pending_to_close(pending_, source, admission_.pending_limits); old != pending_.end())
      close_pending(old);
    const Place place = pending_.insert(pending_.end(), {nullptr, source, 0});
    place->timer = engine_->loop().call_at(Clock::now() + admission_.patience, [this, place] { close_pending(place); });
    place->flow = UcxFlow::accept(*engine_, known ? tcp::to_text(client) : std::string("unknown address"), request,
                                  admission_.credentials, [this, place](const Status& status) {
                                    const auto flow = dismiss(place);
                                    if (status.ok()) on_accept_(flow);
                                  });
    if (place->flow == nullptr) dismiss(place);
  }

  std::shared_ptr<UcxFlow> dismiss(Place place) {
    const Pending pending = std::move(*place);
    pending_.erase(place);
    engine_->loop().cancel(pending.timer);
    return pending.flow;
  }

  /// Closing drops the flow's on_open, which holds a place that is no longer in the list.
  void close_pending(Place place) { dismiss(place)->close(std::chrono::milliseconds(0)); }

  const std::shared_ptr<Engine> engine_;
  const Admission admission_;
  const OnAccept on_accept_;
  ucp_listener_h listener_ = nullptr;
  std::vector<ucp_conn_request_h> waiting_;
  std::list<Pending> pending_;  // the oldest first
};

Result<std::unique_ptr<Listener>> UcxListener::listen(const std::shared_ptr<Engine>& engine, const std::string& address,
                                                      const Admission& admission, OnAccept on_accept) {
  engine->loop().check_thread();
  const auto candidates = tcp::resolve(address);
  if (!candidates.ok()) return candidates.status().with_context("cannot listen");
  const auto acceptor = std::make_shared<Acceptor>(engine, admission, std::move(on_accept));
  ucs_status_t status = UCS_ERR_UNREACHABLE;
  for (const tcp::SocketAddress& candidate : candidates.value()) {
    status = acceptor->bind(candidate);
    if (status == UCS_OK) break;
  }
  if (status != UCS_OK) {
    return Status(ErrorCode::unreachable,
                  "cannot listen on " + address + ": " +
                      (status == UCS_ERR_BUSY ? "Address already in use" : ucx::text_of(status)) +
                      "; choose another port or interface");
  }
  auto bound = acceptor->address();
  if (!bound.ok()) return bound.status().with_context("cannot listen on " + address);
  return std::unique_ptr<Listener>(new UcxListener(engine->loop(), acceptor, std::move(bound.value())));
}

UcxListener::UcxListener(Loop& loop, std::shared_ptr<Acceptor> acceptor, std::string address)
    : loop_(loop), acceptor_(std::move(acceptor)), address_(std::move(address)) {}

UcxListener::~UcxListener() {
  loop_.check_other_thread();
  loop_.call([this] { acceptor_.reset(); });
}

}  // namespace poseidon::ucx

#endif  // POSEIDON_HAVE_UCX
