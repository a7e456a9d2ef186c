"""Layout of Sample.text: what the phone writes the host reads, and damage never loses what came before it."""

import errno

import pytest
from bmoe_proto import sample_text
from bmoe_proto.kernel import sample_values
from bmoe_proto.sample_text import Entry, SampleTextError
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.agent

names = (
    st.text(min_size=1, max_size=40)
    .filter(lambda text: 0 < len(text.encode("utf-8", "surrogatepass")) <= 4096)
    .filter(lambda text: not any(0xD800 <= ord(char) <= 0xDFFF for char in text))
)
entries = st.one_of(
    st.builds(Entry, names, st.binary(max_size=300), st.just(0), st.just(""), st.booleans()),
    st.builds(Entry, names, st.none(), st.integers(0, 2**20), st.just(""), st.just(value=False)),
    st.builds(Entry, names, st.none(), st.just(0), names, st.just(value=False)),
)


@given(st.lists(entries, max_size=12))
@settings(max_examples=80)
def test_what_is_encoded_is_decoded(wanted):
    assert sample_text.decode(sample_text.encode(wanted)) == wanted


@given(st.lists(entries, min_size=1, max_size=5), st.data())
@settings(max_examples=80)
def test_a_cut_text_gives_whole_entries_of_the_front_and_says_so(wanted, data):
    text = sample_text.encode(wanted)
    cut = data.draw(st.integers(1, len(text)))
    found = []
    problem = ""
    try:
        for entry in sample_text.iterate(text[:cut]):
            found.append(entry)  # noqa: PERF402
    except SampleTextError as error:
        problem = str(error)
    assert not problem or "offset" in problem
    assert found == wanted[: len(found)]
    assert len(found) < len(wanted) or cut == len(text)


@given(st.binary(max_size=200))
@settings(max_examples=150)
def test_no_bytes_break_the_reader(junk):
    try:
        for entry in sample_text.iterate(junk):
            assert entry.name
    except SampleTextError:
        pass
    sample_values(junk)
    sample_values(b"\x01" + junk)


def test_lengths_over_two_bytes_and_the_handmade_parts_agree_with_the_encoder():
    big = b"x" * 70000
    text = b"".join(
        [b"\x01", sample_text.head("proc/stat"), sample_text.varint(len(big)), big, sample_text.refusal("proc/io", 13)]
    )
    assert text == sample_text.encode([Entry("proc/stat", big), Entry("proc/io", None, errno=13)])
    assert [sample_text.varint(n) for n in (0, 127, 128, 16383)] == [
        sample_text.short_varints()[n] for n in (0, 127, 128, 16383)
    ]


def test_a_claimed_length_beyond_the_text_is_refused_and_the_rest_kept():
    text = (
        sample_text.encode([Entry("proc/meminfo", b"MemFree: 12 kB\n")])
        + sample_text.head("proc/stat")
        + b"\xff\xff\xff\xff\x0f"
    )
    values = sample_values(text)
    assert values.values == {"mem_free_kib": 12}
    assert "should have" in values.problem


def test_a_newer_layout_is_named():
    with pytest.raises(SampleTextError, match="layout 9"):
        sample_text.decode(b"\x09abc")


def test_reasons_reach_the_values():
    values = sample_values(
        sample_text.encode(
            [Entry("proc/vmstat", None, errno=errno.EACCES), Entry("dumpsys battery", None, reason="timed out")]
        )
    )
    assert values.refused == {"proc/vmstat": "EACCES (permission denied)", "dumpsys battery": "timed out"}
