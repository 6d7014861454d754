#include "server/checkpoint/shard_checkpoint.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/random_bytes.h"

namespace poseidon {

namespace {

constexpr std::size_t kMaxUnits = 1u << 20;  // the most units of a job
// An estimate of what the tables need for a unit, beside its name, and for a chunk.
constexpr std::size_t kUnitBytes = 64 + sizeof(wire::StoredUnit);
constexpr std::size_t kChunkBytes = 256;

Status refused(const std::string& why) { return {ErrorCode::refused, why}; }

std::uint64_t random_id() {
  std::array<std::byte, sizeof(std::uint64_t)> bytes{};
  fill_with_random_bytes(bytes);
  std::uint64_t id = 0;
  std::memcpy(&id, bytes.data(), sizeof id);
  return id;
}

std::string text_of(const wire::StoredUnit& unit) {
  return concat(unit.size_bytes, " bytes of ", dtype_name(unit.dtype));
}

bool is_chunk_of(const wire::StoredUnit& unit, std::uint32_t chunk, DType dtype,
                 const std::vector<std::shared_ptr<const Buffer>>& arrays) {
  return arrays.empty() || (dtype == unit.dtype && arrays.front()->size() == unit.chunk_size(chunk));
}

}  // namespace

ShardCheckpoint::ShardCheckpoint(CheckpointWriter& writer, std::string job, const Options& options, Loop& loop,
                                 std::shared_ptr<BufferPool> pool)
    : writer_(writer),
      job_(std::move(job)),
      writer_id_(random_id()),
      loop_(loop),
      pool_(std::move(pool)),
      interval_(std::max<std::uint64_t>(1, options.checkpoint_every)) {}

Status ShardCheckpoint::describe(const wire::StoredUnits& units) {
  loop_.check_thread();
  if (run_ != 0 && units.run != run_)
    return refused(
        "two different runs have described the job's stored units; give jobs that run at the same time different "
        "names");
  run_ = units.run;
  base_version_ = std::max(base_version_, units.base_version);
  for (const wire::StoredUnit& unit : units.units) {
    if (units_.size() >= kMaxUnits) return refused(concat("a job has at most ", kMaxUnits, " stored units"));
    const auto [known, is_new] = units_.try_emplace(unit.id, unit);
    if (known->second != unit)
      return refused(concat("unit ", unit.id, " is described as '", known->second.name, "' and as '", unit.name, "'"));
    if (is_new && !pool_->try_charge(kUnitBytes + unit.name.size()))
      return refused(
          "the job has no memory left on this server for the description of its stored units; raise memory_limit");
  }
  return {};
}

/// Returns the steps that a chunk has done, or null if nobody has described its unit.
std::uint64_t* ShardCheckpoint::know(const wire::Envelope& header) {
  const auto unit = units_.find(header.unit);
  if (unit == units_.end() || header.chunk >= unit->second.chunk_count()) return nullptr;
  const auto [step, is_new] = steps_.try_emplace({header.unit, header.chunk}, 0);
  if (is_new) pool_->charge(kChunkBytes);
  return &step->second;
}

Status ShardCheckpoint::before_assign() {
  loop_.check_thread();
  if (may_assign_ || base_version_ > 0 || run_ == 0) return {};
  const auto versions = find_checkpoints(writer_.directory(), job_);
  if (!versions.ok()) return refused(versions.status().message());
  for (const CheckpointPaths& version : versions.value())
    if (version.run != run_ && CheckpointVersion::open(version).ok())
      return refused(concat("checkpoint_dir ", writer_.directory(), " holds version ", version.version,
                            " of this job: resume from it (resume=True), or take another directory or job name"));
  may_assign_ = true;
  return {};
}

/// Returns null if there is no version up to `limit`. `problem` describes the last damaged version.
CheckpointVersion* ShardCheckpoint::newest(std::uint64_t limit, Status& problem) {
  if (source_ && source_limit_ == limit) return &*source_;
  source_.reset();
  if (limit == kNoVersion) return nullptr;
  const auto versions = find_checkpoints(writer_.directory(), job_);
  if (!versions.ok()) {
    problem = versions.status();
    return nullptr;
  }
  for (const CheckpointPaths& paths : versions.value()) {
    if ((limit > 0 && paths.version > limit) || damaged_.contains({paths.version, paths.run})) continue;
    auto opened = CheckpointVersion::open(paths);
    if (opened.ok()) {
      source_ = std::move(opened.value());
      source_limit_ = limit;
      return &*source_;
    }
    if (opened.status().code() == ErrorCode::refused) continue;  // a server died before it had written its file
    problem = opened.status();
    writer_.note(concat("checkpoint version ", paths.version, " is not used: ", problem.message()));
  }
  return nullptr;
}

Result<ShardCheckpoint::Restored> ShardCheckpoint::restore(const wire::Envelope& about, std::uint64_t version_limit,
                                                           StoredChunk& chunk) {
  loop_.check_thread();
  may_assign_ = true;
  const auto described = units_.find(about.unit);
  if (described == units_.end() || about.chunk >= described->second.chunk_count())
    return refused(concat("unit ", about.unit, " cannot be restored: rank 0 has not described it"));
  const wire::StoredUnit& wanted = described->second;
  if (const auto step = steps_.find({about.unit, about.chunk}); step != steps_.end() && step->second > 0)
    return refused("'" + wanted.name + "' must be restored before its first step");
  Status problem;
  while (CheckpointVersion* source = newest(version_limit, problem)) {
    const CheckpointUnit* saved = source->unit(wanted.name);
    base_version_ = source->version();
    if (saved == nullptr)
      return refused(concat("version ", source->version(), " of the checkpoints has no '", wanted.name,
                            "'; resume with the model that wrote them"));
    if (saved->unit.size_bytes != wanted.size_bytes || saved->unit.dtype != wanted.dtype)
      return refused(concat("'", wanted.name, "' has ", text_of(wanted), ", in version ", source->version(),
                            " of the checkpoints ", text_of(saved->unit), "; resume with the model that wrote them"));
    auto piece = source->read(wanted.name, wanted.chunk_offset(about.chunk), wanted.chunk_size(about.chunk));
    if (piece.ok()) {
      const auto& arrays = piece.value().arrays;
      if (arrays.empty())
        return refused("'" + wanted.name + "' had no value when the checkpoint was written; assign one instead");
      for (std::size_t i = 0; i < arrays.size(); ++i)
        if (Status status = chunk.assign(i, arrays[i].span(), wanted.dtype, piece.value().update_count); !status.ok())
          return status;
      chunk.set_states_of(saved->rule.kind);
      know(about);
      return Restored{source->version(), saved->rule};
    }
    problem = piece.status();
    writer_.note(concat("checkpoint version ", source->version(), " is not used: ", problem.message()));
    source->set_damaged_aside();
    damaged_.emplace(source->version(), source->run());
    source_.reset();
  }
  base_version_ = 0;
  if (!problem.ok())
    return refused("no checkpoint of the job can be used: " + problem.message() +
                   "; start without resume, or restore the files");
  return Restored{};
}

void ShardCheckpoint::stepped(const wire::Envelope& shape, StoredChunk& chunk, const UpdateRule* rule) {
  loop_.check_thread();
  std::uint64_t* step = know(shape);
  if (step == nullptr) return;
  *step = shape.step;
  source_.reset();  // nothing is restored after this
  const ChunkKey key{shape.unit, shape.chunk};
  const wire::StoredUnit& unit = units_.at(shape.unit);
  const std::uint64_t version = base_version_ + shape.step;
  if (!due(version)) return;
  if (!collected_ || collected_->version < version) begin(version);
  if (!collected_ || collected_->version != version) return;
  CheckpointRecord record;
  record.chunk = shape.chunk;
  record.update_count = chunk.update_count();
  auto arrays = chunk.arrays();
  if (!is_chunk_of(unit, shape.chunk, chunk.dtype(), arrays))
    return give_up(concat("chunk ", shape.chunk, " of '", unit.name, "' does not match its description"));
  record.array_count = static_cast<std::uint32_t>(arrays.size());
  for (const auto& array : arrays) collected_->size_bytes += array->size();
  // An array that is kept for the writer is copied when it is updated.
  if (!pool_->has_room(collected_->size_bytes)) return give_up("its copies would exceed memory_limit");
  collected_->records[key] = record;
  collected_->arrays[key] = std::move(arrays);
  if (rule != nullptr) rules_[shape.unit] = *rule;
  if (collected_->records.size() == steps_.size()) write();
}

bool ShardCheckpoint::due(std::uint64_t version) {
  return version % interval_ == 0 && version > last_version_ && version <= kMaxCheckpointVersion;
}

void ShardCheckpoint::begin(std::uint64_t version) {
  if (collected_) {
    const auto late =
        std::ranges::find_if(steps_, [this](const auto& one) { return !collected_->records.contains(one.first); });
    give_up(concat("unit '", units_.at(late->first.first).name, "' has done ", late->second, " steps, others ",
                   version - base_version_, "; every stored layer has to take part in every step"));
  }
  if (writing_) {
    // Other servers skip other versions, but all servers meet again at multiples of a larger interval.
    interval_ *= 2;
    last_version_ = version;
    writer_.note(concat("checkpoint version ", version,
                        " is skipped because the one before is still being written; "
                        "from here on there is one every ",
                        interval_, " steps; raise checkpoint_every"));
    return;
  }
  collected_ = Collected{version, {}, {}, 0};
}

void ShardCheckpoint::give_up(const std::string& why) {
  writer_.note(concat("checkpoint version ", collected_->version, " is not written: ", why));
  last_version_ = collected_->version;
  collected_.reset();
}

void ShardCheckpoint::write() {
  CheckpointSnapshot snapshot;
  CheckpointHead& head = snapshot.head;
  head.job = job_;
  head.version = last_version_ = collected_->version;
  head.run = run_;
  snapshot.base_version = base_version_;
  std::map<std::uint32_t, std::uint32_t> index_of;  // the index in the file, by id
  for (const auto& [id, unit] : units_) {
    index_of[id] = static_cast<std::uint32_t>(head.units.size());
    CheckpointUnit& one = head.units.emplace_back(CheckpointUnit{unit, {}});
    if (const auto rule = rules_.find(id); rule != rules_.end()) one.rule = rule->second;
  }
  for (auto& [key, record] : collected_->records) {
    record.unit = index_of.at(key.first);
    head.records.push_back(record);
    snapshot.arrays.push_back(std::move(collected_->arrays.at(key)));
  }
  collected_.reset();
  writing_ = true;
  const std::string name = checkpoint_name(job_, head.version, run_, writer_id_);
  writer_.write(
      std::move(snapshot), name,
      [this, &loop = loop_, alive = std::weak_ptr<bool>(alive_)](std::shared_ptr<CheckpointSnapshot> written) {
        // The arrays belong to the loop's pool, so their last owner must release them on that loop.
        loop.post([this, alive, held = std::move(written)] {
          if (!alive.expired()) writing_ = false;
        });
      });
}

}  // namespace poseidon
