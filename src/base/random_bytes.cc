#include "base/random_bytes.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "base/file_descriptor.h"
#include "base/world.h"

namespace poseidon {

void fill_with_random_bytes(std::span<std::byte> out) {
  if (World* const world = World::current()) return world->fill_with_random_bytes(out);
  // The kernel gives up to 256 bytes as a whole, or none while the machine is just starting.
  ssize_t got = -1;
  do {
    got = ::getrandom(out.data(), out.size(), 0);
  } while (got < 0 && errno == EINTR);
  if (got == static_cast<ssize_t>(out.size())) return;
  std::fprintf(stderr, "poseidon: getrandom: %s\n", errno_text(errno).c_str());
  std::abort();
}

}  // namespace poseidon
