#include "transport/shm/local_socket.h"

#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <utility>

#include "base/pinned.h"
#include "base/random_bytes.h"

namespace poseidon::shm {

namespace {

/// Identifies the layout of the segment, which must be the same at both ends.
struct Greeting {
  std::array<char, 8> magic{'P', 'S', 'D', 'S', 'H', 'M', '0', '1'};
  std::uint64_t block_bytes = kBlockBytes;
  std::uint32_t block_count = kBlockCount;
  std::uint32_t descriptor_count = kDescriptorCount;
};

constexpr std::size_t kFileCount = 3;

/// The one message of a connection: a greeting, with room for the files.
struct Parcel : private Pinned {
  Greeting greeting;
  iovec bytes{&greeting, sizeof(greeting)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kFileCount * sizeof(int))> control{};
  msghdr message{};

  Parcel() {
    message.msg_iov = &bytes;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
  }
};

}  // namespace

Result<SocketName> socket_name(const std::string& text) {
  SocketName name;
  // An abstract name begins with a 0 byte and has no terminating 0.
  if (text.empty() || text.size() >= sizeof(name.address.sun_path)) {
    return Status(ErrorCode::invalid_argument, concat("'", text, "' is no name for shared memory: it must have 1 to ",
                                                      sizeof(name.address.sun_path) - 1, " bytes"));
  }
  name.address.sun_family = AF_UNIX;
  std::memcpy(name.address.sun_path + 1, text.data(), text.size());
  name.size_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  return name;
}

std::string free_name() {
  std::uint64_t number = 0;
  fill_with_random_bytes(std::as_writable_bytes(std::span(&number, 1)));
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "psd-%d-%016" PRIx64, static_cast<int>(::getpid()), number);
  return text.data();
}

FileDescriptor make_socket() {
  return FileDescriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

Result<pid_t> peer_process(int socket) {
  ucred peer{};
  socklen_t size_bytes = sizeof(peer);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size_bytes) != 0) {
    return Status(ErrorCode::refused, "the other process is unknown: " + errno_text(errno));
  }
  if (peer.uid != ::geteuid()) {
    return Status(
        ErrorCode::refused,
        concat("process ", peer.pid,
               " belongs to another user; start all processes of a machine as one user, or use transport=tcp"));
  }
  return peer.pid;
}

bool send_files(int socket, const SegmentFiles& files) {
  Parcel parcel;
  const std::array<int, kFileCount> fds{files.memory.get(), files.connector_wake.get(), files.acceptor_wake.get()};
  cmsghdr* const rights = CMSG_FIRSTHDR(&parcel.message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(fds));
  std::memcpy(CMSG_DATA(rights), fds.data(), sizeof(fds));
  return ::sendmsg(socket, &parcel.message, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(sizeof(Greeting));
}

Result<SegmentFiles> receive_files(int socket) {
  Parcel parcel;
  const ssize_t got = ::recvmsg(socket, &parcel.message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  // Take ownership before any check: the files that came must be closed in any case.
  std::array<FileDescriptor, kFileCount> received;
  std::size_t count = 0;
  for (const cmsghdr* part = got < 0 ? nullptr : CMSG_FIRSTHDR(&parcel.message); part != nullptr;
       part = CMSG_NXTHDR(&parcel.message, const_cast<cmsghdr*>(part))) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS || part->cmsg_len < CMSG_LEN(0)) continue;
    const std::size_t bytes = part->cmsg_len - CMSG_LEN(0);
    for (std::size_t at = 0; at + sizeof(int) <= bytes; at += sizeof(int), ++count) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + at, sizeof(fd));
      FileDescriptor file(fd);
      if (count < kFileCount) received[count] = std::move(file);  // padding has room for more than were asked for
    }
  }
  const Greeting expected;
  if (got != static_cast<ssize_t>(sizeof(expected)) ||
      std::memcmp(&parcel.greeting, &expected, sizeof(expected)) != 0 ||
      (parcel.message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 || count != kFileCount) {
    return Status(
        ErrorCode::mismatch,
        "the other process sets up shared memory in another way; install the same version of Poseidon in both");
  }
  return SegmentFiles{std::move(received[0]), std::move(received[1]), std::move(received[2])};
}

}  // namespace poseidon::shm
