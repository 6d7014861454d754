// The Python module poseidon._core.
#include "bindings/bindings.h"

namespace poseidon::bindings {

nb::object to_exception(const Status& status) {
  if (status.ok()) return nb::none();
  const nb::object by_code = nb::module_::import_("poseidon.errors").attr("by_code");
  const std::string code(error_code_name(status.code()));
  return by_code(code.c_str())(status.message().c_str());
}

void raise_if_failed(const Status& status) {
  if (status.ok()) return;
  const nb::object error = to_exception(status);
  PyErr_SetObject(error.type().ptr(), error.ptr());
  throw nb::python_error();
}

namespace {

/// Autograd's graph, which Python's collector does not see into, holds hooks. So what a program's hook refers to, such
/// as the model and with it the client, often lives until the process ends. That is no fault to be told to a user.
void bind_leak_warnings(nb::module_& module) {
  nb::set_leak_warnings(false);
  module.def(
      "set_leak_warnings", [](bool on) { nb::set_leak_warnings(on); }, nb::arg("on"),
      "Whether the end of the process prints which objects of this module it has not freed. Tests turn it on.");
}

}  // namespace

}  // namespace poseidon::bindings

NB_MODULE(_core, module) {
  module.doc() = "Poseidon's core: plan, client and server (contracts: include/poseidon/*.h)";
  poseidon::bindings::bind_leak_warnings(module);
  poseidon::bindings::bind_options(module);
  poseidon::bindings::bind_store(module);
  poseidon::bindings::bind_plan(module);
  poseidon::bindings::bind_checkpoint(module);
  poseidon::bindings::bind_update(module);
  poseidon::bindings::bind_client_stats(module);
  poseidon::bindings::bind_collective(module);
  poseidon::bindings::bind_client(module);
  poseidon::bindings::bind_server(module);
  poseidon::bindings::bind_machine(module);
  poseidon::bindings::bind_measure(module);
  poseidon::bindings::bind_digest(module);
  poseidon::bindings::bind_coded_size(module);
  poseidon::bindings::bind_drop_rule(module);
  poseidon::bindings::bind_features(module);
}
