// Unix sockets of the shared-memory transport: their names, the process at the other end, and passing of file
// descriptors.
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

/// Returns the abstract name. ErrorCode::invalid_argument: the text is empty or longer than 107 bytes.
Result<SocketName> socket_name(const std::string& text);

/// Returns a name that nobody else has: "psd-<pid>-<random>".
std::string free_name();

/// Returns a nonblocking socket that keeps message boundaries. On failure the result is invalid and errno is set.
FileDescriptor make_socket();

/// Returns the process at the other end of a connected socket. ErrorCode::refused: it belongs to another user.
Result<pid_t> peer_process(int socket);

/// Sends what Segment::open needs, in one message. Returns false, with errno set, on failure.
bool send_files(int socket, const SegmentFiles& files);
/// Receives the files. ErrorCode::mismatch: anything else has arrived. Call it when the socket is readable.
Result<SegmentFiles> receive_files(int socket);

}  // namespace poseidon::shm
