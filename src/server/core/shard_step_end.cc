// What a shard does when a step has its sum: it updates what it stores, and answers those who have contributed.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/invariant.h"
#include "server/chunk/outgoing_result.h"
#include "server/chunk/update_base.h"
#include "server/core/shard.h"

namespace poseidon {

namespace {

/// The header of a result whose payload is the difference from the contribution's base.
wire::Header as_difference(const wire::Header& header) {
  wire::StepResult result = wire::StepResult::read(header);
  result.difference = true;
  return result.make(header);
}

/// Whether somebody has said which value it has.
bool names_base(const ChunkState& state) {
  return std::ranges::any_of(state.parts(), [](const auto& part) { return part && part->push.base != 0; });
}

/// The value as results bring it, before it is updated.
UpdateBase base_of(StoredChunk& stored, const wire::Contribution& shape) {
  const DType dtype = shape.result_dtype();
  const Coding coding = dtype_is_floating(dtype) ? difference_of(wire::coding_of(dtype)) : Coding::none;
  if (coding == Coding::none) return {};
  auto value = stored.array_as(0, dtype);
  return value ? UpdateBase(std::move(value), coding) : UpdateBase();
}

}  // namespace

void Shard::finish(Entry& entry, Result<Buffer> sum) {
  invariant(entry.state.all_here() && !entry.computing, "a step ends when all parts are here and its sum is made");
  const wire::Contribution shape = entry.state.shape();
  const bool any_present = entry.state.any_present();
  wire::StepResult result;
  result.dtype = shape.result_dtype();
  result.absent = !any_present;
  result.factor_count = entry.state.factor_count_sum();
  wire::Header header = result.make(shape);
  UpdateBase base;
  Result<std::shared_ptr<const Buffer>> payload{nullptr};
  if (any_present && !sum.ok())
    payload = sum.status();
  else if (any_present && shape.stored)
    payload = store(entry, std::move(sum.value()), shape, base);
  else if (any_present)
    payload = std::shared_ptr<const Buffer>(pool_->share(std::move(sum.value())));
  else if (pace_->traits.drops_late_ranks && shape.stored)
    payload = entry.value(shape);  // other chunks of the layer may have been updated
  std::vector<StepAnswer> answers;
  for (const auto& part : entry.state.parts()) answers.push_back({part->from, part->push});
  entry.pace->step_ended(entry, header, payload);
  entry.state.reset();
  send(answers, header, payload, base);
  if (checkpoint_ && payload.ok() && shape.stored) {
    const Rule* known = rule_of(shape);
    checkpoint_->stepped(shape, stored_of(entry), known == nullptr ? nullptr : &known->rule);
  }
  if (shape.transient) forget(key_of(shape));
}

/// Whether there is room for a difference, and beside it for all that steps of other chunks need: it stays until the
/// slowest worker has taken it.
bool Shard::has_room_for_difference(const wire::Contribution& shape) const {
  return pool_->budget().lowest_limit_bytes() == 0 || pool_->has_room(needed_bytes_ + 2 * shape.value_bytes());
}

/// Answers those who have contributed.
void Shard::send(const std::vector<StepAnswer>& answers, wire::Header header,
                 const Result<std::shared_ptr<const Buffer>>& payload, UpdateBase& base) {
  const bool brings = payload.ok() && payload.value() != nullptr;
  const auto is_coded = [&](const StepAnswer& answer) {
    return brings && answer.to != nullptr && answer.push.wants_result && answer.to->codes(payload.value()->size());
  };
  const auto coded_count = static_cast<std::size_t>(std::ranges::count_if(answers, is_coded));
  std::vector<bool> differs;
  for (const StepAnswer& answer : answers) differs.push_back(base.is(answer.push.base) && is_coded(answer));
  auto differing = static_cast<std::size_t>(std::ranges::count(differs, true));
  const auto between = differing > 0 ? base.difference_to(*payload.value(), *pool_) : nullptr;
  if (between == nullptr) {
    differs.assign(answers.size(), false);
    differing = 0;
  }
  CodingChoice* const choice = threads_.loop == nullptr ? nullptr : &threads_.loop->coding_choice();
  OutgoingResult whole(brings ? payload.value() : nullptr, coded_count - differing, *pool_, choice);
  OutgoingResult difference(between, differing, *pool_, choice);
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const auto& [to, push] = answers[i];
    if (to == nullptr) continue;  // the requester has left while other threads were adding
    header.rank = push.rank;
    header.priority = push.priority;
    if (!payload.ok())
      to->refuse(header, payload.status());
    else if (!brings || !push.wants_result)
      to->send(header, nullptr);
    else if (differs[i])
      difference.send(*to, as_difference(header));
    else
      whole.send(*to, header);
  }
}

/// Updates the chunk's value with the step's sum. The value is the answer, in the type that the pushes ask for.
/// `base` becomes the value before, if workers have said which one they have.
Result<std::shared_ptr<const Buffer>> Shard::store(Entry& entry, Buffer sum, const wire::Contribution& shape,
                                                   UpdateBase& base) {
  StoredChunk& stored = stored_of(entry);
  const Rule* known = rule_of(shape);
  if (known != nullptr && !known->refusal.ok()) {
    pool_->give_back(std::move(sum));
    return known->refusal;
  }
  // The last block of a sum of blocks may be longer than the value.
  if (shape.dtype == DType::int8_blocks && stored.has_value())
    sum.resize(std::min(sum.size(), stored.array(0)->size()));
  if (known != nullptr && known->rule.kind != nullptr) {
    const UpdateRule& rule = known->rule;
    const std::size_t new_bytes = update_bytes(shape);
    if (names_base(entry.state) && has_room_for_difference(shape)) base = base_of(stored, shape);
    const Status status =
        pool_->has_room(new_bytes) ? stored.update(rule, sum, shape.value_dtype()) : no_room(new_bytes);
    if (status.ok() && rule.keeps_gradient)
      stored.keep_gradient(std::move(sum));
    else
      pool_->give_back(std::move(sum));
    if (!status.ok()) return status;
  } else {
    stored.replace(std::move(sum), shape.value_dtype());
  }
  answer_pulls(entry);
  return stored.array_as(0, shape.result_dtype());
}

}  // namespace poseidon
