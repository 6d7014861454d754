// Bindings of poseidon/layer.h.
#include "poseidon/layer.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/dtype_name.h"
#include "bindings/scheme_name.h"
#include "poseidon/plan.h"

namespace poseidon::bindings {

namespace {

WireFormat wire_from(const std::string& name) {
  std::string known;
  for (const auto& choice : choices_of(WireFormat())) {
    if (choice.name == name) return choice.value;
    known += (known.empty() ? "" : ", ") + std::string(choice.name);
  }
  raise_if_failed({ErrorCode::invalid_argument, "'" + name + "' is no wire format: known are " + known});
  return WireFormat::fp32;
}

std::optional<WireFormat> wire_or_none(const std::string& name) {
  return name.empty() ? std::nullopt : std::optional(wire_from(name));
}

Scheme scheme_or_none(const std::string& name) { return name.empty() ? Scheme::automatic : concrete_scheme(name); }

std::string name_or_none(Scheme scheme) {
  return scheme == Scheme::automatic ? std::string() : std::string(scheme_name(scheme));
}

bool is_wire(const std::string& name) {
  return std::ranges::any_of(choices_of(WireFormat()), [&](const auto& choice) { return choice.name == name; });
}

RowGradient rows_from(const std::string& name) {
  if (name == "zeros") return RowGradient::zeros;
  if (name == "sparse") return RowGradient::sparse;
  if (!name.empty())
    raise_if_failed({ErrorCode::invalid_argument, "'" + name + "' is no kind of rows; use 'zeros', 'sparse' or ''"});
  return RowGradient::none;
}

/// The wire format in which values of a layer travel as this type.
std::string wire_name(DType sent_as, DType dtype) {
  for (const auto& choice : choices_of(WireFormat()))
    if (sent_as != dtype && wire_dtype(choice.value, DType::float32) == sent_as) return choice.name;
  return std::string(name_of(WireFormat::fp32));
}

void bind_layer(nb::module_& module) {
  nb::class_<Layer>(module, "Layer", "One tensor to synchronize.")
      .def(
          "__init__",
          [](Layer* self, std::string name, const std::string& dtype, std::size_t element_count, std::size_t rows,
             std::size_t cols, const std::string& scheme, bool stored) {
            new (self)
                Layer{std::move(name), dtype_from(dtype), element_count, rows, cols, scheme_from(scheme), stored};
          },
          nb::arg("name"), nb::arg("dtype"), nb::arg("element_count"), nb::arg("rows") = 0, nb::arg("cols") = 0,
          nb::arg("scheme") = "auto", nb::arg("stored") = false,
          "Without an update of its own, a wire format or what else wished_layer() gives.")
      .def_prop_ro("kept_count", [](const Layer& layer) { return kept_count(layer); })
      .def_ro("name", &Layer::name)
      .def_prop_ro("dtype", [](const Layer& layer) { return std::string(dtype_name(layer.dtype)); })
          POSEIDON_FIELDS(Layer, element_count, rows, cols)
      .def_prop_ro("scheme", [](const Layer& layer) { return std::string(scheme_name(layer.scheme)); })
          POSEIDON_FIELDS(Layer, stored, whole)
      .def_prop_ro("wire", [](const Layer& layer) { return std::string(name_of(layer.wire)); })
      .def_prop_ro("parameter_wire", [](const Layer& layer) { return std::string(name_of(layer.parameter_wire)); })
      .def_prop_ro("lossy", [](const Layer& layer) { return name_or_none(layer.compression.allowed); })
      .def_prop_ro("factor_wire",
                   [](const Layer& layer) {
                     const auto& format = layer.compression.factor_wire;
                     return std::string(format ? name_of(*format) : "");
                   })
      .def_prop_ro("topk_fraction", [](const Layer& layer) { return layer.compression.topk_fraction; })
      .def_prop_ro("powersgd_rank", [](const Layer& layer) { return layer.compression.powersgd_rank; })
      .def_prop_ro("matrix_rows", [](const Layer& layer) { return layer.compression.rows; })
      .def_prop_ro("may_lose", [](const Layer& layer) { return may_lose(layer); })
          POSEIDON_FIELDS(Layer, row_gradient, zeros_are_missing)
      .def_prop_ro("factorable", &Layer::factorable)
      .def_prop_ro("size_bytes", &Layer::size_bytes);
}

/// A field of a dataclass of python/poseidon/adapter/layer_rules.py.
template <typename T>
T field(nb::handle given, const char* name) {
  return nb::cast<T>(given.attr(name));
}

LayerFacts facts_from(nb::handle given) {
  LayerFacts facts;
  facts.name = field<std::string>(given, "name");
  facts.who = field<std::string>(given, "who");
  facts.dtype_text = field<std::string>(given, "dtype_text");
  facts.dtype = dtype_from(field<std::string>(given, "dtype"));
  facts.element_count = field<std::size_t>(given, "element_count");
  facts.rows = field<std::size_t>(given, "rows");
  facts.gives_factors = field<bool>(given, "gives_factors");
  facts.gives_rows = rows_from(field<std::string>(given, "gives_rows"));
  facts.stored = field<bool>(given, "stored");
  facts.whole = field<bool>(given, "whole");
  return facts;
}

LayerWishes wishes_from(nb::handle given) {
  LayerWishes wishes;
  wishes.scheme = scheme_from(field<std::string>(given, "scheme"));
  wishes.wire = wire_from(field<std::string>(given, "wire"));
  wishes.wire_is_given = field<bool>(given, "wire_is_given");
  wishes.wire_if_float = field<bool>(given, "wire_if_float");
  const auto lossy = field<std::string>(given, "lossy");
  if (is_wire(lossy))
    wishes.lossy_wire = wire_from(lossy);
  else
    wishes.lossy = scheme_or_none(lossy);
  wishes.topk_fraction = field<double>(given, "topk_fraction");
  wishes.powersgd_rank = field<std::size_t>(given, "powersgd_rank");
  wishes.factor_wire = wire_or_none(field<std::string>(given, "factor_wire"));
  wishes.error_feedback = field<bool>(given, "error_feedback");
  wishes.parameter_wire = wire_from(field<std::string>(given, "parameter_wire"));
  wishes.float32_value = field<bool>(given, "float32_value");
  wishes.settles = field<bool>(given, "settles");
  wishes.settled = scheme_or_none(field<std::string>(given, "settled"));
  return wishes;
}

void bind_terms(nb::module_& module) {
  nb::class_<LayerTerms>(module, "LayerTerms", "What a layer may do in a job, and how.")
      .def_prop_ro("scheme", [](const LayerTerms& terms) { return std::string(scheme_name(terms.scheme)); })
      .def_prop_ro("schemes", [](const LayerTerms& terms) { return names_of(terms.schemes.list()); })
      .def_prop_ro("uses_factors",
                   [](const LayerTerms& terms) {
                     return std::ranges::any_of(terms.schemes.list(),
                                                [](Scheme scheme) { return traits_of(scheme).takes_factors; });
                   })
      .def_ro("grouped", &LayerTerms::grouped)
      .def(
          "wire", [](const LayerTerms& terms, const Layer& layer) { return wire_name(terms.wire_dtype, layer.dtype); },
          nb::arg("layer"), "The format in which the dense gradient of this layer travels.")
      .def(
          "factor_wire",
          [](const LayerTerms& terms, const Layer& layer) { return wire_name(terms.factor_dtype, layer.dtype); },
          nb::arg("layer"), "The format in which its factors travel, and the values of its rows.")
      .def_prop_ro("bytes_per_value",
                   [](const LayerTerms& terms) {
                     return (bytes_per_value(terms.wire_dtype) + bytes_per_value(terms.result_dtype)) / 2;
                   })
      .def_prop_ro("bytes_per_factor", [](const LayerTerms& terms) { return bytes_per_value(terms.factor_dtype); })
      .def_ro("kept_count", &LayerTerms::kept_count)
      .def_prop_ro("reason", [](const LayerTerms& terms) { return std::string(terms.reason); });
  module.def(
      "wished_layer",
      [](nb::handle facts, nb::handle wishes, const Options& options) {
        return value_of(wished_layer(facts_from(facts), wishes_from(wishes), options));
      },
      nb::arg("facts"), nb::arg("wishes"), nb::arg("options"), "The layer that a tensor becomes.");
  module.def(
      "layer_terms",
      [](const Layer& layer, const Cluster& cluster, const Options& options) {
        return value_of(layer_terms(layer, cluster, options));
      },
      nb::arg("layer"), nb::arg("cluster"), nb::arg("options"), "The terms of a layer of a plan.");
  module.def(
      "settled_scheme",
      [](const Layer& layer, const std::vector<std::int64_t>& counts, const Cluster& cluster, const Options& options) {
        return std::string(scheme_name(settled_scheme(layer, counts, cluster, options)));
      },
      nb::arg("layer"), nb::arg("counts"), nb::arg("cluster"), nb::arg("options"),
      "What \"auto\" is for good, if the ranks have these numbers of factors.");
  module.def(
      "automatic_schemes",
      [](const Layer& layer, const Cluster& cluster) { return names_of(automatic_schemes(layer, cluster)); },
      nb::arg("layer"), nb::arg("cluster"), "The schemes among which \"auto\" chooses for the layer.");
}

}  // namespace

void bind_layer_rules(nb::module_& module) {
  bind_layer(module);
  bind_terms(module);
}

}  // namespace poseidon::bindings
