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
      .def_ro("generation", &JobReport::generation)
      .def_ro("worker_count", &JobReport::worker_count)
      .def_ro("connected_count", &JobReport::connected_count)
      .def_ro("bytes_received", &JobReport::bytes_received)
      .def_ro("bytes_sent", &JobReport::bytes_sent)
      .def_ro("memory_bytes", &JobReport::memory_bytes)
      .def_ro("memory_limit_bytes", &JobReport::memory_limit_bytes)
      .def_ro("open_chunk_count", &JobReport::open_chunk_count)
      .def_ro("age_s", &JobReport::age_s)
      .def_ro("silent_s", &JobReport::silent_s);
  nb::class_<ServerReport>(module, "ServerReport", "What a server knows of all its jobs.")
      .def_ro("jobs", &ServerReport::jobs)
      .def_ro("bytes_received", &ServerReport::bytes_received)
      .def_ro("bytes_sent", &ServerReport::bytes_sent)
      .def_ro("memory_bytes", &ServerReport::memory_bytes)
      .def_ro("memory_limit_bytes", &ServerReport::memory_limit_bytes);
  const auto without_gil = nb::call_guard<nb::gil_scoped_release>();
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
      .def("report", &Server::report, without_gil)
      .def("drain", &Server::drain)
      .def("draining", &Server::draining)
      .def("drained", &Server::drained)
      .def("evict", &Server::evict, nb::arg("job"), nb::arg("secret"), without_gil)
      .def("shutdown", &Server::shutdown, without_gil);
}

}  // namespace poseidon::bindings
