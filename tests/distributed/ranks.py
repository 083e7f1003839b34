"""Ranks that stay for several tests: processes that do what they are told, all of them the same.

    a test ──asks──▶ the process that forks, which has imported all ──forks──▶ ranks, one by one
       └──────────────── what they are told, and what they answer ───────────────┘

What is imported takes as long as a test. A rank ends as every interpreter does.
"""

import atexit
import contextlib
import functools
import importlib
import multiprocessing.connection as connection
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time
import traceback

import torch
from torch.distributed import TCPStore

KEY = b"ranks"
GONE = "gone"


class Forks:
    """The process that forks, of this one."""

    def __init__(self):
        command = [sys.executable, "-m", "tests.distributed.ranks"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        atexit.register(self.end)

    def ask(self, *what):
        """A pid, of an environment and a file for what is said; the status that one has ended with, of a pid."""
        pickle.dump(what, self.process.stdin)
        self.process.stdin.flush()
        return pickle.load(self.process.stdout)

    def end(self):
        self.process.communicate()


class Process:
    """A rank, with the face of `subprocess.Popen`."""

    def __init__(self, environment, log):
        self.pid, self.returncode = forks().ask({k: str(v) for k, v in environment.items()}, log), None

    def poll(self):
        if self.returncode is None:
            self.returncode = forks().ask(self.pid)
        return self.returncode

    def wait(self, seconds=60):
        until = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("rank", seconds)
            time.sleep(0.01)

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@functools.cache
def forks():
    return Forks()


class Ranks:
    """Processes of torch.distributed, as torchrun would start them."""

    def __init__(self, size, folder):
        self.size = size
        listener = connection.Listener(authkey=KEY)
        self.store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )  # torchrun's agent has it
        self.processes, self.logs = [], []
        for rank in range(size):
            own = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": size,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": self.store.port,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "RANKS_ADDRESS": listener.address,
            }
            log = pathlib.Path(folder, f"rank-{rank}.log").open("w+")  # noqa: SIM115
            self.logs.append(log)
            self.processes.append(Process(own, log.name))
        found = {}
        for _ in range(size):
            pipe = listener.accept()
            found[pipe.recv()] = pipe
        self.pipes = [found[rank] for rank in range(size)]
        listener.close()

    def begin(self, task, *args, **kwargs):
        for pipe in self.pipes:
            pipe.send((task.__module__, task.__qualname__, args, kwargs))

    def end(self, seconds=120):
        """What each rank has given, or the error that it raised; `GONE` of one that is."""
        answers, until = [], time.monotonic() + seconds
        for rank, pipe in enumerate(self.pipes):
            try:
                assert pipe.poll(max(0, until - time.monotonic())), f"rank {rank} does not answer"
                answers.append(pickle.loads(pipe.recv_bytes()))
            except (EOFError, ConnectionError):
                answers.append(GONE)
        return answers

    def end_of(self, ranks, seconds=120):
        """The same of some ranks."""
        every, self.pipes = self.pipes, [self.pipes[rank] for rank in ranks]
        try:
            return dict(zip(ranks, self.end(seconds), strict=True))
        finally:
            self.pipes = every

    def run(self, task, *args, **kwargs):
        """What each rank gives."""
        self.begin(task, *args, **kwargs)
        answers = self.end()
        for rank, answer in enumerate(answers):
            assert answer is not GONE, (
                f"rank {rank} is gone ({self.processes[rank].poll()}): {self.log(rank)}"
            )
            assert not isinstance(answer, Failed), f"rank {rank}: {answer.text}"
        return answers

    def log(self, rank):
        self.logs[rank].flush()
        self.logs[rank].seek(0)
        return self.logs[rank].read()[-3000:]

    def close(self, patience=10):
        """How each has ended."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in self.logs:
            log.close()
        return [process.returncode for process in self.processes]

    def kill(self):
        """At once, if they are still there."""
        for process in self.processes:
            process.kill()
            process.wait()
        for file in (*self.logs, *self.pipes):
            file.close()


class Failed:
    """An error on a rank, as text and as a class."""

    def __init__(self, error):
        self.kind, self.text = type(error).__name__, "".join(traceback.format_exception(error))
        self.message, self.at = str(error), time.monotonic()


def serve():
    """Fork and say which have ended, until nobody asks; a rank comes back from here with nothing to say."""
    asks, says = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            what = pickle.load(asks)
        except EOFError:
            return None
        if len(what) == 1:
            pid, status = os.waitpid(what[0], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                asks.close()
                says.close()
                return begin(*what)
        pickle.dump(answer, says)
        says.flush()


def begin(environment, log):
    """Be a rank."""
    with open(log, "a") as file:
        for said in (1, 2):
            os.dup2(file.fileno(), said)
    sys.stdout, sys.stderr = (open(said, "w", buffering=1) for said in (1, 2))  # noqa: SIM115
    os.environ.update(environment)
    torch.set_num_threads(1)
    pipe = connection.Client(os.environ["RANKS_ADDRESS"], authkey=KEY)
    pipe.send(int(os.environ["RANK"]))
    while (told := pipe.recv()) is not None:
        module, name, args, kwargs = told
        try:
            answer = getattr(importlib.import_module(module), name)(*args, **kwargs)
        except BaseException as error:
            answer = Failed(error)
        pipe.send_bytes(
            pickle.dumps(answer)
        )  # tensors, too: pipes of multiprocessing would share their memory


if __name__ == "__main__":
    from tests.distributed import ranks, tasks  # noqa: F401  # so that what it sends has this module's name

    ranks.serve()
