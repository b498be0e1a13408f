"""What a save costs as ranks grow: planning of a rank, messages, rank 0's decision, the manifest, and agreements on the store.

    OMP_NUM_THREADS=1 python benchmarks/scale.py                     # 64, 256, 1,024 and 4,096 ranks, 100,000 tensors
    OMP_NUM_THREADS=1 python benchmarks/scale.py --only store        # agreements on a real TCPStore
    OMP_NUM_THREADS=1 python benchmarks/scale.py --only messages

*Messages*: one process plays the ranks of a save one after another on the model of ``metadata.py``. One of them plans: all that a
rank works out before payload moves. Then each makes the record that
it would send after writing (checksums' digits and sums are stand-ins), and the code of the save merges them in the tree of
ranks, as they would. Counted are the bytes that rank 0 receives, those of the rank that receives most, and those of all ranks
together, which all pass the store; beside them what rank 0 would receive if each rank sent it all of its sums. Then rank 0's
part: merging, the manifest, its text, and a reader's check of it.

*Store*: :mod:`scale_store`. ``--tensors`` numbers travel up the tree in a round of sums. The exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.metadata import (
    collected_of,
    decision,
    make_state,
    plan_save,
    ranks_not_there,
    records_of_all,
    timed,
)
from benchmarks.scale_store import measured_apart
from shardwise.checkpoint.save import merged_records
from shardwise.format.manifest import parse_manifest
from shardwise.objects import gc_paused
from shardwise.ranks.protocol import packed_message as pack
from shardwise.ranks.protocol import ranks_below, unpack

RANKS = (64, 256, 1024, 4096)
#: The rank that plans. It holds a part of each tensor; where there are more ranks than rows, later ones hold nothing of most.
PLAYED = 1
#: The most that a figure may be.
GOALS = {
    "planning, CPU s": 2.0,
    "planning, MiB": 500,
    "rank 0 receives, MB": 50,
    "rank 0's decision, CPU s": 5.0,
    "manifest, MB": 20,
    "agree, store s": 1.0,
    "gather, store s": 1.0,
}
MEBI = 2**20


# ----------------------------------------------------------------------------------------------------
# Messages of a save


def measure_messages(params: int, ranks: int, mesh: str, repeats: int) -> dict[str, Any]:
    """Planning of one rank, all records merged in the tree, and rank 0's decision; in a process of its own."""
    with ranks_not_there(ranks, PLAYED):
        state = make_state(params, ranks, mesh)
        seconds, before = [], begin_peak()
        snapshot, headers = plan_save(state, PLAYED)
        plan_bytes = peak_bytes() - before
        for _ in range(repeats):
            del snapshot, headers
            gc.collect()
            begun = time.process_time()
            snapshot, headers = plan_save(state, PLAYED)
            seconds.append(time.process_time() - begun)
        collected = collected_of(snapshot)
        records = records_of_all(collected, ranks, max(len(h) for _, h in headers))
        sums = sum(v.counted for part in snapshot.parts for v in part.live)
        first, received, sent, merge_s = merged_up(records, ranks)
    before = begin_peak()
    decide_s, text = timed(lambda: decided(collected, ranks, first), 1)
    return {
        "tensors": sum(len(part.live) for part in snapshot.parts),
        "planning, CPU s": round(min(seconds), 2),
        "planning, MiB": round(plan_bytes / MEBI),
        "rank 0 receives, MB": round(received[0] / 1e6, 1),
        "most that a rank receives, MB": round(max(received) / 1e6, 1),
        "through the store, MB": round(sent / 1e6),
        "without the tree rank 0 receives, MB": round((8 * sums * ranks + received[0] - 8 * sums * 16) / 1e6),
        "merging on the slowest rank, CPU s": round(merge_s, 2),
        "rank 0's decision, CPU s": round(decide_s, 2),
        "rank 0's decision, MiB": round((peak_bytes() - before) / MEBI),
        "manifest, MB": round(len(text) / 1e6, 2),
    }


def merged_up(records: Any, ranks: int) -> tuple[list[bytes], list[int], int, float]:
    """Carry the ranks' records up the tree: rank 0's payloads, the bytes each rank receives, all bytes, the slowest merge."""
    waiting: dict[int, bytes] = {}
    received, sent, slowest = [0] * ranks, 0, 0.0
    for rank in reversed(range(ranks)):  # below before above
        payloads = [pack(records(rank)), *(waiting.pop(r) for r in ranks_below(rank, ranks))]
        received[rank] = sum(map(len, payloads[1:]))
        if rank == 0:
            return payloads, received, sent, slowest
        begun = time.process_time()
        if len(payloads) > 1:
            waiting[rank] = pack(merged_records([unpack(p) for p in payloads]))
            slowest = max(slowest, time.process_time() - begun)
        else:
            waiting[rank] = payloads[0]
        sent += len(waiting[rank])
    raise AssertionError("there is no rank 0")


@gc_paused()  # as where ranks agree on a save
def decided(collected: Any, ranks: int, payloads: list[bytes]) -> str:
    """What rank 0 does with the payloads that it receives, until it writes the manifest."""
    manifest = decision(collected, ranks, merged_records([unpack(p) for p in payloads]))
    text = manifest.to_text()
    parse_manifest(text.encode(), "manifest.json")  # a reader's own code takes it, before it is published
    return text


def begin_peak() -> int:
    """Let the system count this process's peak of memory from now on. Returns the bytes that it has now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


# ----------------------------------------------------------------------------------------------------
# The table


def played_apart(params: int, ranks: int, mesh: str, repeats: int) -> dict[str, Any]:
    """:func:`measure_messages` in a process of its own."""
    words = ("--played", str(ranks), "--params", str(params), "--mesh", mesh, "--repeats", str(repeats))
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def table(rows: dict[int, dict[str, Any]]) -> str:
    """The figures by number of ranks, as Markdown; those past their goal in bold."""
    names = dict.fromkeys(name for row in rows.values() for name in row)
    lines = ["| ranks | " + " | ".join(f"{n:,}" for n in rows) + " | goal |", "|---" * (len(rows) + 2) + "|"]
    for name in names:
        cells = [f"**{row[name]}**" if name in missed(row) else str(row[name]) for row in rows.values()]
        lines.append(f"| {name} | {' | '.join(cells)} | {GOALS.get(name, '')} |")
    return "\n".join(lines)


def missed(row: dict[str, Any]) -> list[str]:
    """The figures that are past their goal."""
    return [name for name, most in GOALS.items() if row.get(name, 0) > most]


def main() -> None:
    """Measure and print; exit status 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--params", type=int, default=33_400, help="in steps of 200; three tensors each")
    parser.add_argument("--mesh", default="1-D", help="of benchmarks/metadata.py")
    parser.add_argument("--repeats", type=int, default=3, help="of a rank's planning; the least counts")
    parser.add_argument("--tensors", type=int, default=0, help="numbers that a rank sends in a round of sums")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--only", choices=("messages", "store"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--played", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.played:
        print(json.dumps(measure_messages(args.params, args.played, args.mesh, args.repeats)))
        return
    rows: dict[int, dict[str, Any]] = {}
    for ranks in args.ranks:
        row = rows[ranks] = {}
        if args.only != "store":
            row |= played_apart(args.params, ranks, args.mesh, args.repeats)
        if args.only != "messages":
            row |= measured_apart(ranks, args.tensors, args.rounds, args.processes)
        print(ranks, json.dumps(row), file=sys.stderr, flush=True)
    print(json.dumps(rows) if args.json else table(rows))
    sys.exit(any(missed(row) for row in rows.values()))


if __name__ == "__main__":
    main()
