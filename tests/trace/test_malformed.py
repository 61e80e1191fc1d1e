"""Malformed and unusual traces: complete events are read, the others are counted in warnings."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringprof.errors import RingprofError
from ringprof.trace.kineto import parse_trace
from tests.trace.kineto_text import REAL, TEN, document, kernel

BASE = {"baseTimeNanoseconds": 1_790_857_026_000_000_000}
FIFTH = TEN.index(b'"k4"')
START_OF_FIFTH = TEN.rindex(b"{", 0, FIFTH)
BETWEEN = TEN[TEN.rindex(b"}", 0, START_OF_FIFTH) : START_OF_FIFTH + 1]


def changed(old, new):
    """Return TEN with one change in or just before its fifth kernel."""
    offset = TEN.index(old, START_OF_FIFTH - len(BETWEEN) + 1 - 5 * old.startswith(b"}"))
    return TEN[:offset] + new + TEN[offset + len(old) :]


def ten(**change):
    """Return ten kernels, the fifth changed, with a base time and realistic times."""
    real = [kernel(n, ts=4347463084898.731 + 100 * n) for n in range(10)]
    real[4].update(change)
    return document(real, **BASE)


def listed(events):
    return json.dumps([kernel(number) for number in range(events)]).encode()


UNLAUNCHED = {"missing_correlation": 1}

# Content of the file, kernels read, events skipped, {warning code: count}.
CASES = {
    "sound": (TEN, 10, 0, {}),
    "cut in an event": (TEN[: FIFTH + 30], 4, 1, {"truncated": 1}),
    "cut between events": (TEN[: START_OF_FIFTH - 4], 4, 0, {"truncated": 1}),
    "cut before the closing brace": (TEN[: TEN.rindex(b"]") + 1], 10, 0, {}),
    "cut gzip": (gzip.compress(TEN)[:-40], 6, 1, {"truncated": 1, "damaged_compression": 1}),
    "damaged gzip": (
        gzip.compress(TEN, 0)[:1500] + gzip.compress(TEN[:1400])[10:],
        None,
        None,
        {"damaged_compression": 1},
    ),
    "unescaped quote": (changed(b'"k4"', b'"k"4"'), 9, 1, {"damaged_events": 1}),
    "control character": (changed(b'"k4"', b'"k\x014"'), 10, 0, {"repaired_events": 1}),
    "line break in a name": (changed(b'"k4"', b'"k\n4"'), 10, 0, {"repaired_events": 1}),
    "zero byte in a name": (changed(b'"k4"', b'"k\x004"'), 10, 0, {"repaired_events": 1}),
    "Windows path": (changed(b'"k4"', b'"C:\\Users\\k4"'), 10, 0, {"repaired_events": 1}),
    "invalid UTF-8": (changed(b'"k4"', b'"k\xff4"'), 10, 0, {"repaired_events": 1}),
    "lone surrogate": (changed(b'"k4"', b'"k\\ud8004"'), 10, 0, {"repaired_events": 1}),
    **{
        f"bare {word}": (
            changed(b'"device": 0', b'"x": ' + word.encode() + b', "device": 0'),
            10,
            0,
            {"repaired_events": 1},
        )
        for word in ("NaN", "Infinity", "-Infinity", "inf", "-inf", "nan", "N/A")
    },
    "NaN as duration": (changed(b"50.25", b"NaN"), 10, 0, {"repaired_events": 1, "missing_duration": 1}),
    "beyond 64 bits": (changed(b'"correlation": 4', b'"correlation": 4444444444444444444444'), 10, 0, UNLAUNCHED),
    "thousands of digits": (
        changed(b'"correlation": 4', b'"correlation": ' + b"4" * 6000),
        10,
        0,
        {"unreadable_arguments": 1} | UNLAUNCHED,
    ),
    "unsigned 64 bits": (changed(b'"correlation": 4', b'"Comms Id": 18446744073709551615'), 10, 0, UNLAUNCHED),
    "time 0": (ten(ts=0), 9, 0, {"zero_timestamp": 1}),
    "time 0 in a trace that begins there": (document([kernel(0, ts=0), kernel(1, ts=60)]), 2, 0, {}),
    "time far off": (ten(ts=9_999_999_999_999.5), 9, 0, {"absurd_timestamp": 1}),
    "no time": (ten(ts=None), 9, 0, {"missing_time": 1}),
    "time is no number": (ten(ts="soon"), 9, 0, {"missing_time": 1}),
    "duration 0": (ten(dur=0), 10, 0, {"zero_duration": 1}),
    "negative duration": (ten(dur=-0.001), 10, 0, {"negative_duration": 1}),
    "eight days": (ten(dur=8 * 86400 * 10**6), 9, 0, {"absurd_duration": 1}),
    "centuries": (ten(dur=7447463084898731000), 9, 0, {"absurd_duration": 1}),
    "text everywhere": (
        document([kernel(n, pid="0", tid="stream 7", ts=f"{n}.5", dur="2", args={"stream": "7"}) for n in range(10)]),
        10,
        0,
        {},
    ),
    "bare list": (listed(10), 10, 0, {}),
    "bare list without its bracket": (listed(10)[:-1], 10, 0, {"truncated": 1}),
    "bare list ending in a comma": (listed(10)[:-1] + b",\n", 10, 0, {"truncated": 1}),
    "bare list, cut": (listed(10)[:-5], 9, 1, {"truncated": 1}),
    "comma after the last event": (TEN.replace(b"\n ]\n", b",\n ]\n"), 10, 0, {"misplaced_commas": 1}),
    "comma after the last argument": (
        changed(b'"correlation": 4', b'"correlation": 4,'),
        10,
        0,
        {"repaired_events": 1},
    ),
    "NaN before the events": (b'{"x": NaN, "y": -Infinity, ' + TEN[1:], 10, 0, {}),
    "a time twice": (changed(b'"ts"', b'"ts": 5, "ts"'), 10, 0, {"repeated_keys": 1}),
    "an equal value twice": (changed(b'"ph": "X"', b'"ph": "X", "ph": "X"'), 10, 0, {}),
    "rank twice": (TEN.replace(b'"rank"', b'"rank": 1, "rank"'), 10, 0, {"repeated_keys": 1}),
    "ranks around the events": (
        b'{"distributedInfo": {"rank": 1},' + TEN[1 : TEN.rindex(b"}")] + b', "distributedInfo": {"rank": 0}}',
        10,
        0,
        {"repeated_keys": 1},
    ),
    "no comma": (changed(BETWEEN, b"} {"), 10, 0, {"misplaced_commas": 1}),
    "two commas": (changed(BETWEEN, b"},,{"), 10, 0, {"misplaced_commas": 1}),
    "bracket for a comma": (changed(BETWEEN, b"}]{"), 10, 0, {"misplaced_commas": 1}),
    "no closing brace": (changed(BETWEEN, b" ,{"), 9, 1, {"damaged_events": 1}),
    "no opening brace": (changed(BETWEEN, b"}, "), 9, 1, {"damaged_events": 1}),
    "argument twice": (
        changed(b'"correlation": 4', b'"correlation": 5, "correlation": 4'),
        10,
        0,
        {"repeated_keys": 1},
    ),
    "arguments are a list": (ten(args=[1]), 10, 0, {"unreadable_arguments": 1} | UNLAUNCHED),
    "arguments are null": (ten(args=None), 10, 0, UNLAUNCHED),
    "no name": (ten(name=None), 10, 0, {"missing_name": 1}),
    "no category": (ten(cat=None), 9, 0, {"missing_category": 1}),
    "an argument of the wrong type": (
        ten(args={"stream": 7, "correlation": [1]}),
        10,
        0,
        {"unreadable_arguments": 1} | UNLAUNCHED,
    ),
    "deeply nested": (changed(b'"device": 0', b'"x": ' + b"[" * 200_000 + b"]" * 200_000), 9, 1, {"damaged_events": 1}),
    "begin and end events": (ten(ph="B"), 9, 0, {"begin_end_events": 1}),
    "byte order mark": (b"\xef\xbb\xbf" + TEN, 10, 0, {}),
    "first byte": (b"x" + TEN[1:], 10, 0, {"damaged_metadata": 1}),
    "key of the list": (TEN.replace(b"traceEvents", b"traceEvXnts"), 10, 0, {"damaged_metadata": 1}),
    "world size": (TEN.replace(b'"world_size": 8', b'"world_size": 8x'), 10, 0, {"damaged_metadata": 1}),
}


@pytest.mark.parametrize(("data", "kernels", "skipped", "codes"), CASES.values(), ids=CASES)
def test_malformed_traces_keep_intact_events(data, kernels, skipped, codes):
    trace = parse_trace(data)
    warning_counts = {warning.code: warning.count for warning in trace.warnings}
    if kernels is None:
        assert codes.items() <= warning_counts.items()
        return
    assert (len(trace.activities.start_ns), trace.events_skipped, warning_counts) == (kernels, skipped, codes)


def test_byte_offsets_point_at_the_damage():
    (damaged,) = parse_trace(changed(b'"k4"', b'"k"4"')).warnings
    assert damaged.byte_offset == START_OF_FIFTH
    (cut,) = parse_trace(TEN[: FIFTH + 30]).warnings
    assert cut.byte_offset == START_OF_FIFTH


def test_byte_offsets_count_from_the_start_of_the_file(monkeypatch):
    monkeypatch.setattr("ringprof.trace.kineto.byte_source.PIECE_BYTES", 400)
    data = changed(b'"k4"', b'"k"4"')
    (damaged,) = parse_trace(data).warnings
    assert (damaged.code, damaged.byte_offset) == ("damaged_events", START_OF_FIFTH)
    assert len(parse_trace(data).activities.start_ns) == 9


def test_the_rank_survives_damage_around_it():
    trace = parse_trace(TEN.replace(b'"world_size": 8', b'"world_size": 8x'))
    assert trace.rank == 3


def test_the_values_of_a_repaired_event_are_exact():
    data = ten(name="ké4", args={"x": float("nan"), "device": 0, "stream": 9, "correlation": 4})
    trace = parse_trace(data)
    assert [(warning.code, warning.count) for warning in trace.warnings] == [("repaired_events", 1)]
    # 4347463084898.731 µs and four times 100 µs after the base time, 50.25 µs long.
    assert int(trace.activities.start_ns[4]) == 1_790_857_026_000_000_000 + 4_347_463_085_298_731
    assert int(trace.activities.end_ns[4] - trace.activities.start_ns[4]) == 50_250
    assert trace.names[trace.activities.name[4]] == "ké4"
    assert trace.activities.stream.tolist() == [7, 7, 7, 7, 9, 7, 7, 7, 7, 7]


@pytest.mark.parametrize(
    "unit",
    [b'"', b'"\\', b'{"ph":[', b'{"ph":[{},', b'{"name":"', b'{"ph":"x', b"}", b"},", b"]", b'{"ph":"X"}],', b"\0"],
)
def test_garbage_is_refused_in_bounded_time(unit):
    """Read a megabyte of any text in far less than a minute, which the timeout of the test checks."""
    with pytest.raises(RingprofError):
        parse_trace(b'{"traceEvents":[' + unit * ((1 << 20) // len(unit)))


def test_hole_in_a_trace_loses_only_its_events(monkeypatch):
    monkeypatch.setattr("ringprof.trace.kineto.byte_source.PIECE_BYTES", 1 << 16)
    data = gzip.decompress(REAL[0].read_bytes())
    whole = parse_trace(data)
    begin, end = len(data) // 2, len(data) // 2 + 5000
    holed = parse_trace(data[:begin] + b"\0" * (end - begin) + data[end:])
    lost = whole.events_total - (holed.events_total - holed.events_skipped)
    assert 0 < lost < 40
    assert "damaged_events" in {warning.code for warning in holed.warnings}


def test_only_invalid_escapes_are_repaired():
    trace = parse_trace(TEN.replace(b'"k4"', rb'"k\u00E9\q"'))
    assert trace.names[trace.activities.name[4]] == "ké\\q"


def test_search_for_events_continues_after_a_repaired_one():
    """Pass over half a megabyte of zeros after a repaired event: the effort allows four megabytes."""
    data = ten(args={"x": float("nan"), "stream": 9})
    begin, end = data.index(b'"k6"'), data.index(b'"k7"')
    trace = parse_trace(data[:begin] + b"\0" * (1 << 19) + data[end:])
    assert {"k4", "k5", "k8", "k9"} <= set(trace.names)


# --- mutations --------------------------------------------------------------------------------------

SAMPLE = gzip.decompress(REAL[0].read_bytes())
SHORT = SAMPLE[:30_000] + SAMPLE[SAMPLE.rindex(b"\n  ],") :]
NOISE = (b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\0", b"\xff", b"NaN", b"-", b"e9", b"9" * 30, b"null", b"")


def read_or_refuse(data):
    """Parse a trace; return None if it was refused with a one-line message."""
    try:
        return parse_trace(data, "mutated.json")
    except RingprofError as error:
        assert "\n" not in str(error)
        assert str(error).startswith("mutated.json: ")
        return None


def mutated(data, changes):
    for position, length, noise in changes:
        offset = position % (len(data) + 1)
        data = data[:offset] + noise + data[offset + length :]
    return data


changes = st.lists(
    st.tuples(st.integers(0, 1 << 30), st.integers(0, 40), st.sampled_from(NOISE) | st.binary(max_size=8)), max_size=6
)


@given(changes)
@settings(max_examples=60)
def test_mutated_traces_are_read_or_refused(changes):
    read_or_refuse(mutated(SHORT, changes))


@given(changes)
@settings(max_examples=30)
def test_mutated_compressed_traces_are_read_or_refused(changes):
    read_or_refuse(mutated(gzip.compress(SHORT, 1), changes))


@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 7)), min_size=1, max_size=4))
@settings(max_examples=30)
def test_flipped_bits_lose_only_the_events_they_hit(flips):
    data = bytearray(SAMPLE)
    for position, bit in flips:
        data[position] ^= 1 << bit
    trace = read_or_refuse(bytes(data))
    assert trace is not None
    assert trace.events_total - trace.events_skipped >= WHOLE.events_total - 3 * len(flips)
    assert len(np.intersect1d(trace.activities.start_ns, WHOLE.activities.start_ns)) >= 153 - 3 * len(flips) or (
        trace.base_ns != WHOLE.base_ns
    )


def test_a_damaged_first_brace_loses_no_event():
    damaged = SAMPLE.replace(b"{", b"[", 1)
    assert len(parse_trace(damaged).activities.start_ns) == len(WHOLE.activities.start_ns)


@pytest.mark.parametrize("damage", [b'#traceEvents": [', b'"traceEvents": Z', b'"traceEvents"  ['])
def test_a_damaged_key_of_the_event_list_loses_no_event(damage):
    damaged = SAMPLE.replace(b'"traceEvents": [', damage, 1)
    assert damaged != SAMPLE
    assert len(parse_trace(damaged).activities.start_ns) == len(WHOLE.activities.start_ns)


WHOLE = parse_trace(SAMPLE)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_thousand_mutations_are_read_or_refused():
    random = np.random.default_rng(20)
    packed = gzip.compress(SHORT, 1)
    for number in range(10_000):
        source = packed if number % 5 == 0 else SHORT
        places = random.integers(0, len(source), random.integers(1, 8))
        lengths = random.integers(0, 3 if number % 2 else 2000, len(places))
        noises = [NOISE[index] for index in random.integers(0, len(NOISE), len(places))]
        read_or_refuse(mutated(source, zip(places.tolist(), lengths.tolist(), noises, strict=True)))
