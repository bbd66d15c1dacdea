#!/bin/sh
# Licences, duplicate and banned crates, and where crates come from: cargo-deny's checks that need no network.
set -eu

cd "$(dirname "$0")/.."
if ! cargo deny --version >/dev/null 2>&1; then
        echo "deny: installing cargo-deny"
        cargo install --quiet --locked cargo-deny || {
                echo "SKIPPED: licences and bans: cargo-deny can't be installed"
                exit 0
        }
fi
# Licences of crates for other systems are looked at too, so they have to be here.
cargo fetch --quiet --locked
cargo deny --offline check bans licenses sources
