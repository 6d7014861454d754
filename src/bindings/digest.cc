// Bindings of poseidon/digest.h.
#include "poseidon/digest.h"

#include <nanobind/ndarray.h>

#include "bindings/bindings.h"

namespace poseidon::bindings {

void bind_digest(nb::module_& module) {
  module.def(
      "digest",
      [](const nb::ndarray<nb::ro, nb::device::cpu, nb::c_contig>& array) {
        const nb::gil_scoped_release unlocked;
        return digest({static_cast<const std::byte*>(array.data()), array.nbytes()});
      },
      nb::arg("array"), "A number that stands for an array's bytes (include/poseidon/digest.h).");
}

}  // namespace poseidon::bindings
