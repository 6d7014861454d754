// Engine: UCX on one loop. It owns what UCX calls a worker.
#pragma once

#include <ucp/api/ucp.h>

#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/pinned.h"
#include "transport/loop.h"
#include "transport/ucx/context.h"

namespace poseidon::ucx {

class UcxFlow;

/// The two ids of UCX's active messages that flows exchange.
inline constexpr unsigned kDataId = 0;
inline constexpr unsigned kControlId = 1;

/// The loop's watch of UCX's event descriptor owns the engine. So the engine ends with the loop, on the loop's thread,
/// and then closes what is still open. Only the loop thread uses it. UCX's callbacks only record what has happened.
/// Receivers and `done` functions are called afterwards, so that they may call anything.
class Engine : public std::enable_shared_from_this<Engine>, private Pinned {
 public:
  static Result<std::shared_ptr<Engine>> open(Loop& loop, std::shared_ptr<const Context> context);

  Engine(Loop& loop, std::shared_ptr<const Context> context, ucp_worker_h worker);
  ~Engine();

  Loop& loop() { return loop_; }
  ucp_worker_h get() { return worker_; }

  /// Creates an endpoint with `parameters` and with error handling. The flow owns the endpoint until it forgets it.
  ucs_status_t create_endpoint(ucp_ep_params_t parameters, UcxFlow& flow, ucp_ep_h& endpoint);
  /// Closes the endpoint at once. Current sends and receives are called back with an error, the peer's too.
  void close_endpoint(ucp_ep_h endpoint);

  /// Registers a flow that has an endpoint, or that waits for callbacks of one.
  void add(UcxFlow& flow);
  void remove(UcxFlow& flow);

  /// Runs `task` soon, outside UCX's callbacks.
  void defer(std::function<void()> task);

 private:
  Status start();
  void wake();
  void pump();
  bool progress();
  bool run_deferred();
  /// UCX tells with a message only its endpoint, so each message needs this look-up.
  UcxFlow* find(const ucp_am_recv_param_t& param) const;

  static ucs_status_t on_data(void* self, const void* header, std::size_t header_bytes, void* data,
                              std::size_t data_bytes, const ucp_am_recv_param_t* param);
  static ucs_status_t on_control(void* self, const void* header, std::size_t header_bytes, void* data,
                                 std::size_t data_bytes, const ucp_am_recv_param_t* param);
  static void on_endpoint_error(void* self, ucp_ep_h endpoint, ucs_status_t status);

  Loop& loop_;
  const std::shared_ptr<const Context> context_;
  const ucp_worker_h worker_;
  std::unordered_map<ucp_ep_h, UcxFlow*> endpoints_;
  std::vector<UcxFlow*> flows_;
  std::vector<std::function<void()>> deferred_;
  bool pumping_ = false;
  bool wake_posted_ = false;
};

}  // namespace poseidon::ucx
