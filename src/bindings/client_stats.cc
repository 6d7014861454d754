// Bindings of what poseidon/client.h tells of exchanges.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "bindings/bindings.h"
#include "poseidon/client.h"

namespace poseidon::bindings {

void bind_client_stats(nb::module_& module) {
  nb::class_<LayerStats>(module, "LayerStats", "How a layer's last exchange went; times of time.monotonic_ns().")
      .def_prop_ro("scheme", [](const LayerStats& stats) { return std::string(scheme_name(stats.scheme)); })
          POSEIDON_FIELDS(LayerStats, step, present, factor_count, bytes_sent, bytes_received)
      .def_prop_ro("late", &LayerStats::late)
          POSEIDON_FIELDS(LayerStats, behind, update_count, oldest_version, newest_version, started_ns, completed_ns)
      .def_ro("compute_ns", &LayerStats::compute_ns, "Of these, at the end: products or sums of the parts.");
  nb::class_<LateRank>(module, "LateRank", "A rank that steps have been completed without (stragglers=drop).")
      .def_ro("rank", &LateRank::rank)
      .def_ro("late_steps", &LateRank::late_steps,
              "Steps in which at least one chunk was completed without it; of another rank at least so many.")
      .def_ro("late_chunks", &LateRank::late_chunks)
      .def_ro("last_step", &LateRank::last_step, "The last of these steps.");
  nb::class_<TrafficStats>(module, "TrafficStats", "Network bytes of this process since connect.")
      POSEIDON_FIELDS(TrafficStats, bytes_sent, bytes_received, plain_bytes_sent, plain_bytes_received);
}

}  // namespace poseidon::bindings
