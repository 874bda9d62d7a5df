"""Codecs alone, where each lossless codec restores every bit, and codecs that rules assign to the tensors of a save."""

import numpy as np
import pytest
import tensorcask
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tensorcask.codec import Coder, codecs

ROLES = ("model", "master", "exp_avg", "exp_avg_sq")
ROUNDING = {"tc.blockwise8", "tc.cluster", "tc.kmeans"}


def step(number, data):
    """Tensors of one parameter of a real run, by role."""
    tensors = load_file(data / f"step-{number}.safetensors")
    names = {"model": "model"} | {role: f"optimizer.{role}" for role in ROLES[1:]}
    return {role: tensors[f"{name}.h.2.attn_proj.weight"] for role, name in names.items()}


@pytest.fixture
def steps(request):
    data = request.config.rootpath.parent / "tests" / "data"
    return step(1000, data), step(1001, data)


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy()


@pytest.mark.parametrize("checks", [True, False])
def test_each_codec_gives_back_every_bit(steps, checks):
    before, now = steps
    tried = {}
    for role in ROLES:
        partners = {other: (now[other], before[other]) for other in ROLES if other != role}
        for codec in set(codecs()) - ROUNDING:
            for base in (None, before[role]):
                try:
                    coder = Coder(now[role], base=base, role=role, partners=partners, codec=codec)
                except tensorcask.InvalidArgumentError as error:
                    assert codec in str(error)
                    continue
                encoded = coder.encode(checks=checks)
                out = np.full(now[role].nbytes, 1, np.uint8)
                coder.decode_into(encoded, out)
                assert np.array_equal(out, bits(now[role])), (codec, role)
                tried.setdefault(codec, set()).add(role)
    assert tried["tc.predict"] == tried["tc.replay"] == {"master", "exp_avg_sq"}
    assert tried["tc.planes"] == tried["tc.bitmask"] == set(ROLES)
    # The noise of a trained weight is not constant.
    assert "tc.constant" not in tried


@pytest.mark.parametrize("codec", sorted(ROUNDING))
def test_codecs_that_round_do_it_only_when_named(steps, codec):
    moments = steps[1]["exp_avg"]
    coder = Coder(moments, role="exp_avg", codec=codec)
    outs = []
    for checks in (True, False):
        encoded = coder.encode(checks=checks)
        assert encoded.chunks == {codec: 1} and encoded.stored_bytes < moments.nbytes / 2
        outs.append(torch.empty_like(moments))
        coder.decode_into(encoded, outs[-1].numpy().reshape(-1).view(np.uint8))
    assert outs[0].equal(outs[1]) and not outs[0].equal(moments)
    assert torch.nn.functional.cosine_similarity(outs[0].flatten(), moments.flatten(), dim=0) > 0.95
    assert not ROUNDING & Coder(moments, role="exp_avg", objective="smallest").encode().chunks.keys()
    # Levels may be of bf16, too.
    if codec != "tc.kmeans":
        with pytest.raises(tensorcask.InvalidArgumentError):
            Coder(steps[1]["model"], codec=codec)


def test_objectives_choose_by_size(steps):
    before, now = steps
    sizes = {name: Coder(now["model"], base=before["model"], objective=name).encode().stored_bytes for name in ("smallest", "fastest")}
    assert 0 < sizes["smallest"] <= sizes["fastest"] < now["model"].nbytes
    same = Coder(now["model"], base=now["model"]).encode()
    assert (same.stored_bytes, same.chunks) == (0, {"unchanged": 1})
    out = bytearray(now["model"].nbytes)
    Coder(now["model"], base=now["model"]).decode_into(same, out)
    assert bytes(out) == bits(now["model"]).tobytes()


def test_checks_find_another_base(steps):
    before, now = steps
    coder = Coder(now["model"], base=before["model"], codec="tc.ordered")
    other = Coder(now["model"], base=now["model"], codec="tc.ordered")
    with pytest.raises(tensorcask.CorruptionError):
        other.decode_into(coder.encode(), bytearray(now["model"].nbytes))


def test_what_does_not_fit_is_refused(steps):
    before, now = steps
    model = now["model"]
    for wrong in (dict(base=before["master"]), dict(base=model[:5]), dict(partners={"exp_avg": now["exp_avg"][:5]})):
        with pytest.raises(ValueError):
            Coder(model, **wrong)
    with pytest.raises(tensorcask.InvalidArgumentError):
        Coder(model, codec="tc.nothing")
    with pytest.raises(tensorcask.InvalidArgumentError):
        Coder(model, codec="tc.bitmask")
    coder = Coder(model)
    for size in (0, model.nbytes - 1):
        with pytest.raises(tensorcask.InvalidArgumentError):
            coder.decode_into(coder.encode(), bytearray(size))
    with pytest.raises(ValueError):
        coder.decode_into(coder.encode(), bytes(model.nbytes))


def test_rules_assign_codecs_to_tensors_of_a_save(steps, url):
    store = tensorcask.Store(url)
    options = {"policy": "one_shot", "codecs": "model=tc.bitmask"}
    saved = [store.save({"model": {"w": tensors["model"]}}, step=at, **options) for at, tensors in enumerate(steps)]
    assert "tc.bitmask" not in saved[0].chunks and saved[1].chunks == {"tc.bitmask": 1}
    writer = store.writer(policy="full", codecs=["model=tc.bitmask", "model=tc.planes"])
    dcp.save({"model": {"w": steps[1]["model"]}}, checkpoint_id="step-2", storage_writer=writer, no_dist=True)
    assert store.sql("SELECT DISTINCT codec FROM chunks", steps=[2]).fetchall() == [("tc.planes",)]
    for at, tensors in enumerate((*steps, steps[1])):
        assert torch.equal(store.load(at)["model"]["w"], tensors["model"])
    for wrong, says in (("model=tc.nothing", "unknown codec"), ("model=tc.remainder", "cannot store bf16"), ("tc.planes", "PATTERN=CODEC")):
        with pytest.raises(tensorcask.InvalidArgumentError, match=says):
            store.save({"model": {"w": steps[0]["model"]}}, step=3, codecs=wrong)
