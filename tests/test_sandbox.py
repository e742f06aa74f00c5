"""Escapes that model-written code may try, each of them tried; and that nothing stays behind."""

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from common import sandbox as module
from common.checks import FlagError, check_env
from common.env import EnvFlags
from common.sandbox import Sandbox, SandboxError

ROOT = Path(__file__).parents[1]
KEY = "INSTAR_TEST_SECRET"


def made(**limits) -> Sandbox:
    """A sandbox. Skips, saying why, where bubblewrap makes no namespaces either; where it does, an error of
    ours is a failure."""
    try:
        return Sandbox(**limits)
    except SandboxError as error:
        plain = ["bwrap", "--ro-bind", "/", "/", "--unshare-pid", "--unshare-net", "true"]
        if shutil.which("bwrap") and subprocess.run(plain, timeout=60).returncode == 0:
            raise
        pytest.skip(f"no sandbox on this machine: {error}")


@pytest.fixture(scope="module")
def box():
    """A sandbox with a secret in the environment around it."""
    os.environ[KEY] = "hunter2"
    sandbox = made(timeout_s=60)  # so that a slow machine is no finding
    yield sandbox
    del os.environ[KEY]
    for each in sandbox.boxes[os.getpid(), threading.get_ident()]:
        each.kill()


@contextlib.contextmanager
def short(**limits):
    """A sandbox of its own with these limits, and nothing of it afterwards."""
    sandbox = made(**limits)
    try:
        yield sandbox
    finally:
        for each in sandbox.boxes[os.getpid(), threading.get_ident()]:
            each.kill()


def say(sandbox: Sandbox, code: str) -> str:
    """What the code prints; an error in it is the test's."""
    result = sandbox.run(textwrap.dedent(code))
    assert result.exit_code == 0, result.text
    return result.text


def mine() -> dict[int, str]:
    """Processes whose chain of parents leads to this one, and how each was called."""
    parents, names = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (path / "stat").read_text()
            parents[int(path.name)] = int(stat.rpartition(")")[2].split()[1])
            names[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
    found = {os.getpid()}
    for _ in range(8):
        found |= {pid for pid, parent in parents.items() if parent in found}
    return {pid: names[pid] for pid in found - {os.getpid()}}


def with_argument(text: str) -> list[int]:
    """All processes of this machine that have `text` in their command line, wherever they hang."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text in (path / "cmdline").read_text():
                found.append(int(path.name))
    return found


# --- What code is for


def test_code_runs_and_says_how_it_ended(box):
    assert box.run("import math\nprint(math.factorial(20))").text == "2432902008176640000"
    assert box.run("print('a')\nraise SystemExit(3)").text == "a\n[exit code 3]"
    wrong = box.run("def f():\n    return 1 / 0\nf()")
    assert wrong.exit_code == 1 and "line 2, in f" in wrong.text and "ZeroDivisionError" in wrong.text
    assert "box.py" not in wrong.text
    syntax = box.run("print(1)\nprint(")
    assert syntax.exit_code == 1 and 'File "<code>", line 2' in syntax.text and "box.py" not in syntax.text
    assert box.run("echo hi > note; cat note; ls", "sh").text == "hi\nnote"
    assert box.run("kill -9 $$", "sh").text == "[exit code 137]"
    assert box.run("").text == ""
    assert box.run("print('\\u00e4\\u2713')").text == "\u00e4\u2713"
    assert box.run("x = '\\ud800'\nprint(len(x))").text == "1"
    assert box.run("\ud800").exit_code == 1
    long = "x = 1\n" * 100_000  # more than a pipe holds
    assert box.run(long + "print(x)").text == "1"
    assert box.run("import sys\nprint(repr(sys.stdin.read()))").text == "''"


def test_boxes_share_nothing(box):
    assert say(box, "open('a', 'w').write('1')\nimport os\nprint(os.listdir('.'))") == "['a']"
    assert say(box, "import os\nprint(os.listdir('.'), os.listdir('/tmp'))") == "[] []"


def test_packages_can_be_lent_read_only(tmp_path):
    (tmp_path / "lent").mkdir()
    (tmp_path / "lent" / "abacus.py").write_text("beads = 7\n")
    with short(timeout_s=60, packages=(str(tmp_path / "lent"),)) as sandbox:
        assert say(sandbox, "import abacus\nprint(abacus.beads)") == "7"
        assert "Read-only file system" in sandbox.run(f"open({str(tmp_path / 'lent' / 'x')!r}, 'w')").text
    assert [path.name for path in (tmp_path / "lent").iterdir()] == ["abacus.py"]


# --- Escapes


def test_environment_and_descriptors(box):
    shown = say(box, "import os\nprint(dict(os.environ))")
    assert KEY not in shown and "hunter2" not in shown
    assert set(eval(shown)) <= {"PATH", "HOME", "LANG", "PWD", "LC_CTYPE"}
    secret = tempfile.TemporaryFile()  # noqa: SIM115  open while the box is made
    os.set_inheritable(secret.fileno(), True)  # as careless libraries do
    code = """
        import os, stat
        kinds = []
        for fd in range(64):
            try:
                kinds.append((fd, stat.S_IFMT(os.fstat(fd).st_mode) == stat.S_IFREG))
            except OSError:
                pass
        print([fd for fd, regular in kinds if regular and fd > 2], os.getppid(), os.getpid())
    """
    with short(timeout_s=60) as sandbox:
        files, parent, own = say(sandbox, code).rsplit(" ", 2)
    assert files == "[]" and int(parent) <= 1 and int(own) < 9, "its process numbers are its own"


def test_network(box):
    listener = socket.create_server(("127.0.0.1", 0))
    named = socket.socket(socket.AF_UNIX)
    named.bind("\0instar-test-" + str(os.getpid()))  # abstract: reached by name, through no folder
    named.listen()
    for family in ("AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG"):
        text = box.run(f"import socket\nsocket.socket(socket.{family}, socket.SOCK_DGRAM)").text
        assert "Operation not permitted" in text, family
    text = box.run(
        f"import socket\nsocket.create_connection(('127.0.0.1', {listener.getsockname()[1]}), 2)"
    ).text
    assert "Operation not permitted" in text
    name = f"\\0instar-test-{os.getpid()}"
    assert (
        "Connection refused"
        in box.run(f"import socket\nsocket.socket(socket.AF_UNIX).connect('{name}')").text
    )
    pair = "import socket\na, b = socket.socketpair()\na.send(b'x')\nprint(b.recv(1))"
    assert say(box, pair) == "b'x'", "what asyncio needs still works"
    listener.close(), named.close()


def test_the_network_is_gone_without_the_filter_too(box):
    """Two walls: with the filter left out, the namespace has no way out either."""
    listener = socket.create_server(("127.0.0.1", 0))
    with short(timeout_s=60) as sandbox:
        for each in sandbox.boxes[os.getpid(), threading.get_ident()]:
            each.kill()
        sandbox.boxes.clear()
        sandbox.rules = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)  # allows all
        code = "import socket\nsocket.create_connection(('{}', {}), 2)"
        here = sandbox.run(code.format("127.0.0.1", listener.getsockname()[1])).text
        there = sandbox.run(code.format("192.0.2.1", 80)).text  # an address for documentation, nobody's
    listener.close()
    assert "ConnectionRefusedError" in here or "unreachable" in here
    assert "unreachable" in there


def test_files_of_the_host(box, tmp_path):
    (tmp_path / "secret").write_text("hunter2")
    places = [str(tmp_path / "secret"), str(Path(__file__)), str(ROOT), "/etc/passwd", "/etc/shadow", "/home", "/proc/1/environ", "/sys/class", "/var/log", "/run", "/dev/sda", "/dev/mem", "/dev/kmsg"]  # fmt: skip
    seen = say(box, f"import os\nprint([path for path in {places!r} if os.path.exists(path)])")
    assert seen == "[]"
    code = f"""
        import os
        wrong = []
        for path in ("/", "/usr", "/usr/bin", "/dev", "/dev/shm", "/etc", {sys.base_prefix!r}, "/box.py"):
            try:
                file = path if path.endswith(".py") else os.path.join(path, "x")
                open(file, "a").close()
                wrong.append(path)
            except OSError:
                pass
        print(wrong, os.getuid() == 0, os.statvfs("/tmp").f_blocks * os.statvfs("/tmp").f_frsize)
    """
    assert say(box, code) == f"[] False {16 << 20}" or os.geteuid() != 0
    assert say(box, code).startswith("[]")
    assert (tmp_path / "secret").read_text() == "hunter2"


def test_a_symlink_leads_nowhere(box, tmp_path):
    (tmp_path / "secret").write_text("hunter2")
    code = f"""
        import os
        for number, path in enumerate([{str(tmp_path / "secret")!r}, "/etc/passwd", "/proc/self/root/etc/passwd", "../../../../etc/passwd"]):
            os.symlink(path, f"/tmp/link{{number}}")
            print(os.path.exists(f"/tmp/link{{number}}"))
        os.symlink({str(tmp_path)!r}, "/tmp/folder")
        try:
            open("/tmp/folder/new", "w")
        except OSError as error:
            print(type(error).__name__)
    """
    assert say(box, code).split() == ["False"] * 4 + ["FileNotFoundError"]
    assert os.listdir(tmp_path) == ["secret"]


def test_fork_bomb(box):
    bomb = """
        import os, time
        alive = 0
        while True:
            try:
                if os.fork() == 0:
                    time.sleep(60)
                alive += 1
            except OSError:
                break
        print(alive, flush=True)
    """
    assert 1 <= int(say(box, bomb)) <= 10
    with short(timeout_s=2) as sandbox:
        loop = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
        assert sandbox.run(loop).stopped == "timeout"
        sandbox.run(":(){ :|:& };:\nsleep 1", "sh")
        assert sandbox.run("print('well')").text == "well"
    assert say(box, "print('well')") == "well"
    assert len(mine()) < 20


def test_threads_count_as_processes(box):
    code = """
        import threading, time
        started = 0
        try:
            while True:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                started += 1
        except RuntimeError:
            print(started, flush=True)
    """
    assert 1 <= int(say(box, code)) <= 10


def test_memory(box):
    assert box.run("x = bytearray(1 << 30)").text.endswith("MemoryError\n[exit code 1]")
    assert say(box, "x = bytearray(64 << 20)\nprint(len(x))") == str(64 << 20)
    growing = box.run("x = []\nwhile True:\n    x.append(bytearray(1 << 20))")
    assert growing.exit_code != 0 and not growing.stopped
    code = """
        import ctypes, os
        tried = []
        libc = ctypes.CDLL(None, use_errno=True)
        tried.append(libc.memfd_create(b"x", 0))
        tried.append(libc.shmget(0, 1 << 30, 0o1600))
        print(tried, ctypes.get_errno())
    """
    assert say(box, code) == "[-1, -1] 1", "memory that is no process's: a limit by process does not count it"


def test_disk_fill(box):
    code = """
        import os
        written, number = 0, 0
        try:
            while True:
                with open(f"/tmp/{number}", "wb", buffering=0) as file:
                    written += file.write(bytes(1 << 20))
                number += 1
        except OSError as error:
            print(written >> 20, error.strerror)
        for path in ("/x", "/dev/shm/x", "/usr/x"):
            try:
                open(path, "w")
                print(path)
            except OSError:
                pass
    """
    written, reason = say(box, code).split(" ", 1)
    assert 14 <= int(written) <= 16 and reason == "No space left on device"
    assert "File too large" in box.run("open('a', 'wb').truncate(1 << 30)").text


def test_output_flood(box):
    for code in ("while True: print('x' * 1000)", "import sys\nwhile True: sys.stderr.write('x' * 1000)"):
        result = box.run(code)
        assert result.stopped == "output" and len(result.output) == 16 << 10
        assert result.text.endswith("[stopped: output]")
    quiet = "import os, time\nos.close(1), os.close(2)\ntime.sleep(60)"
    with short(timeout_s=1) as sandbox:
        assert sandbox.run(quiet).stopped == "timeout", "closing the output does not hide that it still runs"


def test_long_sleep_and_endless_loop():
    with short(timeout_s=1) as sandbox:
        for code in ("import time\ntime.sleep(600)", "while True: pass", "import signal\nsignal.pause()"):
            result = sandbox.run("print('first')\n" + code)
            assert result.stopped == "timeout" and result.text == "first\n[stopped: timeout]"
        stubborn = "import signal\nfor n in (1, 2, 3, 13, 14, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: pass"
        assert sandbox.run(stubborn).stopped == "timeout"


def test_orphans_die_with_their_box(box):
    name = f"instar-orphan-{os.getpid()}"
    code = f"""
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for fd in (0, 1, 2):
                    os.close(fd)
                os.execv({json.dumps("/bin/sh")}, ["sh", "-c", "sleep 600; : {name}"])
            os._exit(0)
        time.sleep(0.3)
        print("gone")
    """
    for _ in range(5):
        assert say(box, code) == "gone"
        assert with_argument(name) == [], "all of it is gone when the call returns"
    with short(timeout_s=2) as sandbox:
        assert sandbox.run(textwrap.dedent(code) + "time.sleep(600)").stopped == "timeout"
        assert with_argument(name) == []


def test_signals_reach_nobody_outside(box):
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        code = f"""
            import os, signal
            for pid in (os.getppid(), 1, {os.getpid()}, {os.getppid()}, -1):
                for number in (signal.SIGUSR1, signal.SIGKILL):
                    if pid != -1 or number != signal.SIGKILL:
                        try:
                            os.kill(pid, number)
                        except OSError:
                            pass
        """
        box.run(textwrap.dedent(code))
        box.run("import os\nos.kill(-1, 9)")
        box.run("import os\nos.killpg(os.getpgid(0), 9)")
        box.run("import os\nos.kill(os.getppid(), 9)")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [] and say(box, "print('well')") == "well"


def test_no_new_namespaces_privileges_or_tracing(box):
    code = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        NEWUSER, NEWNET = 0x10000000, 0x40000000
        tried = {}
        tried["unshare"] = libc.unshare(NEWUSER)
        tried["clone"] = libc.syscall({clone}, NEWUSER | 17, 0, 0, 0, 0)
        tried["clone3"] = libc.syscall(435, 0, 0)
        tried["mount"] = libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)
        tried["ptrace"] = libc.ptrace(0, 0, 0, 0)
        tried["chroot"] = libc.chroot(b"/tmp")
        tried["io_uring"] = libc.syscall(425, 8, 0)
        tried["setuid"] = libc.setuid(0) if os.getuid() else -1
        print([name for name, result in tried.items() if result != -1], libc.prctl(39, 0, 0, 0, 0))
    """
    clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    assert say(box, code.replace("{clone}", str(clone))) == "[] 1"  # PR_GET_NO_NEW_PRIVS


def test_the_filter_lets_through_and_denies_as_its_table_says():
    """The program is run by hand, on the registers of a call."""
    program = list(struct.iter_unpack("HBBI", module.system_call_filter()))
    arch, clone, network = {"x86_64": (0xC000003E, 56, 41), "aarch64": (0xC00000B7, 220, 198)}[
        os.uname().machine
    ]

    def verdict(number: int, argument: int = 0, arch: int = arch) -> int:
        data, at, register = {0: number, 4: arch, 16: argument}, 0, 0
        while True:
            code, if_true, if_false, value = program[at]
            if code == 0x06:
                return value
            if code == 0x20:
                register = data[value]
                at += 1
            else:
                true = {0x15: register == value, 0x35: register >= value, 0x45: register & value}[code]
                at += 1 + (if_true if true else if_false)

    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x50001
    assert verdict(network, 1) == allow and {verdict(network, family) for family in range(2, 46)} == {refuse}
    assert verdict(clone, 17) == allow and verdict(clone, 0x3D0F00) == allow  # fork, a thread
    spaces = [0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000]
    assert {verdict(clone, 17 | space) for space in spaces} == {refuse}
    assert verdict(435) == 0x50000 + 38, "ENOSYS: libc takes clone, whose flags can be seen"
    assert verdict(0, arch=0x40000003) == kill and verdict(0x40000000 + 1) == kill  # i386, x32
    numbers = {n for n in range(1000) if verdict(n) == refuse} - {clone, network}
    x86 = {272, 308, 319, 447, 29, 64, 68, 248, 249, 250, 101, 321, 310, 311, 298, 323, 425}
    arm = {97, 268, 279, 447, 194, 190, 186, 217, 218, 219, 117, 280, 270, 271, 241, 282, 425}
    assert numbers == {"x86_64": x86, "aarch64": arm}[os.uname().machine]


# --- Nothing stays behind


def state() -> tuple:
    temporary = {name for name in os.listdir(tempfile.gettempdir()) if not name.startswith("pytest")}
    mounts = Path("/proc/self/mounts").read_text()
    return len(os.listdir("/proc/self/fd")), temporary, mounts, threading.active_count()


def test_a_thousand_executions_leave_nothing_behind():
    codes = [
        ("print(1)", "python"), ("open('a', 'w').write('x' * 1000)", "python"), ("1 / 0", "python"),
        ("sleep 600 & echo 1", "sh"), ("import os\nos.fork()", "python"),
    ]  # fmt: skip
    with short() as sandbox:
        pass
    before, processes = state(), len(mine())
    with short(warm=2, timeout_s=60) as sandbox:
        for number in range(1000):
            code, language = codes[number % len(codes)]
            assert sandbox.run(code, language).exit_code == (number % len(codes) == 2)
    fds, temporary, mounts, threads = state()
    assert (fds, mounts, threads) == (before[0], before[2], before[3]) and len(mine()) == processes
    assert not {name for name in temporary - before[1] if "instar" in name}


def test_boxes_die_with_their_process():
    name = f"instar-parent-{os.getpid()}"
    program = f"""
        import os, sys, threading
        sys.path.insert(0, {str(ROOT)!r})
        from common.sandbox import Sandbox
        sandbox = Sandbox(timeout_s=600)
        threading.Thread(target=sandbox.run, args=("sleep 600; : {name}", "sh")).start()
        print("up", flush=True)
    """
    with short():
        pass
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"up\n"
    wait_for(lambda: with_argument(f": {name}"))
    child.kill(), child.wait(), child.stdout.close()
    wait_for(lambda: not with_argument(f": {name}"))


def wait_for(condition, seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def test_a_fork_makes_boxes_of_its_own(box):
    say(box, "print(1)")
    ahead = [each.process.pid for each in box.boxes[os.getpid(), threading.get_ident()]]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # what is raised here must not reach pytest's copy
        with contextlib.suppress(BaseException):
            text = box.run("print('child')").text
            used = {each.process.pid for each in box.boxes[os.getpid(), threading.get_ident()]} & set(ahead)
            os.write(writing, f"{text} {len(used)}".encode())
            for each in box.boxes[os.getpid(), threading.get_ident()]:
                each.kill()
        os._exit(0)
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0 and os.read(reading, 100) == b"child 0"
    os.close(reading)
    assert [each.process.pid for each in box.boxes[os.getpid(), threading.get_ident()]] == ahead
    assert say(box, "print('parent')") == "parent"


def test_boxes_that_ended_with_their_thread_are_replaced():
    with short(timeout_s=60) as sandbox:
        thread = threading.Thread(target=sandbox.run, args=("print(1)",))
        thread.start(), thread.join()
        time.sleep(0.5)
        assert [sandbox.run("print(2)").text for _ in range(3)] == ["2", "2", "2"]


# --- Where there is no sandbox


def test_without_bubblewrap_it_refuses(monkeypatch, tmp_path):
    monkeypatch.setattr(module.shutil, "which", lambda name, path=None: None)
    with pytest.raises(
        SandboxError, match=r"no bwrap in /usr/bin:/bin.*apt install bubblewrap.*--unsafe-sandbox"
    ):
        Sandbox()
    (tmp_path / "own.py").write_text(
        "from common.env import Env, Step\nfrom common.sandbox import Sandbox\n"
        "class Own(Env):\n    def tasks(self, split):\n        return [{}]\n"
        "    def reset(self, task):\n        self.sandbox = Sandbox()\n        return 'go'\n"
        "    def step(self, action):\n        return Step(1.0)\n"
    )
    with pytest.raises(FlagError, match=r"--env .*own.py:Own: .*no bwrap.*--unsafe-sandbox"):
        check_env("--env", f"{tmp_path}/own.py:Own", EnvFlags())


@pytest.mark.parametrize("bwrap, reason", [
    ("echo 'bwrap: Creating new namespace failed: Operation not permitted' >&2; exit 1", "Creating new namespace"),
    ("exit 0", "a box did not start"),
    ("echo up; read line; echo nonsense", "a box does not work: nonsense"),
])  # fmt: skip
def test_where_namespaces_are_withheld_it_refuses(monkeypatch, tmp_path, bwrap, reason):
    (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{bwrap}\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setitem(module.ENVIRONMENT, "PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=reason) as error:
        Sandbox()
    assert "--unsafe-sandbox" in str(error.value)


def test_other_machines_are_refused(monkeypatch):
    monkeypatch.setattr(module.os, "uname", lambda: type("Machine", (), {"machine": "riscv64"}))
    with pytest.raises(SandboxError, match="no system call filter for riscv64, only for x86_64, aarch64"):
        module.system_call_filter()


def test_the_flag_runs_it_all_the_same_and_says_so(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(module.shutil, "which", lambda name, path=None: None)
    monkeypatch.setenv("INSTAR_UNSAFE_SANDBOX", "0")
    (tmp_path / "own.py").write_text(
        "from common.env import Env, Step\nfrom common.sandbox import Sandbox\nSANDBOX = Sandbox()\n"
        "class Own(Env):\n    def tasks(self, split):\n        return [{}]\n"
        "    def reset(self, task):\n        return SANDBOX.run('print(6 * 7)').text\n"
        "    def step(self, action):\n        return Step(1.0)\n"
    )
    _, prompts = check_env("--env", f"{tmp_path}/own.py:Own", EnvFlags(unsafe_sandbox=True))
    assert prompts == ["42", "42"]
    assert "runs WITHOUT A SANDBOX" in capfd.readouterr().err
    sandbox = Sandbox(unsafe=True, timeout_s=1)
    assert sandbox.run("import time\ntime.sleep(600)").stopped == "timeout"
    assert sandbox.run("sleep 600", "sh").stopped == "timeout"
    for each in sandbox.boxes[os.getpid(), threading.get_ident()]:
        each.kill()


def test_it_works_for_a_plain_user_as_for_root(tmp_path):
    """As root: once more as nobody, who gets a user namespace instead of another user's id."""
    with short():
        pass
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if os.geteuid() != 0 or not python:
        pytest.skip("not root, or no Python that every user can reach: the other tests were a plain user's")
    folder = Path(tempfile.mkdtemp(prefix="instar-plain-"))
    try:
        (folder / "common" / "envs").mkdir(parents=True)
        for name in ("common/sandbox.py", "common/envs/box.py"):
            shutil.copy(ROOT / name, folder / name)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        program = """
            import os, sys
            from common.sandbox import Sandbox
            sandbox = Sandbox(timeout_s=60)
            print(sandbox.as_root, sandbox.run("import os\\nprint(os.listdir('/tmp'), 6 * 7)").text)
            print(sandbox.run("import os\\nn = 0\\ntry:\\n    while os.fork(): n += 1\\nexcept OSError: print(n < 12)").text)
            print(sandbox.run("import socket\\nsocket.socket()").text[-50:])
            print(sandbox.run("import ctypes\\nprint(ctypes.CDLL(None).unshare(0x10000000))").text)
        """
        done = subprocess.run(
            [python, "-c", textwrap.dedent(program)], cwd=folder, user=65534, group=65534, extra_groups=[],
            env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder)
    if "SandboxError: a box did not start" in done.stderr:
        pytest.skip(f"plain users get no namespaces on this machine: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "False [] 42" and "True" in lines and lines[-1] == "-1"
    assert "Operation not permitted" in done.stdout
