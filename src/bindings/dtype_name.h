// Conversion of dtypes to and from their names and the dtypes of arrays.
#pragma once

#include <nanobind/ndarray.h>

#include <array>
#include <string>

#include "bindings/bindings.h"
#include "poseidon/dtype.h"

namespace poseidon::bindings {

inline constexpr std::array kDTypes{DType::float32, DType::float64, DType::float16, DType::bfloat16,
                                    DType::uint8,   DType::int32,   DType::int64};

inline DType refuse_dtype(const std::string& which) {
  raise_if_failed({ErrorCode::invalid_argument,
                   which + " is not supported; use float32, float64, float16, bfloat16, uint8, int32 or int64"});
  return DType::float32;
}

inline DType dtype_from(const std::string& name) {
  for (const DType dtype : kDTypes)
    if (dtype_name(dtype) == name) return dtype;
  return refuse_dtype("dtype '" + name + "'");
}

inline DType dtype_from(const nb::dlpack::dtype& dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto is = [&dtype](Code code, int bits) {
    return dtype.code == static_cast<std::uint8_t>(code) && dtype.bits == bits;
  };
  if (is(Code::Float, 32)) return DType::float32;
  if (is(Code::Float, 64)) return DType::float64;
  if (is(Code::Float, 16)) return DType::float16;
  if (is(Code::Bfloat, 16)) return DType::bfloat16;
  if (is(Code::UInt, 8)) return DType::uint8;
  if (is(Code::Int, 32)) return DType::int32;
  if (is(Code::Int, 64)) return DType::int64;
  return refuse_dtype("the dtype of the given array");
}

}  // namespace poseidon::bindings
