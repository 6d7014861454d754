// ps: the worker pushes chunks of the dense gradient to their shards, which send the reduced chunks back (Poseidon
// §3.2, §4.1).
#pragma once

#include "scheme/scheme.h"

namespace poseidon {

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
  /// ErrorCode::mismatch: the message is no answer for which the exchange waits.
  static Status check_awaited(const Exchange& exchange, const wire::Header& header, const Links& links);
  /// ErrorCode::mismatch: the answer has another type, or a payload of another size.
  static Status check_payload(const wire::Header& header, DType dtype, std::size_t size_bytes);
  /// Notes the fields of an answer that is complete. The exchange goes on.
  static void note_received(Exchange& exchange, const wire::Header& header, const Links& links);

 private:
  static void clear_empty_chunks(const Exchange& exchange);
  static void take_answer(Exchange& exchange, const wire::Header& header);
  static void expect_results(Exchange& exchange);
  static Status check_result(const Exchange& exchange, const wire::Header& header, const Links& links);
  static void scatter(const Exchange& exchange, const Chunk& chunk, std::span<const std::byte> values);
  static std::span<const std::byte> take_staged(Exchange& exchange, const wire::Header& header,
                                                std::span<const std::byte> payload, const Links& links);
  static std::span<const std::byte> take_placed(const Exchange& exchange, const wire::Header& header,
                                                std::span<const std::byte> payload);
  static wire::Header confirmation_header(const Exchange& exchange, const Links& links, const Chunk& chunk);
  static wire::Header request_header(const Exchange& exchange, const Links& links);
  static void send_rule(const Exchange& exchange, const UpdateRule& rule, const Links& links);
};

}  // namespace poseidon
