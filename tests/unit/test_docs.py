"""What is documented is what there is: every command, option, argument, column, fact, verdict and view."""

from __future__ import annotations

import re

import pytest
from bmoe_collector.cli import COMMANDS, help_text
from bmoe_collector.meaning.facts import FACTS
from bmoe_collector.query import docs
from bmoe_collector.query.fields import fields
from bmoe_collector.store.schema import METADATA
from bmoe_collector.store.views import views
from bmoe_collector.verdicts import CODES
from support import documents

HOW = "run: PYTHONPATH=tests .venv/bin/python -m support.documents"


@pytest.fixture(scope="module")
def commands():
    return list(docs.apps())


@pytest.fixture(scope="module")
def made():
    return documents.documents()


def test_made_documents_are_current(made):
    for path, text in made.items():
        assert path.exists(), f"{path.name} is not there; {HOW}"
        assert path.read_text("utf-8") == text, f"{path.relative_to(documents.ROOT)} is not current; {HOW}"


def test_every_command_of_bmoe_and_every_option_has_help_and_is_in_the_document(commands, made):
    text = made[documents.ROOT / "collector" / "COMMANDS.md"]
    assert {name.split()[0] for name, _ in commands} == set(COMMANDS)
    for name, command in commands:
        assert command.help, f"bmoe {name} has no help"
        section = re.search(rf"^#+ bmoe {name}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
        assert section, name
        for spelled, meaning, _ in docs.options(command):
            assert meaning.strip(), f"bmoe {name} {spelled} has no help"
            assert spelled.replace("|", "\\|") in section[1], f"bmoe {name} {spelled}"


def test_every_command_takes_json_and_db(commands):
    for name, command in commands:
        if getattr(command, "commands", None):
            continue  # a group: its commands do
        spelled = {word for each in command.params for word in each.opts}
        assert "--json" in spelled, name
        assert "--db" in spelled, name


def test_every_command_of_the_agent_and_every_option_has_help(made):
    text = made[documents.ROOT / "agent" / "COMMANDS.md"]
    for name, told, parser in documents.agent_commands():
        assert told, f"bmoe-agent {name} has no help"
        assert f"## bmoe-agent {name}\n" in text
        for spelled, meaning in documents.agent_options(parser):
            assert meaning, f"bmoe-agent {name} {spelled} has no help"
            assert spelled in text


def test_help_names_every_command():
    shown = help_text()
    for name, (_, text) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", shown, re.MULTILINE)


def test_names_facts_verdicts_views_and_tables_have_a_meaning():
    assert set(docs.MEANINGS) == set(CODES)
    assert set(docs.SEVERITIES) < set(CODES)
    for field in fields().values():
        assert field.doc or field.source in {"preamble", "fact"}, field.name
    for fact in FACTS:
        assert fact.section, fact.name
    for view in views().values():
        assert view.doc
        assert len({column.name for column in view.columns}) == len(view.columns), view.name
        assert {column.kind for column in view.columns} <= {"int", "float", "str", "bool"}
    for table in METADATA.tables.values():
        assert table.comment, table.name
