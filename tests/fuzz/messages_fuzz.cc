// Any message: the struct of its kind reads its header and payload or rejects them, and what was read comes out again
// as it went in.
//
// The input is a header and the bytes of its payload.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "wire/messages/contribution.h"
#include "wire/messages/ending.h"
#include "wire/messages/hello.h"
#include "wire/messages/life.h"
#include "wire/messages/rows.h"
#include "wire/messages/rule.h"
#include "wire/messages/sending.h"
#include "wire/messages/stored.h"
#include "wire/messages/units.h"

using namespace poseidon;

namespace {

void fuzz_rule(std::span<const std::byte> payload) {
  const auto rule = wire::Rule::read(payload);
  if (!rule.ok()) {
    if (rule.status().code() != ErrorCode::mismatch || rule.status().message().empty()) std::abort();
    return;
  }
  const auto message = rule.value().make(wire::Header{});
  const auto again = wire::Rule::read(message.payload());
  if (message.payload().size() != payload.size() || !again.ok() || !(again.value().rule == rule.value().rule))
    std::abort();
}

void fuzz_hello(const wire::Header& header, std::span<const std::byte> payload) {
  const wire::Hello hello = wire::Hello::read(header, payload);
  const auto message = hello.make();
  const wire::Hello again = wire::Hello::read(message.header, message.payload());
  if (again.rank != hello.rank || again.worker_count != hello.worker_count) std::abort();
  if (again.priority_class != hello.priority_class || again.flow != hello.flow) std::abort();
  if (again.generation != hello.generation) std::abort();
  if (hello.pace && again.pace != hello.pace) std::abort();
  if (again.run != hello.run && message.payload().size() < wire::kMaxTextBytes) std::abort();
  if (again.job != hello.job || again.other_cores.size() > hello.other_cores.size()) std::abort();
}

void fuzz_refuse(const wire::Header& header, std::span<const std::byte> payload) {
  const wire::Refuse refuse = wire::Refuse::read(header, payload);
  if (refuse.status.ok() || refuse.status.message().size() != payload.size()) std::abort();
  const auto message = refuse.make(header);
  const wire::Refuse again = wire::Refuse::read(message.header, message.payload());
  if (again.departed_rank != refuse.departed_rank || again.status.code() != refuse.status.code()) std::abort();
}

void fuzz_abort(const wire::Header& header, std::span<const std::byte> payload) {
  const wire::Abort abort = wire::Abort::read(header, payload);
  if (abort.status.ok() || abort.status.message().size() != payload.size()) std::abort();
  const auto message = abort.make();
  const wire::Abort again = wire::Abort::read(message.header, message.payload());
  if (again.planned != abort.planned || again.status.code() != abort.status.code()) std::abort();
}

/// Messages within a machine have the bodies of others.
wire::Header as(wire::Kind kind, wire::Header header) {
  header.kind = kind;
  return header;
}

/// Messages that are about no unit.
template <typename Message>
void fuzz_own(const wire::Header& header) {
  const Message message = Message::read(header);
  if (!(Message::read(message.make()) == message)) std::abort();
}

/// What is read of the header's body is made again, byte by byte.
template <typename Message>
void fuzz_body(const wire::Header& header) {
  if (Message::read(header).make(header) != header) std::abort();
}

void fuzz_contribution(const wire::Header& header) {
  const auto push = wire::Contribution::read(header);
  if (push.make() != header) std::abort();
  const auto factors = push.factor_bytes();
  const auto matrix = push.matrix_bytes();
  if ((factors && *factors > wire::kMaxPayloadBytes) || (matrix && *matrix > wire::kMaxPayloadBytes)) std::abort();
}

void fuzz_rows(const wire::Header& header, std::span<const std::byte> payload) {
  fuzz_contribution(header);
  const auto about = wire::Contribution::read(header);
  if (about.absent || about.dense || wire::RowList::payload_bytes(about) != payload.size()) return;
  std::vector<std::uint64_t> aligned(payload.size() / sizeof(std::uint64_t) + 1);
  if (!payload.empty()) std::memcpy(aligned.data(), payload.data(), payload.size());
  const auto rows = wire::RowList::read(about, std::as_bytes(std::span(aligned)).first(payload.size()));
  if (!rows.ok()) {
    if (rows.status().code() != ErrorCode::mismatch) std::abort();
    return;
  }
  if (rows.value().values.size() != std::uint64_t{about.factor_count} * about.cols * dtype_bytes(about.dtype))
    std::abort();
  for (const std::uint32_t index : rows.value().indexes)
    if (index >= about.rows) std::abort();
}

/// Reads the elements of a gradient of 1000.
void fuzz_topk(const wire::Header& header, std::span<const std::byte> payload) {
  fuzz_contribution(header);
  if (payload.size() % wire::TopK::payload_bytes(1) != 0) return;
  std::vector<std::uint32_t> aligned(payload.size() / sizeof(std::uint32_t) + 1);
  if (!payload.empty()) std::memcpy(aligned.data(), payload.data(), payload.size());
  const auto elements = wire::TopK::read(std::as_bytes(std::span(aligned)).first(payload.size()), 1000);
  if (!elements.ok()) {
    if (elements.status().code() != ErrorCode::mismatch) std::abort();
    return;
  }
  if (elements.value().values.size() != elements.value().indexes.size_bytes()) std::abort();
  for (const std::uint32_t index : elements.value().indexes)
    if (index >= 1000) std::abort();
}

void fuzz_units(std::span<const std::byte> payload) {
  const auto units = wire::StoredUnits::read(payload);
  if (!units.ok() && units.status().code() != ErrorCode::mismatch) std::abort();
}

/// A message that its receiver would take: its header has been decoded, its payload is as long as it says.
void fuzz_message(const wire::Header& header, std::span<const std::byte> payload) {
  if (payload.size() > wire::largest_payload(header.kind)) return;  // refused by its receiver
  switch (header.kind) {
    case wire::Kind::none:
      std::abort();  // it does not decode
    case wire::Kind::hello:
      return fuzz_hello(header, payload);
    case wire::Kind::push:
    case wire::Kind::factors:
    case wire::Kind::onebit:
      return fuzz_contribution(header);
    case wire::Kind::rows:
      return fuzz_rows(header, payload);
    case wire::Kind::topk:
      return fuzz_topk(header, payload);
    case wire::Kind::result:
      return fuzz_body<wire::StepResult>(header);
    case wire::Kind::refuse:
      return fuzz_refuse(header, payload);
    case wire::Kind::abort:
      return fuzz_abort(header, payload);
    case wire::Kind::goodbye:
      return;
    case wire::Kind::rule:
      return fuzz_rule(payload);
    case wire::Kind::assign:
      return fuzz_body<wire::Assign>(header);
    case wire::Kind::pull:
      return fuzz_body<wire::Pull>(header);
    case wire::Kind::value:
      return fuzz_body<wire::Value>(header);
    case wire::Kind::units:
      return fuzz_units(payload);
    case wire::Kind::restore:
      return fuzz_body<wire::Restore>(header);
    case wire::Kind::heartbeat:
      return fuzz_own<wire::Heartbeat>(header);
    case wire::Kind::rate:
      return fuzz_own<wire::Rate>(header);
    case wire::Kind::hold:
      return fuzz_own<wire::Hold>(header);
    case wire::Kind::waiting:
      if (wire::Waiting::read(payload).text.size() != payload.size()) std::abort();
      return;
    case wire::Kind::local_push:
      return fuzz_contribution(as(wire::Kind::push, header));
    case wire::Kind::local_result:
      return fuzz_body<wire::StepResult>(as(wire::Kind::result, header));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < wire::kHeaderBytes) return 0;
  const auto bytes = std::as_bytes(std::span(data, size));
  wire::Header header;
  if (wire::decode(bytes.first<wire::kHeaderBytes>(), header).ok())
    fuzz_message(header, bytes.subspan(wire::kHeaderBytes));
  return 0;
}
