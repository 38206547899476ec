"""The writer as a process: how it starts, what ends it, and what its client then says."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deltackpt_store
import msgspec
import pytest
from deltackpt_store import child, connection, launch, protocol, serve, writer
from deltackpt_store.client import KEPT_OUTCOMES, WriterClient
from deltackpt_store.errors import (
    ConflictError,
    InvalidInputError,
    StateError,
    StorageError,
    WriterError,
)
from deltackpt_store.fileio import FileIO
from deltackpt_store.protocol import Committed, WriterOptions
from deltackpt_store.store import Store
from processes import ended
from toy_trainer import CHUNK, SEED, ToyTrainer, check_run, state_at

Start = Callable[..., ToyTrainer]
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
DEPENDENCIES = {one.partition(">")[0] for one in PROJECT["dependencies"]} - {"torch", "click"}
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    clients: list[WriterClient] = []

    def begin(path: Any = None, run: str = "main", *, slots: int = 4, **options: Any) -> ToyTrainer:
        client = WriterClient(
            path or tmp_path / "store", run, seed=SEED, ring_bytes=slots * 4 * CHUNK,
            slot_bytes=4 * CHUNK, **options,
        )  # fmt: skip
        clients.append(client)
        return ToyTrainer(client)

    yield begin
    for client in clients:
        client.close(60)


def descriptors() -> list[str]:
    """What every open descriptor of this process refers to, but for those of dropped objects."""
    gc.collect()
    found: list[str] = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


# starting ------------------------------------------------------------------------------------


def test_writer_process_saves_and_ends(start: Start, tmp_path: Path) -> None:
    trainer = start()
    ready = trainer.client.ready(60)
    assert ready.pid == trainer.client.writer_pid != os.getpid()
    assert os.getsid(ready.pid) != os.getsid(0)  # signals to our process group do not reach it
    for step in range(5):
        trainer.save_now(step)
    assert "torch" not in Path(f"/proc/{ready.pid}/maps").read_text()
    trainer.client.close(60)
    with pytest.raises(ChildProcessError):  # it has ended and is no zombie
        os.waitpid(ready.pid, os.WNOHANG)
    assert check_run(str(tmp_path / "store")) == [0, 1, 2, 3, 4]


def test_modules_in_the_working_directory_shadow_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A user's own signal.py or numpy.py next to the training script must not break saving.
    for name in ("signal", "numpy", "queue", "msgspec", "enum", "deltackpt_store", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    start(tmp_path / "a").save_now(0)


@pytest.mark.parametrize("apart", [False, True], ids=["together", "one folder for each"])
def test_only_the_trainers_import_path_leads_to_the_package(tmp_path: Path, apart: bool) -> None:
    # An interpreter without site-packages: package and dependencies come from sys.path alone.
    script = tmp_path / "train.py"
    packages = Path(msgspec.__file__).parents[1]
    folders = [packages]
    if apart:  # as build systems lay them out that unpack each distribution by itself
        folders = [tmp_path / "apart" / name for name in DEPENDENCIES]
        for folder in folders:
            folder.mkdir(parents=True)
            for found in packages.glob(f"{folder.name}*"):
                (folder / found.name).symlink_to(found)
    path = [str(Path(deltackpt_store.__file__).parents[1]), *map(str, folders), str(SUPPORT)]
    script.write_text(
        f"import sys; sys.path += {path!r}\n"
        "import os; os.chdir('/')\n"
        "from toy_trainer import *\n"
        "client = WriterClient(sys.argv[1], 'main', seed=SEED, ring_bytes=1 << 20,\n"
        "                      slot_bytes=4 * CHUNK)\n"
        "ToyTrainer(client).save_now(3)\n"
        "client.close(60)\n"
    )
    python = getattr(sys, "_base_executable", sys.executable)
    # What the trainer leaves out of account would not let an interpreter start.
    environment = {**os.environ, "PYTHONHOME": "/nonexistent", "PYTHONIOENCODING": "nonsense"}
    subprocess.run(
        [python, "-I", "-S", script, tmp_path / "store"],
        check=True, timeout=120, env=environment,
    )  # fmt: skip
    assert check_run(str(tmp_path / "store")) == [3]


def test_a_working_directory_that_is_gone_is_in_nobodys_way(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("PYTHONPATH", f"relative{os.pathsep}/does/not/exist")
    start(tmp_path / "store").save_now(0)
    assert child.environment()["PYTHONPATH"] == "/does/not/exist"


def test_a_writer_waits_for_its_helpers_whatever_its_trainer_ignores(start: Start) -> None:
    """Prevents: a number killed that is another process's by now."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        client = start().client
        client.ready(60)
        status = Path(f"/proc/{client.writer_pid}/status").read_text()
        client.close(60)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert not int(status.split("SigIgn:")[1].split()[0], 16) >> (signal.SIGCHLD - 1) & 1


def test_module_entry_point_runs_the_same_writer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deltackpt_store.writer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert "--control-fd" in done.stderr


def test_directories_of_a_broken_import_path_are_skipped(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"relative{os.pathsep}/does/not/exist")
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.setenv("PYTHONINSPECT", "1")
    start().save_now(0)
    assert child.environment()["PYTHONPATH"].startswith(os.getcwd())


def test_a_relative_store_path_is_fixed_at_the_start(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case 174
    monkeypatch.chdir(tmp_path)
    trainer = start("here")
    monkeypatch.chdir("/")
    trainer.save_now(0)
    assert check_run(str(tmp_path / "here")) == [0]


@pytest.mark.parametrize(
    "name", [b"-lead ing", "ümläut 漢字 🚀".encode(), b"raw\xff\xfe", b"x" * 200]
)
def test_any_path_works(start: Start, tmp_path: Path, name: bytes) -> None:
    # case 171
    path = os.path.join(tmp_path, os.fsdecode(name))
    start(path).save_now(0)
    assert check_run(path) == [0]


@pytest.mark.parametrize("where", ["frozen", "embedded"])
def test_a_program_without_an_interpreter_is_not_started_again(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Prevents that a frozen training is started anew, with the writer's options, by each save."""
    if where == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        monkeypatch.setattr(sys, "executable", None)
    with pytest.raises(WriterError, match="no Python interpreter") as caught:
        start()
    assert caught.value.hint == 'use writer="thread"'
    with pytest.raises(OSError, match="no Python interpreter"):
        launch.start_compactions(str(tmp_path), "{}", None)
    start(mode="thread").save_now(0)
    assert check_run(str(tmp_path / "store")) == [0]


def test_niceness_is_that_of_the_option(start: Start) -> None:
    trainer = start(options=WriterOptions(nice=7))
    trainer.client.ready(60)
    pid = trainer.client.writer_pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + 7


def test_no_descriptor_leaks(start: Start, tmp_path: Path) -> None:
    def cycle(mode: str) -> int:
        start(mode=mode).client.close(60)
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # what earlier tests have dropped is no leak, and would go in between
    for mode in ("process", "thread"):
        first = cycle(mode)
        assert [cycle(mode) for _ in range(3)] == [first] * 3


def test_the_writer_inherits_only_its_two_descriptors(start: Start, tmp_path: Path) -> None:
    with open(tmp_path / "mine", "w") as file:
        os.set_inheritable(file.fileno(), True)
        trainer = start()
        trainer.client.ready(60)
        pid = trainer.client.writer_pid
        held = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    assert str(tmp_path / "mine") not in held


@pytest.mark.parametrize(
    ("mode", "missing"),
    [
        ("process", "deltackpt-send"),
        ("process", "deltackpt-receive"),
        ("thread", "deltackpt-send"),
        ("thread", "deltackpt-receive"),
        ("thread", "deltackpt-writer"),
    ],
)
def test_no_thread_for_the_writer_is_an_error_and_leaves_nothing_behind(
    start: Start, monkeypatch: pytest.MonkeyPatch, mode: str, missing: str
) -> None:
    """Prevents: a process left behind, and an exit that joins threads that never ran."""
    real, before = threading.Thread.start, descriptors()
    started: list[int] = []

    class Noted(launch.WriterProcess):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self.pid)

    def refuse(self: threading.Thread) -> None:
        if self.name == missing:
            raise RuntimeError("can't start new thread")
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(connection, "WriterProcess", Noted)
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(WriterError, match="no thread can be started") as caught:
            start(mode=mode)
        assert "ulimit -u, -v" in caught.value.hint
        del caught
    for pid in started:
        with pytest.raises(ChildProcessError):  # it has ended and is no zombie
            os.waitpid(pid, os.WNOHANG)
    assert sorted(descriptors()) == sorted(before)
    connection._exiting()
    start(mode=mode).save_now(0)


def test_a_writer_that_gets_no_thread_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a traceback as the last words of the writer."""
    real = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "deltackpt-inbox":
            raise RuntimeError("can't start new thread")
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        client = start(mode="thread").client
        with pytest.raises(WriterError, match=r"^no thread can be started .*ulimit -u") as caught:
            client.ready(20)
    assert caught.value.kind == "no-thread"


@pytest.mark.parametrize(
    "options",
    [{"mode": "fork"}, {"ring_bytes": 0}, {"slot_bytes": 5}, {"io": FileIO()}],
)
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        WriterClient(tmp_path / "s", "main", **{"seed": 1, "ring_bytes": 1 << 20, **options})
    assert not (tmp_path / "s").exists()


def test_an_interpreter_that_cannot_be_started_is_a_writer_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for executable in ("", "/does/not/exist"):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(WriterError, match="thread") as caught:
            WriterClient(tmp_path / "s", "main", seed=1, ring_bytes=1 << 20)
        assert caught.value.hint == 'use writer="thread"'


def test_a_process_too_many_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(WriterError, match="ulimit") as caught:
        WriterClient(tmp_path / "s", "main", seed=1, ring_bytes=1 << 20)
    assert str(caught.value).startswith("cannot start the writer process: ")


def test_a_writer_thread_whose_package_is_gone_is_a_writer_error(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a training that waits for a thread which ended (the package was upgraded)."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "deltackpt_store.serve", None)
        client = start(mode="thread").client
        with pytest.raises(WriterError, match=r"(?s)a thread that ended.*deltackpt_store\.serve"):
            client.ready(20)


# what the store refuses ----------------------------------------------------------------------


def test_refusals_keep_their_type_and_reach_every_caller(start: Start, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store/notes.txt").write_text("mine")
    trainer = start(slots=1)
    save = trainer.begin(0)
    with pytest.raises(InvalidInputError, match="not a store") as info:
        trainer.client.ready(60)
    assert info.value.kind == "not-empty"
    for call in (
        lambda: trainer.client.result(save, 60),
        lambda: trainer.begin(1),
        lambda: trainer.client.acquire_slot(60),
        lambda: trainer.client.wait_room(60),
    ):
        with pytest.raises(InvalidInputError, match="not a store"):
            call()
    assert not trainer.client.alive


def test_a_locked_run_names_the_process_that_holds_it(start: Start) -> None:
    first = start()
    first.client.ready(60)
    second = start(options=WriterOptions(lock_timeout=0.1))
    holder = f"process {os.getpid()} .*writer: process {first.client.writer_pid}"
    with pytest.raises(ConflictError, match=holder):
        second.client.ready(60)


# death of the writer -------------------------------------------------------------------------


def test_a_child_forked_while_the_writer_starts_does_not_hide_its_death(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: saves that wait until their time is over because a DataLoader worker, forked by
    another thread at that moment, holds the writer's end of the channel open."""
    real, children = socket.socketpair, list[int]()

    def pair(*args: Any) -> tuple[socket.socket, socket.socket]:
        ends = real(*args)
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
        return ends

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", pair)
        client = start().client
    try:
        client.ready(60)
        os.kill(client.writer_pid, signal.SIGKILL)
        assert client._connection.join(20)
        with pytest.raises(WriterError, match="SIGKILL"):
            client.acquire_slot(0)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert children


def test_a_killed_writer_fails_what_is_in_flight_at_once(start: Start, tmp_path: Path) -> None:
    heard: list[tuple[int, Any]] = []
    trainer = start(slots=1, on_result=lambda save, outcome: heard.append((save, outcome)))
    trainer.save_now(0)
    os.kill(trainer.client.writer_pid, signal.SIGSTOP)  # so that nothing is answered any more
    save = trainer.begin(1)
    slot = trainer.client.acquire_slot(60)
    trainer.client.slot(save, slot, b"")
    errors: list[BaseException] = []

    def wait_for_slot() -> None:
        try:
            trainer.client.acquire_slot()
        except WriterError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait_for_slot)
    waiting.start()
    os.kill(trainer.client.writer_pid, signal.SIGKILL)
    with pytest.raises(WriterError, match="killed by SIGKILL") as info:
        trainer.client.result(save, 60)
    waiting.join(60)
    assert len(errors) == 1
    assert "SIGKILL" in str(errors[0])
    assert info.value.context["pid"] == trainer.client.writer_pid
    assert not trainer.client.alive
    for call in (trainer.client.ready, lambda: trainer.begin(2), trainer.client.acquire_slot):
        with pytest.raises(WriterError):
            call()
    trainer.client.close(60)
    assert [save for save, _ in heard] == [1, save]
    assert isinstance(heard[1][1], WriterError)
    # case 130: the next one starts at once, without manual unlock
    again = start(options=WriterOptions(lock_timeout=0))
    again.save_now(1)
    assert check_run(str(tmp_path / "store")) == [0, 1]


def test_a_writer_that_breaks_says_why(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "PROTOCOL", 999)
    trainer = start()
    with pytest.raises(WriterError, match="exit code 1") as info:
        trainer.client.ready(60)
    assert "do not speak the same protocol" in str(info.value)


def test_without_a_place_for_error_output_it_still_works(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(**options: Any) -> Any:
        raise FileNotFoundError(2, "no usable temporary directory")

    monkeypatch.setattr(launch.tempfile, "TemporaryFile", nowhere)
    trainer = start()
    trainer.save_now(0)
    os.kill(trainer.client.writer_pid, signal.SIGKILL)
    assert ended(trainer.client.writer_pid)
    held = [trainer.client.acquire_slot(60) for _ in range(trainer.client.slots)]
    with pytest.raises(WriterError, match="SIGKILL"):  # no slot will ever come
        trainer.client.acquire_slot(60)
    assert len(held) == 4


def test_signals_meant_for_the_job_do_not_stop_the_writer(start: Start, tmp_path: Path) -> None:
    # A preempted job must get its last save committed: from its first moment on.
    trainer = start()
    for number in writer.IGNORED_SIGNALS:
        os.kill(trainer.client.writer_pid, number)
    trainer.client.ready(60)
    for number in writer.IGNORED_SIGNALS:
        os.kill(trainer.client.writer_pid, number)
    trainer.save_now(0)
    assert check_run(str(tmp_path / "store")) == [0]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())  # and ours are as they were


def test_a_trainer_that_died_before_the_writer_looked_is_noticed() -> None:
    # Its process number may belong to another process by then.
    fd = serve._death_of(os.getpid())  # not our parent
    assert fd is not None
    assert select.select([fd], [], [], 0)[0]
    os.close(fd)
    fd = serve._death_of(os.getppid())
    assert fd is not None
    assert not select.select([fd], [], [], 0)[0]
    os.close(fd)


# close, fork, exit ---------------------------------------------------------------------------


def test_close_waits_for_what_is_handed_over_and_gives_up_the_rest(
    start: Start, tmp_path: Path
) -> None:
    trainer = start(slots=60)
    finished = trainer.save(0)
    begun = trainer.begin(1)
    client = trainer.client
    client.close(60)
    client.close(60)
    assert isinstance(client.result(finished), Committed)
    with pytest.raises(StateError) as info:
        client.result(begun)
    assert info.value.kind == "aborted"
    for call in (
        lambda: client.acquire_slot(1),
        lambda: client.begin(step=2, layout=b""),
        lambda: client.view(0),
        lambda: client.ready(1),
        lambda: client.wait_room(1),
        lambda: client.slot(begun, 0, b""),
        lambda: client.finish(begun, objects={}, inline={}),
    ):
        with pytest.raises(StateError):
            call()
    client.abort(begun)
    assert client.error is None
    assert client.pending == 0
    assert check_run(str(tmp_path / "store")) == [0]


def test_close_that_takes_too_long_says_so_and_loses_nothing(start: Start, tmp_path: Path) -> None:
    trainer = start(slots=60)
    trainer.client.ready(60)
    os.kill(trainer.client.writer_pid, signal.SIGSTOP)
    save = trainer.save(0)
    with pytest.raises(WriterError) as info:
        trainer.client.close(0.01)
    assert info.value.kind == "timeout"
    os.kill(trainer.client.writer_pid, signal.SIGCONT)
    trainer.client.close(60)
    trainer.client.result(save)
    assert check_run(str(tmp_path / "store")) == [0]


def test_waiting_has_a_bound(start: Start) -> None:
    trainer = start(slots=1)
    trainer.client.ready(60)
    os.kill(trainer.client.writer_pid, signal.SIGSTOP)
    save = trainer.begin(0)
    slot = trainer.client.acquire_slot(0)
    for call in (
        lambda: trainer.client.acquire_slot(0),
        lambda: trainer.client.acquire_slot(0.01),
        lambda: trainer.client.result(save, 0.01),
    ):
        with pytest.raises(StorageError) as info:
            call()
        assert info.value.kind == "timeout"
    trainer.client.release_slot(slot)
    assert trainer.client.acquire_slot(0) == slot
    trainer.client.release_slot(slot)
    os.kill(trainer.client.writer_pid, signal.SIGCONT)


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_forked_child_cannot_disturb_the_parents_writer(
    start: Start, tmp_path: Path, mode: str
) -> None:
    # case 64
    trainer = start(mode=mode)
    trainer.save_now(0)
    client = trainer.client
    slot = client.acquire_slot()
    calls: list[Callable[[], Any]] = [
        client.ready, client.acquire_slot, lambda: client.view(slot), lambda: trainer.begin(1),
        lambda: client.release_slot(slot), lambda: client.abort(1), lambda: client.result(1),
        client.wait_room,
    ]  # fmt: skip
    child = os.fork()
    if not child:
        refused = 0
        for call in calls:
            try:
                call()
            except StateError:
                refused += 1
        client.close()
        connection._exiting()
        os._exit(refused if not client.alive else 100)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
    client.release_slot(slot)
    trainer.save_now(1)
    client.close(60)
    assert check_run(str(tmp_path / "store")) == [0, 1]


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_forked_child_holds_neither_channel_nor_lock(start: Start, mode: str) -> None:
    # A data-loader worker that outlives its trainer must not keep the run locked.
    others = set(descriptors())
    trainer = start(mode=mode)
    trainer.save_now(0)
    before = set(descriptors()) - others
    assert any("deltackpt-ring" in name for name in before)
    assert any(name.startswith("socket:") for name in before)
    told, tell = os.pipe()
    wait, let = os.pipe()
    child = os.fork()
    if not child:
        os.close(let)
        held = descriptors()
        os.write(tell, json.dumps(held).encode())
        os.read(wait, 1)
        os._exit(0)
    held = json.loads(os.read(told, 100_000))
    assert not [name for name in held if name.endswith("/.lock")]
    assert not [name for name in held if name.startswith("socket:") and name in before]
    trainer.client.close(60)
    start(mode=mode, options=WriterOptions(lock_timeout=0)).client.ready(60)
    for fd in (told, tell, wait, let):
        os.close(fd)
    os.waitpid(child, 0)


SCRIPT = """
import sys; sys.path.insert(0, {support!r})
from toy_trainer import *
client = WriterClient({store!r}, 'main', seed=SEED, ring_bytes=1 << 20, slot_bytes=4 * CHUNK,
                      mode={mode!r})
trainer = ToyTrainer(client)
trainer.save_now(0)
print(client.writer_pid, flush=True)
trainer.save(1)
"""


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_script_that_just_ends_keeps_its_last_save_and_does_not_hang(
    tmp_path: Path, mode: str
) -> None:
    # case 61
    store = str(tmp_path / "store")
    script = SCRIPT.format(support=str(SUPPORT), store=store, mode=mode)
    command = [sys.executable, "-X", "dev", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert mode == "thread" or ended(int(done.stdout))
    assert check_run(store) == [0, 1]


def test_ctrl_c_of_the_job_lets_the_writer_finish(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    script = SCRIPT.format(support=str(SUPPORT), store=store, mode="process")
    script += "import signal; print('waiting', flush=True); signal.pause()\n"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as job:  # fmt: skip
        assert job.stdout is not None
        pid = int(job.stdout.readline())
        job.stdout.readline()
        os.killpg(job.pid, signal.SIGINT)
        job.communicate(timeout=60)
    assert job.returncode != 0
    assert ended(pid)
    assert check_run(store) == [0, 1]


# smaller things ------------------------------------------------------------------------------


def test_a_callback_that_raises_is_logged_and_harmless(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(save: int, outcome: Any) -> None:
        raise ValueError("observer bug")

    trainer = start(on_result=broken)
    trainer.save_now(0)
    trainer.save_now(1)
    assert "observer bug" in caplog.text


def test_warnings_of_the_writer_appear_in_the_trainers_log(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = start(slots=60)
    first.save_now(0)
    first.client.close(60)
    (pack,) = (tmp_path / "store/packs").rglob("*.pack")
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.unlink()
    pack.write_bytes(data)
    for cache in (tmp_path / "store/cache").rglob("*"):
        if cache.is_file():
            cache.unlink()
    with caplog.at_level(logging.WARNING, "deltackpt"):
        second = start()
        second.client.ready(60)
        second.save_now(1)
    assert pack.stem in caplog.text
    assert check_run_of(tmp_path, 1)


def check_run_of(tmp_path: Path, step: int) -> bool:
    from toy_trainer import read_arrays

    store = Store.open(tmp_path / "store")
    return read_arrays(store, store.find("main", step)) == state_at(step)


def test_outcomes_are_kept_for_a_while_only(start: Start) -> None:
    trainer = start(mode="thread")
    with pytest.raises(StateError, match="not known"):
        trainer.client.result(1)
    saves = [trainer.save_now(step).save for step in range(KEPT_OUTCOMES + 2)]
    assert len(set(saves)) == len(saves)
    with pytest.raises(StateError, match="not known"):
        trainer.client.result(saves[0])
    trainer.client.result(saves[2])


def test_misuse_is_refused(start: Start) -> None:
    trainer = start(mode="thread")
    client = trainer.client
    with pytest.raises(StateError):
        client.slot(1, 0, b"")
    with pytest.raises(StateError):
        client.finish(1, objects={}, inline={})
    client.abort(1)
    with pytest.raises(InvalidInputError, match="both"):
        client.begin(step=0, layout=b"", relative=1, relative_commit=("main", 1))
    save = trainer.begin(0)
    with pytest.raises(StateError):
        client.slot(save, 0, b"")  # not leased
    client.abort(save)


def test_a_save_relative_to_an_unfinished_or_unknown_one_is_refused(start: Start) -> None:
    trainer = start(mode="thread")
    first = trainer.begin(0)
    for relative in (first, 77):
        second = trainer.begin(1, relative=relative)
        with pytest.raises(StateError, match="relative"):
            trainer.client.result(second, 60)
    trainer.client.abort(first)
