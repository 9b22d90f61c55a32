"""The wheel: plain Python, or with VIRTACCEL_COMPILE=1 in the environment the hot modules compiled by mypyc as well.

Everything else is in pyproject.toml; so is the list of modules, `[tool.virtaccel.compiled]`, one shared library a
group. The sources stay in the wheel beside what was made of them: tracebacks show them and the guest program is bundled
from them. An editable install is never compiled, for it would leave its libraries among the sources.
"""

import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from setuptools import Extension, setup

COMPILE = os.environ.get("VIRTACCEL_COMPILE", "") not in ("", "0")
TRANSLATOR = ["mypy>=2.4", "numpy>=2.1,<3"]  # numpy for its types; the runtime's are unknown, here and in scripts/check
SOURCES = Path("src")


def extensions() -> list[Extension]:
    """Translates the modules to C; for the commands that would compile it."""
    if not {"build", "build_ext", "bdist_wheel", "install"} & set(sys.argv[1:]):
        return []
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    try:
        subprocess.run([compiler, "--version"], stdout=subprocess.DEVNULL, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"VIRTACCEL_COMPILE=1 needs a C compiler: {compiler} does not run ({error})") from error
    from mypyc.build import mypycify

    groups = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["virtaccel"]["compiled"]
    files: list[tuple[list[str], str | None]] = [
        ([str(SOURCES / f"{name.replace('.', '/')}.py") for name in names], f"virtaccel_{group}")
        for group, names in groups.items()
    ]
    options = ["--config-file=", "--ignore-missing-imports"]
    # More than -O1 takes half as long again and gains nothing: the time is in the interpreter's own functions.
    found: list[Extension] = mypycify(
        [*options, *(file for names, _ in files for file in names)], separate=files, opt_level="1", debug_level="0"
    )
    return found


setup(
    ext_modules=extensions() if COMPILE else [],
    setup_requires=TRANSLATOR if COMPILE else [],
    options={"build_ext": {"parallel": os.cpu_count()}},
)
