#!/bin/sh
# Puts bmoe-agent on a phone, in Termux, and keeps it alive there. Run it, pipe it into sh, or paste it whole at the prompt.
#
#   sh install.sh [WHEEL] [--engine [NAME=]PATH]... [--models DIR]... [--name NAME] [--no-service] [--no-boot]
#   bmoe-agent-setup                 the same again: completes what is missing, changes nothing that is well
#   bmoe-agent-setup --upgrade [WHEEL]      a newer agent, or the same one for a newer Python
#   bmoe-agent-setup --remove [--purge] [--yes]   takes it off; --purge also the identity and all records
#
# WHEEL is a file, an https address or a name for pip. Without one: BMOE_WHEEL, else the newest bmoe_fleet-*.whl in this
# folder, the home or ~/storage/downloads, else the one that is installed, else `bmoe-fleet` from pip's index.
#
# What it makes:
#   ~/.local/share/bmoe-fleet/       venv/ (with system site packages), wheel/, start, installed
#   ~/.bmoe-agent/                   identity, secret, settings, records (BMOE_AGENT_HOME names another place)
#   $PREFIX/bin/bmoe-agent, bmoe-sim, bmoe-agent-setup
#   $PREFIX/var/service/bmoe-agent/  the runit service
#   ~/.termux/boot/bmoe-agent        for Termux:Boot
# Exit codes: 0 all done, 1 done but for what it says it could not do, 2 wrong usage, 3 it cannot go on.

bmoe_setup() (
    set -eu
    mark='bmoe-agent-setup made this file and writes it again'
    failed=''
    lack=''

    say() { printf '%s\n' "$*"; }
    step() { printf '* %s\n' "$*"; }
    could_not() {
        printf '! could not: %s\n' "$*" >&2
        failed="$failed
  - $*"
    }
    give_up() {
        printf 'bmoe-agent-setup: %s\n' "$*" >&2
        exit 3
    }
    wrong() {
        printf 'bmoe-agent-setup: %s (--help says more)\n' "$*" >&2
        exit 2
    }
    usage() {
        say 'install.sh [WHEEL] [--engine [NAME=]PATH]... [--models DIR]... [--name NAME] [--no-service] [--no-boot]'
        say 'install.sh --upgrade [WHEEL]'
        say 'install.sh --remove [--purge] [--yes]'
    }
    there() { command -v "$1" >/dev/null 2>&1; }
    ours() { [ ! -e "$1" ] || grep -q "$mark" "$1" 2>/dev/null; }

    # write FILE MODE: a file from stdin, whole or not at all; a file of somebody else's is left alone
    write() {
        if ! ours "$1"; then
            could_not "write $1: it is not this script's; move it away and run bmoe-agent-setup again"
            cat >/dev/null
            return 0
        fi
        mkdir -p "${1%/*}"
        cat >"$1.new"
        chmod "$2" "$1.new"
        mv -f "$1.new" "$1"
    }

    python_now() {
        now=$(readlink -f "$PREFIX/bin/python3" 2>/dev/null || :)
        now=${now##*/python}
        case $now in
            [0-9].[0-9]*) ;;
            *) now=$("$PREFIX/bin/python3" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ;;
        esac
        say "$now"
    }
    python_of_venv() {
        sed -n 's/^version *= *\([0-9]*\.[0-9]*\).*/\1/p' "$venv/pyvenv.cfg" 2>/dev/null || :
    }

    # has MODULE: whether Python finds it; not by import, since what it needs itself comes with the agent
    has() { python3 -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"; }

    packages() {
        lack=''
        there python3 || lack="$lack python"
        if there python3; then
            has pip || lack="$lack python-pip"
            has grpc || lack="$lack python-grpcio"
        else
            lack="$lack python-pip python-grpcio"
        fi
        [ "$service" = no ] || there sv || lack="$lack termux-services"
        if [ -z "$lack" ]; then
            step 'packages are there'
            return 0
        fi
        step "installing packages:$lack"
        # shellcheck disable=SC2086  # a list of names
        pkg install -y $lack || could_not "install$lack: is the network there? pkg install$lack says more"
        there python3 || give_up 'there is no Python: pkg install python'
        has pip || give_up 'there is no pip: pkg install python-pip'
        has grpc ||
            give_up 'Python has no grpc, and pip cannot build it here: pkg upgrade && pkg install python-grpcio'
    }

    # Sets `source` to what pip is to install.
    choose_wheel() {
        source=${wheel:-${BMOE_WHEEL:-}}
        if [ -n "$source" ]; then
            case $source in
                *://*) ;;
                */* | *.whl) [ -f "$source" ] || give_up "$source: there is no such wheel" ;;
            esac
            return 0
        fi
        newest=''
        for found in ./bmoe_fleet-*.whl "$HOME"/bmoe_fleet-*.whl "$HOME"/storage/downloads/bmoe_fleet-*.whl; do
            [ -f "$found" ] || continue
            if [ -z "$newest" ] || [ -n "$(find "$found" -newer "$newest")" ]; then newest=$found; fi
        done
        for found in "$data"/wheel/bmoe_fleet-*.whl; do
            if [ -z "$newest" ] && [ -f "$found" ]; then newest=$found; fi
        done
        source=${newest:-bmoe-fleet}
    }

    agent() {
        choose_wheel
        version=$(python_now)
        before=$(cat "$data/installed" 2>/dev/null || :)
        work=$data/work
        rm -rf "$work"
        mkdir -p "$work"
        # --no-deps: the wheel alone, from wherever it is, so that it can be put in again without the network
        python3 -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work" "$source" ||
            give_up "$source: pip cannot get it (see above)"
        got=$(find "$work" -name '*.whl' | head -n 1)
        [ -n "$got" ] || give_up "$source: pip made no wheel of it"
        sum=$(sha256sum "$got" | cut -d ' ' -f 1)
        changed=yes
        if [ "$before" = "$sum $version" ] && "$venv/bin/python" -c 'import bmoe_agent, grpc, google.protobuf' 2>/dev/null; then
            step "the agent is installed already (${got##*/}, Python $version)"
            changed=no
        else
            if [ "$(python_of_venv)" != "$version" ] || [ ! -x "$venv/bin/python" ]; then
                [ ! -d "$venv" ] || step "the virtual environment was for Python $(python_of_venv): making it again"
                rm -rf "$venv"
                python3 -m venv --system-site-packages --without-pip "$venv" ||
                    give_up "$venv: Python cannot make a virtual environment there"
            fi
            step "installing ${got##*/} for Python $version"
            # Binaries only: building grpcio on a phone takes an hour and fails. pip brings protobuf alone, in pure Python.
            "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-warn-script-location \
                --only-binary :all: "$got" ||
                give_up "pip cannot install what ${got##*/} needs (see above); if it is grpcio: pkg upgrade python-grpcio"
            # the same version number may stand on other contents
            "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-warn-script-location \
                --force-reinstall --no-deps "$got" || give_up "pip cannot install ${got##*/}"
            "$venv/bin/python" -c 'import bmoe_agent.cli, bmoe_proto.v1.telemetry_pb2_grpc' ||
                give_up 'the agent does not start (see above); bmoe-agent doctor says more'
            rm -rf "$data/wheel"
            mkdir -p "$data/wheel"
            mv "$got" "$data/wheel/"
            printf '%s %s\n' "$sum" "$version" >"$data/installed"
        fi
        rm -rf "$work"
    }

    commands() {
        write "$data/start" 755 <<END
#!$PREFIX/bin/sh
# $mark.
# start --check | start COMMAND ARGUMENTS: runs a command of the virtual environment, or says that Python was upgraded and
# the environment with it is orphaned.
venv='$venv'
now=\$(readlink -f '$PREFIX/bin/python3')
now=\${now##*/python}
made=\$(sed -n 's/^version *= *\\([0-9]*\\.[0-9]*\\).*/\\1/p' "\$venv/pyvenv.cfg" 2>/dev/null)
case \$now in
    [0-9].[0-9]*) ;;
    *) now=\$('$PREFIX/bin/python3' -c 'import sys; print("%d.%d" % sys.version_info[:2])') ;;
esac
if [ "\$made" != "\$now" ] || [ ! -x "\$venv/bin/python" ]; then
    text="Python here is \$now, but bmoe-agent was installed for \${made:-another}: run bmoe-agent-setup --upgrade"
    echo "bmoe-agent: \$text" >&2
    if [ "\$1" = --check ] && [ ! -e '$data/attention' ]; then
        echo "\$text" >'$data/attention'
        if command -v termux-notification >/dev/null; then
            termux-notification --id bmoe-agent --title bmoe-agent --content "\$text" >/dev/null 2>&1 &
        fi
    fi
    exit 3
fi
if [ "\$1" = --check ]; then
    rm -f '$data/attention'
    exit 0
fi
command=\$1
shift
exec "\$venv/bin/\$command" "\$@"
END
        for program in bmoe-agent bmoe-sim; do
            write "$PREFIX/bin/$program" 755 <<END
#!$PREFIX/bin/sh
# $mark.
exec '$data/start' $program "\$@"
END
        done
        inside=$("$venv/bin/python" -c 'import bmoe_agent; print(bmoe_agent.__path__[0])')/termux/install.sh
        if [ ! -f "$inside" ] && [ -f "$0" ] && grep -q "$mark" "$0"; then inside=$0; fi
        if [ -f "$inside" ]; then
            { printf '#!%s/bin/sh\n' "$PREFIX" && sed 1d "$inside"; } >"$data/setup"
            write "$PREFIX/bin/bmoe-agent-setup" 755 <"$data/setup"
            rm -f "$data/setup"
        else
            could_not 'keep this script as bmoe-agent-setup: keep it yourself for upgrades and removal'
        fi
    }

    # ask QUESTION: one line from the person at the terminal, empty when there is none
    ask() {
        answer=''
        if [ -t 0 ] && [ -t 2 ]; then
            printf '%s ' "$1" >&2
            read -r answer || :
        fi
    }

    identity() {
        new=no
        [ -f "$home/config.toml" ] || new=yes
        if [ "$new" = yes ] && [ -z "$name" ] && there getprop; then name=$(getprop ro.product.model || :); fi
        # alone first: it shows the secret, once, whatever is wrong with an engine or a folder below
        if [ -n "$name" ]; then
            "$data/start" bmoe-agent init --home "$home" --name "$name" || give_up "$home: no identity (see above)"
        else
            "$data/start" bmoe-agent init --home "$home" || give_up "$home: no identity (see above)"
        fi
        if [ -z "$engines" ] && [ "$(configured engines)" = 0 ]; then
            ask 'Path of bmoe-cli (empty: later):'
            engines=$answer
        fi
        if [ -z "$models" ] && [ "$(configured models)" = 0 ]; then
            ask 'Folder of gguf files (empty: later):'
            models=$answer
        fi
        # a list with a newline after each
        printf '%s\n' "$engines" | while IFS= read -r one; do
            [ -z "$one" ] || "$data/start" bmoe-agent init --home "$home" --engine "$(expanded "$one")" >/dev/null ||
                say "$one" >>"$data/refused"
        done
        printf '%s\n' "$models" | while IFS= read -r one; do
            [ -z "$one" ] || "$data/start" bmoe-agent init --home "$home" --models "$(expanded "$one")" >/dev/null ||
                say "$one" >>"$data/refused"
        done
        if [ -f "$data/refused" ]; then
            while IFS= read -r one; do could_not "use $one (see above)"; done <"$data/refused"
            rm -f "$data/refused"
        fi
        [ "$(configured engines)" != 0 ] || could_not 'find an engine: bmoe-agent init --engine PATH'
        [ "$(configured models)" != 0 ] || could_not 'find models: bmoe-agent init --models DIR'
    }
    expanded() {
        case $1 in
            [~]/*) printf '%s/%s' "$HOME" "${1#??}" ;;
            *) printf '%s' "$1" ;;
        esac
    }
    # how many engines or model folders the settings name
    configured() {
        "$venv/bin/python" -c 'import sys; from pathlib import Path; from bmoe_agent import config
found = config.load(Path(sys.argv[1])); print(len(found.engines if sys.argv[2] == "engines" else found.model_dirs))' "$home" "$1"
    }

    service() {
        place=$PREFIX/var/service/bmoe-agent
        write "$place/run" 755 <<END
#!$PREFIX/bin/sh
# $mark.
exec 2>&1
# runit starts a service that ended again after a second: without the pause this would be said all night
'$data/start' --check || exec sleep 60
export BMOE_AGENT_HOME='$home'
exec '$data/start' bmoe-agent serve
END
        if [ -x "$PREFIX/share/termux-services/svlogger" ]; then
            mkdir -p "$place/log"
            ln -sf "$PREFIX/share/termux-services/svlogger" "$place/log/run"
        else
            could_not "keep the service's log: $PREFIX/share/termux-services/svlogger is not there"
        fi
        if ! there sv; then
            could_not 'start the service: there is no sv: pkg install termux-services, restart Termux, sv-enable bmoe-agent'
            return 0
        fi
        services
        rm -f "$place/down"
        if [ "$changed" = yes ] && sv status bmoe-agent 2>/dev/null | grep -q '^run'; then
            step 'restarting the agent; an engine it runs goes on and is adopted'
            sv restart bmoe-agent >/dev/null || could_not 'restart the agent: sv restart bmoe-agent'
            return 0
        fi
        tries=0
        # runsvdir looks for new services every five seconds
        until sv up bmoe-agent >/dev/null 2>&1; do
            tries=$((tries + 1))
            if [ "$tries" -ge "${BMOE_SETUP_TRIES:-8}" ]; then
                could_not 'start the service: restart Termux (exit all sessions), then sv up bmoe-agent'
                return 0
            fi
            sleep 1
        done
        step 'the service is up'
    }
    # the supervisor and where its services are, as a new session would have them
    services() {
        if [ -f "$PREFIX/etc/profile.d/start-services.sh" ]; then
            # shellcheck disable=SC1091  # termux-services' own
            . "$PREFIX/etc/profile.d/start-services.sh"
        fi
        SVDIR=${SVDIR:-$PREFIX/var/service}
        export SVDIR
    }

    boot() {
        write "$HOME/.termux/boot/bmoe-agent" 700 <<END
#!$PREFIX/bin/sh
# $mark.
# Termux:Boot runs this once after the phone has started.
termux-wake-lock
. '$PREFIX/etc/profile.d/start-services.sh'
END
        there termux-wake-lock || could_not 'find termux-wake-lock: pkg install termux-tools'
        step 'the boot script is there; it needs the Termux:Boot app, opened once (this script cannot see whether it is)'
    }

    remove() {
        if [ "$purge" = yes ] && [ "$sure" != yes ]; then
            [ -t 0 ] || wrong '--purge deletes every record that no host has stored: without a terminal it needs --yes'
            ask "Delete $home with its identity and all records ($(du -sh "$home" 2>/dev/null | cut -f 1))? Type yes:"
            [ "$answer" = yes ] || give_up 'nothing was removed'
        elif [ "$sure" != yes ] && [ -t 0 ]; then
            ask 'Remove the agent (its records are kept)? Type yes:'
            [ "$answer" = yes ] || give_up 'nothing was removed'
        fi
        place=$PREFIX/var/service/bmoe-agent
        if [ -d "$place" ]; then
            if there sv; then
                services
                # unlike `down` it waits until the agent has ended
                sv stop bmoe-agent >/dev/null 2>&1 || could_not 'stop the agent: sv stop bmoe-agent'
            fi
            if ours "$place/run"; then
                rm -rf "$place"
                step 'the service is gone'
            else
                could_not "remove $place: it is not this script's"
            fi
        fi
        for file in "$HOME/.termux/boot/bmoe-agent" "$PREFIX/bin/bmoe-agent" "$PREFIX/bin/bmoe-sim"; do
            [ -e "$file" ] || continue
            if ours "$file"; then rm -f "$file"; else could_not "remove $file: it is not this script's"; fi
        done
        rm -rf "$data"
        step 'the program is gone'
        if [ "$purge" = yes ]; then
            rm -rf "$home" "$PREFIX/var/log/sv/bmoe-agent"
            step "$home is gone; on the host: bmoe unpair"
        elif [ -d "$home" ]; then
            step "$home is kept, with its identity and records; a new installation goes on with it"
        fi
        step 'packages are left as they are (python, python-grpcio, termux-services)'
        if ours "$PREFIX/bin/bmoe-agent-setup"; then rm -f "$PREFIX/bin/bmoe-agent-setup"; fi
    }

    finish() {
        if [ -n "$failed" ]; then
            printf '\nDone, except:%s\n' "$failed" >&2
            exit 1
        fi
    }

    wheel='' engines='' models='' name='' service=yes boot=yes remove=no purge=no sure=no
    while [ $# -gt 0 ]; do
        case $1 in
            -h | --help) usage && exit 0 ;;
            --engine | --models | --name)
                [ $# -ge 2 ] || wrong "$1 needs a value"
                case $1 in
                    --engine) engines="$engines$2
" ;;
                    --models) models="$models$2
" ;;
                    --name) name=$2 ;;
                esac
                shift
                ;;
            --upgrade) ;; # installing again is upgrading; the word is for people
            --no-service) service=no ;;
            --no-boot) boot=no ;;
            --remove) remove=yes ;;
            --purge) purge=yes ;;
            --yes) sure=yes ;;
            -*) wrong "$1: no such option" ;;
            *)
                [ -z "$wheel" ] || wrong "$1: one wheel is enough"
                wheel=$1
                ;;
        esac
        shift
    done
    if [ -z "${PREFIX:-}" ] || ! there pkg; then
        give_up 'this is not Termux: PREFIX is not set, or there is no pkg'
    fi
    home=${BMOE_AGENT_HOME:-$HOME/.bmoe-agent}
    data=$HOME/.local/share/bmoe-fleet
    venv=$data/venv
    case $PREFIX$HOME$home in *"'"*) give_up 'a quote in PREFIX, HOME or BMOE_AGENT_HOME: choose another place' ;; esac
    umask 077
    if [ "$remove" = yes ]; then
        remove
        finish
        exit 0
    fi
    [ "$purge" = no ] || wrong '--purge goes with --remove'
    packages
    agent
    commands
    identity
    [ "$service" = no ] || service
    [ "$boot" = no ] || boot
    say ''
    say 'Next: bmoe-agent doctor    what a good night needs of this phone, and the commands for it'
    say '      bmoe-agent baseline  once, while the phone is idle and cool'
    say '      on the host: bmoe pair'
    finish
)

bmoe_setup "$@"
