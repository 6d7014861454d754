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
  std::string waiting_for(const Exchange& exchange) const override;

 protected:
  /// Marks every chunk as awaited.
  static void expect_results(Exchange& exchange);

 private:
  static std::vector<std::span<const std::byte>> payload_of(const Exchange& exchange, const Chunk& chunk);
  static void clear_empty_chunks(const Exchange& exchange);
  static void take_answer(Exchange& exchange, const wire::Header& header);
  static Status check_result(const Exchange& exchange, const wire::Header& header);
  static void scatter(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                      const Links& links);
  static wire::Header request_header(const Exchange& exchange, const Links& links);
  static void send_rule(const Exchange& exchange, const UpdateRule& rule, const Links& links);
};

}  // namespace poseidon
