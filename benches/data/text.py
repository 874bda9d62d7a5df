"""Text to train on: documentation and source code of one pinned package, as tokens of a vocabulary of 4096."""

import hashlib
import subprocess
import sys
import tarfile

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PACKAGE, FILE = "django==5.2.8", "django-5.2.8.tar.gz"
SHA256 = "23254866a5bb9a2cfa6004e8b809ec6246eba4b58a7589bc2772f1bcc8456c7f"
VOCABULARY = 4096


def read_tokens(folder):
    """The text as tokens, an array of uint16; fetched and cut into tokens once."""
    cached = folder / "tokens.npy"
    if not cached.exists():
        files = read_files(fetch(folder))
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(files, trainer)
        tokens = np.concatenate([np.array(coded.ids, np.uint16) for coded in tokenizer.encode_batch(files)])
        part = folder / "part.npy"
        np.save(part, tokens)
        part.rename(cached)
    return np.load(cached)


def fetch(folder):
    """The package's source archive, compared with its hash."""
    archive = folder / FILE
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--no-build-isolation", "--dest", str(folder), PACKAGE], check=True)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        sys.exit(f"{archive}: sha256 is {found}, not {SHA256}; delete the file and try again")
    return archive


def read_files(archive):
    """Documentation and Python files, in a fixed order that mixes both."""
    with tarfile.open(archive) as opened:
        wanted = (member for member in opened if member.isfile() and member.name.endswith((".txt", ".py")))
        files = {member.name: opened.extractfile(member).read().decode("utf-8", "replace") for member in wanted}
    return [files[name] for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())]
