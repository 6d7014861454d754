// Handshake: how the two ends of a new connection prove to each other that they know the same secret. Nothing else is
// read before (docs/wire-format.md, docs/decisions/0015-authentication.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/one_thread.h"
#include "base/sha256.h"
#include "poseidon/status.h"

namespace poseidon::wire {

inline constexpr std::size_t kKeyIdBytes = 8;
inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kShortestSecretBytes = 16;

using KeyId = std::array<std::byte, kKeyIdBytes>;
using Nonce = std::array<std::byte, kNonceBytes>;

/// Returns 32 random bytes, which nobody has seen before.
Nonce random_nonce();

/// What is derived from a secret. The secret, `proof` and `tls` never leave the process. They are wiped when the key is
/// destroyed.
struct Key {
  Key() = default;
  Key(const Key&) = default;
  Key& operator=(const Key&) = default;
  ~Key();

  KeyId id{};        // identifies the secret and tells nothing else about it
  Digest proof{};    // the key of the proofs
  Digest tls{};      // the keys of TLS sessions are derived from it
  std::string name;  // the id in hexadecimal; empty for the key that stands for no secret
};

/// The secrets that this process knows. Immutable, cheap to copy, and thread-safe.
class Credentials {
 public:
  /// Creates credentials without a secret. They accept only peers that have no secret either.
  Credentials();

  /// `secrets` has one secret a line. Connectors prove the first one; acceptors know all of them. Empty text means no
  /// secret. ErrorCode::invalid_argument: a secret has fewer than kShortestSecretBytes.
  static Result<Credentials> from_text(std::string_view secrets);

  const Key& own() const { return keys_->front(); }
  /// Returns null if the secret is not known.
  const Key* find(const KeyId& id) const;
  /// Returns the names of the keys, in the order of the secrets. Empty if there is no secret.
  std::vector<std::string> names() const;
  bool has_secret() const { return !own().name.empty(); }

 private:
  explicit Credentials(std::vector<Key> keys) : keys_(std::make_shared<const std::vector<Key>>(std::move(keys))) {}
  std::shared_ptr<const std::vector<Key>> keys_;  // at least one
};

/// The purpose of the connection. A proof for one purpose is invalid for the other.
enum class Purpose : std::uint8_t { flow = 1, store = 2 };

/// What an end of a connection wants after the handshake. Both ends must want the same.
enum class Encryption : std::uint8_t { none = 0, tls = 1 };

inline constexpr std::size_t kHandshakePrefixBytes = 8;
inline constexpr std::size_t kOpeningBytes = kHandshakePrefixBytes + kKeyIdBytes + kNonceBytes;
inline constexpr std::size_t kChallengeBytes = kHandshakePrefixBytes + kNonceBytes + kDigestBytes;
inline constexpr std::size_t kAnswerBytes = kDigestBytes;
inline constexpr std::size_t kLongestHandshakeBytes = kChallengeBytes;  // the longest of its messages

/// One end of one handshake. It takes bytes and gives bytes. It has a fixed size, so a pending connection cannot make
/// this process allocate memory. Only one thread uses it. To use it, send what take_outgoing() returns, receive() no
/// more than wanted_bytes(), and repeat until the state is no longer running.
class Handshake {
 public:
  enum class Role : std::uint8_t { connector, acceptor };
  enum class State : std::uint8_t {
    running,
    done,              // the peer knows the secret; what take_outgoing() still returns must reach it
    foreign,           // what came is no handshake of this version and purpose
    unproven,          // the peer does not know the secret
    peer_uses_tls,     // the peer knows the secret, but wants TLS, which this end does not use
    peer_without_tls,  // the peer knows the secret, but does not use TLS, which this end wants
  };

  Handshake(Role role, Purpose purpose, Credentials credentials, const Nonce& nonce,
            Encryption encryption = Encryption::none);

  State state() const { return one_thread_.checked(state_); }
  /// Returns the most bytes that receive() takes now. They never include a byte of what follows the handshake. Returns
  /// 0 when the handshake is over.
  std::size_t wanted_bytes() const {
    return one_thread_.checked(state_) == State::running ? expected_bytes_ - in_bytes_ : 0;
  }
  void receive(std::span<const std::byte> bytes);
  /// Returns what to send now. Each part is returned once and is valid until the next receive().
  std::span<const std::byte> take_outgoing();
  /// Returns the Key::name of the secret that both ends have proved to know. It is empty before that, and if there is
  /// no secret.
  const std::string& key_name() const;
  /// Whether the connector has named a secret that is not known here. Its proof can only be invalid, if it comes.
  bool names_other_secret() const {
    return one_thread_.checked(role_) == Role::acceptor && !prefix_expected_ && key_ == nullptr;
  }
  /// Returns the key of this connection's TLS session, once the handshake is done. Nobody can compute it without the
  /// secret.
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
  const Key* key_ = nullptr;  // null: the connector named a secret that is not known here
  KeyId key_id_{};
  Nonce peer_nonce_{};
  bool prefix_expected_ = true;
  std::size_t expected_bytes_;
  std::size_t in_bytes_ = 0;
  std::size_t out_bytes_ = 0;
  std::array<std::byte, kLongestHandshakeBytes> in_{};
  std::array<std::byte, kLongestHandshakeBytes> out_{};
  [[no_unique_address]] OneThread one_thread_{"Handshake"};
};

/// Returns the error for a connector whose handshake with `who` has failed: mismatch if it ended as foreign or with
/// another encryption, refused if it ended as unproven.
Status handshake_error(Handshake::State state, const std::string& who);

}  // namespace poseidon::wire
