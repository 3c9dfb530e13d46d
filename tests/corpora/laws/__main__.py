"""Records every training of the corpus as a user would, and counts what `otel-torch show` names.

    python -m tests.corpora.laws [REGEX] [--json FILE] [--watch] [--keep FOLDER]

`--watch` records nothing: it proves with hooks that each program has its defect, and no other.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path

from tests.corpora.laws.exam import PROGRAMS, named_laws, watched_laws


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m tests.corpora.laws")
    arguments.add_argument("regex", nargs="?", default="", help="of module, program, law")
    arguments.add_argument("--json", type=Path, help="write what was named to this file")
    arguments.add_argument("--watch", action="store_true", help="check the programs themselves")
    arguments.add_argument("--keep", type=Path, help="folder that keeps the recordings")
    options = arguments.parse_args()
    look = watched_laws if options.watch else named_laws
    folder = options.keep or Path(tempfile.mkdtemp())
    rows, began = [], time.monotonic()
    for program in PROGRAMS.values():
        module = program.module.rpartition(".")[2]
        if not re.search(options.regex, f"{module} {program.name} {program.law}"):
            continue
        place, start = folder / program.name, time.monotonic()
        place.mkdir(parents=True, exist_ok=True)
        try:
            named, failure = look(program, place), ""
        except Exception as error:
            named, failure = {}, f"{type(error).__name__}: {error}"
        verdict = "failed" if failure else program.verdict(named)
        row = {
            "program": program.name, "expected": program.law, "named": named, "verdict": verdict,
            "failure": failure, "seconds": round(time.monotonic() - start, 2),
        }  # fmt: skip
        rows.append(row)
        print(
            f"{verdict:8} {program.law or '-':26} {program.name:48} {', '.join(named) or '-'}"
            f"  {row['seconds']} s  {failure[-300:]}",
            flush=True,
        )
    broken = [row["verdict"] for row in rows if row["expected"]]
    fine = [row["verdict"] for row in rows if not row["expected"]]
    print(
        f"broken: {broken.count('right')} of {len(broken)} right, {broken.count('wrong')} wrong, "
        f"{broken.count('nothing')} nothing; healthy: {fine.count('silent')} of {len(fine)} silent; "
        f"{(broken + fine).count('failed')} failed; {time.monotonic() - began:.0f} s"
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
