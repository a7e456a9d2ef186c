"""`bmoe-agent`: the phone's command line.

In: arguments. Out: what was asked, on stdout (one JSON document with `--json`, where a command offers it); messages and
progress on stderr. Exit codes: 0 done, 1 the answer is no (the run did not end well), 2 wrong usage, 3 something outside
failed.

    init      make or complete this agent's home: identity, secret, engines, model directories
    serve     run plans and serve the record, until stopped
    run       one benchmark from here, through the same path as a plan from a host
    baseline  record this phone's cold speed, which the speed probe compares with
    gates     what every gate reads now
    status    what the agent does now
    doctor    what a good night needs, and how to get it
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmoe_agent import config

if TYPE_CHECKING:
    from bmoe_agent.gates import Gates
    from bmoe_agent.roots import Roots

DONE, ANSWER_IS_NO, WRONG_USAGE, FAILED_OUTSIDE = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return _say("interrupted", FAILED_OUTSIDE)
    except BrokenPipeError:  # whoever read us has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def _main(arguments: list[str]) -> int:
    clear = "\r\033[K" if sys.stderr.isatty() else ""  # over a line of progress
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=f"{clear}%(asctime)s %(levelname)s %(message)s")
    if arguments[:1] == ["doctor"]:
        from bmoe_agent.doctor.cli import main as doctor

        return int(doctor(arguments[1:]))
    engine_flags: list[str] = []
    if arguments[:1] == ["run"] and "--" in arguments:
        at = arguments.index("--")
        arguments, engine_flags = arguments[:at], arguments[at + 1 :]
    parsed = _parser().parse_args(arguments)
    parsed.engine_flags = engine_flags
    try:
        code = int(parsed.command(parsed))
        sys.stdout.flush()  # while what goes wrong with it can be told
        return code
    except config.ConfigError as error:
        return _say(str(error), WRONG_USAGE)
    except BrokenPipeError:
        raise
    except Exception as error:
        if os.environ.get("BMOE_AGENT_DEBUG"):
            raise
        return _say(_told(error), FAILED_OUTSIDE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bmoe-agent", description="Measure bmoe-cli on this phone and keep the record."
    )
    from bmoe_agent import __version__

    parser.add_argument("--version", action="version", version=f"bmoe-agent {__version__}")
    home = argparse.ArgumentParser(add_help=False)
    home.add_argument("--home", help="this agent's home (default: BMOE_AGENT_HOME, else ~/.bmoe-agent)")
    home.add_argument("--json", action="store_true", help="one JSON document on stdout")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    init = commands.add_parser("init", parents=[home], help="make or complete this agent's home")
    init.add_argument(
        "--engine", action="append", default=[], metavar="[NAME=]PATH", help="a bmoe-cli; may be repeated"
    )
    init.add_argument("--models", action="append", default=[], metavar="DIR", help="a directory of gguf files")
    init.add_argument("--name", default="", help="what people call this phone")
    init.add_argument("--socket", default="", metavar="NAME", help="name of the abstract socket")
    init.set_defaults(command=_init)

    serve = commands.add_parser("serve", parents=[home], help="run plans and serve the record")
    serve.set_defaults(command=_serve)

    run = commands.add_parser(
        "run", parents=[home], help="one benchmark from here", usage="%(prog)s --model M [options] -- ENGINE FLAGS"
    )
    run.add_argument("--model", "-m", required=True, help="a model's name inside a model directory")
    run.add_argument("--engine", default="", help="a configured engine's name")
    prompt = run.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", "-p", help="prompt text")
    prompt.add_argument("--prompt-file", type=Path, help="prompt from a file, byte for byte")
    run.add_argument("-n", type=_tokens, default=0, metavar="N", help="tokens to generate")
    run.add_argument("--trace", default="", help="traces besides the metrics: route, compute, compute_layers, io")
    run.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="a label; may be repeated")
    run.add_argument("--env", action="append", default=[], metavar="KEY=VALUE", help="a variable for the engine")
    run.set_defaults(command=_run)

    baseline = commands.add_parser("baseline", parents=[home], help="record this phone's cold speed")
    baseline.set_defaults(command=_baseline)
    gates = commands.add_parser("gates", parents=[home], help="what every gate reads now")
    gates.set_defaults(command=_gates)
    status = commands.add_parser("status", parents=[home], help="what the agent does now")
    status.set_defaults(command=_status)
    commands.add_parser("doctor", help="what a good night needs, and how to get it")
    return parser


def _init(arguments: argparse.Namespace) -> int:
    from bmoe_proto import proof

    from bmoe_agent.initialise import init

    done = init(
        config.home_directory(arguments.home),
        engines=arguments.engine,
        models=arguments.models,
        name=arguments.name,
        socket_name=arguments.socket,
    )
    settings = done.config
    secret = proof.secret_text(done.secret) if done.secret is not None else None
    if arguments.json:
        document = {
            "home": str(settings.home),
            "uuid": settings.uuid.hex(),
            "name": settings.name,
            "socket": settings.socket,
            "engines": {name: str(engine.path) for name, engine in settings.engines.items()},
            "models": [str(directory) for directory in settings.model_dirs],
            "secret": secret,
            "changed": list(done.changed),
        }
        _print_json(document)
        return DONE
    print(f"agent   {settings.uuid.hex()} ({settings.name})")
    print(f"home    {settings.home}")
    print(f"socket  @{settings.socket}")
    for name, engine in settings.engines.items():
        print(f"engine  {name} = {engine.path}")
    for directory in settings.model_dirs:
        print(f"models  {directory}")
    if secret is not None:
        print(f"secret  {secret}")
        here = (
            ""
            if sys.platform == "android"
            else f"; where this machine is the host: `bmoe pair local:{settings.socket}`"
        )
        print(f"The secret is shown this once. Give it to `bmoe pair` on the host{here}.")
    return DONE


def _serve(arguments: argparse.Namespace) -> int:
    from bmoe_agent.supervisor import Supervisor

    return Supervisor(config.home_directory(arguments.home)).run()


def _run(arguments: argparse.Namespace) -> int:
    from bmoe_proto.asking import MAX_PLAN_BYTES

    from bmoe_agent import run_here

    if arguments.prompt_file is not None:
        try:
            with arguments.prompt_file.open("rb") as file:
                prompt = file.read(MAX_PLAN_BYTES + 1)
        except OSError as error:
            return _say(f"{arguments.prompt_file}: {error.strerror}", WRONG_USAGE)
        if len(prompt) > MAX_PLAN_BYTES:
            return _say(f"{arguments.prompt_file}: more than the {MAX_PLAN_BYTES} bytes a plan may have", WRONG_USAGE)
    else:
        prompt = os.fsencode(arguments.prompt if arguments.prompt is not None else run_here.REFERENCE_PROMPT)
    try:
        plan = run_here.plan_of_one(
            model=arguments.model,
            engine=arguments.engine,
            prompt=prompt,
            n_predict=arguments.n,
            traces=[kind for kind in arguments.trace.split(",") if kind],
            flags=arguments.engine_flags,
            labels=_pairs(arguments.label),
            environment=_pairs(arguments.env),
        )
    except ValueError as error:
        return _say(str(error), WRONG_USAGE)
    ended = run_here.run(config.home_directory(arguments.home), plan)
    if arguments.json:
        _print_json(ended)
    else:
        print(f"run {ended['run']}: {ended['outcome']} ({ended['cause']}), {ended['tokens']} tokens")
        for line in ended["evidence"]:
            print(f"  {line}")
        for artifact in ended["artifacts"]:
            print(f"  {artifact['name']} {artifact['size']} bytes {artifact['problem']}".rstrip())
    return DONE if ended["outcome"] == "ok" else ANSWER_IS_NO


def _baseline(arguments: argparse.Namespace) -> int:
    gates, _ = _sensors(arguments)
    if doing := _serving(arguments):
        raise RuntimeError(
            f"the agent here is {doing}: its cell and the cold speed would spoil each other; wait until it is idle"
        )

    def tell(done: int, of: int) -> None:
        print(f"\rpass {done} of {of}", end="" if done < of else "\n", file=sys.stderr, flush=True)

    found = gates.record_baseline(tell=tell)
    warnings = found.warnings()
    if arguments.json:
        _print_json(
            {"single_s": found.single_s, "multi_s": found.multi_s, "threads": found.threads, "warnings": warnings}
        )
    else:
        print(f"one thread {found.single_s:.3f} s, {found.threads} threads {found.multi_s:.3f} s")
        for warning in warnings:
            print(f"warning: {warning}")
    return ANSWER_IS_NO if warnings else DONE


def _gates(arguments: argparse.Namespace) -> int:
    from bmoe_agent.gates import GATES, Reading

    gates, _ = _sensors(arguments)
    doing = _serving(arguments)
    readings = {
        name: (Reading(None, f"not looked at: the agent here is {doing}"), kind)
        if doing and name == "speed_probe_ratio"
        else (gates.read(name), kind)
        for name, kind in GATES.items()
    }
    if arguments.json:
        _print_json(
            {
                name: {"value": reading.value, "unit": kind.unit, "text": reading.text, "source": reading.source}
                for name, (reading, kind) in readings.items()
            }
        )
        return DONE
    for name, (reading, kind) in readings.items():
        value = f"{reading.value:g} {kind.unit}".rstrip() if reading.value is not None else "not readable"
        print(f"{name:20} {value:16} {reading.text}")
    return DONE


def _status(arguments: argparse.Namespace) -> int:
    from bmoe_agent import run_here

    document = run_here.status(config.home_directory(arguments.home))
    if arguments.json:
        _print_json(document)
        return DONE if document["running"] else ANSWER_IS_NO
    for key, text in _status_lines(document):
        print(f"{key:9} {text}")
    return DONE if document["running"] else ANSWER_IS_NO


def _status_lines(told: dict[str, Any]) -> list[tuple[str, str]]:
    """What a status says, for eyes: as many lines as there is something to say."""
    lines = [("agent", f"{told['name']}  {told['uuid']}"), ("socket", f"@{told['socket']}")]
    lines.append(("paired", "yes" if told["paired"] else "no: `bmoe pair` on a host, with this agent's secret"))
    if not told["running"]:
        return [*lines, ("running", f"no: {told['why']}; `bmoe-agent serve` starts it")]
    lines.append(("running", f"yes, {told['state']}"))
    if told["plan"]:
        rate = f", {told['tok_s']:.2f} tok/s" if told["tok_s"] is not None else ""
        lines.append(("now", f"{told['plan']}, cell {told['cell']}, {told['tokens']} tokens{rate}"))
    kept, waiting, free = (_size(told[name]) for name in ("spool_bytes", "backlog_bytes", "free_bytes"))
    lines.append(("record", f"{told['runs']} runs, {kept} here, {waiting} of it not yet collected; {free} free"))
    open_plans = [plan for plan in told["plans"] if plan["done"] < plan["cells"] and plan["state"] != "cancelled"]
    lines += [
        ("plan", f"{plan['plan'][:8]}  {plan['name']}  {plan['state']}, {plan['done']} of {plan['cells']}")
        for plan in open_plans
    ]
    if ended := len(told["plans"]) - len(open_plans):
        lines.append(("plans", f"{ended} ended"))
    return lines


def _size(number: int) -> str:
    return (
        f"{number} B"
        if number < 1024
        else f"{number / 2**10:.0f} KiB"
        if number < 2**20
        else f"{number / 2**20:,.0f} MiB"
    )


def _serving(arguments: argparse.Namespace) -> str:
    """What the agent that serves this home is busy with; empty when it is idle, or none serves."""
    from bmoe_agent import run_here

    told = run_here.status(config.home_directory(arguments.home))
    return str(told["state"]) if told["running"] and told["state"] != "idle" else ""


def _sensors(arguments: argparse.Namespace) -> tuple[Gates, Roots]:
    from bmoe_agent.context import roots_here
    from bmoe_agent.gates import Gates

    home = config.home_directory(arguments.home)
    config.load(home)
    roots = roots_here()
    return Gates(roots, home), roots


def _tokens(text: str) -> int:
    """How many tokens: a whole number that a plan can hold; 0 leaves it to the engine."""
    if not text.isascii() or not text.isdigit() or int(text) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text}: a number of tokens is wanted, 0 or more")
    return int(text)


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise config.ConfigError(f"{text!r}: KEY=VALUE is expected")
        pairs[key] = value
    return pairs


def _print_json(document: object) -> None:
    print(json.dumps(document, ensure_ascii=True, allow_nan=False))


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _say(text: str, code: int) -> int:
    print(f"bmoe-agent: {text}", file=sys.stderr)
    return code
