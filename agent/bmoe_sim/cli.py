"""bmoe-sim: a stand-in for bmoe-cli that keeps the telemetry contract; what it produces is marked simulated.

Comes in: the engine's argv; BMOE_SIM for what to simulate (settings.py); or one of the simulator's own commands:

    bmoe-sim --make-model PATH [--size-mib N] [--shards K] [--layers N] [--experts N] [--arch NAME]
    bmoe-sim --make-engine PATH [SETTINGS]     an executable that runs bmoe-sim with BMOE_SIM=SETTINGS

Goes out: what the engine would print, write and exit with.
"""

import os
import shlex
import signal
import sys

from bmoe_sim import argv as arguments
from bmoe_sim import settings as told
from bmoe_sim.argv import RefusedError
from bmoe_sim.model import ModelError
from bmoe_sim.output import Output, complain

_ARCHS = ("deepseek2", "gemma4", "glm4moe", "gpt-oss", "lfm2moe", "qwen2moe", "qwen3moe", "qwen3next")
_TEMPLATE_TOKENS = 9


def main(argv: list[str] | None = None) -> int:
    """Run; the exit status."""
    words = sys.argv[1:] if argv is None else argv
    # An interrupt ends the engine by its signal, whole rows and no trailer; Python would raise instead. What the
    # parent had ignored stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if words and words[0] in {"--make-model", "--make-engine"}:
        return _make(words)
    try:
        settings = told.parse(os.environ.get("BMOE_SIM", ""))
    except told.SettingsError as e:
        complain(str(e))
        return 2
    name = sys.argv[0] or "bmoe-sim"
    output = Output("", [])
    try:
        asked = arguments.info_asked(words, settings)
        if asked:
            output.write(_info(asked, name, settings).encode())
            return 0
        output = Output(settings.copy, [name, *words])
        options = arguments.parse(words, os.environ, settings)
        return _run(options, settings, output)
    except OSError as e:
        complain(f"\nerror: {e.filename or 'memory'}: {os.strerror(e.errno or 0)}")
        return 1
    except RefusedError as refused:
        if refused.reason:
            complain(refused.reason)
        if refused.usage:
            output.write(arguments.usage(name, settings).encode())
        return refused.status


def _info(asked: str, name: str, settings: told.Settings) -> str:
    if asked == "--version":
        return f"bmoe-cli {settings.version}\n"
    if asked == "--list-archs":
        return "supported MoE architectures:\n" + "".join(f"  {arch}\n" for arch in _ARCHS)
    return arguments.usage(name, settings)


def _run(options: arguments.Options, settings: told.Settings, output: Output) -> int:
    from bmoe_sim.engine import Engine
    from bmoe_sim.faults import FatalError
    from bmoe_sim.session import Session, error_line

    try:
        engine = Engine(options, settings, output.copies)
    except (ModelError, FatalError) as e:
        complain(str(e))
        complain(f"llama_model_load: error loading model: failed to load model from {options.model}")
        message = f"failed to load model: {options.model}"
        if options.session:
            output.write(error_line(0, message, fatal=True))
        else:
            complain(f"\nerror: {message}")
        return 1
    if options.session:
        return Session(engine, output).run()
    try:
        return _one_shot(engine, output)
    except FatalError as e:
        complain(f"\nerror: {e}")
        return 1


def _one_shot(engine: object, output: Output) -> int:
    from bmoe_sim import summary
    from bmoe_sim.engine import Engine, Request
    from bmoe_sim.telling import Teller
    from bmoe_sim.words import count_tokens

    assert isinstance(engine, Engine)
    o = engine.o
    if not o.prompt:
        complain("\nerror: empty prompt")
        return 1
    n_prompt = count_tokens(o.prompt) + (_TEMPLATE_TOKENS if o.chatml else 1)
    if n_prompt + o.n_predict > o.n_ctx:
        complain(f"\nerror: prompt + n_predict exceeds the session n_ctx ({o.n_ctx}); use a larger --ctx-size")
        return 1
    if not o.progress:
        output.write(o.prompt)
    teller = Teller(output, engine.settings, lines=o.progress, streaming=o.moe_stream)
    done = engine.generate(Request(o.prompt, n_prompt, o.n_predict, o.think), teller.emit)
    if o.progress:
        # printf("%s"): the answer ends at its first NUL, whatever the deltas carried
        output.write(b"=== answer ===\n" + done.text.split(b"\0")[0] + b"\n=== perf ===\n")
    else:
        output.write(b"\n\n")
    output.write(summary.report(done, o, engine.model.arch, engine.settings, engine.model.moe_layers).encode())
    return 0


def _make(words: list[str]) -> int:
    usage = __doc__ or ""
    if len(words) < 2 or words[1].startswith("-"):
        complain(usage)
        return 2
    path = words[1]
    if words[0] == "--make-engine":
        settings = words[2] if len(words) > 2 else ""
        try:
            told.parse(settings)
        except told.SettingsError as e:
            complain(str(e))
            return 2
        make_engine(path, settings)
        print(path)
        return 0
    from bmoe_sim.makemodel import make_model

    numbers = {"--size-mib": 16, "--shards": 1, "--layers": 4, "--experts": 16}
    arch = "qwen3moe"
    rest = words[2:]
    try:
        for flag, value in zip(rest[::2], rest[1::2], strict=True):
            if flag == "--arch":
                arch = value
            elif flag in numbers:
                numbers[flag] = int(value)
            else:
                raise ValueError(f"{flag} is no option of --make-model")
        size, shards, layers, experts = numbers.values()
        paths = make_model(path, size_mib=size, shards=shards, layers=layers, experts=experts, arch=arch)
    except ValueError as e:
        complain(f"bmoe-sim: --make-model: {e}\n{usage}")
        return 2
    except OSError as e:
        complain(f"bmoe-sim: --make-model: {e.filename}: {os.strerror(e.errno or 0)}")
        return 1
    print("\n".join(paths))
    return 0


def make_engine(path: str, settings: str = "") -> None:
    """Write an executable that is this simulator with its settings built in.

    An agent launches engines with a clean environment; settings inside the file get through it. They are part of the
    file's bytes, so two such engines are two binaries, as two builds would be.
    """
    import bmoe_proto

    import bmoe_sim

    roots = dict.fromkeys(os.path.dirname(next(iter(package.__path__))) for package in (bmoe_sim, bmoe_proto))
    script = (
        "#!/bin/sh\n"
        "# bmoe-sim, a simulator standing in for bmoe-cli\n"
        f"export BMOE_SIM={shlex.quote(settings)} PYTHONPATH={shlex.quote(os.pathsep.join(roots))}\n"
        f'exec {shlex.quote(sys.executable)} -P -m bmoe_sim.cli "$@"\n'
    )
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as f:
        f.write(script)
    os.chmod(temporary, 0o755)  # noqa: S103 - a program is executed by others than its owner
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
