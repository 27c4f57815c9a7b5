#!/bin/sh
# The guest's account of a tree, for sandboxes whose storage can be asked in no other way.
#
#   account.sh list ROOT [unlocked]            every entry below ROOT, in groups (below)
#   account.sh links ROOT [unlocked] <NAMES    where symlinks point, a line each
#   account.sh hash ROOT [unlocked] <NAMES     SHA-256 of files, a line each that begins with it
#   account.sh send ROOT [unlocked] <NAMES     content of files, end to end
#   account.sh clock                           the sandbox's clock and the time of day, seconds
#   account.sh record RECORDS SLOT             what is on record of a command
#   account.sh take FILE BYTES                append standard input to a file that has so many bytes
#   account.sh unpack FILE ROOT               make the tree below ROOT what a tar file has
#   account.sh lay FILE ROOT                  lay what a tar file has over the tree below ROOT
#   account.sh first|last RECORDS SLOT STREAM BYTES   what was kept of its output
#
# NAMES end in a NUL each. `list` begins with a line: the sandbox's clock and the time of day, seconds,
# and the type of the storage (statfs(2)).
# A group of it is a line with a number, so many names that end in a NUL each, and so many lines about
# them; the first of them is ROOT itself, or there is a line `absent`. What a check took its own permission from is given it back while it is read (`unlocked`), and
# `list` then ends with mode and name of each, as they were.
#
# Needs find, stat -c, xargs -0, sha256sum, readlink, as coreutils, busybox and toybox have them.

LC_ALL=C TZ=UTC0
export LC_ALL TZ
umask 077

unlock() { # give back what is needed to read, the outer places first; how it was is kept in files
    locks=${TMPDIR:-/tmp}/locks.$$
    mkdir "$locks" || exit 1
    pass=1000
    while :; do
        # shellcheck disable=SC2016
        find . '(' -type d ! -perm -0500 -o -type f ! -perm -0400 ')' -exec sh -c '
            for place; do
                mode=$(stat -c %a "$place") && chmod u+rwX "$place" && printf "%s\0%s\0" "$mode" "$place"
            done
        ' sh {} + >"$locks/$pass" 2>/dev/null
        [ -s "$locks/$pass" ] || break
        pass=$((pass + 1))
    done
}

relock() { # the inner places first
    while [ "$pass" -gt 1000 ]; do
        pass=$((pass - 1))
        # Through a pipe: what a busybox runs without exec seeks back in a file that it was given.
        # shellcheck disable=SC2002
        cat "$locks/$pass" | xargs -0 -n 2 chmod
    done
    rm -r "$locks"
}

list() {
    # shellcheck disable=SC2016
    find . -exec sh -c '
        printf "%s\n" "$#"
        printf "%s\0" "$@"
        stat -c "%f %s %i|%y|%z" "$@"
    ' sh {} +
}

links() {
    if readlink --version >/dev/null 2>&1; then xargs -0 readlink; else xargs -0 -n 1 readlink; fi
}

hash() {
    xargs -0 sha256sum
}

send() {
    xargs -0 cat
}

record() { # a line each: claimed or not; bytes to keep; a stream's size and part, what its parts hold; then the record
    place=$1/$2
    if [ -e "$place/claim" ]; then echo claimed; else echo unclaimed; fi
    keep=
    read -r keep 2>/dev/null <"$place/keep"
    echo "$keep"
    for stream in stdout stderr; do
        size=
        if [ ! -e "$place/$stream.lost" ]; then read -r size 2>/dev/null <"$place/$stream.size"; fi
        echo "$size"
        for part in 'head' a b; do
            if [ -e "$place/$stream.$part" ]; then wc -c <"$place/$stream.$part"; else echo 0; fi
        done
    done
    [ ! -e "$place/ended" ] || cat "$place/ended"
}

take() { # a piece whose answer was lost comes again: it is not appended twice
    have=0
    [ ! -e "$1" ] || have=$(wc -c <"$1")
    if [ "$have" -eq "$2" ]; then cat >>"$1"; else cat >/dev/null; fi
    wc -c <"$1"
}

unpack() {
    if [ -e "$2" ] || [ -L "$2" ]; then
        [ -L "$2" ] || chmod -R u+rwX "$2"
        rm -rf "$2" || exit 1
    fi
    lay "$1" "$2"
}

lay() {
    umask 022
    mkdir -p "$2" && tar -xpof "$1" -C "$2" && rm "$1"
}

parts() { # a stream's parts in their order
    read -r size part <"$1/$2/$3.size"
    case $part in
    'head') set -- "$1/$2/$3.head" ;;
    a) set -- "$1/$2/$3.head" "$1/$2/$3.b" "$1/$2/$3.a" ;;
    b) set -- "$1/$2/$3.head" "$1/$2/$3.a" "$1/$2/$3.b" ;;
    esac
    for place; do [ ! -e "$place" ] || cat "$place"; done
}

clock() {
    { IFS=' ' read -r clock rest </proc/uptime; } 2>/dev/null || clock=$(date +%s)
    echo "$clock $(date +%s) $(stat -f -c %t "$1" 2>/dev/null)"
}

reach() { # is there a directory at $1? 2 where that cannot be told, and $above is what keeps it
    if [ -L "$1" ]; then return 1; fi
    [ ! -d "$1" ] || return 0
    above=${1%/*}
    while [ -n "$above" ] && [ ! -d "$above" ]; do above=${above%/*}; done
    if (cd -P "${above:-/}") 2>/dev/null; then return 1; fi
    return 2
}

case $1 in
clock) clock / ;;
record) record "$2" "$3" ;;
take) take "$2" "$3" ;;
unpack | lay) "$1" "$2" "$3" ;;
first) parts "$2" "$3" "$4" | head -c "$5" ;;
last) parts "$2" "$3" "$4" | tail -c "$5" ;;
list | links | hash | send)
    if [ "$1" = list ]; then clock "$2"; fi
    until reach "$2"; do # what cannot be reached is not missing
        [ $? -ne 1 ] || { [ "$1" != list ] || echo absent; exit 0; }
        [ "$3" = unlocked ] && chmod u+x "${above:-/}" || exit 1
    done
    cd -P "$2" 2>/dev/null || { chmod u+rwx "$2" && cd -P "$2"; } || exit 1
    if [ "$3" = unlocked ]; then
        unlock
        "$1"
        status=$?
        if [ "$1" = list ]; then
            echo locked
            cat "$locks"/*
        fi
        relock
        exit $status
    fi
    "$1"
    ;;
*)
    echo "not a verb: $1" >&2
    exit 2
    ;;
esac
