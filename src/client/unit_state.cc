// Checks of operations before they start, and the outcome of exchanges.
#include "client/unit_state.h"

#include <algorithm>
#include <utility>

#include "wire/messages/rows.h"

namespace poseidon {

Status invalid_layer(const Layer& layer, const std::string& why) {
  return {ErrorCode::invalid_argument, "layer '" + layer.name + "' " + why};
}

Status no_layer(std::uint32_t layer) {
  return {ErrorCode::invalid_argument, concat("there is no layer ", layer, "; take a number that add_layers returned")};
}

UnitState::UnitState(std::shared_ptr<const Plan> of, std::size_t index, bool transient, const Links& links,
                     std::function<void(UnitState&)> on_done)
    : plan(std::move(of)),
      syncer(plan->units[index], plan->layers[plan->units[index].layers.front()], transient, plan->cluster, links,
             [this, done = std::move(on_done)](Syncer&) { done(*this); }),
      group(plan->units[index].grouped() ? std::make_unique<Group>(plan->units[index]) : nullptr),
      next_scheme(syncer.next_scheme()) {}

void UnitState::gather_members() {
  const Exchange& exchange = syncer.exchange();
  const Progress& progress = exchange.progress;
  if (!progress.answers || !progress.answers->group_result || !exchange.outcome.present) return;
  for (std::size_t member = 0; member < layers.size(); ++member)
    if (group->present(progress.result, member)) group->take(progress.result, member, layers[member]->destination);
}

LayerStats UnitState::stats_of(const LayerState& layer) const {
  const Exchange& exchange = syncer.exchange();
  if (!group) return exchange.outcome;
  const double unit_bytes = static_cast<double>(std::max<std::size_t>(1, syncer.unit().size_bytes));
  const auto share = [&](std::uint64_t bytes) {
    return static_cast<std::uint64_t>(static_cast<double>(layer.size_bytes) *
                                      (static_cast<double>(bytes) / unit_bytes));
  };
  LayerStats stats = exchange.outcome;
  stats.bytes_sent = share(stats.bytes_sent);
  stats.bytes_received = share(stats.bytes_received);
  if (exchange.progress.answers && exchange.progress.answers->group_result)
    stats.present =
        exchange.progress.status.ok() && stats.present && group->present(exchange.progress.result, layer.member);
  return stats;
}

Status LayerState::check_start(const Operation& operation) const {
  if (running) return invalid_layer(*layer, "was started twice in one step; wait for its exchange before the next");
  if (Status status = check_memory(operation); !status.ok()) return status;
  const auto* push = std::get_if<Push>(&operation);
  if ((push == nullptr || !push->wants_result) && !layer->stored)
    return invalid_layer(*layer, "is not stored by the servers: push, pull and assign need a layer that is");
  return push == nullptr ? Status() : check_push(*push);
}

Status LayerState::check_choice(Scheme scheme) const {
  if (running) return invalid_layer(*layer, "is being exchanged: choose its scheme before its exchange starts");
  if (scheme == Scheme::automatic) return {};
  const std::vector<Scheme> schemes = automatic_schemes(*layer, unit->plan->cluster);
  const bool may_choose = std::ranges::find(schemes, scheme) != schemes.end() || chooses_exact(*layer, scheme);
  if (!unit->group && may_choose) return {};
  return invalid_layer(*layer, "cannot be told to take scheme " + std::string(scheme_name(scheme)) +
                                   ": choose among those that \"auto\" may take for it, or ps instead of a lossy one");
}

/// Checks that the caller's memory has the layer's size.
Status LayerState::check_memory(const Operation& operation) const {
  const auto* push = std::get_if<Push>(&operation);
  const auto* factored = push == nullptr ? nullptr : std::get_if<FactoredGradient>(&push->gradient);
  const bool sends = std::holds_alternative<Assign>(operation) ||
                     (push != nullptr && std::holds_alternative<DenseGradient>(push->gradient));
  const bool receives = push == nullptr ? !sends : push->wants_result;
  const auto has_bytes = [this](std::size_t given) {
    return invalid_layer(*layer,
                         concat("has ", size_bytes, " bytes, the given array ", given, "; give one of its size"));
  };
  const std::size_t sent_bytes = data_of(operation).size();
  if (sends && sent_bytes != size_bytes) return has_bytes(sent_bytes);
  const std::size_t received_bytes = destination_of(operation).size();
  const SchemeTraits& traits = traits_of(unit->next_scheme);
  const bool keeps_result = (factored != nullptr && traits.workers_multiply) || (push != nullptr && traits.takes_rows);
  if (receives && !(keeps_result && received_bytes == 0) && received_bytes != size_bytes)
    return has_bytes(received_bytes);
  return {};
}

Status LayerState::check_push(const Push& push) const {
  if (push.divisor == 0 || (push.divisor != 1 && !dtype_is_floating(layer->dtype)))
    return invalid_layer(*layer, concat("of dtype ", dtype_name(layer->dtype), " cannot be divided by ", push.divisor,
                                        "; give divisor 1"));
  if (unit->group && !unit->group->takes(push.divisor))
    return invalid_layer(
        *layer, concat("is in a group with layers whose divisor is not ", push.divisor, "; give all of them the same"));
  if (const auto* factored = std::get_if<FactoredGradient>(&push.gradient)) return check_factors(*factored);
  if (const auto* rows = std::get_if<LayerRows>(&push.gradient)) return check_rows(*rows);
  return {};
}

Status LayerState::check_rows(const LayerRows& rows) const {
  if (!traits_of(unit->next_scheme).takes_rows)
    return invalid_layer(
        *layer, "takes scheme " + std::string(scheme_name(unit->next_scheme)) + ", not rows; give its whole gradient");
  if (rows.dense || rows.values.size() != rows.indexes.size() * layer->cols * dtype_bytes(layer->dtype))
    return invalid_layer(*layer, concat("needs ", layer->cols, " elements for each row's index"));
  const Status status = wire::check_indexes(rows.indexes, layer->rows);
  return status.ok() ? status
                     : invalid_layer(*layer, "cannot take these rows: " + status.message() +
                                                 "; give their indexes in ascending order, each once");
}

Status LayerState::check_factors(const FactoredGradient& factored) const {
  const SchemeTraits& traits = traits_of(unit->next_scheme);
  const std::string scheme(scheme_name(unit->next_scheme));
  if (!traits.takes_factors)
    return invalid_layer(*layer, "takes scheme " + scheme + " in this step, not factors; give its whole gradient");
  if (!dtype_is_floating(factored.dtype) || dtype_bytes(factored.dtype) > dtype_bytes(layer->dtype))
    return invalid_layer(*layer, "needs factors of a floating-point type that is no wider than its own, not " +
                                     std::string(dtype_name(factored.dtype)));
  if (!traits.workers_multiply && factored.accumulate)
    return invalid_layer(*layer, "takes scheme " + scheme + ", which cannot accumulate; give all its factors at once");
  const bool converts = traits.workers_multiply || (traits.converts && layer->dtype == DType::float32);
  if (!converts && factored.dtype != layer->dtype)
    return invalid_layer(*layer, "takes scheme " + scheme + ", which needs factors of " +
                                     std::string(dtype_name(layer->dtype)) + " here");
  return {};
}

}  // namespace poseidon
