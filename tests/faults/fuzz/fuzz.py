"""Run coverage-guided fuzzing (atheris) over the targets, one after the other, at low priority.

    python tests/faults/fuzz/fuzz.py [--seconds N] [--keep] [TARGET...]

Each target is a process of its own, bounded in memory and in the time of one input; it begins with the kept corpus and what
earlier runs found (`.cache/fuzz/<target>`). A crash leaves its input there and ends with 1. `--keep` puts the smallest set
of inputs with the same coverage into `corpus/<target>`, which test_corpus.py runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CORPUS = HERE / "corpus"
CACHE = ROOT / ".cache" / "fuzz"
INPUT_S = 10  # an input that takes longer is a hang
MOST_MIB = 1536  # a reader that takes more than this for 64 KiB of input has no bound
KEPT_BYTES, KEPT_FILES = 2048, 20


def child(name: str, arguments: list[str]) -> None:
    """Fuzz one target in this process, for ever or as libFuzzer's arguments say."""
    import atheris

    sys.path.insert(0, str(HERE))
    with atheris.instrument_imports(include=["bmoe_proto", "bmoe_agent", "bmoe_collector"]):
        import targets

        function = targets.TARGETS[name]
        function(b"")  # what a target imports, instrumented
    # merging starts itself again by what stands first
    atheris.Setup([f"{sys.executable} {__file__} --child {name}", *arguments], function)
    atheris.Fuzz()


def command(name: str, *arguments: str) -> list[str]:
    """A target as a process."""
    limits = [f"-timeout={INPUT_S}", f"-rss_limit_mb={MOST_MIB}", "-max_len=65536"]
    return [sys.executable, __file__, "--child", name, *limits, *arguments]


def run(name: str, seconds: int) -> bool:
    """Fuzz one target for a time; False when it found something."""
    work = CACHE / name
    work.mkdir(parents=True, exist_ok=True)
    kept = CORPUS / name
    folders = [str(work), *([str(kept)] if kept.is_dir() else [])]
    extra = [f"-max_total_time={seconds}", f"-artifact_prefix={work.parent}/{name}-", "-print_final_stats=1"]
    log = CACHE / f"{name}.log"
    with log.open("wb") as out:
        done = subprocess.run(
            command(name, *extra, *folders), stdout=out, stderr=out, check=False, preexec_fn=lambda: os.nice(10)
        )
    text = log.read_text(errors="replace")
    tries = next((line.rsplit(" ", 1)[1] for line in text.splitlines() if "number_of_executed_units" in line), "?")
    if done.returncode:
        print(f"{name}: FOUND something after {tries} inputs: {log}\n{text[-3000:]}", flush=True)
        return False
    print(f"{name}: {seconds} s, {tries} inputs, nothing found", flush=True)
    return True


def keep(name: str) -> None:
    """Merge what was found into the kept corpus: the fewest small inputs with all of the coverage."""
    merged = CACHE / f"{name}.merged"
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir(parents=True)
    sources = [str(folder) for folder in (CORPUS / name, CACHE / name) if folder.is_dir()]
    subprocess.run(command(name, "-merge=1", str(merged), *sources), check=True, capture_output=True)
    found = sorted(
        (path for path in merged.iterdir() if path.stat().st_size <= KEPT_BYTES), key=lambda p: p.stat().st_size
    )
    chosen = found if len(found) <= KEPT_FILES else [found[at * len(found) // KEPT_FILES] for at in range(KEPT_FILES)]
    target = CORPUS / name
    target.mkdir(parents=True, exist_ok=True)
    for path in chosen:
        shutil.copy(path, target / path.name[:12])
    print(f"{name}: {len(chosen)} of {len(found)} inputs kept")


def main() -> int:
    """The command line."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
        return 0
    sys.path.insert(0, str(HERE))
    from targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--keep", action="store_true", help="put what was found into the kept corpus")
    asked = parser.parse_args()
    names = asked.targets or list(TARGETS)
    found = [name for name in names if not run(name, asked.seconds)]
    if asked.keep:
        for name in names:
            keep(name)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
