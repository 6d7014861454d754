// poseidon/client.h
#include "poseidon/client.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <unordered_map>

#include "bindings/bindings.h"
#include "bindings/dtype_name.h"

namespace poseidon::bindings {

namespace {

using Array = nb::ndarray<nb::device::cpu, nb::c_contig>;
using ByteView = nb::ndarray<nb::numpy, const std::uint8_t>;

std::span<std::byte> bytes_of(const Array& array) { return {static_cast<std::byte*>(array.data()), array.nbytes()}; }

/// A store that lives in Python: set(key, value: bytes) and get(key, timeout_s) -> bytes, which
/// raises TimeoutError while the key is not there.
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

/// The client and the arrays that its running exchanges read and write (guarded by the GIL).
class PyClient {
 public:
  explicit PyClient(std::unique_ptr<Client> client) : client_(std::move(client)) {}
  ~PyClient() {
    const nb::gil_scoped_release unlocked;
    client_.reset();
  }
  PyClient(const PyClient&) = delete;
  PyClient& operator=(const PyClient&) = delete;

  Client& get() { return *client_; }

  void start(std::uint32_t layer, Array array, std::uint32_t divisor, std::optional<std::uint64_t> factor_count) {
    check_dtype(layer, array);
    raise_if_failed(client_->start(layer, bytes_of(array), divisor, factor_count.value_or(kNotFactorable)));
    held_[layer] = {std::move(array)};
  }

  void start_absent(std::uint32_t layer, Array array, std::uint32_t divisor) {
    check_dtype(layer, array);
    raise_if_failed(client_->start_absent(layer, bytes_of(array), divisor));
    held_[layer] = {std::move(array)};
  }

  void start_factors(std::uint32_t layer, std::vector<Array> lefts, std::vector<Array> rights,
                     std::optional<Array> destination, std::uint32_t divisor, bool accumulate) {
    if (destination) check_dtype(layer, *destination);
    const DType dtype = lefts.empty() ? layer_dtype(layer) : dtype_from(lefts.front().dtype());
    std::vector<FactorRows> segments = make_segments(layer, dtype, lefts, rights);
    const auto place = destination ? bytes_of(*destination) : std::span<std::byte>();
    raise_if_failed(client_->start_factors(layer, dtype, std::move(segments), place, divisor, accumulate));
    std::vector<Array> held = std::move(lefts);
    held.insert(held.end(), std::make_move_iterator(rights.begin()), std::make_move_iterator(rights.end()));
    if (destination) held.push_back(std::move(*destination));
    held_[layer] = std::move(held);
  }

  std::pair<std::uint32_t, Plan> add_layers(const std::vector<Layer>& layers, bool transient) {
    auto added = call_blocking([&](const std::function<bool()>& keep_waiting) {
      return client_->add_layers(layers, transient, keep_waiting);
    });
    raise_if_failed(added.status());
    for (const auto& layer : added.value().plan.layers) layers_.push_back(layer);
    return {added.value().first_layer, std::move(added.value().plan)};
  }

  void wait_all() {
    const Status status =
        call_blocking([&](const std::function<bool()>& keep_waiting) { return client_->wait_all(keep_waiting); });
    held_.clear();
    raise_if_failed(status);
  }

  void wait(std::uint32_t layer) {
    const Status status =
        call_blocking([&](const std::function<bool()>& keep_waiting) { return client_->wait(layer, keep_waiting); });
    held_.erase(layer);
    raise_if_failed(status);
  }

  nb::list gathered(std::uint32_t layer) {
    const auto parts = [&] {
      const nb::gil_scoped_release unlocked;
      return client_->gathered(layer);
    }();
    nb::list result;
    for (const auto& part : parts) result.append(to_python(layer, part));
    return result;
  }

 private:
  static constexpr std::uint32_t kOwnLayers = 1;  // the core's own "plan check" comes first

  const Layer& layer_of(std::uint32_t layer) const {
    if (layer < kOwnLayers || layer - kOwnLayers >= layers_.size())
      raise_if_failed({ErrorCode::invalid_argument, "there is no layer " + std::to_string(layer)});
    return layers_[layer - kOwnLayers];
  }

  DType layer_dtype(std::uint32_t layer) const { return layer_of(layer).dtype; }

  void check_dtype(std::uint32_t layer, const Array& array) const {
    if (dtype_from(array.dtype()) != layer_dtype(layer))
      raise_if_failed({ErrorCode::invalid_argument, "layer '" + layer_of(layer).name + "' is " +
                                                        std::string(dtype_name(layer_dtype(layer))) +
                                                        ", the given array is not"});
  }

  std::vector<FactorRows> make_segments(std::uint32_t layer, DType dtype, const std::vector<Array>& lefts,
                                        const std::vector<Array>& rights) const {
    const Layer& shape = layer_of(layer);
    const auto fits = [dtype](const Array& array, std::size_t width, std::size_t count) {
      return array.ndim() == 2 && array.shape(0) == count && array.shape(1) == width &&
             dtype_from(array.dtype()) == dtype;
    };
    std::vector<FactorRows> segments;
    for (std::size_t i = 0; i < lefts.size(); ++i) {
      const std::size_t count = lefts[i].ndim() == 2 ? lefts[i].shape(0) : 0;
      if (lefts.size() != rights.size() || !fits(lefts[i], shape.rows, count) || !fits(rights[i], shape.cols, count))
        raise_if_failed({ErrorCode::invalid_argument, "factors of layer '" + shape.name + "' must be pairs of K x " +
                                                          std::to_string(shape.rows) + " and K x " +
                                                          std::to_string(shape.cols) + " arrays of one dtype"});
      segments.push_back({bytes_of(lefts[i]).data(), bytes_of(rights[i]).data(), count});
    }
    return segments;
  }

  static nb::object view(const std::byte* data, std::size_t size_bytes) {
    const std::size_t shape[1] = {size_bytes};
    return nb::cast(ByteView(data, 1, shape, nb::none()), nb::rv_policy::reference);
  }

  nb::object to_python(std::uint32_t layer, const GatheredPart& part) const {
    const Layer& shape = layer_of(layer);
    if (part.dense != nullptr) return view(part.dense, shape.size_bytes());
    if (part.factors.empty()) return nb::none();
    nb::list pairs;
    for (const auto& rows : part.factors) {
      const std::size_t row_bytes = rows.count * dtype_bytes(part.dtype);
      pairs.append(nb::make_tuple(view(rows.left, row_bytes * shape.rows), view(rows.right, row_bytes * shape.cols)));
    }
    return nb::make_tuple(nb::str(std::string(dtype_name(part.dtype)).c_str()), pairs);
  }

  std::unique_ptr<Client> client_;
  std::vector<Layer> layers_;
  std::unordered_map<std::uint32_t, std::vector<Array>> held_;
};

void bind_stats(nb::module_& module) {
  nb::class_<LayerStats>(module, "LayerStats", "How a layer's last exchange went; times of time.monotonic_ns().")
      .def_prop_ro("scheme", [](const LayerStats& stats) { return std::string(scheme_name(stats.scheme)); })
      .def_ro("step", &LayerStats::step)
      .def_ro("present", &LayerStats::present)
      .def_ro("factor_count", &LayerStats::factor_count)
      .def_ro("bytes_sent", &LayerStats::bytes_sent)
      .def_ro("bytes_received", &LayerStats::bytes_received)
      .def_ro("started_ns", &LayerStats::started_ns)
      .def_ro("completed_ns", &LayerStats::completed_ns);
  nb::class_<TrafficStats>(module, "TrafficStats", "Network bytes of this process since connect.")
      .def_ro("bytes_sent", &TrafficStats::bytes_sent)
      .def_ro("bytes_received", &TrafficStats::bytes_received);
}

std::unique_ptr<PyClient> connect(const Options& options, nb::object store) {
  std::shared_ptr<Store> core_store;
  if (!store.is_none()) core_store = std::make_shared<PythonStore>(std::move(store));
  auto client = call_blocking([&](const std::function<bool()>& keep_waiting) {
    return Client::connect(options, std::move(core_store), keep_waiting);
  });
  raise_if_failed(client.status());
  return std::make_unique<PyClient>(std::move(client.value()));
}

}  // namespace

void bind_client(nb::module_& module) {
  bind_stats(module);
  nb::class_<PyClient>(module, "Client", "A worker's way into the exchange (include/poseidon/client.h).")
      .def_static("connect", &connect, nb::arg("options"), nb::arg("store").none() = nb::none())
      .def_prop_ro("rank", [](PyClient& self) { return self.get().rank(); })
      .def_prop_ro("world_size", [](PyClient& self) { return self.get().world_size(); })
      .def("add_layers", &PyClient::add_layers, nb::arg("layers"), nb::arg("transient") = false)
      .def("start", &PyClient::start, nb::arg("layer"), nb::arg("array"), nb::arg("divisor"),
           nb::arg("factor_count").none() = nb::none())
      .def("start_absent", &PyClient::start_absent, nb::arg("layer"), nb::arg("array"), nb::arg("divisor"))
      .def("start_factors", &PyClient::start_factors, nb::arg("layer"), nb::arg("lefts"), nb::arg("rights"),
           nb::arg("destination").none(), nb::arg("divisor"), nb::arg("accumulate") = false)
      .def("next_scheme",
           [](PyClient& self, std::uint32_t layer) { return std::string(scheme_name(self.get().next_scheme(layer))); })
      .def("set_factor_count",
           [](PyClient& self, std::uint32_t layer, std::uint64_t count) {
             const nb::gil_scoped_release unlocked;
             self.get().set_factor_count(layer, count);
           })
      .def("gathered", &PyClient::gathered)
      .def("wait_all", &PyClient::wait_all)
      .def("wait", &PyClient::wait)
      .def("layer_stats", [](PyClient& self, std::uint32_t layer) { return self.get().layer_stats(layer); })
      .def("traffic",
           [](PyClient& self) {
             const nb::gil_scoped_release unlocked;
             return self.get().traffic();
           })
      .def("abort",
           [](PyClient& self, const std::string& reason) {
             const nb::gil_scoped_release unlocked;
             self.get().abort(reason);
           })
      .def("shutdown", [](PyClient& self) {
        const nb::gil_scoped_release unlocked;
        self.get().shutdown();
      });
}

}  // namespace poseidon::bindings
