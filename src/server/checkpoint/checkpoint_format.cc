#include "server/checkpoint/checkpoint_format.h"

#include <cstring>
#include <set>
#include <utility>

#include "base/crc32c.h"
#include "wire/number_list.h"
#include "wire/update_rule.h"

namespace poseidon {

namespace {

constexpr std::uint32_t kMagic = 0x43445350;    // "PSDC" in little-endian bytes
constexpr std::uint32_t kTrailer = 0x45445350;  // "PSDE"
constexpr std::uint32_t kFormatVersion = 3;
// The name's length, dtype, size and chunk size. The rule and the name follow.
constexpr std::size_t kUnitHeadBytes = 4 + 4 + 8 + 8;
constexpr std::size_t kRecordBytes = 4 + 4 + 8 + 4 + 4;
constexpr std::size_t kChecksumBytes = 4;
constexpr std::uint32_t kMaxArrays = 1 + kMaxUpdateStates;  // the value and its rule's states

Status damaged(const std::string& why) { return {ErrorCode::mismatch, "the checkpoint file is damaged: " + why}; }

Status read_units(wire::Cursor& cursor, std::uint32_t count, CheckpointHead& head) {
  if (count > cursor.left_bytes() / (kUnitHeadBytes + wire::kUpdateRuleBytes))
    return damaged("it claims more units than it has room for");
  std::set<std::string> names;
  for (std::uint32_t i = 0; i < count; ++i) {
    CheckpointUnit& one = head.units.emplace_back();
    const auto name_bytes = cursor.number<std::uint32_t>();
    const auto dtype = cursor.number<std::uint32_t>();
    one.unit.dtype = dtype <= UINT8_MAX ? static_cast<DType>(dtype) : DType{};
    cursor.numbers(one.unit.size_bytes, one.unit.chunk_bytes);
    auto rule = wire::decode_update_rule(cursor.bytes(wire::kUpdateRuleBytes));
    one.unit.name = cursor.text(name_bytes);
    if (!cursor.ok()) return damaged("its list of units ends too early");
    if (!rule.ok()) return damaged(rule.status().message());
    one.rule = rule.value();
    if (Status status = wire::check_unit(one.unit); !status.ok()) return damaged(status.message());
    if (!names.insert(one.unit.name).second) return damaged("it has unit '" + one.unit.name + "' twice");
  }
  return {};
}

Status read_records(wire::Cursor& cursor, std::uint32_t count, CheckpointHead& head) {
  if (count > cursor.left_bytes() / kRecordBytes) return damaged("it claims more records than it has room for");
  std::set<std::pair<std::uint32_t, std::uint32_t>> chunks;
  for (std::uint32_t i = 0; i < count; ++i) {
    CheckpointRecord record;
    cursor.numbers(record.unit, record.chunk, record.update_count, record.array_count, record.checksum);
    if (record.unit >= head.units.size() || record.chunk >= head.units[record.unit].unit.chunk_count() ||
        record.array_count > kMaxArrays)
      return damaged(concat("record ", i, " belongs to no chunk"));
    if (!chunks.emplace(record.unit, record.chunk).second)
      return damaged(concat("chunk ", record.chunk, " of '", head.units[record.unit].unit.name, "' appears twice"));
    head.records.push_back(record);
  }
  return {};
}

/// Adds up the bytes of all arrays. Returns false if they are more than a file can have.
bool add_data_bytes(const CheckpointHead& head, std::uint64_t& bytes) {
  for (const CheckpointRecord& record : head.records) {
    std::uint64_t data_bytes = 0;
    if (__builtin_mul_overflow(record.array_count, head.array_bytes(record), &data_bytes) ||
        __builtin_add_overflow(bytes, data_bytes, &bytes))
      return false;
  }
  return true;
}

}  // namespace

CheckpointSizes checkpoint_sizes(const CheckpointHead& head) {
  CheckpointSizes sizes;
  sizes.head_bytes = kCheckpointStartBytes + head.job.size() + head.records.size() * kRecordBytes + kChecksumBytes;
  for (const CheckpointUnit& one : head.units)
    sizes.head_bytes += kUnitHeadBytes + wire::kUpdateRuleBytes + one.unit.name.size();
  sizes.file_bytes = sizes.head_bytes + kCheckpointTrailerBytes;
  for (const CheckpointRecord& record : head.records) sizes.file_bytes += head.data_bytes(record);
  return sizes;
}

std::string encode_checkpoint_head(const CheckpointHead& head) {
  const CheckpointSizes sizes = checkpoint_sizes(head);
  std::string bytes;
  bytes.reserve(sizes.head_bytes);
  wire::append_numbers(bytes, kMagic, kFormatVersion, sizes.head_bytes, sizes.file_bytes, head.version, head.run);
  wire::append_numbers(bytes, static_cast<std::uint32_t>(head.units.size()),
                       static_cast<std::uint32_t>(head.records.size()), static_cast<std::uint32_t>(head.job.size()),
                       std::uint32_t{0});
  bytes += head.job;
  for (const CheckpointUnit& one : head.units) {
    wire::append_numbers(bytes, static_cast<std::uint32_t>(one.unit.name.size()),
                         static_cast<std::uint32_t>(one.unit.dtype), one.unit.size_bytes, one.unit.chunk_bytes);
    const auto rule = wire::encode_update_rule(one.rule);
    bytes.append(reinterpret_cast<const char*>(rule.data()), rule.size());
    bytes += one.unit.name;
  }
  for (const CheckpointRecord& record : head.records) {
    wire::append_numbers(bytes, record.unit, record.chunk, record.update_count, record.array_count, record.checksum);
  }
  wire::append_numbers(bytes, crc32c(std::as_bytes(std::span(bytes))));
  return bytes;
}

std::string encode_checkpoint_trailer(const CheckpointHead& head) {
  std::string bytes;
  wire::append_numbers(bytes, kTrailer, static_cast<std::uint32_t>(head.records.size()),
                       checkpoint_sizes(head).file_bytes);
  return bytes;
}

Result<CheckpointSizes> decode_checkpoint_start(std::span<const std::byte> start) {
  wire::Cursor cursor(start);
  if (cursor.number<std::uint32_t>() != kMagic) return damaged("it does not begin like a checkpoint");
  if (const auto version = cursor.number<std::uint32_t>(); version != kFormatVersion)
    return Status(ErrorCode::mismatch, concat("it has format version ", version, ", this version of Poseidon reads ",
                                              kFormatVersion, "; load it with the version that wrote it"));
  CheckpointSizes sizes;
  cursor.numbers(sizes.head_bytes, sizes.file_bytes);
  if (!cursor.ok() || sizes.head_bytes < kCheckpointStartBytes + kChecksumBytes ||
      sizes.head_bytes > kMaxCheckpointHeadBytes || sizes.file_bytes < sizes.head_bytes + kCheckpointTrailerBytes)
    return damaged("its sizes are impossible");
  return sizes;
}

Result<CheckpointHead> decode_checkpoint_head(std::span<const std::byte> bytes) {
  auto sizes = decode_checkpoint_start(bytes);
  if (!sizes.ok()) return sizes.status();
  if (bytes.size() != sizes.value().head_bytes) return damaged("its head ends too early");
  const auto summed = bytes.first(bytes.size() - kChecksumBytes);
  std::uint32_t checksum = 0;
  std::memcpy(&checksum, bytes.data() + summed.size(), sizeof checksum);
  if (crc32c(summed) != checksum) return damaged("the checksum of its head is wrong");
  wire::Cursor cursor(summed);
  cursor.bytes(24);  // skips the magic, the format version and the sizes
  CheckpointHead head;
  cursor.numbers(head.version, head.run);
  const auto unit_count = cursor.number<std::uint32_t>();
  const auto record_count = cursor.number<std::uint32_t>();
  const auto job_bytes = cursor.number<std::uint32_t>();
  if (cursor.number<std::uint32_t>() != 0 || head.version > kMaxCheckpointVersion)
    return damaged("it has impossible numbers");
  head.job = cursor.text(job_bytes);
  if (!cursor.ok()) return damaged("the name of its job ends too early");
  if (Status status = read_units(cursor, unit_count, head); !status.ok()) return status;
  if (Status status = read_records(cursor, record_count, head); !status.ok()) return status;
  std::uint64_t file_bytes = sizes.value().head_bytes + kCheckpointTrailerBytes;
  if (cursor.left_bytes() != 0 || !add_data_bytes(head, file_bytes) || file_bytes != sizes.value().file_bytes)
    return damaged("its sizes do not fit its records");
  return head;
}

Status check_checkpoint_trailer(const CheckpointHead& head, std::span<const std::byte> trailer) {
  const auto expected = encode_checkpoint_trailer(head);
  if (trailer.size() != expected.size() || std::memcmp(trailer.data(), expected.data(), expected.size()) != 0)
    return damaged(concat("it does not end like a checkpoint of ", head.records.size(), " records"));
  return {};
}

}  // namespace poseidon
