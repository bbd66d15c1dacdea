#!/bin/sh
# Prints the directory where built guests are kept.
set -eu
if [ -n "${WHIMBREL_CACHE:-}" ]; then
        echo "$WHIMBREL_CACHE"
elif mkdir -p /var/cache/whimbrel 2>/dev/null && [ -w /var/cache/whimbrel ]; then
        echo /var/cache/whimbrel
else
        echo "${XDG_CACHE_HOME:-$HOME/.cache}/whimbrel"
fi
