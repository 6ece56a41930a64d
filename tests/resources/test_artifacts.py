"""The local artifact store: create-only, whole or absent, also when writers race, die or run out of disk."""

import hashlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from dpone_dagster.errors import DponeError
from resources.artifacts import LocalArtifactStore

KEY = "semantic-refresh/operation-aaaa/attempt-bbbb/part-0001.parquet"
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "artifacts"


@pytest.fixture
def store(root: Path) -> LocalArtifactStore:
    return LocalArtifactStore(root, free_bytes=0)


def put(store: LocalArtifactStore, key: str, data: bytes) -> str:
    with store.workspace() as folder:
        (folder / "x").write_bytes(data)
        return store.put_new(key, folder / "x")


def everything_under(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


def test_an_object_is_its_bytes_under_their_digest_and_read_only(store: LocalArtifactStore, root: Path) -> None:
    version = put(store, KEY, b"rows")
    assert version == "sha256:" + hashlib.sha256(b"rows").hexdigest()
    with store.open(KEY) as file:
        assert file.read() == b"rows"
    assert (root / KEY).stat().st_mode & 0o777 == 0o400
    assert (root / KEY).parent.stat().st_mode & 0o777 == 0o700
    assert (root / KEY).stat().st_nlink == 1
    assert everything_under(root) == {KEY}


def test_the_same_bytes_again_are_a_replay_and_others_a_conflict(store: LocalArtifactStore, root: Path) -> None:
    first = put(store, KEY, b"rows")
    inode = (root / KEY).stat().st_ino
    assert put(store, KEY, b"rows") == first
    with pytest.raises(DponeError) as refused:
        put(store, KEY, b"rowz")
    assert refused.value.code == "DPONE_ARTIFACT_CONFLICT"
    assert (root / KEY).read_bytes() == b"rows"
    assert (root / KEY).stat().st_ino == inode
    assert everything_under(root) == {KEY}


@pytest.mark.parametrize("key", ["a/b", "a"])
def test_a_key_that_is_a_folder_or_lies_in_an_object_is_a_conflict(store: LocalArtifactStore, key: str) -> None:
    put(store, {"a/b": "a", "a": "a/b"}[key], b"1")
    with pytest.raises(DponeError) as refused:
        put(store, key, b"1")
    assert refused.value.code == "DPONE_ARTIFACT_CONFLICT"


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/etc/x",
        "../x",
        "a/../x",
        "a//b",
        "a/",
        ".work/x",
        "a/.b",
        "A",
        "a b",
        "a\n",
        "ä",
        "a\\b",
        "a" * 101,
    ],
)
def test_keys_outside_the_alphabet_are_refused(store: LocalArtifactStore, root: Path, key: str) -> None:
    for use in (lambda: put(store, key, b"1"), lambda: store.open(key), lambda: store.list(key)):
        with pytest.raises(DponeError) as refused:
            use()
        assert refused.value.code == "DPONE_CONTRACT_INVALID"
    assert everything_under(root) == set()
    assert sorted(p.name for p in root.parent.iterdir()) == ["artifacts"]


def test_a_missing_object_is_told_from_a_missing_store(store: LocalArtifactStore, root: Path) -> None:
    with pytest.raises(DponeError) as missing:
        store.open(KEY)
    assert missing.value.code == "DPONE_ARTIFACT_MISSING"
    (root / ".work").rmdir()
    root.rmdir()
    with pytest.raises(DponeError) as gone:
        store.open(KEY)
    assert gone.value.code == "DPONE_ENGINE_UNAVAILABLE"


def test_list_gives_the_keys_of_one_folder(store: LocalArtifactStore) -> None:
    for key in ("p/b", "p/a", "p/c/d", "pq/a"):
        put(store, key, b"1")
    assert store.list("p") == ["p/a", "p/b", "p/c/d"]
    assert store.list("p/a") == []
    assert store.list("nothing") == []


def test_a_source_from_elsewhere_is_refused(store: LocalArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    with pytest.raises(ValueError, match="workspace"):
        store.put_new(KEY, tmp_path / "x")


def race(root: Path, key: str, data: bytes, start: float, answers: "multiprocessing.Queue[str]") -> None:
    store = LocalArtifactStore(root, free_bytes=0)
    with store.workspace() as folder:
        (folder / "x").write_bytes(data)
        time.sleep(max(0.0, start - time.time()))
        try:
            answers.put(store.put_new(key, folder / "x"))
        except DponeError as error:
            answers.put(error.code)


@pytest.mark.parametrize("same", [True, False])
def test_two_processes_race_for_a_key_and_one_object_comes_of_it(root: Path, same: bool) -> None:
    contents = [b"1" * 500_000, (b"1" if same else b"2") * 500_000]
    answers: multiprocessing.Queue[str] = SPAWN.Queue()
    start = time.time() + 2.0
    racers = [SPAWN.Process(target=race, args=(root, KEY, data, start, answers)) for data in contents]
    for racer in racers:
        racer.start()
    got = sorted(answers.get(timeout=60) for _ in racers)
    for racer in racers:
        racer.join(60)
    winner = "sha256:" + hashlib.sha256((root / KEY).read_bytes()).hexdigest()
    assert got == sorted([winner, winner if same else "DPONE_ARTIFACT_CONFLICT"])
    assert everything_under(root) == {KEY}


def child(code: str, root: Path, **more: object) -> "subprocess.Popen[str]":
    program = "import os, sys\nfrom pathlib import Path\nfrom resources.artifacts import LocalArtifactStore\n"
    program += f"store = LocalArtifactStore(Path({str(root)!r}), free_bytes=0)\n" + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        **more,  # type: ignore[call-overload]
    )


HALF_WRITTEN = """
    with store.workspace() as folder:
        file = open(folder / "x", "wb")
        file.write(b"half")
        file.flush()
        print("ready", flush=True)
        sys.stdin.readline()
        store.put_new("late", folder / "x")
        print("put", flush=True)
"""


def test_a_killed_writer_leaves_nothing_visible_and_the_next_writer_sweeps(root: Path) -> None:
    writer = child(HALF_WRITTEN, root)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait(30)
    assert any(name.startswith(".work/") for name in everything_under(root))
    store = LocalArtifactStore(root, free_bytes=0)
    with pytest.raises(DponeError) as missing:
        store.open("late")
    assert missing.value.code == "DPONE_ARTIFACT_MISSING"
    put(store, KEY, b"rows")
    assert everything_under(root) == {KEY}


def test_a_stopped_writer_is_alive_and_keeps_its_files(root: Path) -> None:
    writer = child(HALF_WRITTEN, root)
    assert writer.stdin is not None
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    os.kill(writer.pid, signal.SIGSTOP)
    put(LocalArtifactStore(root, free_bytes=0), KEY, b"rows")
    os.kill(writer.pid, signal.SIGCONT)
    writer.stdin.write("\n")
    writer.stdin.flush()
    assert writer.stdout.readline() == "put\n"
    assert writer.wait(30) == 0
    assert everything_under(root) == {KEY, "late"}


def test_a_disk_below_the_margin_refuses_before_anything_is_written(root: Path) -> None:
    with pytest.raises(DponeError) as refused:
        put(LocalArtifactStore(root, free_bytes=2**62), KEY, b"1")
    assert refused.value.code == "DPONE_ARTIFACT_NO_SPACE"
    assert everything_under(root) == set()


def test_no_room_while_writing_is_a_code_and_leaves_nothing(root: Path) -> None:
    def small_files_only() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    writer = child(
        """
        from dpone_dagster.errors import DponeError
        try:
            with store.workspace() as folder:
                (folder / "x").write_bytes(b"1" * 200_000)
        except DponeError as error:
            print(error.code, error.__cause__, error.__suppress_context__)
        """,
        root,
        preexec_fn=small_files_only,
    )
    out, _ = writer.communicate(timeout=60)
    assert out == "DPONE_ARTIFACT_NO_SPACE None True\n"
    assert everything_under(root) == set()


def test_another_error_in_a_workspace_is_not_called_lack_of_room(store: LocalArtifactStore, root: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "x").write_bytes(b"1")
        raise PermissionError(13, "no")

    with pytest.raises(PermissionError), store.workspace() as folder:
        fail(folder)
    assert everything_under(root) == set()
