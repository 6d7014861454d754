#include "poseidon/plan.h"

#include <map>
#include <unordered_set>
#include <utility>

#include "plan/layer_rules.h"
#include "plan/partition.h"

namespace poseidon {
namespace {

Status invalid(std::string message) { return {ErrorCode::invalid_argument, std::move(message)}; }

Status check_cluster(const Cluster& cluster, const Options& options) {
  if (cluster.worker_count < 1 || cluster.server_count < 1) {
    return invalid(
        concat("a cluster needs a worker and a server, not ", cluster.worker_count, " and ", cluster.server_count));
  }
  if (cluster.placement == Placement::colocated && cluster.server_count != cluster.worker_count) {
    return invalid(concat("colocated servers must be one per worker, not ", cluster.server_count, " for ",
                          cluster.worker_count, " workers"));
  }
  if (cluster.flow_count < 1 ||
      (!cluster.core_counts.empty() && cluster.core_counts.size() != static_cast<std::size_t>(cluster.server_count))) {
    return invalid("a cluster needs at least one flow, and a number of cores for each of its servers");
  }
  for (const int count : cluster.core_counts) {
    if (count < 1) return invalid("a server needs a core");
  }
  const auto count = static_cast<std::size_t>(cluster.worker_count);
  if (!cluster.hosts.empty() && cluster.hosts.size() != count)
    return invalid("a cluster must name a machine for each of its workers, or none");
  if (!cluster.racks.empty() && (cluster.hosts.empty() || cluster.racks.size() != count))
    return invalid("a cluster must name a rack and a machine for each of its workers, or no racks");
  if (options.chunk_bytes < kChunkAlignmentBytes) {
    return invalid(concat("chunk_bytes is ", options.chunk_bytes, "; it must be at least ", kChunkAlignmentBytes));
  }
  return {};
}

Status check_layers(const std::vector<Layer>& layers, const Cluster& cluster, const Options& options) {
  std::unordered_set<std::string_view> names;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].name.empty()) return invalid(concat("layer ", i, " has no name; give it one"));
    if (!names.insert(layers[i].name).second)
      return invalid("two layers have the name \"" + layers[i].name + "\"; give each its own");
    if (Status status = check_layer(layers[i], cluster, options); !status.ok()) return status;
  }
  return {};
}

/// Puts layers into units, in the order in which the units' last members finish.
class UnitBuilder {
 public:
  UnitBuilder(Plan& plan, const Options& options, std::uint32_t first_unit_id)
      : plan_(plan), options_(options), first_unit_id_(first_unit_id) {}

  void add(std::uint32_t index) {
    const LayerTerms& terms = plan_.terms[index];
    if (!terms.grouped) {
      Unit unit;
      append(unit, index);
      return finish(std::move(unit));
    }
    const std::pair kind(plan_.layers[index].dtype, terms.wire_dtype);
    Unit& group = open_groups_[kind];
    append(group, index);
    if (group.size_bytes >= options_.group_bytes) {
      finish(std::move(group));
      open_groups_.erase(kind);
    }
  }

  void finish_groups() {
    for (auto& [kind, group] : open_groups_) finish(std::move(group));
    open_groups_.clear();
  }

 private:
  void append(Unit& unit, std::uint32_t index) {
    const Layer& layer = plan_.layers[index];
    const LayerTerms& terms = plan_.terms[index];
    unit.dtype = layer.dtype;
    unit.wire_dtype = terms.wire_dtype;
    unit.factor_dtype = terms.factor_dtype;
    unit.result_dtype = terms.result_dtype;
    unit.value_dtype = terms.value_dtype;
    unit.layers.push_back(index);
    unit.offsets_bytes.push_back(unit.size_bytes);
    unit.size_bytes += layer.size_bytes();
  }

  void finish(Unit unit) {
    unit.id = first_unit_id_ + static_cast<std::uint32_t>(plan_.units.size());
    if (unit.grouped()) {
      unit.name = concat("group ", unit.id, " (", unit.layers.size(), " layers)");
      // Room for the number of contributors to each member.
      unit.size_bytes += unit.layers.size() * dtype_bytes(unit.dtype);
    } else {
      unit.name = plan_.layers[unit.layers.front()].name;
    }
    for (const std::uint32_t layer : unit.layers) {
      plan_.unit_of_layer[layer] = static_cast<std::uint32_t>(plan_.units.size());
    }
    plan_.units.push_back(std::move(unit));
  }

  Plan& plan_;
  const Options& options_;
  const std::uint32_t first_unit_id_;
  std::map<std::pair<DType, DType>, Unit> open_groups_;  // by the dtypes of the values and on the way
};

std::string compression_text(const Layer& layer) {
  const Scheme lossy = layer.scheme == Scheme::automatic ? layer.compression.allowed : layer.scheme;
  if (lossy == Scheme::automatic || !traits_of(lossy).lossy) return "";
  const auto& count_of = traits_of(lossy).count_of;
  return concat(" (", scheme_name(lossy), " ", count_of == nullptr ? 0 : count_of(layer), ")");
}

std::string layer_text(const Plan& plan, std::uint32_t index) {
  const Layer& layer = plan.layers[index];
  std::string text = concat(index, " ", layer.name, "[");
  text += layer.factorable() ? concat(layer.rows, "x", layer.cols) : std::to_string(layer.element_count);
  return text + "] " + std::string(scheme_name(layer.scheme)) + (layer.stored ? " stored" : "") +
         (layer.whole ? " whole" : "") + (keeps_rounding(layer) ? " feedback" : "") +
         (layer.row_gradient ? " rows" : "") + (layer.zeros_are_missing ? " or dense" : "") + compression_text(layer);
}

/// Text such as " on machines 0 0 1 1", for the lines that all ranks compare.
std::string numbers_text(const char* what, const std::vector<std::uint32_t>& numbers) {
  std::string text;
  for (const std::uint32_t number : numbers) text += concat(" ", number);
  return text.empty() ? text : std::string(what) + text;
}

}  // namespace

Result<Plan> make_plan(std::vector<Layer> layers, const Cluster& cluster, const Options& options,
                       std::uint32_t first_unit_id) {
  if (Status status = check_cluster(cluster, options); !status.ok()) return status;
  if (Status status = check_layers(layers, cluster, options); !status.ok()) return status;
  Plan plan;
  plan.cluster = cluster;
  plan.layers = std::move(layers);
  plan.unit_of_layer.resize(plan.layers.size());
  plan.terms.reserve(plan.layers.size());
  for (Layer& layer : plan.layers) plan.terms.push_back(settle(layer, cluster, options));
  UnitBuilder builder(plan, options, first_unit_id);
  for (std::uint32_t index = 0; index < plan.layers.size(); ++index) builder.add(index);
  builder.finish_groups();
  assign_chunks(plan, options);
  return plan;
}

std::vector<std::string> plan_lines(const Plan& plan) {
  const bool colocated = plan.cluster.placement == Placement::colocated;
  const std::string cluster = concat(plan.cluster.worker_count, " workers, ", plan.cluster.server_count,
                                     colocated ? " colocated shards" : " dedicated shards");
  const std::string hosts =
      numbers_text(" on machines", plan.cluster.hosts) + numbers_text(" in racks", plan.cluster.racks);
  std::vector<std::string> lines;
  for (const Unit& unit : plan.units) {
    std::string line = "unit ";
    line += concat(unit.id, " ", unit.name, " ");
    line += dtype_name(unit.dtype);
    if (unit.converts()) line.append(" as ").append(dtype_name(unit.wire_dtype));
    if (unit.result_dtype != unit.wire_dtype) line.append(", back as ").append(dtype_name(unit.result_dtype));
    if (unit.value_dtype != unit.dtype) line.append(", kept as ").append(dtype_name(unit.value_dtype));
    line.append(" ").append(std::to_string(unit.size_bytes)).append(" bytes; layers:");
    for (const std::uint32_t layer : unit.layers) line.append(" ").append(layer_text(plan, layer)).append(",");
    line.back() = ';';
    line += " chunks (bytes@shard):";
    for (const Chunk& chunk : unit.chunks) {
      line.append(" ").append(std::to_string(chunk.size_bytes)).append("@").append(std::to_string(chunk.server));
      if (chunk.core + chunk.flow > 0)
        line.append(".").append(std::to_string(chunk.core)).append(".").append(std::to_string(chunk.flow));
    }
    lines.push_back(line + "; " + cluster + hosts);
  }
  return lines;
}

}  // namespace poseidon
