"""The report page in a real browser: draws, sorts, filters, answers pointer and keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from deltackpt_tools.reporting import Report, report
from report_store import SAVES, make_report_store


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Report:
    small = make_report_store(tmp_path_factory.mktemp("store") / "demo")
    return report(small.path, values=True)


@pytest.fixture(scope="module")
def file(made: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(made.to_html())
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Browser]:
    browser.errors.clear()
    browser.open(file)
    yield browser
    assert browser.errors == []  # no exception, no console error, no request to the network


def rows(page: Browser, table: str) -> list[list[str]]:
    """Texts of the cells of the visible rows."""
    return page.run(
        f"[...document.querySelectorAll('#{table} tbody tr')].filter(r => !r.hidden)"
        ".map(r => [...r.cells].map(c => c.textContent))"
    )


def tip(page: Browser) -> str | None:
    return page.run(
        "(() => { const t = document.getElementById('tip');"
        "return t.hidden ? null : t.innerText })()"
    )


def box(page: Browser, selector: str) -> dict[str, float]:
    return page.run(
        f"(() => {{ const e = document.querySelector({selector!r});"
        "e.scrollIntoView({block: 'center'}); return e.getBoundingClientRect().toJSON() })()"
    )


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_chart_is_drawn_and_nothing_sticks_out(
    browser: Browser, file: Path, width: int, dark: bool
) -> None:
    browser.errors.clear()
    browser.open(file, width=width, dark=dark)
    assert browser.run("document.documentElement.dataset.ready") == "yes"
    assert browser.run("document.documentElement.scrollWidth") <= width
    charts = browser.run(
        "[...document.querySelectorAll('figure[data-chart]')].map(f =>"
        " [f.dataset.chart, f.querySelectorAll('svg path, svg rect.cell').length])"
    )
    names = [name for name, _ in charts]
    assert [n for n in names if n.startswith("r0-")] == [
        "r0-sizes", "r0-times", "r0-m0", "r0-m1", "r0-heat", "r0-savings"
    ]  # fmt: skip
    assert all(count for _, count in charts), charts
    outside = browser.run(
        "[...document.querySelectorAll('figure svg text')].filter(t => {"
        "const a = t.getBoundingClientRect(), b = t.closest('svg').getBoundingClientRect();"
        "return a.left < b.left - 1 || a.right > b.right + 1 }).map(t => t.textContent)"
    )
    assert outside == []
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    assert browser.errors == []


def test_a_line_chart_tells_the_step_under_the_pointer(page: Browser) -> None:
    where = box(page, "figure[data-chart='r0-m0'] svg")
    page.move(where["right"] - 12, where["top"] + 90)
    assert tip(page) == f"step {SAVES * 10}\nloss: 0.3333"
    page.move(where["left"] + 64, where["top"] + 90)
    assert tip(page) == "step 10\nloss: 4"
    page.move(5, 5)
    assert tip(page) is None


def test_the_heat_map_tells_the_cell_under_the_pointer(page: Browser) -> None:
    where = box(page, "figure[data-chart='r0-heat'] svg")
    page.move(where["right"] - 10, where["top"] + 6 + 1.5 * 16)
    assert tip(page) == "model/layers.1\nstep 120: 12.5 % changed"
    page.move(where["right"] - 10, where["top"] + 6 + 0.5 * 16)
    assert tip(page) == "model/layers.0\nstep 120: 0 % changed"


def test_charts_answer_to_the_keyboard(page: Browser) -> None:
    page.run("document.querySelector(\"figure[data-chart='r0-m0'] svg\").focus()")
    page.key("ArrowRight")
    assert tip(page) == "step 10\nloss: 4"
    page.key("ArrowRight")
    assert tip(page) == "step 20\nloss: 2"
    page.key("End")
    assert tip(page) == f"step {SAVES * 10}\nloss: 0.3333"
    assert page.run("document.getElementById('live').textContent").startswith("step 120")
    page.key("Escape")
    assert tip(page) is None
    page.run("document.querySelector(\"figure[data-chart='r0-heat'] svg\").focus()")
    page.key("ArrowRight")
    page.key("ArrowDown")
    page.key("ArrowRight")
    assert tip(page) == "model/layers.1\nstep 20: 12.5 % changed"


def test_tables_sort_by_number_and_by_name(page: Browser) -> None:
    page.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    button = "#r0-modules thead th:nth-child({}) button"
    page.click(button.format(3))  # mean share changed: largest first
    names = [row[0] for row in rows(page, "r0-modules")]
    assert names == ["model/layers.2", "model/layers.10", "model/layers.1", "model/layers.0"]
    page.click(button.format(3))
    assert [row[0] for row in rows(page, "r0-modules")] == names[::-1]
    page.click(button.format(1))
    in_order = ["model/layers.0", "model/layers.1", "model/layers.2", "model/layers.10"]
    assert [row[0] for row in rows(page, "r0-modules")] == in_order
    order = "document.querySelector('#r0-modules th').getAttribute('aria-sort')"
    assert page.run(order) == "ascending"
    page.run(f"document.querySelector({button.format(1)!r}).focus()")
    page.key("Enter")
    assert page.run(order) == "descending"


def test_tables_and_heat_map_filter(page: Browser) -> None:
    page.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    page.click("input[data-filters='r0-tensors']")
    page.type("never wins")
    assert [row[0] for row in rows(page, "r0-tensors")] == ["model/layers.2.dense"]
    page.click("figure[data-chart='r0-heat'] input")
    page.type("layers.1")
    labels = page.run(
        "[...document.querySelectorAll(\"figure[data-chart='r0-heat'] svg text\")]"
        ".map(t => t.textContent).filter(t => t.includes('layers'))"
    )
    assert labels == ["model/layers.1", "model/layers.10"]
    count = "document.querySelector(\"figure[data-chart='r0-heat'] .count\").textContent"
    assert page.run(count) == "2 of 4 modules"


def test_update_norms_and_order_can_be_chosen(page: Browser) -> None:
    choose = (
        "(() => {{ const s = document.querySelector(\"figure[data-chart='r0-heat'] select.{}\");"
        "s.value = {!r}; s.dispatchEvent(new Event('input')) }})()"
    )
    page.run(choose.format("order", "most"))
    page.run(choose.format("what", "update"))
    where = box(page, "figure[data-chart='r0-heat'] svg")
    page.move(where["right"] - 30, where["top"] + 6 + 0.5 * 16)
    found = tip(page)
    assert found is not None
    name, rest = found.split("\n")
    assert name == "model/layers.2"
    assert "update" in rest


def test_the_theme_button_wins_over_the_system(page: Browser) -> None:
    color = "getComputedStyle(document.body).backgroundColor"
    page.click("#theme")
    page.click("#theme")
    assert page.run("document.getElementById('theme').textContent") == "Theme: dark"
    assert page.run(color) == "rgb(13, 17, 23)"


def test_text_is_readable_in_both_themes(browser: Browser, file: Path) -> None:
    """WCAG AA: a contrast of 4.5 for text."""
    script = """(() => {
      const rgb = s => s.match(/[\\d.]+/g).slice(0, 3).map(v => { v /= 255;
        return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4 });
      const lum = s => { const [r, g, b] = rgb(s); return 0.2126*r + 0.7152*g + 0.0722*b };
      const back = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e)
        .backgroundColor; if (c !== 'rgba(0, 0, 0, 0)') return c } return 'rgb(255,255,255)' };
      const low = [];
      for (const e of document.querySelectorAll('h1,h2,h3,p,a,b,span,td,th,summary,button,text')) {
        if (!e.textContent.trim()) continue;
        const ink = getComputedStyle(e)[e.tagName === 'text' ? 'fill' : 'color'];
        const [a, b] = [lum(ink), lum(back(e))].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < 4.5) low.push([e.tagName, e.textContent.slice(0, 20), ratio]);
      }
      return low })()"""
    for dark in (False, True):
        browser.open(file, dark=dark)
        low: list[Any] = browser.run(script)
        assert low == [], dark


def test_it_prints_every_chart_on_white_paper(page: Browser) -> None:
    page.media("print", dark=True)
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    data = page.pdf()
    assert data.startswith(b"%PDF")
    assert data.count(b"/Type /Page\n") >= 2


def test_a_hostile_name_stays_text(tmp_path: Path, browser: Browser) -> None:
    """A metric called like a tag must not become one: a report is opened from mail."""
    from small_store import SmallStore, pattern

    small = SmallStore(tmp_path / "store")
    evil = "</script><img src=x onerror=document.title='owned'>"
    for step in (1, 2):
        small.save("main", step, {evil: pattern(3000, step)}, metrics={evil: float(step)})
    small.close()
    path = tmp_path / "evil.html"
    path.write_text(report(small.path).to_html())
    browser.errors.clear()
    browser.open(path)
    assert browser.run("document.title") == "store: deltackpt report"
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.errors == []
