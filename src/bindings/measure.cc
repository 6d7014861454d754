// Bindings of poseidon/measure.h.
#include "poseidon/measure.h"

#include "bindings/bindings.h"

namespace poseidon::bindings {

void bind_measure(nb::module_& module) {
  module.def("scheduling_seconds", &scheduling_seconds, nb::arg("chunk_count"), nb::arg("layer_count"),
             nb::call_guard<nb::gil_scoped_release>(),
             "What scheduling so many chunks costs (include/poseidon/measure.h).");
  module.def("multiply_adds_per_second", &multiply_adds_per_second, nb::call_guard<nb::gil_scoped_release>(),
             "The rate of one thread that multiplies factors (include/poseidon/measure.h).");
}

}  // namespace poseidon::bindings
