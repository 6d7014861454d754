// Bindings of poseidon/server.h.
#include "poseidon/server.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"

namespace poseidon::bindings {

void bind_server(nb::module_& module) {
  nb::class_<Server>(module, "Server", "A shard host of the parameter server, standing alone.")
      .def_static(
          "listen",
          [](const Options& options, std::uint16_t port) {
            auto server = Server::listen(options, port);
            raise_if_failed(server.status());
            return std::move(server.value());
          },
          nb::arg("options"), nb::arg("port") = 0)
      .def_prop_ro("address", &Server::address)
      .def("notices", &Server::notices)
      .def("shutdown", &Server::shutdown, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace poseidon::bindings
