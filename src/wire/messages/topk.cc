#include "wire/messages/topk.h"

#include "wire/body.h"
#include "wire/messages/rows.h"

namespace poseidon::wire {

Result<TopK> TopK::read(std::span<const std::byte> payload, std::uint64_t element_count) {
  TopK list;
  list.indexes = {reinterpret_cast<const std::uint32_t*>(payload.data()), payload.size() / 8};
  list.values = payload.subspan(payload.size() / 2);
  if (Status status = check_indexes(list.indexes, element_count, "element"); !status.ok()) return status;
  return list;
}

}  // namespace poseidon::wire
