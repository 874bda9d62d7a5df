"""Lightning's trainer over a store: the real library."""

import json
import shutil
import sys
import warnings

import pytest
import tensorcask
import torch

lightning = pytest.importorskip("lightning.pytorch")
from tensorcask.lightning import LATEST, CheckpointIO, DDPStrategy  # noqa: E402

BATCHES = 6


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(8, 4)
        self.losses = []

    def training_step(self, batch, index):
        loss = (self.layer(batch) ** 2).mean()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder, store, epochs, resume=None):
    data = torch.arange(BATCHES * 8, dtype=torch.float32).reshape(BATCHES, 8).div(50)
    module = Module()
    keep = lightning.callbacks.ModelCheckpoint(folder / "checkpoints", filename="{epoch}-{step}", monitor="loss", save_top_k=2, save_last=True)
    trainer = lightning.Trainer(
        default_root_dir=folder, max_epochs=epochs, accelerator="cpu", plugins=[CheckpointIO(store, policy="intermittent:4")], callbacks=[keep],
        enable_progress_bar=False, enable_model_summary=False, logger=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=1), ckpt_path=resume)
    return module, trainer


def test_a_trainer_saves_deletes_and_resumes(tmp_path, url):
    whole, _ = fit(tmp_path / "whole", str(tmp_path / "other"), 4)
    fit(tmp_path / "run", url, 2)
    resumed, _ = fit(tmp_path / "run", url, 4, resume=str(tmp_path / "run/checkpoints/last.ckpt"))
    assert resumed.losses == whole.losses[2 * BATCHES :]
    assert torch.equal(resumed.layer.weight, whole.layer.weight)

    named = [json.loads(file.read_text()) for file in (tmp_path / "run/checkpoints").iterdir()]
    # `last` and another file name the same step. No other files stay.
    assert len(named) == 3 and {marker["store"] for marker in named} == {url, url + "-2"}
    for found in (url, url + "-2"):
        store = tensorcask.Store(found)
        assert {info.step for info in store.snapshots()} == {marker["step"] for marker in named if marker["store"] == found}
        assert store.verify().is_clean
    assert "delta" in {info.kind for info in tensorcask.Store(url).snapshots()}


def test_files_of_one_step_are_kept_apart(tmp_path, url):
    io = CheckpointIO(url)
    io.save_checkpoint({"global_step": 5, "w": torch.ones(3), "optimizer_states": [1]}, tmp_path / "whole.ckpt")
    io.save_checkpoint({"global_step": 5, "w": torch.ones(3)}, tmp_path / "weights.ckpt")
    assert io.load_checkpoint(tmp_path / "whole.ckpt")["optimizer_states"] == [1]
    assert "optimizer_states" not in io.load_checkpoint(tmp_path / "weights.ckpt")
    # A new object, as after a restart. An overwritten file forgets its old snapshot.
    io = CheckpointIO(url)
    io.save_checkpoint({"global_step": 6, "w": torch.zeros(3)}, tmp_path / "weights.ckpt")
    assert tensorcask.Store(url + "-2").snapshots() == []
    assert [info.step for info in tensorcask.Store(url).snapshots()] == [5, 6]
    io.remove_checkpoint(tmp_path / "whole.ckpt")
    assert [info.step for info in tensorcask.Store(url).snapshots()] == [6]
    tensorcask.Store(url).pin(6)
    io.remove_checkpoint(tmp_path / "weights.ckpt")
    assert [info.step for info in tensorcask.Store(url).snapshots()] == [6] and not (tmp_path / "weights.ckpt").exists()


def test_a_file_of_another_run_is_that_runs(tmp_path, url):
    for run, value in (("a", 1.0), ("b", 2.0)):
        CheckpointIO(f"{url}-{run}").save_checkpoint({"global_step": 5, "w": torch.full((3,), value)}, tmp_path / run)
    other = CheckpointIO(f"{url}-b")
    assert torch.equal(other.load_checkpoint(tmp_path / "a")["w"], torch.ones(3))
    other.remove_checkpoint(tmp_path / "a")
    assert len(tensorcask.Store(f"{url}-a").snapshots()) == len(tensorcask.Store(f"{url}-b").snapshots()) == 1
    # A step that another program replaced is an error.
    tensorcask.save({"w": torch.zeros(3)}, f"{url}-b", step=5, overwrite=True)
    with pytest.raises(tensorcask.ConflictError, match="saved again since"):
        other.load_checkpoint(tmp_path / "b")


def test_what_cannot_be_done_is_refused(tmp_path, url):
    io = CheckpointIO(url)
    with pytest.raises(ValueError, match="global_step"):
        io.save_checkpoint({"w": torch.ones(3)}, tmp_path / "a.ckpt")
    with pytest.raises(TypeError, match=r"state\['hyper_parameters'\]\['model'\]"):
        io.save_checkpoint({"global_step": 1, "hyper_parameters": {"model": object()}}, tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    torch.save({"global_step": 1}, tmp_path / "other.ckpt")
    with pytest.raises(tensorcask.UnsupportedError, match="was not written by tensorcask"):
        io.load_checkpoint(tmp_path / "other.ckpt")
    io.remove_checkpoint(tmp_path / "other.ckpt")
    assert (tmp_path / "other.ckpt").exists()


@pytest.fixture
def no_group():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def fit_through_engine(folder, store, epochs, resume):
    data = torch.arange(BATCHES * 8, dtype=torch.float32).reshape(BATCHES, 8).div(50)
    module = Module()
    keep = lightning.callbacks.ModelCheckpoint(folder / "checkpoints", filename="{epoch}-{step}", monitor="loss", save_top_k=2, save_last=True)
    strategy = DDPStrategy(store, {"policy": "intermittent:4"}, process_group_backend="gloo")
    trainer = lightning.Trainer(
        default_root_dir=folder, max_epochs=epochs, accelerator="cpu", devices=1, strategy=strategy, callbacks=[keep],
        enable_progress_bar=False, enable_model_summary=False, logger=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=1), ckpt_path=resume)
    return module, trainer


@pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")
@pytest.mark.parametrize("by_file", [False, True])
def test_a_strategy_saves_through_the_engine_deletes_and_resumes(by_file, tmp_path, url, host_memory, no_group):
    whole, _ = fit_through_engine(tmp_path / "whole", str(tmp_path / "other"), 4, LATEST)
    fit_through_engine(tmp_path / "run", url, 2, LATEST)
    last = str(tmp_path / "run/checkpoints/last.ckpt")
    resumed, trainer = fit_through_engine(tmp_path / "run", url, 4, last if by_file else LATEST)
    assert resumed.losses == whole.losses[2 * BATCHES :]
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
    named = [json.loads(file.read_text()) for file in (tmp_path / "run/checkpoints").iterdir()]
    # `last` and another file name one snapshot. No others stay.
    assert len(named) == 3 and {marker["store"] for marker in named} == {url}
    store = tensorcask.Store(url)
    assert {marker["step"] for marker in named} == {info.step for info in store.snapshots()}
    assert store.verify().is_clean
    # Files of the strategy are not for the plugin, and the other way around.
    with pytest.raises(tensorcask.ConflictError):
        CheckpointIO(url).load_checkpoint(last)
    # Weights alone are enough to test a model.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fresh = Module()
        fresh.test_step = lambda batch, batch_idx: fresh.losses.append(float((fresh.layer(batch) ** 2).mean()))
        trainer.test(fresh, torch.utils.data.DataLoader(torch.ones(1, 8)), ckpt_path=last, verbose=False)
    assert len(fresh.losses) == 1


class Changing(Module):
    """A module with a layer that no batch uses, and in a later start with one buffer more."""

    def __init__(self, grows=False):
        super().__init__()
        self.unused = torch.nn.Linear(2, 2)
        if grows:
            self.register_buffer("added", torch.zeros(3))


@pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")
def test_a_start_that_finds_steps_is_no_first_start(tmp_path, url, host_memory, no_group):
    def fit_module(module, steps, resume):
        options = {"process_group_backend": "gloo", "find_unused_parameters": True}
        keep = lightning.callbacks.ModelCheckpoint(tmp_path / "files", every_n_train_steps=2, save_top_k=-1)
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", devices=1, strategy=DDPStrategy(url, **options), callbacks=[keep],
            enable_progress_bar=False, enable_model_summary=False, logger=False,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, torch.utils.data.DataLoader(torch.ones(16, 8), batch_size=1), ckpt_path=resume)
        return module

    # Without a look, and with one: the same training, although LATEST asks whether there is a step.
    first = fit_module(Changing(), 4, None)
    before = tensorcask.load(url, 4)["state_dict"]
    with pytest.raises(tensorcask.TemplateError, match="added"):
        fit_module(Changing(grows=True), 8, LATEST)
    with pytest.raises(tensorcask.ConflictError, match="step 4 is stored, and this training has restored nothing"):
        fit_module(Changing(), 4, None)
    assert torch.equal(tensorcask.load(url, 4)["state_dict"]["layer.weight"], before["layer.weight"])
    resumed = fit_module(Changing(), 8, LATEST)
    assert len(resumed.losses) == 4
    shutil.rmtree(url)
    looked = fit_module(Changing(), 8, LATEST)
    assert looked.losses == first.losses + resumed.losses


class Hooked(Module):
    """A module whose hooks and optimizer make its checkpoints unlike its state."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.frozen = torch.nn.Linear(8, 4).requires_grad_(False)

    def training_step(self, batch, index):
        loss = ((self.layer(batch) + self.frozen(batch)) ** 2).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        if self.case == "lbfgs":
            return torch.optim.LBFGS(self.layer.parameters(), lr=0.01, max_iter=3)
        return torch.optim.AdamW(self.layer.parameters(), lr=1e-2)

    def on_save_checkpoint(self, checkpoint):
        if self.case == "drop":
            checkpoint["state_dict"] = {name: tensor for name, tensor in checkpoint["state_dict"].items() if not name.startswith("frozen")}
        if self.case == "rename":
            checkpoint["state_dict"] = {f"net.{name}": tensor for name, tensor in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint):
        if self.case == "drop":
            checkpoint["state_dict"] = {**self.state_dict(), **checkpoint["state_dict"]}
        if self.case == "rename":
            checkpoint["state_dict"] = {name.removeprefix("net."): tensor for name, tensor in checkpoint["state_dict"].items()}


def fit_hooked(folder, case, epochs):
    data = torch.arange(BATCHES * 8, dtype=torch.float32).reshape(BATCHES, 8).div(50)
    averaging = {"averaged": [lightning.callbacks.WeightAveraging()], "ema": [lightning.callbacks.EMAWeightAveraging(decay=0.9)]}
    trainer = lightning.Trainer(
        default_root_dir=folder, max_epochs=epochs, accelerator="cpu", devices=1, logger=False,
        strategy=DDPStrategy(str(folder / "store"), process_group_backend="gloo"),
        callbacks=[*averaging.get(case, []), lightning.callbacks.ModelCheckpoint(folder / "checkpoints")],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Hooked(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=1), ckpt_path=LATEST)
    torch.distributed.destroy_process_group()
    return module


@pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")
@pytest.mark.parametrize("case", ["drop", "rename", "averaged", "ema", "lbfgs"])
def test_a_strategy_resumes_what_the_plugin_resumes(case, tmp_path, host_memory, no_group):
    whole = fit_hooked(tmp_path / "whole", case, 3)
    fit_hooked(tmp_path / "run", case, 1)
    resumed = fit_hooked(tmp_path / "run", case, 3)
    assert 0 < len(resumed.losses) < len(whole.losses) and resumed.losses == whole.losses[-len(resumed.losses) :]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
