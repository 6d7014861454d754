// poseidon/options.h
#include "poseidon/options.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace poseidon::bindings {

namespace {

template <typename Names>
Status not_one_of(const char* name, const std::string& text, const Names& names) {
  std::string allowed;
  for (const auto& [one, value] : names) allowed += (allowed.empty() ? "'" : ", '") + std::string(one) + "'";
  return {ErrorCode::invalid_argument, std::string(name) + " is one of " + allowed + ", not '" + text + "'"};
}

/// An attribute, from Python and to Python: the class and its keyword constructor both use it.
struct Field {
  const char* name;
  std::function<nb::object(const Options&)> get;
  std::function<void(Options&, nb::handle)> set;
};

template <typename T>
Field field(const char* name, T Options::*member) {
  return {name, [member](const Options& options) { return nb::cast(options.*member); },
          [member](Options& options, nb::handle value) { options.*member = nb::cast<T>(value); }};
}

/// An enumeration, by the names that the command line and the environment use too.
template <typename E>
Field choice(const char* name, E Options::*member, std::vector<std::pair<const char*, E>> names) {
  return {name,
          [member, names](const Options& options) {
            const auto found =
                std::find_if(names.begin(), names.end(), [&](const auto& n) { return n.second == options.*member; });
            return nb::cast(found->first);
          },
          [name, member, names](Options& options, nb::handle value) {
            const auto text = nb::cast<std::string>(value);
            const auto found = std::find_if(names.begin(), names.end(), [&](const auto& n) { return text == n.first; });
            if (found == names.end()) raise_if_failed(not_one_of(name, text, names));
            options.*member = found->second;
          }};
}

Field timeout_field() {
  return {"timeout",
          [](const Options& options) { return nb::cast(std::chrono::duration<double>(options.timeout).count()); },
          [](Options& options, nb::handle value) {
            const auto seconds = nb::cast<double>(value);
            if (!(seconds > 0 && seconds < 1e9))
              raise_if_failed({ErrorCode::invalid_argument, "timeout is a positive number of seconds"});
            options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
          }};
}

const std::vector<Field>& fields() {
  static const std::vector<Field> all{
      field("rank", &Options::rank),
      field("world_size", &Options::world_size),
      field("master_addr", &Options::master_addr),
      field("master_port", &Options::master_port),
      field("job", &Options::job),
      field("secret", &Options::secret),
      choice("tls", &Options::tls, {{"off", false}, {"on", true}}),
      field("interfaces", &Options::interfaces),
      field("servers", &Options::servers),
      choice("transport", &Options::transport,
             {{"auto", Medium::automatic}, {"tcp", Medium::tcp}, {"shm", Medium::shm}, {"ucx", Medium::ucx}}),
      field("server_cores", &Options::server_cores),
      field("flows", &Options::flows),
      field("chunk_bytes", &Options::chunk_bytes),
      field("small_bytes", &Options::small_bytes),
      field("group_bytes", &Options::group_bytes),
      field("compute_threads", &Options::compute_threads),
      choice("schedule", &Options::schedule,
             {{"wait_free", Schedule::wait_free}, {"sequential", Schedule::sequential}}),
      choice("partition", &Options::partition, {{"balanced", Partition::balanced}, {"coarse", Partition::coarse}}),
      choice("aggregation", &Options::aggregation,
             {{"streaming", Aggregation::streaming}, {"at_once", Aggregation::at_once}, {"wide", Aggregation::wide}}),
      choice("reduce_order", &Options::reduce_order, {{"rank", ReduceOrder::rank}, {"arrival", ReduceOrder::arrival}}),
      choice("assignment", &Options::assignment, {{"chunk", Assignment::chunk}, {"worker", Assignment::worker}}),
      field("priority_classes", &Options::priority_classes),
      field("dscp", &Options::dscp),
      choice("stragglers", &Options::stragglers, {{"wait", Stragglers::wait}, {"drop", Stragglers::drop}}),
      field("straggler_factor", &Options::straggler_factor),
      field("straggler_steps", &Options::straggler_steps),
      choice("consistency", &Options::consistency,
             {{"bsp", Consistency::bsp}, {"ssp", Consistency::ssp}, {"async", Consistency::async}}),
      field("staleness", &Options::staleness),
      choice("on_failure", &Options::on_failure,
             {{"abort", OnFailure::abort}, {"rejoin", OnFailure::rejoin}, {"shrink", OnFailure::shrink}}),
      field("min_workers", &Options::min_workers),
      field("generation", &Options::generation),
      field("memory_limit", &Options::memory_limit),
      field("server_memory", &Options::server_memory),
      field("max_jobs", &Options::max_jobs),
      field("checkpoint_dir", &Options::checkpoint_dir),
      field("checkpoint_every", &Options::checkpoint_every),
      field("checkpoint_keep", &Options::checkpoint_keep),
      field("flight_record", &Options::flight_record),
      timeout_field()};
  return all;
}

void init_from_keywords(Options* self, const nb::kwargs& keywords) {
  Options options;
  for (auto [key, value] : keywords) {
    const auto name = nb::cast<std::string>(key);
    const auto found = std::find_if(fields().begin(), fields().end(), [&](const Field& f) { return name == f.name; });
    if (found == fields().end()) raise_if_failed({ErrorCode::invalid_argument, "there is no option '" + name + "'"});
    found->set(options, value);
  }
  new (self) Options(std::move(options));
}

}  // namespace

void bind_options(nb::module_& module) {
  auto type = nb::class_<Options>(module, "Options", "Every setting of the core; timeout in seconds.")
                  .def("__init__", &init_from_keywords);
  for (const Field& f : fields())
    type.def_prop_rw(
        f.name, [&f](const Options& options) { return f.get(options); },
        [&f](Options& options, nb::handle value) { f.set(options, value); });
  module.def("tls_available", &tls_available, "Whether this build has OpenSSL, which tls=on needs.");
}

}  // namespace poseidon::bindings
