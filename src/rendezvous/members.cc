#include "rendezvous/members.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "base/version.h"

namespace poseidon {

namespace {

constexpr auto kSlice = std::chrono::milliseconds(200);
constexpr auto kFarewell = std::chrono::seconds(2);

std::string host_text(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  if (::getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return text.data();
}

/// The IPv4 (else IPv6) address of a device; empty when there is none.
std::string device_host(const std::string& device) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return "";
  std::string host;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = all; entry != nullptr && host.empty(); entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family || device != entry->ifa_name) continue;
      host = host_text(entry->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    }
  }
  ::freeifaddrs(all);
  return host;
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const auto& part : parts) text += (text.empty() ? "" : ",") + part;
  return text;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

using Facts = std::vector<std::pair<std::string, std::string>>;

/// What must be equal on all ranks, in the order in which differences are reported.
Facts shared_facts(const Options& options) {
  return {{"version", kVersionText},
          {"world_size", std::to_string(options.world_size)},
          {"servers", joined(options.servers)},
          {"flows", std::to_string(options.flows)},
          {"priority_classes", std::to_string(options.priority_classes)},
          {"assignment", options.assignment == Assignment::chunk ? "chunk" : "worker"},
          {"chunk_bytes", options.chunk_bytes == 0 ? "auto" : std::to_string(options.chunk_bytes)},
          {"small_bytes", std::to_string(options.small_bytes)},
          {"group_bytes", std::to_string(options.group_bytes)},
          {"schedule", options.schedule == Schedule::wait_free ? "wait_free" : "sequential"},
          {"partition", options.partition == Partition::balanced ? "balanced" : "coarse"}};
}

std::string to_text(const Member& mine, const Facts& facts) {
  std::string text = "host_id=" + mine.host_id + "\nserver_addresses=" + joined(mine.server_addresses) +
                     "\npeer_address=" + mine.peer_address +
                     "\nserver_shm_addresses=" + joined(mine.server_shm_addresses) +
                     "\npeer_shm_address=" + mine.peer_shm_address + "\n";
  for (const auto& [key, value] : facts) text += key + "=" + value + "\n";
  return text;
}

std::string value_of(const std::string& text, const std::string& key) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(key + "=")) return line.substr(key.size() + 1);
  return "nothing";
}

Member to_member(const std::string& text) {
  return {value_of(text, "host_id"), split(value_of(text, "server_addresses")), value_of(text, "peer_address"),
          split(value_of(text, "server_shm_addresses")), value_of(text, "peer_shm_address")};
}

std::string key_of(const Options& options, const std::string& what) { return "poseidon/" + options.job + "/" + what; }

std::string member_key(const Options& options, int rank) { return key_of(options, "member/" + std::to_string(rank)); }

Status missing(Store& store, const Options& options, int first) {
  std::string ranks;
  for (int rank = first; rank < options.world_size; ++rank)
    if (!store.get(member_key(options, rank), std::chrono::milliseconds(0)).ok())
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  return {ErrorCode::timeout, "rank " + std::to_string(options.rank) + " waited " +
                                  std::to_string(options.timeout.count()) + " ms for rank " + ranks + " of " +
                                  std::to_string(options.world_size) +
                                  ", which never arrived; check that every rank was started with the same MASTER_ADDR, "
                                  "MASTER_PORT and WORLD_SIZE, or raise POSEIDON_TIMEOUT"};
}

/// The first difference between what this rank and `rank` believe.
Status compare(const Options& options, int rank, const std::string& text, const Facts& facts) {
  for (const auto& [key, value] : facts) {
    if (const auto theirs = value_of(text, key); theirs != value)
      return {ErrorCode::mismatch, "ranks disagree on " + key + ": rank " + std::to_string(options.rank) + " has " +
                                       value + ", rank " + std::to_string(rank) + " has " + theirs +
                                       "; give all ranks the same value"};
  }
  return {};
}

/// Waits for one rank's text, and fails as soon as any rank says that it has failed.
Result<std::string> await_member(Store& store, const Options& options, int rank, Clock::time_point deadline,
                                 const std::function<bool()>& keep_waiting) {
  for (;;) {
    auto text = store.get(member_key(options, rank), kSlice);
    if (text.ok() || text.status().code() != ErrorCode::timeout) return text;
    if (auto failed = store.get(key_of(options, "failed"), std::chrono::milliseconds(0)); failed.ok())
      return Status(ErrorCode::aborted, failed.value());
    if (!keep_waiting()) return Status(ErrorCode::aborted, "interrupted while waiting for the other ranks");
    if (Clock::now() > deadline) return missing(store, options, rank);
  }
}

Result<std::vector<Member>> gather(Store& store, const Options& options, const Member& mine,
                                   const std::function<bool()>& keep_waiting) {
  const auto deadline = Clock::now() + options.timeout;
  const Facts facts = shared_facts(options);
  if (Status status = store.set(member_key(options, options.rank), to_text(mine, facts)); !status.ok()) return status;
  std::vector<Member> members;
  for (int rank = 0; rank < options.world_size; ++rank) {
    auto text = await_member(store, options, rank, deadline, keep_waiting);
    if (!text.ok()) return text.status();
    if (Status status = compare(options, rank, text.value(), facts); !status.ok()) return status;
    members.push_back(to_member(text.value()));
  }
  return members;
}

/// Lets the others learn why: rank 0's store ends with its process, so it waits a moment for them.
void leave_failed(Store& store, const Options& options, const Status& why) {
  // A rank whose store is gone cannot tell anyone: the results of these calls change nothing.
  (void)store.set(key_of(options, "failed"), "rank " + std::to_string(options.rank) + ": " + why.message());
  (void)store.set(key_of(options, "left/" + std::to_string(options.rank)), "1");
  if (options.rank != 0) return;
  const auto deadline = Clock::now() + kFarewell;
  for (int rank = 1; rank < options.world_size && Clock::now() < deadline; ++rank)
    (void)store.get(key_of(options, "left/" + std::to_string(rank)),
                    std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()));
}

}  // namespace

namespace {

Result<std::string> host_of_interface(const std::string& interface) {
  if (auto host = device_host(interface); !host.empty()) return host;
  in6_addr parsed{};
  if (::inet_pton(AF_INET, interface.c_str(), &parsed) == 1 || ::inet_pton(AF_INET6, interface.c_str(), &parsed) == 1)
    return interface;
  return Status(ErrorCode::unreachable,
                "interface '" + interface + "' is neither an address nor a network device of this host that has one");
}

/// The address that leads to master_addr.
Result<std::string> host_towards_master(const Options& options) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(options.master_addr.c_str(), "9", &hints, &found); error != 0)
    return Status(ErrorCode::unreachable,
                  "MASTER_ADDR '" + options.master_addr + "' does not resolve: " + gai_strerror(error));
  // Connecting a datagram socket sends nothing; it makes the kernel choose the interface.
  const FileDescriptor probe(::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage local{};
  socklen_t length = sizeof local;
  const bool chosen = ::connect(probe.get(), found->ai_addr, found->ai_addrlen) == 0 &&
                      ::getsockname(probe.get(), reinterpret_cast<sockaddr*>(&local), &length) == 0;
  ::freeaddrinfo(found);
  if (!chosen)
    return Status(ErrorCode::unreachable,
                  "no interface of this host leads to MASTER_ADDR '" + options.master_addr + "': " + errno_text(errno));
  return host_text(reinterpret_cast<const sockaddr*>(&local), length);
}

}  // namespace

Result<std::vector<std::string>> listen_hosts(const Options& options) {
  std::vector<std::string> hosts;
  for (const std::string& interface : options.interfaces) {
    auto host = host_of_interface(interface);
    if (!host.ok()) return host.status();
    hosts.push_back(std::move(host.value()));
  }
  if (!hosts.empty()) return hosts;
  auto host = host_towards_master(options);
  if (!host.ok()) return host.status();
  return std::vector{std::move(host.value())};
}

std::string host_id() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  std::error_code ignored;  // without /proc processes count as strangers only if their boot_id differs
  const auto network = std::filesystem::read_symlink("/proc/self/ns/net", ignored);
  return boot + " " + network.string() + " " + std::to_string(::getuid());
}

Result<std::vector<Member>> meet(Store& store, const Options& options, const Member& mine,
                                 const std::function<bool()>& keep_waiting) {
  auto members = gather(store, options, mine, keep_waiting);
  if (!members.ok()) leave_failed(store, options, members.status());
  return members;
}

}  // namespace poseidon
