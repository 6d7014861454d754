#include "poseidon/coded_size.h"

#include <vector>

#include "base/invariant.h"
#include "kernel/lossless.h"
#include "wire/header.h"

namespace poseidon {

namespace {

std::size_t coded_bytes(Coding coding, std::span<const std::byte> values) {
  if (coding == Coding::none || values.size() % value_bytes(coding) != 0) return values.size();
  const std::size_t count = values.size() / value_bytes(coding);
  std::vector<std::byte> coded(kernel::most_coded_bytes(coding, count));
  return kernel::encode_lossless(coding, values.data(), count, coded.data());
}

}  // namespace

std::size_t coded_bytes(DType dtype, std::span<const std::byte> values) {
  return coded_bytes(wire::coding_of(dtype), values);
}

std::size_t coded_difference_bytes(DType dtype, std::span<const std::byte> values, std::span<const std::byte> base) {
  invariant(values.size() == base.size(), "a difference is between arrays of one length");
  const Coding coding = wire::coding_of(dtype);
  if (difference_of(coding) == Coding::none) return values.size();
  const std::size_t width = value_bytes(coding);
  std::vector<std::byte> differences(values.size());
  kernel::difference(values.data(), base.data(), differences.data(), values.size() / width, width);
  return coded_bytes(difference_of(coding), differences);
}

}  // namespace poseidon
