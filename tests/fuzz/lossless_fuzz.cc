// Any bytes as coded values, and as values to code: the decoder reads and writes only what it was given, every
// instruction set of this CPU does the same, and what was coded comes back as it was.
//
// The first byte of the input says what the values are, the second how many are wanted.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "kernel/lossless.h"

namespace {

using namespace poseidon;
using kernel::Isa;

void check(bool holds) {
  if (!holds) std::abort();
}

struct Decoding {
  kernel::Decoded done;
  std::vector<std::byte> values;
};

Decoding decode(Coding coding, std::span<const std::byte> coded, std::size_t value_count, Isa isa) {
  Decoding decoding;
  decoding.values.resize(value_count * value_bytes(coding));
  decoding.done = kernel::decode_lossless(coding, coded, decoding.values.data(), value_count, isa);
  check(decoding.done.coded_bytes <= coded.size() && decoding.done.value_count <= value_count);
  return decoding;
}

void decode_anything(Coding coding, std::span<const std::byte> coded, std::size_t value_count) {
  const Decoding best = decode(coding, coded, value_count, kernel::best_isa());
  const Decoding baseline = decode(coding, coded, value_count, Isa::baseline);
  check(best.done.coded_bytes == baseline.done.coded_bytes && best.done.value_count == baseline.done.value_count &&
        best.done.malformed == baseline.done.malformed && best.values == baseline.values);
}

void code_anything(Coding coding, std::span<const std::byte> values) {
  const std::size_t value_count = values.size() / value_bytes(coding);
  std::vector<std::byte> coded(kernel::most_coded_bytes(coding, value_count));
  std::vector<std::byte> again(coded.size());
  const std::size_t size = kernel::encode_lossless(coding, values.data(), value_count, coded.data());
  check(size <= coded.size());
  check(kernel::encode_lossless(coding, values.data(), value_count, again.data(), Isa::baseline) == size);
  check(size == 0 || std::memcmp(coded.data(), again.data(), size) == 0);
  const Decoding back = decode(coding, std::span(coded).first(size), value_count, kernel::best_isa());
  check(back.done.coded_bytes == size && back.done.value_count == value_count && !back.done.malformed);
  check(back.values.empty() || std::memcmp(back.values.data(), values.data(), back.values.size()) == 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const auto coding = static_cast<Coding>(1 + data[0] % static_cast<int>(kLastCoding));
  const std::size_t value_count = data[1] * std::size_t{41};  // up to 40 blocks, with a rest or without
  // A copy of its own, so that a sanitizer sees a read past its end.
  std::vector<std::byte> bytes(size - 2);
  if (size > 2) std::memcpy(bytes.data(), data + 2, bytes.size());
  decode_anything(coding, bytes, value_count);
  code_anything(coding, bytes);
  return 0;
}
