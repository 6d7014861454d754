// Context: UCX set up with one set of settings; what the engines of a transport share.
#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <string>

#include "poseidon/status.h"
#include "transport/ucx/ucx_transport.h"

namespace poseidon::ucx {

/// "Connection reset by remote peer", …
std::string text_of(ucs_status_t status);

/// Thread-safe once opened.
class Context {
 public:
  /// invalid_argument when UCX rejects a setting or finds nothing to communicate over. Settings of RDMA devices
  /// (IB_…) are left out where there is no such device, or it may not be used.
  static Result<std::shared_ptr<const Context>> open(const UcxSettings& settings);

  explicit Context(ucp_context_h context) : context_(context) {}
  ~Context() { ::ucp_cleanup(context_); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  ucp_context_h get() const { return context_; }
  /// Whether it may communicate over an RDMA device.
  bool has_rdma() const;

 private:
  const ucp_context_h context_;
};

}  // namespace poseidon::ucx
