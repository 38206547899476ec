"""Build the source distribution and the wheel, and check what is in them.

    python tools/check_wheel.py [--keep DIR]

A wheel must hold exactly the three import packages: every module of the checkout, a ``py.typed``
each, and nothing else: no tests, no scripts, no top-level name that could overwrite a user's own
``store`` or ``tools``. The wheel is built from the source distribution, so that one is proven too.
Exit code 1 with one line per finding.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "deltackpt": ROOT / "deltackpt",
    "deltackpt_store": ROOT / "store" / "deltackpt_store",
    "deltackpt_tools": ROOT / "tools" / "deltackpt_tools",
}
SUFFIXES = {".py", ".pyi", ".c", ".css", ".js"}  # the last two: of the report page
KERNELS = "deltackpt_store/coding/kernels.lib"  # compiled where there is a compiler
ENTRY_POINT = "deltackpt = deltackpt_tools.cli:main"


def build(target: Path) -> tuple[Path, Path]:
    """Build into `target` with the installed build backend; return (sdist, wheel)."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the build failed:\n{done.stdout}{done.stderr}")
    (sdist,) = target.glob("*.tar.gz")
    (wheel,) = target.glob("*.whl")
    return sdist, wheel


def expected_modules() -> set[str]:
    """Every module and marker file of the checkout, as named inside the wheel."""
    names: set[str] = set()
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*"):
            if path.suffix in SUFFIXES or path.name == "py.typed":
                names.add(f"{package}/{path.relative_to(folder).as_posix()}")
    return names


def check_wheel(wheel: Path) -> list[str]:
    findings: list[str] = []
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        information = next(iter({n.split("/")[0] for n in names if ".dist-info/" in n}), "")
        if not information:
            return ["the wheel has no dist-info"]
        content = {name for name in names if not name.startswith(f"{information}/")}
        tops = {name.split("/")[0] for name in content}
        expected = expected_modules()
        findings += [f"stray top-level name: {top}" for top in sorted(tops - set(PACKAGES))]
        findings += [f"missing from the wheel: {name}" for name in sorted(expected - content)]
        stray = content - expected - {KERNELS}
        findings += [f"not expected in the wheel: {name}" for name in sorted(stray)]
        for package in PACKAGES:
            if f"{package}/py.typed" not in content:
                findings.append(f"no py.typed in {package}")
        entries = archive.read(f"{information}/entry_points.txt").decode()
        if [line for line in entries.splitlines() if "=" in line] != [ENTRY_POINT]:
            findings.append(f"entry points are not exactly the command line: {entries!r}")
        if not any(name.endswith("/licenses/LICENSE") for name in names):
            findings.append("no licence text in dist-info")
        metadata = Parser().parsestr(archive.read(f"{information}/METADATA").decode())
        for requirement in metadata.get_all("Requires-Dist", []):
            if any(mark in requirement.split(";")[0] for mark in ("<", "==", "~=")):
                findings.append(f"a capped runtime dependency: {requirement}")
    return findings


def check_sdist(sdist: Path) -> list[str]:
    """A source distribution must be able to run its own tests."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"Makefile", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md",
              "requirements-dev.txt", "constraints-dev.txt", "tests"}  # fmt: skip
    return [
        f"missing from the source distribution: {name}"
        for name in sorted(needed)
        if name not in names and not any(n.startswith(f"{name}/") for n in names)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="build the distributions and check their content")
    parser.add_argument("--keep", type=Path, help="leave what was built in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        target: Path = options.keep or Path(scratch)
        sdist, wheel = build(target)
        findings = check_wheel(wheel) + check_sdist(sdist)
        for finding in findings:
            print(f"{wheel.name}: {finding}", file=sys.stderr)
        if not findings:
            print(f"{wheel.name}: {len(expected_modules())} files in three packages, as expected")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
