// Bindings of poseidon/options.h, and the rows of poseidon/options.def for the Python settings.
#include "poseidon/options.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <utility>

#include "bindings/bindings.h"
#include "poseidon/scheme.h"

namespace poseidon::bindings {

namespace {

using Milliseconds = std::chrono::milliseconds;

// Conversion between a field and Python. Enumerations become the names that users write, and times become seconds.
template <typename T>
nb::object to_python(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    const std::string_view name = name_of(value);
    return nb::str(name.data(), name.size());
  } else if constexpr (std::is_same_v<T, bool>) {
    return nb::str(value ? "on" : "off");
  } else if constexpr (std::is_same_v<T, Milliseconds>) {
    return nb::float_(std::chrono::duration<double>(value).count());
  } else {
    return nb::cast(value);
  }
}

/// Returns the names that a field of type T takes, with what each does. The result is empty for types other than
/// enumerations and bool.
template <typename T>
std::vector<std::pair<std::string, std::string>> names_of() {
  std::vector<std::pair<std::string, std::string>> names;
  if constexpr (std::is_enum_v<T>)
    for (const auto& choice : choices_of(T())) names.emplace_back(choice.name, choice.help);
  if constexpr (std::is_same_v<T, bool>) names = {{"off", ""}, {"on", ""}};
  return names;
}

[[noreturn]] void refuse(const std::string& why) {
  raise_if_failed({ErrorCode::invalid_argument, why});
  std::abort();
}

template <typename T>
T from_python(const char* field, nb::handle given) {
  if constexpr (std::is_enum_v<T> || std::is_same_v<T, bool>) {
    const auto text = nb::cast<std::string>(given);
    std::string allowed;
    if constexpr (std::is_enum_v<T>) {
      for (const auto& choice : choices_of(T()))
        if (text == choice.name) return choice.value;
    } else if (text == "on" || text == "off") {
      return text == "on";
    }
    for (const auto& [name, help] : names_of<T>()) allowed += (allowed.empty() ? "'" : ", '") + name + "'";
    refuse(std::string(field) + " is one of " + allowed + ", not '" + text + "'");
  } else if constexpr (std::is_same_v<T, Milliseconds>) {
    const auto seconds = nb::cast<double>(given);
    if (!(seconds > 0 && seconds < 1e9)) refuse(std::string(field) + " must be a positive number of seconds");
    return Milliseconds(static_cast<std::int64_t>(seconds * 1000));
  } else {
    return nb::cast<T>(given);
  }
}

void init_from_keywords(Options* self, const nb::kwargs& keywords) {
  Options options;
  for (auto [key, value] : keywords) {
    const auto name = nb::cast<std::string>(key);
#define POSEIDON_OPTION(type, field, default_value, kind, help) \
  if (name == #field) {                                         \
    options.field = from_python<type>(#field, value);           \
    continue;                                                   \
  }
#define POSEIDON_FIELD(type, field, default_value, help) POSEIDON_OPTION(type, field, default_value, , help)
#include "poseidon/options.def"
    refuse("there is no option '" + name + "'; see `poseidon options` for their names");
  }
  new (self) Options(std::move(options));
}

// The kinds of options.def. They give what a row says beside its name, group, default and help.
namespace kinds {

nb::dict of(const char* kind) {
  nb::dict facts;
  facts["kind"] = kind;
  return facts;
}

template <typename T>
nb::dict within(const char* kind, T least, T most) {
  nb::dict facts = of(kind);
  facts["least"] = least;
  facts["most"] = most;
  return facts;
}

nb::dict whole(std::int64_t least, std::int64_t most = std::numeric_limits<int>::max()) {
  return within("whole", least, most);
}
nb::dict number(double least, double most) { return within("number", least, most); }
nb::dict seconds(double least, double most) { return within("seconds", least, most); }
nb::dict bytes(std::int64_t least, std::int64_t most) { return within("bytes", least, most); }
nb::dict bytes_or_auto(std::int64_t least, std::int64_t most) { return within("bytes_or_auto", least, most); }
nb::dict port() { return within("port", 1, 65535); }
nb::dict auto_off_or_whole(std::int64_t least) {
  return within("auto_off_or_whole", least, std::int64_t{std::numeric_limits<int>::max()});
}
nb::dict threshold() { return of("threshold"); }
nb::dict host() { return of("host"); }
nb::dict path() { return of("path"); }
nb::dict path_or_off() { return of("path_or_off"); }
nb::dict job_name() { return of("job_name"); }
nb::dict label() { return of("label"); }
nb::dict list() { return of("list"); }
nb::dict addresses() { return of("addresses"); }
nb::dict replica_place() { return of("replica_place"); }
nb::dict code_points() { return of("code_points"); }

nb::dict one_of(const std::vector<std::pair<std::string, std::string>>& names) {
  nb::dict facts = of("choice");
  nb::dict choices;
  for (const auto& [name, help] : names) choices[name.c_str()] = help;
  facts["choices"] = choices;
  return facts;
}

/// Returns "auto" and the schemes that users may ask for by name.
nb::dict scheme_names() {
  std::vector<std::pair<std::string, std::string>> names{
      {std::string(scheme_name(Scheme::automatic)), "The cheapest for each layer."}};
  std::vector<std::string> compared;
  for (const Scheme scheme : all_schemes()) {
    const SchemeTraits& traits = traits_of(scheme);
    const std::string name(scheme_name(scheme));
    if (!traits.only_one_worker) names.emplace_back(name, traits.summary);
    if (traits.automatic) compared.push_back(name);
  }
  std::string list;
  for (std::size_t i = 0; i < compared.size(); ++i)
    list.append(i == 0 ? "" : i + 1 == compared.size() ? " and " : ", ").append(compared[i]);
  names.front().second = "The cheapest of " + list + " for each layer.";
  return one_of(names);
}

/// Returns "", the wire formats that round, and the lossy schemes.
nb::dict lossy_names() {
  std::vector<std::pair<std::string, std::string>> names{{"", "Nothing: the sums are exact."}};
  for (const auto& choice : choices_of(WireFormat()))
    if (choice.value != WireFormat::fp32) names.emplace_back(choice.name, choice.help);
  for (const Scheme scheme : all_schemes())
    if (traits_of(scheme).lossy) names.emplace_back(std::string(scheme_name(scheme)), traits_of(scheme).summary);
  return one_of(names);
}

template <typename Enum>
nb::dict choice() {
  return one_of(names_of<Enum>());
}

nb::dict on_off() { return one_of(names_of<bool>()); }

nb::dict by_machine(nb::dict facts, const char* help) {
  facts["default_help"] = help;
  return facts;
}

nb::dict on_server(nb::dict facts) {
  facts["on_server"] = true;
  return facts;
}

nb::dict decides_chunk_bytes(nb::dict facts) {
  facts["decides_chunk_bytes"] = true;
  return facts;
}

}  // namespace kinds

nb::list option_rows() {
  using namespace kinds;  // NOLINT(google-build-using-namespace): the table names them
  nb::list rows;
  const char* group = "";
  const Options defaults;
  const auto add = [&](const char* name, nb::object value, nb::dict facts, const char* help, bool in_core) {
    facts["name"] = name;
    facts["group"] = group;
    facts["default"] = std::move(value);
    facts["help"] = help;
    facts["in_core"] = in_core;
    rows.append(std::move(facts));
  };
#define POSEIDON_GROUP(name, title, help) group = #name;
#define POSEIDON_OPTION(type, name, default_value, kind, help) \
  add(#name, to_python<type>(defaults.name), kind, help, true);
#define POSEIDON_PYTHON_OPTION(name, default_value, kind, help) add(#name, nb::cast(default_value), kind, help, false);
#include "poseidon/options.def"
  return rows;
}

nb::dict option_groups() {
  nb::dict groups;
#define POSEIDON_GROUP(name, title, help) groups[#name] = nb::make_tuple(title, help);
#include "poseidon/options.def"
  return groups;
}

}  // namespace

void bind_options(nb::module_& module) {
  auto type = nb::class_<Options>(module, "Options", "Every setting of the core; timeout in seconds.")
                  .def("__init__", &init_from_keywords);
#define POSEIDON_OPTION(type_, field, default_value, kind, help)                      \
  type.def_prop_rw(                                                                   \
      #field, [](const Options& options) { return to_python<type_>(options.field); }, \
      [](Options& options, nb::handle value) { options.field = from_python<type_>(#field, value); }, help);
#define POSEIDON_FIELD(type_, field, default_value, help) POSEIDON_OPTION(type_, field, default_value, , help)
#include "poseidon/options.def"
  module.def("option_rows", &option_rows, "The rows of poseidon/options.def, in their order, as dicts.");
  module.def("option_groups", &option_groups, "Name of each group of options to its title and a sentence on it.");
  module.def("tls_available", &tls_available, "Whether this build has OpenSSL, which tls=on needs.");
}

}  // namespace poseidon::bindings
