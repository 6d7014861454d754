// Runs the corpora of the fuzzers (tests/fuzz) once, also cut short. A fuzzer ends the process if a decoder is wrong.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cpp/base/temporary_directory.h"
#include "server/checkpoint/checkpoint_format.h"
#include "wire/header.h"
#include "wire/messages/units.h"

using Fuzzer = int (*)(const std::uint8_t*, std::size_t);

extern "C" {
int checkpoint_fuzz(const std::uint8_t* data, std::size_t size);
int decode_fuzz(const std::uint8_t* data, std::size_t size);
int handshake_fuzz(const std::uint8_t* data, std::size_t size);
int lossless_fuzz(const std::uint8_t* data, std::size_t size);
int messages_fuzz(const std::uint8_t* data, std::size_t size);
int store_fuzz(const std::uint8_t* data, std::size_t size);
int tcp_receive_fuzz(const std::uint8_t* data, std::size_t size);
}

namespace poseidon::testing {
namespace {

using Case = std::pair<std::string, Fuzzer>;

class Corpus : public ::testing::TestWithParam<Case> {};

TEST_P(Corpus, IsTakenOrRejectedAsAWholeAndCutShort) {
  const auto& [name, fuzzer] = GetParam();
  std::size_t file_count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(POSEIDON_FUZZ_CORPUS "/") + name)) {
    const std::string content = content_of(entry.path());
    ++file_count;
    for (std::size_t size_bytes = 0; size_bytes <= content.size(); ++size_bytes) {
      // A separate copy, so that the address sanitizer sees a read past its end.
      const std::vector<std::uint8_t> bytes(content.begin(), content.begin() + static_cast<std::ptrdiff_t>(size_bytes));
      EXPECT_EQ(fuzzer(bytes.data(), bytes.size()), 0);
    }
  }
  EXPECT_GT(file_count, 3u) << "an empty corpus";
}

/// Files of old formats would test nothing but the check of the version.
TEST(CorpusFiles, AreReadUnlessTheyAreCalledRejected) {
  const auto each = [](const std::string& name, const auto& is_read) {
    for (const auto& entry : std::filesystem::directory_iterator(std::string(POSEIDON_FUZZ_CORPUS "/") + name)) {
      const std::string content = content_of(entry.path());
      const std::string file = entry.path().filename();
      EXPECT_EQ(is_read(std::as_bytes(std::span(content))), !file.starts_with("rejected")) << name << "/" << file;
    }
  };
  const auto is_header = [](std::span<const std::byte> bytes) {
    wire::Header header;
    return wire::decode(bytes.first<wire::kHeaderBytes>(), header).ok();
  };
  each("decode", is_header);
  each("messages", is_header);
  each("checkpoint", [](std::span<const std::byte> bytes) {
    const auto content = bytes.subspan(1);
    return bytes[0] == std::byte{0} ? decode_checkpoint_head(content).ok() : wire::StoredUnits::read(content).ok();
  });
}

INSTANTIATE_TEST_SUITE_P(Fuzzers, Corpus,
                         ::testing::Values(Case("checkpoint", &checkpoint_fuzz), Case("decode", &decode_fuzz),
                                           Case("handshake", &handshake_fuzz), Case("lossless", &lossless_fuzz),
                                           Case("messages", &messages_fuzz), Case("store", &store_fuzz),
                                           Case("tcp_receive", &tcp_receive_fuzz)),
                         [](const auto& info) { return info.param.first; });

}  // namespace
}  // namespace poseidon::testing
