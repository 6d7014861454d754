#include "base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__GNUC__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace poseidon {

namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // Castagnoli's, bit-reflected
constexpr std::size_t kWordBytes = sizeof(std::uint64_t);

using Tables = std::array<std::array<std::uint32_t, 256>, kWordBytes>;

/// tables[k][b]: what byte b does to the checksum when k more bytes follow it.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < tables.size(); ++k)
    for (std::size_t byte = 0; byte < 256; ++byte)
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 0xff];
  return tables;
}

constexpr Tables kTables = make_tables();

std::uint64_t word_at(const std::byte* data) {
  std::uint64_t word = 0;
  std::memcpy(&word, data, sizeof word);
  return word;
}

std::uint32_t add_byte(std::uint32_t crc, std::byte byte) {
  return (crc >> 8) ^ kTables[0][(crc ^ std::to_integer<std::uint32_t>(byte)) & 0xff];
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("sse4.2"))) std::uint32_t add_words_by_instruction(std::uint32_t crc, const std::byte* data,
                                                                         std::size_t word_count) {
  std::uint64_t wide = crc;
  for (std::size_t i = 0; i < word_count; ++i) wide = _mm_crc32_u64(wide, word_at(data + i * kWordBytes));
  return static_cast<std::uint32_t>(wide);
}

bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__aarch64__) && defined(__GNUC__)
__attribute__((target("+crc"))) std::uint32_t add_words_by_instruction(std::uint32_t crc, const std::byte* data,
                                                                       std::size_t word_count) {
  for (std::size_t i = 0; i < word_count; ++i) crc = __crc32cd(crc, word_at(data + i * kWordBytes));
  return crc;
}

bool has_instruction() {
  constexpr unsigned long kHasCrc32 = 1ul << 7;  // HWCAP_CRC32 of asm/hwcap.h
  static const bool has = (getauxval(AT_HWCAP) & kHasCrc32) != 0;
  return has;
}
#endif

std::uint32_t add_words_by_table(std::uint32_t crc, const std::byte* data, std::size_t word_count) {
  for (std::size_t i = 0; i < word_count; ++i) {
    const std::uint64_t word = word_at(data + i * kWordBytes) ^ crc;
    crc = 0;
    for (std::size_t byte = 0; byte < kWordBytes; ++byte)
      crc ^= kTables[kWordBytes - 1 - byte][(word >> (8 * byte)) & 0xff];
  }
  return crc;
}

template <typename AddWords>
std::uint32_t checksum(std::span<const std::byte> data, std::uint32_t before, AddWords add_words) {
  const std::size_t word_count = data.size() / kWordBytes;
  std::uint32_t crc = add_words(~before, data.data(), word_count);
  for (const std::byte byte : data.subspan(word_count * kWordBytes)) crc = add_byte(crc, byte);
  return ~crc;
}

}  // namespace

std::uint32_t crc32c_by_table(std::span<const std::byte> data, std::uint32_t before) {
  return checksum(data, before, add_words_by_table);
}

std::uint32_t crc32c(std::span<const std::byte> data, std::uint32_t before) {
#if (defined(__x86_64__) || defined(__aarch64__)) && defined(__GNUC__)
  if (has_instruction()) return checksum(data, before, add_words_by_instruction);
#endif
  return crc32c_by_table(data, before);
}

}  // namespace poseidon
