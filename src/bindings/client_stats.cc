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
      .def_ro("step", &LayerStats::step)
      .def_ro("present", &LayerStats::present)
      .def_ro("factor_count", &LayerStats::factor_count)
      .def_ro("bytes_sent", &LayerStats::bytes_sent)
      .def_ro("bytes_received", &LayerStats::bytes_received)
      .def_prop_ro("late", &LayerStats::late)
      .def_ro("behind", &LayerStats::behind)
      .def_ro("update_count", &LayerStats::update_count)
      .def_ro("oldest_version", &LayerStats::oldest_version)
      .def_ro("newest_version", &LayerStats::newest_version)
      .def_ro("started_ns", &LayerStats::started_ns)
      .def_ro("completed_ns", &LayerStats::completed_ns)
      .def_ro("compute_ns", &LayerStats::compute_ns, "Of these, at the end: products or sums of the parts.");
  nb::class_<LateRank>(module, "LateRank", "A rank that steps have been completed without (stragglers=drop).")
      .def_ro("rank", &LateRank::rank)
      .def_ro("late_steps", &LateRank::late_steps,
              "Steps in which at least one chunk was completed without it; of another rank at least so many.")
      .def_ro("late_chunks", &LateRank::late_chunks)
      .def_ro("last_step", &LateRank::last_step, "The last of these steps.");
  nb::class_<TrafficStats>(module, "TrafficStats", "Network bytes of this process since connect.")
      .def_ro("bytes_sent", &TrafficStats::bytes_sent)
      .def_ro("bytes_received", &TrafficStats::bytes_received);
}

}  // namespace poseidon::bindings
