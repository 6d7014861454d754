// The API side of ClientImpl. The loop side is client_loop.cc.
#include <algorithm>
#include <map>
#include <utility>

#include "base/clock.h"
#include "client/chunk_search.h"
#include "client/client_impl.h"
#include "plan/mesh.h"
#include "plan/partition.h"
#include "plan/priority.h"

namespace poseidon {

namespace {

constexpr std::uint32_t kCheckLayer = 0;  // add_layers uses this layer to compare plans
constexpr int kLooksOfATimeout = 20;

/// FNV-1a over the plan's text.
std::uint64_t digest(const Plan& plan) {
  std::uint64_t hash = 14695981039346656037u;
  for (const auto& line : plan_lines(plan))
    for (const char c : line) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

/// How long the vigil waits after a rank has linked. While the others of a large job still link, their machines are
/// busy, and whoever waits for them learns of a silence by the timeout. 1,024 ranks in one process start in 3 s instead
/// of 70, because heartbeats otherwise take all of its time.
/// Where all are connected to all, it begins at once.
std::chrono::milliseconds settling_time(int world_size) {
  return std::chrono::milliseconds(static_cast<std::size_t>(world_size) <= kFullMesh ? 0 : 5 * world_size);
}

/// Chunks of collectives: whole elements of every type, and as large as those of layers.
std::size_t collective_chunk_bytes(const Options& options) {
  const std::size_t bytes = options.chunk_bytes == 0 ? Options().chunk_bytes : options.chunk_bytes;
  return std::max(kChunkAlignmentBytes, bytes / kChunkAlignmentBytes * kChunkAlignmentBytes);
}

static_assert(kPriorityLevelCount == wire::kPriorityLevels);

}  // namespace

ClientImpl::ClientImpl(const Options& options, const Cluster& cluster, const Seat& seat,
                       std::unique_ptr<WorkerParts> parts, std::shared_ptr<Loop> loop, std::unique_ptr<Lobby> lobby)
    : parts_(std::move(parts)),
      options_(options),
      seat_(seat),
      loop_(std::move(loop)),
      executor_(std::make_unique<Executor>(std::max(1, options.compute_threads))),
      connections_(options_, cluster, *this,
                   {[this](const Status& status, const FailureCause& cause) { fail(status, cause); },
                    [this](const std::string& notice) { notices_.add(notice); }},
                   loop_, std::move(lobby), *executor_),
      steps_(options_, cluster,
             {[this](UnitState& unit, Operation&& operation) { begin(unit, std::move(operation)); },
              [this](UnitState& unit) { finished(unit); }},
             loop_),
      collectives_(connections_.links_to_read_later(), collective_chunk_bytes(options),
                   [this](std::uint64_t task, std::uint32_t source) {
                     steps_.end_task(task, closing_ ? std::nullopt : std::optional(source));
                   }),
      report_(options_, seat_, connections_, steps_, units_by_id_, collectives_),
      departures_(connections_, units_by_id_, collectives_),
      heartbeats_({options_, connections_, steps_, report_, *executor_, notices_, *loop_,
                   [this] { return !leaving_ && departures_.none(); },
                   [this](const Status& status, const FailureCause& cause) { fail(status, cause); }}),
      downlink_priority_(connections_, *loop_) {
  if (const Status usable = report_.open_directory(); !usable.ok())
    notices_.add("no flight records will be written (flight_record=" + options_.flight_record +
                 "): " + usable.message());
}

ClientImpl::~ClientImpl() {
  if (!std::exchange(shut_down_, true)) end(steps_.failed(), [] { return false; });
  executor_.reset();
  loop_->stop();
}

Status ClientImpl::link(Endpoints endpoints, const std::function<bool()>& keep_waiting) {
  connections_.connect(std::move(endpoints));
  if (Status status = wait_linked(keep_waiting); !status.ok()) return status;
  loop_->post([this] { heartbeats_.begin(settling_time(options_.world_size)); });
  Layer check;
  check.name = "plan check";
  check.dtype = DType::int64;
  check.element_count = static_cast<std::size_t>(options_.world_size);
  check.scheme = Scheme::ps;
  auto added = add_layers({check}, false, keep_waiting);
  if (!added.ok()) return added.status();
  // In a large job this rank is not connected to all others, so they may still need the store that ends when rank 0 has
  // linked.
  const bool knows_all = static_cast<std::size_t>(options_.world_size) <= kFullMesh;
  if (!knows_all) return check_plans(added.value().plan, keep_waiting);
  // Others may still connect. A rank that leaves now waits for their parts of this (finish_contributions).
  linked_.resize(static_cast<std::size_t>(options_.world_size));
  return start(kCheckLayer, std::as_writable_bytes(std::span(linked_)), 1, kNotFactorable);
}

Status ClientImpl::wait_linked(const std::function<bool()>& keep_waiting) {
  Wait wait{keep_waiting};
  return steps_.wait_linked([&] { look(wait); });
}

Result<Client::Added> ClientImpl::add_layers(std::vector<Layer> layers, bool transient,
                                             const std::function<bool()>& keep_waiting) {
  const auto base = steps_.plan_base();
  if (!base.ok()) return base.status();
  Options options = options_;
  options.chunk_bytes = base.value().chunk_bytes;
  auto made = make_plan(std::move(layers), base.value().cluster, options, base.value().first_unit_id);
  if (!made.ok()) {
    abort("its layers make no plan: " + made.status().message(), false);  // the others would wait for this rank
    return made.status();
  }
  const auto plan = std::make_shared<const Plan>(std::move(made.value()));
  loop_->call([this, plan] { connect_servers(*plan); });
  if (Status status = wait_linked(keep_waiting); !status.ok()) return status;
  loop_->call([this, plan, transient] { add_units(plan, transient); });
  const std::uint32_t first_layer = base.value().first_layer;
  if (first_layer > kCheckLayer) {
    if (Status status = check_plans(*plan, keep_waiting); !status.ok()) return status;
  }
  return Added{first_layer, *plan};
}

Result<std::size_t> ClientImpl::choose_chunk_bytes(std::size_t known, const std::function<bool()>& keep_waiting) {
  return poseidon::choose_chunk_bytes(*this, steps_, known, keep_waiting);
}

Status ClientImpl::check_plans(const Plan& plan, const std::function<bool()>& keep_waiting) {
  if (Status status = wait(kCheckLayer, keep_waiting); !status.ok()) return status;
  std::vector<std::uint64_t> digests(static_cast<std::size_t>(options_.world_size), 0);
  const std::uint64_t mine = digest(plan);
  digests[static_cast<std::size_t>(options_.rank)] = mine;
  if (Status status = start(kCheckLayer, std::as_writable_bytes(std::span(digests)), 1, kNotFactorable); !status.ok())
    return status;
  // `digests` lies on this stack, so this waits until the exchange no longer uses it.
  Status status = wait(kCheckLayer, keep_waiting);
  // A rank that has seen the difference first may have ended the job after all digests came. No digest is 0.
  if (!status.ok() && std::ranges::count(digests, 0U) > 0) return status;
  std::string ranks;
  for (std::size_t rank = 0; rank < digests.size(); ++rank)
    if (digests[rank] != mine) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  if (ranks.empty()) return status;
  // The caller may end the job on this error. Another exchange ends only when every rank has started it. By then every
  // rank has all digests, so it reports the difference, and not that this rank has left.
  if (status.ok() && start(kCheckLayer, std::as_writable_bytes(std::span(digests)), 1, kNotFactorable).ok())
    static_cast<void>(wait(kCheckLayer, keep_waiting));
  return {ErrorCode::mismatch,
          concat("ranks have built different models or options: the plan of rank ", options_.rank,
                 " differs from that of rank ", ranks, "; build the same model with the same options on all ranks")};
}

Status ClientImpl::start(std::uint32_t layer, std::span<std::byte> data, std::uint32_t divisor,
                         std::uint64_t factor_count) {
  return steps_.submit(layer,
                       Push{.gradient = DenseGradient{data, factor_count}, .divisor = divisor, .destination = data});
}

Status ClientImpl::start_all(std::uint32_t first_layer, std::span<const std::span<std::byte>> arrays,
                             std::uint32_t divisor) {
  return steps_.submit_all(first_layer, arrays, divisor);
}

Status ClientImpl::start_absent(std::uint32_t layer, std::span<std::byte> destination, std::uint32_t divisor,
                                bool counts) {
  return steps_.submit(
      layer,
      Push{.gradient = NoGradient{}, .divisor = divisor, .excluded_from_mean = !counts, .destination = destination});
}

Status ClientImpl::start_factors(std::uint32_t layer, DType dtype, std::vector<FactorRows> segments,
                                 std::span<std::byte> destination, std::uint32_t divisor, bool accumulate) {
  return steps_.submit(layer, Push{.gradient = FactoredGradient{dtype, std::move(segments), accumulate},
                                   .divisor = divisor,
                                   .destination = destination});
}

Status ClientImpl::start_rows(std::uint32_t layer, const LayerRows& rows, std::span<std::byte> destination,
                              std::uint32_t divisor) {
  return steps_.submit(layer, Push{.gradient = rows, .divisor = divisor, .destination = destination});
}

LayerRows ClientImpl::result_rows(std::uint32_t layer) const {
  const UnitState* const unit = steps_.unit_of(layer);
  if (unit == nullptr) return {};
  return loop_->call([unit] {
    const auto& result = unit->syncer.exchange().progress.row_result;
    return result ? result->rows : LayerRows();
  });
}

std::span<const std::byte> ClientImpl::residual(std::uint32_t layer) const {
  const UnitState* const unit = steps_.unit_of(layer);
  if (unit == nullptr) return {};
  return loop_->call([unit] { return unit->syncer.exchange().kept.memory.span(); });
}

Status ClientImpl::set_residual(std::uint32_t layer, std::span<const std::byte> residual) {
  UnitState* const unit = steps_.unit_of(layer);
  if (unit == nullptr) return no_layer(layer);
  return loop_->call([unit, residual] { return unit->syncer.set_residual(residual); });
}

Status ClientImpl::push_pull(std::uint32_t layer, std::span<const std::byte> data, std::span<std::byte> destination,
                             std::uint32_t divisor) {
  return steps_.submit(layer, Push{.gradient = DenseGradient{data}, .divisor = divisor, .destination = destination});
}

Status ClientImpl::push(std::uint32_t layer, std::span<const std::byte> data, std::uint32_t divisor) {
  return steps_.submit(layer, Push{.gradient = DenseGradient{data}, .divisor = divisor, .wants_result = false});
}

Status ClientImpl::pull(std::uint32_t layer, std::span<std::byte> destination, std::uint32_t array, bool exact) {
  return steps_.submit(layer, Pull{destination, array, !exact});
}

Status ClientImpl::assign(std::uint32_t layer, std::span<const std::byte> data, std::uint32_t array,
                          std::uint64_t update_count) {
  return steps_.submit(layer, Assign{data, array, update_count});
}

Status ClientImpl::restore(std::uint32_t layer, std::span<std::byte> destination, std::uint64_t version_limit) {
  return steps_.submit(layer, Restore{destination, version_limit});
}

void ClientImpl::set_factor_count(std::uint32_t layer, std::uint64_t factor_count) {
  UnitState* const unit = steps_.unit_of(layer);
  if (unit == nullptr) return;
  loop_->call([this, unit, factor_count] {
    unit->syncer.set_factor_count(factor_count);
    steps_.update_scheme(*unit);
  });
}

Status ClientImpl::choose(std::uint32_t layer, const SchemeChoice& choice) {
  if (Status status = steps_.check_choice(layer, choice.scheme); !status.ok()) return status;
  UnitState& unit = *steps_.unit_of(layer);
  loop_->call([this, &unit, &choice] {
    unit.syncer.choose(choice);
    steps_.update_scheme(unit);
  });
  return {};
}

std::vector<GatheredPart> ClientImpl::gathered(std::uint32_t layer) const {
  std::vector<GatheredPart> parts;
  const UnitState* const unit = steps_.unit_of(layer);
  if (unit == nullptr) return parts;
  loop_->call([unit, &parts] {
    const auto* const inbox = std::get_if<PeerInbox>(&unit->syncer.exchange().progress.inbox);
    if (inbox == nullptr) return;
    for (const auto& part : inbox->parts) {
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

/// Runs about every 100 ms during a wait. Ends the job if the caller gives up, or if nothing moves for too long. The
/// wait itself then ends with the job.
void ClientImpl::look(Wait& wait) {
  const std::int64_t moved_ns = std::max(wait.begun_ns, connections_.last_progress_ns());
  // What has been sent counts, too. It is asked for only when nothing comes, because all connections are looked at.
  if (moved_ns < ran_since_ns(options_.timeout / kLooksOfATimeout))
    loop_->post([this] { connections_.note_traffic(); });
  if (!wait.gave_up && !wait.keep_waiting()) {
    wait.gave_up = true;
    abort("interrupted", false);
  }
  const bool silent = heartbeats_.longest_silence_ns() < ran_since_ns(options_.timeout);
  const auto patience = silent ? options_.timeout : longest_wait(options_);
  if (!wait.gave_up && moved_ns < ran_since_ns(patience)) {
    wait.gave_up = true;
    loop_->post([this, patience] { fail_silent(patience); });
  }
}

Status ClientImpl::wait_all(const std::function<bool()>& keep_waiting) {
  Wait wait{keep_waiting};
  return steps_.wait_all([&] { look(wait); });
}

Status ClientImpl::wait(std::uint32_t layer, const std::function<bool()>& keep_waiting) {
  Wait wait{keep_waiting};
  return steps_.wait(layer, [&] { look(wait); });
}

Status ClientImpl::wait_operation(std::uint32_t layer, std::uint64_t number,
                                  const std::function<bool()>& keep_waiting) {
  Wait wait{keep_waiting};
  return steps_.wait_operation(layer, number, [&] { look(wait); });
}

std::vector<LateRank> ClientImpl::straggler_report() const {
  auto report = parts_->late_ranks();
  const LateRank own = steps_.lateness();
  if (own.late_chunks == 0) return report;
  // This rank has the answers of all servers. The embedded server knows only its own chunks.
  std::erase_if(report, [&own](const LateRank& one) { return one.rank == own.rank; });
  report.insert(std::ranges::upper_bound(report, own.rank, {}, &LateRank::rank), own);
  return report;
}

std::vector<std::string> ClientImpl::notices() const {
  notices_.follow(parts_->notices());
  return notices_.all();
}

Status ClientImpl::set_priorities(std::uint32_t first_layer, std::span<const LayerPriority> priorities,
                                  double priority_threshold) {
  const auto is_share = [](double value) { return value >= 0 && value <= 1; };  // false for NaN
  if (!is_share(priority_threshold)) return {ErrorCode::invalid_argument, "a priority threshold must be from 0 to 1"};
  std::map<std::uint32_t, Priority> by_unit;
  for (std::size_t i = 0; i < priorities.size(); ++i) {
    const auto layer = first_layer + static_cast<std::uint32_t>(i);
    const UnitState* const unit = steps_.unit_of(layer);
    if (unit == nullptr) return no_layer(layer);
    const LayerPriority& given = priorities[i];
    if (!is_share(given.urgency) || given.priority_class < -1 || given.priority_class >= options_.priority_classes)
      return {ErrorCode::invalid_argument,
              concat("a layer's urgency must be from 0 to 1 and its class below ", options_.priority_classes)};
    const int chosen = given.priority_class >= 0
                           ? given.priority_class
                           : priority_class(given.urgency, priority_threshold, options_.priority_classes);
    const Priority priority{level_of(given.urgency), static_cast<std::uint8_t>(chosen)};
    // A group is as urgent as its most urgent member.
    auto [known, fresh] = by_unit.try_emplace(unit->syncer.unit().id, priority);
    known->second.level = std::min(known->second.level, priority.level);
    known->second.priority_class = std::min(known->second.priority_class, priority.priority_class);
  }
  loop_->post([this, by_unit = std::move(by_unit)] {
    for (const auto& [unit, priority] : by_unit) connections_.priorities().set(unit, priority);
  });
  return {};
}

TrafficStats ClientImpl::traffic() const {
  TrafficStats stats = loop_->call([this] { return connections_.traffic(); });
  return stats += parts_->server_traffic();
}

Status ClientImpl::fail_to_join(const Status& status) {
  const FailureSource source = status.code() == ErrorCode::timeout   ? FailureSource::silent
                               : status.code() == ErrorCode::aborted ? FailureSource::told
                                                                     : FailureSource::found;
  loop_->call([this, &status, source] { fail(status, {source}); });
  return this->status();
}

void ClientImpl::abort(const std::string& reason, bool planned) {
  loop_->call([this, &reason, planned] {
    FailureCause cause{FailureSource::own};
    cause.planned = planned;
    fail({ErrorCode::aborted, connections_.here() + " ended the job: " + reason}, cause);
  });
}

}  // namespace poseidon
