// Any byte stream, cut anywhere, through what TcpFlow reads with: the receiver sees only whole
// messages whose sizes fit, and nothing is written outside the memory that it gave.
//
// The first byte of the input decides how the rest is cut into reads.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "transport/tcp/message_reader.h"

namespace {

using namespace poseidon;

constexpr std::uint64_t kLargestPayloadBytes = 1u << 20;

/// The receiver only wants a flow's name.
class NamedFlow final : public Flow {
 public:
  void set_receiver(Receiver*) override {}
  void send(wire::Header, std::vector<std::span<const std::byte>>, std::function<void(const Status&)>) override {}
  void resume() override {}
  void close(std::chrono::milliseconds) override {}
  const std::string& peer_name() const override { return name_; }

 private:
  const std::string name_ = "fuzzer";
};

class CheckingReceiver final : public Receiver {
 public:
  Result<std::span<std::byte>> accept(Flow&, const wire::Header& header, bool /*lent*/) override {
    if (accepted_ || header.payload_bytes > wire::kMaxPayloadBytes) std::abort();
    accepted_ = true;
    if (header.payload_bytes > kLargestPayloadBytes) return Status(ErrorCode::refused, "too large");
    place_ = Buffer(static_cast<std::size_t>(header.payload_bytes));
    return place_.span();
  }
  Status on_message(Flow&, const wire::Header& header, std::span<const std::byte> payload,
                    std::function<void()> release) override {
    if (!std::exchange(accepted_, false) || payload.size() != header.payload_bytes || release) std::abort();
    if (!payload.empty() && payload.data() != place_.data()) std::abort();
    return {};
  }
  void on_closed(Flow&, const Status&) override { std::abort(); }

 private:
  Buffer place_;
  bool accepted_ = false;  // the message that comes next
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::size_t read_bytes = std::size_t{1} + data[0] * std::size_t{17};
  ++data;
  --size;
  NamedFlow flow;
  CheckingReceiver receiver;
  CodingChoice choice;
  tcp::MessageReader reader(choice);
  while (size > 0) {
    std::array<iovec, 2> places;
    const std::size_t used = reader.destinations(std::min(size, read_bytes), places);
    std::size_t got = 0;
    for (std::size_t i = 0; i < used; ++i) {
      std::memcpy(places[i].iov_base, data + got, places[i].iov_len);
      got += places[i].iov_len;
    }
    if (got == 0 || got > std::min(size, read_bytes)) std::abort();
    data += got;
    size -= got;
    if (!reader.consume(got, flow, receiver).ok()) return 0;
  }
  return 0;
}
