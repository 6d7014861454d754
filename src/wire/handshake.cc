#include "wire/handshake.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/hexadecimal.h"
#include "base/invariant.h"
#include "base/random_bytes.h"
#include "base/wipe.h"

namespace poseidon::wire {

namespace {

constexpr std::array<std::byte, 4> kHandshakeMagic{std::byte{'P'}, std::byte{'S'}, std::byte{'A'}, std::byte{'1'}};
constexpr std::byte kHandshakeVersion{1};
constexpr std::size_t kEncryptionAt = 6;  // its place in the prefix

/// Derives a separate key for each use of the secret, so that one of them tells nothing about the others.
Key key_of(std::string_view secret) {
  Key key;
  const Digest id = hmac_sha256(bytes_of(secret), {bytes_of("poseidon key id 1")});
  std::ranges::copy(std::span(id).first<kKeyIdBytes>(), key.id.begin());
  key.proof = hmac_sha256(bytes_of(secret), {bytes_of("poseidon proof 1")});
  key.tls = hmac_sha256(bytes_of(secret), {bytes_of("poseidon tls 1")});
  if (!secret.empty()) key.name = hexadecimal(key.id);
  return key;
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view space = " \t\r";
  const auto first = text.find_first_not_of(space);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(space) - first + 1);
}

std::array<std::byte, kHandshakePrefixBytes> prefix_of(Purpose purpose, Encryption encryption) {
  std::array<std::byte, kHandshakePrefixBytes> prefix{};
  std::ranges::copy(kHandshakeMagic, prefix.begin());
  prefix[4] = kHandshakeVersion;
  prefix[5] = static_cast<std::byte>(purpose);
  prefix[kEncryptionAt] = static_cast<std::byte>(encryption);
  return prefix;
}

}  // namespace

Key::~Key() {
  wipe(proof);
  wipe(tls);
}

Nonce random_nonce() {
  Nonce nonce;
  fill_with_random_bytes(nonce);
  return nonce;
}

Credentials::Credentials() : Credentials(std::vector{key_of("")}) {}

Result<Credentials> Credentials::from_text(std::string_view secrets) {
  std::vector<Key> keys;
  while (!secrets.empty()) {
    const auto end = std::min(secrets.find('\n'), secrets.size());
    const std::string_view secret = trimmed(secrets.substr(0, end));
    secrets.remove_prefix(std::min(end + 1, secrets.size()));
    if (secret.empty()) continue;
    if (secret.size() < kShortestSecretBytes)
      return Status(ErrorCode::invalid_argument,
                    concat("a secret of ", secret.size(), " bytes can be guessed: use at least ", kShortestSecretBytes,
                           ", at random"));
    keys.push_back(key_of(secret));
  }
  return keys.empty() ? Credentials() : Credentials(std::move(keys));
}

const Key* Credentials::find(const KeyId& id) const {
  const auto found = std::ranges::find(*keys_, id, &Key::id);
  return found == keys_->end() ? nullptr : &*found;
}

std::vector<std::string> Credentials::names() const {
  std::vector<std::string> names;
  if (has_secret()) std::ranges::transform(*keys_, std::back_inserter(names), &Key::name);
  return names;
}

Handshake::Handshake(Role role, Purpose purpose, Credentials credentials, const Nonce& nonce, Encryption encryption)
    : role_(role),
      prefix_(prefix_of(purpose, encryption)),
      credentials_(std::move(credentials)),
      nonce_(nonce),
      expected_bytes_(role == Role::connector ? kChallengeBytes : kOpeningBytes) {
  if (role == Role::acceptor) return;
  key_ = &credentials_.own();
  key_id_ = key_->id;
  append(prefix_);
  append(key_id_);
  append(nonce_);
}

void Handshake::receive(std::span<const std::byte> bytes) {
  one_thread_.check();
  if (state_ != State::running) return;
  if (bytes.size() > wanted_bytes()) {
    state_ = State::foreign;
    return;
  }
  std::ranges::copy(bytes, in_.begin() + static_cast<std::ptrdiff_t>(in_bytes_));
  in_bytes_ += bytes.size();
  // Check the first bytes of another protocol at once: it may never send as many bytes as a handshake has.
  if (prefix_expected_ && !begins_like_ours(std::span(in_).first(std::min(in_bytes_, prefix_.size())))) {
    state_ = State::foreign;
    return;
  }
  if (in_bytes_ < expected_bytes_) return;
  if (prefix_expected_) std::copy_n(in_.begin(), prefix_.size(), peer_prefix_.begin());
  if (role_ == Role::connector) return on_challenge();
  prefix_expected_ ? on_opening() : on_answer();
}

std::span<const std::byte> Handshake::take_outgoing() {
  one_thread_.check();
  return std::span(std::as_const(out_)).first(std::exchange(out_bytes_, 0));
}

const std::string& Handshake::key_name() const {
  one_thread_.check();
  static const std::string none;
  return state_ == State::done ? key_->name : none;
}

Digest Handshake::tls_key() const {
  one_thread_.check();
  invariant(state_ == State::done, "only a handshake that is done has a key for TLS");
  return hmac_of_exchange(key_->tls, "session");
}

/// Compares everything but the encryption, which each end states for itself.
bool Handshake::begins_like_ours(std::span<const std::byte> bytes) const {
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    if (at == kEncryptionAt ? bytes[at] > std::byte{1} : bytes[at] != prefix_[at]) return false;
  }
  return true;
}

void Handshake::on_opening() {
  const auto opening = std::span(std::as_const(in_)).subspan(kHandshakePrefixBytes);
  std::ranges::copy(opening.first(kKeyIdBytes), key_id_.begin());
  std::ranges::copy(opening.subspan(kKeyIdBytes, kNonceBytes), peer_nonce_.begin());
  key_ = credentials_.find(key_id_);
  append(prefix_);
  append(nonce_);
  // A peer that does not know our secret learns so from an invalid proof, and learns nothing else. If the connection
  // only ended, it would look like a process that is just ending, and the peer would try again.
  append(key_ != nullptr ? proof_of(Role::acceptor) : random_nonce());
  prefix_expected_ = false;
  expected_bytes_ = kAnswerBytes;
  in_bytes_ = 0;
}

void Handshake::on_challenge() {
  const auto challenge = std::span(std::as_const(in_)).subspan(kHandshakePrefixBytes);
  std::ranges::copy(challenge.first(kNonceBytes), peer_nonce_.begin());
  // While this end's opening has not been sent yet, the peer cannot have answered it.
  const bool proven =
      out_bytes_ == 0 && equal_in_constant_time(challenge.subspan(kNonceBytes, kDigestBytes), proof_of(Role::acceptor));
  state_ = proven ? agreed() : State::unproven;
  if (proven) append(proof_of(Role::connector));
}

void Handshake::on_answer() {
  const bool proven = key_ != nullptr && out_bytes_ == 0 &&
                      equal_in_constant_time(std::span(in_).first(kAnswerBytes), proof_of(Role::connector));
  state_ = proven ? agreed() : State::unproven;
}

/// Returns the final state for a peer that knows the secret.
Handshake::State Handshake::agreed() const {
  if (peer_prefix_ == prefix_) return State::done;
  return peer_prefix_[kEncryptionAt] == static_cast<std::byte>(Encryption::tls) ? State::peer_uses_tls
                                                                                : State::peer_without_tls;
}

void Handshake::append(std::span<const std::byte> bytes) {
  invariant(bytes.size() <= out_.size() - out_bytes_, "what a handshake sends at once fits its longest message");
  std::ranges::copy(bytes, out_.begin() + static_cast<std::ptrdiff_t>(out_bytes_));
  out_bytes_ += bytes.size();
}

/// Returns the proof of the end in `role`. The labels of the two ends differ, so neither proof can be sent back as the
/// other's.
Digest Handshake::proof_of(Role role) const {
  invariant(key_ != nullptr, "only who knows the secret proves it");
  return hmac_of_exchange(key_->proof, role == Role::connector ? "connector" : "acceptor");
}

/// Returns the HMAC over everything that both ends have said before the proofs. So nobody can make an end believe that
/// something else was said.
Digest Handshake::hmac_of_exchange(const Digest& key, std::string_view label) const {
  const bool connector = role_ == Role::connector;
  return hmac_sha256(key,
                     {bytes_of(label), connector ? prefix_ : peer_prefix_, key_id_, connector ? nonce_ : peer_nonce_,
                      connector ? peer_prefix_ : prefix_, connector ? peer_nonce_ : nonce_});
}

Status handshake_error(Handshake::State state, const std::string& who) {
  if (state == Handshake::State::foreign)
    return {ErrorCode::mismatch, who +
                                     " is no Poseidon process of this version; check the address, and install the "
                                     "same version everywhere"};
  if (state == Handshake::State::peer_uses_tls || state == Handshake::State::peer_without_tls) {
    const bool peer = state == Handshake::State::peer_uses_tls;
    return {ErrorCode::mismatch, who + " has tls=" + (peer ? "on" : "off") +
                                     ", this process tls=" + (peer ? "off" : "on") +
                                     "; give all processes of the job, and its servers, the same tls (POSEIDON_TLS)"};
  }
  return {ErrorCode::refused, who +
                                  " did not prove that it knows the job's secret; give all processes the same "
                                  "POSEIDON_SECRET or secret_file"};
}

}  // namespace poseidon::wire
