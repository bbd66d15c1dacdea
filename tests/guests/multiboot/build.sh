#!/bin/sh
# Builds the self-checking multiboot guest and prints where it is. Does nothing
# when the sources did not change. Needs an x86-64 gcc and binutils, and ends with
# 77 where they are not there.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
cache=${WHIMBREL_CACHE:-$("$here/../cache.sh")}
out=$cache/multiboot-$(cat "$here/boot.S" "$here/guest.c" "$here/link.ld" "$here/build.sh" | sha256sum | cut -c1-16).elf

if [ ! -e "$out" ]; then
        for tool in "${CC:-gcc}" objcopy; do
                command -v "$tool" >/dev/null && continue
                echo "the bare-metal guest can't be built: no $tool (run \`make deps\`)" >&2
                exit 77
        done
        mkdir -p "$cache"
        work=$(mktemp -d "$cache/build.XXXXXX")
        trap 'rm -rf "$work"' EXIT
        # No SSE, no red zone: the timer interrupt saves only what it uses.
        ${CC:-gcc} -m64 -O2 -Wall -Wextra -Werror -ffreestanding -nostdlib -static -fno-pic -fno-pie -no-pie \
                -mno-red-zone -mgeneral-regs-only -fno-stack-protector -fcf-protection=none \
                -fno-asynchronous-unwind-tables -fno-tree-loop-distribute-patterns \
                -Wl,-T,"$here/link.ld" -Wl,--build-id=none -Wl,-z,noexecstack -Wl,--no-warn-rwx-segments \
                -o "$work/guest64" "$here/boot.S" "$here/guest.c" >&2
        # A multiboot loader takes 32-bit ELF only; every address is below 4 GiB.
        objcopy -O elf32-i386 "$work/guest64" "$work/guest"
        mv "$work/guest" "$out"
fi
echo "$out"
