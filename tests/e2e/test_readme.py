"""The README's way without a phone, typed as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_what_the_readme_says_without_a_phone(tmp_path: Path) -> None:
    section = README.read_text(encoding="utf-8").split("## Without a phone")[1].split("\n## ")[0]
    typed = [line.partition("  #")[0].strip() for line in section.splitlines() if line.startswith("    ")]
    lines = [line for line in typed if "PATH=" not in line]
    assert [line.split()[0] for line in lines] == ["bmoe-sim", "bmoe-agent", "bmoe-agent", "bmoe", "bmoe"]
    # What a person reads and copies: the socket, and the secret to the prompt.
    lines[1] += " | tee init.txt"
    lines[2] += " trap 'kill $!; wait' EXIT; until grep -q bmoe-agent- /proc/net/unix; do sleep 0.1; done"
    lines[3] = "sed -n 's/^secret *//p' init.txt | " + lines[3].replace(
        "local:SOCKET", "$(grep -o 'local:bmoe-agent-[0-9a-f]*' init.txt)"
    )
    kept = {name: value for name, value in os.environ.items() if not re.match("BMOE_|XDG_|COLUMNS", name)}
    env = {
        **kept,
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ANDROID_ADB_SERVER_PORT": "1",
        "ADBUTILS_ADB_PATH": "/nonexistent",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "SIMULATED" in done.stdout
    assert "ok (tokens)" in done.stdout
    assert (tmp_path / ".local/share/bmoe-fleet/runs.db").exists()
