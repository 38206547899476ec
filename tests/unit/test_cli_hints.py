"""What a new user meets: filters that match nothing, damaged packs, mistyped names.

Prevents: a mistyped pattern that looks like proof, a damaged pack that looks like rubbish.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from deltackpt_store import Store
from deltackpt_store.gc import collect
from deltackpt_store.retention import Keep, apply
from deltackpt_tools import watching
from deltackpt_tools.overview import du, show
from deltackpt_tools.watching import await_store
from small_store import SmallStore, pattern


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """main@10 -> main@20: the second pack holds one chunk."""
    small = SmallStore(tmp_path / "store")
    weight = pattern(5000, 1)
    first = small.save("main", 10, {"model/layer.weight": weight}, {"optimizer/lr": 0.1})
    changed = weight.copy()
    changed[4000] = 3
    small.save(
        "main", 20, {"model/layer.weight": changed}, {"optimizer/lr": 0.1}, parent=first, base=first
    )
    small.close()
    return tmp_path / "store"


# filters ----------------------------------------------------------------------------------------


def test_every_path_is_a_filter_of_itself(tmp_path: Path) -> None:
    """Prevents: a path that a command has printed, and that means another tensor or none."""
    # case 172
    small = SmallStore(tmp_path / "store")
    paths = ["m/layers[0].w", "m/[!x]", "m/a*", "m/q?"]
    tensors = {path: pattern(300, i) for i, path in enumerate(paths)}
    first = small.save("main", 1, tensors)
    changed = {path: tensor + 1 for path, tensor in tensors.items()}
    small.save("main", 2, changed, parent=first)
    small.close()
    for path in paths:
        shown = run("show", tmp_path / "store", "@2", "--json", "--only", path)
        assert [t["path"] for t in json.loads(shown.stdout)["tensors"]] == [path]
        found = run("diff", tmp_path / "store", "@1", "@2", "--json", "--only", path)
        assert [t["path"] for t in json.loads(found.stdout)["tensors"]] == [path]
        out = tmp_path / "out.safetensors"
        done = run("export", tmp_path / "store", "@2", out, "--force", "--only", path)
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize("more", [[], ["--json"]])
@pytest.mark.parametrize(
    "command",
    [["diff", "S", "@10", "@20"], ["diff", "S", "@10", "@20", "--only", "model/*"],
     ["show", "S", "@20"], ["export", "S", "@20", "OUT.safetensors"],
     ["export", "S", "@20", "OUT.safetensors", "--prefix", "model/"]],
)  # fmt: skip
def test_a_filter_that_matches_nothing_is_an_error(
    path: Path, tmp_path: Path, command: list[str], more: list[str]
) -> None:
    words = [word.replace("OUT", str(tmp_path / "out")) for word in command]
    words[1] = str(path)
    result = run(*words, "--only", "zz*", *more)
    assert result.exit_code == 2, result.output
    assert "matches 'zz*'" in result.stderr
    assert "model" in result.stderr
    if more:
        assert json.loads(result.stdout)["error"]["kind"] == "nothing-selected"
    else:
        assert result.stdout == ""


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("model", "write 'model/*'"), ("*layer.weigth", "near it are model/layer.weight"),
     ("*LAYER*", "near it are model/layer.weight"), ("xyz", "top-level keys are model, optimizer"),
     ("here.txt", "quote the pattern")],
)  # fmt: skip
def test_what_is_near_is_named(
    path: Path, tmp_path: Path, pattern: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.txt").touch()
    assert hint in run("show", path, "--only", pattern).stderr
    assert hint in run("export", path, "@20", "x.pt", "--only", pattern).stderr


def test_one_tensor_that_is_not_there(path: Path) -> None:
    for words in (["show", path, "--tensor", "model/layer.weigth"],
                  ["blame", path, "model/layer.weigth"]):  # fmt: skip
        result = run(*words)
        assert result.exit_code == 2
        assert "near it are model/layer.weight" in result.stderr


def test_a_plain_value_in_place_of_a_tensor(path: Path) -> None:
    for words in (["show", path, "--tensor", "optimizer/lr"], ["blame", path, "optimizer/lr"]):
        result = run(*words)
        assert result.exit_code == 2
        assert "it is a plain value: 'show --only optimizer/lr' prints it" in result.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--tensor", "model/layer.weight", "--only", "model/*"], "--tensor and --only cannot"),
     (["--chunk", "abcd", "--only", "model/*"], "--chunk and --only cannot"),
     (["--chunk", "abcd", "--tensor", "model/layer.weight"], "--tensor and --chunk cannot"),
     (["@20", "--chunk", "abcd"], "--chunk looks at all steps: leave '@20' out")],
)  # fmt: skip
def test_what_show_would_not_look_at_is_refused(path: Path, words: list[str], told: str) -> None:
    result = run("show", path, *words)
    assert result.exit_code == 2
    assert told in result.stderr


def test_a_prefix_that_nothing_has(path: Path) -> None:
    result = run("export", path, "@20", "x.pt", "--prefix", "optimiser/")
    assert "nothing in this step lies below 'optimiser/'\n" in result.stderr


# a pack whose footer was cut off -----------------------------------------------------------------


def cut(path: Path, number: int) -> Path:
    """Cut off the end of a pack's table; its records stay whole."""
    pack = sorted(path.glob("packs/*/*.pack"), key=lambda one: one.name)[number]
    os.truncate(pack, pack.stat().st_size - 100)
    return pack


def findings(path: Path | str, *more: str) -> list[dict[str, Any]]:
    return json.loads(run("verify", path, *more, "--json").stdout)["findings"]


def test_verify_names_the_steps_that_need_a_damaged_pack(path: Path) -> None:
    """Prevents: deleting a pack of which verify says that no step depends on it."""
    pack = cut(path, 0)
    result = run("verify", path)
    assert result.exit_code == 12
    assert "no step depends on it" not in result.output
    assert "    main@10: model/layer.weight\n    main@20: model/layer.weight\n" in result.output
    assert "steps that cannot be restored whole: none" in result.output
    assert "deltackpt repair" in result.output
    (finding,) = findings(path)
    assert finding["hits"] == []
    assert [hit["step"] for hit in finding["needed_by"]] == [10, 20]
    pack.unlink()  # what verify says is true: this loses them
    (finding,) = findings(path)
    assert [hit["step"] for hit in finding["hits"]] == [10, 20]


def test_only_the_steps_that_need_it_are_named(path: Path) -> None:
    cut(path, 1)
    (finding,) = json.loads(run("verify", path, "--level", "structure", "--json").stdout)[
        "findings"
    ]
    assert [hit["step"] for hit in finding["needed_by"]] == [20]
    assert run("repair", path).exit_code == 0
    result = run("verify", path)
    assert result.exit_code == 0, result.output
    assert "needed" not in result.output


def test_show_and_du_read_a_damaged_pack_as_a_restore_does(path: Path) -> None:
    whole, usage = show(path, "@20"), du(path)
    ids = [chunk["id"] for chunk in tensor(path)["chunks"]]
    cut(path, 0)
    result = run("show", path, "@20")
    assert result.exit_code == 3
    assert "missing" not in result.output
    damaged = show(path, "@20")
    assert damaged.stored == whole.stored
    assert len(damaged.damaged_packs) == 1
    assert all(chunk["place"] is not None for chunk in tensor(path)["chunks"])
    for chunk in ids:
        assert run("show", path, "--chunk", chunk).exit_code == 0
    assert du(path).steps == usage.steps
    assert run("export", path, "@20", path.parent / "x.safetensors").exit_code == 0


def tensor(path: Path) -> dict[str, Any]:
    return json.loads(run("show", path, "--tensor", "model/layer.weight", "--json").stdout)


@pytest.mark.parametrize("command", ["gc", "compact"])
def test_refusals_over_damage_say_what_to_do(path: Path, command: str) -> None:
    sorted(path.glob("packs/*/*.pack"))[0].unlink()
    result = run(command, path)
    assert result.exit_code == 12, result.output
    assert "`deltackpt verify`" in result.stderr
    assert "`deltackpt repair" in result.stderr


def test_a_lost_format_is_made_anew(path: Path) -> None:
    (path / "FORMAT").unlink()
    result = run("log", path)
    assert result.exit_code == 10
    assert "deltackpt repair" in result.stderr
    assert "copy" not in result.stderr
    assert run("repair", path).exit_code == 0
    assert run("log", path).exit_code == 0


# what collection leaves --------------------------------------------------------------------------


def test_what_collection_left_worries_nobody(tmp_path: Path) -> None:
    small = SmallStore(tmp_path / "store")
    weight, bias = pattern(50_000, 1), pattern(1000, 2)
    small.save("other", 1, {"a": weight})
    first = small.save("main", 1, {"a": weight, "b": bias})
    small.save("main", 2, {"a": weight, "b": bias + 1}, parent=first, base=first)
    small.close()
    store = Store.open(small.path)
    apply(store, "main", Keep(last=1))
    collect(store, timeout=0)
    assert json.loads(run("verify", small.path, "--json").stdout)["notes"]
    lines = run("verify", small.path).output.splitlines()
    assert [line.split()[0] for line in lines] == ["checked", "no"]
    assert "fine: pack " in run("verify", small.path, "--verbose").output


# mistyped ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "hint"),
    [(["lgo", "S"], "Did you mean log?"), (["frobnicate"], "--help lists them all"),
     (["show", "S", "@10", "--only", "a.txt", "b.txt"], "Quote patterns"),
     (["show", "S", "main", "12"], "A step is named @12 or RUN@12."),
     (["show", "S", "20"], "did you mean step 20, @20?"),
     (["diff", "S", "main", "10"], "did you mean main@10?")],
)  # fmt: skip
def test_mistyped_words_are_answered(path: Path, words: list[str], hint: str) -> None:
    result = run(*(str(path) if word == "S" else word for word in words))
    assert result.exit_code == 2, result.output
    assert hint in result.stderr


@pytest.mark.parametrize("name", ["x.txt", "x", "x.safetensors.gz"])
def test_an_unknown_ending_is_no_format(path: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    result = run("export", path, "@20", target)
    assert result.exit_code == 2
    assert "--format safetensors or --format torch" in result.stderr
    assert not target.exists()
    assert run("export", path, "@20", target, "--format", "safetensors").exit_code == 0


def test_a_file_of_tensors_without_one_is_not_written(path: Path, tmp_path: Path) -> None:
    """Prevents: a mistyped prefix that exports nothing and says that all is well."""
    result = run("export", path, "@20", tmp_path / "x.safetensors", "--prefix", "optimizer")
    assert result.exit_code == 2
    assert "nothing that was chosen is a tensor" in result.stderr
    assert not (tmp_path / "x.safetensors").exists()
    assert run("export", path, "@20", tmp_path / "x.pt", "--prefix", "optimizer").exit_code == 0


def test_probe_tries_no_other_place(tmp_path: Path) -> None:
    result = run("probe", tmp_path / "none" / "store")
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
    result = run("probe", tmp_path / "store")
    assert result.exit_code in (0, 3)
    head = f"tried in {tmp_path}: {tmp_path / 'store'} does not exist yet, and would be made there"
    assert result.output.splitlines()[0] == head
    (tmp_path / "file").touch()
    assert "is no directory" in run("probe", tmp_path / "file").stderr
    for name in ("", "s3://bucket/store"):
        result = run("probe", name)
        assert result.exit_code == 2
        assert f"{name!r} cannot be the path of a store" in result.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_every_document_names_the_store_from_the_root(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    for words in (
        ["log"], ["show"], ["show", "--tensor", "model/layer.weight"], ["diff"], ["blame", "*"],
        ["verify"], ["repair"], ["repair", "--dry-run"], ["probe"], ["du"],
        ["watch", "--once"], ["report"], ["export", "@20", "x.pt"],
        ["pin", "paper", "@20"], ["unpin", "paper"], ["retain", "--last", "1", "--dry-run"],
        ["delete", "main", "--dry-run"], ["compact", "--dry-run"], ["compact"], ["gc"],
    ):  # fmt: skip
        result = run(words[0], "store", *words[1:], "--json")
        document = json.loads(result.stdout)
        assert document["format"].startswith(f"deltackpt.{words[0]}"), result.output
        assert document["store"].startswith(str(path.resolve())), words


# watching what is not there yet ------------------------------------------------------------------


def test_a_store_that_is_not_there_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of time going by, something happens at the path."""
    place = tmp_path / "store"
    small: list[SmallStore] = []
    events = iter([
        lambda: place.mkdir(),
        lambda: (place / "packs").mkdir(),
        lambda: small.append(SmallStore(place)),
        lambda: small[0].save("other", 1, {"w": pattern(10)}),
        lambda: small[0].save("main", 1, {"w": pattern(10)}),
    ])  # fmt: skip

    class Clock:
        time = staticmethod(time.time)

        @staticmethod
        def sleep(seconds: float) -> None:
            next(events)()

    monkeypatch.setattr(watching, "time", Clock)
    told: list[str] = []
    store = await_store(str(place), "main", poll=1, told=told.append)
    small[0].close()
    assert store.runs() == ["main", "other"]
    assert told == [
        f"{place} is no store yet: waiting for the first save",
        f"{place} has no run 'main' yet: waiting for the first save",
    ]


def test_what_will_be_no_store_is_not_waited_for(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (path / "FORMAT").unlink()
    for other in (path, tmp_path, tmp_path / "file"):
        assert run("watch", other).exit_code == 10
    assert run("watch", tmp_path / "none", "--once").exit_code == 10


# the graph, and help -----------------------------------------------------------------------------


def test_the_graph_tells_of_older_steps_only_where_there_are_any(tmp_path: Path) -> None:
    small = SmallStore(tmp_path / "store")
    parent = None
    for step in range(1, 6):
        parent = small.save("main", step, {"w": pattern(10, step)}, parent=parent)
    small.close()
    lines = run("log", small.path, "--graph", "-n", "3").output.splitlines()
    assert len(lines) == 4
    assert lines[-1] == ":  (continues main@2, not listed)"
    apply(Store.open(small.path), "main", Keep(last=3))
    lines = run("log", small.path, "--graph", "-n", "3").output.splitlines()
    assert [line[0] for line in lines] == ["*", "*", "*"]


@pytest.mark.parametrize("command", ["verify", "report", "compact", "watch"])
def test_defaults_are_shown_alike(command: str) -> None:
    assert "default: (" not in run(command, "--help").output


# modules -----------------------------------------------------------------------------------------


def test_modules_by_themselves(path: Path) -> None:
    result = run("diff", path, "@10", "@20", "--depth", "auto")
    assert "model/layer" in result.output
    assert "model/layer" in run("du", path, "--depth", "auto").output
    assert [one.module for one in du(path, depth="auto").modules] == ["model/layer"]
    for word in ("0", "-1", "two"):
        assert run("du", path, "--depth", word).exit_code == 2


# places, names and numbers that newcomers write ---------------------------------------------------


@pytest.mark.parametrize(
    ("place", "why", "advice"),
    [("stor", "it does not exist", "near it are STORE"),
     ("", "it has no file FORMAT", "near it are STORE"),
     ("store/packs", "it has no file FORMAT", "it lies in the store STORE: name that"),
     ("store/FORMAT", "it is a file", "it lies in the store STORE: name that"),
     ("no/store", "it does not exist", "that a Checkpointer was given\n"),
     ("file", "it is a file", "that a Checkpointer was given\n")],
)  # fmt: skip
def test_a_place_that_is_no_store_is_told_why(
    path: Path, tmp_path: Path, place: str, why: str, advice: str
) -> None:
    """Prevents: a mistyped path that is answered with a file that nobody has heard of."""
    (tmp_path / "file").touch()
    result = run("log", tmp_path / place)
    assert result.exit_code == 10
    assert f"is not a deltackpt store: {why}" in result.stderr
    assert advice.replace("STORE", str(path)) in result.stderr


@pytest.mark.parametrize(
    ("words", "advice"),
    [(["log", "S", "main@20"], "no step is asked for here: name its run alone, main"),
     (["log", "S", "@20"], "no step is asked for here: name a run"),
     (["show", "S", "newest"], "a step is named @STEP, the newest latest"),
     (["diff", "S", "@10..@20"], "write RUN@STEP, @STEP"),
     (["diff", "S", "runs/other"], "--other runs/other"),
     (["pin", "S", "main@20", "paper"], "pin STORE NAME STEP"),
     (["pin", "S", "main", "@20"], "pin STORE NAME STEP"),
     (["advise", "S"], "Mean time between failures"),
     (["retain", "S", "main", "--best", ""], "--best loss"),
     (["retain", "S", "main", "--best", ":min"], "--best loss"),
     (["retain", "S", "main", "--within", "0s"], "'--within': '0s' is no time at all"),
     (["report", "S", "--mtbf", "0s"], "'--mtbf': '0s' is no time at all"),
     (["compact", "S", "--watch", "--interval", "0s"], "'--interval': '0s' is no time at all"),
     (["version"], "It is --version."), (["help"], "It is --help."),
     (["verify", "S", "main@20"], "The command takes no step."),
     (["verify", "S", "20"], "The command takes no step."),
     (["show", "S", "main", "20"], "A step is named @20"),
     (["diff", "S", "@10", "@20", "x.txt"], "Quote patterns")],
)  # fmt: skip
def test_what_newcomers_write_is_answered_with_what_works(
    path: Path, words: list[str], advice: str
) -> None:
    result = run(*[str(path) if word == "S" else word for word in words])
    assert result.exit_code == 2
    assert advice in result.stderr
    quoted = "Quote patterns" in result.stderr
    assert quoted == (advice == "Quote patterns")


@pytest.mark.parametrize("words", [["advise", "S", "--mtbf", "6"], ["advise", "S", "--mtbf", "1d6"],
                                   ["retain", "S", "main", "--within", "3"]])  # fmt: skip
def test_a_length_of_time_has_a_unit(path: Path, words: list[str]) -> None:
    """Prevents: steps that go because "3" meant three hours to one and seconds to the other."""
    result = run(*[str(path) if word == "S" else word for word in words])
    assert result.exit_code == 2
    assert "lacks the unit" in result.stderr
    assert len(Store.open(path).numbers("main")) == 2


@pytest.mark.parametrize("name", ["", "-"])
def test_an_output_that_is_no_file_is_refused_before_it_is_made(
    path: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["export", path, "@20", name, "--format", "torch"], ["report", path, "-o", name],
                  ["report", path, "--png", name]):  # fmt: skip
        result = run(*words)
        assert result.exit_code == 2
        assert f"{name!r} cannot be the name of an output file" in result.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]


def test_the_picture_does_not_replace_the_page(path: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("report", path, "-o", page, "--png", f"{tmp_path}/./page.html")
    assert result.exit_code == 2
    assert "--png and --output both name" in result.stderr
    assert not page.exists()


def test_an_output_in_a_folder_that_is_not_there_is_one_error_everywhere(
    path: Path, tmp_path: Path
) -> None:
    for words in (["export", path, "@20", tmp_path / "no" / "x.pt"],
                  ["report", path, "-o", tmp_path / "no" / "x.html"]):  # fmt: skip
        result = run(*words)
        assert result.exit_code == 14
        assert "does not exist\n  create it first" in result.stderr
