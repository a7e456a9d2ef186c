"""The fuzz targets on their kept corpora: each input whole, cut, and with bytes changed (always the same ones)."""

import importlib.util
import random
import tracemalloc
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
spec = importlib.util.spec_from_file_location("fuzz_targets", HERE / "targets.py")
targets = importlib.util.module_from_spec(spec)
spec.loader.exec_module(targets)

HOSTILE = (b"\0", b"\xff", b"\n", b",", b'"', b"=", b"-", b"9" * 30, b"\x80" * 9, b"\xed\xa0\x80", b"nan", b"#")
MOST_BYTES = 96 << 20


def inputs(name):
    return [path.read_bytes() for path in sorted((HERE / "corpus" / name).iterdir())]


def changed(data, seed):
    """The input cut or with a few bytes replaced, put in or taken out."""
    chance = random.Random(f"{seed} {len(data)}")
    out = bytearray(data)
    if chance.random() < 0.2:
        del out[chance.randrange(len(out) + 1) :]
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(out) + 1)
        out[at : at + chance.choice((0, 1, 1, 8))] = chance.choice((*HOSTILE, bytes([chance.randrange(256)])))
    return bytes(out)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_kept_inputs_and_their_neighbours(name):
    kept = inputs(name)
    assert kept, "no corpus is kept for this target"
    for data in kept:
        targets.TARGETS[name](data)
        for seed in range(1 if name == "trace_file" else 4):
            targets.TARGETS[name](changed(data, seed))


@pytest.mark.parametrize("name", sorted(set(targets.TARGETS) - {"trace_file"}))
def test_a_small_input_takes_a_bounded_part_of_memory(name):
    target = targets.TARGETS[name]
    target(b"")  # what it imports
    tracemalloc.start()
    try:
        for data in sorted(inputs(name), key=len)[-3:]:
            target(data * (targets.MOST_BYTES // len(data)))
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def test_every_corpus_belongs_to_a_target_and_is_small():
    assert {path.name for path in (HERE / "corpus").iterdir()} == set(targets.TARGETS)
    assert all(path.stat().st_size <= 4096 for path in (HERE / "corpus").glob("*/*"))
