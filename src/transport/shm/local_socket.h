// Unix sockets of the shared-memory transport: names, who is at the other end, and passing descriptors.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>

#include <string>

#include "base/file_descriptor.h"
#include "poseidon/status.h"
#include "transport/shm/segment.h"

namespace poseidon::shm {

struct SocketName {
  sockaddr_un address{};
  socklen_t size_bytes = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

/// The abstract name; invalid_argument for text that is empty or longer than 107 bytes.
Result<SocketName> socket_name(const std::string& text);

/// A name that nobody else has: "psd-<pid>-<random>".
std::string free_name();

/// Nonblocking, keeps the borders of what is sent. Invalid, with errno set, on failure.
FileDescriptor make_socket();

/// The process at the other end of a connected socket; refused unless it belongs to this process's user.
Result<pid_t> peer_process(int socket);

/// Sends what Segment::open needs, in one piece. False, with errno set, on failure.
bool send_files(int socket, const SegmentFiles& files);
/// Receives it; mismatch when anything else arrives. Call when the socket is readable.
Result<SegmentFiles> receive_files(int socket);

}  // namespace poseidon::shm
