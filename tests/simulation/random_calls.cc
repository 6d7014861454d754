#include "simulation/random_calls.h"

#include <algorithm>
#include <iterator>
#include <random>

namespace poseidon::testing {

namespace {

float combined(ReduceOp op, float a, float b) {
  switch (op) {
    case ReduceOp::min:
      return std::min(a, b);
    case ReduceOp::max:
      return std::max(a, b);
    default:
      return a + b;
  }
}

/// Counts that differ between pairs of ranks.
std::size_t pair_count(std::size_t count, std::size_t from, std::size_t to) {
  return count * ((from + 2 * to) % 3) / 2;
}

}  // namespace

std::vector<float> numbers(std::size_t count, std::uint64_t seed) {
  std::mt19937 random(static_cast<std::mt19937::result_type>(seed));
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 200) - 100);
  return values;
}

std::vector<float> given(std::size_t count, std::uint64_t number, std::size_t from, std::size_t to) {
  return numbers(count, (number * 64 + from) * 64 + to);
}

std::vector<float> reduced(std::size_t ranks, std::size_t count, std::uint64_t number, ReduceOp op, std::size_t to) {
  std::vector<float> result = given(count, number, 0, to);
  for (std::size_t rank = 1; rank < ranks; ++rank) {
    const auto part = given(count, number, rank, to);
    for (std::size_t i = 0; i < count; ++i) result[i] = combined(op, result[i], part[i]);
  }
  return result;
}

std::vector<RandomCall> random_calls(std::size_t ranks, std::size_t how_many, unsigned seed) {
  std::mt19937 random(seed);
  const std::size_t counts[] = {0, 1, 3, 1000, 1024, 5000, 33333, 100'000};
  const ReduceOp ops[] = {ReduceOp::sum, ReduceOp::min, ReduceOp::max};
  std::vector<RandomCall> calls;
  for (std::size_t i = 0; i < how_many; ++i)
    calls.push_back({static_cast<CollectiveKind>(1 + random() % 9), ops[random() % 3],
                     counts[random() % std::size(counts)], static_cast<std::uint32_t>(random() % ranks)});
  return calls;
}

Prepared prepare(const RandomCall& random, std::uint64_t number, std::size_t rank, std::size_t ranks) {
  Prepared made;
  const std::size_t count = random.count;
  const bool root = rank == random.root;
  const auto own = [&] { made.inputs = {given(count, number, rank)}; };
  switch (random.kind) {
    case CollectiveKind::all_reduce:
      own();
      made.expected = {reduced(ranks, count, number, random.op)};
      break;
    case CollectiveKind::reduce:
      own();
      if (root) made.expected = {reduced(ranks, count, number, random.op)};
      break;
    case CollectiveKind::reduce_scatter:
      for (std::size_t to = 0; to < ranks; ++to) made.inputs.push_back(given(count, number, rank, to));
      made.expected = {reduced(ranks, count, number, random.op, rank)};
      break;
    case CollectiveKind::all_gather:
      own();
      for (std::size_t from = 0; from < ranks; ++from) made.expected.push_back(given(count, number, from));
      break;
    case CollectiveKind::gather:
      made.inputs = {given(pair_count(count, rank, 0), number, rank)};
      if (root)
        for (std::size_t from = 0; from < ranks; ++from)
          made.expected.push_back(given(pair_count(count, from, 0), number, from));
      break;
    case CollectiveKind::broadcast:
      if (root)
        own();
      else
        made.expected = {given(count, number, random.root)};
      break;
    case CollectiveKind::scatter:
      if (root)
        for (std::size_t to = 0; to < ranks; ++to) made.inputs.push_back(given(count, number, rank, to));
      made.expected = {given(count, number, random.root, rank)};
      break;
    case CollectiveKind::all_to_all:
      for (std::size_t other = 0; other < ranks; ++other) {
        made.inputs.push_back(given(pair_count(count, rank, other), number, rank, other));
        made.expected.push_back(given(pair_count(count, other, rank), number, other, rank));
      }
      break;
    case CollectiveKind::barrier:
      break;
  }
  for (const auto& values : made.expected) made.outputs.emplace_back(values.size(), -1.0F);
  made.call.kind = random.kind;
  made.call.op = random.op;
  made.call.element = Element::float32;
  made.call.root = random.root;
  for (const auto& input : made.inputs) made.call.inputs.push_back(bytes(input));
  for (auto& output : made.outputs) made.call.outputs.push_back(bytes(output));
  return made;
}

}  // namespace poseidon::testing
