"""A plan checked against a phone: as it answers, and as it told this database last when it is away."""

from pathlib import Path

from bmoe_agent.roots import lay
from bmoe_collector.plans import load_plan
from bmoe_collector.plans.document import shipped, shipped_text
from support.agent_records import client
from support.agents import agent
from support.nights import morning

TREE = Path(__file__).parent.parent / "support" / "trees" / "pages_16k_thermal_refused.toml"
START = Path(__file__).parents[2] / "collector" / "bmoe_collector" / "plans" / "start.toml"
PLAN = """
name = "p"
model = "{model}"
prompt = "hello"
flags = ["--moe-stream", "{flag}"]
allow_unknown_flags = false
[[gates]]
gate = "cpu_temp_c"
at_most = 45
policy = "{policy}"
[watchdog]
min_battery_pct = 15
"""


def test_a_plan_is_checked_against_a_phone_that_is_there_or_away(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text(PLAN.format(model="tiny.gguf", flag="--overlap", policy="run-flagged"))
    bad.write_text(PLAN.format(model="tinny.gguf", flag="--overlap", policy="skip"))
    lay(TREE, tmp_path / "tree")
    with agent(tmp_path, "tok_s=100", name="shelf-3") as phone:
        phone.env["BMOE_AGENT_TREE"] = str(tmp_path / "tree")
        phone.start()
        host = morning(phone, tmp_path).host
        there = host.json("plan", "check", str(good), "--device", f"local:{phone.socket}")
        phone.stop()
    away = host.bmoe("plan", "check", str(good), "--device", "shelf-3")
    assert "shelf-3: away: the plan is checked against what it told" in away.stderr
    again = host.json("plan", "check", str(good), "--device", "shelf-3")
    assert again["accepted"]
    assert again["warnings"] == there["warnings"]
    assert any("gate cpu_temp_c cannot be read there" in warning for warning in again["warnings"])
    assert any("watchdog: min_battery_pct cannot be watched there" in warning for warning in again["warnings"])
    refused = host.json("plan", "check", str(bad), "--device", "shelf-3", code=1)
    assert "shelf-3: no model `tinny.gguf` there; there are tiny.gguf" in refused["errors"]
    assert any("gate cpu_temp_c cannot be read there" in error for error in refused["errors"])
    nobody = host.bmoe("plan", "check", str(good), "--device", "shelf-4", code=2)
    assert "no phone 'shelf-4' is known here" in nobody.stderr


def test_a_phone_takes_every_plan_that_ships(tmp_path: Path) -> None:
    texts = {name: shipped_text(name) for name in shipped()} | {"start": START.read_text()}
    with agent(tmp_path) as phone:
        phone.start()
        with client(phone) as connected:
            for name, text in texts.items():
                path = tmp_path / f"{name}.toml"
                path.write_text(text)
                asked = load_plan(path)
                reply = connected.submit(asked)
                connected.cancel(asked.plan_id)
                assert list(reply.refused) == [], name
