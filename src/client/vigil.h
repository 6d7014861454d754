// Vigil: which ranks are silent, and whether their machines still answer.
//
// Each worker sends a heartbeat to every other one, and in large jobs to its neighbours (mesh.h). A process that is
// frozen (stopped, swapped out) sends none, but the kernel of its machine acknowledges what comes. A machine that is
// down or cut off does not.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/one_thread.h"
#include "transport/transport.h"

namespace poseidon {

/// It has no clock and no connections of its own. One thread uses it.
class Vigil {
 public:
  enum class News : std::uint8_t {
    frozen,       // nothing comes from the process, and its machine answers
    unreachable,  // the machine does not answer either
    back,         // it is heard again
  };
  struct Finding {
    std::size_t rank = 0;
    News news = News::frozen;
    std::chrono::nanoseconds silence{0};
  };

  /// Of `worker_count` ranks each watches `watched_count` others.
  Vigil(std::size_t worker_count, std::size_t watched_count);

  /// How often judge() is to be called (any thread may ask). Each second call is the time for a heartbeat.
  std::chrono::milliseconds interval() const { return interval_; }

  /// Returns what is new. `heard_ns` has for each rank when its process last gave a sign of life, by the monotonic
  /// clock; 0: it is not watched. `answer` is called for ranks that are silent.
  std::vector<Finding> judge(std::int64_t now_ns, std::span<const std::int64_t> heard_ns,
                             const std::function<Flow::Answer(std::size_t rank)>& answer);

  /// For how long a rank has been unreachable; 0: it is not.
  std::chrono::nanoseconds unreachable_for(std::size_t rank, std::int64_t now_ns) const;

 private:
  struct Watched {
    std::int64_t heard_ns = 0;
    std::int64_t longest_gap_ns = 0;  // of those after which it was heard again
    bool silent = false;              // its silence has been told
    bool unreachable = false;
    bool unanswered = false;  // its machine did not answer when it was asked last
  };
  std::optional<Finding> judge_one(std::size_t rank, std::int64_t now_ns, std::int64_t heard_ns,
                                   const std::function<Flow::Answer(std::size_t rank)>& answer);

  const std::chrono::milliseconds interval_;
  std::vector<Watched> ranks_;
  std::int64_t judged_ns_ = 0;
  std::int64_t resumed_ns_ = 0;  // when this process ran again after it had not run itself
  [[no_unique_address]] OneThread one_thread_{"Vigil"};
};

}  // namespace poseidon
