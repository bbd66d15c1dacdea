#!/bin/sh
# Installs what the demo, the tests and the benches need on Debian 12: QEMU from
# bookworm-backports, a C compiler, the packages of the Linux guest (not for the
# demo: `deps.sh demo`). Quick when all is there. Where it may not or can't install,
# it says what is missing and ends well: whoever needs it skips, and says so.
set -eu

needed_for=${1:-tests}

qemu_min=8

main() {
        packages=$(packages_missing)
        if [ -z "$packages" ] && have_guest; then
                echo "deps: all is there ($(${WHIMBREL_QEMU:-qemu-system-x86_64} --version | head -n 1))"
        elif ! command -v apt-get >/dev/null; then
                give_up "there is no apt-get; please install:" $packages
        elif [ "$(id -u)" != 0 ]; then
                [ -z "$packages" ] || give_up "not root, can't install:" $packages
        else
                install_packages $packages
        fi
        [ "$needed_for" != demo ] || return 0
        # Says itself what it lacks.
        "$(dirname "$0")/../tests/guests/linux/build.sh" >/dev/null || echo "deps: tests with the Linux guest will be skipped"
}

# Debian's packages for what is not there.
packages_missing() {
        [ "$(qemu_major)" -ge $qemu_min ] || echo qemu-system-x86
        command -v gcc >/dev/null || echo gcc
        command -v objcopy >/dev/null || echo binutils
        command -v make >/dev/null || echo make
        command -v xz >/dev/null || echo xz-utils
        command -v setpriv >/dev/null && command -v flock >/dev/null || echo util-linux
        find /usr/lib /usr/lib64 -maxdepth 2 -name libc.a 2>/dev/null | grep -q . || echo libc6-dev
}

# The QEMU that tests use: its major version, or 0.
qemu_major() {
        ${WHIMBREL_QEMU:-qemu-system-x86_64} --version 2>/dev/null |
                sed -n 's/^QEMU emulator version \([0-9]*\).*/\1/p' | grep . || echo 0
}

# Whether the Linux guest is built or its packages can be downloaded.
have_guest() {
        [ "$needed_for" != demo ] || return 0
        "$(dirname "$0")/../tests/guests/linux/build.sh" >/dev/null 2>&1
}

install_packages() {
        add_backports
        echo "deps: apt-get update"
        apt-get -qq update || give_up "apt-get update failed (no network?); missing:" "$@"
        [ $# != 0 ] || return 0
        echo "deps: installing $*"
        suite=
        ! is_bookworm || suite="-t bookworm-backports"
        DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends $suite install "$@" ||
                give_up "apt-get install failed; missing:" "$@"
}

# Debian 12 itself has QEMU 7.2, which does not say where guest RAM lies.
add_backports() {
        is_bookworm || return 0
        ! grep -rqs 'bookworm-backports' /etc/apt/sources.list /etc/apt/sources.list.d || return 0
        echo "deps: adding bookworm-backports to apt's sources"
        cat >/etc/apt/sources.list.d/bookworm-backports.sources <<SOURCES
Types: deb
URIs: http://deb.debian.org/debian
Suites: bookworm-backports
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
SOURCES
}

is_bookworm() {
        grep -qs '^VERSION_CODENAME=bookworm' /etc/os-release
}

give_up() {
        echo "deps: $*" >&2
        exit 0
}

main
