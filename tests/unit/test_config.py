"""The agent's home: made once, never overwritten, and clear about what is wrong with it."""

import stat
import threading
from pathlib import Path

import pytest
from bmoe_agent import config, initialise

pytestmark = pytest.mark.agent


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "bmoe cli"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_init_makes_an_identity_once(tmp_path: Path, engine: Path) -> None:
    home = tmp_path / "home"
    (tmp_path / "models").mkdir()
    first = initialise.init(home, engines=[str(engine)], models=[str(tmp_path / "models")], name='Tür "7"')
    assert first.secret == first.config.secret
    assert stat.S_IMODE((home / "secret").stat().st_mode) == 0o600
    assert first.config.socket == f"bmoe-agent-{first.config.uuid.hex()[:12]}"
    second = initialise.init(home, engines=[f"other={engine}"])
    assert second.secret is None
    assert (second.config.uuid, second.config.secret) == (first.config.uuid, first.config.secret)
    assert second.config.name == 'Tür "7"'
    assert list(second.config.engines) == ["bmoe", "other"]
    assert second.config.engine("").path == engine


def test_init_again_without_changes_keeps_the_file_as_it_is(tmp_path: Path, engine: Path) -> None:
    home = tmp_path / "home"
    initialise.init(home, engines=[str(engine)])
    text = "# my notes\n" + (home / "config.toml").read_text()
    (home / "config.toml").write_text(text)
    assert initialise.init(home, engines=[str(engine)]).changed == ()
    assert (home / "config.toml").read_text() == text


def test_secret_and_store_are_replaced_durably(tmp_path: Path) -> None:
    home = tmp_path / "home"
    initialise.init(home)
    config.replace_secret(home, b"\7" * 32)
    config.keep_for_store(home, b"\1" * 16)
    again = config.load(home)
    assert (again.secret, again.kept_for_store) == (b"\7" * 32, b"\1" * 16)
    config.keep_for_store(home, b"")
    assert config.load(home).kept_for_store == b""
    assert sorted(path.name for path in home.iterdir()) == ["config.toml", "secret", "uuid"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[agent]\nquota_mib = 'much'\n", "quota_mib"),
        ("[agent]\nqouta_mib = 5\n", "no such setting"),
        ("[agent]\nsocket = '../x'\n", "socket"),
        ("[agent]\ndefault_engine = 'none'\n", "not in \\[engines\\]"),
        ("[engines]\n'a b' = '/x'\n", "letters, digits"),
        ("[engines]\na = 5\n", "a path, or a table"),
        ("[engines.a]\npath = '/x'\nld_preload = '/y'\n", "no such setting"),
        ("[models]\ndirs = '/x'\n", "list of directories"),
        ("[agent\n", "config.toml"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    home = tmp_path / "home"
    initialise.init(home)
    (home / "config.toml").write_text(text)
    with pytest.raises(config.ConfigError, match=complaint):
        config.load(home)
    with pytest.raises(config.ConfigError):
        initialise.init(home, name="new")
    assert (home / "config.toml").read_text() == text


def test_a_damaged_secret_is_not_replaced(tmp_path: Path) -> None:
    home = tmp_path / "home"
    initialise.init(home)
    (home / "secret").write_text("abc\n")
    with pytest.raises(config.ConfigError, match="secret"):
        initialise.init(home)
    assert (home / "secret").read_text() == "abc\n"


def test_models_are_found_inside_their_directories_only(tmp_path: Path) -> None:
    models = tmp_path / "models"
    (models / "sub").mkdir(parents=True)
    for name in ("a.gguf", "sub/b.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "notes.txt"):
        (models / name).touch()
    (tmp_path / "outside.gguf").touch()
    settings = initialise.init(tmp_path / "home", models=[str(models)]).config
    assert settings.models() == ["a.gguf", "big-00001-of-00002.gguf", "sub/b.gguf"]
    assert settings.model("a") == settings.model("a.gguf") == models / "a.gguf"
    assert settings.model("sub/b") == models / "sub/b.gguf"
    for name in ("../outside", "sub/../../outside.gguf", str(tmp_path / "outside.gguf"), "", "a\0", "nope"):
        with pytest.raises(config.ConfigError):
            settings.model(name)


def test_init_refuses_what_cannot_be_run(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    with pytest.raises(config.ConfigError, match="not an executable"):
        initialise.init(tmp_path / "home", engines=[str(tmp_path / "data")])
    with pytest.raises(config.ConfigError, match="not a directory"):
        initialise.init(tmp_path / "home", models=[str(tmp_path / "data")])
    with pytest.raises(config.ConfigError, match="socket"):
        initialise.init(tmp_path / "home", socket_name="../x")
    assert not (tmp_path / "home").exists()  # no secret that was never shown


def test_a_secret_is_only_there_once_it_could_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails on the way, what comes after shows the secret that counts."""
    home, write = tmp_path / "home", config.write_private

    def no_room(path: Path, text: str) -> None:
        if path.name == "config.toml":
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(initialise, "write_private", no_room)
    with pytest.raises(OSError, match="No space"):
        initialise.init(home)
    assert not (home / "secret").exists()
    monkeypatch.setattr(initialise, "write_private", write)
    done = initialise.init(home)
    assert done.secret is not None
    assert done.secret == config.load(home).secret


def test_of_many_at_once_one_makes_the_identity_and_shows_its_secret(tmp_path: Path, engine: Path) -> None:
    home, start = tmp_path / "home", threading.Barrier(6)
    done: list[initialise.Initialised] = []

    def init(number: int) -> None:
        start.wait(30)
        done.append(initialise.init(home, engines=[f"e{number}={engine}"]))

    threads = [threading.Thread(target=init, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = config.load(home)
    assert {one.config.uuid for one in done} == {last.uuid}
    assert [one.secret for one in done if one.secret is not None] == [last.secret]
    assert sorted(last.engines) == [f"e{number}" for number in range(6)]
