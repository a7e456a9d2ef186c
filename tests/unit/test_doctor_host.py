"""What the host's doctor makes of a phone's answers. The samples are written for the purpose, not recorded from phones."""

import stat

import pytest
from bmoe_collector.commands.doctor import _agent, _chosen
from bmoe_collector.common import OutsideError, UserError
from bmoe_collector.doctor import dumps, machine
from bmoe_collector.doctor.asking import QUESTIONS, Answers, ask, why_refused
from bmoe_collector.host import HostHome, PairedPhone
from bmoe_proto import android

CLOCKS = """==> policy0/cpuinfo_max_freq <==
2016000

==> policy7/cpuinfo_max_freq <==
3187200

==> policy0/scaling_max_freq <==
2016000

==> policy7/scaling_max_freq <==
3187200

==> policy0/related_cpus <==
0 1 2 3 4 5 6

==> policy7/related_cpus <==
7
"""
CPUSETS = """==> /dev/cpuset/background/cpus <==
0-3

==> /dev/cpuset/foreground/cpus <==
0-6

==> /dev/cpuset/top-app/cpus <==
0-7
"""
WHITELIST = """system-excidle,com.android.providers.downloads,10023
system,com.google.android.gms,10134
user,com.termux,10312
"""
POWER = """POWER MANAGER (dumpsys power)

Power Manager State:
  mDirty=0x0
  mWakefulness=Awake
  mIsPowered=true
  mStayOn=true
Looper state:
  mLowPowerModeEnabled=false
Display Power: state=ON
"""
THERMAL = """IsStatusOverride: false
Thermal Status: 0
Cached temperatures:
\tTemperature{mValue=31.0, mType=2, mName=battery, mStatus=0}
HAL Ready: true
HAL connection:
\tThermalHAL AIDL 2 connected: yes
Current temperatures from HAL:
\tTemperature{mValue=41.5, mType=0, mName=CPU0, mStatus=0}
"""
NIGHT = {
    "sdk": "34",
    "model": "Warm",
    android.MONITOR: "false",
    android.MONITOR_PROPERTY: "",
    "max_phantom_processes": "null",
    "sync_disabled": "none",
    android.FREEZER: "disabled",
    "use_freezer": "null",
    "packages": "package:com.termux\npackage:com.termux.boot",
    "whitelist": WHITELIST,
    "bucket": "10",
    "background": "RUN_ANY_IN_BACKGROUND: allow; time=+2d3h",
    "power": POWER,
    "doze": "ACTIVE",
    "thermal": THERMAL,
    "cpusets": CPUSETS,
    "clocks": CLOCKS,
    "agents": "pid 4200\nCpus_allowed_list:\t0-7\ncpuset /top-app",
    "storage": "Filesystem 1K-blocks Used Available Use% Mounted on\n/dev/block/dm-44 231000000 100000000 131000000 44% /data",
    "page": "16384",
    "time": "1700000000",
}


def examined(**changes):
    answers = {**NIGHT, **changes}
    text = {name: value for name, value in answers.items() if value is not None}
    refused = {name: "Permission Denial" for name, value in answers.items() if value is None}
    found = dumps.examine(Answers(text, refused), 1700000010.0)
    return {check.name: check for check in found}


def test_a_phone_ready_for_a_night():
    found = examined()
    states = {name: check.state for name, check in found.items()}
    assert states.pop("background_cpuset") == "warn"  # as on most phones: only the agent's own place decides
    assert set(states.values()) == {"ok"}, states
    assert "com.termux.boot" in found["termux"].seen
    assert "cpu0" in found["thermal_service"].seen
    assert "16384" in found["page_size"].seen
    lock = "\nWake Locks: size=1\n  PARTIAL_WAKE_LOCK  'termux-wakelock' ACQ=-3h (uid=10312 pid=4100)\n"
    assert [examined(power=POWER + extra)["wake_lock"].seen[:4] for extra in ("", lock)] == ["not ", "held"]


@pytest.mark.parametrize(
    ("changes", "name", "state", "fix"),
    [
        ({android.MONITOR: "null"}, "phantom_processes", "fail", "settings put global settings_enable_monitor_phantom_procs"),
        ({"sdk": "31"}, "phantom_processes", "fail", "device_config put activity_manager max_phantom_processes"),
        ({android.FREEZER: "null"}, "freezer", "warn", "cached_apps_freezer disabled"),
        ({"whitelist": "system,com.google.android.gms,10134"}, "battery_exemption", "fail", "whitelist +com.termux"),
        ({"whitelist": "Unknown option"}, "battery_exemption", "unknown", "whitelist +com.termux"),
        ({"bucket": "45"}, "standby_bucket", "warn", "set-standby-bucket com.termux active"),
        ({"bucket": "what"}, "standby_bucket", "unknown", ""),
        ({"background": "RUN_ANY_IN_BACKGROUND: ignore"}, "background_allowed", "fail", "appops set"),
        ({"background": "No operations."}, "background_allowed", "ok", ""),
        ({"packages": ""}, "termux", "fail", "F-Droid"),
        ({"packages": "package:com.termux"}, "termux", "warn", "Termux:Boot"),
        ({"power": POWER.replace("Awake", "Dozing")}, "awake", "warn", "stayon"),
        ({"doze": "IDLE_MAINTENANCE"}, "awake", "warn", "stayon"),
        ({"power": POWER.replace("mLowPowerModeEnabled=false", "mLowPowerModeEnabled=true")}, "battery_saver", "fail", "low_power 0"),
        ({"thermal": THERMAL.replace("Status: 0", "Status: 2")}, "thermal_service", "warn", "cool"),
        ({"clocks": CLOCKS.replace("3187200\n\n==> policy0/related", "2092800\n\n==> policy0/related")}, "clock_caps", "warn", "cool"),
        ({"agents": "pid 1\nCpus_allowed_list:\t0-3\ncpuset /background"}, "agent_cpus", "fail", "whitelist +com.termux"),
        ({"time": "1600000000"}, "clock", "warn", "auto_time"),
        ({"storage": NIGHT["storage"].replace("131000000", "100000")}, "free_space", "fail", ""),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_command(changes, name, state, fix):
    check = examined(**changes)[name]
    assert check.state == state
    assert fix in " ".join(check.fix)


def test_what_was_refused_is_unknown_and_keeps_the_phones_words():
    found = examined(**dict.fromkeys(set(NIGHT) - {"sdk", "model"}))
    for name in (
        "phantom_processes",
        "freezer",
        "standby_bucket",
        "awake",
        "thermal_service",
        "clock_caps",
        "free_space",
    ):
        assert found[name].state == "unknown", name
    assert found["standby_bucket"].seen == "Permission Denial"


def test_no_android_is_said_and_not_guessed():
    found = examined(sdk=None)
    assert found["android"].state == found["phantom_processes"].state == "unknown"


@pytest.mark.parametrize(
    ("name", "body", "code", "refused"),
    [
        ("bucket", "sh: 1: am: not found", 127, True),
        ("whitelist", "Permission Denial: can't dump DeviceIdleController from pid=1, uid=2", 0, True),
        ("thermal", "Can't find service: thermalservice", 0, True),
        ("power", "x" * 3000 + "error: in a long dump", 0, False),
        (android.MONITOR_PROPERTY, "", 0, False),
        ("sdk", "", 0, True),
        ("storage", "Filesystem", None, True),
        ("time", "1700000000", 0, False),
    ],
)
def test_refusals_are_no_answers(name, body, code, refused):
    assert bool(why_refused(name, body, code)) is refused


def test_each_question_stands_alone():
    def shell(command):
        if "thermalservice" in command:
            raise OutsideError("timed out")
        mark = command.rsplit(" ", 2)[1]
        return f"34\r\n\r\n{mark} 0\r\n".encode()

    answers = ask(shell)
    assert answers.text["sdk"] == "34"
    assert answers.refused == {"thermal": "timed out"}
    assert set(answers.text) == set(QUESTIONS) - {"thermal"}


def test_a_shell_that_answers_nothing_is_an_error():
    def shell(command):
        raise OutsideError("the phone is gone")

    with pytest.raises(OutsideError, match="gone"):
        ask(shell)


def test_secrets_open_to_others_fail(tmp_path):
    host = HostHome(tmp_path / "home")
    assert [check.state for check in machine.secrets(host)] == ["ok"]
    host.remember(PairedPhone(b"u" * 16, b"s" * 32, "bmoe-agent-x"))
    assert [check.state for check in machine.secrets(host)] == ["ok"]
    path = next((tmp_path / "home/phones").glob("*.json"))
    path.chmod(0o644)
    (bad,) = machine.secrets(host)
    assert (bad.state, bad.fix[0]) == ("fail", f"chmod 600 {path}")
    path.chmod(0o600)
    path.write_text("{")
    assert [check.state for check in machine.secrets(host)] == ["fail"]
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700


def test_states_of_agents_become_checks():
    line = {
        "state": "ready",
        "agent_version": "1",
        "doing": "idle",
        "engines": ["a"],
        "models": [],
        "unreadable": {"screen": ""},
    }
    assert "screen" in _agent(line).seen
    assert _agent({"state": "frozen", "detail": "no answer", "advice": "wake it"}).state == "fail"
    assert _agent({"state": "unpaired", "detail": "", "advice": "bmoe pair"}).state == "warn"
    assert "plugdev" in " ".join(_agent({"state": "offline", "detail": "adb says no", "advice": "x"}).fix)


def test_a_word_means_one_phone():
    lines = [
        {"uuid": "ab" * 16, "places": ["S1"], "name": "pixel"},
        {"uuid": "abcd" * 8, "places": ["S2"], "name": None},
        {"uuid": None, "places": ["S3"], "name": None},
    ]
    assert _chosen("pixel", lines) == [lines[0]]
    assert _chosen("S3", lines) == [lines[2]]
    assert _chosen("abcd", lines) == [lines[1]]
    for word in ("nothing", "ab"):
        with pytest.raises(UserError):
            _chosen(word, lines)
