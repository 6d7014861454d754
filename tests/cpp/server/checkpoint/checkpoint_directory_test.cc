// A directory of checkpoint files: which versions are complete, what they hold, and which are deleted.
#include "server/checkpoint/checkpoint_directory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>
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
using testing::write_text;

class CheckpointDirectories : public ::testing::Test {
 protected:
  static std::vector<CheckpointUnit> units() { return {unit_of("w", 1000, 384), unit_of("b", 40, 40)}; }

  /// Writes the files of two servers for one version. `servers` says which of the two write.
  void write_version(std::uint64_t version, std::uint64_t run = 1, const std::set<int>& servers = {0, 1},
                     const std::string& job = "default") {
    for (const int server : servers) {
      auto snapshot = snapshot_of(version, units(), run);
      snapshot.head.job = job;
      if (server == 0) {
        add_record(snapshot, 0, 0);
        add_record(snapshot, 0, 2);
      } else {
        add_record(snapshot, 0, 1);
        add_record(snapshot, 1, 0, 1);
      }
      const Status status =
          write_checkpoint(directory_.path(), name_of(snapshot, static_cast<std::uint64_t>(server)), snapshot);
      ASSERT_TRUE(status.ok()) << status.message();
    }
  }
  std::vector<CheckpointPaths> found(const std::string& job = "default") {
    return find_checkpoints(directory_.path(), job).value();
  }
  std::vector<std::uint64_t> versions(const std::string& job = "default") {
    std::vector<std::uint64_t> all;
    for (const auto& paths : found(job)) all.push_back(paths.version);
    return all;
  }
  void flip_byte(const std::string& path, std::size_t from_end) {
    std::string text = content_of(path);
    text[text.size() - from_end] = static_cast<char>(text[text.size() - from_end] ^ 1);
    write_text(path, text);
  }

  TemporaryDirectory directory_;
};

TEST_F(CheckpointDirectories, FindVersionsOfTheirJobNewestFirst) {
  for (const std::uint64_t version : {100u, 300u, 200u}) write_version(version);
  write_version(300, 2);
  write_version(400, 1, {0, 1}, "other");
  write_text(directory_.path() + "/notes.txt", "hello");
  write_text(directory_.path() + "/default.000000000500.0000000000000001.00000000000000ff.ckpt.tmp", "half");
  write_text(directory_.path() + "/default.x.0000000000000001.00000000000000ff.ckpt", "no version");
  EXPECT_EQ(versions(), (std::vector<std::uint64_t>{500, 300, 300, 200, 100}));
  EXPECT_TRUE(found()[0].paths.empty());
  EXPECT_EQ(found()[1].run, 2u) << "of one version the later run's comes first";
  EXPECT_EQ(found()[1].paths.size(), 2u);
  EXPECT_EQ(versions("other"), std::vector<std::uint64_t>{400});
  EXPECT_EQ(find_checkpoints(directory_.path() + "/none", "default").status().code(), ErrorCode::unreachable);
}

TEST_F(CheckpointDirectories, NamesOfJobsNeverBecomePaths) {
  const std::vector<std::string> jobs{
      "../../etc/passwd",    ".", "a/b", "käse", "a.b", "%2e", std::string(500, 'x'), std::string(300, '/'),
      std::string("a\0b", 3)};
  for (const std::string& job : jobs) {
    const std::string name = checkpoint_name(job, 7, 8, 9);
    EXPECT_EQ(name.find('/'), std::string::npos);
    EXPECT_LT(name.size(), 250u);
    write_version(7, 8, {0, 1}, job);
    EXPECT_EQ(versions(job), std::vector<std::uint64_t>{7}) << job;
    EXPECT_TRUE(CheckpointVersion::open(found(job).front()).ok());
  }
  EXPECT_NE(checkpoint_file_job(std::string(500, 'x')), checkpoint_file_job(std::string(501, 'x')));
  EXPECT_NE(checkpoint_job("a", "key"), checkpoint_job("a", ""));
}

TEST_F(CheckpointDirectories, AVersionIsCompleteWhenItsChunksCoverItsUnits) {
  write_version(100);
  write_version(200, 1, {0});
  write_version(200, 2, {1});
  write_version(300, 1, {1});
  EXPECT_TRUE(CheckpointVersion::open(found().back()).ok());
  for (std::size_t i = 0; i < 3; ++i) {
    const Status missing = CheckpointVersion::open(found()[i]).status();
    EXPECT_EQ(missing.code(), ErrorCode::refused) << "files of different runs are no version";
  }
  EXPECT_NE(CheckpointVersion::open(found()[0]).status().message().find("1 of its 3 chunks"), std::string::npos);
}

TEST_F(CheckpointDirectories, FilesThatContradictEachOtherAreNoVersion) {
  write_version(100);
  auto again = snapshot_of(100, units());
  add_record(again, 1, 0);
  ASSERT_TRUE(write_checkpoint(directory_.path(), name_of(again, 5), again).ok());
  EXPECT_EQ(CheckpointVersion::open(found().front()).status().code(), ErrorCode::mismatch) << "a chunk is there twice";
  auto other = snapshot_of(100, {unit_of("w", 2000, 384)});
  ASSERT_TRUE(write_checkpoint(directory_.path(), name_of(other, 5), other).ok());
  EXPECT_EQ(CheckpointVersion::open(found().front()).status().code(), ErrorCode::mismatch) << "w has two sizes";
  auto later = snapshot_of(200, units());
  ASSERT_TRUE(write_checkpoint(directory_.path(), name_of(other, 5), later).ok());
  EXPECT_EQ(CheckpointVersion::open(found().front()).status().code(), ErrorCode::mismatch) << "name and head differ";
}

TEST_F(CheckpointDirectories, AUnitIsReadHoweverItIsCutNow) {
  write_version(100);
  auto version = std::move(CheckpointVersion::open(found().front()).value());
  ASSERT_NE(version.unit("w"), nullptr);
  EXPECT_EQ(version.unit("x"), nullptr);
  for (const std::uint64_t size : {1u, 64u, 200u, 384u, 385u, 1000u}) {
    for (std::uint64_t offset = 0; offset + size <= 1000; offset += 61) {
      const auto piece = version.read("w", offset, size);
      ASSERT_TRUE(piece.ok()) << piece.status().message();
      EXPECT_EQ(piece.value().update_count, 100u);
      ASSERT_EQ(piece.value().arrays.size(), 2u);
      for (std::size_t array = 0; array < 2; ++array) {
        const Bytes whole = array_of(units()[0], array);
        const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(offset);
        EXPECT_EQ(bytes_of(piece.value().arrays[array]), Bytes(begin, begin + static_cast<std::ptrdiff_t>(size)));
      }
    }
  }
  EXPECT_EQ(version.read("b", 0, 40).value().arrays.size(), 1u);
}

TEST_F(CheckpointDirectories, AnOpenVersionStaysReadableWhenItIsPruned) {
  for (const std::uint64_t version : {100u, 200u, 300u}) write_version(version);
  auto oldest = std::move(CheckpointVersion::open(found().back()).value());
  prune_checkpoints(directory_.path(), "default", 1);
  EXPECT_EQ(versions(), std::vector<std::uint64_t>{300});
  EXPECT_TRUE(oldest.read("w", 0, 1000).ok());
}

TEST_F(CheckpointDirectories, PruningKeepsTheNewestCompleteVersions) {
  for (const std::uint64_t version : {100u, 200u, 300u, 500u}) write_version(version);
  write_version(400, 1, {0});
  write_version(600, 1, {1});
  write_version(100, 1, {0, 1}, "other");
  write_text(directory_.path() + "/default.000000000150.0000000000000001.00000000000000ff.ckpt.tmp", "half");
  prune_checkpoints(directory_.path(), "default", 3);
  EXPECT_EQ(versions(), (std::vector<std::uint64_t>{600, 500, 400, 300, 200}));
  prune_checkpoints(directory_.path(), "default", 0);
  EXPECT_EQ(versions(), (std::vector<std::uint64_t>{600, 500})) << "the last complete one stays, whatever is asked for";
  EXPECT_EQ(versions("other"), std::vector<std::uint64_t>{100});
  flip_byte(found()[1].paths[0], 1);  // in the trailer: 500 is not complete any more
  prune_checkpoints(directory_.path(), "default", 1);
  EXPECT_EQ(versions(), (std::vector<std::uint64_t>{600, 500})) << "nothing goes where nothing is complete";
}

TEST_F(CheckpointDirectories, PruningRemovesWhatARunHasGoneBackBehind) {
  for (const std::uint64_t version : {100u, 200u, 300u}) write_version(version, 1);
  write_version(250, 2);
  write_version(400, 3);
  prune_checkpoints(directory_.path(), "default", 2, {2, 200});
  EXPECT_EQ(versions(), (std::vector<std::uint64_t>{400, 250})) << "300 is an earlier run's, 400 a later one's";
}

TEST_F(CheckpointDirectories, DamagedDataIsFoundAndSetAside) {
  write_version(100);
  flip_byte(found().front().paths[1], 40);
  auto version = std::move(CheckpointVersion::open(found().front()).value());
  EXPECT_EQ(version.read("b", 0, 40).status().code(), ErrorCode::mismatch);
  EXPECT_TRUE(version.read("w", 0, 384).ok()) << "of the other file";
  version.set_damaged_aside();
  EXPECT_EQ(CheckpointVersion::open(found().front()).status().code(), ErrorCode::refused);
  const auto names = directory_.names();
  EXPECT_TRUE(std::ranges::any_of(names, [](const std::string& name) { return name.ends_with(".ckpt.damaged"); }));
}

TEST_F(CheckpointDirectories, AreListedWithWhatIsWrong) {
  write_version(100);
  write_version(200);
  write_version(300, 1, {0});
  write_version(50, 1, {0, 1}, checkpoint_job("mine/too", "ab12"));
  flip_byte(found()[1].paths[0], 40);
  const auto listed = list_checkpoints(directory_.path(), false).value();
  ASSERT_EQ(listed.size(), 4u);
  EXPECT_FALSE(listed[0].complete);
  EXPECT_NE(listed[0].problem.find("0 of its 1 chunks"), std::string::npos) << listed[0].problem;
  EXPECT_TRUE(listed[1].complete) << "nobody has read the data";
  EXPECT_EQ(listed[1].version, 200u);
  EXPECT_EQ(listed[1].file_count, 2u);
  EXPECT_EQ(listed[1].unit_count, 2u);
  EXPECT_GT(listed[1].size_bytes, 2000u);
  EXPECT_EQ(listed[3].job, "mine/too of secret ab12");
  const auto checked = list_checkpoints(directory_.path(), true).value();
  EXPECT_FALSE(checked[1].complete);
  EXPECT_NE(checked[1].problem.find("checksum"), std::string::npos) << checked[1].problem;
  EXPECT_TRUE(checked[2].complete);
  EXPECT_EQ(list_checkpoints("/nowhere", true).status().code(), ErrorCode::unreachable);
}

TEST_F(CheckpointDirectories, AreMadeOrRefused) {
  const std::string deep = directory_.path() + "/a/b";
  EXPECT_TRUE(open_checkpoint_directory(deep).ok());
  EXPECT_TRUE(std::filesystem::is_directory(deep));
  write_text(directory_.path() + "/file", "");
  const Status status = open_checkpoint_directory(directory_.path() + "/file/x");
  EXPECT_EQ(status.code(), ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace poseidon
