// Bindings of poseidon/client.h.
#include "poseidon/client.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <optional>
#include <unordered_map>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/c_exchange.h"
#include "bindings/collective.h"
#include "bindings/dtype_name.h"
#include "bindings/held.h"

namespace poseidon::bindings {

namespace {

using ByteView = nb::ndarray<nb::numpy, const std::uint8_t>;

/// The client, and the arrays that its running exchanges read and write. A forked child inherits it without its
/// threads, for which its end would wait for ever. So there nothing ends it.
class PyClient {
 public:
  explicit PyClient(std::unique_ptr<Client> client)
      : client_(std::move(client)), c_exchange_(*client_), collectives_(*client_) {}
  ~PyClient() {
    if (is_inherited()) {
      static_cast<void>(client_.release());
      return;
    }
    const nb::gil_scoped_release unlocked;
    client_.reset();
  }

  Client& get() { return *client_; }
  CExchange& c_exchange() { return c_exchange_; }
  PyCollectives& collectives() { return collectives_; }

  void start(std::uint32_t layer, Array array, std::uint32_t divisor, std::optional<std::uint64_t> factor_count) {
    check_dtype(layer, array);
    const auto data = bytes_of(array);
    start_holding(layer, {std::move(array)},
                  [&] { return client_->start(layer, data, divisor, factor_count.value_or(kNotFactorable)); });
  }

  void start_all(std::uint32_t first_layer, std::shared_ptr<const Arrays> arrays, std::uint32_t divisor) {
    for (std::size_t i = 0; i < arrays->dtypes.size(); ++i)
      if (arrays->dtypes[i] != layer_dtype(first_layer + static_cast<std::uint32_t>(i)))
        check_dtype(first_layer + static_cast<std::uint32_t>(i), arrays->arrays[i]);
    held_many_.add(first_layer, arrays);  // also if it fails: some may have started
    raise_if_failed(unlocked([&] { return client_->start_all(first_layer, arrays->spans, divisor); }));
  }

  std::uint64_t push_pull(std::uint32_t layer, Array array, Array destination, std::uint32_t divisor) {
    check_dtype(layer, array);
    check_dtype(layer, destination);
    const auto data = bytes_of(array), place = bytes_of(destination);
    return start_holding(layer, {std::move(array), std::move(destination)},
                         [&] { return client_->push_pull(layer, data, place, divisor); });
  }

  std::uint64_t push(std::uint32_t layer, Array array, std::uint32_t divisor) {
    check_dtype(layer, array);
    const auto data = bytes_of(array);
    return start_holding(layer, {std::move(array)}, [&] { return client_->push(layer, data, divisor); });
  }

  std::uint64_t pull(std::uint32_t layer, Array destination, std::uint32_t index, bool exact) {
    check_dtype(layer, destination);
    const auto place = bytes_of(destination);
    return start_holding(layer, {std::move(destination)}, [&] { return client_->pull(layer, place, index, exact); });
  }

  std::uint64_t assign(std::uint32_t layer, Array array, std::uint32_t index, std::uint64_t update_count) {
    check_dtype(layer, array);
    const auto data = bytes_of(array);
    return start_holding(layer, {std::move(array)}, [&] { return client_->assign(layer, data, index, update_count); });
  }

  void restore(std::uint32_t layer, Array destination, std::uint64_t version_limit) {
    check_dtype(layer, destination);
    const auto place = bytes_of(destination);
    start_holding(layer, {std::move(destination)}, [&] { return client_->restore(layer, place, version_limit); });
  }

  void set_rule(std::uint32_t layer, const UpdateRule& rule, bool compared) {
    raise_if_failed(client_->set_rule(layer, rule, compared));
  }

  std::size_t choose_chunk_bytes(std::size_t known) {
    return value_of(
        call_blocking([&](auto& keep_waiting) { return client_->choose_chunk_bytes(known, keep_waiting); }));
  }

  void start_absent(std::uint32_t layer, Array array, std::uint32_t divisor, bool counts) {
    check_dtype(layer, array);
    const auto place = bytes_of(array);
    start_holding(layer, {std::move(array)}, [&] { return client_->start_absent(layer, place, divisor, counts); });
  }

  void start_factors(std::uint32_t layer, std::vector<Array> lefts, std::vector<Array> rights,
                     std::optional<Array> destination, std::uint32_t divisor, bool accumulate) {
    if (destination) check_dtype(layer, *destination);
    const DType dtype = lefts.empty() ? layer_dtype(layer) : dtype_from(lefts.front().dtype());
    std::vector<FactorRows> segments = make_segments(layer, dtype, lefts, rights);
    const auto place = destination ? bytes_of(*destination) : std::span<std::byte>();
    std::vector<Array> held = std::move(lefts);
    held.insert(held.end(), std::make_move_iterator(rights.begin()), std::make_move_iterator(rights.end()));
    if (destination) held.push_back(std::move(*destination));
    start_holding(layer, std::move(held), [&] {
      return client_->start_factors(layer, dtype, std::move(segments), place, divisor, accumulate);
    });
  }

  void start_rows(std::uint32_t layer, Array indexes, Array values, std::uint32_t divisor) {
    check_dtype(layer, values);
    const Layer& shape = layer_of(layer);
    if (dtype_from(indexes.dtype()) != DType::int32 || indexes.ndim() != 1 || values.ndim() != 2 ||
        values.shape(0) != indexes.shape(0) || values.shape(1) != shape.cols)
      raise_if_failed({ErrorCode::invalid_argument,
                       concat("rows of layer '", shape.name, "' must be an array of K int32 indexes and one of K x ",
                              shape.cols, " values")});
    const auto index_bytes = bytes_of(indexes);
    // A negative index becomes one that no layer has.
    const std::span given(reinterpret_cast<const std::uint32_t*>(index_bytes.data()), indexes.shape(0));
    const LayerRows rows{.indexes = given, .values = bytes_of(values)};
    start_holding(layer, {std::move(indexes), std::move(values)},
                  [&] { return client_->start_rows(layer, rows, {}, divisor); });
  }

  void start_absent_rows(std::uint32_t layer, std::uint32_t divisor, bool counts) {
    raise_if_failed(client_->start_absent(layer, {}, divisor, counts));
  }

  nb::object result_rows(std::uint32_t layer) {
    const LayerRows rows = unlocked([&] { return client_->result_rows(layer); });
    const auto indexes = std::as_bytes(rows.indexes);
    const nb::object values = view(rows.values.data(), rows.values.size());
    if (rows.dense) return nb::make_tuple(nb::none(), values);
    return nb::make_tuple(view(indexes.data(), indexes.size()), values);
  }

  nb::object residual(std::uint32_t layer) {
    const auto residual = unlocked([&] { return client_->residual(layer); });
    return residual.empty() ? nb::none() : view(residual.data(), residual.size());
  }

  void set_residual(std::uint32_t layer, const std::optional<Array>& residual) {
    if (residual) check_dtype(layer, *residual);
    const auto bytes = residual ? bytes_of(*residual) : std::span<std::byte>();
    raise_if_failed(unlocked([&] { return client_->set_residual(layer, bytes); }));
  }

  std::pair<std::uint32_t, Plan> add_layers(const std::vector<Layer>& layers, bool transient) {
    auto added = value_of(
        call_blocking([&](auto& keep_waiting) { return client_->add_layers(layers, transient, keep_waiting); }));
    std::uint32_t id = added.first_layer;
    for (const auto& layer : added.plan.layers) layers_.emplace(id++, layer);
    return {added.first_layer, std::move(added.plan)};
  }

  // A wait returns, also with an error, when nothing uses the arrays of what had started before it any more.

  void wait_all() {
    const std::uint64_t last = held_.last(), last_many = held_many_.last();
    const Status status = call_blocking([&](auto& keep_waiting) { return client_->wait_all(telling(keep_waiting)); });
    held_.release_all(last);
    held_many_.release_all(last_many);
    raise_if_failed(status);
  }

  void wait(std::uint32_t layer) {
    const std::uint64_t last = held_.last();
    const Status status =
        call_blocking([&](auto& keep_waiting) { return client_->wait(layer, telling(keep_waiting)); });
    held_.release(layer, last);
    raise_if_failed(status);
  }

  void wait_operation(std::uint32_t layer, std::uint64_t number) {
    const Status status = call_blocking(
        [&](auto& keep_waiting) { return client_->wait_operation(layer, number, telling(keep_waiting)); });
    // What has started since has let go of the arrays, and has its own.
    if (client_->newest_operation(layer) == number) held_.release(layer, held_.last());
    raise_if_failed(status);
  }

  /// `wait` for so many layers, of which start_all was given the first.
  void wait_range(std::uint32_t first_layer, std::uint32_t count) {
    const std::uint64_t last = held_many_.last();
    const Status status = call_blocking([&](auto& keep_waiting) {
      Status first_failure;
      for (std::uint32_t i = 0; i < count; ++i) {
        Status waited = client_->wait(first_layer + i, telling(keep_waiting));
        if (first_failure.ok()) first_failure = std::move(waited);
      }
      return first_failure;
    });
    held_many_.release(first_layer, last);
    raise_if_failed(status);
  }

  /// The notices that no call has returned yet.
  std::vector<std::string> fresh_notices() {
    auto all = client_->notices();
    all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(std::min(told_count_, all.size())));
    told_count_ += all.size();
    return all;
  }

  void shutdown(bool serves_on) {
    if (is_inherited()) return;
    call_blocking([&](auto& keep_waiting) {
      client_->shutdown(keep_waiting, serves_on);
      return true;
    });
  }

  void set_priorities(std::uint32_t first_layer, const std::vector<double>& urgencies,
                      const std::vector<int>& priority_classes, double priority_threshold) {
    if (urgencies.size() != priority_classes.size())
      raise_if_failed({ErrorCode::invalid_argument, "as many classes as urgencies must be given"});
    std::vector<LayerPriority> priorities;
    for (std::size_t i = 0; i < urgencies.size(); ++i) priorities.push_back({urgencies[i], priority_classes[i]});
    raise_if_failed(client_->set_priorities(first_layer, priorities, priority_threshold));
  }

  void choose(std::uint32_t layer, const std::string& scheme, double factor_count) {
    const SchemeChoice choice{value_of(parse_scheme(scheme)), factor_count};
    raise_if_failed(unlocked([&] { return client_->choose(layer, choice); }));
  }

  nb::list gathered(std::uint32_t layer) {
    const auto parts = unlocked([&] { return client_->gathered(layer); });
    nb::list result;
    for (const auto& part : parts) result.append(to_python(layer, part));
    return result;
  }

 private:
  bool is_inherited() const { return ::getpid() != process_; }

  /// Starts an exchange that uses the arrays until it has completed. Returns the operation's number.
  template <typename Start>
  std::uint64_t start_holding(std::uint32_t layer, std::vector<Array> arrays, const Start& start) {
    const std::uint64_t number = held_.add(layer, std::make_shared<const std::vector<Array>>(std::move(arrays)));
    const Status status = start();
    if (status.ok()) held_.release(layer, number - 1);  // it would not have started before those had completed
    if (!status.ok()) held_.drop(layer, number);
    raise_if_failed(status);
    return client_->newest_operation(layer);  // no other thread has started one since: this one has the GIL
  }

  /// A wait may be long because of what a notice says. So it tells notices, too.
  std::function<bool()> telling(const std::function<bool()>& keep_waiting) {
    return [this, &keep_waiting] {
      if (!keep_waiting()) return false;
      const nb::gil_scoped_acquire gil;
      if (client_->notices().size() <= told_count_) return true;
      try {
        nb::module_::import_("poseidon.notices").attr("tell_notices")(nb::find(this));
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("a notice of poseidon");
      }
      return true;
    };
  }

  const Layer& layer_of(std::uint32_t layer) const {
    const auto found = layers_.find(layer);
    if (found == layers_.end())
      raise_if_failed({ErrorCode::invalid_argument,
                       concat("there is no layer ", layer, "; take a number that add_layers returned")});
    return found->second;
  }

  DType layer_dtype(std::uint32_t layer) const { return layer_of(layer).dtype; }

  void check_dtype(std::uint32_t layer, const Array& array) const {
    if (dtype_from(array.dtype()) != layer_dtype(layer))
      raise_if_failed({ErrorCode::invalid_argument, "layer '" + layer_of(layer).name + "' is " +
                                                        std::string(dtype_name(layer_dtype(layer))) +
                                                        ", the given array is not; give one of that dtype"});
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
        raise_if_failed(
            {ErrorCode::invalid_argument, concat("factors of layer '", shape.name, "' must be pairs of K x ",
                                                 shape.rows, " and K x ", shape.cols, " arrays of one dtype")});
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
    const nb::str dtype(std::string(dtype_name(part.dtype)).c_str());
    if (part.dense != nullptr)
      return nb::make_tuple(dtype, view(part.dense, array_bytes(part.dtype, shape.element_count)));
    if (part.factors.empty()) return nb::none();
    nb::list pairs;
    for (const auto& rows : part.factors) {
      const std::size_t row_bytes = rows.count * dtype_bytes(part.dtype);
      pairs.append(nb::make_tuple(view(rows.left, row_bytes * shape.rows), view(rows.right, row_bytes * shape.cols)));
    }
    return nb::make_tuple(dtype, pairs);
  }

  const pid_t process_ = ::getpid();
  std::unique_ptr<Client> client_;
  CExchange c_exchange_;
  PyCollectives collectives_;
  std::unordered_map<std::uint32_t, Layer> layers_;  // the layers that were added here; the core has other layers, too
  Held held_;
  Held held_many_;              // of start_all, by their first layer
  std::size_t told_count_ = 0;  // of notices
};

std::unique_ptr<PyClient> connect(const Options& options, nb::object store) {
  return std::make_unique<PyClient>(
      value_of(call_blocking([&, core_store = store_from(std::move(store))](auto& keep_waiting) {
        return Client::connect(options, core_store, keep_waiting);
      })));
}

}  // namespace

void bind_client(nb::module_& module) {
  const auto without_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Arrays>(module, "Arrays", "Contiguous CPU arrays, for start_all; keeps them alive.")
      .def(nb::init<std::vector<Array>>(), nb::arg("arrays").noconvert());
  nb::class_<PyClient>(module, "Client", "A worker's way into the exchange (include/poseidon/client.h).")
      .def_static("connect", &connect, nb::arg("options"), nb::arg("store").none() = nb::none())
      .def_prop_ro("rank", [](PyClient& self) { return self.get().rank(); })
      .def_prop_ro("world_size", [](PyClient& self) { return self.get().world_size(); })
      .def_prop_ro("cluster", [](PyClient& self) { return self.get().cluster(); })
      .def_prop_ro("generation", [](PyClient& self) { return self.get().generation(); })
      .def_prop_ro("run", [](PyClient& self) { return self.get().run(); })
      .def_prop_ro("joining", [](PyClient& self) { return self.get().joining(); })
      .def_prop_ro("servers_save", [](PyClient& self) { return self.get().servers_save(); })
      .def_prop_ro("collectives", &PyClient::collectives, nb::rv_policy::reference_internal)
      .def_prop_ro(
          "c_exchange", [](PyClient& self) { return reinterpret_cast<std::uintptr_t>(&self.c_exchange().exchange()); },
          "The address of the C interface for plugins (include/poseidon/c_exchange.h), valid as long as this object.")
      .def(
          "add_look",
          [](PyClient& self, std::uintptr_t address) {
            return self.c_exchange().add_look(reinterpret_cast<PoseidonLook*>(address));
          },
          nb::arg("address"), "The number of the PoseidonLook at this address, which stays until remove_look.")
      .def(
          "remove_look", [](PyClient& self, std::int64_t number) { self.c_exchange().remove_look(number); },
          nb::arg("number"))
      .def("add_layers", &PyClient::add_layers, nb::arg("layers"), nb::arg("transient") = false)
      .def("start", &PyClient::start, nb::arg("layer"), nb::arg("array").noconvert(), nb::arg("divisor"),
           nb::arg("factor_count").none() = nb::none())
      .def("start_all", &PyClient::start_all, nb::arg("first_layer"), nb::arg("arrays"), nb::arg("divisor"))
      .def("push_pull", &PyClient::push_pull, nb::arg("layer"), nb::arg("array").noconvert(),
           nb::arg("destination").noconvert(), nb::arg("divisor"))
      .def("push", &PyClient::push, nb::arg("layer"), nb::arg("array").noconvert(), nb::arg("divisor"))
      .def("pull", &PyClient::pull, nb::arg("layer"), nb::arg("destination").noconvert(), nb::arg("index") = 0,
           nb::arg("exact") = false)
      .def("assign", &PyClient::assign, nb::arg("layer"), nb::arg("array").noconvert(), nb::arg("index") = 0,
           nb::arg("update_count") = 0)
      .def("restore", &PyClient::restore, nb::arg("layer"), nb::arg("destination").noconvert(),
           nb::arg("version_limit") = 0)
      .def("set_rule", &PyClient::set_rule, nb::arg("layer"), nb::arg("rule"), nb::arg("compared") = true)
      .def("choose_chunk_bytes", &PyClient::choose_chunk_bytes, nb::arg("known") = 0)
      .def("start_absent", &PyClient::start_absent, nb::arg("layer"), nb::arg("array").noconvert(), nb::arg("divisor"),
           nb::arg("counts") = true)
      .def("start_factors", &PyClient::start_factors, nb::arg("layer"), nb::arg("lefts").noconvert(),
           nb::arg("rights").noconvert(), nb::arg("destination").noconvert().none(), nb::arg("divisor"),
           nb::arg("accumulate") = false)
      .def("start_rows", &PyClient::start_rows, nb::arg("layer"), nb::arg("indexes").noconvert(),
           nb::arg("values").noconvert(), nb::arg("divisor"))
      .def("start_absent_rows", &PyClient::start_absent_rows, nb::arg("layer"), nb::arg("divisor"),
           nb::arg("counts") = true)
      .def("result_rows", &PyClient::result_rows,
           "The indexes (int32; None: all rows) and values of a layer's result, as bytes that are valid until its next "
           "start.")
      .def("residual", &PyClient::residual, nb::arg("layer"),
           "What a lossy scheme has not sent of a layer yet, as bytes that are valid until its next start; None: "
           "nothing.")
      .def("set_residual", &PyClient::set_residual, nb::arg("layer"), nb::arg("residual").noconvert().none())
      .def("next_scheme",
           [](PyClient& self, std::uint32_t layer) { return std::string(scheme_name(self.get().next_scheme(layer))); })
      .def(
          "set_factor_count",
          [](PyClient& self, std::uint32_t layer, std::uint64_t count) { self.get().set_factor_count(layer, count); },
          without_gil)
      .def("choose", &PyClient::choose, nb::arg("layer"), nb::arg("scheme"), nb::arg("factor_count"))
      .def("gathered", &PyClient::gathered)
      .def(
          "act_for", [](PyClient& self, std::uint64_t thread) { self.get().act_for(thread); }, nb::arg("thread"))
      .def("expect_other_threads", [](PyClient& self) { self.get().expect_other_threads(); })
      .def("wait_all", &PyClient::wait_all)
      .def("wait", &PyClient::wait)
      .def("wait_operation", &PyClient::wait_operation, nb::arg("layer"), nb::arg("number"))
      .def("wait_range", &PyClient::wait_range, nb::arg("first_layer"), nb::arg("count"))
      .def("done", [](PyClient& self, std::uint32_t layer) { return self.get().done(layer); })
      .def("operation_done", [](PyClient& self, std::uint32_t layer,
                                std::uint64_t number) { return self.get().operation_done(layer, number); })
      .def("set_priorities", &PyClient::set_priorities, nb::arg("first_layer"), nb::arg("urgencies"),
           nb::arg("priority_classes"), nb::arg("priority_threshold"))
      .def_prop_ro("failure", [](PyClient& self) { return to_exception(self.get().status()); })
      .def("notices", [](PyClient& self) { return self.get().notices(); })
      .def("fresh_notices", &PyClient::fresh_notices)
      .def(
          "behind", [](PyClient& self) { return self.get().behind(); },
          "How many further steps have been completed without this rank (stragglers=drop).")
      .def(
          "straggler_report", [](PyClient& self) { return self.get().straggler_report(); }, without_gil,
          "The ranks that have been late, as LateRank, by rank: this one, and those that the server of this process "
          "knows of.")
      .def("layer_stats", [](PyClient& self, std::uint32_t layer) { return self.get().layer_stats(layer); })
      .def(
          "record_pushes",
          [](PyClient& self, std::uint64_t first, std::uint32_t count) { self.get().record_pushes(first, count); },
          nb::arg("first"), nb::arg("count"),
          "Keeps how every layer's pushes from number `first` on go, which are LayerStats.step. What was kept before "
          "is forgotten. Any thread.")
      .def(
          "recorded_pushes", [](PyClient& self, std::uint32_t layer) { return self.get().recorded_pushes(layer); },
          nb::arg("layer"), "What is kept of a layer's pushes that have completed, in their order. Any thread.")
      .def(
          "traffic", [](PyClient& self) { return self.get().traffic(); }, without_gil)
      .def(
          "abort", [](PyClient& self, const std::string& reason, bool planned) { self.get().abort(reason, planned); },
          without_gil, nb::arg("reason"), nb::arg("planned") = false)
      .def("shutdown", &PyClient::shutdown, nb::arg("serves_on") = false);
}

}  // namespace poseidon::bindings
