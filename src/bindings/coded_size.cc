// Bindings of poseidon/coded_size.h.
#include "poseidon/coded_size.h"

#include <nanobind/stl/string.h>

#include <string>

#include "bindings/bindings.h"
#include "bindings/dtype_name.h"

namespace poseidon::bindings {

namespace {

using ReadArray = nb::ndarray<nb::ro, nb::device::cpu, nb::c_contig>;

std::span<const std::byte> numbers(const ReadArray& array, DType dtype) {
  if (array.nbytes() % dtype_bytes(dtype) != 0)
    raise_if_failed({ErrorCode::invalid_argument,
                     "the array's bytes are no whole numbers of the given dtype; give an array of that dtype"});
  return {static_cast<const std::byte*>(array.data()), array.nbytes()};
}

}  // namespace

void bind_coded_size(nb::module_& module) {
  module.def(
      "coded_bytes",
      [](const ReadArray& array, const std::string& dtype) {
        const DType type = dtype == "int8_blocks" ? DType::int8_blocks : dtype_from(dtype);
        const auto values = numbers(array, type);
        return unlocked([&] { return coded_bytes(type, values); });
      },
      nb::arg("array"), nb::arg("dtype"),
      "The bytes of an array that is coded without loss, as numbers of `dtype` (include/poseidon/coded_size.h), or as\n"
      "'int8_blocks' (docs/wire-formats.md).");
  module.def(
      "coded_difference_bytes",
      [](const ReadArray& array, const ReadArray& base, const std::string& dtype) {
        const DType type = dtype_from(dtype);
        const auto values = numbers(array, type), from = numbers(base, type);
        if (values.size() != from.size())
          raise_if_failed({ErrorCode::invalid_argument, "the arrays have different lengths: give two of one length"});
        return unlocked([&] { return coded_difference_bytes(type, values, from); });
      },
      nb::arg("array"), nb::arg("base"), nb::arg("dtype"),
      "The same of an array that is told to somebody who has `base`.");
}

}  // namespace poseidon::bindings
