#include "poseidon/plan.h"

#include <limits>
#include <map>
#include <unordered_set>
#include <utility>

#include "plan/partition.h"

namespace poseidon {
namespace {

Status invalid(std::string message) { return {ErrorCode::invalid_argument, std::move(message)}; }

/// Returns text such as "auto, ps or sfb": automatic, and the schemes for which `fits` holds.
template <typename Fits>
std::string choices(const Fits& fits) {
  std::vector<std::string_view> names{scheme_name(Scheme::automatic)};
  for (const Scheme scheme : all_schemes())
    if (fits(traits_of(scheme))) names.push_back(scheme_name(scheme));
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i)
    text.append(i == 0 ? "" : i + 1 == names.size() ? " or " : ", ").append(names[i]);
  return text;
}

Status check_cluster(const Cluster& cluster, const Options& options) {
  if (cluster.worker_count < 1 || cluster.server_count < 1) {
    return invalid("a cluster needs a worker and a server, not " + std::to_string(cluster.worker_count) + " and " +
                   std::to_string(cluster.server_count));
  }
  if (cluster.placement == Placement::colocated && cluster.server_count != cluster.worker_count) {
    return invalid("colocated servers must be one per worker, not " + std::to_string(cluster.server_count) + " for " +
                   std::to_string(cluster.worker_count) + " workers");
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
    return invalid("chunk_bytes is " + std::to_string(options.chunk_bytes) + "; it must be at least " +
                   std::to_string(kChunkAlignmentBytes));
  }
  return {};
}

/// A layer that is stored takes ps, whatever scheme it names.
Status check_compression(const Layer& layer) {
  const std::string who = "layer \"" + layer.name + "\"";
  const bool lossy = layer.scheme != Scheme::automatic && traits_of(layer.scheme).lossy && !layer.stored;
  const std::string scheme(scheme_name(layer.scheme));
  if (lossy && layer.row_gradient)
    return invalid(who + " has row gradients and scheme " + scheme + ", which takes dense gradients: use auto or rows");
  if (lossy && layer.dtype != DType::float32)
    return invalid(who + " has dtype " + std::string(dtype_name(layer.dtype)) + " and scheme " + scheme +
                   ", which takes float32 gradients: use ps for it");
  if (lossy && layer.element_count > std::numeric_limits<std::uint32_t>::max())
    return invalid(who + " has " + std::to_string(layer.element_count) + " elements and scheme " + scheme +
                   ", which takes less than 2^32: use ps for it");
  const Compression& compression = layer.compression;
  if (compression.allowed != Scheme::automatic && !traits_of(compression.allowed).lossy)
    return invalid(who + " allows the scheme " + std::string(scheme_name(compression.allowed)) +
                   ", which is not lossy; allow a lossy one, or auto");
  if (compression.factor_wire == WireFormat::int8)
    return invalid(who + " has factor_wire int8, which is too coarse for factors, because their errors multiply; use " +
                   "fp32, bf16 or fp16");
  if (compression.factor_wire.value_or(WireFormat::fp32) != WireFormat::fp32) {
    const bool refuses =
        layer.scheme != Scheme::automatic && traits_of(layer.scheme).takes_factors && !traits_of(layer.scheme).converts;
    if (refuses)
      return invalid(who + " has scheme " + scheme + ", which sends numbers as they are, and factor_wire " +
                     std::string(name_of(*compression.factor_wire)) + "; leave factor_wire out");
    if (layer.dtype == DType::float64)
      return invalid(who + " has dtype float64 and factor_wire " + std::string(name_of(*compression.factor_wire)) +
                     ", which only float32 gradients can take; leave factor_wire out");
  }
  if (compression.powersgd_rank == 0) return invalid(who + " has powersgd_rank 0; it must be at least 1");
  if (compression.rows > 0 && layer.element_count % compression.rows != 0)
    return invalid(who + " has " + std::to_string(layer.element_count) + " elements, which are no matrix of " +
                   std::to_string(compression.rows) + " rows; give a number of rows that divides them");
  if (!(compression.topk_fraction > 0 && compression.topk_fraction <= 1))
    return invalid(who + " has topk_fraction " + std::to_string(compression.topk_fraction) +
                   "; it must be above 0 and at most 1");
  return {};
}

Status check_layer(const Layer& layer, const Cluster& cluster) {
  const std::string who = "layer \"" + layer.name + "\"";
  const std::size_t element_bytes = dtype_bytes(layer.dtype);
  if (element_bytes == 0) return invalid(who + " has an unsupported dtype; use one that dtype.h names");
  if (layer.element_count > std::numeric_limits<std::ptrdiff_t>::max() / element_bytes) {
    return invalid(who + " has " + std::to_string(layer.element_count) +
                   " elements, too many for the memory of a process; divide it");
  }
  const bool has_shape = layer.rows > 0 || layer.cols > 0;
  const bool overflows = layer.cols != 0 && layer.rows > std::numeric_limits<std::size_t>::max() / layer.cols;
  if (overflows || (has_shape && layer.rows * layer.cols != layer.element_count)) {
    return invalid(who + " has " + std::to_string(layer.element_count) + " elements, which is not " +
                   std::to_string(layer.rows) + " rows x " + std::to_string(layer.cols) +
                   " columns; give its own shape, or none");
  }
  if (layer.row_gradient && (!has_shape || layer.rows > std::numeric_limits<std::uint32_t>::max())) {
    return invalid(who + " has row gradients, so it needs a shape, with less than 2^32 rows");
  }
  if (scheme_name(layer.scheme) == "unknown")
    return invalid(who + " has an unknown scheme; use one that scheme.h names");
  const bool named = layer.scheme != Scheme::automatic;
  if (layer.wire != WireFormat::fp32 && layer.dtype == DType::float64) {
    return invalid(who + " has dtype float64 and wire " + std::string(name_of(layer.wire)) +
                   ", which only float32 gradients can take: use wire fp32 for it");
  }
  if (layer.wire != WireFormat::fp32 && named && !traits_of(layer.scheme).converts) {
    return invalid(who + " has scheme " + std::string(scheme_name(layer.scheme)) +
                   ", which sends numbers as they are," + " and wire " + std::string(name_of(layer.wire)) + "; use " +
                   choices([](const SchemeTraits& traits) { return traits.converts && !traits.only_one_worker; }));
  }
  if (Status status = check_compression(layer); !status.ok()) return status;
  const bool narrow_result = layer.parameter_wire != WireFormat::fp32;
  if (narrow_result && (layer.parameter_wire != WireFormat::bf16 || !layer.stored || layer.dtype != DType::float32))
    return invalid(who + " has parameter_wire " + std::string(name_of(layer.parameter_wire)) +
                   "; it must be fp32, or bf16 for float32 parameters that servers hold");
  if (layer.float32_value && (!layer.stored || layer.dtype != DType::bfloat16))
    return invalid(who + " has a float32 value on the servers, which only stored bfloat16 layers have; leave it out");
  if (named && traits_of(layer.scheme).only_one_worker && cluster.worker_count > 1) {
    return invalid(who + " has scheme " + std::string(scheme_name(layer.scheme)) +
                   ", which sends nothing, but there are " + std::to_string(cluster.worker_count) + " workers; use " +
                   choices([](const SchemeTraits& traits) { return !traits.only_one_worker; }));
  }
  return {};
}

Status check_layers(const std::vector<Layer>& layers, const Cluster& cluster, const Options& options) {
  std::unordered_set<std::string_view> names;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].name.empty()) return invalid("layer " + std::to_string(i) + " has no name; give it one");
    if (!names.insert(layers[i].name).second)
      return invalid("two layers have the name \"" + layers[i].name + "\"; give each its own");
    if (Status status = check_layer(layers[i], cluster); !status.ok()) return status;
    const bool needs_all = layers[i].scheme != Scheme::automatic && !traits_of(layers[i].scheme).can_drop_late;
    if (needs_all && options.stragglers == Stragglers::drop) {
      return invalid("layer \"" + layers[i].name + "\" has scheme " + std::string(scheme_name(layers[i].scheme)) +
                     ", which cannot end a step without late workers; use " + choices([](const SchemeTraits& traits) {
                       return traits.can_drop_late && !traits.only_one_worker;
                     }) +
                     " with stragglers=drop");
    }
  }
  return {};
}

/// Makes layers exact that a lossy scheme does not fit, or that would go into a group: they save fewer bytes than a
/// message of their own costs.
void keep_small_exact(Layer& layer, const Options& options) {
  const Scheme lossy = layer.scheme == Scheme::automatic ? layer.compression.allowed : layer.scheme;
  const bool fits = lossy == Scheme::automatic || traits_of(lossy).fits == nullptr || traits_of(lossy).fits(layer);
  if (fits && layer.size_bytes() > options.small_bytes) return;
  layer.compression.allowed = Scheme::automatic;
  if (layer.scheme != Scheme::automatic && traits_of(layer.scheme).lossy) layer.scheme = Scheme::ps;
}

/// Returns the layer's scheme if it is the same for every factor count, and automatic otherwise.
Scheme settled_scheme(const Layer& layer, const Cluster& cluster, const Options& options) {
  if (layer.stored) return Scheme::ps;
  const bool unnamed = layer.scheme == Scheme::automatic && cluster.worker_count > 1;
  if (unnamed && options.stragglers == Stragglers::drop) return Scheme::ps;
  const bool depends = layer.factorable() || (layer.row_gradient && layer.zeros_are_missing);
  const bool open = unnamed && depends && dtype_is_floating(layer.dtype);
  return open ? Scheme::automatic : best_scheme(layer, 0, cluster);
}

/// A group costs its members a copy and the wait for each other. So only layers whose cost would be mostly message
/// overhead go into one. Factors would save such a layer fewer bytes than their messages cost.
bool goes_into_group(const Layer& layer, const Options& options) {
  if (layer.stored || layer.whole) return false;
  if (layer.size_bytes() > options.small_bytes || !dtype_is_floating(layer.dtype)) return false;
  return layer.scheme == Scheme::automatic || layer.scheme == Scheme::ps;
}

/// The type in which the numbers of a layer travel. Small layers of different magnitudes share the blocks of a group,
/// so they travel with 16 bits instead of 8. What does not leave the process travels as it is.
DType wire_dtype_of(const Layer& layer, bool grouped, const Cluster& cluster) {
  if (cluster.worker_count == 1) return layer.dtype;
  const bool too_coarse = grouped && layer.wire == WireFormat::int8;
  return wire_dtype(too_coarse ? WireFormat::bf16 : layer.wire, layer.dtype);
}

/// The type in which the factors of a layer travel, and the values of its rows.
DType factor_dtype_in(const Layer& layer, const Cluster& cluster) {
  return cluster.worker_count == 1 ? layer.dtype : factor_dtype_of(layer);
}

/// The type in which what comes back from a step travels.
DType result_dtype_of(const Layer& layer, const Unit& unit, const Cluster& cluster) {
  if (!layer.stored) return unit.wire_dtype;
  return cluster.worker_count == 1 ? layer.dtype : wire_dtype(layer.parameter_wire, layer.dtype);
}

/// Puts layers into units, in the order in which the units' last members finish.
class UnitBuilder {
 public:
  UnitBuilder(Plan& plan, const Options& options, std::uint32_t first_unit_id)
      : plan_(plan), options_(options), first_unit_id_(first_unit_id) {}

  void add(std::uint32_t index) {
    Layer& layer = plan_.layers[index];
    if (!goes_into_group(layer, options_)) {
      Unit unit;
      append(unit, index);
      unit.wire_dtype = wire_dtype_of(layer, false, plan_.cluster);
      unit.factor_dtype = factor_dtype_in(layer, plan_.cluster);
      unit.result_dtype = result_dtype_of(layer, unit, plan_.cluster);
      unit.value_dtype = layer.float32_value ? DType::float32 : layer.dtype;
      return finish(std::move(unit));
    }
    layer.scheme = Scheme::ps;
    if (layer.compression.error_feedback) layer.wire = WireFormat::fp32;  // a group keeps no residual
    const std::pair kind(layer.dtype, wire_dtype_of(layer, true, plan_.cluster));
    Unit& group = open_groups_[kind];
    append(group, index);
    group.wire_dtype = group.factor_dtype = group.result_dtype = kind.second;
    group.value_dtype = layer.dtype;
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
    unit.dtype = layer.dtype;
    unit.layers.push_back(index);
    unit.offsets_bytes.push_back(unit.size_bytes);
    unit.size_bytes += layer.size_bytes();
  }

  void finish(Unit unit) {
    unit.id = first_unit_id_ + static_cast<std::uint32_t>(plan_.units.size());
    if (unit.grouped()) {
      unit.name = "group " + std::to_string(unit.id) + " (" + std::to_string(unit.layers.size()) + " layers)";
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
  return " (" + std::string(scheme_name(lossy)) + " " + std::to_string(count_of == nullptr ? 0 : count_of(layer)) + ")";
}

std::string layer_text(const Plan& plan, std::uint32_t index) {
  const Layer& layer = plan.layers[index];
  std::string text = std::to_string(index) + " " + layer.name + "[";
  text += layer.factorable() ? std::to_string(layer.rows) + "x" + std::to_string(layer.cols)
                             : std::to_string(layer.element_count);
  return text + "] " + std::string(scheme_name(layer.scheme)) + (layer.stored ? " stored" : "") +
         (layer.whole ? " whole" : "") + (keeps_rounding(layer) ? " feedback" : "") +
         (layer.row_gradient ? " rows" : "") + (layer.zeros_are_missing ? " or dense" : "") + compression_text(layer);
}

/// Text such as " on machines 0 0 1 1", for the lines that all ranks compare.
std::string numbers_text(const char* what, const std::vector<std::uint32_t>& numbers) {
  std::string text;
  for (const std::uint32_t number : numbers) text += " " + std::to_string(number);
  return text.empty() ? text : what + text;
}

}  // namespace

DType wire_dtype(WireFormat format, DType dtype) {
  if (dtype != DType::float32) return dtype;
  switch (format) {
    case WireFormat::fp32:
      return DType::float32;
    case WireFormat::bf16:
      return DType::bfloat16;
    case WireFormat::fp16:
      return DType::float16;
    case WireFormat::int8:
      return DType::int8_blocks;
  }
  return dtype;
}

DType factor_dtype_of(const Layer& layer) {
  const std::optional<WireFormat>& own = layer.compression.factor_wire;
  const WireFormat format = own && !layer.row_gradient ? *own : layer.wire;
  return wire_dtype(format == WireFormat::int8 ? WireFormat::bf16 : format, layer.dtype);
}

Result<Plan> make_plan(std::vector<Layer> layers, const Cluster& cluster, const Options& options,
                       std::uint32_t first_unit_id) {
  if (Status status = check_cluster(cluster, options); !status.ok()) return status;
  if (Status status = check_layers(layers, cluster, options); !status.ok()) return status;
  Plan plan;
  plan.cluster = cluster;
  plan.layers = std::move(layers);
  plan.unit_of_layer.resize(plan.layers.size());
  for (Layer& layer : plan.layers) {
    keep_small_exact(layer, options);
    layer.scheme = settled_scheme(layer, cluster, options);
  }
  UnitBuilder builder(plan, options, first_unit_id);
  for (std::uint32_t index = 0; index < plan.layers.size(); ++index) builder.add(index);
  builder.finish_groups();
  assign_chunks(plan, options);
  return plan;
}

std::vector<std::string> plan_lines(const Plan& plan) {
  const bool colocated = plan.cluster.placement == Placement::colocated;
  const std::string cluster = std::to_string(plan.cluster.worker_count) + " workers, " +
                              std::to_string(plan.cluster.server_count) +
                              (colocated ? " colocated shards" : " dedicated shards");
  const std::string hosts =
      numbers_text(" on machines", plan.cluster.hosts) + numbers_text(" in racks", plan.cluster.racks);
  std::vector<std::string> lines;
  for (const Unit& unit : plan.units) {
    std::string line = "unit ";
    line += std::to_string(unit.id) + " " + unit.name + " ";
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
