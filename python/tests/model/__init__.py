"""A model of stores that are deleted, moved, copied, mounted and damaged between saves.

The rule: whatever happens to a store between two saves, a save either creates a snapshot that a fresh process can load, or fails and says why.

Each sequence is a list of random acts: saves of several kinds of savers, and acts of people on the store. After each acknowledged save a
process that has never seen the store loads the step and compares every byte. The model also knows which saves have to succeed.

    python python/tests/run_model.py --sequences 10000            # on local disk
    python python/tests/run_model.py --sequences 500 --url s3://bucket/prefix

A failure prints the seed of its sequence; ``--seed N --sequences 1 -v`` shows it act by act.
"""
