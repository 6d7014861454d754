// Bindings of poseidon/checkpoint.h.
#include "poseidon/checkpoint.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"

namespace poseidon::bindings {

void bind_checkpoint(nb::module_& module) {
  nb::class_<CheckpointListing>(module, "CheckpointListing", "One version of a job's server checkpoints.")
      POSEIDON_FIELDS(CheckpointListing, job, version, run, file_count, unit_count, size_bytes, complete, problem);
  module.attr("NO_VERSION") = kNoVersion;
  module.def(
      "list_checkpoints",
      [](const std::string& directory, bool verify) {
        return value_of(call_blocking([&](auto&) { return poseidon::list_checkpoints(directory, verify); }));
      },
      nb::arg("directory"), nb::arg("verify") = false);
}

}  // namespace poseidon::bindings
