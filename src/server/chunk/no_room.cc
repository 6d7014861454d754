#include "server/chunk/no_room.h"

#include <string>

namespace poseidon {

Status no_room(const BufferPool& pool, std::uint64_t size_bytes) {
  const MemoryBudget& budget = pool.budget();
  if (budget.whole() != nullptr && !budget.whole()->has_room(size_bytes))
    return {ErrorCode::refused, "another " + std::to_string(size_bytes) +
                                    " bytes would exceed server_memory of this server, " +
                                    std::to_string(budget.whole()->limit_bytes()) +
                                    " bytes; start the server with a higher server_memory or use more servers"};
  if (budget.limit_bytes() == 0)
    return {ErrorCode::refused, "the server's machine has no memory left for " + std::to_string(size_bytes) +
                                    " bytes; use more servers, or end what else needs it there"};
  return {ErrorCode::refused, "the job holds " + std::to_string(budget.used_bytes()) + " bytes on this server, and " +
                                  std::to_string(size_bytes) + " more would exceed memory_limit, " +
                                  std::to_string(budget.limit_bytes()) +
                                  " bytes; start the server with a higher memory_limit or use more servers"};
}

}  // namespace poseidon
