// The collectives of a client, for Python.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "poseidon/client.h"

namespace poseidon::bindings {

/// The GIL guards it. The client must outlive it. It keeps the arrays of a call until the call is known to be over.
class PyCollectives {
 public:
  explicit PyCollectives(Client& client) : client_(client) {}

  void add(std::uint32_t communicator, std::vector<std::uint32_t> ranks);
  /// `input_bytes`, `output_bytes`: an array is as many arrays of these sizes, one after the other. Empty: it is one.
  std::uint64_t start(std::uint32_t communicator, CollectiveKind kind, std::vector<Array> inputs,
                      std::vector<Array> outputs, const std::vector<std::size_t>& input_bytes,
                      const std::vector<std::size_t>& output_bytes, Element element, ReduceOp op, std::uint32_t divisor,
                      std::uint32_t root, std::uint32_t label, double urgency);
  std::uint64_t send(std::uint32_t communicator, std::uint32_t to, std::uint32_t tag, std::uint32_t label, Array data);
  std::uint64_t receive(std::uint32_t communicator, std::optional<std::uint32_t> from, std::uint32_t tag,
                        std::uint32_t label, Array memory);
  /// The sender's rank, for receive(). None: the call goes on after so many seconds.
  std::optional<std::uint32_t> wait(std::uint64_t call, std::optional<double> limit_s);
  bool done(std::uint64_t call) const { return client_.collective_done(call); }

 private:
  std::uint64_t keep(const Result<std::uint64_t>& call, std::vector<Array> arrays);
  void let_go();

  Client& client_;
  std::unordered_map<std::uint64_t, std::vector<Array>> held_;  // by call
};

}  // namespace poseidon::bindings
