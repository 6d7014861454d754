#include "base/flight_record.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "cpp/base/temporary_directory.h"

namespace poseidon {
namespace {

using testing::content_of;
using testing::TemporaryDirectory;

constexpr std::int64_t kWallNs = 1'769'903'999'123'456'789;  // 2026-01-31 23:59:59.123 UTC

TEST(FlightRecordPath, SaysWhoAndWhen) {
  EXPECT_EQ(flight_record_path("/records", "my job/1", "rank3", kWallNs),
            "/records/poseidon-my_job_1-rank3-20260131-235959.123-" + std::to_string(::getpid()) + ".json");
}

TEST(FlightRecordFile, IsWrittenWholeAndForThisUserOnly) {
  const TemporaryDirectory directory;
  const std::string path = flight_record_path(directory.path(), "job", "rank0", kWallNs);
  ASSERT_TRUE(write_flight_record(path, "{}").ok());
  EXPECT_EQ(content_of(path), "{}");
  struct stat facts {};
  ASSERT_EQ(::stat(path.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, static_cast<mode_t>(0600));
  EXPECT_EQ(directory.names().size(), 1u);  // nothing unfinished
}

TEST(FlightRecordFile, OnlyTheNewestOfAProcessStay) {
  const TemporaryDirectory directory;
  const std::string other = flight_record_path(directory.path(), "job", "rank10", kWallNs);
  const std::string other_job = flight_record_path(directory.path(), "job-rank1", "rank1", kWallNs);
  ASSERT_TRUE(write_flight_record(other, "{}").ok());
  ASSERT_TRUE(write_flight_record(other_job, "{}").ok());
  std::string last;
  for (int i = 0; i < 20; ++i) {
    last = flight_record_path(directory.path(), "job", "rank1", kWallNs + std::int64_t{i} * 1'000'000'000);
    ASSERT_TRUE(write_flight_record(last, std::to_string(i)).ok());
  }
  EXPECT_EQ(directory.names().size(), kKeptRecords + 2);
  EXPECT_EQ(content_of(last), "19");
  EXPECT_EQ(content_of(other), "{}");
  EXPECT_EQ(content_of(other_job), "{}");
}

TEST(FlightRecordFile, AnotherProcessOfTheSameJobAndRankLosesNone) {
  const TemporaryDirectory directory;
  const std::string own = flight_record_path(directory.path(), "default", "rank0", kWallNs);
  const std::string before = own.substr(0, own.rfind('-') + 1);
  std::vector<std::string> others;
  for (int pid = 1; pid <= 20; ++pid) {
    others.push_back(before + "9999999" + std::to_string(pid) + ".json");
    std::ofstream(others.back()) << "{}";
  }
  const auto long_ago = std::filesystem::file_time_type::clock::now() - kOthersRecordsStay - std::chrono::hours(1);
  std::filesystem::last_write_time(others.front(), long_ago);
  ASSERT_TRUE(write_flight_record(own, "{}").ok());
  EXPECT_EQ(directory.names().size(), others.size()) << "its own, and all but the one that is too old";
  EXPECT_FALSE(std::filesystem::exists(others.front()));
}

TEST(FlightRecordFile, DoesNotFollowALinkThatWaitsForIt) {
  const TemporaryDirectory directory;
  const std::string path = flight_record_path(directory.path(), "job", "rank0", kWallNs);
  const std::string victim = directory.path() + "/victim";
  std::filesystem::create_symlink(victim, path + ".part");
  EXPECT_EQ(write_flight_record(path, "{}").code(), ErrorCode::unreachable);
  EXPECT_FALSE(std::filesystem::exists(victim));
}

TEST(FlightRecordDirectory, IsMadeOrSaysWhyNot) {
  const TemporaryDirectory directory;
  EXPECT_TRUE(open_record_directory(directory.path() + "/a/b").ok());
  EXPECT_TRUE(std::filesystem::is_directory(directory.path() + "/a/b"));
  std::ofstream(directory.path() + "/file") << "x";
  const Status status = open_record_directory(directory.path() + "/file/below");
  EXPECT_EQ(status.code(), ErrorCode::unreachable);
  EXPECT_NE(status.message().find("/file/below"), std::string::npos) << status.message();
}

TEST(FlightRecordWriter, HasWrittenWhenItHasBeenWaitedFor) {
  const TemporaryDirectory directory;
  const std::string path = flight_record_path(directory.path(), "job", "rank0", kWallNs);
  const auto caller = std::this_thread::get_id();
  bool elsewhere = false;
  FlightRecordWriter writer;
  writer.wait();  // nothing to wait for
  writer.start(path, [&] {
    elsewhere = std::this_thread::get_id() != caller;
    return std::string("[1]");
  });
  writer.wait();
  EXPECT_TRUE(elsewhere);
  EXPECT_EQ(content_of(path), "[1]");
}

TEST(FlightRecordHead, NamesTheProcessAndItsError) {
  FlightRecordHead head;
  head.process = "worker";
  head.job = "job";
  head.run = "abc";
  head.generation = 2;
  head.rank = 1;
  head.slot = 3;
  head.world_size = 4;
  head.phase = "running";
  head.timeout_s = 1.5;
  head.error = Status(ErrorCode::peer_lost, "lost \"it\"");
  head.source = FailureSource::lost;
  head.party = FlightEvent::Party::peer;
  head.index = 2;
  head.time_ns = 77;
  head.wall_ns = kWallNs;
  JsonWriter json;
  write_head(json, head);
  const std::string text = json.end_object().text();
  for (const std::string part :
       {R"("format":"poseidon flight record","format_version":1)", R"("process":"worker","job":"job","run":"abc")",
        R"("generation":2,"rank":1,"slot":3,"world_size":4)", R"("wall_s":1769903999.123,"monotonic_ns":77)",
        R"("timeout_s":1.500,"phase":"running")", R"("error":{"code":"peer_lost","message":"lost \"it\""})",
        R"("learnt":{"how":"lost","party":"peer","index":2})"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
}

}  // namespace
}  // namespace poseidon
