"""What an input is, told from names and first bytes."""

import gzip
import json
import os

import pytest

from ringprof.errors import InputError, TraceFormatError
from ringprof.trace.inputs import Input, detect, detect_bytes
from tests.paths import DATA
from tests.trace.kineto_text import TEN

RUN = json.dumps({"schema": "ringprof.run/1", "name": "x"}, indent=1).encode()
LOG = b"step 1\n-----  ---\nName   Self CUDA\n-----  ---\n"


def put(folder, name, data):
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(data)
    return str(path)


def test_a_run(tmp_path):
    run = put(tmp_path, "run.json", RUN)
    put(tmp_path, "rank0.json", TEN)
    assert detect([run]) == detect([tmp_path]) == Input("run", run=run)
    renamed = put(tmp_path / "other", "mine.json", RUN)
    assert detect([renamed]) == Input("run", run=renamed)


@pytest.mark.parametrize("name", ["rank0.json", "trace.bin", "noname"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_trace_whatever_its_name(tmp_path, name, pack):
    path = put(tmp_path, name, pack(TEN))
    assert detect([path]) == Input("trace", (path,))


@pytest.mark.parametrize(
    "data",
    [
        json.dumps([{"ph": "X", "ts": 1}]).encode(),
        b"\xef\xbb\xbf" + TEN,
        b"x" + TEN[1:],
        TEN[:40],
        gzip.compress(TEN)[:60],
        b'{"traceEvents": [' + b" " * 100_000,
    ],
)
def test_a_trace_that_is_odd(tmp_path, data):
    path = put(tmp_path, "some.json", data)
    assert detect([path]).type == "trace"


def test_a_folder_in_the_order_of_ranks(tmp_path):
    paths = [put(tmp_path, f"rank{rank}.json.gz", gzip.compress(TEN)) for rank in (0, 2, 10, 1)]
    put(tmp_path, "notes.json", b'{"a": 1}')
    put(tmp_path, "README.md", b"hello")
    put(tmp_path, "empty.json", b"")
    names = [os.path.basename(path) for path in detect([tmp_path]).paths]
    assert names == ["rank0.json.gz", "rank1.json.gz", "rank2.json.gz", "rank10.json.gz"]
    assert detect(paths) == Input("trace", tuple(paths))


def test_a_folder_with_a_folder_for_each_rank(tmp_path):
    for rank in (1, 0):
        put(tmp_path, f"rank_{rank}/trace.json", TEN)
    assert len(detect([tmp_path]).paths) == 2


def test_real_folders():
    for folder in DATA.glob("h200*"):
        assert len(detect([folder]).paths) == 8


def test_text(tmp_path):
    path = put(tmp_path, "log.txt", LOG)
    assert detect([path]) == Input("text", (path,))
    assert detect([put(tmp_path, "colour.log", b"\x1b[32m" + LOG)]).type == "text"


def test_a_pipe():
    assert [detect_bytes(data) for data in (TEN, gzip.compress(TEN), RUN, LOG)] == ["trace", "trace", "run", "text"]
    with pytest.raises(InputError, match="-: the file is empty"):
        detect_bytes(b"")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("empty.json", b"", "the file is empty"),
        ("empty.json.gz", gzip.compress(b" "), "the file is empty"),
        ("t.pftrace", b"\x0a\x10abc", "a Perfetto trace: export JSON"),
        ("t.nsys-rep", b"abc", "an Nsight Systems report"),
        ("t.zip", b"PK\x03\x04abc", "unpack it"),
        ("t.tar", b"a" * 257 + b"ustar", "unpack it"),
        ("t.json", "{}".encode("utf-16"), "UTF-16 text"),
        ("t.bin", bytes(range(256)), "binary data of an unknown kind"),
        ("t.json.gz", b"\x1f\x8b\x08\x00" + b"\xff" * 50, "gzip data is damaged"),
    ],
)
def test_what_is_refused(tmp_path, name, data, message):
    path = put(tmp_path, name, data)
    with pytest.raises(InputError, match=message) as caught:
        detect([path])
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_what_is_not_there(tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        detect([tmp_path / "none"])
    with pytest.raises(InputError, match=r"no run\.json and no Kineto trace"):
        detect([tmp_path])
    with pytest.raises(InputError, match="no input"):
        detect([])


def test_several_inputs_must_be_traces(tmp_path):
    trace, text = put(tmp_path, "rank0.json", TEN), put(tmp_path, "log.txt", LOG)
    with pytest.raises(InputError, match="several inputs must all be traces; this is a text file"):
        detect([trace, text])


def test_known_formats_are_trace_errors(tmp_path):
    with pytest.raises(TraceFormatError):
        detect([put(tmp_path, "t.pftrace", b"abc")])
