"""Kernel text to values, for four kinds of device and for what files look like when something is odd."""

from pathlib import Path

import pytest
from bmoe_agent.roots import TreeError, dump, lay
from bmoe_agent.sampling import Sampler
from bmoe_proto import kernel, kernel_dump, kernel_proc, kernel_sys
from bmoe_proto.sample_text import Entry
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.agent
TREES = Path(__file__).parent.parent / "support" / "trees"


def entry_values(name, tmp_path):
    with Sampler(lay(TREES / f"{name}.toml", tmp_path), 4242) as sampler:
        return kernel.sample_values(sampler.sample("entry").text)


def test_a_phone_whose_sensors_are_refused_says_what_it_has_and_why_the_rest_is_missing(tmp_path):
    found = entry_values("pages_16k_thermal_refused", tmp_path)
    assert found.values["rss_anon_kib"] == 4211200
    assert found.values["policy7_cur_khz"] == 3105000
    assert found.values["clock_cap_ratio"] == 1.0
    assert found.values["run_wait_ns"] == 9123344556
    assert found.values["smaps_pss_kib"] == 4400128
    assert not {"cpu_temp_c", "battery_pct"} & set(found.values)
    assert found.refused["proc/stat"] == "EACCES (permission denied)"


def test_trip_points_and_dead_sensors_are_no_cpu_temperature(tmp_path):
    values = entry_values("thermal_readable_capped", tmp_path).values
    assert values["cpu_temp_c"] == 63.4  # not the trip point's 95.0
    assert values["zone_cpu_hw_trip_0_c"] == 95.0  # kept, under its own name
    assert "zone_cpu_1_1_usr_c" not in values  # answers 0
    assert values["clock_cap_ratio"] == pytest.approx(2092800 / 3187200)
    assert (values["battery_pct"], values["battery_temp_c"], values["charging"]) == (78, 33.5, False)
    assert values["cooling_thermal_cpufreq_7_0"] == 6


def test_whole_degrees_and_a_process_name_with_brackets(tmp_path):
    values = entry_values("background_big_cores_excluded", tmp_path).values
    assert values["cpu_temp_c"] == 47.0
    assert values["start_ticks"] == 730211
    assert (values["cpus_allowed"], values["cpuset"]) == ("0-3", "/background")


def test_an_old_kernel_gives_less_and_no_zeros_for_what_it_lacks(tmp_path):
    found = entry_values("old_kernel_much_refused", tmp_path)
    missing = {"rss_anon_kib", "run_ns", "io_read_bytes", "policy0_cur_khz", "cpu_temp_c", "battery_current_ua"}
    assert not missing & set(found.values)
    assert found.values["mem_swap_total_kib"] == 0  # a true zero stays
    assert found.values["charging"] is True
    assert found.refused["proc/engine/schedstat"].startswith("ENOENT")


def test_every_value_of_every_tree_is_described(tmp_path):
    for tree in TREES.glob("*.toml"):
        values = entry_values(tree.stem, tmp_path / tree.stem).values
        assert [name for name in values if kernel.name_of(name) is None] == []


@pytest.mark.parametrize(
    ("text", "degrees"),
    [
        ("47300", 47.3),
        ("473", 47.3),
        ("47", 47.0),
        ("0", None),
        ("-40000", None),
        ("127000", None),
        ("-273200", None),
        ("x", None),
    ],
)
def test_degrees(text, degrees):
    assert kernel_sys.celsius(text) == degrees


@pytest.mark.parametrize(
    ("kind", "real"),
    [
        ("cpu-0-0-usr", True),
        ("cpuss-1", True),
        ("mtktscpu", True),
        ("BIG", True),
        ("x86_pkg_temp", True),
        ("cpu-hw-trip-0", False),
        ("cpu_virt_max", False),
        ("gpuss-0", False),
        ("battery", False),
        ("skin-therm", False),
    ],
)
def test_cpu_zones(kind, real):
    assert kernel_sys.is_cpu_zone(kind) is real


def test_cpu_lists():
    assert kernel_sys.cpu_list("0-3,6") == {0, 1, 2, 3, 6}
    assert kernel_sys.cpu_list("0 1 7") == {0, 1, 7}
    assert kernel_sys.cpu_list("") == set()
    assert len(kernel_sys.cpu_list("0-99999999999")) < 10_000
    assert kernel_sys.cpu_list("1,²-3,0-²,4-") == {1}


def test_what_adb_shell_reads():
    values = kernel.values(
        [
            Entry(
                "dumpsys battery",
                b"Current Battery Service state:\n  AC powered: false\n  USB powered: true\n  level: 40\n  scale: 50\n"
                b"  status: 2\n  temperature: 312\n  voltage: 4011\n",
            ),
            Entry(
                "dumpsys power",
                b"POWER MANAGER (dumpsys power)\n  mWakefulness=Dozing\n  mLowPowerModeEnabled=false\nDisplay Power: state=OFF\n",
            ),
            Entry("dumpsys deviceidle", b"  mState=IDLE mLightState=OVERRIDE\n"),
            Entry(
                "dumpsys thermalservice",
                b"Thermal Status: 2\nCached temperatures:\n"
                b"\tTemperature{mValue=31.0, mType=0, mName=CPU0, mStatus=0}\nCurrent temperatures from HAL:\n"
                b"\tTemperature{mValue=48.5, mType=0, mName=CPU0, mStatus=0}\n"
                b"\tTemperature{mValue=51.5, mType=0, mName=BIG, mStatus=0}\n"
                b"\tTemperature{mValue=95.0, mType=0, mName=cpu-hw-trip-0, mStatus=0}\n"
                b"\tTemperature{mValue=60.0, mType=1, mName=GPU, mStatus=0}\n",
            ),
            Entry("dev/cpuset/background/cpus", b"0-3\n"),
        ]
    ).values
    assert (values["battery_pct"], values["charging"], values["battery_temp_c"]) == (80.0, True, 31.2)
    assert (values["awake"], values["wakefulness"], values["screen_on"], values["doze"]) == (
        False,
        "Dozing",
        False,
        "IDLE",
    )
    assert (values["thermal_status"], values["hal_cpu0_c"], values["cpu_temp_c"]) == (2, 48.5, 51.5)
    assert values["cpuset_background"] == "0-3"


def test_the_thermal_service_stands_in_for_zones_that_cannot_be_read_and_only_with_what_it_reads_now():
    cached = b"Cached temperatures:\n\tTemperature{mValue=31.0, mType=0, mName=CPU0, mStatus=0}\n"
    live = cached + b"Current temperatures from HAL:\n\tTemperature{mValue=48.5, mType=0, mName=CPU0, mStatus=0}\n"
    assert "cpu_temp_c" not in kernel.values([Entry("dumpsys thermalservice", cached)]).values
    zone = [
        Entry("sys/class/thermal/thermal_zone0/type", b"cpu-1-0"),
        Entry("sys/class/thermal/thermal_zone0/temp", b"52000"),
    ]
    assert kernel.values([Entry("dumpsys thermalservice", live), *zone]).values["cpu_temp_c"] == 52.0


def test_process_listing_names_cpu_time_and_start():
    lines = "1 (init) S 0 0 0 0 -1 0 1 0 2 0 30 40 0 0 20 0 1 0 5 1 1\nnonsense\n77 (a) b) R 1 0 0 0 -1 0 1 0 2 0 3 4 0 0 20 0 1 0 99 1 1\n"
    assert list(kernel_dump.processes(lines)) == [(1, "init", 70, 5), (77, "a) b", 7, 99)]


def test_system_counters():
    text = "cpu  10 0 20 300 5 0 1 0 0 0\ncpu0 5 0 10 150 5 0 1 0 0 0\nintr 1 2 3\nctxt 88\nprocs_running 2\n"
    assert kernel_proc.system_stat(text)["sys_idle_ticks"] == 300
    assert kernel_proc.vmstat("pswpin 12\npswpout 0\nodd line here\n") == {"vm_pswpin": 12, "vm_pswpout": 0}
    assert kernel_proc.pressure("io", "some avg10=1.5 avg60=x total=9\n") == {
        "psi_io_some_avg10_pct": 1.5,
        "psi_io_some_total_us": 9,
    }


FILES = [
    "proc/engine/status", "proc/engine/stat", "proc/engine/io", "proc/engine/schedstat", "proc/engine/smaps_rollup", "proc/engine/cgroup",
    "proc/meminfo", "proc/vmstat", "proc/stat", "proc/loadavg", "proc/uptime", "proc/pressure/cpu", "dumpsys battery", "dumpsys power",
    "dumpsys thermalservice", "sys/class/thermal/thermal_zone0/temp", "sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq",
    "sys/class/power_supply/battery/temp", "sys/block/zram0/mm_stat", "dev/cpuset/x/cpus",
]  # fmt: skip


@given(
    st.sampled_from(FILES),
    st.one_of(st.binary(max_size=200), st.text(alphabet="cpu:0 \n\t-9kBsome=avg.x()", max_size=200).map(str.encode)),
)
@settings(max_examples=200)
def test_no_kernel_text_is_an_error(name, data):
    for value in kernel.values([Entry(name, data)]).values.values():
        assert value is not None


@pytest.mark.parametrize("number", ["²", "9" * 400, "9" * 5000])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("proc/engine/status", "VmRSS:\t{} kB\n"),
        ("proc/engine/stat", "7 (a) R 1 0 0 0 -1 0 {}\n"),
        ("proc/engine/schedstat", "{} 2 3\n"),
        ("proc/engine/smaps_rollup", "Rss: {} kB\n"),
        ("proc/meminfo", "MemFree: {} kB\n"),
        ("proc/vmstat", "pswpin {}\n"),
        ("proc/stat", "cpu  {}\nctxt {}\n"),
        ("dumpsys battery", "level: {}\ntemperature: {}\nvoltage: {}\nstatus: {}\n"),
        ("dumpsys thermalservice", "Thermal Status: {}\n"),
        ("sys/class/thermal/thermal_zone0/temp", "{}"),
        ("sys/class/thermal/cooling_device0/cur_state", "{}"),
        ("sys/class/power_supply/battery/temp", "{}"),
        ("sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq", "{}"),
        ("sys/block/zram0/mm_stat", "{} 2 3\n"),
    ],
)
def test_what_is_no_number_costs_its_own_value_and_nothing_else_of_the_sample(name, text, number):
    known = kernel.values([Entry(name, text.replace("{}", "47").encode())]).values
    damaged = Entry(name, text.replace("{}", number).encode())
    after = kernel.values([damaged, Entry("proc/uptime", b"12.5 3\n")]).values
    assert after.pop("uptime_s") == 12.5
    assert known
    assert not {key for key, value in after.items() if known.get(key) == 47}
    assert set(after) < set(known)


def test_a_tree_that_is_none_says_what_is_wrong(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text(dump({"about": 'quotes " and \\ and \x01', "refused": {"proc/stat": "ENOSUCHNAME"}}))
    with pytest.raises(TreeError, match="ENOSUCHNAME"):
        lay(bad, tmp_path / "laid")
    bad.write_text(dump({"text": {"proc/../../escape": "x"}}))
    with pytest.raises(TreeError, match="outside"):
        lay(bad, tmp_path / "laid2")
    bad.write_text("not toml [")
    with pytest.raises(TreeError, match=r"bad\.toml"):
        lay(bad, tmp_path / "laid3")
