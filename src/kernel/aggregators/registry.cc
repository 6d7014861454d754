// The aggregators that this process knows: the built-in ones and those that have been registered.
#include <utility>

#include "base/named_registry.h"
#include "kernel/aggregators/built_in.h"

namespace poseidon {

namespace {

Status invalid(const std::string& what) { return {ErrorCode::invalid_argument, what}; }

Aggregator for_this_cpu(const kernel::BuiltInAggregator& built_in) {
  return {built_in.name,
          [aggregate = built_in.aggregate_float32](const AggregateCall<float>& call) {
            aggregate(kernel::best_isa(), call);
          },
          [aggregate = built_in.aggregate_float64](const AggregateCall<double>& call) {
            aggregate(kernel::best_isa(), call);
          }};
}

NamedRegistry<Aggregator>& registry() {
  static NamedRegistry<Aggregator> all({for_this_cpu(kernel::median())});
  return all;
}

}  // namespace

Status check_aggregator_name(std::string_view name) {
  if (is_name(name, kMaxAggregatorNameBytes)) return {};
  return invalid(concat("aggregator '", name, "' needs a name of 1 to ", kMaxAggregatorNameBytes,
                        " lower-case letters, digits and underscores"));
}

Status register_aggregator(Aggregator aggregator) {
  if (Status status = check_aggregator_name(aggregator.name); !status.ok()) return status;
  const std::string about = "aggregator '" + aggregator.name + "' ";
  if (!aggregator.aggregate_float32 || !aggregator.aggregate_float64)
    return invalid(about + "lacks a function: aggregate_float32 and aggregate_float64 are needed");
  if (aggregator.name == kSumAggregator || !registry().add(std::move(aggregator)))
    return invalid(about + "is registered already; choose another name");
  return {};
}

const Aggregator* find_aggregator(std::string_view name) { return registry().find(name); }

std::vector<std::string> aggregator_names() {
  std::vector<std::string> names = registry().names();
  names.emplace(names.begin(), kSumAggregator);
  return names;
}

}  // namespace poseidon
