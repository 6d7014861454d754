#include "base/descriptor_limit.h"

#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <system_error>

namespace poseidon {

namespace {

// Descriptors that the program itself may still open: data files, pipes to its loaders, other libraries' connections.
constexpr std::size_t kSpareCount = 512;

/// The number of open descriptors, or 0 if the system does not tell it. Linux tells it in the directory's size since
/// version 6.2.
std::size_t open_count() {
  struct stat about {};
  if (::stat("/proc/self/fd", &about) == 0 && about.st_size > 0) return static_cast<std::size_t>(about.st_size);
  std::error_code error;
  std::filesystem::directory_iterator open("/proc/self/fd", error);
  return error ? 0 : static_cast<std::size_t>(std::distance(begin(open), end(open)));
}

}  // namespace

Status make_room_for_descriptors(std::size_t more_count) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return {};
  const rlim_t needed = open_count() + more_count;
  const rlim_t wanted = std::min<rlim_t>(limit.rlim_max, needed + kSpareCount);
  if (limit.rlim_cur < wanted) {
    limit.rlim_cur = wanted;
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
  if (needed <= limit.rlim_max) return {};
  return {ErrorCode::invalid_argument,
          concat("a worker of this job opens ", more_count, " descriptors and this process may have ", limit.rlim_max,
                 "; raise its hard limit (`ulimit -Hn`, LimitNOFILE=) to ", needed + kSpareCount)};
}

}  // namespace poseidon
