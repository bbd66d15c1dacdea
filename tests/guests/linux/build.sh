#!/bin/sh
# Builds the Linux guest from Debian's cloud kernel, Debian's Redis and our own
# init, and prints where its kernel and its initramfs are. Does nothing when the
# sources did not change; packages are downloaded once. Needs no root. Ends with
# 77, and says what is missing, where it can't be built.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
cache=${WHIMBREL_CACHE:-$("$here/../cache.sh")}
packages=$cache/packages
out=$cache/linux-$(cat "$here"/*.c "$here"/*.h "$here/build.sh" | sha256sum | cut -c1-16)

modules="virtio_pci virtio_blk virtio_balloon virtio_net"

main() {
        if [ ! -e "$out/initramfs" ]; then
                mkdir -p "$packages"
                # Tests in several processes may ask at once.
                exec 9>"$cache/lock"
                flock 9
                [ -e "$out/initramfs" ] || build
        fi
        echo "$out/vmlinuz"
        echo "$out/initramfs"
}

build() {
        work=$(mktemp -d "$cache/build.XXXXXX")
        trap 'rm -rf "$work"' EXIT
        command -v dpkg-deb >/dev/null && command -v apt-get >/dev/null || missing "not a Debian: no dpkg-deb or apt-get"
        root=$work/root
        mkdir -p "$root/modules" "$root/dev" "$work/kernel" "$work/out"

        ${CC:-gcc} -static -O2 -Wall -Wextra -Werror -pthread -o "$root/init" "$here"/*.c >&2 ||
                missing "can't compile a static program (gcc, libc6-dev)"
        unpack "$(kernel_package)" "$work/kernel"
        module_count=10
        for module in $modules; do
                add_module "$module"
        done
        for package in redis-server redis-tools $(libraries_of redis-tools); do
                unpack "$package" "$root"
        done
        rm -rf "$root"/usr/share "$root"/etc "$root"/var "$root"/sbin "$root"/usr/sbin "$root"/usr/lib/*/gconv

        cp "$work"/kernel/boot/vmlinuz-* "$work/out/vmlinuz"
        archive "$root" >"$work/out/initramfs"
        rm -rf "$out"
        mv "$work/out" "$out"
}

missing() {
        echo "the Linux guest can't be built: $*" >&2
        exit 77
}

# The real name behind the meta package.
kernel_package() {
        found=$(ls "$packages" | sed -n 's/^\(linux-image-[0-9].*-cloud-amd64\)_.*/\1/p' | head -n 1)
        [ -n "$found" ] || found=$(apt-cache depends linux-image-cloud-amd64 2>/dev/null |
                sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
        [ -n "$found" ] || missing "no package linux-image-cloud-amd64 in apt's lists (run \`make deps\`)"
        echo "$found"
}

# Adds a module after those that it needs, with a number that keeps the order.
add_module() {
        ! ls "$root"/modules/*-"$1.ko" >/dev/null 2>&1 || return 0
        file=$(find "$work/kernel" -name "$1.ko*" | head -n 1)
        case $file in
        '') missing "no module $1 in the kernel package" ;;
        *.xz) xz -d "$file" && file=${file%.xz} ;;
        esac
        for need in $(tr '\0' '\n' <"$file" | sed -n 's/^depends=//p' | tr , ' '); do
                add_module "$need"
        done
        cp "$(find "$work/kernel" -name "$1.ko")" "$root/modules/$module_count-$1.ko"
        module_count=$((module_count + 1))
}

# All libraries that a package needs, directly or not. Kept, to be had without apt's lists too.
libraries_of() {
        list=$packages/$1.libraries
        if [ ! -s "$list" ]; then
                all=
                next=$1
                while [ -n "$next" ]; do
                        # Only what a package names first: behind a bar stands what could do as well.
                        next=$(apt-cache depends --no-recommends --no-suggests $next 2>/dev/null |
                                sed -n 's/^ *\(Pre\)\{0,1\}Depends: \(lib[^:]*\).*/\2/p' | sort -u |
                                while read -r name; do
                                        case " $all " in *" $name "*) ;; *) printf '%s ' "$name" ;; esac
                                done)
                        all="$all $next"
                done
                [ -n "$all" ] || missing "no package $1 in apt's lists (run \`make deps\`)"
                echo $all >"$list.new"
                mv "$list.new" "$list"
        fi
        cat "$list"
}

# Unpacks a package that was downloaded before, or is downloaded now.
unpack() {
        file=$(ls "$packages/$1"_*.deb 2>/dev/null | head -n 1)
        if [ -z "$file" ]; then
                user=
                [ "$(id -u)" != 0 ] || user="-o APT::Sandbox::User=root"
                (cd "$packages" && apt-get -qq $user download "$1") >&2 ||
                        missing "can't download the package $1 (no network, or apt's lists are old: run \`make deps\`)"
                file=$(ls "$packages/$1"_*.deb | head -n 1)
        fi
        dpkg-deb -x "$file" "$2"
}

# An archive in cpio's "newc" format, which is what the kernel unpacks.
archive() {
        cd "$1"
        inode=1
        find . | sort | while read -r path; do
                entry "$inode" "${path#./}"
                inode=$((inode + 1))
        done
        entry 0 'TRAILER!!!'
}

entry() {
        size=0
        target=
        if [ "$2" = 'TRAILER!!!' ]; then
                mode=0
        elif [ -L "$2" ]; then
                mode=120777
                target=$(readlink "$2")
                size=${#target}
        elif [ -d "$2" ]; then
                mode=40755
        else
                mode=100755
                size=$(stat -c %s "$2")
        fi
        printf '070701%08X%08X00000000000000000000000100000000%08X00000000000000000000000000000000%08X00000000%s\0' \
                "$1" "0$mode" "$size" $((${#2} + 1)) "$2"
        pad $((110 + ${#2} + 1))
        if [ -n "$target" ]; then
                printf %s "$target"
        elif [ "$size" != 0 ]; then
                cat "$2"
        fi
        pad "$size"
}

# To a multiple of 4 bytes.
pad() {
        case $(($1 % 4)) in
        1) printf '\0\0\0' ;;
        2) printf '\0\0' ;;
        3) printf '\0' ;;
        esac
}

main
