"""Modules of libraries that are written as LightningModules train unchanged, with equal numbers."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fitkit

pytest.importorskip("lightning.pytorch")

SETTINGS = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def compare(made, trainer, names, clip=None):
    """Train what `made` returns by both, and compare the weights and the last logged values."""
    theirs, train, validation = made()
    by_them = trainer(max_epochs=2, gradient_clip_val=clip, **SETTINGS)
    by_them.fit(theirs, train, validation)
    ours, train, validation = made()
    model = fitkit.Model(ours)
    model.compile(accelerator="cpu", devices=1, gradient_clip_val=clip)
    history = model.fit(train, validation_data=validation, epochs=2, verbose=0).history
    for (name, mine), expected in zip(
        ours.state_dict().items(), theirs.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, expected), name
    for name in names:
        expected = float(by_them.callback_metrics[name])
        assert history[name][-1] == pytest.approx(expected, rel=1e-5), name


def test_pytorch_forecasting():
    pytest.importorskip("pytorch_forecasting")
    import lightning.pytorch as pl
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

    def made():
        values = np.random.default_rng(0).normal(size=160).cumsum()
        table = pd.DataFrame(
            {
                "time": np.tile(np.arange(40), 4),
                "series": np.repeat(list("abcd"), 40),
                "value": values,
            }
        )
        train = TimeSeriesDataSet(
            table[table.time < 32],
            time_idx="time",
            target="value",
            group_ids=["series"],
            max_encoder_length=8,
            max_prediction_length=4,
            time_varying_unknown_reals=["value"],
        )
        rest = TimeSeriesDataSet.from_dataset(train, table, min_prediction_idx=32)
        torch.manual_seed(0)
        net = TemporalFusionTransformer.from_dataset(
            train,
            hidden_size=8,
            attention_head_size=1,
            dropout=0.0,
            hidden_continuous_size=4,
            learning_rate=0.03,
            log_interval=-1,
        )
        batches = train.to_dataloader(train=True, batch_size=16, shuffle=False)
        return net, batches, rest.to_dataloader(train=False, batch_size=16)

    compare(made, pl.Trainer, ("val_loss", "val_MAE"), clip=0.1)


def test_pytorch_tabular():
    pytest.importorskip("pytorch_tabular")
    import pandas as pd
    import pytorch_lightning as pl
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    def made():
        draw = np.random.default_rng(0)
        table = pd.DataFrame(draw.normal(size=(160, 3)), columns=list("abc"))
        table["kind"] = draw.choice(["x", "y"], 160)
        table["target"] = (table.a + table.b > 0).astype(int)
        torch.manual_seed(0)
        model = TabularModel(
            data_config=DataConfig(
                target=["target"],
                continuous_cols=["a", "b", "c"],
                categorical_cols=["kind"],
                pin_memory=False,
            ),
            model_config=CategoryEmbeddingModelConfig(
                task="classification", layers="16-8", learning_rate=0.01
            ),
            optimizer_config=OptimizerConfig(),
            trainer_config=TrainerConfig(
                batch_size=32,
                accelerator="cpu",
                progress_bar="none",
                checkpoints=None,
                early_stopping=None,
                load_best=False,
            ),
            verbose=False,
        )
        data = model.prepare_dataloader(train=table[:128], validation=table[128:], seed=0)
        net = model.prepare_model(data)
        batches = DataLoader(data.train_dataloader().dataset, batch_size=32)
        return net, batches, data.val_dataloader()

    compare(made, pl.Trainer, ("valid_loss", "valid_accuracy"))


def test_lightly():
    pytest.importorskip("lightly")
    import pytorch_lightning as pl
    from lightly.utils.benchmarking import FinetuneClassifier

    def made():
        torch.manual_seed(0)
        backbone = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8))
        net = FinetuneClassifier(backbone, 16, feature_dim=8, num_classes=10)
        images, classes = torch.randn(64, 3, 2, 2), torch.randint(10, (64,))
        rows = TensorDataset(images, classes)
        return net, DataLoader(rows, 16), DataLoader(rows, 16)

    compare(made, pl.Trainer, ("val_loss", "val_top1", "val_top5"))
