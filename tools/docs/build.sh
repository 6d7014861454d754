#!/usr/bin/env bash
# Builds the documentation of this version into build/site/VERSION, beside those of other versions that lie there, and
# checks every link in it. Poseidon itself need not be built. Exits with 75 if packages cannot be had.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=build/docs/venv

command -v npm >/dev/null || {
  echo "make docs needs npm, for the scripts of the site: on Debian and Ubuntu, apt-get install npm" >&2
  exit 75
}
mkdir -p build/docs
[ -x $venv/bin/python ] || "${PYTHON:-python3}" -m venv $venv || exit 75
$venv/bin/python -m pip --disable-pip-version-check -q install -r tools/docs/requirements.txt || exit 75
# The theme would load these from another server; a site of its own has them.
for package in mermaid@11 iframe-worker@1; do
  [ -d "build/docs/$package" ] && continue
  archive=$(cd build/docs && npm pack --silent "$package") || exit 75
  mkdir "build/docs/$package"
  tar -xzf "build/docs/$archive" -C "build/docs/$package" --strip-components=1
  rm "build/docs/$archive"
done
version=$(sed -n 's/^VERSION = "\(.*\)"/\1/p' python/poseidon/version.py)
NO_MKDOCS_2_WARNING=1 $venv/bin/python -m mkdocs build --strict --quiet --site-dir "build/site/$version"
$venv/bin/python tools/docs/versions.py build/site
$venv/bin/python tools/docs/check_site.py "build/site/$version"
echo "file://$PWD/build/site/$version/index.html"
