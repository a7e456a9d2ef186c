"""How the simulator ends before its time: by signals, by faults it was told, and by what it refuses."""

import os
import signal
import subprocess
import sys
import time

import pytest
from bmoe_proto.contract.events import Other, Progress
from bmoe_proto.contract.metrics import parse_metrics
from bmoe_proto.contract.stdout import parse
from bmoe_sim.makemodel import make_model
from support.simulator import FAST, PROMPT, STREAM, one_shot, sim

pytestmark = pytest.mark.agent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(str(tmp_path_factory.mktemp("model") / "tiny moe.gguf"), size_mib=8)[0]


@pytest.mark.parametrize(
    ("kind", "signal_number"),
    [
        ("kill", signal.SIGKILL),
        ("segv", signal.SIGSEGV),
        ("crash", signal.SIGABRT),
        ("term", signal.SIGTERM),
        ("oom", signal.SIGKILL),
        ("torn", signal.SIGKILL),
    ],
)
def test_ends_by_signal_leave_whole_rows_and_no_trailer(kind, signal_number, model, tmp_path):
    settings = f"fault={kind}@9{':8' if kind == 'oom' else ''}"
    done = one_shot(model, [*STREAM, "--csv", "m.csv"], settings, cwd=tmp_path)
    assert done.returncode == -signal_number
    metrics = parse_metrics((tmp_path / "m.csv").read_bytes())
    assert len(metrics) == 8
    assert not metrics.trailers
    assert not metrics.problems
    events = parse(done.stdout)
    assert sum(isinstance(e, Progress) for e in events) == 8
    assert len([e for e in events if isinstance(e, Other)]) == (kind == "torn")
    assert done.stdout.endswith(b"\n") == (kind != "torn")
    assert (b"GGML_ASSERT" in done.stderr) == (kind == "crash")


def test_other_faults(model, tmp_path):
    done = one_shot(model, STREAM, "fault=exit@3:7")
    assert done.returncode == 7
    done = one_shot(model, STREAM, "fault=fatal@3")
    assert (done.returncode, b"error: llama_decode failed" in done.stderr) == (1, True)
    assert b"=== perf" not in done.stdout
    done = one_shot(model, STREAM, "fault=exit@load")
    assert (done.returncode, done.stdout) == (1, b"")

    done = one_shot(model, STREAM, "fault=half_char@24")
    assert done.returncode == 0
    assert done.stdout.count(b'"delta_text":"\xc3"') == 1
    assert b"\xc3\n=== perf ===" in done.stdout
    done = one_shot(model, STREAM, "fault=half_char@5")
    lines = [line for line in done.stdout.splitlines() if line.startswith(b"BMOE_PROGRESS")]
    assert lines[4].endswith(b'"delta_text":"\xc3"}')
    assert b'"delta_text":"\xa9' in lines[5]

    events = parse(one_shot(model, STREAM, "fault=overflow@4:300000+noise@6").stdout)
    others = [e for e in events if isinstance(e, Other)]
    assert len(others) >= 2
    assert sum(isinstance(e, Progress) for e in events) == 24

    one_shot(model, [*STREAM, "--csv", "m.csv"], "fault=clamp@3", cwd=tmp_path)
    c = parse_metrics((tmp_path / "m.csv").read_bytes()).columns
    assert c["compute_ms"][2] == 0
    assert c["mgmt_ms"][2] + c["io_ms"][2] > c["wall_ms"][2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_hanging_engine_dies_by_the_signal_it_gets(number, model, tmp_path):
    environment = {
        "PATH": os.environ["PATH"],
        "BMOE_SIM": f"{FAST},fault=hang@4",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    argv = [sys.executable, "-m", "bmoe_sim.cli", "-m", model, "-p", PROMPT, "--progress", "--csv", str(tmp_path / "m")]
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            told = [process.stdout.readline() for _ in range(3)]
            assert all(line.startswith(b"BMOE_PROGRESS") for line in told)
            deadline = time.monotonic() + 60
            while (tmp_path / "m").read_bytes().count(
                b"\n"
            ) < 9:  # preamble, header, three rows: the row follows its line
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(number)
            assert process.wait(60) == -number
            assert process.stdout.read() == b""
        finally:
            process.kill()  # nothing is left where the signal was not heeded
    metrics = parse_metrics((tmp_path / "m").read_bytes())
    assert len(metrics) == 3
    assert not metrics.trailers


def test_refusals(model, tmp_path):
    def refused(argv, settings=""):
        done = sim(argv, settings, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr.decode()

    code, out, err = refused(["-m", model, "--frobnicate"])
    assert (code, out[:6]) == (1, b"usage:")
    assert err == "unknown arg: --frobnicate\n"
    for flag in ("--row-stream", "--decide", "--expert-substitute", "--prefill-device"):
        code, out, err = refused(["-m", model, flag], "pose=0.19")
        assert (code, out[:6], err) == (1, b"usage:", f"unknown arg: {flag}\n")
    code, out, err = refused(["-m", model, "-p", "x", "--mtp", "--ngram"])
    assert (code, out) == (2, b"")
    assert "--mtp and --ngram" in err
    code, out, err = refused(["-m", model, "-p", "x", "--moe-stream", "--cache-mb", "500"])
    assert (code, out) == (1, b"")
    assert "moe.cache_mb=500 is in the pathological band" in err
    code, out, err = refused(["-m", model, "-p", "x", "--moe-stream", "--overlap"], "hook=0")
    assert (code, out) == (1, b"")
    assert "overlap" in err
    code, out, err = refused(["-m", str(tmp_path / "nope.gguf"), "-p", "x"])
    assert (code, out) == (1, b"")
    assert "failed to open GGUF file" in err
    (tmp_path / "text.gguf").write_bytes(b"this is no model")
    code, out, err = refused(["-m", str(tmp_path / "text.gguf"), "-p", "x"])
    assert (code, "no GGUF file" in err) == (1, True)
    assert refused([])[0:1] == (1,)
    assert refused(["-m"]) == (1, b"", "missing value for -m\n")
    assert refused(["-m", model, "-n", "many"])[0] == 2
    assert refused(["-m", model, "-p", ""])[::2] == (1, refused(["-m", model])[2])
    assert "exceeds" in refused(["-m", model, "-p", "x", "-n", "5000"])[2]
    assert refused(["-m", model], "tok_s=never")[0] == 2
    code, out, err = refused(["-m", model, "-p", "x"], "copy=/proc/nowhere")
    assert (code, out, "/proc/nowhere" in err) == (1, b"", True)
    code, out, err = refused(["-m", model, "-p", "x", "-n", "1", "--csv", "/proc/nowhere/m.csv"])
    assert (code, "warning: could not open csv" in err) == (0, True)
    code, out, err = refused(["-m", model, "-p", "x", "-n", "1", "--route-trace", "r.csv"])
    assert (code, "needs --moe-stream" in err, (tmp_path / "r.csv").exists()) == (0, True, False)
