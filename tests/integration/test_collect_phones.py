"""Two real phones: a plan on both at once, drained at once; a phone that is away; a single benchmark followed."""

from collections.abc import Iterator

import pytest
from support.host import Host, check_against_copies, check_no_forwards
from support.phones import Shelf, shelf

FLAGS = ["--", "--moe-stream", "--cache-mb", "4", "--force-cache"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    with shelf(tmp_path_factory.mktemp("shelf"), phones=2, settings="tok_s=60,load_s=0.05,prefill_s=0.05") as made:
        yield made


@pytest.fixture(scope="module")
def host(two: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Host:
    made = Host(tmp_path_factory.mktemp("host"), two.env)
    for phone in two.phones:
        made.pair(phone.agent, phone.serial)
    return made


def test_two_phones_run_and_are_drained_at_once(two: Shelf, host: Host) -> None:
    asked = ["--model", "tiny.gguf", "-p", "hello", "-n", "40", "--trace", "route,io", "--label", "k=v"]
    sent = host.json("run", *asked, "--all", "--detach", *FLAGS)
    assert len(sent["phones"]) == 2
    assert sent["run"] is None
    done = host.json("collect", "--until-drained")
    assert {phone["state"] for phone in done["phones"]} <= {"ready"}
    check_against_copies(host, [phone.copies for phone in two.phones])
    runs = host.rows("select * from runs where plan_id = ?", sent["plan"])
    assert sorted(row["agent_uuid"] for row in runs) == sorted(phone.agent.uuid.hex() for phone in two.phones)
    for row in runs:
        assert (row["outcome"], row["n_tokens"], row["simulated"]) == ("ok", 40, 1)
        kinds = host.rows("select kind from artifacts where run_no = ? order by kind", row["run_no"])
        assert [kind["kind"] for kind in kinds] == ["io", "metrics", "route", "stderr", "stdout"]
    watched = {phone["phone"]: phone for phone in host.json("watch", "--once")["phones"]}
    assert {line["state"] for line in watched.values()} == {"ready"}
    assert all(line["mem_available_mib"] > 0 for line in watched.values())
    again = host.json("collect", "--once")
    assert [phone["batches"] for phone in again["phones"]] == [0, 0]
    check_no_forwards(two)


def test_one_benchmark_is_followed_to_its_end_and_a_bad_one_says_no(two: Shelf, host: Host) -> None:
    where = two.phones[0].serial
    asked = ["run", "--model", "tiny.gguf", "-p", "again", "-n", "30", "--device", where]
    answer = host.json(*asked, *FLAGS)
    assert answer["ok"]
    assert answer["runs"][0]["outcome"] == "ok"
    assert host.json("show", answer["run"])["run"]["outcome"] == "ok"
    failed = host.json("run", "--model", "tiny.gguf", "--env", "BMOE_SIM=fault=fatal@3", "-n", "9", "-d", where, code=1)
    assert not failed["ok"]
    assert failed["runs"][0]["outcome"] != "ok"
    refused = host.bmoe("run", "--model", "absent.gguf", "-n", "3", "-d", where, code=None)
    assert refused.returncode in {1, 2}
    assert "absent" in refused.stderr + refused.stdout


def test_a_phone_that_is_away_gets_its_plan_when_it_comes(two: Shelf, host: Host) -> None:
    phone = two.phones[1]
    phone.agent.kill()
    uuid = phone.agent.uuid.hex()
    sent = host.json("run", "--model", "tiny.gguf", "-p", "later", "-n", "5", "--device", uuid[:8], *FLAGS)
    assert sent["queued"] == [uuid]
    assert [entry["uuid"] for entry in host.json("queue")] == [uuid]
    phone.agent.start()
    host.json("collect", "--until-drained", "--device", uuid[:8])
    assert host.json("queue") == []
    runs = host.rows("select outcome from runs where plan_id = ?", sent["plan"])
    assert [row["outcome"] for row in runs] == ["ok"]
