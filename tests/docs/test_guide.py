"""Pages for users are programs: each block of the guide and of the README does what it says."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import signal
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from deltackpt_tools.cli import cli
from deltackpt_tools.exits import Exit

import deltackpt

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide.md"
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TOLD = re.compile(r"^(?P<indent> *)(?P<what>[^#\n]+?)  # -> (?P<value>.+)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page: language and content."""
    return _FENCE.findall(text)


def sections(page: Path) -> dict[str, list[tuple[str, str]]]:
    """The blocks under each second-level heading; "" is what comes before the first."""
    head, *rest = re.split(r"^## (.+)\n", page.read_text(), flags=re.MULTILINE)
    found = {"": blocks(head)}
    found |= {title: blocks(text) for title, text in zip(rest[::2], rest[1::2], strict=True)}
    return found


def run(code: str, names: dict[str, Any], where: str) -> None:
    """Execute a block; ``expression  # -> value`` is checked."""
    checked = _TOLD.sub(r"\g<indent>assert (\g<what>) == (\g<value>), repr(\g<what>)", code)
    exec(compile(checked, where, "exec"), names)


def run_commands(text: str) -> None:
    """Execute the commands of a block; each succeeds."""
    for line in text.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "deltackpt", line
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, (line, result.output)


PARTS = {title: found for title, found in sections(GUIDE).items() if title and found}


@pytest.mark.parametrize("title", PARTS)
def test_each_part_of_the_guide_runs_after_its_preparation(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    names: dict[str, Any] = {"__name__": "guide"}
    for language, text in [*sections(GUIDE)[""], *PARTS[title]]:
        assert language in ("python", "sh"), "every block of the guide is executed"
        if language == "python":
            run(text, names, f"guide.md: {title}")
        else:
            run_commands(text)
    assert signal.getsignal(signal.SIGTERM) is handler


def prepared(title: str) -> dict[str, Any]:
    """The names that a part of the guide defines."""
    names: dict[str, Any] = {"__name__": "guide"}
    for _, text in [*sections(GUIDE)[""], *PARTS[title]]:
        run(text, names, f"guide.md: {title}")
    return names


def test_the_callback_for_the_trainer_of_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for transformers' Trainer: how it calls a callback, with which names."""
    monkeypatch.chdir(tmp_path)

    def train(stop: int, end: int = 9) -> dict[str, Any]:
        names = prepared("Trainers that own the loop")
        at = SimpleNamespace(global_step=0, max_steps=end)
        callback = names["Save"]("runs/store", every=2)
        objects = {"model": names["model"], "lr_scheduler": names["scheduler"],
                   "optimizer": SimpleNamespace(optimizer=names["optimizer"])}  # fmt: skip
        callback.on_train_begin(None, at, None, **objects)
        torch.rand(3)  # as for the seed of the workers of a new iterator
        while True:  # it trains a step before it looks whether it is to stop
            callback.on_step_begin(None, at, None, **objects)
            losses.append(names["train_step"]())
            at.global_step += 1
            callback.on_step_end(None, at, None, **objects)
            if at.global_step >= min(stop, end):
                break
        callback.on_train_end(None, at, None, **objects)
        return names["model"].state_dict()

    losses: list[float] = []
    train(5)
    weights = train(1000)
    again = train(1000)  # complete already
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    assert deltackpt.steps("runs/store") == [2, 4, 5, 6, 8, 9]
    names = prepared("Trainers that own the loop")
    torch.rand(3)
    assert losses[:9] == [names["train_step"]() for _ in range(9)]


class Loops:
    """A stand-in for Lightning's fit loop: it counts optimizer steps."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Patience:
    """A stand-in for another callback, such as early stopping."""

    waited = 0

    def state_dict(self) -> dict[str, int]:
        return {"waited": self.waited}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.waited = state["waited"]


class LightningTrainer:
    """A stand-in for Lightning's Trainer."""

    def __init__(self, optimizer: Any, scheduler: Any) -> None:
        self.optimizers = [optimizer]
        self.lr_scheduler_configs = [SimpleNamespace(scheduler=scheduler)]
        self.fit_loop = Loops()
        self.callbacks = [Patience()]

    @property
    def global_step(self) -> int:
        return self.fit_loop.steps


def test_the_callback_for_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches for each optimizer step."""
    monkeypatch.chdir(tmp_path)

    def train(stop: int) -> None:
        names = prepared("Trainers that own the loop")
        trainer = LightningTrainer(names["optimizer"], names["scheduler"])
        callback = names["SaveBatches"]("runs/store", every=1)
        callback.on_fit_start(trainer, names["model"])
        torch.rand(3)
        index = 0
        while trainer.global_step < stop:
            callback.on_train_batch_start(trainer, names["model"], None, index)
            if index % 2:
                losses.append(names["train_step"]())
                trainer.fit_loop.steps += 1
                trainer.callbacks[0].waited += 1
            callback.on_train_batch_end(trainer, names["model"], None, None, index)
            index += 1
        callback.on_train_end(trainer, names["model"])
        epochs.append(names["scheduler"].last_epoch)
        waited.append(trainer.callbacks[0].waited)

    losses: list[float] = []
    epochs: list[int] = []
    waited: list[int] = []
    train(3)
    train(5)
    assert epochs == waited == [3, 5]
    assert deltackpt.steps("runs/store") == [1, 2, 3, 4, 5]
    names = prepared("Trainers that own the loop")
    torch.rand(3)
    assert losses == [names["train_step"]() for _ in range(5)]


def raised_kinds() -> set[tuple[str, str]]:
    """Each class of error with a kind that the sources give it, also by a constant or by wire."""
    found: set[tuple[str, str]] = set()
    for source in [*(ROOT / "deltackpt").rglob("*.py"), *(ROOT / "store").rglob("*.py")]:
        tree = ast.parse(source.read_text())
        constants = {target.id: node.value for node in tree.body if isinstance(node, ast.Assign)
                     for target in node.targets if isinstance(target, ast.Name)}  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                kinds = [keyword.value for keyword in node.keywords if keyword.arg == "kind"]
            elif isinstance(node, ast.Dict):
                keys = [getattr(key, "value", None) for key in node.keys]
                entries = dict(zip(keys, node.values, strict=True))
                name = getattr(entries.get("type"), "value", "")
                kinds = [entries["kind"]] if "kind" in entries else []
            else:
                continue
            kinds = [constants.get(getattr(kind, "id", ""), kind) for kind in kinds]
            words = [word for kind in kinds for word in ast.walk(kind)]
            found |= {(name, str(word.value)) for word in words if isinstance(word, ast.Constant)}
    return found


def kind_of_error(name: str) -> type[deltackpt.errors.DeltackptError]:
    return getattr(deltackpt.errors, name)


def test_the_table_of_errors() -> None:
    raised, named = raised_kinds(), ""
    table = GUIDE.read_text().partition("| error | kinds")[2].splitlines()[2:]
    told: list[str] = []
    for first, kinds in [line.split("|")[1:3] for line in table if line.startswith("|")]:
        match = re.search(r"`(\w+Error)`", first)
        if match:
            named = match[1]
            told.append(named)
            builtin = re.search(r"\(.*?`(\w+)`", first)
            assert builtin is not None
            assert builtin[1] in {base.__name__ for base in kind_of_error(named).__mro__}
        for kind in re.sub(r" \(.*\)", "", kinds).strip().split(", "):
            known = {one for name, one in raised if name == named}
            known.add(kind_of_error(named).default_kind)
            assert any(one.startswith(kind.removesuffix("...")) for one in known), (named, kind)
    assert sorted([*told, "DeltackptError"]) == sorted(deltackpt.errors.__all__)


def test_the_guide_tells_of_every_option() -> None:
    text = GUIDE.read_text()
    for call in (deltackpt.Checkpointer, deltackpt.Checkpointer.restore):
        for option in list(inspect.signature(call).parameters)[1:]:
            assert re.search(rf"\b{option}\b", text), option
    for name in deltackpt.__all__:
        assert name == "__version__" or re.search(rf"\b{name}\b", text), name


def test_the_blocks_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "readme"}
    for _, text in sections(GUIDE)[""]:
        run(text, names, "guide.md")
    run(_with_a_loader(), names, "test_guide.py")
    programs = [text for language, text in blocks(README.read_text()) if language == "python"]
    assert len(programs) == 2
    for text in programs:
        run(text.replace("        ...\n", "        loss = backward()\n"), names, "README.md")
    assert f'deltackpt.steps("runs/store")  # {deltackpt.steps("runs/store")}\n' in programs[1]


def _with_a_loader() -> str:
    loaders = sections(GUIDE)["Data loaders"]
    return f"{loaders[0][1]}\nfrom torch.utils.data import TensorDataset\n" + (
        "loader = Batches(TensorDataset(torch.randn(64, 8)), 32)\nsteps = 200\n"
    )


def test_the_commands_of_the_readme_exist() -> None:
    """They are parsed, not run: they name stores and backups that nobody has."""
    lines = [line for _, text in blocks(README.read_text()) for line in text.splitlines()
             if line.startswith("deltackpt ")]  # fmt: skip
    assert len(lines) > 8
    with click.Context(cli) as context:
        for line in lines:
            name, *arguments = shlex.split(line, comments=True)[1:]
            command = cli.get_command(context, name)
            assert command is not None, line
            for option in [word for word in arguments if word.startswith("-")]:
                known = [spelt for p in command.params for spelt in (*p.opts, *p.secondary_opts)]
                assert option in known, line


def test_the_pages_tell_of_every_command_option_and_exit_code() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    told = page + (ROOT / "docs" / "inspect.md").read_text()
    with click.Context(cli) as context:
        for name in cli.list_commands(context):
            command = cli.get_command(context, name)
            assert command is not None
            assert f"\ndeltackpt {name} " in page
            assert f"\n### {name}\n" in page  # its document
            for option in (p.opts[-1] for p in command.params if isinstance(p, click.Option)):
                assert re.search(rf"{option}(?![\w-])", told), (name, option)
    listed = {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", page)}
    row = re.search(r"^\| 130 \|.*$", page, flags=re.MULTILINE)
    assert row is not None
    assert listed | {int(code) for code in re.findall(r"(\d+):", row[0])} == set(Exit)


def test_the_gpu_check_names_what_must_be_carried_along() -> None:
    text = (ROOT / "tools" / "gpu_check.py").read_text()
    named = re.search(r"carried along where there is no network: ([\w ]+)\.", text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {one.partition(">")[0] for one in project["dependencies"]}
    assert named is not None
    assert {*named[1].split(), "torch"} == needed


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as the usual renderers make them."""
    text = _FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_no_relative_link_is_dead(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_make_help_tells_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.+)$", makefile, flags=re.MULTILINE)
    assert phony is not None
    told = re.findall(r'^\t@echo "make (\w+) ', makefile, flags=re.MULTILINE)
    assert sorted(told) == sorted(phony[1].split())
