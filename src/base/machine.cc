#include "poseidon/machine.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string_view>
#include <vector>

namespace poseidon {

namespace {

namespace fs = std::filesystem;

/// A hierarchy of control groups: where it is mounted, which of its groups is visible there, and the process's group.
struct Hierarchy {
  fs::path mounted;
  std::string top;
  std::string own;
  bool unified = false;  // version 2
};

// A kernel with no limit says a number near the largest of its words, not "max", in version 1.
constexpr std::size_t kNoLimit = std::size_t{1} << 62;

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

bool has(const std::string& list, std::string_view name) {
  const auto parts = split(list, ',');
  return std::ranges::find(parts, name) != parts.end();
}

/// The process's group, by /proc/self/cgroup, whose lines are ID:CONTROLLERS:PATH; version 2 names no controllers.
std::string own_group(const std::string& root, std::string_view controller, bool unified) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = line.substr(first + 1, second - first - 1);
    if (unified ? names.empty() : has(names, controller)) return line.substr(second + 1);
  }
  return "/";
}

/// The mounted hierarchies that may have the controller, by /proc/self/mountinfo.
std::vector<Hierarchy> hierarchies(const std::string& root, std::string_view controller) {
  std::vector<Hierarchy> found;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const auto middle = line.find(" - ");
    if (middle == std::string::npos) continue;
    const auto left = split(line.substr(0, middle), ' ');
    const auto right = split(line.substr(middle + 3), ' ');
    if (left.size() < 5 || right.size() < 3) continue;
    const bool unified = right[0] == "cgroup2";
    if (!unified && (right[0] != "cgroup" || !has(right[2], controller))) continue;
    found.push_back({root + left[4], left[3], own_group(root, controller, unified), unified});
  }
  if (found.empty())  // without /proc: where nearly all systems have them
    for (const std::string& place : {std::string(), "/" + std::string(controller)})
      found.push_back({root + "/sys/fs/cgroup" + place, "/", "/", place.empty()});
  return found;
}

/// The folders of the process's group and of those above it. Where a container's own group is mounted as the top one,
/// the path in /proc may be that of the host, and the mount itself is the process's group.
std::vector<fs::path> folders(const Hierarchy& hierarchy) {
  const std::string top = hierarchy.top == "/" ? "" : hierarchy.top;
  const bool below = hierarchy.own.starts_with(top + "/") || hierarchy.own == top;
  std::string rest = below ? hierarchy.own.substr(top.size()) : "";
  std::vector<fs::path> found{hierarchy.mounted};
  fs::path folder = hierarchy.mounted;
  for (const auto& part : split(rest, '/')) {
    if (part.empty()) continue;
    if (part == "..") return found;  // a group outside of what is visible
    folder /= part;
    found.push_back(folder);
  }
  return found;
}

std::optional<double> number_in(const fs::path& file) {
  double value = 0;
  if (std::ifstream(file) >> value) return value;  // "max" where there is no limit
  return std::nullopt;
}

/// The least of what `limit_of` finds in any folder that counts.
std::optional<double> least(const std::string& root, std::string_view controller,
                            const std::function<std::optional<double>(const fs::path&, bool unified)>& limit_of) {
  std::optional<double> found;
  for (const auto& hierarchy : hierarchies(root, controller))
    for (const auto& folder : folders(hierarchy))
      if (const auto limit = limit_of(folder, hierarchy.unified); limit && (!found || *limit < *found)) found = limit;
  return found;
}

std::optional<double> memory_of(const fs::path& folder, bool unified) {
  const auto limit = number_in(folder / (unified ? "memory.max" : "memory.limit_in_bytes"));
  return limit && *limit > 0 && *limit < static_cast<double>(kNoLimit) ? limit : std::nullopt;
}

std::optional<double> processors_of(const fs::path& folder, bool unified) {
  double quota = 0;
  double period = 0;
  if (unified) {
    if (!(std::ifstream(folder / "cpu.max") >> quota >> period)) return std::nullopt;
  } else {
    quota = number_in(folder / "cpu.cfs_quota_us").value_or(-1);
    period = number_in(folder / "cpu.cfs_period_us").value_or(0);
  }
  if (quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

}  // namespace

std::optional<std::size_t> container_memory_bytes(const std::string& root) {
  const auto limit = least(root, "memory", memory_of);
  if (!limit) return std::nullopt;
  return static_cast<std::size_t>(*limit);
}

std::optional<double> container_processors(const std::string& root) { return least(root, "cpu", processors_of); }

}  // namespace poseidon
