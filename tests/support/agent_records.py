"""Plans for an agent, and what they leave in its spool: read without a collector, and checked as every run must hold."""

import secrets
from collections.abc import Sequence

from bmoe_agent.spool import Spool
from bmoe_proto import calls
from bmoe_proto.v1 import telemetry_pb2 as pb

from support.agents import Agent, make_engine, wait_for


def cell(name: str, **more) -> pb.Cell:
    made = pb.Cell(**{"name": name, "model": "tiny", "artifacts": ["metrics"], **more})
    if not made.turns:
        made.prompt = b"Hello"
        made.n_predict = made.n_predict or 8
    return made


def plan(cells: Sequence[pb.Cell], **more) -> pb.Plan:
    for index, one in enumerate(cells):
        one.index = index
    return pb.Plan(plan_id=secrets.token_hex(16), name="test", cells=cells, **more)


def client(phone: Agent) -> calls.AgentClient:
    return calls.connect(f"unix-abstract:{phone.socket}", phone.secret, bytes(16), expect_uuid=phone.uuid)


def state_of(phone: Agent, plan_id: str) -> str:
    with client(phone) as connected:
        return next(item.state for item in connected.listing().plans if item.plan_id == plan_id)


def run_plan(phone: Agent, asked: pb.Plan) -> dict[str, list[pb.Frame]]:
    """Run a plan to its end; every run's frames by cell and attempt."""
    phone.start()
    with client(phone) as connected:
        reply = connected.submit(asked)
        assert not reply.refused
    wait_for(lambda: state_of(phone, asked.plan_id) in {"done", "stopped", "cancelled"}, "the plan's end", 90)
    assert phone.stop() == 0
    return record(phone)


def record(phone: Agent) -> dict[str, list[pb.Frame]]:
    spool = Spool(phone.home / "spool", 1 << 30)
    runs = {}
    for run_id in spool.runs():
        frames = list(spool.frames(run_id))
        for frame in frames:
            if frame.WhichOneof("what") == "run_started":
                runs[f"{frame.run_started.cell.name}/{frame.run_started.attempt}"] = frames
    return runs


def of(frames: list[pb.Frame], what: str) -> list:
    return [getattr(frame, what) for frame in frames if frame.WhichOneof("what") == what]


def end(frames: list[pb.Frame]) -> pb.RunEnded:
    """The run's end, after checking what every run must satisfy: order of frames, and counts and hashes that prove it."""
    kinds = [frame.WhichOneof("what") for frame in frames]
    assert kinds[0] == "segment_opened"
    assert kinds[-1] == "run_ended"
    assert kinds.count("run_ended") == 1
    if "launched" in kinds:
        assert kinds.index("run_started") < kinds.index("launched")
    ended = frames[-1].run_ended
    counted = {}
    for frame in frames[:-1]:
        counted[frame.segment] = counted.get(frame.segment, 0) + 1
    assert {item.segment: item.frames for item in ended.segments} == counted
    return ended


def stream(frames: list[pb.Frame], number: int) -> bytes:
    """A stream put together from its frames, which must join without hole or overlap."""
    data = b""
    for output in of(frames, "output"):
        if output.stream == number:
            assert output.offset == len(data)
            data += output.data
    return data


def add_engines(phone: Agent, settings: dict[str, str]) -> None:
    for name, sim in settings.items():
        phone.run("init", "--engine", f"{name}={make_engine(phone.home.parent, sim, name)}")
