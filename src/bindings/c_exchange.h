// The C interface of a client, for plugins.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "poseidon/c_exchange.h"
#include "poseidon/client.h"

namespace poseidon::bindings {

/// What plugins get of one client, which must outlive it. Any thread.
class CExchange {
 public:
  explicit CExchange(Client& client);
  CExchange(const CExchange&) = delete;
  CExchange& operator=(const CExchange&) = delete;

  const PoseidonExchange& exchange() const { return exchange_; }
  Client& client() { return client_; }

  /// Makes a look known by the number that this returns: from 1, in the order of the calls. It must stay until it is
  /// removed.
  std::int64_t add_look(PoseidonLook* look);
  void remove_look(std::int64_t number);
  PoseidonLook* find_look(std::int64_t number);

 private:
  Client& client_;
  const PoseidonExchange exchange_;
  std::mutex mutex_;
  std::unordered_map<std::int64_t, PoseidonLook*> looks_;  // guarded by mutex_
  std::int64_t last_look_ = 0;
};

}  // namespace poseidon::bindings
