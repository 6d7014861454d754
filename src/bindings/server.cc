// Bindings of poseidon/server.h.
#include "poseidon/server.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"

namespace poseidon::bindings {

void bind_server(nb::module_& module) {
  nb::class_<JobReport>(module, "JobReport", "What a server knows of one job. Bytes are those on the network.")
      .def_ro("name", &JobReport::name)
      .def_ro("secret", &JobReport::secret, "Which secret its workers know, from 1; 0 if the server has none.")
      .def_prop_ro(
          "state", [](const JobReport& job) { return job.lost ? "lost" : "running"; },
          "running, or lost: it has no worker here, and may come back.")
          POSEIDON_FIELDS(JobReport, generation, worker_count, connected_count, bytes_received, bytes_sent,
                          plain_bytes_received, plain_bytes_sent, memory_bytes, memory_limit_bytes, open_chunk_count,
                          age_s, silent_s);
  nb::class_<ServerReport>(module, "ServerReport", "What a server knows of all its jobs.")
      POSEIDON_FIELDS(ServerReport, jobs, bytes_received, bytes_sent, plain_bytes_received, plain_bytes_sent,
                      memory_bytes, memory_limit_bytes);
  const auto without_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Server>(module, "Server", "A shard host of the parameter server, standing alone.")
      .def_static(
          "listen", [](const Options& options, std::uint16_t port) { return value_of(Server::listen(options, port)); },
          nb::arg("options"), nb::arg("port") = 0)
      .def_prop_ro("address", &Server::address)
      .def("notices", &Server::notices)
      .def("report", &Server::report, without_gil)
      .def("drain", &Server::drain)
      .def("draining", &Server::draining)
      .def("drained", &Server::drained)
      .def("evict", &Server::evict, nb::arg("job"), nb::arg("secret"), without_gil)
      .def("shutdown", &Server::shutdown, without_gil);
}

}  // namespace poseidon::bindings
