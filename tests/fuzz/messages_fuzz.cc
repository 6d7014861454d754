// Any payload of a message that has a form: hello, rule and error texts are read or rejected, and what
// was read comes out again as it went in.
//
// The first byte of the input decides what the rest is read as.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>

#include "wire/messages.h"

namespace {

using namespace poseidon;

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

void fuzz_hello(std::span<const std::byte> payload) {
  if (payload.size() > wire::kMaxTextBytes) return;  // refused by its header
  wire::Header header;
  if (payload.size() >= sizeof header.rows) std::memcpy(&header.rows, payload.data(), sizeof header.rows);
  header.chunk = ~header.rows;
  header.step = std::uint64_t{header.rows} << (payload.size() % 2);
  header.unit = header.rows % 5;
  header.cols = header.rows >> 8 & 0x7f;
  header.factor_count = payload.size() % 3 == 0 ? header.rows : 0;
  const wire::Hello hello = wire::Hello::read(header, payload);
  const auto message = hello.make();
  const wire::Hello again = wire::Hello::read(message.header, message.payload());
  if (again.priority_class != header.rows || again.flow != header.chunk) std::abort();
  if (again.generation != hello.generation || hello.generation > header.step) std::abort();
  if (hello.pace && again.pace != hello.pace) std::abort();
  if (again.run != hello.run && message.payload().size() < wire::kMaxTextBytes) std::abort();
  if (again.job != hello.job || again.other_cores.size() > hello.other_cores.size()) std::abort();
}

void fuzz_error(std::span<const std::byte> payload) {
  wire::Header header;
  header.divisor = payload.empty() ? 0 : std::to_integer<std::uint32_t>(payload.front());
  const Status status = wire::Refuse::read(header, payload).status;
  if (status.ok() || status.message().size() != payload.size()) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto payload = std::as_bytes(std::span(data, size)).subspan(1);
  if (data[0] % 3 == 0) fuzz_rule(payload);
  if (data[0] % 3 == 1) fuzz_hello(payload);
  if (data[0] % 3 == 2) fuzz_error(payload);
  return 0;
}
