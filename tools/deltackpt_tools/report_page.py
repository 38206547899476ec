"""The report as one HTML document: styles, script and data inside, nothing fetched.

Every chart has a table behind it that is part of the document, so that the page says the same
without a script, to a screen reader and on paper.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from deltackpt_tools.output import (
    counted,
    figure,
    moment,
    percent,
    seconds,
    shortened,
    size,
    small_percent,
)
from deltackpt_tools.parameters import labelled
from deltackpt_tools.report_charts import cumulated, heat, line
from deltackpt_tools.report_tables import Cell, Column, details, table, text, tiles
from deltackpt_tools.store_health import Health
from deltackpt_tools.survey import RunSurvey, SavePoint

_METRICS = 8  # charts of metrics, at most
_CADENCE = {
    "failures": "the least expected loss",
    "overhead": "the overhead allowed",
    "durability": "a save must be durable before the next",
}


def page(store: str, made: float, runs: Sequence[RunSurvey], health: Health) -> str:
    """The whole document about the store at that path, as it was at the time `made`."""
    data: dict[str, Any] = {}
    body = [_header(store, made, runs), _health(health)]
    body += [_run(f"r{number}", survey, data) for number, survey in enumerate(runs)]
    if not runs:
        body.append('<p class="empty">No run has been saved yet.</p>')
    assets = files("deltackpt_tools") / "assets"
    style = (assets / "report.css").read_text()
    script = (assets / "report.js").read_text()
    encoded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{text(_name(store))}: deltackpt report</title>\n<style>\n{style}</style>"
        '</head>\n<body><div class="page">\n'
        + "\n".join(body)
        + "\n<footer>Made by deltackpt report. A chunk is the smallest piece that is stored; shares"
        " are of chunks that changed. Times are UTC.</footer></div>\n"
        '<div id="tip" role="status" hidden></div>'
        '<div id="live" aria-live="polite" style="position:absolute;left:-9999px"></div>\n'
        f'<script type="application/json" id="data">{encoded}</script>\n'
        f"<script>\n{script}</script></body></html>\n"
    )


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _header(store: str, made: float, runs: Sequence[RunSurvey]) -> str:
    links = ['<a href="#health">Health</a>']
    links += [
        f'<a href="#r{i}">Run {text(one.run)}</a> ({counted(len(one.saves), "save")})'
        for i, one in enumerate(runs)
    ]
    return (
        f"<header><h1>{text(_name(store))}</h1>"
        f"<p>{text(store)}, as of {moment(made)}</p>"
        '<button type="button" class="plain" id="theme">Theme: auto</button></header>'
        f"<nav>{''.join(f'<span>{link}</span>' for link in links)}</nav>"
    )


# health -----------------------------------------------------------------------------------------


def _health(health: Health) -> str:
    bad = len(health.findings) + len(health.unreadable)
    if health.verified is None and not bad:
        verdict = ("not verified", "run deltackpt verify", "")
    elif bad:
        verdict = (counted(bad, "finding"), "damaged or unreadable: see below", "bad")
    else:
        verdict = ("no damage", f"verified, level {health.verified}", "good")
    share = health.unreferenced_bytes / health.pack_bytes if health.pack_bytes else 0.0
    pins = ", ".join(health.pins[:6]) or "none"
    items = [
        verdict,
        (size(health.total_bytes), "all files of the store", ""),
        (size(health.referenced_bytes), "chunks that some step needs", ""),
        (
            size(health.unreferenced_bytes),
            f"chunks that nothing needs ({percent(share)} of packs)",
            "",
        ),
        (size(health.manifest_bytes), "manifests", ""),
        (str(health.commits), f"steps listed, {health.retired} retired", ""),
        (str(len(health.pins)), f"pins: {pins}" if health.pins else "pins", ""),
    ]
    findings = [
        [Cell(kind), Cell(name), Cell(reason)] for kind, name, reason in health.findings
    ] + [[Cell("unreadable"), Cell(what), Cell(why)] for what, why in health.unreadable]
    found = ""
    if findings:
        columns = [Column("kind"), Column("what", path=True), Column("reason", path=True)]
        found = "<h3>Findings</h3>" + table("findings", columns, findings, caption="Findings")
    return f'<h2 id="health">Health</h2>{tiles(items)}{found}'


# one run ----------------------------------------------------------------------------------------


def _run(name: str, survey: RunSurvey, data: dict[str, Any]) -> str:
    head = f'<h2 id="{name}">Run {text(survey.run)}</h2>'
    if not survey.saves:
        return head + '<p class="empty">No save of this run can be read.</p>'
    return "\n".join(
        [
            head,
            _summary(survey),
            _timeline(name, survey, data),
            _heat(name, survey, data),
            _savings(name, survey, data),
            _cadence(survey),
        ]
    )


def _total(values: list[float | None]) -> float:
    return sum(value or 0.0 for value in values)


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _summary(survey: RunSurvey) -> str:
    saves = survey.saves
    full = _total([save.state_bytes for save in saves])
    written = _total([save.written_bytes for save in saves]) + survey.bases.manifest_bytes
    stall, durable = _median([s.stall for s in saves]), _median([s.durable for s in saves])
    items = [
        (str(len(saves)), f"saves, steps {saves[0].step} to {saves[-1].step}", ""),
        (size(saves[-1].state_bytes), "state of the newest step", ""),
        (size(written), f"written in all; full saves: {size(full)}", ""),
        (f"{full / written:.1f}x" if written and full else "-", "less written than full saves", ""),
        (seconds(stall), "stall, median", ""),
        (seconds(durable), "until durable, median", ""),
    ]
    skipped = int(_total([save.skipped for save in saves]))
    if skipped:
        items.append((str(skipped), "saves skipped: earlier ones were in flight", "bad"))
    if survey.not_finite:
        step, path, _ = survey.not_finite[0]
        items.append((f"step {step}", f"NaN or Inf appeared first, in {path}", "bad"))
    return tiles(items)


def _figure(name: str, title: str, series: list[str]) -> str:
    legend = "".join(
        f'<span><i style="background:var(--s{i % 4})"></i>{text(one)}</span>'
        for i, one in enumerate(series)
    )
    return (
        f'<figure data-chart="{name}"><figcaption><b>{text(title)}</b>'
        f'<div class="legend">{legend if len(series) > 1 else ""}</div></figcaption></figure>'
    )


def _timeline(name: str, survey: RunSurvey, data: dict[str, Any]) -> str:
    saves = survey.saves
    figures: list[str] = []

    def chart(key: str, title: str, unit: str, series: list[tuple[str, Any]], log: bool) -> None:
        known = [one for one in series if any(v is not None for v in one[1])]
        if known:
            data[f"{name}-{key}"] = line(title, unit, saves, *known, log=log)
            figures.append(_figure(f"{name}-{key}", title, [one for one, _ in known]))

    chart(
        "sizes", "Bytes of each save", "bytes",
        [("state", [s.state_bytes for s in saves]), ("changed", [s.changed_bytes for s in saves]),
         ("written", [s.written_bytes for s in saves])], True,
    )  # fmt: skip
    chart(
        "times", "Time of each save", "seconds",
        [("stall", [s.stall for s in saves]), ("until staged", [s.staged for s in saves]),
         ("until durable", [s.durable for s in saves])], True,
    )  # fmt: skip
    metrics = list(dict.fromkeys(metric for save in saves for metric in save.metrics))
    for i, metric in enumerate(metrics[:_METRICS]):
        values = [save.metrics.get(metric) for save in saves]
        title = shortened(metric)
        chart(f"m{i}", title, "number", [(title, values)], False)
    about = "What each save cost, and what the training reported with it."
    return (
        f'<h3>Timeline</h3><p class="about">{about}</p><div class="charts">{"".join(figures)}</div>'
        + details(f"Table of {counted(len(saves), 'save')}", _saves(name, saves, metrics))
    )


def _saves(name: str, saves: tuple[SavePoint, ...], metrics: list[str]) -> str:
    columns = [
        Column(title, numeric=title not in ("saved", "manifest"))
        for title in ("step", "saved", "state", "changed", "staged", "written", "manifest", "stall",
                      "staged in", "durable in")
    ] + [Column(shortened(metric), numeric=True) for metric in metrics]  # fmt: skip
    rows: list[list[Cell]] = []
    for save in saves:
        kind = "base" if save.is_base else "delta"
        row = [
            Cell(str(save.step), save.step),
            Cell(moment(save.created)),
            *(
                Cell(size(value), value)
                for value in (
                    save.state_bytes, save.changed_bytes, save.staged_bytes, save.written_bytes,
                )
            ),
            Cell(f"{kind}, {size(save.manifest_bytes)}"),
            *(Cell(seconds(value), value) for value in (save.stall, save.staged, save.durable)),
        ]  # fmt: skip
        for metric in metrics:
            value = save.metrics.get(metric)
            row.append(Cell("-" if value is None else f"{value:.6g}", value))
        rows.append(row)
    return table(f"{name}-saves", columns, rows, caption="Saves", filtered=True)


def _heat(name: str, survey: RunSurvey, data: dict[str, Any]) -> str:
    if not survey.modules or len(survey.saves) < 2:
        return ""
    data[f"{name}-heat"] = heat(survey)
    what = ""
    if survey.update is not None:
        what = (
            '<label>Show <select class="what"><option value="share">share changed</option>'
            '<option value="update">update norm</option></select></label>'
        )
    tools = (
        '<div class="tools"><label>Filter <input type="search" aria-label="Filter modules"></label>'
        '<label>Order <select class="order"><option value="model">as in the state</option>'
        f'<option value="most">most changed first</option></select></label>{what}'
        '<span class="scale"><span class="low">0 %</span><i></i><span class="high">100 %</span>'
        '</span><span class="count" aria-live="polite"></span></div>'
    )
    about = (
        "Share of the chunks of each module that a save changed; the colour goes with its square "
        "root, so that little changes show. Pale cells did not change at all: a module that never "
        "does is frozen. Hatched cells have nothing to compare with: the first save, and what was "
        "not there before."
    )
    return (
        f'<h3>Layers by steps</h3><p class="about">{about}</p>'
        f'<figure data-chart="{name}-heat">{tools}</figure>'
        + details(f"Table of {counted(len(survey.modules), 'module')}", _modules(name, survey))
    )


def _modules(name: str, survey: RunSurvey) -> str:
    columns = [Column("module", path=True)]
    columns += [
        Column(title, numeric=True)
        for title in ("bytes", "mean share changed", "largest", "at step", "last changed at",
                      "saves that changed it")
    ]  # fmt: skip
    if survey.update is not None:
        columns += [Column("mean update", numeric=True), Column("largest update", numeric=True)]
    steps = [save.step for save in survey.saves]
    rows: list[list[Cell]] = []
    for i, module in enumerate(survey.module_labels()):
        share = survey.share[i]
        known = np.flatnonzero(~np.isnan(share))
        nbytes = survey.module_bytes[i] if i < len(survey.module_bytes) else 0
        row = [Cell(module), Cell(size(nbytes), nbytes)]
        if not len(known):
            rows.append(row + [Cell("-")] * (len(columns) - 2))
            continue
        mean, most = float(share[known].mean()), int(known[share[known].argmax()])
        changed = known[share[known] > 0]
        row += [Cell(percent(mean), mean), Cell(percent(float(share[most])), float(share[most]))]
        if len(changed):
            row += [Cell(str(steps[most]), steps[most])]
            row += [Cell(str(steps[int(changed[-1])]), steps[int(changed[-1])])]
        else:
            row += [Cell("-"), Cell("never", -1)]
        row += [Cell(f"{len(changed)} of {len(known)}", len(changed))]
        if survey.update is not None:
            update = survey.update[i][known]
            row += [Cell(figure(float(v)), float(v)) for v in (update.mean(), update.max())]
        rows.append(row)
    return table(f"{name}-modules", columns, rows, caption="Modules", filtered=True)


def _savings(name: str, survey: RunSurvey, data: dict[str, Any]) -> str:
    saves = survey.saves
    full = cumulated([save.state_bytes for save in saves])
    written = [
        None if s.written_bytes is None else s.written_bytes + s.manifest_bytes for s in saves
    ]
    here = cumulated(written)
    title = "Written in all"
    data[f"{name}-savings"] = line(
        title, "bytes", saves, ("full saves", full), ("this store", here), log=True
    )
    rows = [
        [Cell(str(s.step), s.step), Cell(size(a or 0), a), Cell(size(b or 0), b),
         Cell(f"{(a or 0) / b:.1f}x" if b else "-", (a or 0) / b if b else None)]
        for s, a, b in zip(saves, full, here, strict=True)
    ]  # fmt: skip
    columns = [Column("step", numeric=True), Column("full saves", numeric=True),
               Column("this store", numeric=True), Column("ratio", numeric=True)]  # fmt: skip
    never = [tensor for tensor in survey.tensors if tensor.never_wins]
    total = sum(tensor.bytes for tensor in survey.tensors)
    lost = sum(tensor.bytes for tensor in never)
    about = (
        f"{counted(len(never), 'tensor')} ({percent(lost / total if total else 0)} of the state) "
        "can never win: nearly all of their chunks change at every save, and no codec makes them "
        "smaller. Saving less often is all that helps there."
        if never
        else "No tensor changes whole at every save without getting smaller: all of them can win."
    )
    return (
        "<h3>Savings against full saves</h3>"
        f'<p class="about">{text(about)}</p>'
        f'<div class="charts">{_figure(f"{name}-savings", title, ["full saves", "this store"])}'
        "</div>"
        + details("Table of bytes written", table(f"{name}-written", columns, rows, caption=title))
        + details(
            f"Table of {counted(len(survey.tensors), 'tensor')}: who wins", _tensors(name, survey)
        )
    )


def _tensors(name: str, survey: RunSurvey) -> str:
    columns = [Column("tensor", path=True), Column("dtype"), Column("bytes", numeric=True),
               Column("mean share changed", numeric=True), Column("stored", numeric=True),
               Column("last changed at", numeric=True), Column("verdict")]  # fmt: skip
    rows: list[list[Cell]] = []
    for one in survey.tensors:
        ratio = one.stored_ratio
        verdict = "never wins" if one.never_wins else "wins"
        if not one.compared:
            verdict = "not compared"
        elif one.last_changed is None:
            verdict = "never changed"
        rows.append(
            [
                Cell(labelled(one.path, one.parameter_name)),
                Cell(one.dtype),
                Cell(size(one.bytes), one.bytes),
                Cell(percent(one.mean_share), one.mean_share),
                Cell("-" if ratio is None else percent(ratio), ratio),
                Cell("never" if one.last_changed is None else str(one.last_changed),
                     one.last_changed),
                Cell(verdict),
            ]
        )  # fmt: skip
    return table(f"{name}-tensors", columns, rows, caption="Tensors", filtered=True)


def _cadence(survey: RunSurvey) -> str:
    parts = ["<h3>Cadence</h3>"]
    advice, bases = survey.advice, survey.bases
    if advice is None:
        parts.append('<p class="about">Too few saves recorded how long they took.</p>')
    else:
        present = "unknown" if advice.interval is None else seconds(advice.interval)
        best = seconds(advice.best_interval)
        if advice.best_every:
            best += f", every {counted(advice.best_every, 'step')}"
        storage = {True: ("keeps up", "good"), False: ("falls behind", "bad"), None: ("-", "")}
        ring = {True: ("keeps up", "good"), False: ("too small", "bad"), None: ("-", "")}
        busy = "" if advice.writer_busy is None else f", busy {percent(advice.writer_busy)}"
        parts.append(
            tiles(
                [
                    (present, f"between saves now; wastes {small_percent(advice.waste)}", ""),
                    (
                        best,
                        f"would be best: {_CADENCE[advice.bound]}; wastes "
                        f"{small_percent(advice.best_waste)}",
                        "",
                    ),
                    (
                        "-" if advice.lost is None else seconds(advice.lost),
                        f"lost per failure now; {seconds(advice.best_lost)} at the best",
                        "",
                    ),
                    (seconds(advice.restore), "to restore, measured by reading", ""),
                    (
                        storage[advice.storage_keeps_up][0],
                        f"storage{busy}",
                        storage[advice.storage_keeps_up][1],
                    ),
                    (
                        ring[advice.ring_keeps_up][0],
                        "staging ring",
                        ring[advice.ring_keeps_up][1],
                    ),
                ]
            )
        )
        parts.append(
            f'<p class="about">For one failure in {seconds(advice.mtbf)}. Formulas: Young 1974, '
            f"Daly 2006 (<code>deltackpt advise</code>).</p>"
        )
    if bases.present is not None:
        words = (
            f"{counted(bases.saves, 'manifest')} of {size(bases.manifest_bytes)}, a base every "
            f"{bases.present:.1f} saves"
        )
        if bases.best is not None and bases.best_bytes is not None:
            mean = bases.manifest_bytes / bases.saves
            words += (
                f" ({size(mean)} of manifest each); the least would be a base every "
                f"{counted(bases.best, 'save')} ({size(bases.best_bytes)} each)"
            )
        parts.append(f'<p class="about">Manifests: {text(words)}.</p>')
    return "".join(parts)
