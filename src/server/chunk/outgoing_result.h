// OutgoingResult: a chunk's result on its way to the workers. It is coded once for all who get it coded.
#pragma once

#include <cstddef>
#include <memory>

#include "base/buffer.h"
#include "base/buffer_pool.h"
#include "server/chunk/requester.h"
#include "transport/coding_choice.h"
#include "wire/header.h"

namespace poseidon {

/// Used by one thread.
class OutgoingResult {
 public:
  /// `values` do not change any more. `receiver_count` workers get them over connections that
  /// code. `choice` is that of their loop, or null.
  OutgoingResult(std::shared_ptr<const Buffer> values, std::size_t receiver_count, BufferPool& pool,
                 CodingChoice* choice)
      : values_(std::move(values)), receiver_count_(receiver_count), pool_(pool), choice_(choice) {}

  /// Sends it with this header, which has the worker's rank.
  void send(Requester& to, wire::Header header);

 private:
  void code(Coding coding);

  const std::shared_ptr<const Buffer> values_;
  const std::size_t receiver_count_;
  BufferPool& pool_;
  CodingChoice* const choice_;
  bool tried_ = false;
  std::shared_ptr<const Buffer> coded_;  // null: not tried, or not worth it
};

}  // namespace poseidon
