// The functions behind poseidon/c_exchange.h. They know nothing of Python.
#include "bindings/c_exchange.h"

#include <algorithm>
#include <cstring>

#include "poseidon/scheme.h"

namespace poseidon::bindings {

namespace {

Client& client_of(void* client) { return static_cast<CExchange*>(client)->client(); }

std::span<std::byte> bytes(void* data, std::uint64_t size_bytes) {
  return {static_cast<std::byte*>(data), static_cast<std::size_t>(size_bytes)};
}

std::int32_t told(const Status& status, char* error, std::uint64_t error_size) {
  if (status.ok()) return 0;
  const std::string text(status.message());
  if (error_size > 0) {
    const std::size_t length = std::min<std::size_t>(text.size(), error_size - 1);
    std::memcpy(error, text.data(), length);
    error[length] = '\0';
  }
  return 1;
}

std::int32_t start(void* client, std::uint32_t layer, void* data, std::uint64_t size_bytes, std::uint32_t divisor,
                   std::uint64_t factor_count, char* error, std::uint64_t error_size) {
  return told(client_of(client).start(layer, bytes(data, size_bytes), divisor, factor_count), error, error_size);
}

std::int32_t start_absent(void* client, std::uint32_t layer, void* destination, std::uint64_t size_bytes,
                          std::uint32_t divisor, char* error, std::uint64_t error_size) {
  return told(client_of(client).start_absent(layer, bytes(destination, size_bytes), divisor), error, error_size);
}

std::int32_t start_factors(void* client, std::uint32_t layer, const void* left, const void* right, std::uint64_t count,
                           void* destination, std::uint64_t size_bytes, std::uint32_t divisor, char* error,
                           std::uint64_t error_size) {
  const FactorRows rows{static_cast<const std::byte*>(left), static_cast<const std::byte*>(right),
                        static_cast<std::size_t>(count)};
  const auto place = bytes(destination, size_bytes);
  return told(client_of(client).start_factors(layer, DType::float32, {rows}, place, divisor, false), error, error_size);
}

std::int32_t takes_factors(void* client, std::uint32_t layer) {
  return traits_of(client_of(client).next_scheme(layer)).takes_factors ? 1 : 0;
}

std::int32_t wait(void* client, std::uint32_t layer, char* error, std::uint64_t error_size) {
  return told(client_of(client).wait(layer, [] { return true; }), error, error_size);
}

std::int32_t done(void* client, std::uint32_t layer) { return client_of(client).done(layer) ? 1 : 0; }

PoseidonLook* look_of(void* client, std::int64_t number) { return static_cast<CExchange*>(client)->find_look(number); }

}  // namespace

CExchange::CExchange(Client& client)
    : client_(client), exchange_{POSEIDON_EXCHANGE_VERSION,
                                 0,
                                 this,
                                 &start,
                                 &start_absent,
                                 &start_factors,
                                 &takes_factors,
                                 &wait,
                                 &done,
                                 &look_of} {}

std::int64_t CExchange::add_look(PoseidonLook* look) {
  const std::lock_guard lock(mutex_);
  looks_.emplace(++last_look_, look);
  return last_look_;
}

void CExchange::remove_look(std::int64_t number) {
  const std::lock_guard lock(mutex_);
  looks_.erase(number);
}

PoseidonLook* CExchange::find_look(std::int64_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = looks_.find(number);
  return found == looks_.end() ? nullptr : found->second;
}

}  // namespace poseidon::bindings
