#include "server/server_impl.h"

#include <algorithm>
#include <charconv>
#include <map>

#include "base/thread.h"
#include "server/baselines/wide_aggregation.h"
#include "server/baselines/worker_assignment.h"
#include "server/checkpoint/checkpoint_directory.h"
#include "server/chunk/limits.h"

namespace poseidon {

namespace {

constexpr auto kLinger = std::chrono::seconds(2);

/// Returns core i's address if only core 0's is given.
std::string core_address(const std::string& first, std::size_t core) {
  if (core == 0 || first.ends_with(":0")) return first;
  const std::size_t colon = first.rfind(':');
  int port = 0;
  if (colon == std::string::npos ||
      std::from_chars(first.data() + colon + 1, first.data() + first.size(), port).ptr != first.data() + first.size())
    return concat(first, "/", core);
  return first.substr(0, colon + 1) + std::to_string(port + static_cast<int>(core));
}

/// Returns how many cores a server with these options has.
std::size_t wanted_cores(const Options& options) {
  if (options.aggregation == Aggregation::wide) return 1;  // its threads share every chunk
  return std::max<std::size_t>({1, static_cast<std::size_t>(options.server_cores), options.interfaces.size()});
}

}  // namespace

ServerImpl::ServerImpl(const Options& options, std::vector<std::shared_ptr<Loop>> loops)
    : tenants_(std::make_shared<Tenants>(options)) {
  if (options.aggregation == Aggregation::wide)
    wide_ = std::make_unique<WideAggregation>(std::max(1, options.server_cores));
  if (loops.empty()) {
    for (std::size_t core = 0; core < wanted_cores(options); ++core)
      loops.push_back(std::make_shared<Loop>(concat("psd-server-", core)));
  }
  if (options.world_size == 0 && !options.flight_record.empty())
    records_ =
        std::make_unique<ServerRecords>(options.flight_record, options.timeout,
                                        [this](JsonWriter& json, std::int64_t time_ns) { report(json, time_ns); });
  if (!options.checkpoint_dir.empty()) {
    checkpoint_status_ = open_checkpoint_directory(options.checkpoint_dir);
    checkpoints_ = std::make_unique<CheckpointWriter>(options.checkpoint_dir,
                                                      static_cast<std::size_t>(std::max(1, options.checkpoint_keep)));
  }
  for (std::size_t core = 0; core < loops.size(); ++core) {
    ServerCore::Surroundings surroundings;
    surroundings.index = core;
    surroundings.tenants = tenants_;
    surroundings.core_count = loops.size();
    surroundings.wide = wide_.get();
    surroundings.checkpoints = checkpoints_.get();
    if (records_) surroundings.on_failure = [this](const JobFailure& failure) { records_->write(failure); };
    surroundings.on_late_rank = [this](const JobName& job, std::uint32_t rank, const std::string& text) {
      if (!tenants_->first_notice(job, rank)) return;
      const std::lock_guard lock(mutex_);
      if (late_notice_count_ == limits::kNotices) return;
      ++late_notice_count_;
      notices_.push_back("job '" + job.name + "': " + text);
    };
    cores_.push_back(std::make_unique<ServerCore>(options, loops[core], std::move(surroundings)));
  }
  if (options.assignment == Assignment::worker) assign_by_worker(cores_);
}

ServerImpl::~ServerImpl() {
  shutdown();
  records_.reset();  // its thread may be asking the cores' loops
  // Cores call each other, so all loops must stop before a core is destroyed.
  for (auto& core : cores_) core->loop().stop();
}

Status ServerImpl::listen(Transport& transport, const std::vector<std::string>& addresses) {
  if (!checkpoint_status_.ok()) return checkpoint_status_.with_context("checkpoint_dir");
  const bool first_transport = addresses_.empty();
  last_addresses_.assign(cores_.size(), "");
  // Core 0 comes last, because it tells workers where the other cores are.
  for (std::size_t core = cores_.size(); core-- > 0;) {
    if (core == 0 && first_transport) cores_[0]->set_other_cores({last_addresses_.begin() + 1, last_addresses_.end()});
    const bool each = addresses.size() == cores_.size();
    auto listening = cores_[core]->listen(transport, each ? addresses[core] : core_address(addresses.front(), core));
    if (!listening.ok()) return listening.status();
    last_addresses_[core] = std::move(listening.value());
  }
  if (first_transport) addresses_ = last_addresses_;
  return {};
}

void ServerImpl::report(JsonWriter& json, std::int64_t time_ns) {
  json.begin_array();
  for (auto& core : cores_) core->report(json, time_ns);
  json.end_array();
}

void ServerImpl::serve_on(const std::function<bool()>& keep_serving) {
  constexpr auto kLookAgain = std::chrono::milliseconds(10);
  while (keep_serving() && std::ranges::any_of(cores_, [](auto& core) { return core->has_values_for_others(); }))
    pause_for(kLookAgain);
}

void ServerImpl::shutdown() { shutdown(kLinger); }

void ServerImpl::shutdown(std::chrono::milliseconds linger) {
  for (auto& core : cores_) core->begin_shutdown(linger);
  for (auto& core : cores_) core->finish_shutdown(linger);
  if (checkpoints_) checkpoints_->finish();  // must run before the loops stop, because they get the memory back
}

std::vector<std::string> ServerImpl::notices() const {
  // Notices that have been returned before keep their place in the list.
  const auto of_checkpoints = checkpoints_ ? checkpoints_->notices() : std::vector<std::string>();
  const std::lock_guard lock(mutex_);
  for (; checkpoint_notice_count_ < of_checkpoints.size(); ++checkpoint_notice_count_)
    notices_.push_back(of_checkpoints[checkpoint_notice_count_]);
  return notices_;
}

std::vector<LateRank> ServerImpl::late_ranks() {
  std::map<std::uint32_t, LateRank> by_rank;
  for (auto& core : cores_) {
    for (const LateRank& one : core->late_ranks()) {
      LateRank& all = by_rank.try_emplace(one.rank, LateRank{one.rank}).first->second;
      all.late_steps = std::max(all.late_steps, one.late_steps);
      all.late_chunks += one.late_chunks;
      all.last_step = std::max(all.last_step, one.last_step);
    }
  }
  std::vector<LateRank> ranks;
  ranks.reserve(by_rank.size());
  for (const auto& [rank, one] : by_rank) ranks.push_back(one);
  return ranks;
}

TrafficStats ServerImpl::traffic() {
  TrafficStats stats;
  for (auto& core : cores_) stats += core->traffic();
  return stats;
}

}  // namespace poseidon
