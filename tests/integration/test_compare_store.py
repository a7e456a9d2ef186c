"""`bmoe compare` and `bmoe regress` over stored runs, on both databases: sides, questions, exit codes."""

from __future__ import annotations

import json
import secrets

import pytest
from bmoe_collector.cli import main
from bmoe_collector.compare.sandwich import compare_by
from bmoe_collector.compare.tables import show_sandwich
from bmoe_collector.store.engine import open_store, wall_ns
from bmoe_collector.store.facts import put
from bmoe_collector.store.schema import LABELS, RUNS
from sqlalchemy import insert

RATES = [10.0, 10.2, 9.9, 10.1, 10.05, 9.95, 10.15, 9.85]
QUESTION = {
    "compare": [["small", "large"]],
    "metric": "tok_s",
    "smallest_effect": 0.05,
    "keep": ["verdict != foreign_load"],
}


def plan_runs(store, plan, name, cells, question=None, start=0):
    """One run a cell and block, interleaved; `cells` maps a name to its factor."""
    with store.write() as connection:
        for block, rate in enumerate(RATES):
            for at, (cell, factor) in enumerate(cells.items()):
                place = start + block * len(cells) + at
                number = connection.execute(
                    insert(RUNS).values(
                        run_id=secrets.token_hex(16),
                        source="agent",
                        outcome="ok",
                        exit_observed=True,
                        ended=True,
                        simulated=False,
                        unmeasured=False,
                        complete=True,
                        n_tokens=256,
                        n_turns=1,
                        model_name="m.gguf",
                        model_identity="i",
                        prompt_sha256="q",
                        engine_version="0.24.0",
                        plan_id=plan,
                        plan_name=name,
                        cell=cell,
                        cell_index=place,
                        block=block,
                        question=question,
                        started_wall_ns=1_700_000_000_000_000_000 + place * 60_000_000_000,
                        stored_wall_ns=wall_ns(),
                        changed_wall_ns=wall_ns(),
                    )
                ).inserted_primary_key[0]
                connection.execute(insert(LABELS).values(run_no=number, key="size", value=cell, source="plan"))
                facts = {
                    "tok_s": rate * factor * (1 + 0.002 * ((block * 7) % 5)),
                    "text_sha256": "t",
                    "read_bytes": 5,
                    "n_tokens": 256,
                }
                foreign = [("foreign_load", "warn", "something ran")] if block == 0 and cell == "large" else []
                put(connection, number, facts, foreign)


@pytest.fixture
def filled(store_url):
    store = open_store(store_url)
    plan_runs(store, "aa" * 16, "sizes", {"small": 1.0, "large": 1.2}, QUESTION)
    plan_runs(store, "bb" * 16, "same", {"one": 1.0, "two": 1.0}, start=100)
    store.close()
    return store_url


def asked(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, (json.loads(out) if out.strip() else None), err


def test_cells_of_a_plan_are_answered_as_their_question_asked(filled, capsys):
    code, answer, _ = asked(capsys, "compare", "cell:sizes/small", "cell:sizes/large", "--json", "--db", filled)
    assert code == 0
    assert answer["label"] == "as asked"
    assert (answer["design"], answer["n"]) == ("paired", [7, 7])
    assert answer["metrics"][0]["metric"] == "tok_s"
    assert answer["metrics"][0]["resolved"] is True
    assert any("keep rule" in note for note in answer["notes"])
    code, matrix, _ = asked(capsys, "compare", "--question", "sizes", "--json", "--db", filled)
    assert code == 0
    assert matrix["matrix"][0]["p_corrected"] == answer["metrics"][0]["p"]


def test_labels_filters_and_ids_are_sides_and_are_exploration(filled, capsys):
    code, by_label, _ = asked(capsys, "compare", "label:size=small", "label:size=large", "--json", "--db", filled)
    assert code == 0
    assert by_label["label"] == "exploration"
    code, by_filter, _ = asked(
        capsys, "compare", "where:cell=small and plan=sizes", "where:cell=large", "--json", "--db", filled
    )
    assert by_filter["metrics"] == by_label["metrics"]
    ids = ",".join(run[:12] for run in by_label["a"]["runs"])
    code, by_ids, _ = asked(capsys, "compare", ids, "label:size=large", "--json", "--db", filled)
    assert by_ids["metrics"] == by_label["metrics"]


def test_regress_says_no_only_for_a_resolved_loss(filled, capsys):
    slow, fast = "cell:sizes/small", "cell:sizes/large"
    assert asked(capsys, "regress", slow, "--baseline", fast, "--json", "--db", filled)[0] == 1
    code, answer, _ = asked(capsys, "regress", fast, "--baseline", slow, "--json", "--db", filled)
    assert (code, answer["regression"]) == (0, False)
    assert asked(capsys, "regress", "cell:same/two", "--baseline", "cell:same/one", "--json", "--db", filled)[0] == 0
    assert (
        asked(capsys, "regress", slow, "--baseline", fast, "--smallest-effect", 0.5, "--json", "--db", filled)[0] == 0
    )


def test_a_matrix_of_cells_is_corrected(filled, capsys):
    code, answer, _ = asked(
        capsys, "compare", "cell:same/one", "cell:same/two", "cell:sizes/large", "--json", "--db", filled
    )
    assert code == 0
    assert [row["comparisons"] for row in answer["matrix"]] == [2, 2]


WRONG = [
    (["cell:nowhere/x", "cell:sizes/small"], "no plan nowhere"),
    (["cell:sizes/x", "cell:sizes/small"], "its cells are: small, large"),
    (["label:size", "cell:sizes/small"], "label:KEY=VALUE"),
    (["label:size=huge", "cell:sizes/small"], "no stored run matches"),
    (["where:nonsense=1", "cell:sizes/small"], "no such name"),
    (["abcd", "cell:sizes/small"], "no run"),
    (["plan:x", "cell:sizes/small"], "a side is"),
    (["cell:sizes/small"], "name two sides"),
]


def test_a_side_that_is_none_is_wrong_usage_with_one_message(filled, capsys):
    for sides, says in WRONG:
        code, answer, error = asked(capsys, "compare", *sides, "--json", "--db", filled)
        assert (code, answer) == (2, None), sides
        assert says in error


def test_a_refused_comparison_exits_1_with_the_reason_in_its_json(filled, capsys):
    store = open_store(filled)
    with store.write() as connection:
        connection.execute(RUNS.update().where(RUNS.c.cell == "two").values(prompt_sha256="other"))
    store.close()
    code, answer, _ = asked(capsys, "compare", "cell:same/one", "cell:same/two", "--json", "--db", filled)
    assert code == 1
    assert answer["comparable"] is False
    assert answer["reasons"] == ["different prompts"]
    assert asked(capsys, "compare", "cell:same/one", "cell:same/two", "--force", "--json", "--db", filled)[0] == 0


def test_the_terminal_view_shows_counters_and_the_sentence(filled, capsys):
    assert main(["compare", "cell:sizes/small", "cell:sizes/large", "--db", filled]) == 0
    out, _ = capsys.readouterr()
    assert "read_bytes" in out
    assert "resolved (better)" in out


def test_what_each_run_measured_is_shown_beside_the_ratio(filled, capsys, monkeypatch):
    code, answer, _ = asked(capsys, "compare", "cell:sizes/small", "cell:sizes/large", "--json", "--db", filled)
    row = answer["metrics"][0]
    assert (code, len(row["a"]), len(row["b"])) == (0, 7, 7)  # block 0 broke the keep rule on one side
    assert row["a"][0] == pytest.approx(10.2 * 1.004)
    for width in (80, 140):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["compare", "cell:sizes/small", "cell:sizes/large", "--db", filled]) == 0
        out, _ = capsys.readouterr()
        assert "tok_s of A, 9.929 to 10.24: 10.24 9.979 " in out
        assert "95 %" in out  # what the interval is
        assert "permutation of pairs" in out  # and the p-value
        assert max(len(line) for line in out.splitlines()) <= width
    assert "seen from" in out


def test_a_name_of_several_plans_says_which_was_taken(filled, capsys):
    store = open_store(filled)
    plan_runs(
        store, "cc" * 16, "sizes", {"small": 1.0, "tall": 1.2}, {**QUESTION, "compare": [["small", "tall"]]}, start=300
    )
    store.close()
    said = "2 plans are called sizes: this is the newest, cccccccc (16 runs); the others are aaaaaaaa (16 runs)"
    _, answer, _ = asked(capsys, "compare", "--question", "sizes", "--json", "--db", filled)
    assert said in answer["matrix"][0]["notes"]
    assert answer["matrix"][0]["b"]["side"] == "cell:cccccccc/tall"
    code, _, error = asked(capsys, "compare", "cell:sizes/small", "cell:sizes/large", "--db", filled)
    assert (code, said in error) == (2, True)
    _, named, _ = asked(capsys, "compare", "--question", "aaaa", "--json", "--db", filled)
    assert not any("plans are called" in note for note in named["matrix"][0]["notes"])


def test_a_refusal_says_how_to_have_an_answer_and_an_effect_is_a_fraction(filled, capsys):
    assert main(["compare", "cell:same/one", "cell:same/two", "--db", filled]) == 0
    assert main(["compare", "cell:same/one", "cell:same/one", "--db", filled]) == 1
    assert "refused for the reason above; --force answers anyway" in capsys.readouterr().out
    assert main(["compare", "cell:same/one", "cell:same/one", "--force", "--db", filled]) == 0
    for words in (
        ["compare", "cell:same/one", "cell:same/two"],
        ["regress", "cell:same/one", "--baseline", "cell:same/two"],
    ):
        assert main([*words, "--smallest-effect", "5", "--db", filled]) == 2
        assert "--smallest-effect 5: a fraction is wanted, 0.05 is 5 %" in capsys.readouterr().err


def test_among_several_comparisons_the_sentence_has_the_corrected_answer_beside_it(filled, capsys):
    assert main(["compare", "cell:sizes/small", "cell:sizes/large", "cell:same/one", "--db", filled]) in {0, 1}
    out, _ = capsys.readouterr()
    assert "among 2 comparisons: resolved, p 0.0" in out


def test_settings_inside_one_run_are_shown_as_rates_with_what_they_are(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    columns = {"arm": [at // 16 % 2 for at in range(512)], "step": list(range(512))}
    costs = [(4.75 if arm else 5.0) + 0.01 * (at % 3) for at, arm in enumerate(columns["arm"])]
    found = compare_by(columns, "arm", costs)
    row = found["pairs"][0]
    assert (round(row["a_tok_s"]), round(row["b_tok_s"]), row["resolved"]) == (200, 210, True)
    show_sandwich({"run": "ab" * 16, "notes": ["mark this"], **found})
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:5] == ["0", "1", "32", "8", "14"]
    assert max(map(len, lines)) <= 80
    assert "over the sandwiches of this one run" in " ".join(lines)
    assert lines[-1] == "note: mark this"
