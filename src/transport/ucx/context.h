// Context: UCX, initialized with one set of settings. The engines of a transport share it.
#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <string>

#include "base/pinned.h"
#include "poseidon/status.h"
#include "transport/ucx/ucx_transport.h"

namespace poseidon::ucx {

/// Returns UCX's text of the status, for example "Connection reset by remote peer".
std::string text_of(ucs_status_t status);

/// Thread-safe after `open`.
class Context : private Pinned {
 public:
  /// ErrorCode::invalid_argument: UCX rejects a setting or finds nothing to communicate over. Settings of RDMA devices
  /// (IB_…) are left out if there is no such device, or if it may not be used.
  static Result<std::shared_ptr<const Context>> open(const UcxSettings& settings);

  explicit Context(ucp_context_h context) : context_(context) {}
  ~Context() { ::ucp_cleanup(context_); }

  ucp_context_h get() const { return context_; }
  /// Whether UCX may communicate over an RDMA device.
  bool has_rdma() const;

 private:
  const ucp_context_h context_;
};

}  // namespace poseidon::ucx
