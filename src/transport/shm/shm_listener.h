// ShmListener: a bound Unix socket that hands out flows.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "base/file_descriptor.h"
#include "transport/entrance.h"
#include "transport/transport.h"

namespace poseidon::shm {

class ShmListener final : public Listener {
 public:
  /// See Transport::listen.
  static Result<std::unique_ptr<Listener>> listen(Loop& loop, const std::string& address, const Admission& admission,
                                                  OnAccept on_accept);

  ShmListener(Loop& loop, FileDescriptor socket, std::string address, const Admission& admission, OnAccept on_accept);
  ~ShmListener() override;
  const std::string& address() const override { return address_; }

 private:
  /// A connection that has not sent its files yet.
  struct PendingConnection {
    FileDescriptor socket;
    std::string key_id;
    Loop::TimerId timer = 0;
  };

  void await_files(FileDescriptor socket, const std::string& key_id);
  void on_files(int socket);
  PendingConnection dismiss(int socket);

  Loop& loop_;
  const std::string address_;
  const OnAccept on_accept_;
  std::map<int, PendingConnection> pending_;  // by socket
  std::unique_ptr<Entrance> entrance_;
};

}  // namespace poseidon::shm
