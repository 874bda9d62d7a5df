"""A model of stores that are deleted, moved, copied, mounted and damaged.

Two kinds of sequences of random acts take turns:

- ``sequences``: people delete, move, copy and mount a store between saves of several kinds of savers. Whatever happens between
  two saves, a save either creates a snapshot that a fresh process can load, or fails and says why.
- ``damage``: objects of each kind are removed, emptied, truncated, damaged and swapped before each verb, and put back after it.
  Nothing is lost that a live step needs, nobody reads wrong numbers, and errors name what is missing.

After each acknowledged save a process that has never seen the store loads the step and compares every byte. The model also knows
which saves have to succeed.

    python python/tests/run_model.py --sequences 10000            # on local disk
    python python/tests/run_model.py --sequences 500 --url s3://bucket/prefix

A failure prints the seed of its sequence; ``--seed N --sequences 1 -v`` shows it act by act. With ``TMPDIR=/dev/shm`` the sequences
on local disk need no disk.
"""
