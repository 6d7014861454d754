#include "base/invariant.h"

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace poseidon {

namespace {

/// The path of a file without what lies above the tree of the sources.
std::string_view in_tree(std::string_view file) {
  for (const std::string_view folder : {"/src/", "/include/", "/tests/"})
    if (const auto at = file.rfind(folder); at != std::string_view::npos) return file.substr(at + 1);
  return file;
}

}  // namespace

void break_down(const char* text, const char* file, int line) {
  const std::string_view place = in_tree(file);
  std::fprintf(stderr, "poseidon: broken invariant at %.*s:%d: %s. This is a defect of the library.\n",
               static_cast<int>(place.size()), place.data(), line, text);
  std::abort();
}

}  // namespace poseidon
