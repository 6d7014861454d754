#include "base/host.h"

#include <unistd.h>

#include <array>
#include <fstream>

#include "poseidon/status.h"

namespace poseidon {

namespace {
constexpr std::size_t kHostNameBytes = 256;
}

std::string host_name() {
  std::array<char, kHostNameBytes> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "unknown";
  return name.data();
}

std::string host_and_port(const std::string& host, unsigned int port) {
  const bool v6 = host.find(':') != std::string::npos;
  return concat(v6 ? "[" + host + "]" : host, ":", port);
}

std::string boot_id() {
  std::string id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
  return id;
}

}  // namespace poseidon
