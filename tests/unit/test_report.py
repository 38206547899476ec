"""`report`: figures are counted again from what was saved; page and image are well-formed."""

from __future__ import annotations

import errno
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run
from deltackpt_store.errors import StorageError
from deltackpt_store.fileio import FileIO
from deltackpt_store.store import Store
from deltackpt_tools import report_charts
from deltackpt_tools.heatmap_image import png
from deltackpt_tools.module_paths import Folding, fold, natural, suited
from deltackpt_tools.reporting import Report, report
from deltackpt_tools.tiny_font import draw
from report_store import PER, SAVES, make_report_store
from small_store import CHUNK, SmallStore, pattern


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_report_store(tmp_path_factory.mktemp("store") / "demo").path)


@pytest.fixture(scope="module")
def made(path: Path) -> Report:
    return report(path, values=True)


def test_the_heat_map_is_the_share_of_chunks_that_changed(made: Report) -> None:
    train = made.runs[0]
    assert train.run == "train"
    assert train.modules == tuple(f"model/layers.{i}" for i in (0, 1, 2, 10))
    assert np.isnan(train.share[:, 0]).all()  # nothing to compare the first save with
    frozen, sparse, dense, late = train.share[:, 1:].tolist()
    assert frozen == [0] * 11
    assert sparse == [1 / 8] * 11
    assert dense == [1] * 11
    assert late == [0] * 5 + [1] * 6
    assert train.module_bytes == (4 * CHUNK, 8 * CHUNK, 4 * CHUNK, 4 * CHUNK)


def test_update_norms_and_the_first_nan(made: Report) -> None:
    train = made.runs[0]
    assert train.update is not None
    late = pattern(4 * PER, 4)
    expected: list[float] = []
    for number in range(2, SAVES):
        if number > SAVES // 2:
            after = late + np.float32(1)
            expected.append(
                float(np.linalg.norm((after - late).astype(np.float64)) / np.linalg.norm(late))
            )
            late = after
        else:
            expected.append(0.0)
    assert train.update[3, 1 : SAVES - 1].tolist() == pytest.approx(expected, rel=1e-5)
    assert train.not_finite == ((120, "model/layers.10.late", 1),)


def test_who_never_wins(made: Report) -> None:
    found = {tensor.path: tensor for tensor in made.runs[0].tensors}
    assert [path for path, one in found.items() if one.never_wins] == ["model/layers.2.dense"]
    assert found["model/layers.0.frozen"].last_changed is None
    assert found["model/layers.1.sparse"].mean_share == 1 / 8
    assert found["model/layers.10.late"].last_changed == 120


def test_health_agrees_with_du(path: Path, made: Report) -> None:
    from deltackpt_tools import du

    usage = du(path)
    health = made.health
    assert health.total_bytes == usage.total_bytes
    for name in ("referenced_bytes", "unreferenced_bytes", "duplicate_bytes", "overhead_bytes"):
        assert getattr(health, name) == getattr(usage, name)
    assert (health.commits, health.retired, health.pins) == (SAVES + 1, 0, ("good",))
    assert (health.verified, health.findings) == ("structure", ())


def test_unreferenced_chunks_and_damage_are_told(tmp_path: Path) -> None:
    small = SmallStore(tmp_path / "store")
    first = small.save("main", 1, {"w": pattern(3000)})
    small.save("main", 2, {"w": pattern(3000, 1)}, parent=first)
    small.writer.put(pattern(1024, 9).tobytes())
    small.writer.flush()
    small.close()
    assert report(small.path).health.unreferenced_bytes == 4096
    manifest = tmp_path / "store" / "manifests" / first.manifest.hex()
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"x")
    found = report(small.path)
    assert found.health.findings
    assert found.runs[0].unreadable[0][0] == "main@1"
    result = run("report", small.path, "-o", tmp_path / "r.html")
    assert result.exit_code == 12
    assert "damage is listed" in result.output
    assert "damaged" in (tmp_path / "r.html").read_text()


def test_damage_is_told_without_a_verification(tmp_path: Path) -> None:
    """Prevents: a nightly report that ends well over a step that cannot be read."""
    small = SmallStore(tmp_path / "store")
    only = small.save("main", 1, {"w": pattern(3000)})
    small.close()
    manifest = tmp_path / "store" / "manifests" / only.manifest.hex()
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"x")
    for level in ("none", "structure"):
        result = run("report", small.path, "-o", tmp_path / "r.html", "--verify", level)
        assert result.exit_code == 12
        assert "damage is listed" in result.output


@pytest.mark.parametrize("folder", ["runs", "runs/main", "pins"])
def test_a_folder_that_cannot_be_listed_is_an_error_of_the_storage(
    tmp_path: Path, folder: str
) -> None:
    class Refusing(FileIO):
        def list(self, path: str) -> list[str]:
            if path.endswith(f"/{folder}"):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return super().list(path)

    small = SmallStore(tmp_path / "store")
    small.save("main", 1, {"w": pattern(3000)})
    small.close()
    with pytest.raises(StorageError, match=f"cannot list .*{folder}: Permission denied"):
        report(Store.open(small.path, io=Refusing()))


def test_abandoned_steps_keep_their_chunks(tmp_path: Path) -> None:
    small = SmallStore(tmp_path / "store")
    first = small.save("main", 1, {"w": pattern(3000)})
    small.save("main", 2, {"w": pattern(3000, 1)}, parent=first)
    small.save("main", 2, {"w": pattern(3000, 2)}, parent=first)
    small.close()
    found = report(small.path)
    assert [save.number for save in found.runs[0].saves] == [1, 3]
    assert found.health.unreferenced_bytes == 0


def test_a_layout_that_changes_midway(tmp_path: Path) -> None:
    """A LoRA started from a base model has more tensors from one save to the next."""
    small = SmallStore(tmp_path / "store")
    first = small.save("main", 1, {"m/a.w": pattern(3000)})
    more = {"m/a.w": pattern(3000), "m/b.w": pattern(3000, 2)}
    second = small.save("main", 2, more, parent=first)
    small.save("main", 3, {**more, "m/b.w": pattern(3000, 3)}, parent=second)
    small.close()
    run = report(small.path).runs[0]
    shares = dict(zip(run.modules, run.share.tolist(), strict=True))
    assert shares["m/a"][1:] == [0, 0]
    assert np.isnan(shares["m/b"][:2]).all()
    assert shares["m/b"][2] == 1
    assert report(small.path).to_html()


class Checker(HTMLParser):
    """Tags that do not close, ids given twice, and references out of the page."""

    VOID = frozenset({"meta", "link", "input", "br", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.problems: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href") and not (value or "").startswith(("#", "data:")):
                self.problems.append(f"{tag} refers to {value}")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_well_formed_and_fetches_nothing(made: Report) -> None:
    html = made.to_html()
    checker = Checker()
    checker.feed(html)
    assert (checker.problems, checker.open) == ([], [])
    assert len(checker.ids) == len(set(checker.ids))
    for what in ("http://", "https://", "@import", "url("):
        assert what not in html.replace("http://www.w3.org/2000/svg", "").replace("url(#", "")


def test_every_save_and_module_is_in_a_table_without_a_script(made: Report) -> None:
    html = made.to_html()
    body = html[: html.index('<script type="application/json"')]
    for number in range(1, SAVES + 1):
        assert f'data-v="{number * 10}">{number * 10}</td>' in body
    for module in made.runs[0].modules:
        assert f">{module}</td>" in body
    assert "accuracy&lt;b&gt;" in body
    assert "accuracy<b>" not in html


def test_columns_hold_every_save_once() -> None:
    for count in (1, 2, 149, 150, 151, 1000):
        bins = report_charts.bins(count)
        assert [i for first, end in bins for i in range(first, end)] == list(range(count))
        assert len(bins) == min(count, report_charts.COLUMNS)
    values = np.array([[1, 3, np.nan, 5] * 100], np.float32)
    assert np.nanmean(report_charts.binned(values, 400)) == pytest.approx(3, rel=0.05)


def decode(data: bytes) -> np.ndarray[Any, Any]:
    """The pixels of an RGB PNG file without filters, checksums checked."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    position, parts = 8, {}
    while position < len(data):
        (length,) = struct.unpack_from(">I", data, position)
        kind = data[position + 4 : position + 8]
        content = data[position + 8 : position + 8 + length]
        (check,) = struct.unpack_from(">I", data, position + 8 + length)
        assert check == zlib.crc32(kind + content)
        parts[kind] = content
        position += 12 + length
    width, height, bits, color = struct.unpack(">IIBB", parts[b"IHDR"][:10])
    assert (bits, color) == (8, 2)
    raw = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not raw[:, 0].any()
    return raw[:, 1:].reshape(height, width, 3)


def test_png_files_hold_their_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 11, 3), np.uint8)
    assert (decode(png(pixels)) == pixels).all()


def test_the_heat_map_as_an_image(path: Path, made: Report, tmp_path: Path) -> None:
    pixels = decode(made.heatmap_png())
    colors = {tuple(color) for color in pixels.reshape(-1, 3).tolist()}
    assert (8, 48, 107) in colors  # changed whole
    assert (240, 242, 245) in colors  # did not change
    result = run("report", path, "-o", tmp_path / "r.html", "--png", tmp_path / "r.png")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        f"{tmp_path / 'r.html'}: {len((tmp_path / 'r.html').read_bytes()) / 1000:.1f} kB, "
        "train (12 saves), fork (1 save)"
    ]
    assert decode((tmp_path / "r.png").read_bytes()).shape == pixels.shape


def test_letters_have_their_shapes() -> None:
    ink = draw("1.", 1)
    assert ink.shape == (5, 8)
    assert ["".join("#" if x else "." for x in row[:3]) for row in ink] == [
        ".#.", "##.", ".#.", ".#.", "###"
    ]  # fmt: skip
    assert draw("", 2).shape == (10, 0)


def test_an_unwritable_page_gives_code_14(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "none" / "r.html"
    assert run("report", path, "-o", target).exit_code == 14


def test_module_paths() -> None:
    assert fold("model/layers.0.attn.weight", 2) == "model/layers"
    assert fold("model/layers.0.attn.weight", 3) == "model/layers.0"
    assert fold("model/layers.0.attn.weight", 9) == "model/layers.0.attn"
    assert fold("weight", 3) == "weight"
    assert fold('state/"a.b/c"/x', 2) == 'state/"a.b/c"'
    assert sorted(["l.10", "l.9", "l.1"], key=natural) == ["l.1", "l.9", "l.10"]


def folded(paths: list[str], limit: int = 60) -> list[str]:
    fold = suited(paths, limit)
    return sorted({fold(path) for path in paths}, key=natural)


def test_modules_are_as_many_as_one_can_read() -> None:
    """Prevents: one useless row for all layers of a model."""
    layers = [f"model/layers.{i}.{m}.weight" for i in range(100) for m in "qkv"]
    assert folded(layers) == [f"model/layers.{i}" for i in range(100)]  # too many, but else one
    few = [f"model/layers.{i}.{m}.weight" for i in range(4) for m in "qkv"]
    assert folded(few) == [f"model/layers.{i}.{m}" for i in range(4) for m in "kqv"]
    state = [f"optimizer/state/{i}/exp_avg" for i in range(300)]
    assert folded([*few, *state]) == [
        *(f"model/layers.{i}.{m}" for i in range(4) for m in "kqv"), "optimizer/state"
    ]  # fmt: skip
    assert folded([*layers, *state, "lr"]) == [
        "lr", *(f"model/layers.{i}" for i in range(100)), "optimizer/state"
    ]  # fmt: skip
    assert folded([f"m/{i}/w" for i in range(1000)]) == ["m"]  # nobody reads a thousand
    assert folded(["m/w", "m/a.w", "m/a.b.w"]) == ["m", "m/a", "m/a.b"]
    assert folded([]) == []
    assert folded(few, limit=1) == [f"model/layers.{i}" for i in range(4)]
    assert Folding(2)("model/layers.0.w") == "model/layers"
