#!/bin/sh
# Builds the self-checking multiboot guest and a firmware that boots it fast, and
# prints where they are. Does nothing
# when the sources did not change. Needs an x86-64 gcc and binutils, and ends with
# 77 where they are not there.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
cache=${WHIMBREL_CACHE:-$("$here/../cache.sh")}
out=$cache/multiboot-$(cat "$here"/*.S "$here"/*.c "$here"/*.ld "$here/build.sh" | sha256sum | cut -c1-16)

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
        bare="-O2 -Wall -Wextra -Werror -ffreestanding -nostdlib -static -fno-pic -fno-pie -no-pie -mno-red-zone
              -mgeneral-regs-only -fno-stack-protector -fcf-protection=none -fno-asynchronous-unwind-tables
              -fno-tree-loop-distribute-patterns -Wl,--build-id=none -Wl,--no-warn-rwx-segments"
        mkdir "$work/out"
        ${CC:-gcc} -m64 $bare -Wl,-T,"$here/guest.ld" -o "$work/guest" "$here/boot.S" "$here/guest.c" >&2
        # A multiboot loader takes 32-bit ELF only; every address is below 4 GiB.
        objcopy -O elf32-i386 "$work/guest" "$work/out/guest"
        ${CC:-gcc} -m32 -march=i686 $bare -Wl,-T,"$here/firmware.ld" -o "$work/firmware" \
                "$here/reset.S" "$here/firmware.c" >&2
        objcopy -O binary "$work/firmware" "$work/out/firmware"
        # Of two builds at once the first wins; they are the same.
        mv -T "$work/out" "$out" 2>/dev/null || [ -e "$out/guest" ]
fi
echo "$out/guest"
echo "$out/firmware"
