// Bindings of poseidon/measure.h.
#include "poseidon/measure.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"

namespace poseidon::bindings {

void bind_measure(nb::module_& module) {
  module.def("scheduling_seconds", &scheduling_seconds, nb::arg("chunk_count"), nb::arg("layer_count"),
             nb::call_guard<nb::gil_scoped_release>(),
             "What scheduling so many chunks costs (include/poseidon/measure.h).");
  module.def("multiply_adds_per_second", &multiply_adds_per_second, nb::call_guard<nb::gil_scoped_release>(),
             "The rate of one thread that multiplies factors (include/poseidon/measure.h).");
  nb::class_<Connection>(module, "Connection", "What the kernel knows of a TCP connection.")
      .def_ro("id", &Connection::id, "That no other open socket of this machine has.")
          POSEIDON_FIELDS(Connection, own_address, peer_address, acknowledged_bytes)
      .def_ro("busy_us", &Connection::busy_us, "How long some bytes were not acknowledged yet.")
          POSEIDON_FIELDS(Connection, round_trip_us, resent_packets);
  module.def("connections", &connections, "The TCP connections that this library has in this process.");
}

}  // namespace poseidon::bindings
