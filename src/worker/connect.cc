// Client::connect: the checks of a worker's options, and its transports and store.
#include <memory>
#include <utility>

#include "poseidon/features.h"
#include "rendezvous/tcp_store.h"
#include "wire/messages/hello.h"
#include "wire/pace.h"
#include "worker/join.h"

namespace poseidon {

namespace {

Status check(const Options& options) {
  if (options.world_size < 1 || options.rank < 0 || options.rank >= options.world_size)
    return {ErrorCode::invalid_argument, concat("rank ", options.rank, " of ", options.world_size,
                                                " does not exist; RANK must be from 0 to WORLD_SIZE - 1")};
  if (!wire::is_job_name(options.job))
    return {ErrorCode::invalid_argument, concat("the name of a job must be 1 to ", wire::kMaxJobNameBytes,
                                                " bytes of UTF-8 without control characters")};
  if (Status status = FeatureSet(options).check(); !status.ok()) return status;
  if (const auto pace = wire::pace_of(options); !pace.ok()) return pace.status();
  const bool shrinks = options.on_failure == OnFailure::shrink;
  if (shrinks && (options.min_workers < 0 || options.min_workers > options.world_size))
    return {ErrorCode::invalid_argument, concat("min_workers is ", options.min_workers,
                                                ": it must be from 0 to the number of workers, ", options.world_size)};
  return {};
}

}  // namespace

Result<std::unique_ptr<Client>> Client::connect(const Options& options, std::shared_ptr<Store> store,
                                                const std::function<bool()>& keep_waiting) {
  if (Status status = check(options); !status.ok()) return status;
  auto transports = make_transports(options);
  if (!transports.ok()) return transports.status();
  if (!store) {
    auto opened = open_store(options, keep_waiting);
    if (!opened.ok()) return opened.status();
    store = std::move(opened.value());
  }
  return join_job(options, std::move(store), keep_waiting, std::move(transports.value()));
}

Result<std::shared_ptr<Store>> open_store(const Options& options, const std::function<bool()>& keep_waiting) {
  return open_tcp_store(options, keep_waiting);
}

}  // namespace poseidon
