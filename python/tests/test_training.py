"""States that real optimizers leave, step after step, are restored bit for bit and take few bytes."""

import pytest
import tensorcask
import torch
from ranks import on_ranks
from trainers import Trainer, assert_restored, states

BF16 = torch.bfloat16
SIZE = {"width": 64, "layers": 1, "length": 16}
# A trainer, and the most bytes that a delta may take, divided by those of the state. None for gradients that are not short.
TRAINERS = [
    (Trainer("single", kernel="single"), 0.2),
    (Trainer("foreach", kernel="foreach"), 0.2),
    (Trainer("fused", kernel="fused"), 0.2),
    (Trainer("adam", optimizer="adam", clip=None), 0.2),
    (Trainer("each tensor clipped", clip=0.05, clip_each=True), 0.22),
    (Trainer("three micro-batches", batches=3, divide="sum"), 0.26),
    (Trainer("f16", compute=torch.float16, loss_scale=1024.0), 0.26),
    (Trainer("f32 gradients", compute=torch.float32), None),
    (Trainer("f32 weights of role model", weights="model"), None),
    (Trainer("sgd", optimizer="sgd"), None),
    (Trainer("bf16 moments", moments=(BF16, BF16)), 0.26),
    (Trainer("bf16 moments in the order of Transformer Engine", moments=(BF16, BF16), kernel="te"), 0.3),
    (Trainer("a bf16 second moment", moments=(torch.float32, BF16)), 0.3),
    (Trainer("a bf16 first moment", moments=(BF16, torch.float32)), 0.3),
]
ON_RANKS = [Trainer("reduced in bf16", reduce=torch.bfloat16), Trainer("reduced in f32", reduce=torch.float32)]


def save_and_restore(trainer, url, most):
    trained = states(trainer, 3, 3, **SIZE)
    if trainer.reduce is not None and torch.distributed.get_rank() > 0:
        return
    store = tensorcask.Store(url)
    for step, state in trained.items():
        saved = store.save(state, step=step, policy="consecutive")
        if step > 3 and most is not None:
            used = {"tc.joint"} if BF16 in trainer.moments else {"tc.gradient", "tc.replay"}
            assert used <= saved.chunks.keys(), (step, saved.chunks)
            assert saved.stored_bytes < most * saved.tensor_bytes, (step, saved.stored_bytes / saved.tensor_bytes, saved.chunks)
    assert_restored(store, trained)


@pytest.mark.parametrize(("trainer", "most"), TRAINERS, ids=lambda value: getattr(value, "name", ""))
def test_steps_of_an_optimizer_are_restored_bit_for_bit(trainer, most, memory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        save_and_restore(trainer, memory, most)
    finally:
        torch.set_num_threads(threads)


def save_on_rank(index, url):
    save_and_restore(ON_RANKS[int(index)], url, 0.23)


@pytest.mark.parametrize("index", range(len(ON_RANKS)), ids=lambda index: ON_RANKS[index].name)
def test_steps_of_fsdp2_are_restored_bit_for_bit(index, tmp_path):
    on_ranks(2, tmp_path, save_on_rank, index, tmp_path / "store")
