// Measures the kernels on one core. It compares sums, medians, conversions and optimizer updates with memory copies,
// gives the GFLOP/s of factor products, and times an event of the flight recorder and a message's header. It prints a
// table, in which each figure is the best of several rounds. `make core-bench` builds and runs it.
// With the arguments `adamw` and a number of parameters it prints one figure, which bench/adamw.py compares with torch.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/clock.h"
#include "base/flight_recorder.h"
#include "kernel/aggregators/aggregate.h"
#include "kernel/kernel.h"
#include "poseidon/update.h"
#include "wire/messages/contribution.h"

namespace poseidon::kernel {
namespace {

constexpr int kRounds = 31;

/// Returns the seconds of one call of `work`. It measures 2 ms of calls, which is short enough to find a moment without
/// other load.
template <typename Work>
double seconds_per_call(const Work& work) {
  const std::int64_t begin = now_ns();
  std::int64_t end = begin;
  int calls = 0;
  for (; end - begin < 2'000'000; end = now_ns(), ++calls) work();
  return static_cast<double>(end - begin) * 1e-9 / calls;
}

/// Returns the seconds of one call of each function, the best of kRounds rounds. The functions take turns, so that
/// other load affects all of them alike.
template <typename... Works>
std::array<double, sizeof...(Works)> best_seconds(const Works&... works) {
  std::array<double, sizeof...(Works)> best;
  best.fill(std::numeric_limits<double>::infinity());
  for (int round = 0; round < kRounds; ++round) {
    std::size_t i = 0;
    ((best[i] = std::min(best[i], seconds_per_call(works)), ++i), ...);
  }
  return best;
}

/// Aligned arrays of one size, each at another offset from a page. With equal offsets they would share cache sets.
class Arrays {
 public:
  Arrays(std::size_t count, std::size_t size_bytes) {
    for (std::size_t i = 0; i < count; ++i) {
      memory_.emplace_back(size_bytes + (i + 1) * kSkewBytes);
      std::fill_n(memory_.back().data(), memory_.back().size(), std::byte{0});
      pointers_.push_back(memory_.back().data() + i * kSkewBytes);
    }
  }
  std::byte* operator[](std::size_t i) const { return pointers_[i]; }
  std::vector<const std::byte*> inputs() const { return {pointers_.begin(), pointers_.end()}; }

 private:
  static constexpr std::size_t kSkewBytes = 320;
  std::vector<Buffer> memory_;
  std::vector<std::byte*> pointers_;
};

constexpr std::size_t kInputs = 8;

/// Prints one line: `name` reads `bytes` bytes in `seconds`. The copies that it is compared with take copies[i] seconds
/// for the same number of bytes.
void print_rate(const char* name, DType dtype, std::size_t size_bytes, double bytes, double seconds,
                std::initializer_list<double> copies) {
  std::printf("%-22s %-9s %5zu KiB  %6.1f GB/s", name, dtype_name(dtype).data(), size_bytes >> 10,
              bytes / seconds * 1e-9);
  for (const double copy : copies) std::printf("   memcpy %6.1f, ratio %.2f", bytes / copy * 1e-9, copy / seconds);
  std::printf("\n");
}

/// Keeps the compiler from merging equal copies.
void clobber() { asm volatile("" ::: "memory"); }

/// Sums eight inputs at once, in GB/s of input. Compared with eight copies of one array, and with one copy of each
/// input.
void bench_sum(DType dtype, std::size_t size_bytes) {
  Arrays arrays(kInputs + 1, size_bytes);
  std::byte* const out = arrays[kInputs];
  std::vector<const std::byte*> inputs = arrays.inputs();
  inputs.pop_back();
  const auto [seconds, copy_one, copy_all] =
      best_seconds([&] { sum(inputs, out, size_bytes / dtype_bytes(dtype), dtype, kInputs); },
                   [&] {
                     for (std::size_t i = 0; i < kInputs; ++i, clobber()) std::memcpy(out, inputs[0], size_bytes);
                   },
                   [&] {
                     for (const std::byte* input : inputs) std::memcpy(out, input, size_bytes);
                   });
  print_rate("sum of 8 at once", dtype, size_bytes, static_cast<double>(kInputs * size_bytes), seconds,
             {copy_one, copy_all});
}

/// Reduces eight inputs by an aggregator that collects them. The copies to compare with are those of bench_sum.
void bench_aggregate(const char* name, DType dtype, std::size_t size_bytes) {
  Arrays arrays(kInputs + 1, size_bytes);
  std::byte* const out = arrays[kInputs];
  std::vector<const std::byte*> inputs = arrays.inputs();
  inputs.pop_back();
  const Aggregator& aggregator = *find_aggregator(name);
  const auto [seconds, copy] =
      best_seconds([&] { aggregate(aggregator, inputs, out, size_bytes / dtype_bytes(dtype), dtype, 1); },
                   [&] {
                     for (const std::byte* input : inputs) std::memcpy(out, input, size_bytes);
                   });
  print_rate((std::string(name) + " of 8").c_str(), dtype, size_bytes, static_cast<double>(kInputs * size_bytes),
             seconds, {copy});
}

/// Adds one input after the other to one running sum. The copies to compare with are those of bench_sum.
void bench_accumulate(DType dtype, std::size_t size_bytes) {
  Arrays arrays(kInputs, size_bytes);
  Arrays sums(1, size_bytes * 2);
  const std::size_t n = size_bytes / dtype_bytes(dtype);
  const auto inputs = arrays.inputs();
  for (const bool same : {true, false}) {
    const auto [seconds, copy] = best_seconds(
        [&] {
          for (std::size_t i = 0; i < kInputs; ++i) accumulate(inputs[same ? 0 : i], sums[0], n, dtype);
        },
        [&] {
          for (std::size_t i = 0; i < kInputs; ++i, clobber()) std::memcpy(sums[0], inputs[same ? 0 : i], size_bytes);
        });
    print_rate(same ? "accumulate, one array" : "accumulate, 8 arrays", dtype, size_bytes,
               static_cast<double>(kInputs * size_bytes), seconds, {copy});
  }
}

/// Adds an array that arrives in pieces through one small buffer, which is in the cache. Compared with copies of the
/// pieces to their places.
void bench_accumulate_pieces(DType dtype, std::size_t size_bytes) {
  constexpr std::size_t piece_bytes = 8 << 10;
  Arrays piece(1, piece_bytes);
  Arrays sums(1, size_bytes * 2);
  const std::size_t sum_piece_bytes = piece_bytes / dtype_bytes(dtype) * running_sum_bytes(dtype);
  const auto [seconds, copy] = best_seconds(
      [&] {
        for (std::size_t i = 0; i < size_bytes / piece_bytes; ++i) {
          accumulate(piece[0], sums[0] + i * sum_piece_bytes, piece_bytes / dtype_bytes(dtype), dtype);
        }
      },
      [&] {
        for (std::size_t i = 0; i < size_bytes / piece_bytes; ++i) {
          std::memcpy(sums[0] + i * piece_bytes, piece[0], piece_bytes);
        }
      });
  print_rate("accumulate, 8 KiB piece", dtype, size_bytes, static_cast<double>(size_bytes), seconds, {copy});
}

/// A copy that reads and writes `moved_bytes` in total.
class Copy {
 public:
  explicit Copy(std::size_t moved_bytes) : arrays_(2, moved_bytes / 2), size_bytes_(moved_bytes / 2) {}
  void operator()() const {
    std::memcpy(arrays_[0], arrays_[1], size_bytes_);
    clobber();
  }

 private:
  Arrays arrays_;
  std::size_t size_bytes_;
};

/// An update of `size_bytes` of parameters.
template <typename T>
class Update {
 public:
  Update(const UpdateRule& rule, std::size_t size_bytes) : arrays_(5, size_bytes) {
    const std::size_t n = size_bytes / sizeof(T);
    const auto elements = [&](std::size_t array) { return std::span(reinterpret_cast<T*>(arrays_[array]), n); };
    for (std::size_t array = 0; array < 4; ++array)
      for (std::size_t i = 0; i < n; ++i) elements(array)[i] = static_cast<T>(1e-3 * static_cast<double>(i % 977 + 1));
    call.parameters = elements(0);
    call.gradient = elements(1);
    call.states[0] = elements(2);
    call.states[1] = elements(3);
    call.scratch = elements(4);
    call.update_count = 2;
    call.values = rule.values;
  }

  UpdateCall<T> call;

 private:
  Arrays arrays_;  // parameters, gradient, two states, and LAMB's direction
};

/// Measures GB/s, read and written together, and compares with a copy that reads and writes as much.
template <typename T>
void bench_update_of(const char* name, const UpdateRule& rule, const std::function<void(const UpdateCall<T>&)>& update,
                     DType dtype, std::size_t size_bytes) {
  const Update<T> work(rule, size_bytes);
  // Parameters and states are read and written; the gradient is read. LAMB also writes and reads the direction, and
  // reads the parameters twice.
  const std::size_t moves = 3 + 2 * update_state_count(rule) + (rule.kind->needs_scratch ? 3 : 0);
  const auto [seconds, copy] = best_seconds([&] { update(work.call); }, Copy(moves * size_bytes));
  print_rate(name, dtype, size_bytes, static_cast<double>(moves * size_bytes), seconds, {copy});
}

void bench_update(const char* name, const UpdateRule& rule, DType dtype, std::size_t size_bytes) {
  if (dtype == DType::float64) return bench_update_of<double>(name, rule, rule.kind->update_float64, dtype, size_bytes);
  bench_update_of<float>(name, rule, rule.kind->update_float32, dtype, size_bytes);
}

/// Converts float32 values to `dtype` and back. Each conversion is compared with a copy that reads and writes as much.
void bench_conversions(DType dtype, std::size_t size_bytes) {
  const std::size_t n = size_bytes / sizeof(float);
  const std::size_t encoded_bytes = array_bytes(dtype, n);
  Arrays arrays(3, size_bytes + dtype_bytes(dtype));
  auto* const values = reinterpret_cast<float*>(arrays[0]);
  auto* const residual = reinterpret_cast<float*>(arrays[1]);
  for (std::size_t i = 0; i < n; ++i) values[i] = 1e-3F * static_cast<float>(i % 977) - 0.4F;
  const auto print = [&](const char* name, std::size_t moved_bytes, const std::function<void()>& convert) {
    const auto [seconds, copy] = best_seconds(convert, Copy(moved_bytes));
    print_rate(name, dtype, size_bytes, static_cast<double>(moved_bytes), seconds, {copy});
  };
  print("encode", size_bytes + encoded_bytes, [&] { encode(dtype, values, arrays[2], n); });
  print("encode with feedback", 3 * size_bytes + encoded_bytes,
        [&] { encode_with_feedback(dtype, values, residual, arrays[2], n); });
  print("decode", size_bytes + encoded_bytes, [&] { decode(dtype, arrays[2], values, n); });
}

void bench_product(DType dtype, std::size_t rows, std::size_t cols, std::size_t factor_count, std::size_t term_count) {
  const std::size_t element_bytes = dtype_bytes(dtype);
  std::vector<std::byte> left(factor_count * rows * element_bytes);
  std::vector<std::byte> right(factor_count * cols * element_bytes);
  std::vector<std::byte> out(rows * cols * element_bytes);
  FactorTerm term;
  term.dtype = dtype;
  term.left = left.data();
  term.right = right.data();
  term.count = factor_count / term_count;
  const std::vector<FactorTerm> terms(term_count, term);
  const auto [seconds] = best_seconds([&] { factor_product(terms, out.data(), dtype, rows, cols, 0, rows, 1, false); });
  const double flops = 2.0 * static_cast<double>(rows * cols) * static_cast<double>(term.count * term_count);
  std::printf("product    %-9s %5zu x %5zu  K %4zu in %zu terms  %7.2f ms  %7.1f GFLOP/s\n", dtype_name(dtype).data(),
              rows, cols, term.count * term_count, term_count, seconds * 1e3, flops / seconds * 1e-9);
}

/// Measures what every message costs beside its transport: the clock is read, and an event is recorded.
void bench_recorder() {
  constexpr std::uint32_t kEvents = 1000;
  FlightRecorder recorder;
  const auto [seconds] = best_seconds([&] {
    for (std::uint32_t i = 0; i < kEvents; ++i) recorder.note({.what = "push", .bytes = i, .unit = i, .chunk = i});
  });
  std::printf("recorder   one event %48.1f ns\n", seconds / kEvents * 1e9);
}

/// Measures a push's header on its way: made and encoded by the sender, decoded, checked and read by the receiver.
void bench_header() {
  constexpr std::uint32_t kMessages = 1000;
  std::array<std::byte, wire::kHeaderBytes> bytes{};
  wire::Contribution push;
  push.rows = 7;
  std::uint64_t sum = 0;
  const auto [seconds] = best_seconds([&] {
    for (std::uint32_t i = 0; i < kMessages; ++i) {
      push.chunk = i;
      push.worker_count = i;
      wire::encode(push.make(), bytes);
      clobber();
      wire::Header header;
      if (!wire::decode(bytes, header).ok()) std::abort();
      if (!wire::check_kind(header.kind, wire::Direction::to_server, header.payload_bytes).ok()) std::abort();
      const auto read = wire::Contribution::read(header);
      sum += read.chunk + read.worker_count + read.rows;
    }
  });
  if (sum == 0) std::abort();
  std::printf("header     made, encoded, decoded, read %30.1f ns\n", seconds / kMessages * 1e9);
}

UpdateRule rule_of(const char* kind, std::vector<std::pair<std::string, double>> values) {
  values.insert(values.end(), {{"lr", 1e-3}, {"weight_decay", 0.01}});
  return make_update_rule(kind, values).value();
}

const std::vector<std::pair<std::string, double>> kMoments{{"beta1", 0.9}, {"beta2", 0.999}, {"eps", 1e-8}};

/// Prints the nanoseconds in which AdamW updates one of `element_count` float32 parameters, for bench/adamw.py.
void print_adamw(std::size_t element_count) {
  const UpdateRule rule = rule_of("adamw", kMoments);
  const Update<float> work(rule, element_count * sizeof(float));
  const auto [seconds] = best_seconds([&] { rule.kind->update_float32(work.call); });
  std::printf("%.6f\n", seconds / static_cast<double>(element_count) * 1e9);
}

}  // namespace
}  // namespace poseidon::kernel

int main(int argument_count, char** arguments) {
  using poseidon::DType;
  using poseidon::kernel::rule_of;
  const auto& moments = poseidon::kernel::kMoments;
  namespace kernel = poseidon::kernel;
  if (argument_count == 3 && std::string_view(arguments[1]) == "adamw") {
    kernel::print_adamw(std::stoul(arguments[2]));
    return 0;
  }
  constexpr std::size_t kSizes[] = {std::size_t{32} << 10, std::size_t{2} << 20};
  constexpr std::size_t kFromMemory = std::size_t{128} << 20;
  for (const DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16}) {
    for (const std::size_t size_bytes : kSizes) {
      kernel::bench_sum(dtype, size_bytes);
      kernel::bench_aggregate("median", dtype, size_bytes);
      kernel::bench_accumulate(dtype, size_bytes);
      kernel::bench_accumulate_pieces(dtype, size_bytes);
    }
  }
  for (const DType dtype : {DType::float16, DType::bfloat16, DType::int8_blocks})
    for (const std::size_t size_bytes : {kSizes[0], kSizes[1], kFromMemory})
      kernel::bench_conversions(dtype, size_bytes);
  for (const DType dtype : {DType::float32, DType::float64}) {
    for (const std::size_t size_bytes : kSizes) {
      kernel::bench_update("sgd", rule_of("sgd", {}), dtype, size_bytes);
      kernel::bench_update("sgd, momentum", rule_of("sgd", {{"momentum", 0.9}}), dtype, size_bytes);
      kernel::bench_update("adam", rule_of("adam", moments), dtype, size_bytes);
      kernel::bench_update("adamw", rule_of("adamw", moments), dtype, size_bytes);
      kernel::bench_update("lamb", rule_of("lamb", moments), dtype, size_bytes);
    }
  }
  for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16}) {
    kernel::bench_product(dtype, 1024, 6272, 64, 8);
    kernel::bench_product(dtype, 1000, 1024, 512, 4);
  }
  kernel::bench_recorder();
  kernel::bench_header();
}
