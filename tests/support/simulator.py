"""The stand-in engine as a process: argv and settings in, what it printed out."""

import os
import subprocess
import sys

PROMPT = "Write a short story about a lighthouse."
STREAM = ["--moe-stream", "--cache-mb", "8", "--force-cache"]
FAST = "tok_s=2000,load_s=0,prefill_s=0.001"


def sim(argv, settings="", cwd=None, env=None, **more):
    """Run it to its end; it never shows a traceback."""
    environment = {"PATH": os.environ["PATH"], "BMOE_SIM": f"{FAST},{settings}", **(env or {})}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "bmoe_sim.cli", *argv],
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
        **more,
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done


def one_shot(model, flags=(), settings="", n=24, cwd=None, env=None):
    """One generation of `n` tokens with its progress."""
    return sim(["-m", model, "-p", PROMPT, "-n", str(n), "--progress", *flags], settings, cwd, env)
