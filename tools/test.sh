#!/bin/sh
# The whole test suite. Ends with what was skipped, and why.
set -eu

cd "$(dirname "$0")/.."
tools/deps.sh
skipped=$(mktemp)
trap 'rm -f "$skipped"' EXIT
status=0
cargo build --workspace || exit
WHIMBREL_SKIPPED=$skipped cargo test --workspace --no-fail-fast || status=$?
if [ -s "$skipped" ]; then
        echo
        echo "Skipped on this machine:"
        sort -u "$skipped" | sed 's/^SKIPPED: /  /'
fi
exit $status
