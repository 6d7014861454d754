// The published test vectors, and every way of cutting a message, against another implementation's results.
#include "base/sha256.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "base/random_bytes.h"

namespace poseidon {
namespace {

using Bytes = std::vector<std::byte>;

std::string hexadecimal(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte one : bytes) {
    std::array<char, 3> digits{};
    std::snprintf(digits.data(), digits.size(), "%02x", std::to_integer<unsigned>(one));
    text += digits.data();
  }
  return text;
}

std::string digest_of(std::string_view text) { return hexadecimal(sha256(bytes_of(text))); }

std::string hmac_of(std::string_view key, std::string_view message) {
  return hexadecimal(hmac_sha256(bytes_of(key), {bytes_of(message)}));
}

Bytes numbered(std::size_t count, std::size_t seed) {
  Bytes bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 131 + seed * 29 + (i >> 3));
  return bytes;
}

TEST(Sha256, GivesTheDigestsOfFips180) {
  EXPECT_EQ(digest_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(digest_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(digest_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(digest_of(std::string(1'000'000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, GivesTheDigestsOfAnotherImplementationForEveryLengthOfAFewBlocks) {
  Sha256 all;
  for (std::size_t count = 0; count < 400; ++count) all.update(sha256(numbered(count, count)));
  EXPECT_EQ(hexadecimal(all.finish()), "143d9ad045ceec05de4b27d21b737a6a270cb65c25c197b9b7791278a9a82d06");
}

TEST(Sha256, DoesNotCareHowAMessageIsCut) {
  const Bytes message = numbered(300, 5);
  const Digest whole = sha256(message);
  for (std::size_t piece_bytes = 1; piece_bytes < message.size(); ++piece_bytes) {
    Sha256 hash;
    auto rest = std::span<const std::byte>(message);
    for (; rest.size() > piece_bytes; rest = rest.subspan(piece_bytes)) hash.update(rest.first(piece_bytes));
    hash.update(rest);
    EXPECT_EQ(hash.finish(), whole) << piece_bytes;
  }
}

TEST(HmacSha256, GivesTheValuesOfRfc4231) {
  EXPECT_EQ(hmac_of(std::string(20, '\x0b'), "Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hmac_of("Jefe", "what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hmac_of(std::string(20, '\xaa'), std::string(50, '\xdd')),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  EXPECT_EQ(hmac_of(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(hmac_of(std::string(131, '\xaa'),
                    "This is a test using a larger than block-size key and a larger than block-size data. The key "
                    "needs to be hashed before being used by the HMAC algorithm."),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(HmacSha256, GivesTheValuesOfAnotherImplementationForKeysOfEveryLength) {
  Sha256 all;
  for (std::size_t count = 0; count < 200; ++count)
    all.update(hmac_sha256(numbered(count, 1), {numbered(3 * count, 2)}));
  EXPECT_EQ(hexadecimal(all.finish()), "6def8e1f0e4a8e15599a87d55a54d359a5f28136526624c981c0fdab190dbe49");
}

TEST(HmacSha256, TakesAMessageInPieces) {
  const Bytes key = numbered(32, 1);
  const Bytes message = numbered(200, 2);
  const auto whole = std::span<const std::byte>(message);
  EXPECT_EQ(hmac_sha256(key, {whole.first(70), {}, whole.subspan(70)}), hmac_sha256(key, {whole}));
}

TEST(EqualInConstantTime, SeesEveryDifference) {
  const Bytes bytes = numbered(32, 3);
  EXPECT_TRUE(equal_in_constant_time(bytes, numbered(32, 3)));
  EXPECT_FALSE(equal_in_constant_time(bytes, numbered(31, 3)));
  EXPECT_TRUE(equal_in_constant_time({}, {}));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    Bytes other = bytes;
    other[i] ^= std::byte{0x80};
    EXPECT_FALSE(equal_in_constant_time(bytes, other)) << i;
  }
}

TEST(RandomBytes, AreOthersEachTime) {
  std::array<std::byte, 32> first{};
  std::array<std::byte, 32> second{};
  fill_with_random_bytes(first);
  fill_with_random_bytes(second);
  EXPECT_NE(first, second);
}

}  // namespace
}  // namespace poseidon
