"""The program that waits in a box of `common/sandbox.py` and becomes the code that it gets.

It stands alone: a box has Python's own library and nothing of this repository but this file. It imports
little, since starting Python is most of what a call costs: `site` and `json` would double it.
"""

import builtins
import marshal
import os
import resource
import sys


def become(source: str, language: str, uid: int | None, limits: dict[str, int], packages: list[str]) -> None:
    """Runs Python, or a shell script ("sh"), as user `uid` or as it is. Limits are named less RLIMIT_."""
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    if language == "sh":
        os.execv("/bin/sh", ["sh", "-c", source])
    sys.path += packages
    sys.excepthook = show
    builtins.exit = builtins.quit = sys.exit  # as `site` has them
    exec(compile(source, "<code>", "exec"), {"__name__": "__main__"})


def show(kind, error, at) -> None:
    """Prints an error with the traceback from the code on, without what called it."""
    import traceback

    while at and at.tb_frame.f_code.co_filename != "<code>":
        at = at.tb_next
    traceback.print_exception(error.with_traceback(at))


if __name__ == "__main__":
    os.write(1, b"up\n")
    task = marshal.load(sys.stdin.buffer)
    # This is the first process of the box; a child becomes the code. With this one ends all that the code has
    # left running, and bubblewrap outside, which waits for this one, ends after that.
    child = os.fork()
    if child == 0:
        become(**task)
    else:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
