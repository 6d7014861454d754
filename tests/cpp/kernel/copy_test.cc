#include <gtest/gtest.h>

#include <algorithm>

#include "arrays.h"
#include "kernel/kernel.h"

namespace poseidon::kernel {
namespace {

TEST(CopyPastCaches, CopiesEveryByteAndNoOther) {
  std::mt19937 random(5);
  for (const std::size_t size_bytes : {0, 1, 15, 63, 64, 65, 127, 128, 200, 4096, 70'001}) {
    for (const std::size_t from : {0, 1, 16}) {
      for (const std::size_t to : {0, 1, 3, 16, 63}) {
        Bytes in(from + size_bytes);
        for (std::byte& byte : in) byte = static_cast<std::byte>(random());
        Bytes out(to + size_bytes + 64, std::byte{0xa5});
        copy_past_caches(std::span(in).subspan(from), out.data() + to);
        EXPECT_TRUE(std::equal(in.begin() + static_cast<std::ptrdiff_t>(from), in.end(),
                               out.begin() + static_cast<std::ptrdiff_t>(to)));
        EXPECT_EQ(std::count(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(to), std::byte{0xa5}), to);
        EXPECT_EQ(std::count(out.end() - 64, out.end(), std::byte{0xa5}), 64);
      }
    }
  }
}

}  // namespace
}  // namespace poseidon::kernel
