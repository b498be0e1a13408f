"""Loads beside their floors and beside other loaders: seconds, CPU, bytes, memory, on models and layouts of all kinds.

    make bench                                                     # among the other benchmarks
    OMP_NUM_THREADS=1 python benchmarks/load.py --minutes 12 --json load.json --table docs/benchmarks.md --png load.png
    OMP_NUM_THREADS=1 python benchmarks/load.py --short             # tiny models: that everything runs, not how fast
    OMP_NUM_THREADS=1 python benchmarks/load.py --only "dense, dim 0, 4 ranks, warm"

A *peer* is a way to load (``benchmarks/peers``), a *case* a model and a layout, a *cell* a case with warm or cold files.
Fresh processes for every run, all peers of a cell in turn, minima compared. The contracts come last; the exit status is 1
if one is broken. Every peer's shards are compared with ours, bit by bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import transformers
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from benchmarks.loading.contracts import contracts
from benchmarks.loading.report import as_json, as_table, contract_lines, draw, huge_pages_on
from benchmarks.loading.rounds import Rounds, cells, measure
from benchmarks.peers import ON_CPU
from tests.harness.page_cache import drops_pages


def main() -> None:
    """Measure, write, print the contracts."""
    args = _arguments()
    # Imported here, so that no run imports them: a name of transformers is imported when it is used.
    _ = transformers.Qwen3ForCausalLM, transformers.Qwen3MoeForCausalLM
    # A table of transformers, which the first load of a process makes (50 ms), by any peer that converts.
    get_checkpoint_conversion_mapping("llama")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # Ranks are forks: a collection in one would copy every page that holds an object of this process.
    gc.collect()
    gc.freeze()
    started = time.monotonic()
    root = tempfile.mkdtemp(prefix="shardwise-bench-", dir=args.directory)
    try:
        cold = drops_pages(Path(root))
        every = cells(root, short=args.short, cold=cold)
        chosen = [cell for cell in every if all(text in cell.title for text in args.only)]
        if not chosen:
            raise SystemExit(f"no cell has {args.only} in its title")
        if args.peers:
            chosen = [replace(cell, peers=tuple({"ours": 0} | dict.fromkeys(args.peers))) for cell in chosen]
        measured = measure(chosen, _rounds(args), short=args.short)
        judged = contracts(measured, huge_pages=huge_pages_on(), speed=not args.short)
        seconds = time.monotonic() - started
        found = as_json(measured, judged, seconds)
        table = as_table(measured, judged, seconds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if not cold:
        print(
            f"not measured: cold loads; files in {args.directory or tempfile.gettempdir()} are always cached"
        )
    if not huge_pages_on():
        print("the kernel's huge pages are off: a load may take 1.1 times the plain floor, not 0.85")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))
    if args.table:
        Path(args.table).write_text(table)
    if args.png:
        print(draw(measured, args.png))
    if not (args.json or args.table):
        print(table)
    print("\n".join(contract_lines(judged)))
    sys.exit(any(contract.verdict == "BROKEN" for contract in judged))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=12, help="of which slow peers get what is left")
    parser.add_argument("--rounds", type=int, help="at most; 9, and 2 in the short form")
    parser.add_argument("--short", action="store_true", help="tiny models, no contracts on seconds")
    parser.add_argument("--only", nargs="+", default=[], help="cells with these texts in their title")
    parser.add_argument("--peers", nargs="+", choices=ON_CPU, help="default: those of each cell")
    parser.add_argument("--directory", help="for the models, on the disk to be measured")
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--table", metavar="PATH", help="Markdown")
    parser.add_argument("--png", metavar="PATH")
    return parser.parse_args()


def _rounds(args: argparse.Namespace) -> Rounds:
    if args.short:
        return Rounds(args.rounds or 2, least=1, seconds=0)
    return Rounds(args.rounds or 9, least=1, seconds=args.minutes * 60)


if __name__ == "__main__":
    main()
