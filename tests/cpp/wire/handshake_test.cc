// The handshake without sockets: which peers are accepted, and all failures to prove the secret.
#include "wire/handshake.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

namespace poseidon::wire {
namespace {

using Bytes = std::vector<std::byte>;
using Role = Handshake::Role;
using State = Handshake::State;

constexpr const char* kSecret = "a secret of some length";
constexpr const char* kOther = "another secret, as long";

Credentials knowing(const std::string& secrets) {
  auto credentials = Credentials::from_text(secrets);
  EXPECT_TRUE(credentials.ok()) << credentials.status().message();
  return credentials.value();
}

Nonce nonce_of(std::uint8_t value) {
  Nonce nonce;
  nonce.fill(std::byte{value});
  return nonce;
}

Handshake connector(const std::string& secret, Purpose purpose = Purpose::flow,
                    Encryption encryption = Encryption::none) {
  return {Role::connector, purpose, knowing(secret), nonce_of(0x11), encryption};
}
Handshake acceptor(const std::string& secrets, Purpose purpose = Purpose::flow,
                   Encryption encryption = Encryption::none) {
  return {Role::acceptor, purpose, knowing(secrets), nonce_of(0x22), encryption};
}

Bytes outgoing(Handshake& from) {
  const auto bytes = from.take_outgoing();
  return {bytes.begin(), bytes.end()};
}

/// Passes the bytes of each end to the other until neither sends more.
void talk(Handshake& one, Handshake& other) {
  for (int i = 0; i < 4; ++i) {
    other.receive(outgoing(one));
    one.receive(outgoing(other));
  }
}

TEST(Handshake, LetsInWhoKnowsTheSecret) {
  for (const auto& [ours, theirs] : std::vector<std::pair<std::string, std::string>>{
           {kSecret, kSecret}, {"", ""}, {kSecret, std::string(kOther) + "\n" + kSecret + "\n"}}) {
    Handshake one = connector(ours);
    Handshake other = acceptor(theirs);
    talk(one, other);
    EXPECT_EQ(one.state(), State::done);
    EXPECT_EQ(other.state(), State::done);
    EXPECT_EQ(one.key_name(), other.key_name());
    EXPECT_EQ(one.key_name().empty(), ours.empty());
    EXPECT_EQ(one.wanted_bytes(), 0u);
    EXPECT_EQ(other.wanted_bytes(), 0u);
  }
}

TEST(Handshake, SaysWhatTheWireFormatSays) {
  // Computed with another implementation of HMAC, as docs/wire-format.md says.
  const Bytes id{std::byte{0x04}, std::byte{0xbf}, std::byte{0xe5}, std::byte{0x8a},
                 std::byte{0x5d}, std::byte{0x2e}, std::byte{0x52}, std::byte{0xc8}};
  constexpr std::array<std::uint8_t, 4> kAcceptorBegins{0x6d, 0xbe, 0x5b, 0x78};
  constexpr std::array<std::uint8_t, 4> kConnectorBegins{0x17, 0xde, 0x53, 0x76};
  const auto begins = [](std::span<const std::byte> bytes, const std::array<std::uint8_t, 4>& expected) {
    return std::ranges::equal(bytes.first(4), expected,
                              [](std::byte a, std::uint8_t b) { return std::to_integer<std::uint8_t>(a) == b; });
  };
  Handshake one = connector(kSecret);
  Handshake other = acceptor(kSecret);
  const Bytes opening = outgoing(one);
  ASSERT_EQ(opening.size(), kOpeningBytes);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(opening.data()), 8), std::string("PSA1\1\1\0\0", 8));
  EXPECT_TRUE(std::equal(id.begin(), id.end(), opening.begin() + 8));
  other.receive(opening);
  const Bytes challenge = outgoing(other);
  ASSERT_EQ(challenge.size(), kChallengeBytes);
  EXPECT_TRUE(begins(std::span(challenge).subspan(40), kAcceptorBegins));
  one.receive(challenge);
  const Bytes answer = outgoing(one);
  ASSERT_EQ(answer.size(), kAnswerBytes);
  EXPECT_TRUE(begins(answer, kConnectorBegins));
  EXPECT_EQ(one.key_name(), "04bfe58a5d2e52c8");
}

TEST(Handshake, WorksByteByByteAndWantsNoneOfWhatFollows) {
  Handshake one = connector(kSecret);
  Handshake other = acceptor(kSecret);
  const auto drip = [](Handshake& from, Handshake& to) {
    for (const std::byte byte : outgoing(from)) {
      ASSERT_GE(to.wanted_bytes(), 1u);
      to.receive(std::span(&byte, 1));
    }
  };
  EXPECT_EQ(other.wanted_bytes(), kOpeningBytes);
  drip(one, other);
  EXPECT_EQ(other.wanted_bytes(), kAnswerBytes);
  EXPECT_EQ(one.wanted_bytes(), kChallengeBytes);
  drip(other, one);
  drip(one, other);
  EXPECT_EQ(one.state(), State::done);
  EXPECT_EQ(other.state(), State::done);
}

TEST(Handshake, NeitherEndTakesAnotherSecret) {
  for (const auto& [ours, theirs] :
       std::vector<std::pair<std::string, std::string>>{{kSecret, kOther}, {"", kSecret}, {kSecret, ""}}) {
    Handshake one = connector(ours);
    Handshake other = acceptor(theirs);
    other.receive(outgoing(one));
    one.receive(outgoing(other));
    EXPECT_EQ(one.state(), State::unproven) << "it learns so at once";
    EXPECT_TRUE(outgoing(one).empty()) << "and gives nothing away";
    EXPECT_EQ(other.state(), State::running);
    other.receive(Bytes(kAnswerBytes));
    EXPECT_EQ(other.state(), State::unproven);
    EXPECT_EQ(other.key_name(), "");
  }
}

TEST(Handshake, TheAcceptorGivesNoProofToWhomItDoesNotKnow) {
  Handshake known = acceptor(kSecret);
  Handshake unknown = acceptor(kOther);
  Handshake one = connector(kSecret);
  const Bytes opening = outgoing(one);
  known.receive(opening);
  unknown.receive(opening);
  const Bytes proof = outgoing(known);
  const Bytes none = outgoing(unknown);
  EXPECT_EQ(proof.size(), none.size()) << "from outside the two look alike";
  EXPECT_NE(proof, none);
}

TEST(Handshake, AnUnauthenticatedConnectionGetsAProofThatDependsOnNoSecret) {
  const Nonce nonce = random_nonce();
  Handshake one = connector(kSecret);
  const Bytes opening = outgoing(one);
  std::set<Bytes> answers;
  for (int i = 0; i < 3; ++i) {
    Handshake unknown(Role::acceptor, Purpose::flow, Credentials::from_text(kOther).value(), nonce);
    unknown.receive(opening);
    answers.insert(outgoing(unknown));
  }
  EXPECT_EQ(answers.size(), 3u) << "another one each time that all else is the same";
}

/// Runs a handshake in which `change` changes the bytes on their way.
template <typename Change>
void expect_failure(Change change, int message) {
  Handshake one = connector(kSecret);
  Handshake other = acceptor(kSecret);
  for (int i = 0; i < 3; ++i) {
    Handshake& from = i % 2 == 0 ? one : other;
    Handshake& to = i % 2 == 0 ? other : one;
    Bytes bytes = outgoing(from);
    if (i == message) change(bytes);
    to.receive(bytes);
  }
  EXPECT_FALSE(one.state() == State::done && other.state() == State::done);
  // The end that received changed bytes does not accept the other one.
  if (message == 1) EXPECT_NE(one.state(), State::done);
  if (message == 2) EXPECT_NE(other.state(), State::done);
}

TEST(Handshake, AFlippedBitAnywhereEndsIt) {
  constexpr std::array<std::size_t, 3> kSizes{kOpeningBytes, kChallengeBytes, kAnswerBytes};
  for (int message = 0; message < 3; ++message)
    for (std::size_t at = 0; at < kSizes[static_cast<std::size_t>(message)]; ++at)
      for (const std::byte bit : {std::byte{1}, std::byte{0x80}})
        expect_failure([&](Bytes& bytes) { bytes.at(at) ^= bit; }, message);
}

TEST(Handshake, ATruncatedMessageIsWaitedFor) {
  Handshake one = connector(kSecret);
  const Bytes opening = outgoing(one);
  for (std::size_t count = 0; count < opening.size(); ++count) {
    Handshake other = acceptor(kSecret);
    other.receive(std::span(opening).first(count));
    EXPECT_EQ(other.state(), State::running);
    EXPECT_EQ(other.wanted_bytes(), kOpeningBytes - count);
    EXPECT_TRUE(outgoing(other).empty()) << "nothing is said before the opening is whole";
  }
}

TEST(Handshake, MoreThanItWantsEndsIt) {
  Handshake one = connector(kSecret);
  Handshake other = acceptor(kSecret);
  Bytes opening = outgoing(one);
  opening.push_back(std::byte{0});
  other.receive(opening);
  EXPECT_EQ(other.state(), State::foreign);
}

TEST(Handshake, AnotherProtocolShowsInItsFirstBytes) {
  for (const std::string& text : {std::string("G"), std::string("PSD1"), std::string("PSA1\2"), std::string("PSA1\1\3"),
                                  std::string("PSA1\1\1\2"), std::string("PSA1\1\1\0\1", 8)}) {
    Handshake other = acceptor("");
    other.receive(bytes_of(text));
    EXPECT_EQ(other.state(), State::foreign) << text;
    EXPECT_EQ(other.wanted_bytes(), 0u);
    other.receive(Bytes(10));  // nothing brings it back
    EXPECT_EQ(other.state(), State::foreign);
    EXPECT_TRUE(outgoing(other).empty());
  }
}

TEST(Handshake, AProofForOnePurposeIsNoneForAnother) {
  Handshake one = connector(kSecret, Purpose::store);
  Handshake other = acceptor(kSecret, Purpose::flow);
  talk(one, other);
  EXPECT_EQ(other.state(), State::foreign);
  EXPECT_EQ(one.state(), State::running);
}

TEST(Handshake, BothEndsMakeTheSameTlsKeyOfItAndNoOtherExchangeDoes) {
  Handshake one = connector(kSecret, Purpose::flow, Encryption::tls);
  Handshake other = acceptor(kSecret, Purpose::flow, Encryption::tls);
  talk(one, other);
  ASSERT_EQ(one.state(), State::done);
  ASSERT_EQ(other.state(), State::done);
  EXPECT_EQ(one.tls_key(), other.tls_key());
  // Computed with another implementation of HMAC, as docs/wire-format.md says.
  const Digest key = one.tls_key();
  EXPECT_EQ(std::vector(key.begin(), key.begin() + 4),
            (Bytes{std::byte{0x2b}, std::byte{0x33}, std::byte{0xe8}, std::byte{0xf6}}));
  Handshake late(Role::acceptor, Purpose::flow, knowing(kSecret), random_nonce(), Encryption::tls);
  Handshake again = connector(kSecret, Purpose::flow, Encryption::tls);
  talk(again, late);
  EXPECT_NE(again.tls_key(), key);
}

TEST(Handshake, EndsThatWantAnotherEncryptionBothLearnSo) {
  for (const Encryption ours : {Encryption::none, Encryption::tls}) {
    const bool plain = ours == Encryption::none;
    Handshake one = connector(kSecret, Purpose::flow, ours);
    Handshake other = acceptor(kSecret, Purpose::flow, plain ? Encryption::tls : Encryption::none);
    talk(one, other);
    EXPECT_EQ(one.state(), plain ? State::peer_uses_tls : State::peer_without_tls);
    EXPECT_EQ(other.state(), plain ? State::peer_without_tls : State::peer_uses_tls);
    EXPECT_EQ(one.key_name(), "");
    EXPECT_EQ(other.wanted_bytes(), 0u);
  }
}

TEST(Handshake, WhoChangesTheEncryptionOnTheWayIsNotBelieved) {
  constexpr std::size_t kEncryptionAt = 6;
  // Each end is told that the other one has the same setting as itself.
  Handshake one = connector(kSecret, Purpose::flow, Encryption::tls);
  Handshake other = acceptor(kSecret);
  Bytes opening = outgoing(one);
  opening[kEncryptionAt] = std::byte{0};
  other.receive(opening);
  Bytes challenge = outgoing(other);
  challenge[kEncryptionAt] = std::byte{1};
  one.receive(challenge);
  EXPECT_EQ(one.state(), State::unproven);
  EXPECT_TRUE(outgoing(one).empty());
}

TEST(Handshake, AReflectionProvesNothing) {
  // A connector that receives its own opening, and a connector that receives a connector's proof.
  Handshake one = connector(kSecret);
  Bytes mirrored = outgoing(one);
  mirrored.resize(kChallengeBytes);
  one.receive(mirrored);
  EXPECT_EQ(one.state(), State::unproven);

  // An acceptor that receives its own challenge as the answer.
  Handshake other = acceptor(kSecret);
  Handshake honest = connector(kSecret);
  other.receive(outgoing(honest));
  const Bytes challenge = outgoing(other);
  other.receive(std::span(challenge).last(kDigestBytes));
  EXPECT_EQ(other.state(), State::unproven);
}

TEST(Handshake, ARecordedExchangeOpensNothingAgain) {
  Handshake one = connector(kSecret);
  Handshake other = acceptor(kSecret);
  const Bytes opening = outgoing(one);
  other.receive(opening);
  const Bytes challenge = outgoing(other);
  one.receive(challenge);
  const Bytes answer = outgoing(one);
  other.receive(answer);
  ASSERT_EQ(other.state(), State::done);

  Handshake second(Role::acceptor, Purpose::flow, knowing(kSecret), random_nonce());
  second.receive(opening);
  outgoing(second);
  second.receive(answer);
  EXPECT_EQ(second.state(), State::unproven);

  Handshake fresh(Role::connector, Purpose::flow, knowing(kSecret), random_nonce());
  outgoing(fresh);
  fresh.receive(challenge);
  EXPECT_EQ(fresh.state(), State::unproven);
}

TEST(Handshake, AChallengeThatComesBeforeTheOpeningHasLeftProvesNothing) {
  Handshake one = connector(kSecret);
  Handshake unsent = connector(kSecret);
  Handshake other = acceptor(kSecret);
  other.receive(outgoing(one));
  unsent.receive(outgoing(other));
  EXPECT_EQ(unsent.state(), State::unproven);
}

TEST(Credentials, ReadOneSecretALine) {
  const Credentials many = knowing(std::string("\n  ") + kSecret + " \r\n\n" + kOther);
  EXPECT_EQ(many.own().name, knowing(kSecret).own().name);
  EXPECT_NE(many.find(knowing(kOther).own().id), nullptr);
  EXPECT_EQ(many.find(Credentials().own().id), nullptr);
  EXPECT_TRUE(many.has_secret());
  EXPECT_FALSE(Credentials().has_secret());
  EXPECT_FALSE(knowing(" \n\n").has_secret());
  EXPECT_EQ(many.own().name.size(), 2 * kKeyIdBytes);
}

TEST(Credentials, RefuseASecretThatCanBeGuessed) {
  const auto credentials = Credentials::from_text(std::string(kSecret) + "\nfifteen bytes..");
  ASSERT_FALSE(credentials.ok());
  EXPECT_EQ(credentials.status().code(), ErrorCode::invalid_argument);
  EXPECT_NE(credentials.status().message().find("at least 16"), std::string::npos);
  EXPECT_EQ(credentials.status().message().find("fifteen"), std::string::npos) << "a secret in an error message";
}

TEST(Nonces, AreFresh) { EXPECT_NE(random_nonce(), random_nonce()); }

TEST(HandshakeError, SaysWhatToDo) {
  const Status unproven = handshake_error(State::unproven, "10.0.0.1:7");
  EXPECT_EQ(unproven.code(), ErrorCode::refused);
  EXPECT_EQ(unproven.message(),
            "10.0.0.1:7 did not prove that it knows the job's secret; give all processes the same POSEIDON_SECRET or "
            "secret_file");
  EXPECT_EQ(handshake_error(State::foreign, "10.0.0.1:7").code(), ErrorCode::mismatch);
  const Status uses_tls = handshake_error(State::peer_uses_tls, "10.0.0.1:7");
  EXPECT_EQ(uses_tls.code(), ErrorCode::mismatch);
  EXPECT_EQ(uses_tls.message(),
            "10.0.0.1:7 has tls=on, this process tls=off; give all processes of the job, and its servers, the same tls "
            "(POSEIDON_TLS)");
  EXPECT_NE(handshake_error(State::peer_without_tls, "10.0.0.1:7").message().find("has tls=off, this process tls=on"),
            std::string::npos);
}

}  // namespace
}  // namespace poseidon::wire
