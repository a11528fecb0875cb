# SPDX-License-Identifier: Apache-2.0
# What the scripts beside this file share; they source it. Nothing happens until a function is called.

# help_if_asked WORD...: if one of the words asks for it, print the comment at the top of the script, and end
help_if_asked() {
  local word
  for word in "$@"; do
    case $word in
      -h | --help)
        sed -n '3,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[1]}"
        exit 0
        ;;
    esac
  done
}

# watched SECONDS TELL COMMAND...: run a command, and every so many seconds TELL ELAPSED while it runs. The status is the
# command's own. INT, TERM and HUP end it with all its children, and then this script: 128 + the signal's number.
#
# The command is a job of its own process group (set -m). So a program below it can be ended with its children, whatever
# function started it, and does not ignore Ctrl-C, as other commands in the background of a script do.
watched() {
  local every=$1 tell=$2 started=$SECONDS job='' next
  shift 2
  trap '_end_watched 2' INT
  trap '_end_watched 15' TERM
  trap '_end_watched 1' HUP
  set -m
  "$@" </dev/null &
  job=$!
  set +m
  next=$((SECONDS + every))
  while kill -0 "$job" 2>/dev/null; do
    sleep 0.2 || true # what interrupts it is in the traps' hands
    if [ "$SECONDS" -ge "$next" ] && kill -0 "$job" 2>/dev/null; then
      "$tell" $((SECONDS - started))
      next=$((SECONDS + every))
    fi
  done
  trap - INT TERM HUP
  wait "$job"
}

_end_watched() { # in a trap of watched: its job is seen here
  local signal
  trap '' INT TERM HUP
  for signal in ${job:+INT TERM KILL}; do # INT first: pip then takes its temporary folders with it
    kill -s "$signal" -- "-$job" 2>/dev/null || break
    for _ in {1..25}; do # 5 s
      sleep 0.2
      kill -0 -- "-$job" 2>/dev/null || break 2
    done
  done
  printf 'stopped by a signal; rerun to resume\n' >&2
  exit $((128 + $1))
}
