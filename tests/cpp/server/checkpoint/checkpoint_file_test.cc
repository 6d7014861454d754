// One checkpoint file: it exists as a whole or not at all, and every byte of it is checked.
#include "server/checkpoint/checkpoint_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cpp/server/checkpoint/checkpoint_cases.h"

namespace poseidon {
namespace {

using testing::add_record;
using testing::array_of;
using testing::Bytes;
using testing::bytes_of;
using testing::content_of;
using testing::name_of;
using testing::snapshot_of;
using testing::TemporaryDirectory;
using testing::unit_of;
using testing::update_rules;
using testing::write_text;

class CheckpointFiles : public ::testing::Test {
 protected:
  /// Two units in three chunks. One chunk has no value.
  static CheckpointSnapshot sample() {
    auto snapshot = snapshot_of(300, {unit_of("w", 96, 64, update_rules()[3]), unit_of("b", 16, 16)});
    add_record(snapshot, 0, 0, 3);
    add_record(snapshot, 0, 1, 3);
    add_record(snapshot, 1, 0, 0);
    return snapshot;
  }
  std::string write(CheckpointSnapshot snapshot) {
    const Status status = write_checkpoint(directory_.path(), name_of(snapshot), snapshot);
    EXPECT_TRUE(status.ok()) << status.message();
    return directory_.path() + "/" + name_of(snapshot);
  }
  /// Whether opening the file or reading its data fails with ErrorCode::mismatch.
  static bool recognized(const std::string& path) {
    const auto file = CheckpointFile::open(path);
    const Status status = file.ok() ? file.value().verify() : file.status();
    EXPECT_TRUE(status.ok() || status.code() == ErrorCode::mismatch) << status.message();
    return !status.ok();
  }

  TemporaryDirectory directory_;
};

TEST_F(CheckpointFiles, ComeBackAsTheyWereWritten) {
  const std::string path = write(sample());
  const auto file = CheckpointFile::open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  const CheckpointHead& head = file.value().head();
  EXPECT_EQ(head.job, "default");
  EXPECT_EQ(head.version, 300u);
  EXPECT_EQ(head.units, sample().head.units);
  ASSERT_EQ(head.records.size(), 3u);
  for (std::size_t i = 0; i < 2; ++i) {
    const auto arrays = file.value().read(i);
    ASSERT_TRUE(arrays.ok()) << arrays.status().message();
    ASSERT_EQ(arrays.value().size(), 3u);
    for (std::size_t array = 0; array < 3; ++array) {
      const Bytes whole = array_of(head.units[0], array);
      const Bytes piece(whole.begin() + (i == 0 ? 0 : 64), i == 0 ? whole.begin() + 64 : whole.end());
      EXPECT_EQ(bytes_of(arrays.value()[array]), piece);
    }
  }
  EXPECT_TRUE(file.value().read(2).value().empty());
  EXPECT_EQ(head.records[1].update_count, 300u);
  struct stat about {};
  ASSERT_EQ(::stat(path.c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 0777u, 0600u);
  EXPECT_EQ(directory_.names(), std::vector{name_of(sample())}) << "nothing temporary is left";
}

TEST_F(CheckpointFiles, AreRecognizedWhenTheyAreCutOff) {
  const std::string path = write(sample());
  const std::string whole = content_of(path);
  ASSERT_GT(whole.size(), 300u);
  for (std::size_t size = whole.size(); size-- > 0;) {
    std::filesystem::resize_file(path, size);
    EXPECT_TRUE(recognized(path)) << size << " of " << whole.size();
  }
  write_text(path, whole + "x");
  EXPECT_TRUE(recognized(path));
  write_text(path, whole);
  EXPECT_FALSE(recognized(path));
}

TEST_F(CheckpointFiles, AreRecognizedWhenABitHasFlipped) {
  const std::string path = write(sample());
  const std::string whole = content_of(path);
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  const auto put = [&file](std::size_t at, int byte) {
    file.seekp(static_cast<std::streamoff>(at)).put(static_cast<char>(byte)).flush();
  };
  for (std::size_t byte = 0; byte < whole.size(); ++byte) {
    put(byte, whole[byte] ^ (1 << (byte % 8)));
    EXPECT_TRUE(recognized(path)) << byte;
    put(byte, whole[byte]);
  }
  EXPECT_FALSE(recognized(path));
}

TEST_F(CheckpointFiles, OfTwoSizesMixedAreRecognized) {
  auto other = sample();
  other.head.version = 400;
  const std::string a = content_of(write(sample()));
  const std::string path = write(other);
  const std::string b = content_of(path);
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t size = 64; size < a.size(); size += 16) {  // as after a crash of a disk that writes in any order
    if (a.substr(size) == b.substr(size)) continue;
    write_text(path, b.substr(0, size) + a.substr(size));
    EXPECT_TRUE(recognized(path)) << size;
  }
}

TEST_F(CheckpointFiles, ThatCannotBeWrittenLeaveNothing) {
  auto snapshot = sample();
  const Status nowhere = write_checkpoint(directory_.path() + "/none", name_of(snapshot), snapshot);
  EXPECT_EQ(nowhere.code(), ErrorCode::unreachable);
  EXPECT_NE(nowhere.message().find("No such file"), std::string::npos) << nowhere.message();

  // A limit on the size of files makes a write fail as a full disk does.
  auto large = snapshot_of(1, {unit_of("w", 1 << 20, 1 << 20)});
  add_record(large, 0, 0);
  const auto before = std::signal(SIGXFSZ, SIG_IGN);
  rlimit unlimited{};
  ::getrlimit(RLIMIT_FSIZE, &unlimited);
  const rlimit limited{256 << 10, unlimited.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &limited);
  const Status full = write_checkpoint(directory_.path(), name_of(large), large);
  ::setrlimit(RLIMIT_FSIZE, &unlimited);
  std::signal(SIGXFSZ, before);
  EXPECT_EQ(full.code(), ErrorCode::unreachable);
  EXPECT_NE(full.message().find("File too large"), std::string::npos) << full.message();
  EXPECT_TRUE(directory_.names().empty());
}

TEST_F(CheckpointFiles, OfAnotherFormatSaySo) {
  const std::string path = write(sample());
  std::string text = content_of(path);
  text[4] = 9;
  write_text(path, text);
  EXPECT_NE(CheckpointFile::open(path).status().message().find("format version 9"), std::string::npos);
}

}  // namespace
}  // namespace poseidon
