// ps: the worker pushes chunks of the dense gradient to their shards, which send the reduced chunks back (Poseidon
// §3.2, §4.1).
#pragma once

#include "scheme/scheme.h"

namespace poseidon {

/// The scheme may have another way between this worker and a chunk's server (host_reduction.h), which overrides what is
/// private and virtual here.
class ParameterServer : public SchemeProtocol {
 public:
  explicit ParameterServer(const SchemeTraits& traits) : SchemeProtocol(traits) {}
  void start(Exchange& exchange, const Links& links) const override;
  Result<std::span<std::byte>> accept(Exchange& exchange, const wire::Header& header, bool lent,
                                      const Links& links) const override;
  Status receive(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                 const Links& links) const override;
  std::string waiting_for(const Exchange& exchange, const Links& links) const override;

 protected:
  /// Whether the operation's answers bring values to this worker.
  static bool wants_result(const Exchange& exchange);
  /// ErrorCode::mismatch: the message is no answer for which the exchange waits.
  Status check_awaited(const Exchange& exchange, const wire::Header& header, const Links& links) const;
  /// ErrorCode::mismatch: the answer has another type, or a payload of another size; or it is a difference for which no
  /// chunk of `exchange` has a base (null: none can have one).
  static Status check_payload(const wire::Header& header, DType dtype, std::size_t size_bytes,
                              const Exchange* exchange = nullptr);
  /// Notes the fields of an answer that is complete. The exchange goes on.
  static void note_received(Exchange& exchange, const wire::Header& header, const Links& links);

  /// Sends a chunk's server what the operation asks of it: `header` is complete but for the chunk.
  virtual void send_chunk(Exchange& exchange, const Links& links, const Chunk& chunk, wire::Header header) const;
  /// Whether a group's chunk is copied to its members from a buffer, or a chunk has no place in this worker's result.
  virtual bool stages(const Exchange& exchange, const wire::Header& answer) const;
  /// Whether a step's result of this kind comes from the one of whom this worker awaits the chunk.
  virtual bool is_result(const Exchange& exchange, const wire::Header& header, const Links& links) const;

 private:
  /// The envelope of what goes to a server.
  virtual wire::Envelope envelope_to_server(const Exchange& exchange, const Links& links) const;
  /// Whether servers confirm the operation, though it is an assignment.
  virtual bool confirms(const Exchange& /*exchange*/) const { return false; }
  /// Whether an answer about the chunk brings values.
  virtual bool brings_values(const Exchange& exchange, std::uint32_t chunk) const;
  /// Takes the values of a staged chunk, which are in `memory` if they are not lent.
  virtual std::span<const std::byte> keep_staged(Exchange& exchange, const Links& links, Buffer memory,
                                                 std::span<const std::byte> values) const;
  /// An answer is complete. `values` are in the unit's dtype where keep_staged or the result has them.
  virtual void pass_on(Exchange& /*exchange*/, const Links& /*links*/, const wire::Header& /*answer*/,
                       std::span<const std::byte> /*values*/) const {}

  void ask_again(Exchange& exchange, const Links& links, const wire::Header& difference) const;
  static void clear_empty_chunks(const Exchange& exchange);
  static void take_answer(Exchange& exchange, const wire::Header& header);
  static void expect_results(Exchange& exchange);
  static void scatter(const Exchange& exchange, const Chunk& chunk, std::span<const std::byte> values);
  static std::span<const std::byte> take_placed(const Exchange& exchange, const wire::Header& header,
                                                std::span<const std::byte> payload);
  Status check_result(const Exchange& exchange, const wire::Header& header, const Links& links) const;
  std::span<const std::byte> take_staged(Exchange& exchange, const wire::Header& header,
                                         std::span<const std::byte> payload, const Links& links) const;
  wire::Header request_header(const Exchange& exchange, const Links& links) const;
  void send_rule(const Exchange& exchange, const UpdateRule& rule, const Links& links) const;
};

}  // namespace poseidon
