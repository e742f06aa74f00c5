"""Copies the blocks that all algorithms share from `algos/grpo.py` into the other files.

    python scripts/sync_shared.py            rewrites what differs, and says so
    python scripts/sync_shared.py --check    only says so; exit code 1 if anything differs

A block is whole functions or classes between `# [shared:NAME]` and `# [/shared:NAME]`. A file takes part with
the blocks that it has: drop a fence in your copy, and that block is yours.
"""

import re
import sys
from pathlib import Path

ALGOS = Path(__file__).parents[1] / "algos"
BLOCK = re.compile(r"^( *)# \[shared:(\w+)\]\n.*?^ *# \[/shared:\2\]\n", re.MULTILINE | re.DOTALL)


def synced(text: str, source: str) -> tuple[str, list[str]]:
    """`text` with the blocks of `source`, and the names of those that differed.

    Raises ValueError for a block that `source` does not have.
    """
    blocks = {match[2]: match[0] for match in BLOCK.finditer(source)}
    stale = []

    def replace(match: re.Match) -> str:
        if match[2] not in blocks:
            raise ValueError(f"block {match[2]} is not in grpo.py, which has {', '.join(blocks)}")
        if match[0] != blocks[match[2]]:
            stale.append(match[2])
        return blocks[match[2]]

    return BLOCK.sub(replace, text), stale


def main(check: bool) -> int:
    source, found = (ALGOS / "grpo.py").read_text(), 0
    for path in sorted(ALGOS.glob("*.py")):
        text, stale = synced(path.read_text(), source)
        if stale:
            found += 1
            print(f"{path.name}: {', '.join(stale)} {'differ' if check else 'updated'}")
            if not check:
                path.write_text(text)
    return int(check and found > 0)


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
