"""States that real optimizers leave, step after step, are restored bit for bit and take few bytes."""

import pytest
import tensorcask
import torch
from ranks import on_ranks
from trainers import Trainer, assert_restored, states

BF16 = torch.bfloat16
SIZE = {"width": 64, "layers": 1, "length": 16}
# Of states without second moments: the fixed bytes of small tensors count less.
WIDER = {"width": 128, "layers": 1, "length": 16}
ADAM = {"tc.gradient", "tc.replay"}
JOINT = {"tc.joint"}
DESCENT = {"tc.gradient", "tc.descent"}
# A trainer, the codecs that every delta has, and the most bytes that a delta may take, divided by those of the state. None for gradients that
# are not short.
TRAINERS = [
    (Trainer("single", kernel="single"), ADAM, 0.2),
    (Trainer("foreach", kernel="foreach"), ADAM, 0.2),
    (Trainer("fused", kernel="fused"), ADAM, 0.2),
    (Trainer("adam", optimizer="adam", clip=None), ADAM, 0.2),
    (Trainer("each tensor clipped", clip=0.05, clip_each=True), ADAM, 0.22),
    (Trainer("three micro-batches", batches=3, divide="sum"), ADAM, 0.26),
    (Trainer("f16", compute=torch.float16, loss_scale=1024.0), ADAM, 0.26),
    (Trainer("f32 gradients", compute=torch.float32), set(), None),
    (Trainer("f32 weights of role model", weights="model"), set(), None),
    (Trainer("f32 weights, moments with numbers", weights="model", numbered=True), ADAM, 0.22),
    (Trainer("sgd of f32 weights, momenta with numbers", optimizer="sgd", decay=0.0, weights="model", numbered=True), DESCENT, 0.24),
    (Trainer("muon, moments with numbers", optimizer="muon", numbered=True), set(), 0.42),
    (Trainer("sgd", optimizer="sgd", decay=0.0), DESCENT, 0.22),
    (Trainer("sgd, single", optimizer="sgd", decay=0.0, kernel="single", clip=None), DESCENT, 0.22),
    (Trainer("sgd, fused", optimizer="sgd", decay=0.0, kernel="fused", nesterov=True), DESCENT, 0.22),
    (Trainer("nesterov", optimizer="sgd", decay=0.0, nesterov=True, momentum=0.95), DESCENT, 0.22),
    (Trainer("dampening", optimizer="sgd", decay=0.0, dampening=0.1), DESCENT, 0.22),
    (Trainer("sgd of f32 weights", optimizer="sgd", decay=0.0, weights="model"), DESCENT, 0.24),
    # Its momentum has no short form.
    (Trainer("sgd with weight decay", optimizer="sgd", decay=1e-4), {"tc.descent"}, 0.4),
    (Trainer("muon", optimizer="muon"), ADAM, 0.4),
    # Threads share the steps that they find, and so early in training not each thread finds its own.
    (Trainer("bf16 moments", moments=(BF16, BF16)), JOINT, 0.4),
    (Trainer("bf16 moments in the order of Transformer Engine", moments=(BF16, BF16), kernel="te"), JOINT, 0.4),
    (Trainer("a bf16 second moment", moments=(torch.float32, BF16)), JOINT, 0.35),
    # Its step is not always found early in training.
    (Trainer("a bf16 first moment", moments=(BF16, torch.float32)), set(), None),
]
ON_RANKS = [Trainer("reduced in bf16", reduce=torch.bfloat16), Trainer("reduced in f32", reduce=torch.float32)]


def save_and_restore(trainer, url, codecs, most):
    trained = states(trainer, 3, 3, **(SIZE if trainer.optimizer.startswith("adam") else WIDER))
    if trainer.reduce is not None and torch.distributed.get_rank() > 0:
        return
    store = tensorcask.Store(url)
    for step, state in trained.items():
        saved = store.save(state, step=step, policy="consecutive")
        if step > 3 and most is not None:
            assert codecs <= saved.chunks.keys(), (step, saved.chunks)
            assert saved.stored_bytes < most * saved.tensor_bytes, (step, saved.stored_bytes / saved.tensor_bytes, saved.chunks)
    assert_restored(store, trained)


@pytest.mark.parametrize(("trainer", "codecs", "most"), TRAINERS, ids=lambda value: getattr(value, "name", ""))
def test_steps_of_an_optimizer_are_restored_bit_for_bit(trainer, codecs, most, memory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        save_and_restore(trainer, memory, codecs, most)
    finally:
        torch.set_num_threads(threads)


def save_on_rank(index, url):
    save_and_restore(ON_RANKS[int(index)], url, ADAM, 0.23)


@pytest.mark.parametrize("index", range(len(ON_RANKS)), ids=lambda index: ON_RANKS[index].name)
def test_steps_of_fsdp2_are_restored_bit_for_bit(index, tmp_path):
    on_ranks(2, tmp_path, save_on_rank, index, tmp_path / "store")
