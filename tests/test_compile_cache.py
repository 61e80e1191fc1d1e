"""torch's compiled code is stored in a folder of this user, never under a name that others can guess."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringprof.common.compile_cache import VARIABLE, choose_compile_cache
from tests.recording.command import RINGPROF, SMALL, run


def chosen(environment: dict[str, str], fallback: str | None = None) -> str | None:
    choose_compile_cache(environment, fallback)
    return environment.get(VARIABLE)


def test_compile_cache_is_in_the_cache_folder_of_the_user(tmp_path: Path) -> None:
    home, cache = tmp_path / "home", tmp_path / "cache"
    home.mkdir()
    assert chosen({"HOME": str(home)}) == str(home / ".cache" / "ringprof" / "torchinductor")
    assert list(home.iterdir()) == []  # torch creates the folder when it needs it
    cache.mkdir()
    assert chosen({"HOME": str(home), "XDG_CACHE_HOME": str(cache)}) == str(cache / "ringprof" / "torchinductor")


def test_compile_cache_set_by_the_user_is_kept(tmp_path: Path) -> None:
    assert chosen({"HOME": str(tmp_path), VARIABLE: "/elsewhere"}, "/fallback") == "/elsewhere"


@pytest.mark.parametrize("home", [None, "", "relative", __file__, "/dev/null"])
def test_compile_cache_without_a_home_uses_the_fallback(home: str | None) -> None:
    environment = {} if home is None else {"HOME": home}
    assert chosen(dict(environment)) is None
    assert chosen(dict(environment), "/fallback") == "/fallback"


def test_compile_cache_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".cache" / "ringprof" / "torchinductor").mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert chosen({"HOME": str(tmp_path)}, "/fallback") == "/fallback"


@pytest.mark.processes
@pytest.mark.parametrize("has_home", [True, False])
def test_recording_leaves_no_temporary_files(tmp_path: Path, has_home: bool) -> None:
    pytest.importorskip("torch")
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    temporary.mkdir()
    if has_home:
        home.mkdir()
    arguments = ["record", "--strategy", "ring", *SMALL, "--world", "2", "--iters", "1", "-o", "runs/run.json"]
    surroundings = {"HOME": str(home if has_home else Path(__file__, "home")), "TMPDIR": str(temporary), VARIABLE: ""}
    done = run(arguments, tmp_path, RINGPROF, **surroundings)
    assert done.returncode == 0, done.stderr
    assert list(temporary.iterdir()) == []
    assert not has_home or (home / ".cache" / "ringprof" / "torchinductor").is_dir()
