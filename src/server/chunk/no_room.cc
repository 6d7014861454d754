#include "server/chunk/no_room.h"

namespace poseidon {

Status no_room(const BufferPool& pool, std::uint64_t size_bytes) {
  const MemoryBudget& budget = pool.budget();
  if (budget.whole() != nullptr && !budget.whole()->has_room(size_bytes))
    return {ErrorCode::refused, concat("another ", size_bytes, " bytes would exceed server_memory of this server, ",
                                       budget.whole()->limit_bytes(),
                                       " bytes; start the server with a higher server_memory or use more servers")};
  if (budget.limit_bytes() == 0)
    return {ErrorCode::refused, concat("the server's machine has no memory left for ", size_bytes,
                                       " bytes; use more servers, or end what else needs it there")};
  return {ErrorCode::refused, concat("the job holds ", budget.used_bytes(), " bytes on this server, and ", size_bytes,
                                     " more would exceed memory_limit, ", budget.limit_bytes(),
                                     " bytes; start the server with a higher memory_limit or use more servers")};
}

}  // namespace poseidon
