// A TCP socket that is connected over loopback.
#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "conformance/transport_fixture.h"
#include "cpp/transport/own_sockets.h"
#include "transport/tcp/address.h"

namespace poseidon::testing {

class ConnectedSocket : public ::testing::Test {
 protected:
  void SetUp() override {
    listener_ = tcp::bind_and_listen(tcp::resolve(own_loopback()).value().front());
    socket_ = FileDescriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto where = tcp::local_address(listener_.get());
    ASSERT_EQ(::connect(socket_.get(), where.get(), where.size_bytes), 0);
  }

  FileDescriptor listener_;
  FileDescriptor socket_;
};

}  // namespace poseidon::testing
