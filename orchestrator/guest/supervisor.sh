#!/bin/sh
# The guest: runs one command of a run inside the sandbox, once, and records how it ended.
#
#   supervisor.sh run RECORD [shared]      start the command of RECORD/request unless it was claimed
#   supervisor.sh settle RECORD [shared]   stop it if it runs; else see that it never will
#   supervisor.sh join RECORD              wait until the supervisor that claimed it is done
#   supervisor.sh serve RECORDS            as process 1: answer requests, one a line, from stdin
#
# Theory of operation. The supervisor runs the command as a *foreground* child, because a shell makes
# its background children ignore SIGINT, for good. Beside it run a monitor that enforces the deadline
# and two collectors that keep head and tail of its output. Two decisions are made by creating a
# file that must not exist (noclobber is O_EXCL), so that exactly one side wins:
#
#   claim      who may start the command: the first supervisor to come, or settle, which never does
#   decision   what ended the command: itself (`ended`), the monitor (`deadline`), settle (`stopped`)
#
# The command ends when its own process ends, not when the last pipe closes. Descendants that are
# alive then are counted and killed, so the record is written when nothing of the command can touch
# it, or the workspace, any more. They are found by parentage: where orphans gather under the
# supervisor (as process 1 of a container, or as a subreaper) no descendant escapes that, whatever
# session, group or environment it made for itself. In a sandbox that is shared with processes which
# are not of the run (`shared`: somebody else's container, a gateway's) they gather under some other
# process; what gathers there after the command started, and no supervisor says is its own, is of it.
#
# The record ends with a nonce that the client chose and that is wiped from the request before the
# command starts: a record without it was not written here.
#
# Needs sh, and cat, dd, mkfifo, mv, sleep, wc, from any of coreutils, busybox or toybox; setsid where there is
# one. Reads /proc where there is one, else `ps` and `date`.
#
# shellcheck disable=SC2154 # nonce, deadline, grace, latest, keep, output_bytes, workdir come with the request

# What comes in the environment is exported for good, whatever it is set to here: the command gets it
# back as it came, and what must not be seen is not exported to begin with.
given=$(export -p)
# shellcheck disable=SC3040 # only the shell that knows it gets there
case $given in
declare*) given=$(set -o posix; export -p) ;; # else, in a function, these would be its own
esac
unset nonce tag line rest verb part kin
record=$2
shared=${3-}
helpers=
spared= # processes, pid:born, that are not the command's although they may look like it
reaper= # where orphans gather, if that is not the supervisor
# Caught, not ignored: a command that signals its group, or its parent, must not end its record.
trap : TERM INT HUP QUIT USR1 USR2 ALRM PIPE

# --- time, in hundredths of a second on a clock that does not jump ----------------------------------

now() {
    if ! { IFS=' ' read -r now _ </proc/uptime; } 2>/dev/null; then
        now=$(date +%s).00
    fi
    now=${now%.*}${now#*.}
    while :; do
        case $now in 0?*) now=${now#0} ;; *) break ;; esac # a leading zero would mean octal
    done
}

past() { # has the moment $1 come? Two hundredths early, for two readings are rounded down
    now
    [ $((now + 2)) -ge "$1" ]
}

nap() { # a moment; a whole second where sleep knows no fractions
    sleep 0.02 2>/dev/null || sleep 1
}

# --- files that are created once ----------------------------------------------------------------------

create() { # $1 file, $2 its line; fails if it exists
    won=1
    set -C
    { won=0 && echo "$2"; } 2>/dev/null >"$record/$1" # won, even where there is no room for the line
    set +C
    return $won
}

self() { # pid and start time of this very process, which `$$` is not in a subshell
    line=
    if { while IFS= read -r part; do line="$line$part "; done </proc/self/stat; } 2>/dev/null; then
        self=${line%% *}
        # shellcheck disable=SC2086
        set -- ${line##*) }
        born=${20}
    else
        # shellcheck disable=SC2016
        self=$(exec sh -c 'echo $PPID')
        born=0
    fi
}

# --- processes -----------------------------------------------------------------------------------------

stat_of() { # fields of /proc/$1/stat from the state on, in $fields; fails if there is no such process
    fields=
    { while IFS= read -r part; do fields="$fields$part "; done; } 2>/dev/null <"/proc/$1/stat" || return 1
    fields=${fields##*) } # the name before it may hold blanks, brackets and line ends
    [ -n "$fields" ]
}

dead() { # a zombie, unless only its first thread has ended
    if [ ! -r /proc/self/stat ]; then
        ! kill -0 "$1" 2>/dev/null # `ps` saw itself, too
        return
    fi
    stat_of "$1" || return 0
    case $fields in [ZX]*) ;; *) return 1 ;; esac
    set -- "/proc/$1/task/"*
    [ $# -le 1 ]
}

children() { # children of process $1, in $kin
    kin=
    if [ -e /proc/self/task ] && [ -e "/proc/$$/task/$$/children" ]; then
        for list in "/proc/$1/task/"*/children; do
            line=
            { read -r line <"$list"; } 2>/dev/null
            kin="$kin $line"
        done
        return
    fi
    [ -n "$pairs" ] || every_process
    for pair in $pairs; do
        [ "${pair#*:}" != "$1" ] || kin="$kin ${pair%:*}"
    done
}

every_process() { # pid:parent of every process, in $pairs, where the kernel keeps no lists of children
    if [ ! -r /proc/self/stat ]; then
        pairs=$(ps -A -o pid= -o ppid= | while read -r pid parent; do echo "$pid:$parent"; done)
        return
    fi
    for place in /proc/[0-9]*; do
        stat_of "${place#/proc/}" || continue
        parent=${fields#* }
        pairs="$pairs ${place#/proc/}:${parent%% *}"
    done
}

lineage() { # this process and those above it, pid:born each, in $lineage: who waits here is not the command's
    self
    lineage="$self:$born"
    above=$self
    while stat_of "$above" && above=${fields#* } && above=${above%% *} && [ "$above" -gt 1 ]; do
        birth "$above"
        lineage="$lineage $above:$birth"
    done
}

helper() { # is it a helper, or spared, and not what got the process id of one that has ended?
    case " $helpers $spared " in *" $1:"*) ;; *) return 1 ;; esac
    [ -r /proc/self/stat ] || return 0
    birth "$1"
    case " $helpers $spared " in *" $1:$birth "*) ;; *) return 1 ;; esac
}

birth() { # start time of process $1, in $birth; 0 where the system does not tell
    birth=0
    stat_of "$1" || return 0
    # shellcheck disable=SC2086
    set -- $fields
    birth=${20}
}

gather() { # living descendants of process $root, without the supervisor's helpers, in $tree
    # Its dead children are $remains. One that forks and ends, over and over, can be dead in every list
    # that is read while its latest child is in none; only a list without either proves that none is left.
    pairs=
    tree=
    remains=
    generation=$root
    if [ -n "$reaper" ]; then
        { while read -r line; do spared="$spared $line"; done <"$record/waiting"; } 2>/dev/null
        children "$reaper"
        for kid in $kin; do
            helper "$kid" || dead "$kid" || tree="$tree $kid"
        done
        generation="$generation$tree"
    fi
    while [ -n "$generation" ]; do
        found=
        for member in $generation; do
            children "$member"
            for kid in $kin; do
                ! helper "$kid" || continue
                if ! dead "$kid"; then found="$found $kid"
                elif [ "$member" = "$root" ] && [ -r /proc/self/stat ]; then remains="$remains $kid"; fi
            done
        done
        tree="$tree$found"
        generation=$found
    done
}

adopter() { # find where orphans gather, in $reaper, and spare what is there already
    # A child whose parent is gone sees who adopted it.
    sh -c 'sh -c '\''
        now=$2
        until [ "$now" != "$2" ]; do
            while read -r key value; do [ "$key" != PPid: ] || now=$value; done </proc/$$/status
        done
        echo "$now" >"$1"
    '\'' sh "$1" $$ &' sh "$record/adopter"
    now
    limit=$((now + 1000))
    until { read -r reaper <"$record/adopter"; } 2>/dev/null && [ -n "$reaper" ] || past "$limit"; do nap; done
    children "$reaper"
    spared="$self:$born"
    for kid in $kin; do
        birth "$kid"
        spared="$spared $kid:$birth"
    done
    birth "$reaper"
    echo "$reaper:$birth $spared" >"$record/reaper"
}

kill_all() { # kill every descendant of $root; $still says whether none is left after five seconds
    still=no
    now
    bound=$((now + 500))
    until past "$bound"; do
        gather
        [ -n "$tree$remains" ] || gather # the kernel's list can miss one while another one ends
        [ -n "$tree$remains" ] || {
            still=yes
            return
        }
        # Stopped first, until no new one is found: what forks faster than it is killed stands still.
        seen=
        while [ "$tree" != "$seen" ] && ! past "$bound"; do
            # shellcheck disable=SC2086
            kill -STOP $tree 2>/dev/null
            seen=$tree
            gather
        done
        # shellcheck disable=SC2086
        [ -z "$tree" ] || kill -KILL $tree 2>/dev/null
        gather
        [ -z "$tree$remains" ] || nap # also lets the shell reap what it adopted
    done
    gather
    [ -n "$tree" ] || still=yes
}

# --- output --------------------------------------------------------------------------------------------

pour() { # append up to 512 reads to file $1; $moved bytes; fails at the end of the stream
    LC_ALL=C dd bs=65536 count=512 <&3 >>"$1" 2>"$record/$stream.count" || {
        echo "dd: $(cat "$record/$stream.count")" >"$record/$stream.lost"
        exec cat <&3 >/dev/null # the command goes on as if its output were kept
    }
    records=0+0
    moved=
    while IFS=' ' read -r number word rest; do
        case "$word $rest" in
        'records in') records=$number ;;
        byte*) moved=$number ;; # a third line, which POSIX does not ask for; others are warnings
        esac
    done <"$record/$stream.count"
    [ -n "$moved" ] || moved=$(($(wc -c <"$1") - kept))
    [ $((${records%+*} + ${records#*+})) -eq 512 ] # whole ones and short ones
}

collect() { # keep head and tail of stream $1, at least $keep bytes of each
    stream=$1
    exec 3<"$record/$stream.fifo"
    total=0
    kept=0
    part='head'
    more=yes
    while [ $more = yes ]; do
        pour "$record/$stream.$part" || more=no
        total=$((total + moved))
        kept=$((kept + moved))
        if [ $more = yes ] && [ $kept -ge "$keep" ]; then
            case $part in a) part=b ;; *) part=a ;; esac
            : >"$record/$stream.$part"
            kept=0
        fi
    done
    echo "$total $part" >"$record/$stream.size"
}

# --- the monitor -----------------------------------------------------------------------------------------

monitor() { # after the deadline: TERM to all, grace, KILL to all
    self
    helpers="$helpers $self:$born"
    sleep "$deadline_s" 2>/dev/null &
    [ ! -e "$record/decision" ] || kill "$!"
    wait "$!"
    until past "$1"; do # sleep knows no fractions here, or somebody ended it
        [ ! -e "$record/decision" ] || exit 0
        nap
    done
    # Where nothing can be created any more, the command is stopped all the same.
    create decision deadline || [ ! -e "$record/decision" ] || exit 0
    gather
    # shellcheck disable=SC2086
    [ -z "$tree" ] || kill -TERM $tree 2>/dev/null
    now
    limit=$((now + grace))
    until past "$limit"; do
        gather
        [ -n "$tree$remains" ] || gather
        [ -n "$tree$remains" ] || exit 0
        nap
    done
    gather
    [ -z "$tree" ] || true >"$record/escalated" # not `:`, at whose failure a shell ends
    kill_all
}

memory_kills() { # how often the kernel killed here for want of memory, in $kills
    kills=0
    [ "$self" = 1 ] || [ -n "$shared" ] || return 0 # the counter is of the whole machine
    for counter in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
        { while read -r key value; do [ "$key" != oom_kill ] || kills=$value; done <"$counter"; } 2>/dev/null
    done
}

# --- the supervisor ----------------------------------------------------------------------------------------

finish() { # write the record, all at once
    {
        printf '%s\n' "ending=$1" "code=$2" "elapsed=$3" "descendants=$4" "escalated=$5" "still=$6"
        printf '%s\n' "message=$7" "oom_kills=${8:-0}" "nonce=$nonce"
    } >"$record/ended.new" || return
    # settle may kill a child of this process at any time
    mv "$record/ended.new" "$record/ended" || mv "$record/ended.new" "$record/ended"
}

run() {
    # shellcheck disable=SC1091
    . "$record/request" || return 1 # sets the variables used below, and functions environment, program
    self
    create claim "$self $born" || {
        true >"$record/request" # the first one has read its own; this has the nonce in it too
        return 0
    }
    : >"$record/request"
    root=$self
    [ -z "$shared" ] || adopter
    memory_kills
    killed=$kills
    if past "$((latest - 2))"; then
        finish not_started '' 0 0 no yes "dispatched too late to be waited for"
        return 0
    fi
    cd "$workdir" || {
        finish lost '' 0 0 no yes "cannot enter $workdir"
        return 0
    }
    echo "$output_bytes" >"$record/keep"
    mkfifo "$record/stdout.fifo" "$record/stderr.fifo" || {
        finish lost '' 0 0 no yes "cannot make a fifo in $record"
        return 0
    }
    collect stdout &
    collectors=$!
    birth "$!"
    helpers="$!:$birth"
    collect stderr &
    collectors="$collectors $!"
    birth "$!"
    helpers="$helpers $!:$birth"
    now
    started=$now
    monitor $((started + deadline)) 2>/dev/null &
    watch=$!
    birth "$watch"
    helpers="$helpers $watch:$birth"
    echo "$helpers" >"$record/helpers"

    # A shell reports a child that a signal killed on its standard error, in every dialect and language
    # (but for SIGINT and SIGPIPE): that is how 128+n by a signal is told from `exit 128+n`.
    exec 9>&2 2>"$record/death"
    (
        exec </dev/null >"$record/stdout.fifo" 2>"$record/stderr.fifo" 9>&-
        # Where memory runs out, the command goes first, and who can tell of it stays.
        if [ "$root" = 1 ] || [ -n "$shared" ]; then
            { echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null
        fi
        set -- "$record/started" "$(command -v setsid)" "$workdir" # no name is safe from what is exported
        eval "$given" && cd "$3" || exit # the place of process 1 was among it
        environment 2>/dev/null && : >"$1" && program "$2"
    )
    status=$?
    exec 2>&9 9>&-

    now
    elapsed=$((now - started))
    ending=ended
    if ! create decision ended; then
        ending=
        limit=$((now + 100))
        until { read -r ending <"$record/decision"; } 2>/dev/null && [ -n "$ending" ] || past "$limit"; do
            nap # whoever took the decision may not have written it yet
        done
    fi
    if [ "$ending" != deadline ]; then
        # The monitor looks for the decision once its sleep is there to be seen here: either it finds
        # the one, or this finds the other. A signal to itself could come before it can take one.
        children "$watch"
        # shellcheck disable=SC2086
        [ -z "${kin# }" ] || kill -KILL $kin 2>/dev/null # what the command has stopped heeds nothing less
    fi
    kill -CONT "$watch" 2>/dev/null # the command may have stopped it
    wait "$watch"
    if [ "$ending" = ended ] && [ "$status" -gt 128 ] && [ -s "$record/death" ]; then
        ending=signalled
        status=$((status - 128))
    elif [ "$ending" = ended ]; then
        ending=exited
    fi
    [ -n "$ending" ] || ending=lost
    if [ ! -e "$record/started" ]; then # settled before, or the shell could not set the environment
        if [ "$ending" = stopped ]; then ending=not_started; else ending=lost; fi
    fi
    gather
    # shellcheck disable=SC2086
    set -- $tree
    descendants=$#
    kill_all
    drain
    escalated=no
    [ ! -e "$record/escalated" ] || escalated=yes
    memory_kills
    finish "$ending" "$status" "$elapsed" "$descendants" "$escalated" "$still" "" $((kills - killed))
}

drain() { # wait for the collectors; a writer that is none of ours keeps us two seconds at most
    # shellcheck disable=SC2086
    kill -CONT $collectors 2>/dev/null # the command may have stopped them, and what they wait for
    pairs=
    for collector in $collectors; do
        children "$collector"
        # shellcheck disable=SC2086
        [ -z "${kin# }" ] || kill -CONT $kin 2>/dev/null
    done
    now
    limit=$((now + 200))
    until [ -e "$record/stdout.size" ] && [ -e "$record/stderr.size" ]; do
        if past "$limit"; then
            # shellcheck disable=SC2086
            kill -KILL $collectors 2>/dev/null
            break
        fi
        sleep 0.002 2>/dev/null || sleep 1
    done
    # shellcheck disable=SC2086
    wait $collectors
}

settle() {
    # shellcheck disable=SC1091
    . "$record/request" || return 1 # empty where somebody claimed the order
    if create claim settled; then
        true >"$record/request" # not before: who reads an empty one must find the claim taken
        finish not_started '' 0 0 no yes "settled before it was started"
        return 0
    fi
    true >"$record/request"
    lineage
    here=$lineage
    echo "$here" >>"$record/waiting"
    now
    limit=$((now + 1000))
    pid=
    until read -r pid born <"$record/claim" && [ -n "$pid" ] || past "$limit"; do nap; done
    while [ ! -e "$record/ended" ] && alive && ! past "$limit"; do
        if { read -r helpers <"$record/helpers"; } 2>/dev/null; then
            create decision stopped
            kill -CONT "$pid" 2>/dev/null # the command may have stopped it
            root=$pid
            [ -z "$shared" ] || whose
            spared="$spared $here"
            [ -e "$record/ended.new" ] || kill_all
        fi
        nap
    done
    [ ! -e "$record/ended" ] || return 0
    root=$pid # there will be no record: nothing of it must be left
    [ -z "$shared" ] || whose 2>/dev/null
    spared="$spared $here"
    kill_all
    if alive; then
        kill -KILL "$pid"
        for part in $helpers; do
            birth "${part%:*}"
            [ "$birth" != "${part#*:}" ] || kill -KILL "${part%:*}" 2>/dev/null
        done
    fi
    [ "$still" = yes ]
}

whose() { # read where orphans of the command gather, and what is spared there; nowhere if that has ended
    read -r reaper spared <"$record/reaper" || return
    birth "${reaper%:*}"
    # A container that was restarted has a process 1, too, and nothing in it is of the command.
    if [ "$birth" = "${reaper#*:}" ]; then reaper=${reaper%:*}; else reaper=; fi
}

join() { # wait for the record of a command that another supervisor started; its own bounds end it
    lineage
    echo "$lineage" >>"$record/waiting"
    until read -r pid born <"$record/claim" && [ -n "$pid" ]; do nap; done
    until [ -e "$record/ended" ] || ! alive; do nap; done
}

alive() { # is the supervisor that claimed still the process that it was?
    kill -0 "$pid" 2>/dev/null || return 1
    [ -r /proc/self/stat ] || return 0
    stat_of "$pid" || return 1
    # shellcheck disable=SC2086
    set -- $fields
    [ "${20-}" = "$born" ] && [ "$1" != Z ]
}

# --- process 1 of a sandbox ------------------------------------------------------------------------------

serve() { # VERB TAG .STDIN WORDS TAG: the answer lies between two lines with the tag, which nobody can guess
    records=$record
    # Without a network a container is given an empty one, and whatever its image has there is hidden.
    [ -s /etc/hosts ] || {
        { printf '%s\n' '127.0.0.1 localhost sandbox' '::1 localhost ip6-localhost ip6-loopback'; } 2>/dev/null >/etc/hosts
    }
    # `read` takes a line apart in time that grows with its length; patterns take the square of it.
    while IFS=' ' read -r verb tag line rest; do
        # Half a line, of a client that was killed while it wrote, is no question.
        case $tag:$rest in
        :*) continue ;;
        *[\ :]"$tag") rest=${rest%"$tag"} ;;
        *) continue ;;
        esac
        line=${line#.}
        printf '\n%s begin\n' "$tag"
        # shellcheck disable=SC2059 # what is sent is a format: the one way to have any byte in a line
        case $verb in
        run | settle)
            record=$records/${rest% }
            helpers=
            [ -e "$record" ] || mkdir -m 700 "$record"
            ( umask 077 && printf "$line" >"$record/request.new" ) && mv "$record/request.new" "$record/request" && line= && "$verb"
            ;;
        *)
            # The words hold no blanks, and none of them is a pattern.
            # shellcheck disable=SC2086
            printf "$line" | ( set -f && exec sh "${0%/*}/account.sh" "$verb" $rest )
            ;;
        esac
        printf '\n%s end %s\n' "$tag" "$?"
    done
}

"$1"
