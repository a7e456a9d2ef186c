"""Plans that mean harm, as the phone sees them: none names a path, a program, a variable or an option that is not a plan's."""

import itertools
import os
import re
from pathlib import Path

import pytest
from bmoe_agent import launch
from bmoe_agent.config import Config, ConfigError, EngineConfig
from bmoe_agent.engine import check_flags
from bmoe_agent.launch_argv import RefusedError, command
from bmoe_agent.taking import problems
from bmoe_proto.asking import ARTIFACTS, OURS, cell_problems
from bmoe_proto.contract.flags import FLAGS
from bmoe_proto.v1 import telemetry_pb2 as pb
from hypothesis import example, given
from hypothesis import strategies as st

pytestmark = pytest.mark.agent

HELP = " ".join(spelling for flag in FLAGS for spelling in flag.spellings)
FACTS = pb.EngineFacts(help_text=HELP, version_text="bmoe-cli 0.24.0")
PATHS = frozenset(flag for flag, _ in ARTIFACTS.values())
WORDS = st.one_of(
    st.sampled_from(sorted({*OURS, *PATHS, *(s for flag in FLAGS for s in flag.spellings)})),
    st.sampled_from(["--csv=/x", "--csv=x", "-p", "--", "-", "/etc/passwd", "../x", "x/../../y", "-m=/x", "4", "", " ", "--new",
                     "--new=--csv", "\n--csv", "--CSV", "--csv ", "a=b", "\u2013csv", "--\u0441sv", "-o/x", "@/etc/passwd"]),
    st.text(max_size=8),
)  # fmt: skip


class TestFlags:
    @given(flags=st.lists(WORDS, max_size=5), unknown=st.booleans())
    @example(flags=["--temp", "--csv=x"], unknown=True)
    @example(flags=["--new", "--csv=x"], unknown=True)
    @example(flags=["--cache-mb", "-p"], unknown=False)
    def test_whatever_is_asked_the_paths_and_the_prompt_stay_the_agents(self, flags, unknown):
        cell = pb.Cell(model="m", prompt=b"hello", flags=flags, artifacts=["metrics"], allow_unknown_flags=unknown)
        if cell_problems(cell) or check_flags(FACTS, ["--csv", "metrics.csv", "--progress", *flags], unknown):
            with pytest.raises(RefusedError) as caught:
                command(cell, "/e/bmoe", FACTS, Path("/m/m.gguf"))
            assert caught.value.cause == "refused:flags"
            return
        argv = [os.fsdecode(word) for word in command(cell, "/e/bmoe", FACTS, Path("/m/m.gguf")).argv]
        assert argv[:7] == ["/e/bmoe", "-m", "/m/m.gguf", "-p", "hello", "--csv", "metrics.csv"]
        rest = argv[7:]
        assert not [word for word in rest if "/" in word or "\0" in word]
        assert not [word for word in rest if word.partition("=")[0] in (OURS | PATHS) - {"--progress"}]

    @given(prompt=st.binary(min_size=1, max_size=200))
    @example(prompt=b"--csv=/data/x")
    @example(prompt=b"-p")
    @example(prompt=b"-p\n--csv\n/x")
    @example(prompt=b"$(touch x); `id` \"'\\")
    def test_a_prompt_is_one_argument_whatever_it_says(self, prompt):
        cell = pb.Cell(model="m", prompt=prompt)
        if b"\0" in prompt:
            assert cell_problems(cell)
            return
        argv = command(cell, "/e/bmoe", FACTS, Path("/m/m.gguf")).argv
        assert argv == (b"/e/bmoe", b"-m", b"/m/m.gguf", b"-p", prompt, b"--progress")

    def test_a_prompt_reaches_the_engine_through_no_shell(self, tmp_path):
        prompt = b"$(touch pwned); `touch pwned` \"'\\ \n --csv=/x ${IFS} *"
        launch.prepare(tmp_path / "run")
        done = launch.launch(
            [b"/usr/bin/printf", b"%s", prompt], launch.clean_environment({}), tmp_path / "run", session=False
        )
        done.launcher.wait(60)
        assert (tmp_path / "run" / "stdout").read_bytes() == prompt
        assert not list(tmp_path.rglob("pwned"))


class TestEnvironment:
    @pytest.mark.parametrize(
        ("key", "value"),
        [("LD_PRELOAD", "x"), ("LD_LIBRARY_PATH", "x"), ("LD_DEBUG", "all"), ("PATH", "x"), ("HOME", "x"), ("BASH_ENV", "x"), ("ENV", "x"),
         ("SHELLOPTS", "xtrace"), ("PS4", "$(id)"), ("BASH_FUNC_read%%", "() { id; }"), ("IFS", "x"), ("GLIBC_TUNABLES", "x"),
         ("GCONV_PATH", "x"), ("a b", "x"), ("", "x"), ("A=B", "x"), ("BMOE_X", "a\0b"), ("BMOE_PREDICT_LOG", "/data/x")],
    )  # fmt: skip
    def test_what_could_load_code_or_name_a_path_is_refused_when_the_plan_is_handed_in(self, key, value):
        [problem] = cell_problems(pb.Cell(model="m", prompt=b"x", environment={key: value}))
        assert "environment" in problem
        with pytest.raises(launch.LaunchError):
            launch.clean_environment({key: value})

    def test_the_engines_own_switches_are_a_plans(self):
        given = {flag.env: "1" for flag in FLAGS if flag.env} | {"BMOE_SIM": "tok_s=20,fault=crash@3"}
        assert not cell_problems(pb.Cell(model="m", prompt=b"x", environment=given))
        assert given.items() <= launch.clean_environment(given).items()


class TestNames:
    @pytest.fixture
    def config(self, tmp_path):
        models = tmp_path / "models"
        models.mkdir()
        (models / "good.gguf").write_bytes(b"GGUF")
        (tmp_path / "secret.gguf").write_bytes(b"GGUF")
        engines = {"bmoe": EngineConfig("bmoe", Path("/bin/true"))}
        return Config(
            tmp_path, b"u" * 16, b"s" * 32, "n", "s", engines=engines, default_engine="bmoe", model_dirs=(models,)
        )

    @pytest.mark.parametrize("name", ["../secret.gguf", "a/../../secret", "/etc/passwd", "", ".", "..", "good.gguf/../../secret.gguf",
                                      "good.gguf\0", "~/x", "x" * 5000, "\udcff"])  # fmt: skip
    def test_a_model_outside_its_directories_is_not_there(self, config, name):
        with pytest.raises(ConfigError):
            config.model(name)
        assert config.model("good").name == "good.gguf"

    @pytest.mark.parametrize("name", ["/bin/sh", "../bmoe", "bmoe ", "sh", "bmoe;id", "\0"])
    def test_an_engine_that_is_not_configured_is_not_run(self, config, name):
        with pytest.raises(ConfigError, match="not configured"):
            config.engine(name)

    @pytest.mark.parametrize(
        "plan_id", ["", "../" + "a" * 29, "A" * 32, "a" * 31, "a" * 32 + "\n", "a" * 31 + "/", "\u0660" * 32]
    )
    def test_a_plans_id_names_no_other_file(self, plan_id):
        found = problems(pb.Plan(plan_id=plan_id, cells=[pb.Cell(model="m", prompt=b"p")]))
        assert found == ["a plan's id is 32 hex digits"]

    def test_names_of_plans_and_cells_are_never_part_of_a_path(self):
        bad = ["../../x", "/x", "a\x1b[2Jb", "'; DROP TABLE runs;--", "<script>"]
        for name, cell in itertools.product(bad, bad):
            plan = pb.Plan(
                plan_id="a" * 32, name=name, cells=[pb.Cell(name=cell, model="m", prompt=b"p", labels={cell: name})]
            )
            assert not problems(plan)
            argv = command(plan.cells[0], "/e", FACTS, Path("/m")).argv
            assert not [word for word in argv if re.search(rb"\.\./|script|DROP", word)]
