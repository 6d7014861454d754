// Pinned: a base of classes whose objects stay where they are.
#pragma once

namespace poseidon {

/// What derives from it is neither copied nor moved.
class Pinned {
 public:
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 protected:
  Pinned() = default;
  ~Pinned() = default;
};

}  // namespace poseidon
