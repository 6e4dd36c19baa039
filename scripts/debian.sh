#!/usr/bin/env bash
# Usage: bash scripts/debian.sh COMMAND...: runs a command in a copy of this checkout, on a newer Debian than this one.
# Root is needed. On first use debootstrap makes the folder .debian-trixie, of some 400 MB, which holds that Debian.
# Packages that a command installs stay there for the next call; each call makes a new copy of the checkout. Remove the
# folder to start again.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

suite=trixie
tree=$checkout/.debian-$suite
[ "$#" -gt 0 ] || fail "give the command, such as: bash scripts/debian.sh python3 --version"
[ "$(id -u)" = 0 ] || fail "a Debian tree can be made by root only"
command -v debootstrap >/dev/null || fail "debootstrap is not installed (Debian: apt install debootstrap)"
if [ ! -f "$tree/complete" ]; then
    rm -rf "$tree"
    run debootstrap --variant=minbase \
        --include=python3,python3-venv,python3-dev,gcc,libc6-dev,ca-certificates,git,iproute2,procps \
        "$suite" "$tree" >&2
    : >"$tree/complete"
fi
cp -L /etc/resolv.conf /etc/hosts "$tree/etc/" # the names, the network and the certificates are those of this machine
cp -L /etc/ssl/certs/ca-certificates.crt "$tree/etc/ssl/certs/"
rm -rf "$tree/checkout"
mkdir "$tree/checkout"
cd "$checkout"
git ls-files -z --cached --others --exclude-standard | tar --null --ignore-failed-read -T - -cf - | tar -xf - -C "$tree/checkout"
git -C "$tree/checkout" init --quiet && git -C "$tree/checkout" add --all # tests ask git for the files
show "$@"
# The mounts are in a namespace of their own, so they end with the command.
exec unshare --mount bash -ec '
    for folder in proc sys dev dev/shm; do mount --bind "/$folder" "$0/$folder"; done
    exec chroot "$0" /usr/bin/env --chdir=/checkout "$@"' "$tree" "$@"
