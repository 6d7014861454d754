// A rank in its own process, which a test can kill or stop.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <utility>
#include <vector>

#include "cpp/client/cluster.h"
#include "poseidon/client.h"

namespace poseidon::testing {

/// The process joins, adds the layers, runs `then` with its client, and then does nothing. Create it before the test
/// has threads, because it forks.
class ChildRank {
 public:
  ChildRank(
      const Options& options, const std::vector<Layer>& layers,
      const std::function<void(Client&)>& then = [](Client&) {})
      : pid_(::fork()) {
    if (pid_ != 0) return;
    auto client = Client::connect(options, nullptr, always);
    if (!client.ok() || !client.value()->add_layers(layers, false, always).ok()) ::_exit(1);
    then(*client.value());
    for (;;) ::pause();
  }
  ~ChildRank() {
    if (pid_ > 0) kill();
  }
  ChildRank(const ChildRank&) = delete;
  ChildRank& operator=(const ChildRank&) = delete;

  void kill() {
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, -1), nullptr, 0);
  }
  void stop() const { ::kill(pid_, SIGSTOP); }
  void go_on() const { ::kill(pid_, SIGCONT); }

 private:
  pid_t pid_;
};

}  // namespace poseidon::testing
