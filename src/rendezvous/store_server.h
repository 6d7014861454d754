// StoreServer: serves keys and values to processes that know the job's secret, on a separate thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "base/file_descriptor.h"
#include "base/pinned.h"
#include "poseidon/status.h"
#include "transport/admission.h"
#include "transport/byte_stream.h"
#include "transport/entrance.h"
#include "transport/loop.h"
#include "transport/tcp/address.h"

namespace poseidon {

/// Serves until it is destroyed. What it keeps, and what a connection may make it hold, is limited.
class StoreServer : private Pinned {
 public:
  static constexpr std::size_t kMostKeys = std::size_t{1} << 16;
  static constexpr std::size_t kMostStoredBytes = std::size_t{128} << 20;  // keys and values together
  static constexpr std::size_t kMostConnections = 4096;

  /// ErrorCode::unreachable, with the system's message: the address cannot be bound.
  static Result<std::unique_ptr<StoreServer>> listen(const tcp::SocketAddress& address, const Admission& admission);

  StoreServer(FileDescriptor socket, const Admission& admission);
  ~StoreServer();

 private:
  struct Connection {
    ByteStream stream;
    std::string in;
    std::string out;  // one answer at a time: a client that does not read gets no further answers
    std::size_t sent_bytes = 0;
    bool is_sending() const { return !out.empty() || stream.has_unsent(); }
  };

  void enter(ByteStream stream);
  void on_ready(int fd);
  static std::uint32_t wanted_events(const Connection& connection);
  static bool receive(Connection& connection);
  static bool flush(Connection& connection);
  bool answer_all(Connection& connection);
  void set(std::string_view key, std::string_view value, std::string& out);
  void get(std::string_view key, std::string& out) const;

  std::map<std::string, std::string, std::less<>> values_;
  std::size_t stored_bytes_ = 0;
  std::map<int, Connection> connections_;
  std::unique_ptr<Entrance> entrance_;
  Loop loop_{"psd-store"};
};

}  // namespace poseidon
