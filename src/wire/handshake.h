// Handshake: how the two ends of a new connection prove to each other that they know the same secret, before anything
// else is read (docs/wire-format.md, docs/decisions/0015-authentication.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/sha256.h"
#include "poseidon/status.h"

namespace poseidon::wire {

inline constexpr std::size_t kKeyIdBytes = 8;
inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kShortestSecretBytes = 16;

using KeyId = std::array<std::byte, kKeyIdBytes>;
using Nonce = std::array<std::byte, kNonceBytes>;

/// 32 bytes that nobody has seen before.
Nonce random_nonce();

/// What a secret becomes. Neither the secret nor `proof` and `tls` ever leave the process; they are wiped with it.
struct Key {
  Key() = default;
  Key(const Key&) = default;
  Key& operator=(const Key&) = default;
  ~Key();

  KeyId id{};        // says which secret, and nothing about it
  Digest proof{};    // the key of the proofs
  Digest tls{};      // what the keys of TLS sessions are made of
  std::string name;  // the id in hexadecimal; empty for the key of those who have no secret
};

/// The secrets that this process knows. Immutable, cheap to copy, thread-safe.
class Credentials {
 public:
  /// No secret: whoever has none either is let in.
  Credentials();

  /// One secret a line; the first is the one that connectors prove, acceptors know all. Empty: no secret.
  /// invalid_argument for a secret of fewer than kShortestSecretBytes.
  static Result<Credentials> from_text(std::string_view secrets);

  const Key& own() const { return keys_->front(); }
  /// Null when the secret is not known.
  const Key* find(const KeyId& id) const;
  bool has_secret() const { return !own().name.empty(); }

 private:
  explicit Credentials(std::vector<Key> keys) : keys_(std::make_shared<const std::vector<Key>>(std::move(keys))) {}
  std::shared_ptr<const std::vector<Key>> keys_;  // at least one
};

/// What the connection is for. A proof for one is none for the other.
enum class Purpose : std::uint8_t { flow = 1, store = 2 };

/// What an end of a connection wants to follow the handshake. Both have to want the same.
enum class Encryption : std::uint8_t { none = 0, tls = 1 };

inline constexpr std::size_t kHandshakePrefixBytes = 8;
inline constexpr std::size_t kOpeningBytes = kHandshakePrefixBytes + kKeyIdBytes + kNonceBytes;
inline constexpr std::size_t kChallengeBytes = kHandshakePrefixBytes + kNonceBytes + kDigestBytes;
inline constexpr std::size_t kAnswerBytes = kDigestBytes;
inline constexpr std::size_t kLongestHandshakeBytes = kChallengeBytes;  // of its messages

/// One end of one handshake: bytes in, bytes out. Of fixed size: a stranger makes nobody allocate. One thread.
/// Use: send what take_outgoing() gives, receive() no more than wanted_bytes(), again until it is no longer running.
class Handshake {
 public:
  enum class Role : std::uint8_t { connector, acceptor };
  enum class State : std::uint8_t {
    running,
    done,              // the peer knows the secret; what take_outgoing() still has must reach it
    foreign,           // what came is no handshake of this version and purpose
    unproven,          // the peer does not know the secret
    peer_uses_tls,     // it knows the secret, and wants TLS where this end does not
    peer_without_tls,  // the other way round
  };

  Handshake(Role role, Purpose purpose, Credentials credentials, const Nonce& nonce,
            Encryption encryption = Encryption::none);

  State state() const { return state_; }
  /// The most that receive() takes now: never a byte of what follows the handshake. 0 when it is over.
  std::size_t wanted_bytes() const { return state_ == State::running ? expected_bytes_ - in_bytes_ : 0; }
  void receive(std::span<const std::byte> bytes);
  /// What to send now, once; valid until the next receive().
  std::span<const std::byte> take_outgoing();
  /// Key::name of the secret that both have proved to know; empty before, and where there is none.
  const std::string& key_name() const;
  /// When done: the key of this connection's TLS session, which nobody knows who does not know the secret.
  Digest tls_key() const;

 private:
  void on_opening();
  void on_challenge();
  void on_answer();
  bool begins_like_ours(std::span<const std::byte> bytes) const;
  State agreed() const;
  void append(std::span<const std::byte> bytes);
  Digest proof_of(Role role) const;
  Digest hmac_of_exchange(const Digest& key, std::string_view label) const;

  using Prefix = std::array<std::byte, kHandshakePrefixBytes>;

  const Role role_;
  const Prefix prefix_;
  Prefix peer_prefix_{};
  const Credentials credentials_;
  const Nonce nonce_;
  State state_ = State::running;
  const Key* key_ = nullptr;  // null: the connector named one that is not known here
  KeyId key_id_{};
  Nonce peer_nonce_{};
  bool prefix_expected_ = true;
  std::size_t expected_bytes_;
  std::size_t in_bytes_ = 0;
  std::size_t out_bytes_ = 0;
  std::array<std::byte, kLongestHandshakeBytes> in_{};
  std::array<std::byte, kLongestHandshakeBytes> out_{};
};

/// What a connector says when the handshake with `who` has ended as foreign or with another encryption (mismatch), or
/// as unproven (refused).
Status handshake_error(Handshake::State state, const std::string& who);

}  // namespace poseidon::wire
