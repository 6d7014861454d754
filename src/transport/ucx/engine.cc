#ifdef POSEIDON_HAVE_UCX

#include "transport/ucx/engine.h"

#include <sys/epoll.h>

#include <utility>

#include "transport/ucx/ucx_flow.h"

namespace poseidon::ucx {

namespace {

constexpr int kProgressBudget = 256;  // how many calls are made until the loop's other work has a turn
constexpr int kRoundBudget = 16;
constexpr int kFarewellRounds = 1000;

}  // namespace

Result<std::shared_ptr<Engine>> Engine::open(Loop& loop, std::shared_ptr<const Context> context) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SINGLE;
  ucp_worker_h handle = nullptr;
  if (const ucs_status_t status = ::ucp_worker_create(context->get(), &params, &handle); status != UCS_OK) {
    return Status(ErrorCode::unreachable, "UCX cannot create a worker: " + text_of(status));
  }
  auto engine = std::make_shared<Engine>(loop, std::move(context), handle);
  if (Status status = engine->start(); !status.ok()) return status;
  return engine;
}

Engine::Engine(Loop& loop, std::shared_ptr<const Context> context, ucp_worker_h worker)
    : loop_(loop), context_(std::move(context)), worker_(worker) {}

Engine::~Engine() {
  pumping_ = true;  // keeps a task from being posted, because the loop runs no more tasks
  std::vector<std::shared_ptr<UcxFlow>> abandoned;
  while (!flows_.empty()) abandoned.push_back(flows_.back()->abandon());
  deferred_.clear();
  // UCX uses these rounds to tell the peers that their connections have ended.
  for (int i = 0; i < kFarewellRounds && progress(); ++i) {
  }
  ::ucp_worker_destroy(worker_);
}

Status Engine::start() {
  loop_.check_thread();
  for (const auto& [id, handler] : {std::pair{kDataId, &Engine::on_data}, std::pair{kControlId, &Engine::on_control}}) {
    ucp_am_handler_param_t params{};
    params.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                        UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    params.id = id;
    params.flags = UCP_AM_FLAG_WHOLE_MSG | UCP_AM_FLAG_PERSISTENT_DATA;
    params.cb = handler;
    params.arg = this;
    if (const ucs_status_t status = ::ucp_worker_set_am_recv_handler(worker_, &params); status != UCS_OK) {
      return {ErrorCode::unreachable, "UCX takes no handler of messages: " + text_of(status)};
    }
  }
  int event_fd = -1;
  if (const ucs_status_t status = ::ucp_worker_get_efd(worker_, &event_fd); status != UCS_OK) {
    return {ErrorCode::unreachable, "UCX has no event descriptor: " + text_of(status)};
  }
  wake();
  return loop_.watch(event_fd, EPOLLIN, [self = shared_from_this()](std::uint32_t) { self->pump(); });
}

ucs_status_t Engine::create_endpoint(ucp_ep_params_t parameters, UcxFlow& flow, ucp_ep_h& endpoint) {
  loop_.check_thread();
  parameters.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  parameters.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  parameters.err_handler.cb = &Engine::on_endpoint_error;
  parameters.err_handler.arg = this;
  const ucs_status_t status = ::ucp_ep_create(worker_, &parameters, &endpoint);
  if (status == UCS_OK) endpoints_[endpoint] = &flow;
  wake();
  return status;
}

void Engine::close_endpoint(ucp_ep_h endpoint) {
  loop_.check_thread();
  endpoints_.erase(endpoint);
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t request = ::ucp_ep_close_nbx(endpoint, &params);
  if (UCS_PTR_IS_PTR(request)) ::ucp_request_free(request);
  wake();
}

void Engine::add(UcxFlow& flow) { loop_.checked(flows_).push_back(&flow); }

void Engine::remove(UcxFlow& flow) { std::erase(loop_.checked(flows_), &flow); }

void Engine::defer(std::function<void()> task) {
  loop_.check_thread();
  deferred_.push_back(std::move(task));
  wake();
}

/// Makes progress soon. UCX's event descriptor reports only what comes from outside, but what was given to UCX here may
/// need progress, too.
void Engine::wake() {
  if (pumping_ || std::exchange(wake_posted_, true)) return;
  loop_.post([weak = weak_from_this()] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    self->wake_posted_ = false;
    self->pump();
  });
}

void Engine::pump() {
  const auto self = shared_from_this();
  pumping_ = true;
  bool armed = false;
  for (int round = 0; round < kRoundBudget && !armed; ++round) {
    const bool progressed = progress();
    if (run_deferred() || progressed) continue;
    armed = ::ucp_worker_arm(worker_) == UCS_OK;
  }
  pumping_ = false;
  if (!armed) wake();
}

bool Engine::progress() {
  int count = 0;
  while (count < kProgressBudget && ::ucp_worker_progress(worker_) != 0) ++count;
  return count > 0;
}

bool Engine::run_deferred() {
  if (deferred_.empty()) return false;
  for (const auto& task : std::exchange(deferred_, {})) task();
  return true;
}

/// Returns the flow of a message. It is found by the endpoint of this side of the message's connection.
UcxFlow* Engine::find(const ucp_am_recv_param_t& param) const {
  if ((param.recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) == 0) return nullptr;
  const auto found = endpoints_.find(param.reply_ep);
  return found == endpoints_.end() ? nullptr : found->second;
}

ucs_status_t Engine::on_data(void* self, const void* header, std::size_t header_bytes, void* data,
                             std::size_t data_bytes, const ucp_am_recv_param_t* param) {
  UcxFlow* flow = static_cast<Engine*>(self)->find(*param);
  if (flow == nullptr) return UCS_OK;
  return flow->on_data({static_cast<const std::byte*>(header), header_bytes}, data, data_bytes,
                       (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0);
}

ucs_status_t Engine::on_control(void* self, const void* header, std::size_t header_bytes, void* /*data*/,
                                std::size_t /*data_bytes*/, const ucp_am_recv_param_t* param) {
  UcxFlow* flow = static_cast<Engine*>(self)->find(*param);
  if (flow != nullptr) flow->on_control({static_cast<const std::byte*>(header), header_bytes});
  return UCS_OK;
}

void Engine::on_endpoint_error(void* self, ucp_ep_h endpoint, ucs_status_t status) {
  const auto& endpoints = static_cast<Engine*>(self)->endpoints_;
  if (const auto found = endpoints.find(endpoint); found != endpoints.end()) found->second->on_error(status);
}

}  // namespace poseidon::ucx

#endif  // POSEIDON_HAVE_UCX
