// Bindings of poseidon/checkpoint.h.
#include "poseidon/checkpoint.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace poseidon::bindings {

void bind_checkpoint(nb::module_& module) {
  nb::class_<CheckpointListing>(module, "CheckpointListing", "One version of a job's server checkpoints.")
      .def_ro("job", &CheckpointListing::job)
      .def_ro("version", &CheckpointListing::version)
      .def_ro("run", &CheckpointListing::run)
      .def_ro("file_count", &CheckpointListing::file_count)
      .def_ro("unit_count", &CheckpointListing::unit_count)
      .def_ro("size_bytes", &CheckpointListing::size_bytes)
      .def_ro("complete", &CheckpointListing::complete)
      .def_ro("problem", &CheckpointListing::problem);
  module.attr("NO_VERSION") = kNoVersion;
  module.def(
      "list_checkpoints",
      [](const std::string& directory, bool verify) {
        auto listings =
            call_blocking([&](const std::function<bool()>&) { return poseidon::list_checkpoints(directory, verify); });
        raise_if_failed(listings.status());
        return std::move(listings.value());
      },
      nb::arg("directory"), nb::arg("verify") = false);
}

}  // namespace poseidon::bindings
