#include "server/checkpoint/checkpoint_writer.h"

#include <sys/resource.h>

#include <utility>

#include "server/checkpoint/checkpoint_directory.h"
#include "server/chunk/limits.h"

namespace poseidon {

namespace {

constexpr int kNice = 10;  // training has priority

}  // namespace

CheckpointWriter::CheckpointWriter(std::string directory, std::size_t keep)
    : directory_(std::move(directory)), keep_(keep), executor_(std::make_unique<Executor>(1)) {
  // On Linux each thread has its own niceness.
  executor_->run(
      1, [](std::size_t) { ::setpriority(PRIO_PROCESS, 0, kNice); }, [] {});
}

void CheckpointWriter::write(CheckpointSnapshot snapshot, std::string name,
                             std::function<void(std::shared_ptr<CheckpointSnapshot>)> written) {
  // There is one owner only, so that `written` gets the last reference.
  const auto slot =
      std::make_shared<std::shared_ptr<CheckpointSnapshot>>(std::make_shared<CheckpointSnapshot>(std::move(snapshot)));
  const std::string job = (*slot)->head.job;
  const CheckpointOrigin origin{(*slot)->head.run, (*slot)->base_version};
  const std::lock_guard lock(mutex_);
  if (!executor_) return;
  executor_->run(
      1, [this, slot, name = std::move(name)](std::size_t) { write_now(**slot, name); },
      [this, slot, job, origin, written = std::move(written)] {
        written(std::move(*slot));
        prune_checkpoints(directory_, job, keep_, origin);
      });
}

void CheckpointWriter::write_now(CheckpointSnapshot& snapshot, const std::string& name) {
  if (Status status = write_checkpoint(directory_, name, snapshot); !status.ok())
    note(concat("checkpoint version ", snapshot.head.version, " of job '", checkpoint_job_name(snapshot.head.job),
                "' is lost, training goes on: ", status.message()));
}

void CheckpointWriter::finish() {
  std::unique_ptr<Executor> executor;
  {
    const std::lock_guard lock(mutex_);
    executor = std::move(executor_);
  }
  executor.reset();  // waits for the thread to end
}

void CheckpointWriter::note(std::string text) {
  const std::lock_guard lock(mutex_);
  if (notices_.size() < limits::kNotices) notices_.push_back(std::move(text));
}

std::vector<std::string> CheckpointWriter::notices() const {
  const std::lock_guard lock(mutex_);
  return notices_;
}

}  // namespace poseidon
