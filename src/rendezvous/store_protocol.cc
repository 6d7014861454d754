#include "rendezvous/store_protocol.h"

namespace poseidon::store_protocol {

std::string to_text(const Request& request) {
  std::string text(1, request.op);
  append_u32(text, request.key.size());
  append_u32(text, request.value.size());
  text += request.key;
  text += request.value;
  return text;
}

Result<std::optional<Request>> parse_request(std::string_view in) {
  const std::optional<Request> not_yet;
  if (!in.empty() && in.front() != kSet && in.front() != kGet)
    return Status(ErrorCode::mismatch, "a request to the rendezvous store is of an unknown kind");
  if (in.size() < kRequestHeaderBytes) return not_yet;
  const std::size_t key_bytes = read_u32(in.data() + 1);
  const std::size_t value_bytes = read_u32(in.data() + 1 + sizeof(std::uint32_t));
  if (key_bytes > kMaxKeyBytes || value_bytes > kMaxValueBytes)
    return Status(ErrorCode::mismatch, "a request to the rendezvous store is over its limits");
  const std::string_view rest = in.substr(kRequestHeaderBytes);
  if (rest.size() < key_bytes + value_bytes) return not_yet;
  return std::optional(Request{in.front(), rest.substr(0, key_bytes), rest.substr(key_bytes, value_bytes)});
}

}  // namespace poseidon::store_protocol
