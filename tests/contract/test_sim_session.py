"""The simulator's session mode, driven over its pipes and read by the contract parser."""

import os
import subprocess
import sys
import threading
import time

import pytest
from bmoe_proto.contract.events import Begin, Decide, Done, Error, Other, Progress, Ready
from bmoe_proto.contract.metrics import parse_metrics
from bmoe_proto.contract.stdout import StdoutParser, parse
from bmoe_sim.cli import make_engine
from bmoe_sim.makemodel import make_model

pytestmark = pytest.mark.agent

FAST = "tok_s=2000,load_s=0,prefill_s=0.001"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(str(tmp_path_factory.mktemp("model") / "tiny.gguf"), size_mib=4)[0]


class Talk:
    """A session on real pipes; events are gathered as they come."""

    def __init__(self, model, *flags, settings="", cwd=None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bmoe_sim.cli", "-m", model, "--session", *flags],
            env={"PATH": os.environ["PATH"], "BMOE_SIM": f"{FAST},{settings}", "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.events = []
        self._parser = StdoutParser()
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        while data := self.process.stdout.read1():
            with self._more:
                self.events += self._parser.feed(data)
                self._more.notify_all()
        with self._more:
            self.events += self._parser.close()
            self._more.notify_all()

    def send(self, *lines):
        for line in lines:
            self.process.stdin.write(line if isinstance(line, bytes) else line.encode() + b"\n")
        self.process.stdin.flush()

    def wait_for(self, kind, count=1):
        with self._more:
            assert self._more.wait_for(lambda: len(self.all(kind)) >= count, 60)
            return self.all(kind)[count - 1].to_json()

    def all(self, kind):
        return [e for e in self.events if isinstance(e, kind)]

    def end(self, *, close=True):
        if close:
            self.process.stdin.close()
        status = self.process.wait(60)
        self._reader.join(60)
        self.process.stdout.close()
        if not close:
            self.process.stdin.close()
        assert not self.all(Other)
        return status

    def __enter__(self) -> "Talk":
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(60)
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                pipe.close()
            except BrokenPipeError:
                pass


STREAM = ["--moe-stream", "--cache-mb", "2", "--force-cache", "--chatml", "-c", "256"]


def test_turns_are_answered_in_order_and_counted_in_the_csv(model, tmp_path):
    with Talk(model, *STREAM, "--csv", "m.csv", "--route-trace", "r.csv", cwd=tmp_path) as talk:
        ready = talk.wait_for(Ready)
        assert (ready["n_ctx"], ready["n_expert_used"], ready["think_ctl"]) == (256, 4, "template")
        talk.send(
            '{"cmd":"generate","id":1,"n_predict":16,"prompt":"tell a story"}',
            '{"cmd":"generate","id":2,"n_predict":12,"clear_kv":false,"prompt":"go on"}',
            '{"cmd":"generate","id":3,"n_predict":500,"prompt":"too much"}',
            '{"cmd":"generate","id":4,"n_predict":5,"prompt":""}',
            "no json at all",
            '{"cmd":"dance","id":5}',
            '{"cmd":"generate","id":6,"n_predict":0,"prompt":"nothing"}',
            '{"cmd":"generate","id":7,"n_predict":3,"prompt":"tell a story"}',
        )
        assert talk.end() == 0  # end of input lets what is queued finish
        assert [e.to_json()["id"] for e in talk.all(Begin)] == [1, 2, 3, 4, 6, 7]
        done = [e.to_json() for e in talk.all(Done)]
        assert [(d["id"], d["tokens"], d["cancelled"]) for d in done] == [
            (1, 16, False),
            (2, 12, False),
            (6, 0, False),
            (7, 3, False),
        ]
        # the prompt's cells are kept, the answer's are prefilled again (generations: Sessions)
        assert done[1]["n_past"] - 12 == done[0]["n_past"] - 16 + done[1]["n_prompt"]
        assert done[3]["n_prompt"] + 3 == done[3]["n_past"]
        errors = [e.to_json() for e in talk.all(Error)]
        assert [(e["id"], e["fatal"]) for e in errors] == [(3, False), (4, False)]
        assert "exceeds the session n_ctx (256)" in errors[0]["msg"]
        progress = [e.to_json() for e in talk.all(Progress)]
        assert "".join(p["delta_text"] for p in progress[:16]) == done[0]["text"]
    metrics = parse_metrics((tmp_path / "m.csv").read_bytes())
    assert not metrics.problems
    assert metrics.columns["turn"] == [0] * 16 + [1] * 12 + [3] * 3
    assert [t.values["tokens"] for t in metrics.trailers] == [16, 12, 0, 3]
    for trailer, told in zip(metrics.trailers, done, strict=True):
        assert trailer.values["tok/s"] == told["tok_s"]
        assert trailer.values["prefill_read_mib"] == told["prefill_read_mib"]
    steps = [line.split(",")[:3] for line in (tmp_path / "r.csv").read_text().splitlines() if line[0] in "0123"]
    second = [int(step) for turn, phase, step in steps if (turn, phase) == ("1", "1")]
    assert min(second) == done[1]["n_past"] - 12
    assert not [s for s in steps if s[0] == "2" and s[1] == "1"]


def test_cancel_ends_the_turn_that_runs_and_one_before_it_is_lost(model):
    with Talk(model, "--csv", os.devnull, "-c", "90000", settings="tok_s=200") as talk:
        talk.wait_for(Ready)
        talk.send('{"cmd":"cancel"}', '{"cmd":"generate","id":1,"n_predict":4,"prompt":"short"}')
        assert talk.wait_for(Done)["cancelled"] is False
        talk.send('{"cmd":"generate","id":2,"n_predict":80000,"prompt":"long"}')
        talk.wait_for(Progress, 7)
        talk.send('{"cmd":"cancel"}')
        done = talk.wait_for(Done, 2)
        assert done["cancelled"] is True
        assert 3 <= done["tokens"] < 80000
        assert len(talk.all(Progress)) == 4 + done["tokens"]
        talk.send('{"cmd":"generate","id":3,"n_predict":2,"prompt":"still here"}', '{"cmd":"close"}')
        assert talk.end(close=False) == 0
        assert talk.all(Done)[2].to_json()["tokens"] == 2


def test_a_turn_can_be_cancelled_in_its_prefill(model):
    with Talk(model, settings="prefill_s=100") as talk:
        talk.send('{"cmd":"generate","id":1,"n_predict":4,"prompt":"short"}')
        talk.wait_for(Begin)
        deadline = time.monotonic() + 60
        while not talk.all(Done) and time.monotonic() < deadline:  # again until it ends: an early one is lost
            talk.send('{"cmd":"cancel"}')
            time.sleep(0.05)
        assert talk.all(Done)[0].to_json()["tokens"] == 0
        assert talk.end() == 0


def test_decisions(model):
    choices = '"suffix":"is it?","choices":["yes","no","maybe\\u0000"]}'
    with Talk(model, *STREAM, "--decide", "--prefill-device", "gpu") as talk:
        talk.send(
            '{"cmd":"decide","id":1,"prefix":"a long story of the sea",' + choices,
            '{"cmd":"decide","id":2,"prefix":"a long story of the sea",' + choices,
            '{"cmd":"decide","id":3,"prefix":"a long story of the sea","reuse_prefix":false,' + choices,
            '{"cmd":"decide","id":4,"prefix":"x","suffix":"y","choices":[]}',
            '{"cmd":"decide","id":5,"prefix":"x","suffix":"y","choices":["same"," same"]}',
        )
        assert talk.end() == 0
        first, second, third = (e.to_json() for e in talk.all(Decide))
        assert first["choice_logp"] == second["choice_logp"]
        assert first["choice_logp"][2] is None
        assert first["best"] == max((0, 1), key=lambda i: first["choice_logp"][i])
        assert (first["n_reused"], second["n_reused"], third["n_reused"]) == (0, 6, 0)
        for d in (first, second, third):
            assert d["n_reused"] + d["n_prefilled"] == d["n_tokens"]
            assert d["prefill_dev_tokens"] == d["n_prefilled"]
        assert [e.to_json()["fatal"] for e in talk.all(Error)] == [False, False]
        assert not talk.all(Progress)
    with Talk(model, *STREAM) as talk:
        talk.send('{"cmd":"decide","id":1,"prefix":"x","suffix":"y","choices":["a","b"]}')
        assert "--decide" in talk.wait_for(Error)["msg"]
        assert talk.end() == 0
    with Talk(model, *STREAM, settings="pose=0.19") as talk:
        talk.send('{"cmd":"decide","id":1}', '{"cmd":"generate","id":2,"n_predict":1,"prompt":"x"}')
        talk.wait_for(Done)
        assert talk.end() == 0
        assert [e.to_json()["id"] for e in talk.all(Begin)] == [2]
        assert "prefill_cpu_s" not in talk.all(Done)[0].to_json()


def test_a_fatal_error_and_a_missing_model_end_the_session(model, tmp_path):
    with Talk(model, settings="fault=fatal@3") as talk:
        talk.send('{"cmd":"generate","id":8,"n_predict":9,"prompt":"x"}')
        assert talk.end(close=False) == 1
        error = talk.all(Error)[0].to_json()
        assert (error["id"], error["fatal"]) == (8, True)
        assert len(talk.all(Progress)) == 2
    with Talk(str(tmp_path / "nope.gguf")) as talk:
        assert talk.end(close=False) == 1
        error = talk.all(Error)[0].to_json()
        assert (error["id"], error["fatal"]) == (0, True)
        assert "nope.gguf" in error["msg"]


def test_a_model_that_cannot_stop_thinking_thinks_into_the_answer(model):
    with Talk(model, "--chatml", settings="reason=3") as talk:
        talk.send('{"cmd":"generate","id":1,"n_predict":6,"prompt":"x"}')
        talk.send('{"cmd":"generate","id":2,"n_predict":6,"think":false,"prompt":"x"}')
        assert talk.end() == 0
        one, two = (e.to_json() for e in talk.all(Done))
        assert one["reasoning"]
        assert two["reasoning"] == ""
        assert two["text"] == one["reasoning"] + one["text"]


def test_an_engine_made_with_settings_ignores_the_environment(model, tmp_path):
    make_engine(str(tmp_path / "bmoe-cli"), f"{FAST},pose=0.19,text=a%2Cb")
    done = subprocess.run(
        [tmp_path / "bmoe-cli", "-m", model, "-p", "x", "--progress"],
        env={"PATH": os.environ["PATH"], "BMOE_SIM": "fault=exit@load"},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert b"=== answer ===\na,b\n=== perf" in done.stdout
    assert not [e for e in parse(done.stdout) if isinstance(e, Other)]
