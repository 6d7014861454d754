#include "base/flight_record.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/host.h"
#include "base/invariant.h"
#include "base/version.h"

namespace poseidon {

namespace {

constexpr int kFormatVersion = 1;
constexpr auto kDiskPatience = std::chrono::seconds(2);
constexpr std::string_view kPrefix = "poseidon-";
constexpr std::string_view kSuffix = ".json";

bool is_plain(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
}

/// The time as "20260131-235959.123" in UTC, so that names sort by age.
std::string time_text(std::int64_t wall_ns) {
  const auto seconds = static_cast<std::time_t>(wall_ns / 1'000'000'000);
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  std::array<char, 32> date{};
  const std::size_t length = std::strftime(date.data(), date.size(), "%Y%m%d-%H%M%S", &parts);
  std::array<char, 8> milliseconds{};
  std::snprintf(milliseconds.data(), milliseconds.size(), ".%03d", static_cast<int>(wall_ns / 1'000'000 % 1000));
  return std::string(date.data(), length) + milliseconds.data();
}

/// The parts of a name before and after the last '-'.
std::pair<std::string, std::string> split_last(const std::string& name) {
  const std::size_t at = name.rfind('-');
  return at == std::string::npos ? std::pair(name, std::string()) : std::pair(name.substr(0, at), name.substr(at + 1));
}

/// The common part of the names of one rank's records: everything before time and process id.
std::string stem_of(const std::string& name) { return split_last(split_last(split_last(name).first).first).first; }

/// Removes the oldest records of this process. Of other processes it removes only very old ones, so that jobs of the
/// same name, at the same time or one after the other, do not remove each other's records.
void remove_oldest(const std::filesystem::path& written) {
  const std::string own_name = written.filename();
  const auto now = std::chrono::sys_time<std::chrono::nanoseconds>(std::chrono::nanoseconds(wall_ns()));
  const auto oldest = std::filesystem::file_time_type::clock::from_sys(now) - kOthersRecordsStay;
  std::vector<std::filesystem::path> own;
  std::error_code error;  // if another user's directory is not readable, everything stays
  for (std::filesystem::directory_iterator entry(written.parent_path(), error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix) || stem_of(name) != stem_of(own_name)) continue;
    if (split_last(name).second == split_last(own_name).second) {
      own.push_back(entry->path());
    } else if (std::error_code unknown; entry->last_write_time(unknown) < oldest && !unknown) {
      std::filesystem::remove(entry->path(), unknown);
    }
  }
  if (own.size() <= kKeptRecords) return;
  std::sort(own.begin(), own.end());
  own.resize(own.size() - kKeptRecords);
  for (const auto& old : own) std::filesystem::remove(old, error);
}

Status cannot_write(const std::string& path) {
  return {ErrorCode::unreachable, "cannot write " + path + ": " + errno_text(errno) +
                                      "; choose a path in a folder where this process may write"};
}

}  // namespace

std::string_view failure_source_name(FailureSource source) {
  constexpr std::array<std::string_view, 8> names{"own",    "told",    "lost",        "left",
                                                  "silent", "refused", "unreachable", "found"};
  return names[static_cast<std::size_t>(source)];
}

void write_head(JsonWriter& json, const FlightRecordHead& head) {
  json.begin_object().field("format", "poseidon flight record").field("format_version", kFormatVersion);
  json.field("poseidon", kVersionText).field("process", head.process).field("job", head.job).field("run", head.run);
  json.field("generation", head.generation).field("rank", head.rank).field("slot", head.slot);
  json.field("world_size", head.world_size).field("host", host_name()).field("boot", boot_id());
  json.field("pid", static_cast<std::int64_t>(::getpid()));
  json.field("wall_s", static_cast<double>(head.wall_ns) / 1e9).field("monotonic_ns", head.time_ns);
  json.field("timeout_s", head.timeout_s).field("phase", head.phase);
  json.key("error").begin_object().field("code", error_code_name(head.error.code()));
  json.field("message", head.error.message()).end_object();
  json.key("learnt").begin_object().field("how", failure_source_name(head.source));
  json.field("party", flight_party_name(head.party)).key("index");
  if (head.index == kNoFlightId)
    json.null();
  else
    json.value(head.index);
  json.end_object();
}

std::string flight_record_path(const std::string& directory, const std::string& job, const std::string& who,
                               std::int64_t wall_ns) {
  std::string plain_job = job;
  for (char& c : plain_job)
    if (!is_plain(c)) c = '_';
  const std::string name = concat(kPrefix, plain_job, "-", who, "-", time_text(wall_ns), "-", ::getpid(), kSuffix);
  return (std::filesystem::path(directory) / name).string();
}

Status open_record_directory(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) errno = error.value();
  if (error || ::access(directory.c_str(), W_OK | X_OK) != 0) return cannot_write(directory);
  return {};
}

Status write_flight_record(const std::string& path, const std::string& text) {
  const std::string unfinished = path + ".part";
  {
    const FileDescriptor file(
        ::open(unfinished.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR));
    if (!file) return cannot_write(unfinished);
    for (std::size_t done = 0; done < text.size();) {
      const ssize_t written = ::write(file.get(), text.data() + done, text.size() - done);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) {
        Status status = cannot_write(unfinished);
        ::unlink(unfinished.c_str());
        return status;
      }
      done += static_cast<std::size_t>(written);
    }
  }
  if (::rename(unfinished.c_str(), path.c_str()) != 0) return cannot_write(path);
  remove_oldest(path);
  return {};
}

void FlightRecordWriter::start(std::string path, std::function<std::string()> make_text) {
  const OneThread::Turn turn(one_thread_);
  invariant(!thread_.joinable(), "a flight record is written once");
  made_ = Completion::make();
  written_ = Completion::make();
  thread_ = Thread("psd-record", [path = std::move(path), make_text = std::move(make_text), made = made_,
                                  written = written_]() mutable {
    const std::string text = std::exchange(make_text, nullptr)();
    made.complete();
    // Nobody is left to be told that there is no record. The failure itself is told anyway.
    static_cast<void>(write_flight_record(path, text));
    written.complete();
  });
}

void FlightRecordWriter::wait() {
  const OneThread::Turn turn(one_thread_);
  if (!thread_.joinable()) return;
  made_.wait();
  if (written_.wait_for(kDiskPatience))
    thread_.join();
  else
    thread_.detach();
}

}  // namespace poseidon
