#!/bin/sh
# Runs one verb of tidemark from cron: `nightly.sh VERB [OPTION]...`.
#
# A line for each run goes to the log. What a person has to look at goes to stdout too, which cron mails to MAILTO, and to
# a command if one is named, such as a pager's. Verbs of one repository take turns. Ends with tidemark's exit code, or
# with 75 if another verb was still at work.
#
#   NIGHTLY_LOG      the log                                        default: /var/log/tidemark/nightly.log
#   NIGHTLY_LOCK     the file that is locked meanwhile              default: /run/lock/tidemark.lock
#   NIGHTLY_WAIT_S   how long to wait for another verb              default: 3600
#   NIGHTLY_ALERT    a command that gets what is told on its stdin  default: none
set -u

if [ $# -eq 0 ]; then
    echo "usage: nightly.sh VERB [OPTION]..." >&2
    exit 2
fi

log=${NIGHTLY_LOG:-/var/log/tidemark/nightly.log}
lock=${NIGHTLY_LOCK:-/run/lock/tidemark.lock}
wait_s=${NIGHTLY_WAIT_S:-3600}
verb=$1

note() {
    printf '%s %s %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$verb" "$1" >>"$log"
}

tell() {
    note "$1"
    message=$(printf 'tidemark %s on %s: %s\n\n%s' "$verb" "$(hostname)" "$1" "$2")
    # What goes to stdout is mailed by cron.
    printf '%s\n' "$message"
    if [ -n "${NIGHTLY_ALERT:-}" ]; then
        printf '%s\n' "$message" | sh -c "$NIGHTLY_ALERT" 9>&-
    fi
}

exec 9>>"$lock" || exit 1
if ! flock --wait "$wait_s" 9; then
    tell "75 another verb has been at work for more than $wait_s s" "Nothing was done; see $log."
    exit 75
fi

# The lock is not handed on: what a killed run may leave behind must not hold it.
said=$(tidemark "$@" 2>&1 9>&-)
code=$?
last=$(printf '%s' "$said" | tail -n 1)

case $code in
0) note "0 $last" ;;
3) tell "3 done in part; the next run takes up what is left" "$said" ;;
4) tell "4 DAMAGED: stored data is missing or altered; restore nothing blindly, and keep what the disks still have" "$said" ;;
5) tell "5 the blob store was unavailable or full; nothing is lost, the next run tries again" "$said" ;;
10) tell "10 refused: more would go than --delete-at-most; look at the plan, then run it with --delete-at-most 100%" "$said" ;;
11) tell "11 a restore would take longer than it may" "$said" ;;
*) tell "$code FAILED" "$said" ;;
esac
exit $code
