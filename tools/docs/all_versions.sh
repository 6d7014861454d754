#!/usr/bin/env bash
# Builds the documentation of all released versions into build/site. Every tag vX.Y.Z that has documentation is built by
# its own tools/docs/build.sh, and then this version, if it has no tag.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p build/site

for tag in $(git tag --list 'v[0-9]*.[0-9]*.[0-9]*'); do
  tree=$PWD/build/docs/tags/$tag
  rm -rf "$tree" && git worktree prune
  git worktree add --quiet --detach "$tree" "$tag"
  if [ ! -x "$tree/tools/docs/build.sh" ]; then
    echo "$tag has no documentation to build" >&2
  elif "$tree/tools/docs/build.sh" && [ -d "$tree/build/site/${tag#v}" ]; then
    rm -rf "build/site/${tag#v}" && cp -r "$tree/build/site/${tag#v}" build/site/
  else
    echo "::warning::the documentation of $tag cannot be built, or is that of another version" >&2
  fi
  git worktree remove --force "$tree"
done
version=$(sed -n 's/^VERSION = "\(.*\)"/\1/p' python/poseidon/version.py)
[ -d "build/site/$version" ] || tools/docs/build.sh
python3 tools/docs/versions.py build/site
