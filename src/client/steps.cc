#include "client/steps.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/invariant.h"
#include "wire/update_rule.h"

namespace poseidon {

namespace {

constexpr auto kLookInterval = std::chrono::milliseconds(100);
constexpr std::size_t kStartsPerLock = 64;

/// ErrorCode::invalid_argument if the servers cannot do with the layer what the rule says.
Status check_rule(const Layer& layer, const UpdateRule& rule) {
  if (!layer.stored)
    return invalid_layer(layer,
                         "is not stored by the servers, so a rule neither updates it nor aggregates its gradients; "
                         "declare it as stored");
  const std::string dtype(dtype_name(layer.dtype));
  if (Status status = check_aggregator_name(rule.aggregator); !status.ok()) return status;
  if (rule.aggregator != kSumAggregator && !dtype_is_floating(layer.dtype))
    return invalid_layer(layer, "has dtype " + dtype + "; " + rule.aggregator + " needs a floating-point type");
  if (rule.aggregator != kSumAggregator && (layer.wire != WireFormat::fp32 || layer.float32_value))
    return invalid_layer(layer, "has gradients in fewer bits than its value; " + rule.aggregator +
                                    " takes gradients as they are: use wire fp32 and float32 parameters");
  if (rule.kind != nullptr && layer.dtype != DType::float32 && layer.dtype != DType::float64 && !layer.float32_value)
    return invalid_layer(layer, "has dtype " + dtype + "; a rule needs float32 or float64");
  if (rule.kind != nullptr && rule.kind->whole_layer && !layer.whole)
    return invalid_layer(layer,
                         "is cut into pieces; " + rule.kind->name + " needs a layer that lies whole on one server");
  return {};
}

}  // namespace

Steps::Steps(const Options& options, const Cluster& cluster, Callbacks callbacks, std::shared_ptr<Loop> loop)
    : options_(options), callbacks_(std::move(callbacks)), loop_(std::move(loop)) {
  plan_base_.cluster = cluster;
  plan_base_.cluster.flow_count = options.flows;
  plan_base_.chunk_bytes = options.chunk_bytes == 0 ? Options().chunk_bytes : options.chunk_bytes;
}

Result<PlanBase> Steps::plan_base() const {
  const std::lock_guard lock(mutex_);
  if (!status_.ok()) return status_;
  return plan_base_;
}

void Steps::set_chunk_bytes(std::size_t chunk_bytes) {
  const std::lock_guard lock(mutex_);
  plan_base_.chunk_bytes = chunk_bytes;
}

Status Steps::submit(std::uint32_t layer, Operation operation) {
  const std::lock_guard lock(mutex_);
  return submit_locked(layer, std::move(operation), now_ns());
}

Status Steps::submit_all(std::uint32_t first_layer, std::span<const std::span<std::byte>> arrays,
                         std::uint32_t divisor) {
  // The loop needs the mutex, too, to end exchanges that have started. So it gets a turn after every few starts.
  for (std::size_t begin = 0; begin < arrays.size(); begin += kStartsPerLock) {
    const std::lock_guard lock(mutex_);
    const std::int64_t time_ns = now_ns();
    for (std::size_t i = begin; i < std::min(begin + kStartsPerLock, arrays.size()); ++i) {
      const auto layer = first_layer + static_cast<std::uint32_t>(i);
      Push push{.gradient = DenseGradient{arrays[i]}, .divisor = divisor, .destination = arrays[i]};
      if (Status status = submit_locked(layer, std::move(push), time_ns); !status.ok()) return status;
    }
  }
  return {};
}

Status Steps::submit_locked(std::uint32_t layer, Operation operation, std::int64_t time_ns) {
  if (Status status = check_start_locked(layer, operation); !status.ok()) return status;
  callers_.note();
  LayerState& state = *layers_[layer];
  UnitState& unit = *state.unit;
  state.running = true;
  ++state.newest;
  state.destination = destination_of(operation);
  state.stats.started_ns = time_ns;
  ++running_count_;
  if (auto* push = std::get_if<Push>(&operation)) {
    bool nothing = std::holds_alternative<NoGradient>(push->gradient);
    if (unit.group) {
      if (!join_group_locked(state, *push)) return {};
      nothing = unit.group->all_absent();
    }
    push->excluded_from_mean = nothing && (push->excluded_from_mean || lateness_[unit.plan.get()].behind() > 0);
    if (unit.rule) push->rule = std::exchange(unit.rule, std::nullopt);
    push->rule_digest = unit.rule_digest;
    push->rounds_result = unit.value_ruled = unit.has_rule;
  } else if (auto* pull = std::get_if<Pull>(&operation)) {
    pull->rounds_result = pull->rounds_result && pull->array == 0 && unit.value_ruled;
  }
  loop_->post([this, &unit, moved = std::move(operation)]() mutable { callbacks_.on_start(unit, std::move(moved)); });
  return {};
}

Status Steps::check_start_locked(std::uint32_t layer, const Operation& operation) const {
  if (!status_.ok()) return status_;
  return layer < layers_.size() ? layers_[layer]->check_start(operation) : no_layer(layer);
}

/// Puts a member's gradient into its group. Returns true for the last member, whose push becomes the group's.
bool Steps::join_group_locked(LayerState& layer, Push& push) {
  UnitState& unit = *layer.unit;
  const auto* dense = std::get_if<DenseGradient>(&push.gradient);
  const bool absent = dense == nullptr;
  if (!unit.group->put(layer.member, absent ? push.destination : dense->data, absent, push.divisor)) return false;
  GroupedGradients grouped;
  grouped.pieces = unit.group->pieces();
  // With stragglers=drop the result may lack this worker's part, so its footer has to be read first.
  if (!unit.group->any_absent() && options_.stragglers == Stragglers::wait) {
    grouped.members.reserve(unit.layers.size());
    for (const LayerState* member : unit.layers) grouped.members.push_back(member->destination);
  }
  push.gradient = std::move(grouped);
  push.destination = {};
  return true;
}

Status Steps::set_rule(std::uint32_t layer, const UpdateRule& rule, bool compared) {
  const std::lock_guard lock(mutex_);
  if (layer >= layers_.size()) return no_layer(layer);
  if (Status status = check_rule(*layers_[layer]->layer, rule); !status.ok()) return status;
  // Machines or racks that push have added up their workers' gradients. The first of them pushes for rank 0.
  const Cluster& cluster = plan_base_.cluster;
  const auto& hosts = cluster.racks.empty() ? cluster.hosts : cluster.racks;
  FeatureSet features(options_);
  if (!hosts.empty()) features.add(Feature::sums_of_machines);
  if (Status status = wire::check_rule_with(features, rule); !status.ok()) return status;
  // Every rank sets the same rule. Only rank 0 sends it, before its own push, because no step ends without that push.
  // Where a step may end without rank 0, every rank sends the rule.
  const bool ends_without_0 = options_.stragglers == Stragglers::drop || options_.consistency != Consistency::bsp;
  const bool of_first_host = !hosts.empty() && hosts[static_cast<std::size_t>(options_.rank)] == hosts.front();
  if (options_.rank == 0 || of_first_host || ends_without_0) layers_[layer]->unit->rule = rule;
  layers_[layer]->unit->rule_digest = compared ? wire::digest_of(rule) : 0;
  layers_[layer]->unit->has_rule = rule.kind != nullptr;
  return {};
}

Status Steps::check_choice(std::uint32_t layer, Scheme scheme) const {
  const std::lock_guard lock(mutex_);
  return layer < layers_.size() ? layers_[layer]->check_choice(scheme) : no_layer(layer);
}

/// `lock` is held at the call and at the return.
template <typename Done>
Status Steps::wait_until(std::unique_lock<std::mutex>& lock, const Look& look, const Done& done,
                         Clock::time_point latest) {
  callers_.note();
  if (done()) return status_;
  const Callers::Inside inside(callers_, done);
  auto next_look = Clock::now() + kLookInterval;
  while (!done()) {
    changed_.wait_until(lock, std::min(next_look, latest));
    if (Clock::now() < next_look) continue;
    next_look = Clock::now() + kLookInterval;
    lock.unlock();
    look();
    lock.lock();
  }
  return status_;
}

template <typename Done>
Status Steps::wait_until(const Look& look, const Done& done) {
  loop_->check_other_thread();
  std::unique_lock lock(mutex_);
  return wait_until(lock, look, done);
}

Status Steps::wait_linked(const Look& look) {
  return wait_until(look, [this] { return linked_ || !status_.ok(); });
}

Status Steps::wait_all(const Look& look) {
  return wait_until(look, [this] { return running_count_ == 0; });
}

Status Steps::wait(std::uint32_t layer, const Look& look) {
  loop_->check_other_thread();
  std::unique_lock lock(mutex_);
  return wait_locked(lock, layer, layer < layers_.size() ? layers_[layer]->newest : 0, look);
}

/// Another thread may start the layer's next operation before this one sees that the one that it waits for has ended.
Status Steps::wait_locked(std::unique_lock<std::mutex>& lock, std::uint32_t layer, std::uint64_t number,
                          const Look& look) {
  ++single_waiter_count_;
  Status status = wait_until(lock, look, [this, layer, number] { return !runs_locked(layer, number); });
  --single_waiter_count_;
  return status;
}

Status Steps::wait_operation(std::uint32_t layer, std::uint64_t number, const Look& look) {
  std::unique_lock lock(mutex_);
  Status status = wait_locked(lock, layer, number, look);
  return layer < layers_.size() && number <= layers_[layer]->completed ? Status() : std::move(status);
}

Result<std::uint64_t> Steps::begin_task(std::function<void(std::uint64_t)> start) {
  const std::lock_guard lock(mutex_);
  if (!status_.ok()) return status_;
  callers_.note();
  const std::uint64_t task = ++newest_task_;
  tasks_.try_emplace(task);
  ++running_count_;
  loop_->post([task, begin = std::move(start)] { begin(task); });
  return task;
}

Result<std::uint32_t> Steps::wait_task(std::uint64_t task, Clock::time_point latest, const Look& look) {
  loop_->check_other_thread();
  std::unique_lock lock(mutex_);
  if (!tasks_.contains(task))
    return Status(ErrorCode::invalid_argument, "this collective has been waited for before; wait for each once");
  const auto runs = [&] {  // another thread may have waited for it, too
    const auto found = tasks_.find(task);
    return found != tasks_.end() && found->second.running;
  };
  const auto is_over = [&] { return !runs() || Clock::now() >= latest; };
  ++single_waiter_count_;
  static_cast<void>(wait_until(lock, look, is_over, latest));
  --single_waiter_count_;
  if (runs()) return Status(ErrorCode::timeout, "the collective takes longer; wait again, or end the job");
  const auto ended = tasks_.extract(task);
  if (!ended.empty() && ended.mapped().source) return *ended.mapped().source;
  // A rank that leaves begins no calls any more, although nothing has failed yet.
  return status_.ok() ? Status(ErrorCode::shut_down, "this rank leaves; connect again before further calls") : status_;
}

bool Steps::task_done(std::uint64_t task) const {
  const std::lock_guard lock(mutex_);
  const auto found = tasks_.find(task);
  return found == tasks_.end() || !found->second.running;
}

void Steps::end_task(std::uint64_t task, std::optional<std::uint32_t> source) {
  loop_->check_thread();
  const std::lock_guard lock(mutex_);
  Task& ended = tasks_.at(task);
  ended.running = false;
  ended.source = source;
  invariant(running_count_ > 0, "no more tasks end than have begun");
  --running_count_;
  if (running_count_ == 0 || single_waiter_count_ > 0) changed_.notify_all();
}

void Steps::wait_contributions(const Look& look) {
  static_cast<void>(wait_until(look, [this] { return awaited_count_ == 0; }));
}

void Steps::wait_closed(std::chrono::nanoseconds linger) {
  loop_->check_other_thread();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return running_count_ == 0; });
  changed_.wait_for(lock, linger, [this] { return closed_; });
}

void Steps::act_for(std::uint64_t thread) {
  const std::lock_guard lock(mutex_);
  callers_.act_for(static_cast<pthread_t>(thread));
}

void Steps::expect_other_threads() {
  const std::lock_guard lock(mutex_);
  callers_.expect_others();
}

bool Steps::all_wait_since(std::int64_t time_ns) {
  const std::lock_guard lock(mutex_);
  return running_count_ > 0 && callers_.all_wait_since(time_ns);
}

std::string Steps::lacks_of_group() const {
  const std::lock_guard lock(mutex_);
  for (const UnitState& unit : units_) {
    const auto idle = std::ranges::find_if(unit.layers, [](const LayerState* layer) { return !layer->running; });
    const auto started = std::ranges::find_if(unit.layers, [](const LayerState* layer) { return layer->running; });
    if (unit.group && idle != unit.layers.end() && started != unit.layers.end())
      return "layer '" + (*started)->layer->name + "' was waiting for layer '" + (*idle)->layer->name +
             "' of its group to be started here";
  }
  return "";
}

bool Steps::done(std::uint32_t layer) const {
  const std::lock_guard lock(mutex_);
  return !runs_locked(layer);
}

bool Steps::operation_done(std::uint32_t layer, std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  return !runs_locked(layer, number);
}

void Steps::record(std::uint64_t first, std::uint32_t count) {
  const std::lock_guard lock(mutex_);
  first_recorded_ = first;
  recorded_count_ = count;
  recorded_.clear();
}

std::vector<LayerStats> Steps::recorded(std::uint32_t layer) const {
  const std::lock_guard lock(mutex_);
  const auto found = layer < layers_.size() ? recorded_.find(layers_[layer]) : recorded_.end();
  return found == recorded_.end() ? std::vector<LayerStats>() : found->second;
}

Scheme Steps::next_scheme(std::uint32_t layer) const {
  const std::lock_guard lock(mutex_);
  return layer < layers_.size() ? layers_[layer]->unit->next_scheme : Scheme::ps;
}

LateRank Steps::lateness() const {
  LateRank own{static_cast<std::uint32_t>(options_.rank)};
  const std::lock_guard lock(mutex_);
  for (const auto& [plan, one] : lateness_) one.add_to(own);
  return own;
}

std::uint64_t Steps::behind() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t most = 0;
  for (const auto& [plan, one] : lateness_) most = std::max<std::uint64_t>(most, one.behind());
  return most;
}

bool Steps::failed() const {
  const std::lock_guard lock(mutex_);
  return !status_.ok() && status_.code() != ErrorCode::shut_down;
}

std::vector<UnitState*> Steps::add(const std::shared_ptr<const Plan>& plan, bool transient, const Links& links) {
  loop_->check_thread();
  const std::lock_guard lock(mutex_);
  const std::size_t first_layer = layers_.size();
  auto& block = layer_blocks_.emplace_back(plan->layers.size());
  for (std::size_t i = 0; i < block.size(); ++i) {
    block[i].layer = &plan->layers[i];
    block[i].size_bytes = plan->layers[i].size_bytes();
    layers_.push_back(&block[i]);
  }
  std::vector<UnitState*> added;
  added.reserve(plan->units.size());
  for (std::size_t i = 0; i < plan->units.size(); ++i) {
    UnitState& unit = units_.emplace_back(plan, i, transient, links, callbacks_.on_done);
    for (std::size_t member = 0; member < plan->units[i].layers.size(); ++member) {
      LayerState& layer = *layers_[first_layer + plan->units[i].layers[member]];
      layer.unit = &unit;
      layer.member = static_cast<std::uint32_t>(member);
      unit.layers.push_back(&layer);
    }
    added.push_back(&unit);
  }
  plan_base_.first_unit_id += static_cast<std::uint32_t>(plan->units.size());
  plan_base_.first_layer = static_cast<std::uint32_t>(layers_.size());
  return added;
}

void Steps::update_scheme(UnitState& unit) {
  loop_->check_thread();
  const std::lock_guard lock(mutex_);
  unit.next_scheme = unit.syncer.next_scheme();
}

void Steps::complete(UnitState& unit) {
  loop_->check_thread();
  const Exchange& exchange = unit.syncer.exchange();
  const LayerStats& outcome = exchange.outcome;
  const std::lock_guard lock(mutex_);
  unit.next_scheme = unit.syncer.next_scheme();
  if (exchange.push() != nullptr && (outcome.late_chunks > 0 || unit.behind > 0))
    lateness_[unit.plan.get()].note(exchange.step, outcome.late_chunks, std::exchange(unit.behind, outcome.behind),
                                    outcome.behind);
  const std::int64_t time_ns = now_ns();
  const bool is_recorded = exchange.push() != nullptr && exchange.step >= first_recorded_ &&
                           exchange.step - first_recorded_ < recorded_count_;
  for (auto* layer : unit.layers) {
    const std::int64_t started_ns = layer->stats.started_ns;
    layer->stats = unit.stats_of(*layer);
    layer->stats.started_ns = started_ns;
    layer->stats.completed_ns = time_ns;
    if (exchange.progress.status.ok() && layer->running) layer->completed = layer->newest;
    if (is_recorded) recorded_[layer].push_back(layer->stats);
  }
  release_locked(unit);
  if (awaited_count_ == 0 || exchange.push() == nullptr) return;
  --awaited_count_;
  changed_.notify_all();
}

void Steps::await_contributions(std::size_t unit_count) {
  loop_->check_thread();
  const std::lock_guard lock(mutex_);
  awaited_count_ = unit_count;
}

void Steps::release(UnitState& unit) {
  loop_->check_thread();
  const std::lock_guard lock(mutex_);
  release_locked(unit);
}

void Steps::release_locked(UnitState& unit) {
  for (auto* layer : unit.layers) {
    if (!std::exchange(layer->running, false)) continue;
    invariant(running_count_ > 0, "no more layers are released than have started");
    --running_count_;
  }
  if (unit.group) unit.group->reset();
  // A thread that waits for all exchanges is not woken for each one, because that would cost more than the release.
  if (running_count_ == 0 || single_waiter_count_ > 0) changed_.notify_all();
}

void Steps::set_unlinked() {
  loop_->check_thread();
  const std::lock_guard lock(mutex_);
  linked_ = false;
}

void Steps::set_linked(std::vector<int> core_counts) {
  loop_->check_thread();
  const std::lock_guard lock(mutex_);
  plan_base_.cluster.core_counts = std::move(core_counts);
  linked_ = true;
  changed_.notify_all();
}

void Steps::end(const Status& status) {
  loop_->check_thread();
  const std::lock_guard lock(mutex_);
  if (status_.ok()) status_ = status;
}

void Steps::set_closed(bool closed) {
  loop_->check_thread();
  const std::lock_guard lock(mutex_);
  closed_ = closed;
  changed_.notify_all();
}

}  // namespace poseidon
