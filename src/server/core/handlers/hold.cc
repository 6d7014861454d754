// hold: the worker receives something urgent, so what is less urgent waits.
#include <algorithm>
#include <chrono>

#include "server/core/connection.h"
#include "server/core/server_core.h"
#include "wire/messages/sending.h"

namespace poseidon {

namespace {

// A worker that needs longer asks again. One that has died holds up nothing but its own results.
constexpr std::uint64_t kLongestMicroseconds = 1'000'000;

}  // namespace

Status ServerCore::Handlers::hold(ServerCore& /*core*/, Connection& from, const wire::Header& header,
                                  std::span<const std::byte> /*payload*/) {
  if (from.job == nullptr) return {ErrorCode::refused, "a hold came before the hello"};
  const std::chrono::microseconds time(std::min(wire::Hold::read(header).microseconds, kLongestMicroseconds));
  for (Connection* connection : from.job->of_rank(from.rank))
    if (connection->priority_class > from.priority_class) connection->flow().hold(time);
  return {};
}

}  // namespace poseidon
