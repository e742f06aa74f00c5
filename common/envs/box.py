"""The program that waits in a box of `common/sandbox.py` and becomes the code that it gets.

It stands alone: a box has Python's own library and nothing of this repository but this file.
"""

import json
import os
import resource
import sys
import traceback


def become(source: str, language: str, uid: int | None, limits: dict[str, int], packages: list[str]) -> None:
    """Runs Python, or a shell script ("sh"), as user `uid` or as it is. `limits` are by name, less RLIMIT_."""
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
    sys.excepthook = lambda kind, error, at: traceback.print_exception(error.with_traceback(skip(at)))
    exec(compile(source, "<code>", "exec"), {"__name__": "__main__"})


def skip(at):
    """A traceback from the code on, without what called it."""
    while at and at.tb_frame.f_code.co_filename != "<code>":
        at = at.tb_next
    return at


if __name__ == "__main__":
    os.write(1, b"up\n")
    become(**json.loads(sys.stdin.readline()))
