// Shards that save their values and restore them. The bits are the same, however the layers are cut into chunks.
#include "server/checkpoint/shard_checkpoint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpp/server/checkpoint/checkpoint_cases.h"
#include "server/core/shard.h"
#include "wire/messages/contribution.h"
#include "wire/messages/rule.h"
#include "wire/messages/stored.h"
#include "wire/messages/units.h"

namespace poseidon {
namespace {

using testing::Bytes;
using testing::content_of;
using testing::random_reals;
using testing::RecordingRequester;
using testing::ReferenceParameters;
using testing::stored_push_of;
using testing::TemporaryDirectory;
using testing::unit_of;
using testing::update_rules;
using testing::write_text;

struct TrainedLayer {
  std::string name;
  DType dtype = DType::float32;
  std::size_t element_count = 0;
  UpdateRule rule;
};

Options every(std::uint64_t steps, int keep = 2) {
  Options options;
  options.checkpoint_every = steps;
  options.checkpoint_keep = keep;
  return options;
}

/// A server of some cores and its one worker, without a network. Chunk i of a layer is on core i % cores.
class Job {
 public:
  Job(std::string directory, std::vector<TrainedLayer> layers, std::size_t core_count, std::uint64_t chunk_bytes,
      std::uint64_t run, Options options = every(2))
      : layers_(std::move(layers)),
        writer_(std::make_unique<CheckpointWriter>(std::move(directory), options.checkpoint_keep)) {
    wire::StoredUnits units{run, 0, {}};
    for (std::uint32_t i = 0; i < layers_.size(); ++i) {
      const std::uint64_t size = layers_[i].element_count * dtype_bytes(layers_[i].dtype);
      units.units.push_back({i + 7, layers_[i].dtype, size, std::min(size, chunk_bytes), layers_[i].name});
    }
    units_ = units.units;
    for (std::size_t core = 0; core < core_count; ++core) {
      auto& shard = shards_.emplace_back(std::make_unique<Shard>(1, Reduction{}, ShardThreads{}));
      shard->set_checkpoint(
          std::make_unique<ShardCheckpoint>(*writer_, "default", options, loop_, shard->pool().shared_from_this()));
      for (const auto& message : units.make(0))
        loop_.call([&] { EXPECT_TRUE(shard->describe_units(message.payload()).ok()); });
    }
  }
  ~Job() { finish(); }

  CheckpointWriter& writer() { return *writer_; }

  /// Waits until the writer has written everything, and the shards know.
  void settle() {
    std::promise<void> written;
    writer_->write(testing::snapshot_of(0, {}), "probe", [&](const auto&) { written.set_value(); });
    written.get_future().wait();
    loop_.call([] {});
  }

  /// Ends like a server that is stopped: the writer writes everything that it has.
  void finish() {
    if (!writer_) return;
    writer_->finish();
    loop_.call([] {});  // which has its memory back
    loop_.call([this] { shards_.clear(); });
  }

  Status assign(std::size_t layer, const Bytes& value) {
    Status status;
    for_each_chunk(layer, [&](Shard& shard, wire::Header header, std::size_t offset, std::size_t size) {
      header = wire::Assign{units_[layer].dtype}.make(header);
      if (status.ok()) status = shard.assign(header, std::span(value).subspan(offset, size));
    });
    return status;
  }
  /// Assigns a state to the layer's first chunk, on a core that need not be its own.
  Status assign_state(std::size_t core, std::size_t layer, const Bytes& state) {
    wire::Header header;
    header.unit = units_[layer].id;
    header = wire::Assign{units_[layer].dtype, 1}.make(header);
    Status status;
    loop_.call([&] { status = shards_[core]->assign(header, state); });
    return status;
  }
  void set_rules() {
    for (std::uint32_t i = 0; i < layers_.size(); ++i) {
      wire::Header about;
      about.unit = units_[i].id;
      const auto message = wire::Rule{layers_[i].rule}.make(about);
      loop_.call([&] {
        for (auto& shard : shards_) EXPECT_TRUE(shard->set_rule(message.header, message.payload()).ok());
      });
    }
  }
  /// Returns the value after the step. If `gradient` is null, the worker is absent.
  Bytes step(std::size_t layer, std::uint64_t number, const Bytes* gradient) {
    Bytes value(units_[layer].size_bytes);
    for_each_chunk(layer, [&](Shard& shard, wire::Header header, std::size_t offset, std::size_t size) {
      wire::Contribution push = stored_push_of(0, 1, number);
      push.unit = header.unit;
      push.chunk = header.chunk;
      push.dtype = units_[layer].dtype;
      push.payload_bytes = gradient != nullptr ? size : 0;
      push.absent = gradient == nullptr;
      const auto data = gradient != nullptr ? std::span(*gradient).subspan(offset, size) : std::span<const std::byte>();
      EXPECT_TRUE(shard.add(push, worker_, data, [] {}).ok());
      const Bytes& got = worker_.sent.back().payload;
      std::copy(got.begin(), got.end(), value.begin() + static_cast<std::ptrdiff_t>(offset));
    });
    return value;
  }
  /// Restores one layer. Returns the versions of its chunks, or the text of the first refusal.
  std::vector<std::uint64_t> restore(std::size_t layer, Bytes& value, std::uint64_t limit = 0) {
    std::vector<std::uint64_t> versions;
    value.resize(units_[layer].size_bytes);
    for_each_chunk(layer, [&](Shard& shard, wire::Header header, std::size_t offset, std::size_t) {
      header = wire::Restore{units_[layer].dtype, limit}.make(header);
      if (Status status = shard.restore(header, worker_); !status.ok()) {
        refusals.push_back(status);
        return;
      }
      const auto& answer = worker_.sent.back();
      versions.push_back(wire::Value::read(answer.header).version);
      EXPECT_EQ(answer.has_payload, versions.back() > 0);
      std::copy(answer.payload.begin(), answer.payload.end(), value.begin() + static_cast<std::ptrdiff_t>(offset));
    });
    return versions;
  }

  std::vector<Status> refusals;

 private:
  template <typename F>
  void for_each_chunk(std::size_t layer, F&& body) {
    const wire::StoredUnit& unit = units_[layer];
    loop_.call([&] {
      for (std::uint32_t chunk = 0; chunk < unit.chunk_count(); ++chunk) {
        wire::Header header;
        header.unit = unit.id;
        header.chunk = chunk;
        body(*shards_[chunk % shards_.size()], header, unit.chunk_offset(chunk), unit.chunk_size(chunk));
      }
    });
  }

  std::vector<TrainedLayer> layers_;
  std::vector<wire::StoredUnit> units_;
  RecordingRequester worker_;
  Loop loop_{"shards"};
  std::unique_ptr<CheckpointWriter> writer_;
  std::vector<std::unique_ptr<Shard>> shards_;
};

/// An aggregator for one rank.
struct Negated {
  template <typename T>
  void operator()(const AggregateCall<T>& call) const {
    std::ranges::transform(call.contributions[0], call.result.begin(), std::negate());
  }
};

class ShardCheckpoints : public ::testing::Test {
 protected:
  static std::vector<TrainedLayer> layers() {
    auto rules = update_rules();
    static const bool registered = register_aggregator({"negated", Negated(), Negated()}).ok();
    EXPECT_TRUE(registered);
    rules[1].aggregator = "negated";
    return {{"momentum", DType::float32, 1000, rules[1]},
            {"adam", DType::float64, 333, rules[3]},
            {"plain", DType::float32, 5, rules[0]},
            {"mean", DType::int32, 64, {}}};
  }
  static constexpr std::size_t kNegated = 0;  // its rule has an aggregator
  static constexpr std::size_t kMean = 3;     // has no rule: its value is the last step's gradient

  static Bytes gradient(std::size_t layer, std::uint64_t step) {
    std::mt19937 random(static_cast<std::uint32_t>(layer * 1000 + step));
    if (layers()[layer].dtype == DType::int32) return testing::chunk_values(64 * 4, static_cast<unsigned>(step));
    return random_reals(random, layers()[layer].dtype, layers()[layer].element_count);
  }
  static Bytes negated(const Bytes& floats) {
    auto values = testing::values_of(floats);
    for (float& value : values) value = -value;
    return testing::bytes_of(values);
  }
  std::vector<ReferenceParameters> initial() {
    std::vector<ReferenceParameters> all;
    for (std::size_t i = 0; i < layers().size(); ++i) all.emplace_back(gradient(i, 999), layers()[i].dtype);
    return all;
  }
  /// Makes the steps first … last of the job. Its step 1 is step `base` + 1 of the training.
  void run(Job& job, std::vector<ReferenceParameters>& references, std::uint64_t first, std::uint64_t last,
           std::uint64_t base = 0, bool settle = true) {
    for (std::uint64_t step = first; step <= last; ++step) {
      for (std::size_t i = 0; i < references.size(); ++i) {
        const Bytes given = gradient(i, base + step);
        if (i == kMean)
          references[i].value = given;
        else
          references[i].update(layers()[i].rule, i == kNegated ? negated(given) : given);
        ASSERT_EQ(job.step(i, step, &given), references[i].value) << layers()[i].name << " in step " << step;
      }
      if (settle) job.settle();
    }
  }
  void start(Job& job, const std::vector<ReferenceParameters>& references) {
    for (std::size_t i = 0; i < references.size(); ++i) ASSERT_TRUE(job.assign(i, references[i].value).ok());
    job.set_rules();
  }
  std::vector<std::uint64_t> versions() {
    std::vector<std::uint64_t> all;
    const auto listed = list_checkpoints(directory_.path(), true).value();
    for (const CheckpointListing& listing : listed)
      if (listing.complete) all.push_back(listing.version);
    return all;
  }
  /// Runs six steps, which write the versions 2, 4 and 6. Versions 4 and 6 stay.
  void write_six(std::size_t core_count = 3, std::uint64_t chunk_bytes = 512) {
    Job job(directory_.path(), layers(), core_count, chunk_bytes, 1);
    auto references = initial();
    start(job, references);
    run(job, references, 1, 6);
  }

  TemporaryDirectory directory_;
};

TEST_F(ShardCheckpoints, TrainingGoesOnFromThemWithTheSameBits) {
  for (const auto& [cores, chunk_bytes] :
       {std::pair<std::size_t, std::uint64_t>{3, 512}, {1, 512}, {2, 64}, {4, 8192}}) {
    const TemporaryDirectory directory;
    auto references = initial();
    {
      Job job(directory.path(), layers(), 3, 512, 1);
      start(job, references);
      run(job, references, 1, 4);
      auto lost = references;
      run(job, lost, 5, 5);  // what came after the last version is done again
    }
    Job job(directory.path(), layers(), cores, chunk_bytes, 2);
    for (std::size_t i = 0; i < references.size(); ++i) {
      Bytes value;
      for (const std::uint64_t version : job.restore(i, value)) EXPECT_EQ(version, 4u);
      EXPECT_EQ(value, references[i].value) << layers()[i].name;
    }
    ASSERT_TRUE(job.refusals.empty()) << job.refusals.front().message();
    run(job, references, 1, 2, 4);  // with the rules that were saved
    job.finish();
    const auto listed = list_checkpoints(directory.path(), true).value();
    ASSERT_EQ(listed.size(), 2u);
    EXPECT_EQ(listed[0].version, 6u) << "steps are counted over restarts";
    EXPECT_EQ(listed[0].run, 2u);
    EXPECT_TRUE(listed[0].complete) << listed[0].problem;
  }
}

TEST_F(ShardCheckpoints, WithoutAVersionNothingIsRestored) {
  Job job(directory_.path(), layers(), 2, 512, 1);
  Bytes value;
  for (const std::uint64_t version : job.restore(0, value)) EXPECT_EQ(version, 0u);
  EXPECT_TRUE(job.refusals.empty());
  auto references = initial();
  start(job, references);
  run(job, references, 1, 2);
}

TEST_F(ShardCheckpoints, AnAbsentStepIsAStep) {
  {
    Job job(directory_.path(), layers(), 2, 512, 1);
    auto references = initial();
    start(job, references);
    for (std::size_t i = 0; i < references.size(); ++i) {
      const Bytes given = gradient(i, 1);
      job.step(i, 1, i % 2 == 0 ? &given : nullptr);
      job.step(i, 2, nullptr);
    }
  }
  EXPECT_EQ(versions(), std::vector<std::uint64_t>{2});
}

TEST_F(ShardCheckpoints, ADamagedVersionGivesWayToTheOneBefore) {
  write_six();
  EXPECT_EQ(versions(), (std::vector<std::uint64_t>{6, 4}));
  const std::string path = find_checkpoints(directory_.path(), "default").value().front().paths[1];
  std::string text = content_of(path);
  text[text.size() - 100] = static_cast<char>(text[text.size() - 100] ^ 64);
  write_text(path, text);
  Job job(directory_.path(), layers(), 1, 4096, 2);
  std::vector<std::uint64_t> got;
  Bytes value;
  for (std::size_t i = 0; i < layers().size(); ++i)
    for (const std::uint64_t version : job.restore(i, value)) got.push_back(version);
  // A layer that was read before the damage was found is restored again, with the limit of the others.
  EXPECT_EQ(got.back(), 4u);
  EXPECT_FALSE(job.writer().notices().empty());
  for (std::size_t i = 0; i < layers().size(); ++i)
    for (const std::uint64_t version : job.restore(i, value, 4)) EXPECT_EQ(version, 4u);
  EXPECT_TRUE(job.refusals.empty());
}

TEST_F(ShardCheckpoints, WhereAllAreDamagedNothingStartsAnew) {
  write_six();
  const auto found = find_checkpoints(directory_.path(), "default").value();
  for (const CheckpointPaths& paths : found) write_text(paths.paths[0], content_of(paths.paths[0]).substr(0, 300));
  Job job(directory_.path(), layers(), 1, 4096, 2);
  Bytes value;
  EXPECT_TRUE(job.restore(0, value).empty());
  ASSERT_EQ(job.refusals.size(), 1u);
  EXPECT_NE(job.refusals[0].message().find("no checkpoint of the job can be used"), std::string::npos);
}

TEST_F(ShardCheckpoints, ALimitAsksForAnOlderVersion) {
  write_six();
  Job job(directory_.path(), layers(), 2, 512, 2);
  Bytes value;
  for (const std::uint64_t version : job.restore(0, value)) EXPECT_EQ(version, 6u);
  for (const std::uint64_t version : job.restore(0, value, 5)) EXPECT_EQ(version, 4u);
  for (const std::uint64_t version : job.restore(0, value, 3)) EXPECT_EQ(version, 0u);
  EXPECT_TRUE(job.refusals.empty());
}

TEST_F(ShardCheckpoints, OfAnotherModelAreRefused) {
  write_six();
  auto others = layers();
  others[0].element_count = 999;
  others[1].dtype = DType::float32;
  others[1].element_count = 666;
  others[2].name = "unknown";
  Job job(directory_.path(), others, 1, 1 << 20, 2);
  Bytes value;
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(job.restore(i, value).empty());
  ASSERT_EQ(job.refusals.size(), 3u);
  EXPECT_NE(job.refusals[0].message().find("3996 bytes of float32"), std::string::npos);
  EXPECT_NE(job.refusals[1].message().find("float64"), std::string::npos);
  EXPECT_NE(job.refusals[2].message().find("has no 'unknown'"), std::string::npos);
}

TEST_F(ShardCheckpoints, AJobThatStartsAnewAmongThemIsRefused) {
  write_six();
  Job job(directory_.path(), layers(), 1, 4096, 2);
  const Status status = job.assign(0, gradient(0, 1));
  EXPECT_EQ(status.code(), ErrorCode::refused);
  EXPECT_NE(status.message().find("holds version 6 of this job"), std::string::npos) << status.message();
}

TEST_F(ShardCheckpoints, AJobMayGoBackToItsStartBehindThem) {
  write_six();
  Job job(directory_.path(), layers(), 2, 512, 2);
  Bytes value;
  for (const std::uint64_t version : job.restore(0, value)) EXPECT_EQ(version, 6u);
  for (std::size_t i = 0; i < layers().size(); ++i)
    for (const std::uint64_t version : job.restore(i, value, kNoVersion)) EXPECT_EQ(version, 0u);
  auto references = initial();
  start(job, references);
  run(job, references, 1, 2);
  EXPECT_EQ(versions(), std::vector<std::uint64_t>{2}) << "what the run has left behind would be taken for newer";
}

TEST_F(ShardCheckpoints, NoVersionWaitsForAChunkThatWasRefused) {
  Job job(directory_.path(), layers(), 3, 1 << 20, 1);
  const Status status = job.assign_state(2, 0, gradient(0, 1));
  EXPECT_EQ(status.code(), ErrorCode::refused) << "a state without a value";
  auto references = initial();
  start(job, references);
  run(job, references, 1, 2);
  EXPECT_EQ(versions(), std::vector<std::uint64_t>{2});
}

TEST_F(ShardCheckpoints, RestoringComesBeforeTheFirstStep) {
  write_six();
  Job job(directory_.path(), layers(), 1, 4096, 2);
  Bytes value;
  ASSERT_EQ(job.restore(2, value), std::vector<std::uint64_t>{6});
  const Bytes given = gradient(2, 1);
  job.step(2, 1, &given);
  EXPECT_TRUE(job.restore(2, value).empty());
  ASSERT_EQ(job.refusals.size(), 1u);
}

TEST_F(ShardCheckpoints, AnIntervalThatTheDiskCannotKeepIsDoubled) {
  Job job(directory_.path(), layers(), 1, 4096, 1, every(1, 9));
  std::promise<void> go_on;
  job.writer().write(testing::snapshot_of(1, {unit_of("w", 4, 4)}), "slow",
                     [wait = go_on.get_future().share()](const auto&) { wait.wait(); });
  auto references = initial();
  start(job, references);
  run(job, references, 1, 4, 0, false);  // 1 is kept for the writer, 2 is skipped, 3 not wanted any more, 4 skipped
  go_on.set_value();
  job.settle();
  run(job, references, 5, 8);
  job.finish();
  EXPECT_EQ(versions(), (std::vector<std::uint64_t>{8, 1}));
  const auto notices = job.writer().notices();
  ASSERT_EQ(notices.size(), 2u);
  EXPECT_NE(notices[0].find("every 2 steps"), std::string::npos) << notices[0];
  EXPECT_NE(notices[1].find("every 4 steps"), std::string::npos) << notices[1];
}

TEST_F(ShardCheckpoints, ALayerThatStaysBehindIsNamed) {
  Job job(directory_.path(), layers(), 2, 512, 1);
  auto references = initial();
  start(job, references);
  for (std::uint64_t step = 1; step <= 4; ++step) {
    const Bytes given = gradient(0, step);
    job.step(0, step, &given);
  }
  job.finish();
  EXPECT_TRUE(versions().empty());
  const auto notices = job.writer().notices();
  ASSERT_FALSE(notices.empty());
  EXPECT_NE(notices[0].find("version 2 is not written"), std::string::npos) << notices[0];
  EXPECT_NE(notices[0].find("unit 'adam' has done 0 steps"), std::string::npos) << notices[0];
}

TEST_F(ShardCheckpoints, ADirectoryThatHasGoneIsTold) {
  Job job(directory_.path() + "/gone", layers(), 1, 4096, 1);
  std::filesystem::create_directory(directory_.path() + "/gone");
  auto references = initial();
  start(job, references);
  std::filesystem::remove_all(directory_.path() + "/gone");
  run(job, references, 1, 3, 0, false);
  job.finish();
  const auto notices = job.writer().notices();
  ASSERT_EQ(notices.size(), 1u);
  EXPECT_NE(notices[0].find("training goes on"), std::string::npos) << notices[0];
}

TEST_F(ShardCheckpoints, WhatTheyKeepCountsAgainstTheMemoryLimit) {
  CheckpointWriter writer(directory_.path(), 1);
  Loop loop("shard");
  const auto budget = std::make_shared<MemoryBudget>(2000);
  const auto pool = std::make_shared<BufferPool>(budget);
  ShardCheckpoint checkpoint(writer, "default", every(1), loop, pool);
  wire::StoredUnits units{5, 0, {{1, DType::float32, 400, 400, "w"}, {2, DType::float32, 400, 400, "b"}}};
  loop.call([&] {
    ASSERT_TRUE(checkpoint.describe(units).ok());
    EXPECT_GT(budget->used_bytes(), 200u);
    StoredChunk chunk(pool);
    ASSERT_TRUE(chunk.assign(0, Bytes(400), DType::float32, 0).ok());
    while (pool->has_room(400)) pool->charge(100);
    checkpoint.stepped(testing::header_of_chunk(1, 0, 1), chunk, nullptr);
    ASSERT_EQ(writer.notices().size(), 1u);
    EXPECT_NE(writer.notices()[0].find("memory_limit"), std::string::npos) << writer.notices()[0];
    for (std::uint32_t id = 3; id < 30; ++id)
      units.units.push_back({id, DType::float32, 4, 4, "unit " + std::to_string(id)});
    EXPECT_EQ(checkpoint.describe(units).code(), ErrorCode::refused);
  });
}

TEST_F(ShardCheckpoints, UnitsAreDescribedOnce) {
  CheckpointWriter writer(directory_.path(), 1);
  Loop loop("shard");
  ShardCheckpoint checkpoint(writer, "default", every(1), loop, std::make_shared<BufferPool>());
  const wire::StoredUnits units{5, 0, {{1, DType::float32, 64, 64, "w"}}};
  loop.call([&] {
    EXPECT_TRUE(checkpoint.describe(units).ok());
    EXPECT_TRUE(checkpoint.describe(units).ok()) << "on another connection";
    auto other = units;
    other.units[0].size_bytes = 128;
    EXPECT_EQ(checkpoint.describe(other).code(), ErrorCode::refused);
    other = units;
    other.run = 6;
    EXPECT_EQ(checkpoint.describe(other).code(), ErrorCode::refused);
    StoredChunk chunk(std::make_shared<BufferPool>());
    wire::Header header;
    header.unit = 2;
    EXPECT_EQ(checkpoint.restore(header, 0, chunk).status().code(), ErrorCode::refused);
  });
}

}  // namespace
}  // namespace poseidon
