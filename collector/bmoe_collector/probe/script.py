"""The loop that runs on the phone, and the requests it takes: one long-lived `adb` shell, driven from the host.

In: one request a line on stdin, `<number> <verb> <words>`. Out: for each, in order,

    #bmoe-<token> <number> <seconds of /proc/uptime before>
    <bytes>
    (an empty line that belongs to the frame)
    #bmoe-<token> <number> end <exit status> <seconds of /proc/uptime after>

and before the first `#bmoe-<token> 0 ready <pid>`, or `0 busy <pid>` when another host's loop works on this phone, or
`0 nolock <path>` when no lock could be made and the loop runs without one.

The host sets the pace: the loop waits in `read` and has no timer, so a phone that is not asked does nothing, and when the link goes `read` ends
and so does the loop, without a process left. Uptimes around every answer place it on the phone's boot clock.

Verbs: `files` (several files in one process, with head's `==> name <==` lines; globs allowed), `try` (a file each, with the refusal's
text), `procs` (every process' stat), `cost` (this shell's stat: its CPU and its children's, no process is started), `do` (a command),
`screen` (keep the screen on until the loop ends or `screen off`).

Written for mksh (Android), dash, bash and busybox' ash; commands are head and cat, which all of them have. The lock is a file
named for the agent, in which stand pid, start time (field 22 of /proc/<pid>/stat) and store: a loop of the same
store that was left behind is ended, another store's is left alone.
"""

from __future__ import annotations

import re
import shlex

LIMIT = 4000
"""Bytes: an old adbd takes no longer a command."""

_SCRIPT = r"""
m='#bmoe-TOKEN' s='STORE' k=
for d in /data/local/tmp "${TMPDIR:-/}" /tmp; do [ -d "$d" ] && [ -w "$d" ] && break; done
l=$d/.bmoe-probe-AGENT
born() {
  t=
  case $1 in ''|*[!0-9]*) return 1;; esac
  { read -r x <"/proc/$1/stat"; } 2>/dev/null || return 1
  set -- ${x##*) }
  t=${20}
}
claim() { born $$; (set -C; echo "$$ $t $s" >"$l") 2>/dev/null; }
up() { u=-; { read -r u x </proc/uptime; } 2>/dev/null; }
screen() {
  if [ "$1" = off ]; then
    [ -n "$k" ] || return 0
    case $k in [0-9]*) settings put global stay_on_while_plugged_in "$k";; *) svc power stayon false;; esac
    r=$?
    [ -z "$o" ] || input keyevent 223
    k=
    return $r
  fi
  if [ -z "$k" ]; then
    k=$(settings get global stay_on_while_plugged_in 2>/dev/null)
    k=${k:-none} o=
    [ "$2" = asleep ] && o=1
  fi
  svc power stayon true && input keyevent 224
}
leave() {
  screen off >/dev/null 2>&1 </dev/null
  { read -r p x <"$l"; } 2>/dev/null && [ "$p" = $$ ] && rm -f "$l"
}
if ! claim; then
  p= b= o=
  { read -r p b o <"$l"; } 2>/dev/null
  if born "$p" && [ "$t" = "$b" ]; then
    [ "$o" = "$s" ] && kill "$p" 2>/dev/null || { echo "$m 0 busy $p"; exit 0; }
  fi
  rm -f "$l" 2>/dev/null
  claim || { p=; { read -r p x <"$l"; } 2>/dev/null; [ -n "$p" ] && { echo "$m 0 busy $p"; exit 0; }; echo "$m 0 nolock $l"; }
fi
o=
trap '' PIPE
trap leave 0
trap 'exit 0' HUP INT TERM
echo "$m 0 ready $$"
while read -r n v w; do
  up
  echo "$m $n $u"
  case $v in
  files) head -n 100000 $w 2>/dev/null </dev/null;;
  try) for f in $w; do echo "==> $f <=="; cat "$f" 2>&1 </dev/null || echo "<== $?"; echo; done;;
  procs) cat /proc/[0-9]*/stat 2>/dev/null </dev/null;;
  cost) { read -r x </proc/$$/stat; } 2>/dev/null && echo "$x";;
  do) eval "$w" 2>&1 </dev/null;;
  screen) screen $w 2>&1 </dev/null;;
  *) false;;
  esac
  r=$?
  up
  echo
  echo "$m $n end $r $u"
done
""".strip()


def script(token: str, agent_uuid: str, store_id: str) -> str:
    """The loop for one phone; the three words are hex digits and become part of it."""
    text = _SCRIPT
    for name, value in (("TOKEN", token), ("AGENT", agent_uuid), ("STORE", store_id)):
        if not re.fullmatch(r"[0-9a-f]+", value):
            raise ValueError(f"{name} {value!r}: hex digits only, it becomes part of a shell script")
        text = text.replace(name, value)
    return text


def request(number: int, verb: str, words: str = "") -> bytes:
    """One line for the loop."""
    if "\n" in words:
        raise ValueError(f"{words!r}: a request is one line")
    return f"{number} {verb} {words}".rstrip().encode() + b"\n"


def command(*words: str) -> str:
    """The words of a `do` request, quoted: nothing in them is the shell's to read."""
    return shlex.join(words)
