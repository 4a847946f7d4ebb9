import os
import random
import resource
import signal
import stat
import sys
import time

import pytest

from attnquant import files
from attnquant.errors import DataError, ModelError
from attnquant.files import atomic_write, write_text


@pytest.fixture(params=["nameless", "named"])
def _either_way(request, monkeypatch):
    if request.param == "named":
        monkeypatch.delattr(os, "O_TMPFILE")


def interrupted(path):
    with atomic_write(path) as handle:
        handle.write(b"half")
        raise KeyboardInterrupt


@pytest.mark.usefixtures("_either_way")
class TestBothWays:
    """With an unfinished file that has no name (Linux), and with one that has."""

    def test_a_new_file_has_the_permissions_of_the_umask(self, tmp_path):
        before = os.umask(0o027)
        try:
            write_text(tmp_path / "a.txt", "grüße")
        finally:
            os.umask(before)
        assert (tmp_path / "a.txt").read_bytes() == "grüße".encode()
        assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640
        assert os.listdir(tmp_path) == ["a.txt"]

    def test_an_existing_file_keeps_its_permissions(self, tmp_path):
        path = tmp_path / "a.txt"
        path.write_text("old")
        path.chmod(0o604)
        write_text(path, "new")
        assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o604)

    def test_an_exception_leaves_what_was_there(self, tmp_path):
        path = tmp_path / "a.txt"
        path.write_text("old")
        for name in ("a.txt", "b.txt"):
            with pytest.raises(KeyboardInterrupt):
                interrupted(tmp_path / name)
        assert path.read_text() == "old"
        assert os.listdir(tmp_path) == ["a.txt"]

    def test_nothing_is_seen_before_the_end(self, tmp_path):
        path = tmp_path / "a.txt"
        with atomic_write(path) as handle:
            handle.write(b"x" * 100_000)
            handle.flush()
            assert not path.exists()
        assert path.stat().st_size == 100_000

    def test_links_are_followed_and_hard_links_cut(self, tmp_path):
        (tmp_path / "real").mkdir()
        target = tmp_path / "real" / "a.txt"
        target.write_text("old")
        os.link(target, tmp_path / "hard.txt")
        os.symlink(target, tmp_path / "soft.txt")
        os.symlink(tmp_path / "real" / "b.txt", tmp_path / "dangling.txt")
        write_text(tmp_path / "soft.txt", "new")
        write_text(tmp_path / "dangling.txt", "b")
        assert (tmp_path / "soft.txt").is_symlink()
        assert (target.read_text(), (tmp_path / "hard.txt").read_text(), (tmp_path / "real" / "b.txt").read_text()) == (
            "new",
            "old",
            "b",
        )

    def test_a_full_disk_leaves_what_was_there(self, tmp_path):
        path = tmp_path / "a.bin"
        path.write_bytes(b"old")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        try:
            with pytest.raises(ModelError, match=r"a\.bin.*large"):
                write_text(path, "x" * 100_000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["a.bin"]


def test_what_can_not_be_written(tmp_path):
    (tmp_path / "folder").mkdir()
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    for path, word in [
        (tmp_path / "folder", "folder"),
        (tmp_path / "none" / "a", "does not exist"),
        ("/dev/null", "device"),
        ("a\0b", "null"),
        (tmp_path / "loop", "link to itself"),
        (tmp_path / ("x" * 300), "too long"),
    ]:
        with pytest.raises(DataError, match=f"(?s)Can't write.*{word}"):
            write_text(path, "text", DataError)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_protected_files_are_not_replaced(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("old")
    monkeypatch.setattr(files.os, "access", lambda where, mode: where != path)
    with pytest.raises(ModelError, match="write-protected"):
        write_text(path, "new")
    assert path.read_text() == "old"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fork and SIGKILL")
def test_a_kill_leaves_the_old_or_the_new_file_and_no_other(tmp_path):
    path = tmp_path / "a.bin"
    contents = [bytes([value]) * 200_000 for value in range(3)]
    path.write_bytes(contents[0])
    pause = random.Random(3)
    for _ in range(25):
        child = os.fork()
        if not child:
            for turn in range(1_000_000):
                with atomic_write(path) as handle:
                    for part in range(0, 200_000, 1000):
                        handle.write(contents[turn % 3][part : part + 1000])
            os._exit(0)
        time.sleep(pause.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert path.read_bytes() in contents
        assert all((tmp_path / name).stat().st_size == 200_000 for name in os.listdir(tmp_path))
    assert len(os.listdir(tmp_path)) <= 3
