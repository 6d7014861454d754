#include "plan/layer_rules.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace poseidon {
namespace {

bool is_lossy(Scheme scheme) { return scheme != Scheme::automatic && traits_of(scheme).lossy; }
bool takes_rows(Scheme scheme) { return scheme != Scheme::automatic && traits_of(scheme).takes_rows; }
bool takes_factors(Scheme scheme) { return scheme != Scheme::automatic && traits_of(scheme).takes_factors; }

bool has_factors(const Layer& layer) { return layer.factorable() && dtype_is_floating(layer.dtype); }
bool has_rows(const Layer& layer) { return layer.row_gradient && dtype_is_floating(layer.dtype); }

/// The lossy scheme that a layer names, or may take beside the exact ones; otherwise automatic.
Scheme lossy_scheme_of(const Layer& layer) {
  const Scheme scheme = layer.scheme == Scheme::automatic ? layer.compression.allowed : layer.scheme;
  return is_lossy(scheme) ? scheme : Scheme::automatic;
}

bool fits(Scheme scheme, const Layer& layer) {
  const auto& fits = traits_of(scheme).fits;
  return fits == nullptr || fits(layer);
}

/// Whether a message of its own would cost a layer more than anything that makes it smaller could save.
bool is_small(const Layer& layer, const Options& options) { return layer.size_bytes() <= options.small_bytes; }

/// The option because of which ranks may be at different steps, as users write it.
std::string drift_option(const Options& options) {
  if (options.stragglers == Stragglers::drop) return "stragglers=drop";
  return "consistency=" + std::string(name_of(options.consistency));
}

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

/// Refuses what a layer cannot do. Messages call it by its facts, if there are any.
class Check {
 public:
  Check(const Layer& layer, const LayerFacts* facts = nullptr) : layer_(layer), facts_(facts) {}

  Status all(const Options& options) const {
    for (const auto check : {&Check::shape, &Check::wire, &Check::lossy, &Check::compression, &Check::stored})
      if (Status status = (this->*check)(); !status.ok()) return status;
    return drift(options);
  }

  Status refuse(const std::string& why) const { return {ErrorCode::invalid_argument, who() + " " + why}; }

 private:
  std::string who() const {
    return facts_ == nullptr || facts_->who.empty() ? "layer \"" + layer_.name + "\"" : facts_->who;
  }
  std::string dtype() const {
    return facts_ == nullptr || facts_->dtype_text.empty() ? std::string(dtype_name(layer_.dtype)) : facts_->dtype_text;
  }
  std::string scheme() const { return std::string(scheme_name(layer_.scheme)); }
  bool named() const { return layer_.scheme != Scheme::automatic; }

  Status shape() const {
    const std::size_t element_bytes = dtype_bytes(layer_.dtype), count = layer_.element_count;
    if (element_bytes == 0) return refuse("has an unsupported dtype; use one that dtype.h names");
    if (count > std::numeric_limits<std::ptrdiff_t>::max() / element_bytes)
      return refuse(concat("has ", count, " elements, too many for the memory of a process; divide it"));
    const std::size_t rows = layer_.rows, cols = layer_.cols;
    const bool has_shape = rows > 0 || cols > 0;
    const bool overflows = cols != 0 && rows > std::numeric_limits<std::size_t>::max() / cols;
    if (overflows || (has_shape && rows * cols != count))
      return refuse(concat("has ", count, " elements, which is not ", rows, " rows x ", cols,
                           " columns; give its own shape, or none"));
    if (layer_.row_gradient && (!has_shape || rows > std::numeric_limits<std::uint32_t>::max()))
      return refuse("has row gradients, so it needs a shape, with less than 2^32 rows");
    if (scheme_name(layer_.scheme) == "unknown") return refuse("has an unknown scheme; use one that scheme.h names");
    return {};
  }

  Status wire() const {
    if (layer_.wire == WireFormat::fp32) return {};
    const std::string wire = "wire " + std::string(name_of(layer_.wire));
    if (layer_.dtype == DType::float64)
      return refuse("has dtype " + dtype() + " and " + wire +
                    ", which only float32 gradients can take: use wire fp32 for it");
    if (named() && !traits_of(layer_.scheme).converts)
      return refuse("has scheme " + scheme() + ", which sends numbers as they are, and " + wire +
                    ": use wire fp32 for it, or scheme " +
                    choices([](const SchemeTraits& traits) { return traits.converts && !traits.only_one_worker; }));
    return {};
  }

  Status lossy() const {
    if (!is_lossy(layer_.scheme) || layer_.stored) return {};  // a stored layer takes ps, whatever scheme it names
    if (layer_.row_gradient)
      return refuse("has row gradients and scheme " + scheme() + ", which takes dense gradients: use auto or rows");
    if (layer_.dtype != DType::float32)
      return refuse("has dtype " + dtype() + " and scheme " + scheme() +
                    ", which takes float32 gradients: use scheme ps for it");
    if (layer_.element_count > std::numeric_limits<std::uint32_t>::max())
      return refuse(concat("has ", layer_.element_count, " elements and scheme ", scheme(),
                           ", which takes less than 2^32: use scheme ps for it"));
    return {};
  }

  Status compression() const {
    const Compression& compression = layer_.compression;
    if (compression.allowed != Scheme::automatic && !traits_of(compression.allowed).lossy)
      return refuse("allows the scheme " + std::string(scheme_name(compression.allowed)) +
                    ", which is not lossy; allow a lossy one, or auto");
    if (Status status = factor_wire(compression.factor_wire.value_or(WireFormat::fp32)); !status.ok()) return status;
    if (compression.powersgd_rank == 0) return refuse("has powersgd_rank 0; it must be at least 1");
    if (compression.rows > 0 && layer_.element_count % compression.rows != 0)
      return refuse(concat("has ", layer_.element_count, " elements, which are no matrix of ", compression.rows,
                           " rows; give a number of rows that divides them"));
    if (!(compression.topk_fraction > 0 && compression.topk_fraction <= 1))
      return refuse(concat("has topk_fraction ", compression.topk_fraction, "; it must be above 0 and at most 1"));
    return {};
  }

  Status factor_wire(WireFormat format) const {
    if (format == WireFormat::fp32) return {};
    const std::string wire = "factor_wire " + std::string(name_of(format));
    const std::string remedy = ": use scheme ps for it, or leave factor_wire out";
    if (format == WireFormat::int8)
      return refuse("has " + wire +
                    ", which is too coarse for factors, because their errors multiply; use fp32, bf16 or fp16");
    if (takes_factors(layer_.scheme) && !traits_of(layer_.scheme).converts)
      return refuse("has scheme " + scheme() + ", which sends numbers as they are, and " + wire + remedy);
    if (layer_.dtype == DType::float64)
      return refuse("has dtype " + dtype() + " and " + wire + ", which only float32 gradients can take" + remedy);
    return {};
  }

  Status stored() const {
    const bool narrow_result = layer_.parameter_wire != WireFormat::fp32;
    const bool may_be_narrow =
        layer_.parameter_wire == WireFormat::bf16 && layer_.stored && layer_.dtype == DType::float32;
    if (narrow_result && !may_be_narrow)
      return refuse("has parameter_wire " + std::string(name_of(layer_.parameter_wire)) +
                    "; it must be fp32, or bf16 for float32 parameters that servers hold");
    if (layer_.float32_value && (!layer_.stored || layer_.dtype != DType::bfloat16))
      return refuse("has a float32 value on the servers, which only stored bfloat16 layers have; leave it out");
    return {};
  }

  Status drift(const Options& options) const {
    if (!ranks_drift(options)) return {};
    if (keeps_rounding(layer_))
      return refuse(concat("has wire ", name_of(layer_.wire), " with error_feedback, which ", drift_option(options),
                           " excludes, because servers may leave out what was sent: leave one of ", "the two out"));
    if (!named() || traits_of(layer_.scheme).can_drop_late) return {};
    return refuse("has scheme " + scheme() + ", in which every worker waits for all others, late workers too; use " +
                  choices([](const SchemeTraits& traits) { return traits.can_drop_late && !traits.only_one_worker; }) +
                  " with " + drift_option(options));
  }

  const Layer& layer_;
  const LayerFacts* facts_;
};

// Schemes.

/// Whether `auto` may choose this scheme for a dense gradient, which may have factors.
bool may_choose(const Layer& layer, Scheme scheme, bool with_factors, const Cluster& cluster) {
  const SchemeTraits& traits = traits_of(scheme);
  if (traits.lossy)
    return scheme == layer.compression.allowed && layer.dtype == DType::float32 && layer.wire == WireFormat::fp32 &&
           fits(scheme, layer);
  if (traits.one_way_at_a_time && cluster.placement == Placement::dedicated) return false;
  return traits.automatic && !traits.takes_rows && (with_factors || !traits.takes_factors);
}

/// Whether `auto` may choose this scheme for the layer, whose gradient has rows. An unknown `row_count` is 0.
bool may_take_rows(const Layer& layer, Scheme scheme, double row_count) {
  const SchemeTraits& traits = traits_of(scheme);
  if (!traits.automatic || traits.takes_factors) return false;
  return traits.takes_rows ? !layer.zeros_are_missing || row_count > 0 : layer.zeros_are_missing;
}

SchemeSet only(Scheme scheme) {
  SchemeSet set;
  set.add(scheme);
  return set;
}

template <typename May>
SchemeSet those(const May& may) {
  SchemeSet set;
  for (const Scheme scheme : all_schemes())
    if (may(scheme)) set.add(scheme);
  return set;
}

/// Makes a layer exact that a lossy scheme does not fit, or that is small.
void keep_small_exact(Layer& layer, const Options& options) {
  const Scheme lossy = lossy_scheme_of(layer);
  if ((lossy == Scheme::automatic || fits(lossy, layer)) && !is_small(layer, options)) return;
  layer.compression.allowed = Scheme::automatic;
  if (is_lossy(layer.scheme)) layer.scheme = Scheme::ps;
}

/// Returns the layer's scheme if it is the same for every factor count, and automatic otherwise.
Scheme scheme_for_all_counts(const Layer& layer, const Cluster& cluster, const Options& options) {
  if (layer.stored) return Scheme::ps;
  const bool unnamed = layer.scheme == Scheme::automatic && cluster.worker_count > 1;
  if (unnamed && ranks_drift(options)) return Scheme::ps;
  const bool depends = layer.factorable() || (layer.row_gradient && layer.zeros_are_missing);
  const bool open = unnamed && depends && dtype_is_floating(layer.dtype);
  return open ? Scheme::automatic : best_scheme(layer, 0, cluster);
}

/// A group costs its members a copy and the wait for each other. So only layers whose cost would be mostly message
/// overhead go into one. Factors would save such a layer fewer bytes than their messages cost.
bool goes_into_group(const Layer& layer, const Options& options) {
  if (layer.stored || layer.whole) return false;
  if (!is_small(layer, options) || !dtype_is_floating(layer.dtype)) return false;
  return layer.scheme == Scheme::automatic || layer.scheme == Scheme::ps;
}

/// The schemes that the exchanges of a settled layer may take.
SchemeSet schemes_of(const Layer& layer, const Cluster& cluster) {
  SchemeSet schemes = schemes_at(layer, 1, cluster);  // those that need a count are among them
  if (chooses_exact(layer, Scheme::ps)) schemes.add(Scheme::ps);
  return schemes;
}

// Types.

/// Small layers of different magnitudes share the blocks of a group, so they travel with 16 bits instead of 8. What
/// does not leave the process travels as it is.
void set_types(LayerTerms& terms, const Layer& layer, const Cluster& cluster) {
  const bool leaves = cluster.worker_count > 1;
  const bool too_coarse = terms.grouped && layer.wire == WireFormat::int8;
  const DType as_it_is = layer.dtype;
  terms.wire_dtype = leaves ? wire_dtype(too_coarse ? WireFormat::bf16 : layer.wire, layer.dtype) : as_it_is;
  terms.factor_dtype = terms.grouped ? terms.wire_dtype : leaves ? factor_dtype_of(layer) : as_it_is;
  terms.result_dtype = !layer.stored ? terms.wire_dtype
                       : leaves      ? wire_dtype(layer.parameter_wire, as_it_is)
                                     : as_it_is;
  terms.value_dtype = layer.float32_value ? DType::float32 : as_it_is;
}

// Reasons.

/// The text for each scheme, or each option, which must live as long as the program.
std::string_view unfit_for(Scheme scheme) {
  static const auto texts = [] {
    std::vector<std::string> all{""};
    for (const Scheme one : all_schemes())
      all.push_back("too small for " + std::string(scheme_name(one)) + ", or no matrix");
    return all;
  }();
  return texts[static_cast<std::size_t>(scheme)];
}

std::string_view drift_reason(const Options& options) {
  if (options.stragglers == Stragglers::drop) return "stragglers=drop: servers complete the steps";
  return options.consistency == Consistency::ssp ? "consistency=ssp: servers complete the steps"
                                                 : "consistency=async: servers complete the steps";
}

/// Why a layer that asked for `asked` has these terms, if that is decided for good.
std::string_view reason_of(const Layer& layer, Scheme asked, const LayerTerms& terms, const Options& options) {
  if (layer.stored) return "updated by the servers";
  if (layer.row_gradient && !terms.grouped) return {};
  if (is_lossy(asked) && !is_lossy(layer.scheme)) return unfit_for(asked);
  if (lossy_scheme_of(layer) != Scheme::automatic) return {};
  if (!layer.factorable()) return "its gradient is no sum of factors";
  if (ranks_drift(options)) return drift_reason(options);
  if (asked != Scheme::automatic) return "chosen by the user";
  return terms.grouped ? "so small that it travels with others" : std::string_view();
}

/// Makes a layer one that servers hold and update, from dense gradients.
void store(Layer& layer, const LayerWishes& wishes) {
  layer.stored = true;
  layer.scheme = Scheme::ps;
  layer.rows = layer.cols = 0;
  layer.row_gradient = layer.zeros_are_missing = false;
  if (layer.dtype == DType::float32) layer.parameter_wire = wishes.parameter_wire;
  layer.float32_value = wishes.float32_value && layer.dtype == DType::bfloat16;
}

}  // namespace

std::vector<Scheme> SchemeSet::list() const {
  std::vector<Scheme> schemes;
  for (const Scheme scheme : all_schemes())
    if (contains(scheme)) schemes.push_back(scheme);
  return schemes;
}

bool ranks_drift(const Options& options) {
  return options.stragglers == Stragglers::drop || options.consistency != Consistency::bsp;
}

Result<Layer> wished_layer(const LayerFacts& facts, const LayerWishes& wishes, const Options& options) {
  const bool sparse = facts.gives_rows == RowGradient::sparse;
  const bool is_float = facts.dtype == DType::float32;
  Layer layer{facts.name, facts.dtype, facts.element_count, 0, 0, wishes.scheme, false, facts.whole};
  if (sparse && is_lossy(layer.scheme)) layer.scheme = Scheme::automatic;  // its rows are few already
  const bool asks_rows = takes_rows(layer.scheme);
  const bool large = !is_small(layer, options) && wishes.lossy == Scheme::automatic;
  const bool by_rows = facts.gives_rows != RowGradient::none && options.stragglers != Stragglers::drop &&
                       (asks_rows || (layer.scheme == Scheme::automatic && (sparse || large)));
  const bool may_have_factors = layer.scheme == Scheme::automatic || takes_factors(layer.scheme);
  const bool factors = facts.gives_factors && (may_have_factors || !wishes.settles);
  if (layer.scheme != Scheme::automatic && !is_lossy(layer.scheme) && !by_rows && !factors) layer.scheme = Scheme::ps;
  if (facts.rows > 0 && (factors || by_rows)) {
    layer.rows = facts.rows;
    layer.cols = facts.element_count / facts.rows;
  }
  layer.row_gradient = by_rows;
  layer.zeros_are_missing = by_rows && !sparse;

  const bool may_lose = layer.scheme == Scheme::automatic && !sparse && is_float;
  layer.wire = may_lose && wishes.lossy_wire && !wishes.wire_is_given ? *wishes.lossy_wire : wishes.wire;
  if (wishes.wire_if_float && !is_float) layer.wire = WireFormat::fp32;
  layer.compression = {may_lose ? wishes.lossy : Scheme::automatic,
                       wishes.topk_fraction,
                       wishes.powersgd_rank,
                       sparse ? 0 : facts.rows,
                       factors && may_have_factors ? wishes.factor_wire : std::nullopt,
                       wishes.error_feedback && !sparse};
  const Check check(layer, &facts);
  if (Status status = check.all(options); !status.ok()) return status;
  if (layer.compression.allowed != Scheme::automatic && layer.wire != WireFormat::fp32)
    return check.refuse("has lossy " + std::string(scheme_name(layer.compression.allowed)) +
                        ", which sends numbers as they are, and wire " + std::string(name_of(layer.wire)) +
                        ": leave one of the two out");
  if (layer.scheme == Scheme::automatic) layer.scheme = wishes.settled;
  // All rows, a count of ranks for each, and one more: they cannot share the scale of a block.
  if (sparse && !by_rows) {
    layer.element_count += facts.rows + 1;
    if (layer.wire == WireFormat::int8) layer.wire = WireFormat::bf16;
  }
  if (facts.stored) store(layer, wishes);
  return layer;
}

Status check_layer(const Layer& layer, const Cluster& cluster, const Options& options) {
  const Check check(layer);
  if (Status status = check.all(options); !status.ok()) return status;
  if (layer.scheme == Scheme::automatic || !traits_of(layer.scheme).only_one_worker || cluster.worker_count == 1)
    return {};
  return check.refuse(concat("has scheme ", scheme_name(layer.scheme), ", which sends nothing, but there are ",
                             cluster.worker_count, " workers; use ",
                             choices([](const SchemeTraits& traits) { return !traits.only_one_worker; })));
}

LayerTerms settle(Layer& layer, const Cluster& cluster, const Options& options) {
  const Scheme asked = layer.scheme;
  keep_small_exact(layer, options);
  layer.scheme = scheme_for_all_counts(layer, cluster, options);
  LayerTerms terms;
  terms.grouped = goes_into_group(layer, options);
  if (terms.grouped) {
    layer.scheme = Scheme::ps;
    if (layer.compression.error_feedback) layer.wire = WireFormat::fp32;  // a group keeps no residual
  }
  terms.scheme = layer.scheme;
  terms.schemes = schemes_of(layer, cluster);
  set_types(terms, layer, cluster);
  terms.keeps_rounding = keeps_rounding(layer);
  terms.kept_count = kept_count(layer);
  terms.reason = reason_of(layer, asked, terms, options);
  return terms;
}

Result<LayerTerms> layer_terms(Layer layer, const Cluster& cluster, const Options& options) {
  if (Status status = check_layer(layer, cluster, options); !status.ok()) return status;
  return settle(layer, cluster, options);
}

Scheme settled_scheme(const Layer& layer, std::span<const std::int64_t> counts, const Cluster& cluster,
                      const Options& options) {
  const bool all_have = std::ranges::all_of(counts, [](std::int64_t count) { return count > 0; });
  if (counts.empty() || !all_have || is_small(layer, options)) return Scheme::ps;
  const double sum = static_cast<double>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
  return best_scheme(layer, sum / static_cast<double>(counts.size()), cluster);
}

SchemeSet schemes_at(const Layer& layer, double factor_count, const Cluster& cluster) {
  const bool open = layer.scheme == Scheme::automatic;
  if (has_rows(layer) && takes_rows(layer.scheme)) return only(layer.scheme);
  if (has_rows(layer) && open && !(layer.zeros_are_missing && cluster.worker_count == 1))
    return those([&](Scheme scheme) { return may_take_rows(layer, scheme, factor_count); });
  if (cluster.worker_count == 1) return only(Scheme::local);
  const bool may_have_factors = has_factors(layer);
  if (open)
    return those(
        [&](Scheme scheme) { return may_choose(layer, scheme, may_have_factors && factor_count > 0, cluster); });
  const bool has_what_it_takes = !takes_rows(layer.scheme) && (may_have_factors || !takes_factors(layer.scheme));
  return only(has_what_it_takes ? layer.scheme : Scheme::ps);
}

std::vector<Scheme> automatic_schemes(const Layer& layer, const Cluster& cluster) {
  const bool open = layer.scheme == Scheme::automatic && has_factors(layer) && !layer.stored;
  return open && cluster.worker_count > 1 ? schemes_at(layer, 1, cluster).list() : std::vector<Scheme>();
}

bool chooses_exact(const Layer& layer, Scheme chosen) { return chosen == Scheme::ps && is_lossy(layer.scheme); }

bool may_lose(const Layer& layer) {
  return keeps_rounding(layer) || (!layer.stored && lossy_scheme_of(layer) != Scheme::automatic);
}

bool keeps_rounding(const Layer& layer) {
  return layer.compression.error_feedback && layer.wire != WireFormat::fp32 && layer.dtype == DType::float32 &&
         (!layer.row_gradient || layer.zeros_are_missing);
}

std::size_t kept_count(const Layer& layer) {
  if (keeps_rounding(layer)) return layer.element_count;
  const Scheme lossy = lossy_scheme_of(layer);
  if (lossy == Scheme::automatic) return 0;
  const auto& count = traits_of(lossy).kept_count;
  return count == nullptr ? layer.element_count : count(layer);
}

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

}  // namespace poseidon
