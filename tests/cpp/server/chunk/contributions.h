// What workers send to a shard, for the server's tests, and a worker that records the answers.
#pragma once

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "server/chunk/requester.h"
#include "wire/messages/contribution.h"
#include "wire/messages/stored.h"

namespace poseidon::testing {

using Bytes = std::vector<std::byte>;
using Floats = std::vector<float>;

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

template <typename T = float>
std::vector<T> values_of(std::span<const std::byte> bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

inline wire::Contribution push_of(std::uint32_t rank, std::uint32_t worker_count, std::uint64_t step = 1) {
  wire::Contribution push;
  push.rank = rank;
  push.worker_count = worker_count;
  push.step = step;
  push.factor_count = wire::kUnboundedFactors;
  return push;
}

/// Returns a message of this kind whose body has only defaults.
inline wire::Header header_of(wire::Kind kind, std::uint32_t rank, std::uint32_t worker_count, std::uint64_t step = 1) {
  const wire::Contribution push = push_of(rank, worker_count, step);
  if (kind == wire::Kind::push) return push.make();
  if (kind == wire::Kind::assign) return wire::Assign{}.make(push);
  wire::Header header{push, {}};
  header.kind = kind;
  return header;
}

/// Returns a push to a chunk whose value the server keeps.
inline wire::Contribution stored_push_of(std::uint32_t rank, std::uint32_t worker_count, std::uint64_t step = 1) {
  wire::Contribution push = push_of(rank, worker_count, step);
  push.stored = true;
  return push;
}

inline wire::Contribution absent_of(wire::Contribution push) {
  push.absent = true;
  push.factor_count = 0;
  return push;
}

/// Returns a message with K rows of lefts and K rows of rights.
inline wire::Contribution factors_of(wire::Contribution push, std::uint32_t rows, std::uint32_t cols,
                                     std::uint32_t count) {
  push.kind = wire::Kind::factors;
  push.rows = rows;
  push.cols = cols;
  push.factor_count = count;
  push.payload_bytes = *push.factor_bytes();
  return push;
}

/// Returns the dense gradient of a matrix as a message of kind factors.
inline wire::Contribution dense_factors_of(wire::Contribution push, std::uint32_t rows, std::uint32_t cols) {
  push.kind = wire::Kind::factors;
  push.dense = true;
  push.rows = rows;
  push.cols = cols;
  push.payload_bytes = *push.matrix_bytes();
  return push;
}

template <typename Message>
Message with_size(Message message, std::size_t size_bytes) {
  message.payload_bytes = size_bytes;
  return message;
}

/// Records what it was sent. It copies payloads, and keeps them alive if `keep` is set.
class RecordingRequester final : public Requester {
 public:
  struct Sent {
    wire::Header header;
    Bytes payload;
    bool has_payload = false;
    std::shared_ptr<const Buffer> kept;
  };

  void send(const wire::Header& header, std::shared_ptr<const Buffer> payload) override {
    Sent& one = sent.emplace_back();
    one.header = header;
    one.has_payload = payload != nullptr;
    if (payload) one.payload.assign(payload->span().begin(), payload->span().end());
    if (keep) one.kept = std::move(payload);
  }
  void refuse(const wire::Envelope& about, const Status& status) override {
    refusals.push_back(status);
    refused.push_back(about);
  }

  bool codes(std::size_t /*payload_bytes*/) const override { return coding; }

  bool keep = false;
  bool coding = false;  // says that payloads travel coded
  std::vector<Sent> sent;
  std::vector<Status> refusals;
  std::vector<wire::Envelope> refused;
};

}  // namespace poseidon::testing
