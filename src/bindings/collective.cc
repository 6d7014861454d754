// Bindings of poseidon/collective.h.
#include "bindings/collective.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cmath>
#include <utility>

namespace poseidon::bindings {

namespace {

constexpr std::size_t kLookAfter = 64;  // calls

std::vector<std::span<std::byte>> cut(const std::vector<Array>& arrays, const std::vector<std::size_t>& sizes) {
  std::vector<std::span<std::byte>> spans;
  if (sizes.empty()) {
    for (const Array& array : arrays) spans.push_back(bytes_of(array));
    return spans;
  }
  std::span<std::byte> rest = arrays.size() == 1 ? bytes_of(arrays.front()) : std::span<std::byte>();
  for (const std::size_t size : sizes) {
    if (size > rest.size()) raise_if_failed({ErrorCode::invalid_argument, "an array must have the bytes of its parts"});
    spans.push_back(rest.first(size));
    rest = rest.subspan(size);
  }
  return spans;
}

}  // namespace

void PyCollectives::add(std::uint32_t communicator, std::vector<std::uint32_t> ranks) {
  raise_if_failed(client_.add_communicator(communicator, std::move(ranks)));
}

std::uint64_t PyCollectives::start(std::uint32_t communicator, CollectiveKind kind, std::vector<Array> inputs,
                                   std::vector<Array> outputs, const std::vector<std::size_t>& input_bytes,
                                   const std::vector<std::size_t>& output_bytes, Element element, ReduceOp op,
                                   std::uint32_t divisor, std::uint32_t root, std::uint32_t label, double urgency) {
  CollectiveCall call{
      .kind = kind, .element = element, .op = op, .divisor = divisor, .root = root, .label = label, .urgency = urgency};
  for (const auto& input : cut(inputs, input_bytes)) call.inputs.push_back(input);
  call.outputs = cut(outputs, output_bytes);
  std::vector<Array> arrays = std::move(inputs);
  arrays.insert(arrays.end(), std::make_move_iterator(outputs.begin()), std::make_move_iterator(outputs.end()));
  return keep(client_.start_collective(communicator, std::move(call)), std::move(arrays));
}

std::uint64_t PyCollectives::send(std::uint32_t communicator, std::uint32_t to, std::uint32_t tag, std::uint32_t label,
                                  Array data) {
  const auto bytes = bytes_of(data);
  return keep(client_.send(communicator, to, {tag, label}, bytes), {std::move(data)});
}

std::uint64_t PyCollectives::receive(std::uint32_t communicator, std::optional<std::uint32_t> from, std::uint32_t tag,
                                     std::uint32_t label, Array memory) {
  const auto bytes = bytes_of(memory);
  return keep(client_.receive(communicator, from.value_or(kAnySource), {tag, label}, bytes), {std::move(memory)});
}

std::optional<std::uint32_t> PyCollectives::wait(std::uint64_t call, std::optional<double> limit_s) {
  const std::chrono::milliseconds limit(limit_s ? std::max<std::int64_t>(1, std::llround(*limit_s * 1e3)) : 0);
  const auto wait_for = [&](std::chrono::milliseconds at_most) {
    return call_blocking([&](auto& keep_waiting) { return client_.wait_collective(call, at_most, keep_waiting); });
  };
  auto source = wait_for(limit);
  if (!source.ok() && source.status().code() == ErrorCode::timeout && limit.count() > 0) {
    if (!client_.collective_done(call)) return std::nullopt;
    source = wait_for(std::chrono::milliseconds(0));  // it has ended meanwhile
  }
  const auto released = held_.extract(call);  // destroyed at the end, because that may run Python code
  raise_if_failed(source.status());
  return source.value();
}

/// Keeps the arrays of a call that has started. Nobody has to wait for one.
std::uint64_t PyCollectives::keep(const Result<std::uint64_t>& call, std::vector<Array> arrays) {
  raise_if_failed(call.status());
  if (held_.size() >= kLookAfter) let_go();
  held_.emplace(call.value(), std::move(arrays));
  return call.value();
}

void PyCollectives::let_go() {
  std::vector<std::vector<Array>> released;
  for (auto one = held_.begin(); one != held_.end();) {
    if (!client_.collective_done(one->first)) {
      ++one;
      continue;
    }
    released.push_back(std::move(one->second));
    one = held_.erase(one);
  }
}

void bind_collective(nb::module_& module) {
  nb::enum_<ReduceOp>(module, "ReduceOp")
      .value("sum", ReduceOp::sum)
      .value("product", ReduceOp::product)
      .value("min", ReduceOp::min)
      .value("max", ReduceOp::max)
      .value("band", ReduceOp::band)
      .value("bor", ReduceOp::bor)
      .value("bxor", ReduceOp::bxor);
  nb::enum_<Element>(module, "Element")
      .value("float32", Element::float32)
      .value("float64", Element::float64)
      .value("float16", Element::float16)
      .value("bfloat16", Element::bfloat16)
      .value("int8", Element::int8)
      .value("uint8", Element::uint8)
      .value("int16", Element::int16)
      .value("int32", Element::int32)
      .value("int64", Element::int64);
  nb::enum_<CollectiveKind>(module, "CollectiveKind")
      .value("all_reduce", CollectiveKind::all_reduce)
      .value("reduce", CollectiveKind::reduce)
      .value("reduce_scatter", CollectiveKind::reduce_scatter)
      .value("all_gather", CollectiveKind::all_gather)
      .value("gather", CollectiveKind::gather)
      .value("broadcast", CollectiveKind::broadcast)
      .value("scatter", CollectiveKind::scatter)
      .value("all_to_all", CollectiveKind::all_to_all)
      .value("barrier", CollectiveKind::barrier);
  using namespace nb::literals;
  nb::class_<PyCollectives>(module, "Collectives",
                            "The collectives of a client (poseidon/collective.h). Each call starts and has a number.")
      .def("add", &PyCollectives::add, "communicator"_a, "ranks"_a)
      .def("start", &PyCollectives::start, "communicator"_a, "kind"_a, "inputs"_a, "outputs"_a, "input_bytes"_a,
           "output_bytes"_a, "element"_a = Element::uint8, "op"_a = ReduceOp::sum, "divisor"_a = 1, "root"_a = 0,
           "label"_a = 0, "urgency"_a = 0.5)
      .def("send", &PyCollectives::send, "communicator"_a, "to"_a, "tag"_a, "label"_a, "data"_a)
      .def("receive", &PyCollectives::receive, "communicator"_a, "source"_a.none(), "tag"_a, "label"_a, "memory"_a)
      .def("wait", &PyCollectives::wait, "call"_a, "limit_s"_a = nb::none())
      .def("done", &PyCollectives::done, "call"_a);
}

}  // namespace poseidon::bindings
