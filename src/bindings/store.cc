// Bindings of poseidon/store.h.
#include "poseidon/store.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <utility>

#include "bindings/bindings.h"

namespace poseidon::bindings {

namespace {

/// A store that is a Python object. It has set(key, value: bytes) and get(key, timeout_s) -> bytes. `get` raises
/// TimeoutError if the key is not there in time.
class PythonStore final : public Store {
 public:
  explicit PythonStore(nb::object store) : store_(std::move(store)) {}
  ~PythonStore() override {
    const nb::gil_scoped_acquire gil;
    store_.reset();
  }
  PythonStore(const PythonStore&) = delete;
  PythonStore& operator=(const PythonStore&) = delete;

  Status set(const std::string& key, const std::string& value) override {
    const nb::gil_scoped_acquire gil;
    try {
      store_.attr("set")(key.c_str(), nb::bytes(value.data(), value.size()));
      return {};
    } catch (nb::python_error& error) {
      return {ErrorCode::unreachable, std::string("the rendezvous store failed: ") + error.what()};
    }
  }

  Result<std::string> get(const std::string& key, std::chrono::milliseconds timeout) override {
    const nb::gil_scoped_acquire gil;
    try {
      const auto value =
          nb::cast<nb::bytes>(store_.attr("get")(key.c_str(), std::chrono::duration<double>(timeout).count()));
      return std::string(value.c_str(), value.size());
    } catch (nb::python_error& error) {
      if (error.matches(PyExc_TimeoutError))
        return Status(ErrorCode::timeout, "the store has no key '" + key + "' yet");
      return Status(ErrorCode::unreachable, std::string("the rendezvous store failed: ") + error.what());
    }
  }

 private:
  nb::object store_;
};

}  // namespace

std::shared_ptr<Store> store_from(nb::object store) {
  if (store.is_none()) return nullptr;
  std::shared_ptr<Store> core;
  if (nb::try_cast(store, core)) return core;
  return std::make_shared<PythonStore>(std::move(store));
}

void bind_store(nb::module_& module) {
  nb::class_<Store>(module, "Store", "Where the processes of a job find each other (include/poseidon/store.h).");
  module.def(
      "open_store",
      [](const Options& options) {
        return value_of(call_blocking([&](auto& keep_waiting) { return open_store(options, keep_waiting); }));
      },
      nb::arg("options"), "The store at master_addr:master_port, for all generations of a job.");
  module.def(
      "generation_wanted",
      [](nb::object store, const std::string& job) {
        const auto core = store_from(std::move(store));
        return unlocked([&] { return core ? generation_wanted(*core, job) : 0U; });
      },
      nb::arg("store"), nb::arg("job"), "The highest generation of the job that some process has asked for.");
  module.def(
      "note_left",
      [](nb::object store, const std::string& job, std::uint32_t generation, int slot) {
        const auto core = store_from(std::move(store));
        unlocked([&] {
          if (core) note_left(*core, job, generation, slot);
        });
      },
      nb::arg("store"), nb::arg("job"), nb::arg("generation"), nb::arg("slot"),
      "Notes that the process in this slot leaves the generation for good: nobody waits for it in the next one.");
  module.def(
      "last_refused",
      [](nb::object store, const std::string& job) {
        const auto core = store_from(std::move(store));
        return unlocked([&] { return core ? last_refused(*core, job) : std::string(); });
      },
      nb::arg("store"), nb::arg("job"), "The last process that was refused, and why; empty if there is none.");
}

}  // namespace poseidon::bindings
