#include "server/chunk_state.h"

#include <string>
#include <utility>

#include "base/clock.h"

namespace poseidon {

namespace {

Status refused(const wire::Header& header, const std::string& why) {
  return {ErrorCode::refused, "the server refuses the push of rank " + std::to_string(header.rank) + " in step " +
                                  std::to_string(header.step) + ": " + why};
}

}  // namespace

Result<std::size_t> dense_bytes(const wire::Header& header) {
  if ((header.flags & wire::kAbsent) != 0)
    return header.payload_bytes == 0 ? Result<std::size_t>(std::size_t{0})
                                     : refused(header, "it says that it is absent and has a payload");
  if (header.kind == wire::Kind::push) {
    if (header.payload_bytes % dtype_bytes(header.dtype) != 0)
      return refused(header, "its size is no multiple of an element's");
    return static_cast<std::size_t>(header.payload_bytes);
  }
  if (wire::factor_bytes(header) != header.payload_bytes)
    return refused(header, "its factors do not have the size that it says");
  if (!dtype_is_floating(header.dtype)) return refused(header, "factors have a floating dtype");
  const auto matrix = wire::matrix_bytes(header);
  if (!matrix || *matrix == 0) return refused(header, "its matrix is empty or too large");
  return static_cast<std::size_t>(*matrix);
}

Status ChunkState::add(Contribution& contribution) {
  const wire::Header& header = contribution.header;
  if (header.rank >= parts_.size() || header.worker_count != parts_.size())
    return refused(header, "it speaks of " + std::to_string(header.worker_count) + " workers, here are " +
                               std::to_string(parts_.size()));
  if (header.divisor == 0 || (header.divisor != 1 && !dtype_is_floating(header.dtype)))
    return refused(header,
                   std::string(dtype_name(header.dtype)) + " cannot be divided by " + std::to_string(header.divisor));
  auto size = dense_bytes(header);
  if (!size.ok()) return size.status();
  if (count_ > 0) {
    if (header.step != shape_.step)
      return refused(header, "the chunk is in step " + std::to_string(shape_.step) + " since rank " +
                                 std::to_string(shape_.rank) + " pushed it");
    if (parts_[header.rank]) return refused(header, "it has pushed this chunk already");
    if (header.dtype != shape_.dtype || header.divisor != shape_.divisor)
      return refused(header, "its dtype or divisor differs from rank " + std::to_string(shape_.rank) + "'s");
    if (contribution.present() && dense_bytes_ && size.value() != *dense_bytes_)
      return refused(header, "it has " + std::to_string(size.value()) + " bytes, others have " +
                                 std::to_string(*dense_bytes_) + "; the ranks' models differ");
    if (contribution.has_factors() && shape_.rows != 0 && (header.rows != shape_.rows || header.cols != shape_.cols))
      return refused(header, "its factors are of another shape than others'; the ranks' models differ");
  } else {
    started_ns_ = now_ns();
    shape_ = header;
    shape_.rows = shape_.cols = 0;
    dense_bytes_.reset();
  }
  if (contribution.present()) dense_bytes_ = size.value();
  if (contribution.has_factors()) {
    shape_.rows = header.rows;
    shape_.cols = header.cols;
  }
  shape_.payload_bytes = dense_bytes_.value_or(0);
  parts_[header.rank] = std::move(contribution);
  ++count_;
  return {};
}

std::vector<std::uint32_t> ChunkState::missing_ranks() const {
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t rank = 0; rank < parts_.size(); ++rank)
    if (!parts_[rank]) ranks.push_back(rank);
  return ranks;
}

void ChunkState::reset() {
  for (auto& part : parts_) part.reset();
  count_ = 0;
}

std::optional<Contribution> ChunkState::remove(std::uint32_t rank) {
  if (rank >= parts_.size() || !parts_[rank]) return std::nullopt;
  --count_;
  return std::exchange(parts_[rank], std::nullopt);
}

}  // namespace poseidon
