#include "transport/shm/segment.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <new>
#include <string>
#include <utility>

namespace poseidon::shm {

namespace {

// The alignment of huge pages, so that an area can consist of them.
constexpr std::size_t kAlignmentBytes = 2u << 20;
constexpr std::size_t kLaneBytes = (sizeof(Lane) + 4095) / 4096 * 4096;
constexpr std::size_t kAreasAt = (2 * kLaneBytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
constexpr std::size_t kSegmentBytes = kAreasAt + 2 * kAreaBytes;
// These seals keep each process from shrinking the memory while the other uses it, which would cause a SIGBUS.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

Status system_error(const char* what) {
  return {ErrorCode::unreachable, std::string("shared memory: ") + what + ": " + errno_text(errno)};
}

/// Returns the mapping, or null with errno set.
std::byte* map(int memory) {
  void* const mapped = ::mmap(nullptr, kSegmentBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  return mapped == MAP_FAILED ? nullptr : static_cast<std::byte*>(mapped);
}

Status check_memory(int memory) {
  const int seals = ::fcntl(memory, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) return {ErrorCode::mismatch, "shared memory is not sealed"};
  struct stat found {};
  if (::fstat(memory, &found) != 0) return system_error("fstat");
  if (found.st_size != static_cast<off_t>(kSegmentBytes)) {
    return {ErrorCode::mismatch, concat("shared memory of ", found.st_size, " bytes instead of ", kSegmentBytes)};
  }
  return {};
}

}  // namespace

Result<SegmentFiles> Segment::make_files() {
  SegmentFiles files;
  files.memory = FileDescriptor(::memfd_create("poseidon", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!files.memory) return system_error("memfd_create");
  if (::ftruncate(files.memory.get(), static_cast<off_t>(kSegmentBytes)) != 0) return system_error("ftruncate");
  if (::fcntl(files.memory.get(), F_ADD_SEALS, kSeals) != 0) return system_error("F_ADD_SEALS");
  for (FileDescriptor* wake : {&files.connector_wake, &files.acceptor_wake}) {
    *wake = FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!*wake) return system_error("eventfd");
  }
  return Result<SegmentFiles>(std::move(files));
}

Result<std::shared_ptr<Segment>> Segment::open(SegmentFiles files, bool connector) {
  if (Status status = check_memory(files.memory.get()); !status.ok()) return status;
  for (const FileDescriptor* wake : {&files.connector_wake, &files.acceptor_wake}) {
    // Neither a read nor a write may block, whatever file the other process has sent.
    if (::fcntl(wake->get(), F_SETFL, O_NONBLOCK) != 0) return system_error("O_NONBLOCK");
  }
  std::byte* const memory = map(files.memory.get());
  if (memory == nullptr) return system_error("mmap");
  files.memory.reset();
  return std::make_shared<Segment>(std::move(files), memory, connector);
}

Segment::Segment(SegmentFiles files, std::byte* memory, bool connector)
    : files_(std::move(files)), memory_(memory), connector_(connector) {}

Segment::~Segment() { ::munmap(memory_, kSegmentBytes); }

Lane* Segment::lane(std::size_t index) const {
  return std::launder(reinterpret_cast<Lane*>(memory_ + index * kLaneBytes));
}

std::span<std::byte> Segment::area(std::size_t index) const {
  return {memory_ + kAreasAt + index * kAreaBytes, kAreaBytes};
}

void Segment::wake_peer(std::atomic<std::uint32_t>& asleep) const {
  if (asleep.load() == 0 || asleep.exchange(0) == 0) return;
  const int wake = (connector_ ? files_.acceptor_wake : files_.connector_wake).get();
  const std::uint64_t one = 1;
  // EAGAIN means that the counter is full. Then the other side is being woken already.
  while (::write(wake, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

}  // namespace poseidon::shm
