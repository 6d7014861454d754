// Arrays of frameworks, as a client's exchanges use them.
#pragma once

#include <nanobind/ndarray.h>

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "bindings/dtype_name.h"
#include "poseidon/dtype.h"

namespace poseidon::bindings {

namespace nb = nanobind;

using Array = nb::ndarray<nb::device::cpu, nb::c_contig>;

inline std::span<std::byte> bytes_of(const Array& array) {
  return {static_cast<std::byte*>(array.data()), array.nbytes()};
}

/// Arrays that are looked up once and used in many steps.
struct Arrays {
  explicit Arrays(std::vector<Array> of) : arrays(std::move(of)) {
    for (const Array& array : arrays) {
      spans.push_back(bytes_of(array));
      dtypes.push_back(dtype_from(array.dtype()));
    }
  }
  std::vector<Array> arrays;
  std::vector<std::span<std::byte>> spans;
  std::vector<DType> dtypes;
};

}  // namespace poseidon::bindings
