#include "server/checkpoint/checkpoint_directory.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <tuple>

#include "base/crc32c.h"
#include "base/file_descriptor.h"

namespace poseidon {

namespace {

constexpr std::string_view kEnding = ".ckpt";
constexpr std::string_view kUnfinished = ".tmp";
constexpr std::string_view kDamaged = ".damaged";
constexpr std::size_t kMaxJobBytes = 120;  // the part of a file name, which may have 255 bytes, that the job may take
constexpr std::size_t kVersionDigits = 12;
constexpr std::size_t kHexDigits = 16;

bool is_plain(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
}

std::string hex(std::uint64_t value, int digits) {
  std::array<char, 24> text{};
  std::snprintf(text.data(), text.size(), "%0*llx", digits, static_cast<unsigned long long>(value));
  return text.data();
}

std::optional<std::uint64_t> number(std::string_view text, std::size_t least_digits, int base) {
  std::uint64_t value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (text.size() < least_digits || parsed.ec != std::errc() || parsed.ptr != text.data() + text.size())
    return std::nullopt;
  return value;
}

/// Parses the name "job.version.run.writer.ckpt". Returns false if it is no checkpoint's name.
bool parse_name(std::string_view name, CheckpointPaths& about) {
  if (!name.ends_with(kEnding)) return false;
  name.remove_suffix(kEnding.size());
  std::array<std::string_view, 4> parts;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::size_t end = i + 1 == parts.size() ? name.size() : name.find('.');
    if (end == std::string_view::npos) return false;
    parts[i] = name.substr(0, end);
    name.remove_prefix(std::min(name.size(), end + 1));
  }
  const auto version = number(parts[1], kVersionDigits, 10);
  const auto run = number(parts[2], kHexDigits, 16);
  if (!version || !run || !number(parts[3], kHexDigits, 16)) return false;
  about.job = parts[0];
  about.version = *version;
  about.run = *run;
  return true;
}

/// Undoes checkpoint_file_job for a name that it has not cut.
std::string decoded(const std::string& text) {
  std::string job;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = text[i] == '%' && i + 3 <= text.size() ? number(std::string_view(text).substr(i + 1, 2), 2, 16)
                                                             : std::optional<std::uint64_t>();
    job += byte ? static_cast<char>(*byte) : text[i];
    if (byte) i += 2;
  }
  return job;
}

Status of_another(const std::string& path, const std::string& what) {
  return {ErrorCode::mismatch, path + ": it does not fit the other files of its version: " + what};
}

}  // namespace

std::string checkpoint_job(const std::string& name, const std::string& key_id) {
  return key_id.empty() ? name : name + "\n" + key_id;  // the line break is unambiguous, because a name is one line
}

std::string checkpoint_job_name(const std::string& job) {
  const std::size_t end = job.find('\n');
  return end == std::string::npos ? job : job.substr(0, end) + " of secret " + job.substr(end + 1);
}

Status open_checkpoint_directory(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (!error && ::access(directory.c_str(), R_OK | W_OK | X_OK) != 0) error.assign(errno, std::generic_category());
  if (!error) return {};
  return {ErrorCode::invalid_argument, "cannot write to " + directory + ": " + errno_text(error.value()) +
                                           "; choose a folder in which this process may write"};
}

std::string checkpoint_file_job(const std::string& job) {
  std::string text;
  for (const char c : job) {
    if (is_plain(c))
      text += c;
    else
      text.append("%").append(hex(static_cast<unsigned char>(c), 2));
  }
  if (text.size() > kMaxJobBytes)
    text = text.substr(0, kMaxJobBytes) + "%" + hex(crc32c(std::as_bytes(std::span(job))), 8);
  return text;
}

std::string checkpoint_name(const std::string& job, std::uint64_t version, std::uint64_t run, std::uint64_t writer) {
  std::string digits = std::to_string(version);
  if (digits.size() < kVersionDigits) digits.insert(0, kVersionDigits - digits.size(), '0');
  return checkpoint_file_job(job) + "." + digits + "." + hex(run, kHexDigits) + "." + hex(writer, kHexDigits) +
         std::string(kEnding);
}

Result<std::vector<CheckpointPaths>> find_checkpoints(const std::string& directory, const std::string& job) {
  const std::string wanted = job.empty() ? "" : checkpoint_file_job(job);
  std::error_code error;
  std::filesystem::directory_iterator entries(directory, error);
  std::map<std::tuple<std::string, std::uint64_t, std::uint64_t>, CheckpointPaths> found;
  for (; !error && entries != std::filesystem::directory_iterator(); entries.increment(error)) {
    const std::string path = entries->path().string();
    std::string name = entries->path().filename().string();
    const bool unfinished = name.ends_with(kUnfinished);
    if (unfinished) name.resize(name.size() - kUnfinished.size());
    CheckpointPaths about;
    if (!parse_name(name, about) || (!wanted.empty() && about.job != wanted)) continue;
    CheckpointPaths& paths = found.try_emplace({about.job, ~about.version, ~about.run}, about).first->second;
    (unfinished ? paths.unfinished : paths.paths).push_back(path);
  }
  if (error) return Status(ErrorCode::unreachable, directory + " could not be read: " + error.message());
  std::vector<CheckpointPaths> versions;
  for (auto& [key, paths] : found) {
    std::sort(paths.paths.begin(), paths.paths.end());
    versions.push_back(std::move(paths));
  }
  return versions;
}

Result<CheckpointVersion> CheckpointVersion::open(const CheckpointPaths& paths) {
  CheckpointVersion version;
  version.version_ = paths.version;
  version.run_ = paths.run;
  for (const std::string& path : paths.paths) {
    auto file = CheckpointFile::open(path);
    if (!file.ok()) return file.status();
    if (Status status = version.add(std::move(file.value())); !status.ok()) return status;
  }
  if (Status status = version.check_complete(); !status.ok()) return status;
  return version;
}

Status CheckpointVersion::add(CheckpointFile file) {
  const CheckpointHead& head = file.head();
  if (files_.empty()) job_ = head.job;
  if (head.version != version_ || head.run != run_ || head.job != job_)
    return of_another(file.path(), "another job, version or run");
  for (const CheckpointUnit& about : head.units) {
    const auto known = units_.try_emplace(about.unit.name, Unit{about, {}}).first;
    // Only the core that has a chunk of the unit knows the unit's rule.
    if (known->second.about.rule.kind == nullptr) known->second.about.rule = about.rule;
    if (known->second.about.unit != about.unit) return of_another(file.path(), "unit '" + about.unit.name + "'");
  }
  for (std::size_t i = 0; i < head.records.size(); ++i) {
    auto& chunks = units_.at(head.units[head.records[i].unit].unit.name).chunks;
    if (!chunks.emplace(head.records[i].chunk, Place{files_.size(), i}).second)
      return of_another(file.path(), "a chunk of '" + head.units[head.records[i].unit].unit.name + "' is in two files");
  }
  files_.push_back(std::move(file));
  return {};
}

Status CheckpointVersion::check_complete() const {
  for (const auto& [name, unit] : units_) {
    const std::uint64_t chunk_count = unit.about.unit.chunk_count();
    if (unit.chunks.size() < chunk_count)
      return {
          ErrorCode::refused,
          concat(
              "'", name, "' has ", unit.chunks.size(), " of its ", chunk_count,
              " chunks; a server has not written its file, or has another checkpoint_dir; give all servers the same")};
  }
  if (units_.empty()) return {ErrorCode::refused, "the version is empty; load another one"};
  return {};
}

const CheckpointUnit* CheckpointVersion::unit(const std::string& name) const {
  one_thread_.check();
  const auto found = units_.find(name);
  return found == units_.end() ? nullptr : &found->second.about;
}

Status CheckpointVersion::load(Place place) {
  if (loaded_ == std::pair(place.file, place.record)) return {};
  loaded_.reset();
  auto arrays = files_[place.file].read(place.record);
  if (!arrays.ok()) return arrays.status();
  loaded_arrays_ = std::move(arrays.value());
  loaded_ = std::pair(place.file, place.record);
  return {};
}

Result<RestoredPiece> CheckpointVersion::read(const std::string& name, std::uint64_t offset, std::uint64_t size_bytes) {
  one_thread_.check();
  const Unit& unit = units_.at(name);
  const wire::StoredUnit& about = unit.about.unit;
  RestoredPiece piece;
  const std::uint64_t first = offset / about.chunk_bytes;
  const std::uint64_t last = (offset + size_bytes - 1) / about.chunk_bytes;
  for (std::uint64_t chunk = first; chunk <= last; ++chunk) {
    const Place place = unit.chunks.at(static_cast<std::uint32_t>(chunk));
    const CheckpointRecord& record = files_[place.file].head().records[place.record];
    if (Status status = load(place); !status.ok()) return status;
    const std::size_t array_count = loaded_arrays_.size();
    if (chunk == first) piece.update_count = record.update_count;
    if (record.update_count != piece.update_count || (chunk > first && array_count != piece.arrays.size()))
      return of_another(files_[place.file].path(), "the chunks of '" + name + "' have different numbers of updates");
    const std::uint64_t begin = std::max(offset, about.chunk_offset(chunk));
    const std::uint64_t end = std::min(offset + size_bytes, about.chunk_offset(chunk) + about.chunk_size(chunk));
    for (std::size_t i = 0; i < array_count; ++i) {
      if (chunk == first) piece.arrays.emplace_back(size_bytes);
      std::memcpy(piece.arrays[i].data() + (begin - offset),
                  loaded_arrays_[i].data() + (begin - about.chunk_offset(chunk)), end - begin);
    }
  }
  return piece;
}

void CheckpointVersion::set_damaged_aside() const {
  one_thread_.check();
  for (const CheckpointFile& file : files_) {
    std::error_code gone;
    if (file.verify().code() == ErrorCode::mismatch)
      std::filesystem::rename(file.path(), file.path() + std::string(kDamaged), gone);
  }
}

void prune_checkpoints(const std::string& directory, const std::string& job, std::size_t keep,
                       const CheckpointOrigin& origin) {
  const auto versions = find_checkpoints(directory, job);
  if (!versions.ok()) return;  // the writer of the next checkpoint reports the error
  std::size_t complete_count = 0;
  for (const CheckpointPaths& version : versions.value()) {
    const bool abandoned = version.run < origin.run && version.version > origin.version;
    if (!abandoned && complete_count < std::max<std::size_t>(1, keep)) {
      complete_count += CheckpointVersion::open(version).ok() ? 1 : 0;
      continue;
    }
    std::error_code gone;  // ignored: another server may have removed the file already
    for (const std::string& path : version.paths) std::filesystem::remove(path, gone);
    for (const std::string& path : version.unfinished) std::filesystem::remove(path, gone);
  }
}

Result<std::vector<CheckpointListing>> list_checkpoints(const std::string& directory, bool verify) {
  const auto versions = find_checkpoints(directory, "");
  if (!versions.ok()) return versions.status();
  std::vector<CheckpointListing> listings;
  for (const CheckpointPaths& paths : versions.value()) {
    CheckpointListing& listing = listings.emplace_back();
    listing.job = checkpoint_job_name(decoded(paths.job));
    listing.version = paths.version;
    listing.run = paths.run;
    listing.file_count = paths.paths.size();
    std::error_code gone;
    for (const std::string& path : paths.paths)
      if (const auto size = std::filesystem::file_size(path, gone); !gone) listing.size_bytes += size;
    auto opened = CheckpointVersion::open(paths);
    Status status = opened.status();
    if (opened.ok()) {
      listing.unit_count = opened.value().unit_count();
      for (const CheckpointFile& file : opened.value().files())
        if (verify && status.ok()) status = file.verify();
    }
    listing.complete = status.ok();
    listing.problem = status.message();
  }
  return listings;
}

}  // namespace poseidon
