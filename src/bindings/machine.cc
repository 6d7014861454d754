// Bindings of poseidon/machine.h.
#include "poseidon/machine.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "bindings/bindings.h"

namespace poseidon::bindings {

void bind_machine(nb::module_& module) {
  module.def("container_memory_bytes", &container_memory_bytes, nb::arg("root") = "",
             "The least limit of memory of the containers around this process (include/poseidon/machine.h).");
  module.def("container_processors", &container_processors, nb::arg("root") = "",
             "How many processors their least quota is, maybe with a fraction (include/poseidon/machine.h).");
}

}  // namespace poseidon::bindings
