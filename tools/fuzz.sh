#!/bin/sh
# Runs every fuzz target for some seconds (60 unless told otherwise) and fails on the first crash.
#   tools/fuzz.sh [SECONDS]
# Seeds are the golden bytes of `wire`, or fuzz/seeds/TARGET; what is found on the way stays in fuzz/corpus.

set -eu
cd "$(dirname "$0")/.."
seconds=${1:-60}

fail() {
    echo "fuzz: $1" >&2
    exit 1
}

case $seconds in
'' | *[!0-9]*) fail "'$seconds' is not a number of seconds; usage: tools/fuzz.sh [SECONDS]" ;;
esac
cargo +nightly --version >/dev/null 2>&1 ||
    fail "nothing was fuzzed: libFuzzer needs a nightly Rust (rustup toolchain install nightly)"
if ! cargo +nightly fuzz --version >/dev/null 2>&1; then
    echo "fuzz: installing cargo-fuzz"
    cargo +nightly install --locked cargo-fuzz ||
        fail "nothing was fuzzed: cargo-fuzz could not be installed (cargo +nightly install --locked cargo-fuzz)"
fi

for target in $(cargo +nightly fuzz list --fuzz-dir fuzz); do
    echo "fuzz: $target for $seconds s"
    seeds=crates/wire/golden
    if [ -d "fuzz/seeds/$target" ]; then
        seeds=fuzz/seeds/$target
    fi
    mkdir -p "fuzz/corpus/$target"
    # A single allocation above 16 MiB is a crash: nothing that small should lead to it.
    cargo +nightly fuzz run --fuzz-dir fuzz "$target" "fuzz/corpus/$target" "$seeds" -- \
        -max_total_time="$seconds" -malloc_limit_mb=16 -timeout=5 -print_final_stats=1 ||
        fail "$target crashed; the input is in fuzz/artifacts/$target"
done
echo "fuzz: no crash in any target"
