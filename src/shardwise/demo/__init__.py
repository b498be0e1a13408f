"""The whole story on real weights: load sharded, train, crash in a save, resume on more ranks, export, use.

::

    run.py        the story: prepare → train and crash → resume and export → read → report
    train.py      one training worker, as a user would write it        crash.py   kill -9 in the middle of a save
    data.py       text pairs, and batches in an order that no number of ranks changes
    embed.py      plain transformers: embeds, measures retrieval; knows nothing of shardwise
    prepare.py    checks and declarations before anything starts
    processes.py  torchrun and the reader as child processes           memory.py  anonymous memory of this process
    summary.py    report, table, loss curve
"""
