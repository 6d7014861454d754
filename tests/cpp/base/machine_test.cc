// Limits of containers: both versions of control groups, nested ones, and what a process does not see.
#include "poseidon/machine.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "cpp/base/temporary_directory.h"

namespace poseidon::testing {
namespace {

namespace fs = std::filesystem;

/// A system's files below a folder.
class Containers : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) const {
    const fs::path path = root() + name;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  std::string root() const { return folder_.path(); }

  TemporaryDirectory folder_;
};

TEST_F(Containers, WithoutAnyFileThereIsNoLimit) {
  EXPECT_FALSE(container_memory_bytes(root()));
  EXPECT_FALSE(container_processors(root()));
}

TEST_F(Containers, Version2CountsTheGroupAndAllAboveIt) {
  write("/proc/self/cgroup", "0::/system.slice/job.scope\n");
  write("/proc/self/mountinfo", "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n");
  write("/sys/fs/cgroup/system.slice/job.scope/memory.max", "max\n");
  write("/sys/fs/cgroup/system.slice/job.scope/cpu.max", "250000 100000\n");
  write("/sys/fs/cgroup/system.slice/memory.max", "1073741824\n");
  write("/sys/fs/cgroup/system.slice/cpu.max", "max 100000\n");
  write("/sys/fs/cgroup/other.slice/memory.max", "4096\n");
  EXPECT_EQ(container_memory_bytes(root()), 1073741824u);
  EXPECT_EQ(container_processors(root()), 2.5);
  write("/sys/fs/cgroup/system.slice/cpu.max", "50000 100000\n");
  EXPECT_EQ(container_processors(root()), 0.5) << "the group above has less";
}

TEST_F(Containers, Version1HasAMountForEachController) {
  write("/proc/self/cgroup", "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n");
  write("/proc/self/mountinfo",
        "31 24 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "32 24 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "536870912\n");
  write("/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us", "150000\n");
  write("/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(container_memory_bytes(root()), 536870912u);
  EXPECT_EQ(container_processors(root()), 1.5);
  write("/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us", "-1\n");
  write("/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_FALSE(container_memory_bytes(root())) << "no limit is a large number";
  EXPECT_FALSE(container_processors(root()));
}

TEST_F(Containers, AContainerWhoseOwnGroupIsMountedAsTheTop) {
  // The path is the host's, and only the container's own group is visible.
  write("/proc/self/cgroup", "5:memory:/docker/abc/inner\n0::/../sibling\n");
  write("/proc/self/mountinfo",
        "31 24 0:27 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        "33 24 0:29 / /sys/fs/cgroup/unified ro - cgroup2 cgroup2 rw\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2097152\n");
  write("/sys/fs/cgroup/memory/inner/memory.limit_in_bytes", "1048576\n");
  write("/sys/fs/cgroup/unified/cpu.max", "300000 100000\n");
  EXPECT_EQ(container_memory_bytes(root()), 1048576u);
  EXPECT_EQ(container_processors(root()), 3.0);
  write("/proc/self/cgroup", "5:memory:/kubepods/pod1\n");
  EXPECT_EQ(container_memory_bytes(root()), 2097152u) << "a path that is not below the mount";
}

TEST_F(Containers, WithoutProcTheUsualPlacesCount) {
  write("/sys/fs/cgroup/memory.max", "8388608\n");
  write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "400000\n");
  write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(container_memory_bytes(root()), 8388608u);
  EXPECT_EQ(container_processors(root()), 4.0);
}

}  // namespace
}  // namespace poseidon::testing
