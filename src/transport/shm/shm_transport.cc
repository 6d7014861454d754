#include "transport/shm/shm_transport.h"

#include <cerrno>
#include <utility>

#include "transport/shm/local_socket.h"
#include "transport/shm/segment.h"
#include "transport/shm/shm_connector.h"
#include "transport/shm/shm_listener.h"

namespace poseidon {

namespace {

class ShmTransport final : public Transport {
 public:
  explicit ShmTransport(Admission admission) : admission_(std::move(admission)) {
    admission_.tls.reset();  // TLS is off, because nothing crosses a network
  }

  Result<std::unique_ptr<Listener>> listen(Loop& loop, const std::string& address, OnAccept on_accept) override {
    return shm::ShmListener::listen(loop, address, admission_, std::move(on_accept));
  }

  void connect(Loop& loop, const std::string& address, Clock::time_point deadline, OnConnect done) override {
    const auto name = shm::socket_name(address);
    if (!name.ok()) return cannot_connect(loop, std::move(done), name.status());
    auto connector =
        std::make_shared<shm::ShmConnector>(loop, address, name.value(), admission_, deadline, std::move(done));
    loop.post([connector] { connector->attempt(); });
  }

 private:
  Admission admission_;
};

}  // namespace

Status check_shared_memory() {
  if (!shm::make_socket()) return {ErrorCode::unreachable, "shared memory: socket: " + errno_text(errno)};
  auto files = shm::Segment::make_files();
  if (!files.ok()) return files.status();
  return shm::Segment::open(std::move(files.value()), true).status();
}

std::unique_ptr<Transport> make_shm_transport(const Admission& admission) {
  return std::make_unique<ShmTransport>(admission);
}

}  // namespace poseidon
