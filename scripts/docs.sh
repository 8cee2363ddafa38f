#!/usr/bin/env bash
# Build the docs site from the notebooks into _docs: with Quarto where it is installed, else with smalldocs.
# Exits non-zero, naming the file, if a notebook cannot be processed or has no page.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf _proc _docs
trap 'rm -rf _proc' EXIT
python scripts/docs.py process _proc
if command -v quarto >/dev/null; then
    (cd _proc && quarto render --no-cache)
else
    smalldocs render _proc --quiet
fi
mv _proc/_docs _docs
python scripts/docs.py finish _docs
