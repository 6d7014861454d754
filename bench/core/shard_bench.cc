// Measures what a server does for each contribution beside adding and sending it: finding its chunk, checking it,
// keeping its place and answering. Payloads have 64 bytes. Steps have 8 or 1,024 workers, whose contributions come in
// random order or in that of the ranks. The exit status is 1 if one of 1,024 costs more than 1.5 times as much as one
// of 8.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "server/core/shard.h"
#include "wire/messages/contribution.h"

namespace poseidon {
namespace {

constexpr std::size_t kPayloadBytes = 64;
constexpr std::uint32_t kChunks = 8;
constexpr double kBar = 1.5;
constexpr int kRounds = 21;
constexpr std::size_t kMessagesOfARound = std::size_t{1} << 16;

/// A worker that takes its results and does nothing with them.
class Taker final : public Requester {
 public:
  void send(const wire::Header& /*header*/, std::shared_ptr<const Buffer> /*payload*/) override { ++taken; }
  void refuse(const wire::Envelope& /*about*/, const Status& status) override {
    std::fprintf(stderr, "refused: %s\n", status.message().c_str());
    std::exit(1);
  }
  std::size_t taken = 0;
};

/// Steps of one shard.
class Steps {
 public:
  Steps(std::uint32_t worker_count, bool in_rank_order)
      : workers_(worker_count), order_(worker_count), shard_(worker_count, {}, {}) {
    std::iota(order_.begin(), order_.end(), 0U);
    if (!in_rank_order) std::shuffle(order_.begin(), order_.end(), std::mt19937(7));
  }

  /// Runs steps until there were about kMessagesOfARound contributions. Returns the nanoseconds of one.
  double round_ns() {
    const std::size_t messages_of_a_step = kChunks * order_.size();
    const std::size_t steps = std::max<std::size_t>(1, kMessagesOfARound / messages_of_a_step);
    const auto begun = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < steps; ++i) step();
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begun;
    return time.count() / static_cast<double>(steps * messages_of_a_step);
  }

 private:
  void step() {
    wire::Contribution push;
    push.kind = wire::Kind::push;
    push.step = ++step_;
    push.worker_count = static_cast<std::uint32_t>(order_.size());
    push.divisor = push.worker_count;
    push.payload_bytes = kPayloadBytes;
    for (const std::uint32_t rank : order_) {
      for (push.chunk = 0; push.chunk < kChunks; ++push.chunk) {
        push.rank = rank;
        const auto place = shard_.begin(push, workers_[rank]);
        if (!place.ok()) std::exit(1);
        std::memset(place.value().data(), 0, kPayloadBytes);
        shard_.complete(push);
      }
    }
    for (const Taker& worker : workers_)
      if (worker.taken != kChunks * step_) std::exit(1);
  }

  std::vector<Taker> workers_;
  std::vector<std::uint32_t> order_;
  Shard shard_;
  std::uint64_t step_ = 0;
};

double best_ns(std::uint32_t worker_count, bool in_rank_order) {
  Steps steps(worker_count, in_rank_order);
  double best = steps.round_ns();
  for (int round = 1; round < kRounds; ++round) best = std::min(best, steps.round_ns());
  return best;
}

}  // namespace
}  // namespace poseidon

int main() {
  bool met = true;
  for (const bool in_rank_order : {false, true}) {
    const double few = poseidon::best_ns(8, in_rank_order);
    const double many = poseidon::best_ns(1'024, in_rank_order);
    const double ratio = many / few;
    met = met && ratio <= poseidon::kBar;
    std::printf("a contribution in %s: 8 workers %.0f ns, 1,024 workers %.0f ns: %.2f times (bar %.1f: %s)\n",
                in_rank_order ? "rank order" : "random order", few, many, ratio, poseidon::kBar,
                ratio <= poseidon::kBar ? "met" : "missed");
  }
  return met ? 0 : 1;
}
