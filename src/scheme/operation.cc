#include "scheme/operation.h"

#include <algorithm>

#include "wire/messages/contribution.h"

namespace poseidon {

namespace {

std::uint64_t unbounded_factor_count(const Gradient& gradient) {
  if (std::holds_alternative<NoGradient>(gradient)) return 0;
  if (const auto* dense = std::get_if<DenseGradient>(&gradient)) return dense->factor_count;
  if (const auto* rows = std::get_if<LayerRows>(&gradient)) return rows->indexes.size();
  const auto* factored = std::get_if<FactoredGradient>(&gradient);
  if (factored == nullptr) return kNotFactorable;
  std::uint64_t count = 0;
  for (const FactorRows& rows : factored->rows) count += rows.count;
  return count;
}

}  // namespace

std::uint32_t factor_count_of(const Gradient& gradient) {
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(unbounded_factor_count(gradient), wire::kUnboundedFactors));
}

std::span<std::byte> destination_of(const Operation& operation) {
  if (const auto* push = std::get_if<Push>(&operation)) return push->destination;
  if (const auto* pull = std::get_if<Pull>(&operation)) return pull->destination;
  if (const auto* restore = std::get_if<Restore>(&operation)) return restore->destination;
  return {};
}

std::span<const std::byte> data_of(const Operation& operation) {
  if (const auto* assign = std::get_if<Assign>(&operation)) return assign->data;
  const auto* push = std::get_if<Push>(&operation);
  const auto* dense = push == nullptr ? nullptr : std::get_if<DenseGradient>(&push->gradient);
  return dense == nullptr ? std::span<const std::byte>() : dense->data;
}

}  // namespace poseidon
