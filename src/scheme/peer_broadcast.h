// PeerBroadcast: every worker sends its part to every other worker, and makes the result of all parts itself. It does
// so in rank order, so that all replicas compute the same bits (Poseidon §3.2).
#pragma once

#include "scheme/scheme.h"

namespace poseidon {

/// A derived scheme says what a part is and how a result is made of all parts. A worker may say that it has nothing.
class PeerBroadcast : public SchemeProtocol {
 public:
  void start(Exchange& exchange, const Links& links) const final;
  Result<std::span<std::byte>> accept(Exchange& exchange, const wire::Header& header, bool lent,
                                      const Links& links) const final;
  Status receive(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                 const Links& links) const final;
  std::string waiting_for(const Exchange& exchange, const Links& links) const final;
  bool lacks(const Exchange& exchange, const Links& links, std::uint32_t peer) const final;
  /// The kind of the parts' messages.
  wire::Kind kind() const { return kind_; }

  /// accept() and receive() for an inbox, which may be of a step that has not started here yet. A lent payload is
  /// copied, because parts stay until all workers' are here, and a loan of the transport's memory has to be short.
  Result<std::span<std::byte>> make_room(PeerInbox& inbox, const Exchange& exchange, const wire::Header& header,
                                         const Links& links) const;
  Status store(PeerInbox& inbox, Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
               const Links& links) const;

 protected:
  PeerBroadcast(const SchemeTraits& traits, wire::Kind kind) : SchemeProtocol(traits), kind_(kind) {}

  /// Sends this worker's part to all others, and notes that it is here. The exchange may end with it.
  void send_part(Exchange& exchange, const Links& links, const wire::Contribution& body, const Pieces& payload) const;

  /// Returns the size of a part that is neither dense nor absent. Empty if the layer cannot have such a part.
  virtual std::optional<std::uint64_t> part_bytes(const Exchange& exchange, const wire::Contribution& body) const = 0;
  /// Takes a part whose payload is in part.buffer.
  virtual Status read_part(const Exchange& exchange, const wire::Contribution& body, Part& part) const = 0;

 private:
  /// Makes this worker's part of its gradient, and calls send_part, at once or later.
  virtual void send_own(Exchange& exchange, const Links& links, Part& own) const = 0;
  /// Makes the result of the parts, all of which are here.
  virtual void finish(Exchange& exchange, const Links& links) const = 0;

  static void pass_on(PeerInbox& inbox, Exchange& exchange, const wire::Header& header, const Links& links);
  void finish_if_complete(Exchange& exchange, const Links& links) const;

  const wire::Kind kind_;
};

/// A worker whose gradient is dense in some step sends the dense gradient instead of the scheme's own form. So the sum
/// stays exact, and no worker asks the others first.
class ExactBroadcast : public PeerBroadcast {
 protected:
  using PeerBroadcast::PeerBroadcast;

 private:
  /// Makes this worker's part of a gradient in the scheme's own form. Completes `body`, and returns the payload.
  virtual Pieces make_part(Exchange& exchange, const Links& links, Part& own, wire::Contribution& body) const = 0;
  void send_own(Exchange& exchange, const Links& links, Part& own) const final;
};

/// A worker sends less than its gradient. The residual, which is what it has not sent, is added to its next gradient.
class CompressedBroadcast : public PeerBroadcast {
 protected:
  using PeerBroadcast::PeerBroadcast;

 private:
  /// Makes the part of gradient + residual, in `part`, and keeps the rest in the residual. Runs on a thread of the
  /// executor.
  virtual void compress(const ExchangeUnit& about, const float* gradient, float* residual,
                        std::span<std::byte> part) const = 0;
  void send_own(Exchange& exchange, const Links& links, Part& own) const final;
};

/// Runs `job` for 0 to job_count − 1 on the executor. Afterwards, unless the exchange has failed, runs `then` on the
/// loop, and the exchange goes on.
void compute(
    Exchange& exchange, const Links& links, std::size_t job_count, std::function<void(std::size_t)> job,
    std::function<void()> then = [] {});

inline constexpr std::size_t kMinElementsPerJob = std::size_t{1} << 18;

/// As compute(), for ranges of `count` things, in at most `most_jobs` jobs and as many as there are threads.
void compute_ranges(
    Exchange& exchange, const Links& links, std::size_t most_jobs, std::size_t count,
    std::function<void(std::size_t begin, std::size_t end)> work, std::function<void()> then = [] {});

/// Returns the scheme whose parts travel as messages of this kind, which peers exchange.
const PeerBroadcast& peer_broadcast_of(wire::Kind kind);

}  // namespace poseidon
