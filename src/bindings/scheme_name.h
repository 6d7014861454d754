// Conversion of schemes to and from their names.
#pragma once

#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "poseidon/scheme.h"

namespace poseidon::bindings {

inline Scheme scheme_from(const std::string& name) { return value_of(parse_scheme(name)); }

/// Returns the scheme of this name. `auto` is an error, because it has no cost of its own.
inline Scheme concrete_scheme(const std::string& name) {
  const Scheme scheme = scheme_from(name);
  if (scheme == Scheme::automatic)
    raise_if_failed({ErrorCode::invalid_argument, "auto stands for several schemes: name one of them"});
  return scheme;
}

inline std::vector<std::string> names_of(const std::vector<Scheme>& schemes) {
  std::vector<std::string> names;
  for (const Scheme scheme : schemes) names.emplace_back(scheme_name(scheme));
  return names;
}

}  // namespace poseidon::bindings
