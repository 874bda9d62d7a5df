"""The first process of a host: starts ranks of a job, each the `main` of a module, and tells when they end.

It also collects every process that has lost its parent.

Reads commands, one JSON object per line: `{"start": JOB, "ranks": [...], "options": {...}}` or `{"kill": JOB}`. Writes
`{"job": JOB, "rank": RANK, "exit": STATUS}`.
"""

import importlib
import json
import os
import select
import signal
import sys
import traceback

# Loaded once for all ranks that are started here.
trainer = importlib.import_module(sys.argv[1])
running = {}


def start(job, rank, options):
    pid = os.fork()
    if pid:
        running[pid] = (job, rank)
        return
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.dup2(2, 1)
        trainer.main(rank, **options)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def collect():
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in running:
            job, rank = running.pop(pid)
            print(json.dumps({"job": job, "rank": rank, "exit": os.waitstatus_to_exitcode(status)}), flush=True)


def obey(line):
    command = json.loads(line)
    if "kill" in command:
        for pid, (job, _) in running.items():
            if job == command["kill"]:
                os.kill(pid, signal.SIGKILL)
        return
    for rank in command["ranks"]:
        start(command["start"], rank, command["options"])


def main():
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 1024)
            collect()
        if 0 in ready:
            read = os.read(0, 65536)
            if not read:
                return
            *lines, waiting = (waiting + read).split(b"\n")
            for line in lines:
                obey(line)


if __name__ == "__main__":
    main()
