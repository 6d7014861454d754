// Bindings of poseidon/drop_rule.h.
#include "poseidon/drop_rule.h"

#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <vector>

#include "bindings/bindings.h"

namespace poseidon::bindings {

void bind_drop_rule(nb::module_& module) {
  struct Rule {
    std::uint32_t worker_count;
    DropRule rule;
  };
  nb::class_<Rule>(module, "DropRule",
                   "When servers end steps with stragglers=drop, for simulations (include/poseidon/drop_rule.h).")
      .def(
          "__init__",
          [](Rule* self, std::uint32_t worker_count, double factor) {
            if (worker_count == 0) throw std::invalid_argument("there are no workers");
            new (self) Rule{worker_count, DropRule(worker_count, factor)};
          },
          nb::arg("worker_count"), nb::arg("factor"))
      .def(
          "end_step",
          [](Rule& self, const std::vector<std::int64_t>& arrivals_ns, std::int64_t waits_until_ns) {
            if (arrivals_ns.size() != self.worker_count) throw std::invalid_argument("one arrival for each worker");
            return self.rule.end_step(arrivals_ns, waits_until_ns);
          },
          nb::arg("arrivals_ns"), nb::arg("waits_until_ns"),
          "When the next step ends; arrivals by rank. Until waits_until_ns it ends for all ranks only.");
}

}  // namespace poseidon::bindings
