"""Users' files that cannot be decoded give a one-line error, and a single module decodes them."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import ringprof
from ringprof.common import decoding
from ringprof.common.decoding import DEEPEST, decode_file, decode_json, refuse_deep
from ringprof.common.scratch import OWNER_FILE, has_token, remove_abandoned
from ringprof.errors import InputError, RunFormatError
from ringprof.prediction.calibration import parse_calibration, read_calibration
from ringprof.run import parse_run
from tests.paths import ROOT, TRACES

PACKAGE = Path(ringprof.__file__).parent
MACHINE = (PACKAGE / "prediction" / "machines" / "h100.json").read_bytes()
RUN = (TRACES / "h200x4-zigzag-65536" / "run.json").read_bytes()
DEEP = b"[" * 20_000 + b"]" * 20_000


def with_field(document: bytes, value: bytes) -> bytes:
    """Add an unknown field to a JSON object."""
    return document.rstrip()[:-1] + b', "unknown": ' + value + b"}"


def read_sweep_of(data: bytes, name: str) -> object:
    pytest.importorskip("torch")
    from ringprof.trials.sweep import read_sweep

    Path(name).write_bytes(data)
    return read_sweep(name)


READERS: dict[str, tuple[Callable[[bytes, str], object], bytes]] = {
    "run.json": (parse_run, RUN),
    "machine.json": (parse_calibration, MACHINE),
    "sweep.json": (read_sweep_of, b'{"schema": "ringprof.sweep/1", "rows": []}'),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda sound: with_field(sound, DEEP), "nested too deeply"),
        (lambda sound: sound[:-3], "JSON is malformed|truncated"),
        (lambda _: b"", "truncated"),
        (lambda _: b"[]", "Expected `object`"),
        (lambda sound: sound.replace(b'"schema": "r', b'"schema": "\xff', 1), "not UTF-8"),
        (lambda sound: sound.replace(b'"schema": "r', b'"schema": 1e999, "x": "r', 1), "malformed|out of range"),
    ],
)
def test_undecodable_file_is_a_one_line_error(
    name: str, damage: Callable[[bytes], bytes], why: str, tmp_path: Path
) -> None:
    read, sound = READERS[name]
    path = str(tmp_path / name)
    with pytest.raises(InputError, match=why) as refused:
        read(damage(sound), path)
    message = str(refused.value)
    assert message.startswith(f"{path}: not a ") and "\n" not in message and "recursion" not in message


@pytest.mark.parametrize("levels", [DEEPEST, DEEPEST + 1, 900])
def test_parameters_of_any_type_are_nested_64_deep_at_most(levels: int) -> None:
    """Refuse deeper values: what is read must also be writable, as a part of a report."""
    nested = "[" * (levels - 1) + "]" * (levels - 1)
    run = json.loads(RUN)
    run["strategy"]["params"] = {"x": "VALUE"}
    data = json.dumps(run).replace('"VALUE"', nested).encode()
    if levels <= DEEPEST:
        strategy = parse_run(data, "run.json").strategy
        assert strategy is not None and strategy.params["x"] == json.loads(nested)
    else:
        with pytest.raises(RunFormatError, match="nested too deeply"):
            parse_run(data, "run.json")


def test_depth_counts_objects_and_lists_alike() -> None:
    nested: object = 1
    for level in range(DEEPEST):
        nested = {"x": nested} if level % 2 else [0, nested]
    refuse_deep(nested)
    with pytest.raises(ValueError, match="deeply"):
        refuse_deep([nested])


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(b"[1,2,3]")
    assert decode_file(str(path), list[int], "a list", 7) == [1, 2, 3]
    with pytest.raises(InputError, match="not a list: larger than 6 bytes"):
        decode_file(str(path), list[int], "a list", 6)


def test_a_machine_file_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(MACHINE + b" " * (decoding.FILE_BYTES - len(MACHINE)))
    assert read_calibration(path).name == json.loads(MACHINE)["name"]
    path.write_bytes(b" " + path.read_bytes())
    with pytest.raises(InputError, match="larger than 16,777,216 bytes"):
        read_calibration(path)


def test_deeply_nested_owner_file_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / ".some.partial"
    folder.mkdir()
    (folder / OWNER_FILE).write_bytes(b'{"token": "a", "x": ' + b"[" * 1800 + b"]" * 1800 + b"}")
    assert not has_token(folder, "a") and remove_abandoned(tmp_path) == []


def test_decode_json_raises_the_error_of_the_caller() -> None:
    with pytest.raises(RunFormatError, match=r"^here: not a list: Expected `int`, got `str` - at `\$\[0\]`$"):
        decode_json(b'["x"]', list[int], "here", "a list", RunFormatError)


# --- one module decodes -----------------------------------------------------------------------------------

_DECODERS = {"decode", "loads", "load", "Decoder", "JSONDecoder"}
EXCEPTIONS = {
    "common/decoding.py": "the module itself",
    "prediction/microbenchmark.py": "measurements that one process of a calibration sends to another",
    "common/json_object.py": "text of the same function, and tasks that one process of a run sends to another",
    "ranks/progress.py": "progress logs of this run's own ranks, in a folder that is this user's alone",
    "scale/store.py": "results that this run's own helpers leave in a folder that is this user's alone",
    "trace/reduced.py": "one clause there covers unpacking, decoding and checking",
    "trace/kineto/event_list.py": "decoders of single events, whose callers recover what is damaged",
    "trace/kineto/event_tables.py": "parts of one event: what is damaged is counted, and the rest is read",
    "trace/kineto/fields.py": "metadata: what is damaged is salvaged field by field",
    "trace/kineto/recover.py": "the recovery of damaged events",
    "trace/kineto/tracks.py": "names of tracks: one that is damaged has no name",
}
"""Modules that may call a decoder themselves, with the reason."""
_OF_USERS = {name for name in EXCEPTIONS if name.startswith("trace/")}


def decoder_calls(path: Path) -> set[str]:
    """Find the calls of a module that decode JSON or MessagePack."""
    tree = ast.parse(path.read_text("utf-8"))
    called = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("json", "msgspec"):
            called |= {
                f"{node.module}.{name.name}" for name in node.names if name.name in {*_DECODERS, "json", "msgpack"}
            }
        if isinstance(node, ast.Attribute) and node.attr in _DECODERS:
            owner = ast.unparse(node.value)
            if owner in ("json", "msgspec.json", "msgspec.msgpack", "msgspec.yaml", "msgspec.toml"):
                called.add(f"{owner}.{node.attr}")
    return called


def test_only_one_module_decodes_user_files() -> None:
    calling = {str(path.relative_to(PACKAGE)) for path in sorted(PACKAGE.rglob("*.py")) if decoder_calls(path)}
    assert calling == set(EXCEPTIONS)


@pytest.mark.parametrize("name", sorted(_OF_USERS))
def test_modules_that_read_user_files_catch_decoder_errors(name: str) -> None:
    """Look for `UNREADABLE` in the module; modules that only define decoders mention it for their callers."""
    assert "UNREADABLE" in (PACKAGE / name).read_text("utf-8")


@pytest.mark.parametrize(
    "text",
    [
        "import msgspec\nmsgspec.json.decode(b'')",
        "import json\njson.load(f)",
        "from json import loads",
        "from msgspec import json",
    ],
)
def test_decoder_calls_are_detected(text: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert decoder_calls(path)


def test_package_is_imported_from_the_checkout() -> None:
    assert PACKAGE == ROOT / "ringprof"
