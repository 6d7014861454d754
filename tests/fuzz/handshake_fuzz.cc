// Any byte stream, cut anywhere, into either end of a handshake: it never takes more than it wants, says no more than
// its messages, and believes only a proof that another computation confirms.
//
// The first byte of the input decides which end it is, the second one how the rest is cut.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "base/sha256.h"
#include "wire/handshake.h"

namespace {

using namespace poseidon;
using wire::Handshake;
using Bytes = std::vector<std::byte>;

constexpr std::string_view kSecret = "the fuzzer's secret";

void append(Bytes& to, std::span<const std::byte> bytes) { to.insert(to.end(), bytes.begin(), bytes.end()); }

/// What the peer in a handshake that ended well has proved with, from all that came and all that was said.
Digest expected_proof(bool connector, const Bytes& in, const Bytes& out) {
  const auto opening = std::span(connector ? out : in);
  const auto challenge = std::span(connector ? in : out);
  const Digest key = hmac_sha256(bytes_of(kSecret), {bytes_of("poseidon proof 1")});
  return hmac_sha256(key, {bytes_of(connector ? "acceptor" : "connector"), opening.first(wire::kOpeningBytes),
                           challenge.first(wire::kHandshakePrefixBytes + wire::kNonceBytes)});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const bool connector = data[0] % 2 == 0;
  const std::size_t piece_bytes = std::size_t{1} + data[1] % 80;
  auto rest = std::as_bytes(std::span(data, size)).subspan(2);
  static const wire::Credentials credentials = wire::Credentials::from_text(kSecret).value();
  wire::Nonce nonce;
  nonce.fill(std::byte{0x42});
  Handshake handshake(connector ? Handshake::Role::connector : Handshake::Role::acceptor, wire::Purpose::flow,
                      credentials, nonce);
  Bytes in;
  Bytes out;
  append(out, handshake.take_outgoing());
  while (!rest.empty() && handshake.wanted_bytes() > 0) {
    if (handshake.wanted_bytes() > wire::kLongestHandshakeBytes) std::abort();
    const auto piece = rest.first(std::min({rest.size(), piece_bytes, handshake.wanted_bytes()}));
    rest = rest.subspan(piece.size());
    handshake.receive(piece);
    append(in, piece);
    append(out, handshake.take_outgoing());
  }
  const bool done = handshake.state() == Handshake::State::done;
  if ((handshake.state() == Handshake::State::running) != (handshake.wanted_bytes() > 0)) std::abort();
  if (done == handshake.key_name().empty()) std::abort();
  if (done && !std::ranges::equal(std::span(in).last<kDigestBytes>(), expected_proof(connector, in, out))) std::abort();
  if (in.size() > wire::kOpeningBytes + wire::kAnswerBytes || out.size() > wire::kOpeningBytes + wire::kAnswerBytes)
    std::abort();
  return 0;
}
