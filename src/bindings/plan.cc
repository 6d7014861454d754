// Bindings of poseidon/plan.h.
#include "poseidon/plan.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/dtype_name.h"
#include "bindings/scheme_name.h"

namespace poseidon::bindings {

namespace {

Placement placement_from(const std::string& name) {
  if (name != "colocated" && name != "dedicated")
    raise_if_failed({ErrorCode::invalid_argument, "placement must be 'colocated' or 'dedicated', not '" + name + "'"});
  return name == "colocated" ? Placement::colocated : Placement::dedicated;
}

/// A scheme's name and its description.
struct NamedScheme : SchemeTraits {
  std::string name;
};

std::vector<NamedScheme> named_schemes() {
  std::vector<NamedScheme> all;
  for (const Scheme scheme : all_schemes()) all.push_back({traits_of(scheme), std::string(scheme_name(scheme))});
  return all;
}

void bind_schemes(nb::module_& module) {
  nb::class_<NamedScheme>(module, "SchemeTraits", "What a scheme accepts and whom it needs (scheme.h).")
      POSEIDON_FIELDS(NamedScheme, name, title, summary, takes_factors, takes_rows, workers_multiply, only_one_worker,
                      converts, lossy, uses_servers, can_drop_late, automatic, one_way_at_a_time, baseline);
  module.def("schemes", &named_schemes, "All schemes, in the order in which they are registered.");
  nb::class_<SchemeCost>(module, "SchemeCost", "Numbers per node and step, sent plus received (Poseidon Table 1).")
      POSEIDON_FIELDS(SchemeCost, worker, server, server_and_worker)
          .def("busiest", &SchemeCost::busiest, nb::arg("cluster"));
  module.def(
      "scheme_cost",
      [](const std::string& scheme, std::size_t rows, std::size_t cols, double factor_count, const Cluster& cluster) {
        return scheme_cost(concrete_scheme(scheme), rows, cols, factor_count, cluster);
      },
      nb::arg("scheme"), nb::arg("rows"), nb::arg("cols"), nb::arg("factor_count"), nb::arg("cluster"));
  module.def(
      "scheme_multiply_adds",
      [](const std::string& scheme, std::size_t rows, std::size_t cols, double factor_count, const Cluster& cluster) {
        const auto count = traits_of(concrete_scheme(scheme)).multiply_adds;
        return count == nullptr ? 0.0 : count(rows, cols, factor_count, cluster);
      },
      nb::arg("scheme"), nb::arg("rows"), nb::arg("cols"), nb::arg("factor_count"), nb::arg("cluster"),
      "Multiply-adds of the busiest process from the last part to the result.");
  module.def(
      "layer_cost",
      [](const Layer& layer, const std::string& scheme, double factor_count, const Cluster& cluster) {
        return layer_cost(layer, concrete_scheme(scheme), factor_count, cluster);
      },
      nb::arg("layer"), nb::arg("scheme"), nb::arg("factor_count"), nb::arg("cluster"));
}

}  // namespace

void bind_plan(nb::module_& module) {
  nb::class_<Cluster>(module, "Cluster", "P1 workers, P2 servers and where the servers are.")
      .def(
          "__init__",
          [](Cluster* self, int worker_count, int server_count, const std::string& placement,
             std::vector<std::uint32_t> hosts) {
            new (self) Cluster{worker_count, server_count, placement_from(placement)};
            self->hosts = std::move(hosts);
          },
          nb::arg("worker_count"), nb::arg("server_count"), nb::arg("placement") = "colocated",
          nb::arg("hosts") = std::vector<std::uint32_t>(),
          "`hosts` has the machine of each worker, if workers of one machine add up among themselves.")
          POSEIDON_FIELDS(Cluster, hosts, racks, worker_count, server_count)
      .def_prop_ro("placement", [](const Cluster& cluster) {
        return std::string(cluster.placement == Placement::colocated ? "colocated" : "dedicated");
      });
  bind_layer_rules(module);
  bind_schemes(module);
  nb::class_<Chunk>(module, "Chunk", "A slice of a unit and the shard that owns it.")
      POSEIDON_FIELDS(Chunk, index, offset_bytes, size_bytes, server, core, flow);
  nb::class_<Unit>(module, "Unit", "What is exchanged as one: a layer, or a group of small ones.")
      POSEIDON_FIELDS(Unit, id, name, size_bytes, layers, chunks)
          .def_prop_ro("dtype", [](const Unit& unit) { return std::string(dtype_name(unit.dtype)); })
          .def_prop_ro("bytes_per_value",
                       [](const Unit& unit) {
                         return (bytes_per_value(unit.wire_dtype) + bytes_per_value(unit.result_dtype)) / 2;
                       })
          .def_prop_ro("bytes_per_factor", [](const Unit& unit) { return bytes_per_value(unit.factor_dtype); })
          .def_prop_ro("grouped", &Unit::grouped);
  nb::class_<Plan>(module, "Plan", "Immutable; identical on every rank.")
      POSEIDON_FIELDS(Plan, cluster, layers, terms, units, unit_of_layer, server_bytes)
          .def("lines", &plan_lines);
  module.def(
      "best_scheme",
      [](const Layer& layer, double factor_count, const Cluster& cluster) {
        return std::string(scheme_name(best_scheme(layer, factor_count, cluster)));
      },
      nb::arg("layer"), nb::arg("factor_count"), nb::arg("cluster"));
  module.attr("MESSAGE_HEADER_BYTES") = kMessageHeaderBytes;
  module.def("priority_class", &priority_class, nb::arg("urgency"), nb::arg("threshold"), nb::arg("class_count"));
  module.def(
      "make_plan",
      [](const std::vector<Layer>& layers, const Cluster& cluster, const Options& options,
         std::uint32_t first_unit_id) { return value_of(make_plan(layers, cluster, options, first_unit_id)); },
      nb::arg("layers"), nb::arg("cluster"), nb::arg("options"), nb::arg("first_unit_id") = 0);
}

}  // namespace poseidon::bindings
