// Any 64 bytes either fail to decode or are exactly what encoding the decoded header gives.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "wire/header.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace poseidon::wire;
  if (size < kHeaderBytes) return 0;
  std::array<std::byte, kHeaderBytes> bytes;
  std::memcpy(bytes.data(), data, bytes.size());
  Header header;
  const poseidon::Status status = decode(bytes, header);
  if (!status.ok()) {
    if (status.code() != poseidon::ErrorCode::mismatch || status.message().empty()) std::abort();
    return 0;
  }
  if (header.payload_bytes > kMaxPayloadBytes || header.priority >= kPriorityLevels) std::abort();
  std::array<std::byte, kHeaderBytes> again;
  encode(header, again);
  if (again != bytes) std::abort();
  return 0;
}
