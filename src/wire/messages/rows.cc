#include "wire/messages/rows.h"

namespace poseidon::wire {

std::optional<std::uint64_t> RowList::payload_bytes(const Contribution& about) {
  const auto matrix_bytes = about.matrix_bytes();
  if (!matrix_bytes || about.factor_count > about.rows) return std::nullopt;
  // The rows are a part of the matrix, so their size does not overflow.
  const std::uint64_t row_bytes = about.rows == 0 ? 0 : *matrix_bytes / about.rows;
  const std::uint64_t bytes = index_bytes(about.factor_count) + about.factor_count * row_bytes;
  return bytes > kMaxPayloadBytes ? std::nullopt : std::optional(bytes);
}

Result<RowList> RowList::read(const Contribution& about, std::span<const std::byte> payload) {
  RowList list;
  list.indexes = {reinterpret_cast<const std::uint32_t*>(payload.data()), about.factor_count};
  list.values = payload.subspan(index_bytes(about.factor_count));
  if (Status status = check_indexes(list.indexes, about.rows); !status.ok()) return status;
  return list;
}

Result<TopK> TopK::read(std::span<const std::byte> payload, std::uint64_t element_count) {
  TopK list;
  list.indexes = {reinterpret_cast<const std::uint32_t*>(payload.data()), payload.size() / 8};
  list.values = payload.subspan(payload.size() / 2);
  if (Status status = check_indexes(list.indexes, element_count, "element"); !status.ok()) return status;
  return list;
}

Status check_indexes(std::span<const std::uint32_t> indexes, std::uint64_t count, const std::string& what) {
  for (std::size_t i = 0; i < indexes.size(); ++i) {
    if (indexes[i] >= count) return {ErrorCode::mismatch, concat("there is no ", what, " ", indexes[i], " of ", count)};
    if (i > 0 && indexes[i] <= indexes[i - 1])
      return {ErrorCode::mismatch, concat(what, " ", indexes[i], " comes after ", what, " ", indexes[i - 1], "; ", what,
                                          "s are in ascending order, each once")};
  }
  return {};
}

}  // namespace poseidon::wire
