// Any head of a checkpoint file, and any list of stored units, is rejected or read as it was written. Checksum and
// length are put right first: it is what they cover that has to be looked at.
//
// The first byte of the input decides what the rest is read as.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "server/checkpoint/checkpoint_format.h"
#include "wire/messages/units.h"

namespace {

using namespace poseidon;

void fuzz_head(std::vector<std::byte> bytes) {
  if (bytes.size() >= kCheckpointStartBytes + sizeof(std::uint32_t)) {
    const std::uint64_t head_bytes = bytes.size();
    std::memcpy(bytes.data() + 8, &head_bytes, sizeof head_bytes);
    const std::uint32_t checksum = crc32c(std::span<const std::byte>(bytes).first(bytes.size() - sizeof checksum));
    std::memcpy(bytes.data() + bytes.size() - sizeof checksum, &checksum, sizeof checksum);
  }
  const auto head = decode_checkpoint_head(bytes);
  if (!head.ok()) {
    if (head.status().code() != ErrorCode::mismatch || head.status().message().empty()) std::abort();
    return;
  }
  const std::string encoded = encode_checkpoint_head(head.value());
  const auto again = decode_checkpoint_head(std::as_bytes(std::span(encoded)));
  if (!again.ok() || !(again.value() == head.value())) std::abort();
  const std::string trailer = encode_checkpoint_trailer(head.value());
  if (!check_checkpoint_trailer(head.value(), std::as_bytes(std::span(trailer))).ok()) std::abort();
}

void fuzz_units(std::span<const std::byte> payload) {
  if (payload.size() > wire::kMaxTextBytes) return;  // refused by its header
  const auto units = wire::StoredUnits::read(payload);
  if (!units.ok()) {
    if (units.status().code() != ErrorCode::mismatch || units.status().message().empty()) std::abort();
    return;
  }
  std::vector<wire::StoredUnit> again;
  for (const auto& message : units.value().make(0)) {
    const auto part = wire::StoredUnits::read(message.payload());
    if (!part.ok() || part.value().run != units.value().run) std::abort();
    again.insert(again.end(), part.value().units.begin(), part.value().units.end());
  }
  if (again != units.value().units) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto bytes = std::as_bytes(std::span(data, size)).subspan(1);
  if (data[0] % 2 == 0)
    fuzz_head({bytes.begin(), bytes.end()});
  else
    fuzz_units(bytes);
  return 0;
}
