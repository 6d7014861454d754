#ifdef POSEIDON_HAVE_UCX

#include "transport/ucx/ucx_listener.h"

#include <netinet/in.h>

#include <utility>
#include <vector>

#include "transport/tcp/address.h"
#include "transport/ucx/ucx_flow.h"

namespace poseidon::ucx {

namespace {

std::string text_of(const sockaddr_storage& storage) {
  tcp::SocketAddress address;
  address.storage = storage;
  address.size_bytes = storage.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  return tcp::to_text(address);
}

}  // namespace

/// Lives on the loop, until its listener goes.
class UcxListener::Acceptor : public std::enable_shared_from_this<Acceptor> {
 public:
  Acceptor(std::shared_ptr<Worker> worker, OnAccept on_accept)
      : worker_(std::move(worker)), on_accept_(std::move(on_accept)) {}

  ~Acceptor() {
    for (const ucp_conn_request_h request : waiting_) ::ucp_listener_reject(listener_, request);
    if (listener_ != nullptr) ::ucp_listener_destroy(listener_);
  }
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  ucs_status_t bind(const tcp::SocketAddress& address) {
    ucp_listener_params_t params{};
    params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
    params.sockaddr.addr = address.get();
    params.sockaddr.addrlen = address.size_bytes;
    params.conn_handler.cb = [](ucp_conn_request_h request, void* self) {
      static_cast<Acceptor*>(self)->on_request(request);
    };
    params.conn_handler.arg = this;
    return ::ucp_listener_create(worker_->get(), &params, &listener_);
  }

  Result<std::string> address() const {
    ucp_listener_attr_t attributes{};
    attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
    if (const ucs_status_t status = ::ucp_listener_query(listener_, &attributes); status != UCS_OK) {
      return Status(ErrorCode::unreachable, "UCX does not tell the listener's address: " + ucx::text_of(status));
    }
    return text_of(attributes.sockaddr);
  }

 private:
  /// From inside UCX.
  void on_request(ucp_conn_request_h request) {
    waiting_.push_back(request);
    worker_->defer([weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->accept_all();
    });
  }

  void accept_all() {
    while (!waiting_.empty()) {
      const ucp_conn_request_h request = waiting_.back();
      waiting_.pop_back();
      ucp_conn_request_attr_t attributes{};
      attributes.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR;
      const bool known = ::ucp_conn_request_query(request, &attributes) == UCS_OK;
      auto flow = UcxFlow::accept(*worker_, known ? text_of(attributes.client_address) : std::string("unknown address"),
                                  request);
      if (flow != nullptr) on_accept_(std::move(flow));
    }
  }

  const std::shared_ptr<Worker> worker_;
  const OnAccept on_accept_;
  ucp_listener_h listener_ = nullptr;
  std::vector<ucp_conn_request_h> waiting_;
};

Result<std::unique_ptr<Listener>> UcxListener::listen(const std::shared_ptr<Worker>& worker, const std::string& address,
                                                      OnAccept on_accept) {
  const auto candidates = tcp::resolve(address);
  if (!candidates.ok()) return candidates.status().with_context("cannot listen");
  const auto acceptor = std::make_shared<Acceptor>(worker, std::move(on_accept));
  ucs_status_t status = UCS_ERR_UNREACHABLE;
  for (const tcp::SocketAddress& candidate : candidates.value()) {
    status = acceptor->bind(candidate);
    if (status == UCS_OK) break;
  }
  if (status != UCS_OK) {
    return Status(ErrorCode::unreachable,
                  "cannot listen on " + address + ": " +
                      (status == UCS_ERR_BUSY ? "Address already in use" : ucx::text_of(status)));
  }
  auto bound = acceptor->address();
  if (!bound.ok()) return bound.status().with_context("cannot listen on " + address);
  return std::unique_ptr<Listener>(new UcxListener(worker->loop(), acceptor, std::move(bound.value())));
}

UcxListener::UcxListener(Loop& loop, std::shared_ptr<Acceptor> acceptor, std::string address)
    : loop_(loop), acceptor_(std::move(acceptor)), address_(std::move(address)) {}

UcxListener::~UcxListener() {
  loop_.call([this] { acceptor_.reset(); });
}

}  // namespace poseidon::ucx

#endif  // POSEIDON_HAVE_UCX
