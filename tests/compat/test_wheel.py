"""The built wheel in an environment of its own, as a user installs it."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

USE = """
import store, tools, tools.helper            # the user's own, in the working directory
import torch, deltackpt, deltackpt_store, deltackpt_tools.cli

assert store.MINE and tools.MINE and tools.helper.MINE
site = {site!r}
for package in (deltackpt, deltackpt_store, deltackpt_tools):
    assert package.__file__.startswith(site), package.__file__

def training():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    return model, torch.optim.AdamW(model.parameters())

model, optimizer = training()
with deltackpt.Checkpointer("ckpt", {{"model": model, "optimizer": optimizer}}) as ckpt:
    for step in range(3):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        ckpt.save(step)
other, again = training()
with deltackpt.Checkpointer("ckpt", {{"model": other, "optimizer": again}}) as ckpt:
    last = ckpt.restore()
    assert last.step == 2
for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
    assert torch.equal(ours, theirs)
print(deltackpt.__version__)
"""


def call(*command: str | Path, cwd: Path) -> str:
    """Run with no trace of this checkout in the environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel, and the dependencies of this one through a .pth file."""
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, ROOT / "tools" / "check_wheel.py", "--keep", folder / "dist", cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = folder / "env" / "bin" / "python"
    site = Path(call(python, "-c", "import site; print(site.getsitepackages()[0])",
                     cwd=folder).strip())  # fmt: skip
    call(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index",
        "--disable-pip-version-check", wheel, cwd=folder,
    )  # fmt: skip
    # Added after the environment's own packages, and as a plain path: the .pth files in there,
    # the editable install of this checkout among them, are not followed.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "env"


def test_a_users_own_store_and_tools_live_beside_it(environment: Path, tmp_path: Path) -> None:
    """Packages called `store` or `tools` would shadow, or be shadowed by, the user's own."""
    (tmp_path / "store.py").write_text("MINE = True\n")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").write_text("MINE = True\n")
    (tmp_path / "tools" / "helper.py").write_text("MINE = True\n")
    (tmp_path / "train.py").write_text(USE.format(site=str(environment)))
    version = call(environment / "bin" / "python", "train.py", cwd=tmp_path).strip()
    command = environment / "bin" / "deltackpt"
    assert call(command, "--version", cwd=tmp_path) == f"deltackpt {version}\n"
    assert "run main: 3 steps, newest 2" in call(command, "log", "ckpt", cwd=tmp_path)
    assert "no damage found" in call(command, "verify", "ckpt", cwd=tmp_path)


def test_each_package_is_typed(environment: Path) -> None:
    for package in ("deltackpt", "deltackpt_store", "deltackpt_tools"):
        (marker,) = environment.glob(f"lib/python*/site-packages/{package}/py.typed")
        assert marker.is_file()


def test_the_store_needs_no_torch(environment: Path, tmp_path: Path) -> None:
    """A compaction node or CI box must not need several GB of torch to look into a store."""
    call(
        environment / "bin" / "python", "-c",
        "import sys; sys.modules['torch'] = None\n"
        "import pkgutil, importlib, deltackpt_store, deltackpt_tools\n"
        "for package in (deltackpt_store, deltackpt_tools):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        if module.name.rpartition('.')[2] not in ('__main__', 'writer'):\n"
        "            importlib.import_module(module.name)\n",
        cwd=tmp_path,
    )  # fmt: skip


@pytest.mark.parametrize("form", ["compiled", "archive"])
def test_packages_without_source_files_can_save(form: str, tmp_path: Path) -> None:
    """The writer process finds its package where there are compiled files only, or an archive."""
    site = tmp_path / "site"
    ignore = shutil.ignore_patterns("__pycache__", "testing")
    for package in ("deltackpt", "store/deltackpt_store"):
        shutil.copytree(ROOT / package, site / Path(package).name, ignore=ignore)
    if form == "compiled":
        assert compileall.compile_dir(site, legacy=True, quiet=1)
        for source in site.rglob("*.py"):
            source.unlink()
    else:
        site = Path(shutil.make_archive(str(tmp_path / "packages"), "zip", site))
    use = f"import sys; sys.path.insert(0, {str(site)!r})\n" + USE.format(site=str(site))
    use = use.replace(", deltackpt_tools.cli", "").replace(", deltackpt_tools)", ")")
    (tmp_path / "train.py").write_text(
        "\n".join(line for line in use.splitlines() if "MINE" not in line and "tools" not in line)
    )
    assert call(sys.executable, "train.py", cwd=tmp_path)
