// The API side of ClientImpl: checks, tables and waiting. The loop side is client_loop.cc.
#include <algorithm>
#include <utility>

#include "client/client_impl.h"

namespace poseidon {

namespace {

constexpr auto kWaitSlice = std::chrono::milliseconds(100);
constexpr std::size_t kStartsPerLock = 64;
constexpr std::uint32_t kCheckLayer = 0;  // the layer that add_layers compares plans with

/// FNV-1a over the plan's text.
std::uint64_t digest(const Plan& plan) {
  std::uint64_t hash = 14695981039346656037u;
  for (const auto& line : plan_lines(plan))
    for (const char c : line) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

}  // namespace

ClientImpl::ClientImpl(const Options& options, const Cluster& cluster, const Seat& seat,
                       std::unique_ptr<WorkerParts> parts, std::shared_ptr<Loop> loop, std::unique_ptr<Lobby> lobby)
    : parts_(std::move(parts)),
      options_(options),
      cluster_(cluster),
      seat_(seat),
      loop_(std::move(loop)),
      executor_(std::make_unique<Executor>(std::max(1, options.compute_threads))),
      connections_(options_, cluster, *this,
                   {[this](const Status& status, const FailureCause& cause) { fail(status, cause); },
                    [this](const std::string& notice) { add_notice(notice); }},
                   loop_, std::move(lobby), *executor_),
      chunk_bytes_(options.chunk_bytes == 0 ? Options().chunk_bytes : options.chunk_bytes) {
  cluster_.flow_count = options.flows;
  if (options_.flight_record.empty()) return;
  if (const Status usable = open_record_directory(options_.flight_record); usable.ok())
    record_directory_ = options_.flight_record;
  else
    notices_.push_back("without flight records (flight_record=" + options_.flight_record + "): " + usable.message());
}

ClientImpl::~ClientImpl() {
  shutdown();
  executor_.reset();
  loop_->stop();
}

Status ClientImpl::link(const Endpoints& endpoints, const std::function<bool()>& keep_waiting) {
  connections_.connect(endpoints);
  if (Status status = wait_until([this] { return linked_ || !status_.ok(); }, keep_waiting); !status.ok())
    return status;
  Layer check;
  check.name = "plan check";
  check.dtype = DType::int64;
  check.element_count = static_cast<std::size_t>(options_.world_size);
  check.scheme = Scheme::ps;
  auto added = add_layers({check}, false, keep_waiting);
  return added.ok() ? Status() : added.status();
}

Result<Client::Added> ClientImpl::add_layers(std::vector<Layer> layers, bool transient,
                                             const std::function<bool()>& keep_waiting) {
  std::uint32_t first_unit_id = 0;
  std::uint32_t first_layer = 0;
  Options options = options_;
  {
    const std::lock_guard lock(mutex_);
    if (!status_.ok()) return status_;
    options.chunk_bytes = chunk_bytes_;
    first_unit_id = next_unit_id_;
    first_layer = static_cast<std::uint32_t>(layers_.size());
  }
  auto made = make_plan(std::move(layers), cluster_, options, first_unit_id);
  if (!made.ok()) {
    abort("its layers make no plan: " + made.status().message(), false);  // the others would wait for this rank
    return made.status();
  }
  const auto plan = std::make_shared<const Plan>(std::move(made.value()));
  loop_->call([this, plan, transient] {
    register_units(plan, transient);
    describe_units(*plan);
  });
  if (first_layer > kCheckLayer) {
    if (Status status = check_plans(*plan, keep_waiting); !status.ok()) return status;
  }
  return Added{first_layer, *plan};
}

Status ClientImpl::check_plans(const Plan& plan, const std::function<bool()>& keep_waiting) {
  std::vector<std::uint64_t> digests(static_cast<std::size_t>(options_.world_size), 0);
  const std::uint64_t mine = digest(plan);
  digests[static_cast<std::size_t>(options_.rank)] = mine;
  if (Status status = start(kCheckLayer, std::as_writable_bytes(std::span(digests)), 1, kNotFactorable); !status.ok())
    return status;
  // `digests` is on this stack: leaving before the exchange has let go of it is not possible.
  Status status = wait(kCheckLayer, keep_waiting);
  // A rank that saw the difference first may have ended the job since all digests came; none is 0.
  if (!status.ok() && std::ranges::count(digests, 0U) > 0) return status;
  std::string ranks;
  for (std::size_t rank = 0; rank < digests.size(); ++rank)
    if (digests[rank] != mine) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  if (ranks.empty()) return status;
  // The caller may end the job on this error. Another exchange ends only when every rank has begun it, so by then
  // every rank has all digests and reports the difference itself, not that this rank has left.
  if (status.ok() && start(kCheckLayer, std::as_writable_bytes(std::span(digests)), 1, kNotFactorable).ok())
    static_cast<void>(wait(kCheckLayer, keep_waiting));
  return {ErrorCode::mismatch, "ranks have built different models or options: the plan of rank " +
                                   std::to_string(options_.rank) + " differs from that of rank " + ranks};
}

Status ClientImpl::check_start(std::uint32_t layer, const Operation& operation) const {
  if (!status_.ok()) return status_;
  if (layer >= layers_.size()) return {ErrorCode::invalid_argument, "there is no layer " + std::to_string(layer)};
  return layers_[layer]->check_start(operation);
}

Status ClientImpl::submit(std::uint32_t layer, Operation operation) {
  const std::lock_guard lock(mutex_);
  return submit_locked(layer, std::move(operation), now_ns());
}

Status ClientImpl::submit_locked(std::uint32_t layer, Operation operation, std::int64_t time_ns) {
  if (Status status = check_start(layer, operation); !status.ok()) return status;
  LayerState& state = *layers_[layer];
  UnitState& unit = *state.unit;
  state.running = true;
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
  }
  loop_->post([this, &unit, moved = std::move(operation)]() mutable { begin(unit, std::move(moved)); });
  return {};
}

/// Puts a member's gradient into its group. Returns true for the last member, whose push becomes the group's.
bool ClientImpl::join_group_locked(LayerState& layer, Push& push) {
  UnitState& unit = *layer.unit;
  const auto* dense = std::get_if<DenseGradient>(&push.gradient);
  const bool absent = dense == nullptr;
  if (!unit.group->put(layer.member, absent ? push.destination : dense->data, absent, push.divisor)) return false;
  GroupedGradients grouped;
  grouped.pieces = unit.group->pieces();
  // With stragglers=drop the result may lack what this worker put in: its marks have to be seen first.
  if (!unit.group->any_absent() && options_.stragglers == Stragglers::wait) {
    grouped.members.reserve(unit.layers.size());
    for (const LayerState* member : unit.layers) grouped.members.push_back(member->destination);
  }
  push.gradient = std::move(grouped);
  push.destination = {};
  return true;
}

Status ClientImpl::start(std::uint32_t layer, std::span<std::byte> data, std::uint32_t divisor,
                         std::uint64_t factor_count) {
  return submit(layer, Push{.gradient = DenseGradient{data, factor_count}, .divisor = divisor, .destination = data});
}

Status ClientImpl::start_all(std::uint32_t first_layer, std::span<const std::span<std::byte>> arrays,
                             std::uint32_t divisor) {
  // The loop needs the lock too, to end what has been started: it gets its turn after every few.
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

Status ClientImpl::start_absent(std::uint32_t layer, std::span<std::byte> destination, std::uint32_t divisor,
                                bool counts) {
  return submit(
      layer,
      Push{.gradient = NoGradient{}, .divisor = divisor, .excluded_from_mean = !counts, .destination = destination});
}

Status ClientImpl::start_factors(std::uint32_t layer, DType dtype, std::vector<FactorRows> segments,
                                 std::span<std::byte> destination, std::uint32_t divisor, bool accumulate) {
  return submit(layer, Push{.gradient = FactoredGradient{dtype, std::move(segments), accumulate},
                            .divisor = divisor,
                            .destination = destination});
}

Status ClientImpl::push_pull(std::uint32_t layer, std::span<const std::byte> data, std::span<std::byte> destination,
                             std::uint32_t divisor) {
  return submit(layer, Push{.gradient = DenseGradient{data}, .divisor = divisor, .destination = destination});
}

Status ClientImpl::push(std::uint32_t layer, std::span<const std::byte> data, std::uint32_t divisor) {
  return submit(layer, Push{.gradient = DenseGradient{data}, .divisor = divisor, .wants_result = false});
}

Status ClientImpl::pull(std::uint32_t layer, std::span<std::byte> destination, std::uint32_t array) {
  return submit(layer, Pull{destination, array});
}

Status ClientImpl::assign(std::uint32_t layer, std::span<const std::byte> data, std::uint32_t array,
                          std::uint64_t update_count) {
  return submit(layer, Assign{data, array, update_count});
}

Status ClientImpl::set_rule(std::uint32_t layer, const UpdateRule& rule) {
  const std::lock_guard lock(mutex_);
  if (layer >= layers_.size()) return {ErrorCode::invalid_argument, "there is no layer " + std::to_string(layer)};
  const Layer& about = *layers_[layer]->layer;
  if (!about.stored) return invalid_layer(about, "is not stored by the servers, so they cannot update it");
  if (rule.kind != nullptr && about.dtype != DType::float32 && about.dtype != DType::float64)
    return invalid_layer(about,
                         "has dtype " + std::string(dtype_name(about.dtype)) + "; servers update float32 and float64");
  if (rule.kind != nullptr && rule.kind->whole_layer && !about.whole)
    return invalid_layer(about,
                         "is cut into pieces; " + rule.kind->name + " needs a layer that lies whole on one server");
  // Every rank sets the same rule; one tells it, before its own push, without which no step ends. Where steps may end
  // without that one, all do.
  const bool without = options_.stragglers == Stragglers::drop || options_.consistency != Consistency::bsp;
  if (options_.rank == 0 || without) layers_[layer]->unit->rule = rule;
  return {};
}

Scheme ClientImpl::next_scheme(std::uint32_t layer) const {
  const std::lock_guard lock(mutex_);
  return layer < layers_.size() ? layers_[layer]->unit->next_scheme : Scheme::ps;
}

void ClientImpl::set_factor_count(std::uint32_t layer, std::uint64_t factor_count) {
  loop_->call([this, layer, factor_count] {
    const std::lock_guard lock(mutex_);
    if (layer >= layers_.size()) return;
    UnitState& unit = *layers_[layer]->unit;
    unit.syncer.set_factor_count(factor_count);
    unit.next_scheme = unit.syncer.next_scheme();
  });
}

std::vector<GatheredPart> ClientImpl::gathered(std::uint32_t layer) const {
  std::vector<GatheredPart> parts;
  loop_->call([this, layer, &parts] {
    const std::lock_guard lock(mutex_);
    if (layer >= layers_.size()) return;
    for (const auto& part : layers_[layer]->unit->syncer.exchange().progress.inbox.parts) {
      GatheredPart& gathered = parts.emplace_back();
      for (const auto& term : part.terms) {
        gathered.dtype = term.dtype;
        gathered.dense = term.dense;
        if (term.dense == nullptr) gathered.factors.push_back({term.left, term.right, term.count});
      }
    }
  });
  return parts;
}

Status ClientImpl::wait_until(const std::function<bool()>& done, const std::function<bool()>& keep_waiting) {
  const std::int64_t begun_ns = now_ns();
  auto next_look = Clock::now() + kWaitSlice;
  bool gave_up = false;
  std::unique_lock lock(mutex_);
  while (!done()) {
    changed_.wait_until(lock, next_look);
    if (Clock::now() < next_look) continue;
    next_look = Clock::now() + kWaitSlice;
    lock.unlock();
    loop_->post([this] { connections_.note_traffic(); });
    const std::int64_t quiet_ns = now_ns() - std::max(begun_ns, connections_.last_progress_ns());
    if (!gave_up && !keep_waiting()) {
      gave_up = true;
      abort("interrupted", false);
    }
    if (!gave_up && quiet_ns > std::chrono::nanoseconds(options_.timeout).count()) {
      gave_up = true;
      loop_->post([this] {
        fail({ErrorCode::timeout, connections_.here() + " heard nothing for " +
                                      std::to_string(options_.timeout.count()) + " ms while " + describe_waiting() +
                                      connections_.last_heard() +
                                      "; see whether the others still run, or raise POSEIDON_TIMEOUT"},
             {FailureSource::silent});
      });
    }
    lock.lock();
  }
  return status_;
}

Status ClientImpl::wait_all(const std::function<bool()>& keep_waiting) {
  return wait_until([this] { return running_count_ == 0; }, keep_waiting);
}

Status ClientImpl::wait(std::uint32_t layer, const std::function<bool()>& keep_waiting) {
  {
    const std::lock_guard lock(mutex_);
    ++single_waiter_count_;
  }
  Status status =
      wait_until([this, layer] { return layer >= layers_.size() || !layers_[layer]->running; }, keep_waiting);
  const std::lock_guard lock(mutex_);
  --single_waiter_count_;
  return status;
}

bool ClientImpl::done(std::uint32_t layer) const {
  const std::lock_guard lock(mutex_);
  return layer >= layers_.size() || !layers_[layer]->running;
}

LayerStats ClientImpl::layer_stats(std::uint32_t layer) const {
  const std::lock_guard lock(mutex_);
  return layer < layers_.size() ? layers_[layer]->stats : LayerStats();
}

TrafficStats ClientImpl::traffic() const {
  TrafficStats stats;
  loop_->call([this, &stats] { stats = connections_.traffic(); });
  const auto [sent, received] = parts_->server_traffic();
  stats.bytes_sent += sent;
  stats.bytes_received += received;
  return stats;
}

bool ClientImpl::failed() const {
  const std::lock_guard lock(mutex_);
  return !status_.ok() && status_.code() != ErrorCode::shut_down;
}

void ClientImpl::abort(const std::string& reason, bool planned) {
  loop_->call([this, &reason, planned] {
    FailureCause cause{FailureSource::own};
    cause.planned = planned;
    fail({ErrorCode::aborted, connections_.here() + " ended the job: " + reason}, cause);
  });
}

}  // namespace poseidon
