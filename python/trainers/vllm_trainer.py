"""The trainer of `vllm_updates.py`: a tiny random model in bf16 with masters in f32, each step of which is published.

    python vllm_trainer.py FOLDER URL

Makes the model, with a tokenizer, in FOLDER if it is not there. Then each line of the standard input is answered by one line:

    step [OPTION=VALUE...]   trains one step and publishes it as the next version; prints the version
    die                      trains one step, and kills itself while its version is written
"""

import os
import signal
import sys
import threading
from pathlib import Path

import torch
from tensorcask import NotFoundError, Store
from tensorcask.weights import Publisher
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

RATE, VOCABULARY = 1e-6, 320


def make(folder, tied=False):
    """A Qwen2 of 2 MB with a tokenizer of bytes, as files of Hugging Face."""
    tokens = ["<|endoftext|>", *sorted(ByteLevel.alphabet())]
    Qwen2Tokenizer(vocab={token: number for number, token in enumerate(tokens)}, merges=[]).save_pretrained(folder)
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, tie_word_embeddings=tied, initializer_range=0.1, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        dtype="bfloat16",
    )  # fmt: skip
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)


class Trainer:
    """Trains on random text, from the newest version of the store."""

    def __init__(self, folder, url):
        self.store = Store(url)
        self.model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        try:
            snapshot = self.store.snapshot()
            self.version = snapshot.step
            self.model.load_state_dict(snapshot.load(), strict=False)
        except NotFoundError:
            self.version = 0
        self.masters = [parameter.detach().float().requires_grad_() for parameter in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=RATE)

    def weights(self):
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def step(self):
        batch = torch.randint(1, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(self.version))
        self.model.zero_grad()
        self.model(input_ids=batch, labels=batch).loss.backward()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                master.grad = parameter.grad.float()
            self.optimizer.step()
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                parameter.copy_(master)
        self.version += 1

    def publish(self, **options):
        Publisher(self.store, **options).publish(self.weights(), self.version)
        return self.version


def kill_while_writing(_read, written):
    if written:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_at_first_cask(folder):
    known = os.listdir(folder)
    while os.listdir(folder) == known:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    folder, url = sys.argv[1:]
    torch.set_num_threads(1)
    if not Path(folder, "config.json").exists():
        make(folder)
    trainer = Trainer(folder, url)
    print("ready", flush=True)
    for line in sys.stdin:
        command, *options = line.split()
        trainer.step()
        if command == "die":
            if "://" not in url:
                threading.Thread(target=kill_at_first_cask, args=(Path(url, "casks"),), daemon=True).start()
            # As a whole version, so that something is written before the commit.
            trainer.publish(policy="full", progress=kill_while_writing)
            raise SystemExit("the save ended without a report of progress")
        print(trainer.publish(**dict(option.split("=") for option in options)), flush=True)


if __name__ == "__main__":
    main()
