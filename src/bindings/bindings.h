// What the binding files share. There is one binding file for each public header, and one module.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <memory>
#include <utility>

#include "poseidon/status.h"
#include "poseidon/store.h"

namespace poseidon::bindings {

namespace nb = nanobind;

void bind_options(nb::module_& module);
void bind_store(nb::module_& module);
void bind_plan(nb::module_& module);
void bind_layer_rules(nb::module_& module);  // bind_plan() calls it
void bind_checkpoint(nb::module_& module);
void bind_update(nb::module_& module);
void bind_client(nb::module_& module);
void bind_collective(nb::module_& module);
void bind_client_stats(nb::module_& module);
void bind_server(nb::module_& module);
void bind_machine(nb::module_& module);
void bind_measure(nb::module_& module);
void bind_digest(nb::module_& module);
void bind_coded_size(nb::module_& module);
void bind_drop_rule(nb::module_& module);
void bind_features(nb::module_& module);

/// Returns an instance of the PoseidonError subclass for a failed status, and None for ok. Needs the GIL.
nb::object to_exception(const Status& status);
/// Raises the PoseidonError subclass for a failed status, and returns for ok. Needs the GIL.
void raise_if_failed(const Status& status);

/// Converts the store that a caller gives: one from open_store, or a Python object with set and get. None becomes null.
/// Needs the GIL.
std::shared_ptr<Store> store_from(nb::object store);

/// The value of a result, or the exception of its status. Needs the GIL.
template <typename T>
T value_of(Result<T> result) {
  raise_if_failed(result.status());
  return std::move(result.value());
}

/// Runs `call` without the GIL.
template <typename Call>
auto unlocked(Call&& call) {
  const nb::gil_scoped_release released;
  return call();
}

/// Runs `call(keep_waiting)` without the GIL. Ctrl-C makes keep_waiting return false, and is raised after the call.
template <typename Call>
auto call_blocking(Call&& call) {
  const std::function<bool()> keep_waiting = [] {
    const nb::gil_scoped_acquire gil;
    return PyErr_CheckSignals() == 0;
  };
  auto result = unlocked([&] { return call(keep_waiting); });
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return result;
}

/// Gives a class of Python the members of a struct under their own names, to be read: .def_ro for each.
#define POSEIDON_FIELDS(type, ...) POSEIDON_AGAIN(POSEIDON_AGAIN(POSEIDON_FIELD_OF(type, __VA_ARGS__)))
#define POSEIDON_FIELD_OF(type, field, ...) \
  .def_ro(#field, &type::field) __VA_OPT__(POSEIDON_NEXT_FIELD POSEIDON_LATER(type, __VA_ARGS__))
#define POSEIDON_NEXT_FIELD() POSEIDON_FIELD_OF
#define POSEIDON_LATER ()
#define POSEIDON_AGAIN(...) POSEIDON_AGAIN_4(POSEIDON_AGAIN_4(POSEIDON_AGAIN_4(__VA_ARGS__)))
#define POSEIDON_AGAIN_4(...) POSEIDON_ONCE(POSEIDON_ONCE(POSEIDON_ONCE(__VA_ARGS__)))
#define POSEIDON_ONCE(...) __VA_ARGS__

}  // namespace poseidon::bindings
