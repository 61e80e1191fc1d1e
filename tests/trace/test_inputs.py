"""Detection of the input type from names and first bytes."""

import gzip
import json
import os
import shutil

import pytest

from ringprof.errors import InputError, TraceFormatError
from ringprof.results.load import load
from ringprof.trace.inputs import Input, detect, detect_bytes
from ringprof.trace.kineto import parse_trace, read_trace
from ringprof.trace.ranks import read_traces
from ringprof.trace.reduced import reduce_trace
from tests.paths import DATA, TRACES
from tests.trace.kineto_text import TEN

RUN = json.dumps({"schema": "ringprof.run/1", "name": "x"}, indent=1).encode()
LOG = b"step 1\n-----  ---\nName   Self CUDA\n-----  ---\n"


def put(folder, name, data):
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(data)
    return str(path)


def test_detect_a_run(tmp_path):
    run = put(tmp_path, "run.json", RUN)
    put(tmp_path, "rank0.json", TEN)
    assert detect([run]) == detect([tmp_path]) == Input("run", run=run)
    renamed = put(tmp_path / "other", "mine.json", RUN)
    assert detect([renamed]) == Input("run", run=renamed)


@pytest.mark.parametrize("name", ["rank0.json", "trace.bin", "noname"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_detect_a_trace_with_any_name(tmp_path, name, pack):
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
def test_detect_unusual_traces(tmp_path, data):
    path = put(tmp_path, "some.json", data)
    assert detect([path]).type == "trace"


def test_traces_of_a_folder_are_in_rank_order(tmp_path):
    paths = [put(tmp_path, f"rank{rank}.json.gz", gzip.compress(TEN)) for rank in (0, 2, 10, 1)]
    put(tmp_path, "notes.json", b'{"a": 1}')
    put(tmp_path, "README.md", b"hello")
    put(tmp_path, "empty.json", b"")
    names = [os.path.basename(path) for path in detect([tmp_path]).paths]
    assert names == ["rank0.json.gz", "rank1.json.gz", "rank2.json.gz", "rank10.json.gz"]
    assert detect(paths) == Input("trace", tuple(paths))


SOUND = gzip.compress(TEN)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("rank1.json.gz", b"", "the file is empty"),
        ("rank1.json", b" \n", "the file is empty"),
        ("host_1.17.pt.trace.json", b"", "the file is empty"),
        ("rank1.json.gz", bytes(5000), "binary data of an unknown kind"),
        ("rank1.json.gz", SOUND[:10] + b"\xff" * 50, "the gzip data is damaged"),
        ("rank1.json.gz", SOUND[:3], "the gzip data is cut off"),
        ("rank1.json.gz", b"version https://git-lfs.github.com/spec/v1\n", "not a trace, despite its name"),
        ("rank1.json", b'{"a": 1}', "no Kineto trace, or damaged at its beginning"),
        ("trace.json", b'{"schemaVersion": 1, "devi', "no Kineto trace, or damaged at its beginning"),
        ("rank1.json", b"PK\x03\x04", "a zip archive"),
        ("rank1.ringprof", b"", "the file is empty"),
        ("rank1.sqlite", b"SQLite", "not a trace, despite its name"),
    ],
)
def test_damaged_trace_in_a_folder_is_reported(tmp_path, name, data, reason):
    path = put(tmp_path, "rank0.json.gz", SOUND)
    bad = put(tmp_path, name, data)
    detected = detect([tmp_path])
    assert detected.paths == (path,) and detected.in_folder
    assert [str(problem).startswith(f"{bad}: {reason}") for problem in detected.left_out] == [True]
    os.unlink(path)
    with pytest.raises(InputError, match=reason):
        detect([tmp_path])


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("notes.json", b'{"a": 1}'),
        ("package-lock.json", b'{"packages": {' + b" " * 100_000 + b"}}"),
        ("data.csv.gz", gzip.compress(b"a,b\n")),
        ("broken.gz", b"\x1f\x8b"),
        ("README.md", b""),
    ],
)
def test_other_files_in_a_folder_are_ignored(tmp_path, name, data):
    path = put(tmp_path, "rank0.json.gz", SOUND)
    put(tmp_path, name, data)
    detected = detect([tmp_path])
    assert (detected.paths, detected.left_out) == ((path,), ())


def test_detect_ranks_with_reduced_traces_only(tmp_path):
    reduced = reduce_trace(parse_trace(TEN))
    for rank in (0, 1, 2):
        put(tmp_path, f"rank{rank}.ringprof", reduced)
    put(tmp_path, "rank0.json.gz", SOUND)
    put(tmp_path, "rank2.json.gz", b"")
    detected = detect([tmp_path])
    assert [os.path.basename(path) for path in detected.paths] == ["rank0.json.gz", "rank1.ringprof", "rank2.ringprof"]
    # The empty file loses no rank: its reduced form is used.
    assert detected.left_out == ()


def test_links_out_of_a_folder_are_not_followed(tmp_path):
    secret = put(tmp_path / "elsewhere", "rank0.json", TEN)
    run = tmp_path / "run"
    here = put(run, "data/rank0.json", TEN)
    (run / "rank1.json").symlink_to(here)
    (run / "rank2.json").symlink_to(secret)
    (run / "rank3.json").symlink_to("rank3.json")
    detected = detect([run])
    assert detected.paths == (str(run / "rank1.json"),)
    assert [str(problem) for problem in detected.left_out] == [
        f"{run}/rank2.json: leaves the run's folder through a link: give its own path"
    ]
    assert read_traces(detected.paths, in_folder=True, left_out=detected.left_out)[0].warnings[-1].code == "left_out"
    # A subfolder may be a link as well.
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "rank_0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="leaves the run's folder through a link"):
        detect([tmp_path / "linked"])
    # A link that the user names explicitly is followed.
    assert detect([run / "rank2.json"]).paths == (str(run / "rank2.json"),)


def test_only_regular_files_are_opened(tmp_path):
    """Refuse a pipe without opening it: nobody writes to it, so opening it would block forever."""
    put(tmp_path, "rank0.json", TEN)
    os.mkfifo(tmp_path / "rank1.json")
    assert detect([tmp_path]).paths == (str(tmp_path / "rank0.json"),)
    with pytest.raises(InputError, match="not a regular file"):
        detect([tmp_path / "rank1.json"])
    with pytest.raises(InputError, match="not a regular file"):
        read_trace(tmp_path / "rank1.json")
    with pytest.raises(InputError, match="not a regular file"):
        read_trace("/dev/zero")


def test_run_with_a_pipe_as_trace_is_refused(tmp_path):
    run = json.loads((TRACES / "h200x4-zigzag-65536" / "run.json").read_bytes())
    for trace in run["traces"]:
        shutil.copy(TRACES / "h200x4-zigzag-65536" / trace["path"], tmp_path)
        trace["reduced"] = f"rank{trace['rank']}.ringprof"
        os.mkfifo(tmp_path / trace["reduced"])
    os.unlink(tmp_path / "rank2.json.gz")
    os.mkfifo(tmp_path / "rank2.json.gz")
    put(tmp_path, "run.json", json.dumps(run).encode())
    analysis = load(tmp_path)
    assert analysis.ranks == [0, 1, 3]
    (left_out,) = [warning for warning in analysis.warnings if warning.code == "left_out"]
    assert "rank2.json.gz: not a regular file" in left_out.message


def test_a_folder_with_a_folder_for_each_rank(tmp_path):
    for rank in (1, 0):
        put(tmp_path, f"rank_{rank}/trace.json", TEN)
    assert len(detect([tmp_path]).paths) == 2


TENSORBOARD = "plugins/profile/node_41.1700000000000000000.pt.trace.json"


def test_traces_of_a_tensorboard_folder(tmp_path):
    """Find traces in the folder structure that TensorBoard's profiler plugin needs (logs/run1/plugins/profile)."""
    logs = tmp_path / "logs"
    path = put(logs, f"run1/{TENSORBOARD}", TEN)
    put(logs, "run1/events.out.tfevents.17", b"x")
    put(logs, "hparams.json", b'{"a": 1}')
    expected = Input("trace", (path,), in_folder=True)
    for folder in (logs, logs / "run1", logs / "run1" / "plugins", logs / "run1" / "plugins" / "profile"):
        assert detect([folder]) == expected
    assert load(logs).ranks == [3]


def test_several_runs_below_a_folder_are_listed(tmp_path):
    for number in (10, 2):
        put(tmp_path, f"logs/run{number}/{TENSORBOARD}", TEN)
    run = put(tmp_path, "logs/recorded/run.json", RUN)
    put(tmp_path, "logs/recorded/rank0.json", TEN)
    put(tmp_path, "logs/other/notes.json", b'{"a": 1}')
    with pytest.raises(InputError) as caught:
        detect([tmp_path])
    listed = ", ".join(f"{tmp_path}/logs/{name}" for name in ("recorded", "run2/plugins", "run10/plugins"))
    assert str(caught.value) == (
        f"{tmp_path}: 3 folders below hold runs or traces: give one, or those of one run: {listed}"
    )
    # Each listed path is a valid input.
    for name in listed.split(", "):
        assert detect([name]).type in ("run", "trace")
    assert len(detect(listed.split(", ")[1:]).paths) == 2
    for name in ("run2", "run10"):
        shutil.rmtree(tmp_path / "logs" / name)
    assert detect([tmp_path]) == Input("run", run=run)


def test_number_of_runs_below_a_folder_is_a_lower_bound(tmp_path):
    """Stop the search before all 1,001 folders are visited."""
    for number in range(1001):
        put(tmp_path, f"run{number}/run.json", RUN)
    with pytest.raises(InputError, match="at least 1000 folders below hold runs or traces"):
        detect([tmp_path])
    shutil.rmtree(tmp_path / "run0")
    with pytest.raises(InputError, match=": 1000 folders below hold runs or traces"):
        detect([tmp_path])


def test_damaged_trace_below_a_folder_is_reported(tmp_path):
    bad = put(tmp_path, "a/b/c/rank0.json", b'{"a": 1}')
    with pytest.raises(InputError, match=f"{bad}: no Kineto trace"):
        detect([tmp_path])
    put(tmp_path, "a/d/e/rank1.json", TEN)
    (problem,) = detect([tmp_path]).left_out
    assert str(problem).startswith(f"{bad}: no Kineto trace")


def test_folder_search_has_a_depth_limit(tmp_path):
    put(tmp_path, "/".join("abcdefgh") + "/i/rank0.json", TEN)
    assert detect([tmp_path]).type == "trace"
    deeper = put(tmp_path / "far", "/".join("abcdefghijkl") + "/rank0.json", TEN)
    with pytest.raises(InputError, match="in this folder or below it"):
        detect([tmp_path / "far"])
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "away").symlink_to(os.path.dirname(os.path.dirname(os.path.dirname(deeper))))
    with pytest.raises(InputError, match="in this folder or below it"):
        detect([tmp_path / "linked"])


def test_detect_traces_of_real_folders():
    for folder in DATA.glob("h200x8*"):
        assert len(detect([folder]).paths) == 8


def test_detect_text(tmp_path):
    path = put(tmp_path, "log.txt", LOG)
    assert detect([path]) == Input("text", (path,))
    assert detect([put(tmp_path, "colour.log", b"\x1b[32m" + LOG)]).type == "text"


def test_detect_bytes_from_a_pipe():
    assert [detect_bytes(data) for data in (TEN, gzip.compress(TEN), RUN, LOG)] == ["trace", "trace", "run", "text"]
    with pytest.raises(InputError, match="-: the file is empty"):
        detect_bytes(b"")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("empty.json", b"", "the file is empty"),
        ("empty.json.gz", gzip.compress(b" "), "the file is empty"),
        ("t.pftrace", b"\x0a\x10abc", "a Perfetto trace: export JSON"),
        ("t.xplane.pb", b"abc", "an XLA profile"),
        ("t.nsys-rep", b"abc", "an Nsight Systems report"),
        ("t.json", b'{"Type":79,"CudaEvent":{"startNs":"1"}}\n', "an Nsight Systems report"),
        ("t.json", b'{"rocprofiler-sdk-tool": []}', "rocprofv3's JSON"),
        ("t.json", b'{"schema": "1.0.1", "nodes": [{"id": 1}]}', "a graph of operators"),
        ("t.json", b'{"$schema": "https://www.speedscope.app/file-format-schema.json"}', "a CPU profile"),
        (
            "t.json", b'[\n{"name": "Group", "cat": "GROUP", "ph": "b", "id": 0, "args": {"Stream": 0x262ca50}},\n]',
            "NCCL's profiler plugin.*NCCL Inspector",
        ),
        ("t.zip", b"PK\x03\x04abc", "unpack it"),
        ("t.tar", b"a" * 257 + b"ustar", "unpack it"),
        ("t.json", "{}".encode("utf-16"), "UTF-16 text"),
        ("t.bin", bytes(range(256)), "binary data of an unknown kind"),
        ("t.json.gz", b"\x1f\x8b\x08\x00" + b"\xff" * 50, "gzip data is damaged"),
    ],
)  # fmt: skip
def test_invalid_inputs_are_a_one_line_error(tmp_path, name, data, message):
    path = put(tmp_path, name, data)
    with pytest.raises(InputError, match=message) as caught:
        detect([path])
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_missing_input_error_suggests_the_nearest(tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        detect([tmp_path / "none"])
    put(tmp_path, "h200x4-zigzag-65536.json", TEN)
    put(tmp_path, "other.json", TEN)
    with pytest.raises(InputError, match=r"no such file or folder \(did you mean 'h200x4-zigzag-65536\.json'\?\)"):
        detect([tmp_path / "h200x4-zigzag-6553.json"])
    (tmp_path / "h200x4-zigzag-65536.json").unlink()
    (tmp_path / "other.json").unlink()
    with pytest.raises(InputError, match=r"no run\.json and no Kineto trace"):
        detect([tmp_path])
    with pytest.raises(InputError, match="no input"):
        detect([])


def test_a_link_to_nothing_is_named_with_its_target(tmp_path):
    (tmp_path / "newest.json").symlink_to("moved/run.json")
    with pytest.raises(InputError, match=r"newest.json: a link to moved/run.json, which does not exist$"):
        detect([str(tmp_path / "newest.json")])


def test_several_inputs_must_be_traces(tmp_path):
    trace, text = put(tmp_path, "rank0.json", TEN), put(tmp_path, "log.txt", LOG)
    with pytest.raises(InputError, match="several inputs must all be traces; this is a text file"):
        detect([trace, text])


def test_unsupported_trace_formats_are_trace_errors(tmp_path):
    with pytest.raises(TraceFormatError):
        detect([put(tmp_path, "t.pftrace", b"abc")])
