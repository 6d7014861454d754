#include "server/checkpoint/checkpoint_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <span>
#include <utility>

#include "base/crc32c.h"

namespace poseidon {

namespace {

constexpr std::size_t kBytesPerCall = std::size_t{1} << 30;  // Linux moves at most 2 GiB in one call

Status failed(const std::string& path, const char* what) {
  return {ErrorCode::unreachable, path + " could not be " + what + ": " + errno_text(errno)};
}

Status write_all(int fd, const std::string& path, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), std::min(bytes.size(), kBytesPerCall));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return failed(path, "written");
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  return {};
}

Status read_all(int fd, const std::string& path, std::uint64_t offset, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::pread(fd, bytes.data(), std::min(bytes.size(), kBytesPerCall), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return failed(path, "read");
    if (count == 0) return {ErrorCode::mismatch, path + ": the checkpoint file is damaged: it ends too early"};
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    offset += static_cast<std::uint64_t>(count);
  }
  return {};
}

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

Status write_content(int fd, const std::string& path, CheckpointSnapshot& snapshot) {
  for (std::size_t i = 0; i < snapshot.arrays.size(); ++i) {
    std::uint32_t checksum = 0;
    for (const auto& array : snapshot.arrays[i]) checksum = crc32c(array->span(), checksum);
    snapshot.head.records[i].checksum = checksum;
  }
  if (Status status = write_all(fd, path, bytes_of(encode_checkpoint_head(snapshot.head))); !status.ok()) return status;
  for (const auto& arrays : snapshot.arrays)
    for (const auto& array : arrays)
      if (Status status = write_all(fd, path, array->span()); !status.ok()) return status;
  if (Status status = write_all(fd, path, bytes_of(encode_checkpoint_trailer(snapshot.head))); !status.ok())
    return status;
  if (::fsync(fd) != 0) return failed(path, "written");
  return {};
}

/// Makes a rename safe on the disk, which it is only when its directory is.
Status sync_directory(const std::string& directory) {
  const FileDescriptor fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd || ::fsync(fd.get()) != 0) return failed(directory, "written");
  return {};
}

}  // namespace

Status write_checkpoint(const std::string& directory, const std::string& name, CheckpointSnapshot& snapshot) {
  const std::string path = directory + "/" + name;
  const std::string temporary = path + ".tmp";
  Status status;
  {
    const FileDescriptor fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, S_IRUSR | S_IWUSR));
    status = fd ? write_content(fd.get(), temporary, snapshot) : failed(temporary, "made");
  }
  if (status.ok() && std::rename(temporary.c_str(), path.c_str()) != 0) status = failed(path, "made");
  if (!status.ok()) {
    ::unlink(temporary.c_str());  // the unfinished file may be what fills the disk
    return status;
  }
  return sync_directory(directory);
}

CheckpointFile::CheckpointFile(std::string path, FileDescriptor fd, CheckpointHead head, std::uint64_t data_offset)
    : path_(std::move(path)), fd_(std::move(fd)), head_(std::move(head)) {
  offsets_.reserve(head_.records.size());
  for (const CheckpointRecord& record : head_.records) {
    offsets_.push_back(data_offset);
    data_offset += head_.data_bytes(record);
  }
}

Result<CheckpointFile> CheckpointFile::open(const std::string& path) {
  FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat about {};
  if (!fd || ::fstat(fd.get(), &about) != 0) return failed(path, "opened");
  const auto file_bytes = static_cast<std::uint64_t>(about.st_size);
  std::array<std::byte, kCheckpointStartBytes> start{};
  if (Status status = read_all(fd.get(), path, 0, start); !status.ok()) return status;
  const auto sizes = decode_checkpoint_start(start);
  if (!sizes.ok()) return sizes.status().with_context(path);
  if (sizes.value().file_bytes != file_bytes)
    return Status(ErrorCode::mismatch, concat(path, ": the checkpoint file is damaged: it has ", file_bytes,
                                              " bytes instead of ", sizes.value().file_bytes));
  Buffer bytes(sizes.value().head_bytes);
  if (Status status = read_all(fd.get(), path, 0, bytes.span()); !status.ok()) return status;
  auto head = decode_checkpoint_head(bytes.span());
  if (!head.ok()) return head.status().with_context(path);
  std::array<std::byte, kCheckpointTrailerBytes> trailer{};
  if (Status status = read_all(fd.get(), path, file_bytes - trailer.size(), trailer); !status.ok()) return status;
  if (Status status = check_checkpoint_trailer(head.value(), trailer); !status.ok()) return status.with_context(path);
  return CheckpointFile(path, std::move(fd), std::move(head.value()), sizes.value().head_bytes);
}

Result<std::vector<Buffer>> CheckpointFile::read(std::size_t index) const {
  const CheckpointRecord& record = head_.records[index];
  std::uint64_t offset = offsets_[index];
  std::uint32_t checksum = 0;
  std::vector<Buffer> arrays;
  for (std::uint32_t i = 0; i < record.array_count; ++i) {
    Buffer& array = arrays.emplace_back(head_.array_bytes(record));
    if (Status status = read_all(fd_.get(), path_, offset, array.span()); !status.ok()) return status;
    checksum = crc32c(array.span(), checksum);
    offset += array.size();
  }
  if (checksum != record.checksum)
    return Status(ErrorCode::mismatch, concat(path_, ": the checksum of chunk ", record.chunk, " of '",
                                              head_.units[record.unit].unit.name, "' is wrong"));
  return arrays;
}

Status CheckpointFile::verify() const {
  for (std::size_t i = 0; i < head_.records.size(); ++i)
    if (auto arrays = read(i); !arrays.ok()) return arrays.status();
  return {};
}

}  // namespace poseidon
