#!/usr/bin/env bash
# Checks the workflows, the forms and CITATION.cff. Exits with 75 if the tools cannot be had. actionlint runs, too, where
# it is installed: its package on PyPI fetches a program from elsewhere.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=build/release/venv

[ -x $venv/bin/python ] || "${PYTHON:-python3}" -m venv $venv || exit 75
$venv/bin/python -m pip --disable-pip-version-check -q install -r tools/release/requirements.txt || exit 75
PATH="$PWD/$venv/bin:$PATH"

yamllint --strict -c tools/release/yamllint.yml .github CITATION.cff
schema() { check-jsonschema --builtin-schema "vendor.$1" "${@:2}"; }
schema github-workflows .github/workflows/*.yml
check-jsonschema --builtin-schema custom.github-workflows-require-timeout .github/workflows/*.yml
schema github-issue-config .github/ISSUE_TEMPLATE/config.yml
for form in .github/ISSUE_TEMPLATE/*.yml; do
  [ "${form##*/}" = config.yml ] || schema github-issue-forms "$form"
done
schema dependabot .github/dependabot.yml
schema citation-file-format CITATION.cff
zizmor --offline --quiet --persona=pedantic .github
if command -v actionlint >/dev/null; then actionlint; else echo "actionlint is not installed: skipped" >&2; fi
