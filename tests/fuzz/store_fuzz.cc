// Any byte stream to the rendezvous store's request parser: what it takes comes out again as it went in, no request is
// larger than it may be, and the answer does not depend on how much of the stream is there.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "rendezvous/store_protocol.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace poseidon;
  using namespace store_protocol;
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  for (;;) {
    const auto parsed = parse_request(rest);
    if (!parsed.ok()) {
      if (parsed.status().code() != ErrorCode::mismatch || rest.empty()) std::abort();
      return 0;
    }
    if (!parsed.value()) return 0;
    const Request& request = *parsed.value();
    if (request.op != kSet && request.op != kGet) std::abort();
    if (request.key.size() > kMaxKeyBytes || request.value.size() > kMaxValueBytes) std::abort();
    if (request.size_bytes() > rest.size() || to_text(request) != rest.substr(0, request.size_bytes())) std::abort();
    for (const std::size_t shorter : {std::size_t{0}, kRequestHeaderBytes - 1, request.size_bytes() - 1}) {
      const auto part = parse_request(rest.substr(0, shorter));
      if (!part.ok() || part.value()) std::abort();
    }
    rest.remove_prefix(request.size_bytes());
  }
}
