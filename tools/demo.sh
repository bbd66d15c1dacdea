#!/bin/sh
# Moves a guest between two QEMUs on this host, to watch; ends all that it started.
# Installs and builds first what is missing. JSON=1: the last line is a JSON object.
#   tools/demo.sh [OPTIONS OF whimbrel demo]
set -eu
cd "$(dirname "$0")/.."

tools/deps.sh demo >&2
cargo build --release -p whimbrel

# Without a guest the demo takes its own, and says so.
if files=$(tests/guests/multiboot/build.sh); then
        set -- --guest "$(echo "$files" | sed -n 1p)" --firmware "$(echo "$files" | sed -n 2p)" "$@"
fi
if [ "${JSON:-0}" != 0 ]; then
        set -- --json "$@"
fi
exec cargo run --quiet --release -p whimbrel -- demo "$@"
