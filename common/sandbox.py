"""Where model-written code runs: bubblewrap namespaces without network, environment or the host's files.

    sandbox = Sandbox()                                   # once; raises SandboxError where it cannot contain
    sandbox.run("print(6 * 7)").text                      # "42"
    sandbox.run("echo hi > note; ls", "sh").text          # "note"

Each call has a box of its own: /usr and Python, read-only, and an empty /tmp. It is killed with all its
children when it is over, too slow or too loud, and when this process dies. docs/agents.md says what that is
worth.
"""

import contextlib
import marshal
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

RUNNER = Path(__file__).with_name("envs") / "box.py"  # waits in a box for the code, and becomes it
START_S, FIRST_UID = 30.0, 1 << 30  # a box is up, and down, within that time; users that own nothing
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
ALWAYS = """--as-pid-1 --die-with-parent --new-session --cap-drop ALL --unshare-ipc --unshare-pid
--unshare-net --unshare-uts --dev /dev --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib
--symlink usr/lib64 /lib64 --perms 0755 --dir /etc --ro-bind-try /etc/ld.so.cache /etc/ld.so.cache"""
FIX = """. Model-written code needs bubblewrap (apt install bubblewrap) and namespaces, which a container
may withhold. --unsafe-sandbox runs it as any program, with your files and network""".replace("\n", " ")

# Of the system call filter, by machine: AUDIT_ARCH; clone, socket; what it denies: new namespaces (unshare,
# setns), memory that no limit counts (memfd_create, memfd_secret, shmget, semget, msgget), and doors to the
# kernel that have been found open before (add_key, request_key, keyctl, ptrace, bpf, process_vm_readv and
# _writev, perf_event_open, userfaultfd, io_uring_setup). What needs a capability is out of reach anyway.
X86 = "56 41 272 308 319 447 29 64 68 248 249 250 101 321 310 311 298 323 425"
ARM = "220 198 97 268 279 447 194 190 186 217 218 219 117 280 270 271 241 282 425"
CALLS = {"x86_64": (0xC000003E, *map(int, X86.split())), "aarch64": (0xC00000B7, *map(int, ARM.split()))}
CLONE3, X32, AF_UNIX, NEW_NAMESPACES = 435, 0x40000000, 1, 0x7E020080  # the last: the flags CLONE_NEW*


class SandboxError(RuntimeError):
    """Code cannot be contained here, or a box did not start; the message says why and what to do."""


@dataclass
class Result:
    """What code printed (both streams), and its exit code: 128 + n for a signal, as a shell has it. `stopped`
    is why it was killed, if it was: "timeout" or "output" (too much)."""

    output: str
    exit_code: int
    stopped: str = ""

    @property
    def text(self) -> str:
        """For the model: the output, and how it ended if not well."""
        how = f"[stopped: {self.stopped}]" if self.stopped else f"[exit code {self.exit_code}]"
        return self.output.strip() if self.exit_code == 0 else f"{self.output.strip()}\n{how}".strip()


def system_call_filter() -> bytes:
    """The seccomp program that denies CALLS, and all sockets but Unix ones: AF_VSOCK reaches the host of a
    virtual machine from any network namespace. Raises SandboxError on other machines."""
    if (machine := os.uname().machine) not in CALLS:
        raise SandboxError(f"no system call filter for {machine}, only for {', '.join(CALLS)}")
    arch, clone, socket, *denied = CALLS[machine]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    values = 0x7FFF0000, 0x80000000, 0x50001, 0x50026  # EPERM, and ENOSYS: then libc turns to clone
    allow, kill, refuse, unknown = ((give, 0, 0, value) for value in values)
    program = [  # (code, instructions to skip if true, if false, value)
        (load, 0, 0, 4), (equal, 1, 0, arch), kill, (load, 0, 0, 0), (at_least, 0, 1, X32), kill,
        *(each for n in denied for each in ((equal, 0, 1, n), refuse)), (equal, 0, 1, CLONE3), unknown,
        (equal, 0, 4, clone), (load, 0, 0, 16), (any_bit, 0, 1, NEW_NAMESPACES), refuse, allow,
        (equal, 0, 3, socket), (load, 0, 0, 16), (equal, 1, 0, AF_UNIX), refuse, allow,
    ]  # fmt: skip
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def bubblewrap(packages, disk_mb: int, as_root: bool) -> list[str]:
    """The command that makes a box. Real root gets no user namespace, as no process limit holds for root in
    one: there the runner takes a user id of its own."""
    user = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if as_root else ["--unshare-user"]
    size = ["--perms", "1777", "--size", str(disk_mb << 20), "--tmpfs", "/tmp"]
    command = ["bwrap", *ALWAYS.split(), *user, *size, "--ro-bind", str(RUNNER), "/box.py"]
    for path in [path for path in (sys.base_prefix, *packages) if not f"{path}/".startswith("/usr/")]:
        for parent in reversed(Path(path).parents[:-1]):  # by itself bubblewrap would let root alone pass
            command += [] if str(parent) == "/tmp" else ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", path, path]
    return [*command, "--chdir", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/"]


class Box:
    """One box, for one call of `run`. It is up some 50 ms after it was made; `run` waits for that."""

    def __init__(self, owner: "Sandbox"):
        self.owner, (rules, feed) = owner, os.pipe()
        os.write(feed, owner.rules)
        os.close(feed)
        around = [*owner.bubblewrap, "--seccomp", str(rules)] if owner.bubblewrap else []
        python = [os.path.realpath(sys.executable), "-IBSuXutf8", "/box.py" if around else RUNNER]
        self.process = subprocess.Popen(
            [*around, *python], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            bufsize=0, pass_fds=[rules], env=ENVIRONMENT, cwd="/tmp", start_new_session=True,
        )  # fmt: skip
        os.close(rules)

    def read(self, until: float) -> bytes | None:
        """What it says next; nothing at the end; None where that takes until after this time."""
        poller = select.poll()
        poller.register(self.process.stdout, select.POLLIN)
        ready = poller.poll(max(until - time.monotonic(), 0) * 1000)
        return self.process.stdout.read(1 << 16) if ready else None

    def run(self, source: str, language: str) -> Result:
        if (said := self.read(time.monotonic() + START_S)) != b"up\n":
            raise SandboxError(f"a box did not start: {(said or b'').decode().strip()}{FIX}")
        until, output, stopped = time.monotonic() + self.owner.timeout_s, b"", ""
        uid = FIRST_UID + self.process.pid if self.owner.as_root else None  # the process limit counts by user
        task = self.owner.config | {"uid": uid, "source": source, "language": language}
        self.process.stdin.write(marshal.dumps(task))
        while not stopped and (chunk := self.read(until)) != b"":
            output += chunk or b""
            stopped = "timeout" if chunk is None else "output" * (len(output) > self.owner.output_bytes)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may have closed its output and go on
            self.process.wait(0 if stopped else max(until - time.monotonic(), 0))
        stopped = stopped or "timeout" * (self.process.poll() is None)
        self.kill()
        text = output[: self.owner.output_bytes].decode(errors="replace")
        return Result(text, self.process.returncode, stopped)

    def kill(self) -> None:
        """Ends what still runs and waits until all of it is gone: it falls with the first process inside, and
        bubblewrap outside ends after that."""
        at, children = self.process.pid, f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        if self.process.poll() is None:
            inside = Path(children).read_text().split() if self.owner.bubblewrap else []
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(int(inside[0]) if inside else -at, signal.SIGKILL)
        self.process.wait(START_S)
        self.process.stdin.close(), self.process.stdout.close()


class Sandbox:
    """Runs code in boxes with these limits, `warm` of them made ahead. Memory and CPU time are limited by
    process, all else by box. Of Python the code has the library alone, and folders of `packages`. Make it
    before the first episode: it tries a box, and raises SandboxError where that fails. A box ends with the
    thread that made it.

    `unsafe`, or INSTAR_UNSAFE_SANDBOX=1 (--unsafe-sandbox): no boxes; the code has your files and network.
    """

    def __init__(
        self, timeout_s: float = 5.0, memory_mb: int = 256, processes: int = 8, disk_mb: int = 16,
        output_kb: int = 16, packages: tuple[str, ...] = (), warm: int = 1, unsafe: bool = False,
    ):  # fmt: skip
        self.timeout_s, self.output_bytes, self.warm = timeout_s, output_kb << 10, warm
        self.boxes, self.rules, self.bubblewrap, self.as_root = {}, b"", [], False
        limits = {"AS": memory_mb << 20, "FSIZE": disk_mb << 20, "CPU": int(timeout_s) + 1, "NOFILE": 64}
        if unsafe or os.environ.get("INSTAR_UNSAFE_SANDBOX") == "1":
            print("WARNING: model-written code runs WITHOUT A SANDBOX, as you", file=sys.stderr, flush=True)
        elif shutil.which("bwrap", path=ENVIRONMENT["PATH"]):
            users = Path("/proc/self/uid_map").read_text().split()  # all there are, or those of a container
            self.as_root = os.geteuid() == 0 and users == ["0", "0", "4294967295"]
            self.rules, self.bubblewrap = system_call_filter(), bubblewrap(packages, disk_mb, self.as_root)
            limits["NPROC"] = processes + 2  # with bubblewrap's own
        else:
            raise SandboxError(f"there is no bwrap in {ENVIRONMENT['PATH']}{FIX}")
        self.config = {"limits": limits | {"CORE": 0, "MSGQUEUE": 0}, "packages": packages}
        if (tried := self.run("print(6 * 7)")).text != "42":
            raise SandboxError(f"a box does not work: {tried.text}{FIX}")

    def run(self, source: str, language: str = "python") -> Result:
        """Runs Python, or a shell script ("sh"), in /tmp of a new box. The next box is made meanwhile."""
        place = os.getpid(), threading.get_ident()  # a fork's parent has its own, and so has each thread
        boxes = self.boxes.setdefault(place, [])
        boxes[:] = [box for box in boxes if box.process.poll() is None]
        boxes += [Box(self) for _ in range(self.warm + 1 - len(boxes))]
        box = boxes.pop(0)
        try:
            return box.run(source, language)
        finally:
            box.kill()
