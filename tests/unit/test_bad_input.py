"""Every mistake gets one clear error, early, and leaves the model as it was."""

import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.errors import ArgumentTypeError, ConfigurationError
from tests.nets import Rows
from tests.reference import assert_same_weights, copied_state

X = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
Y = np.arange(20) % 3


def compiled(net=None, **arguments):
    torch.manual_seed(0)
    model = fitkit.Model(net or torch.nn.Linear(4, 3))
    model.compile(**{"optimizer": "sgd", "loss": "cross_entropy", **arguments})
    return model


def assert_unchanged(model, before):
    assert_same_weights(model, before)
    assert all(parameter.grad is None for parameter in model.parameters())


# ---------------------------------------------------------------------- the constructor


@pytest.mark.parametrize("net", [torch.nn.Linear, "resnet", 3, lambda x: x])
def test_a_net_must_be_a_module(net):
    with pytest.raises(ArgumentTypeError, match="net"):
        fitkit.Model(net)


def test_a_model_of_nothing_says_so_when_it_is_called():
    with pytest.raises(ConfigurationError, match="neither a net nor a forward"):
        fitkit.Model()(torch.zeros(1))


# ---------------------------------------------------------------------- compile


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizer": "adm"}, r"'adm'.*Did you mean 'Adam'"),
        ({"optimizer": 3}, "optimizer=3"),
        ({"loss": "cross_entropi"}, r"Did you mean 'cross_entropy'"),
        ({"loss": torch.nn.MSELoss}, r"MSELoss\(\)"),
        ({"loss": 7}, "7"),
        ({"metrics": ["acuracy"]}, r"Did you mean 'accuracy'"),
        ({"metrics": [5]}, "5"),
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"learning_rate": -0.1}, "at least 0"),
        ({"learning_rate": float("nan")}, "finite|at least"),
        ({"lr_scheduler": "cosin"}, "Did you mean"),
        ({"lr_scheduler": {"interval": "step"}}, "'scheduler'"),
        ({"lr_scheduler": {"scheduler": "cosine", "interval": "batch"}}, "'epoch', 'step'"),
        ({"lr_scheduler": {"scheduler": "cosine", "intervall": "step"}}, "intervall"),
        ({"accumulate_grad_batches": 0}, "at least 1"),
        ({"accumulate_grad_batches": 2.0}, "float"),
        ({"gradient_clip_val": -1}, "above 0"),
        ({"gradient_clip_algorithm": "norms"}, r"Did you mean 'norm'"),
        ({"devices": 0}, "devices=0"),
        ({"devices": []}, r"devices=\[\]"),
        ({"devices": [0]}, "list of indices"),
        ({"devices": True}, "bool"),
        ({"devices": 1.0}, "float"),
        ({"devices": "some"}, "'some'"),
        ({"devices": 2, "strategy": "single_device"}, "one device"),
        ({"accelerator": "gpus"}, r"Did you mean 'gpu'"),
        ({"strategy": "dpp"}, "strategy='dpp'"),
        ({"strategy": 3}, "strategy=3"),
        ({"precision": "8"}, "precision"),
        ({"num_nodes": 2}, "num_nodes=2"),
        ({"benchmark": "yes"}, "benchmark"),
        ({"deterministic": "maybe"}, "deterministic.*'warn'"),
        ({"jit_compile": "yes"}, "jit_compile.*dict"),
        ({"jit_compile": {"speed": 1}}, "speed"),
        ({"steps_per_execution": 0}, "steps_per_execution"),
        ({"matmul_precision": "tf32"}, "'high'"),
        ({"memory_format": "channels_first"}, "channels_last"),
        ({"gpus": 1, "devices": 1}, "older spelling"),
    ],
)
def test_compile_refuses_at_once_and_stays_as_it_was(arguments, words):
    model = compiled(learning_rate=0.25)
    with pytest.raises(ConfigurationError, match=words):
        model.compile(**{"accelerator": "cpu", **arguments})
    assert model.optimizer.param_groups[0]["lr"] == 0.25
    model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("verb", ["compile", "fit", "evaluate", "predict", "train_on_batch"])
def test_an_unknown_keyword_gets_the_right_one(verb):
    close = {
        "compile": ("optimiser", "optimizer"),
        "fit": ("epoch", "epochs"),
        "evaluate": ("batchsize", "batch_size"),
        "predict": ("batchsize", "batch_size"),
        "train_on_batch": ("sample_weights", "sample_weight"),
    }
    wrong, right = close[verb]
    with pytest.raises(
        TypeError, match=rf"{verb}\(\) has no argument '{wrong}'. Did you mean {right}"
    ):
        getattr(compiled(), verb)(**{wrong: 1})


def test_an_optimizer_over_another_net_is_refused():
    other = torch.nn.Linear(9, 2)
    with pytest.raises(
        ConfigurationError, match=r"2 parameters that aren't this model's.*\(2, 9\)"
    ):
        compiled(optimizer=torch.optim.SGD(other.parameters(), lr=0.1))


def test_a_rate_for_an_optimizer_that_has_one_is_refused():
    model = fitkit.Model(torch.nn.Linear(4, 3))
    with pytest.raises(ConfigurationError, match="instance"):
        model.compile(torch.optim.SGD(model.parameters(), lr=0.1), learning_rate=0.2)


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (torch.nn.Flatten(), "no parameters"),
        (torch.nn.Linear(4, 3).requires_grad_(False), "all are frozen"),
    ],
)
def test_a_net_that_can_not_learn_says_why(net, words):
    with pytest.raises(ConfigurationError, match=words):
        compiled(net).fit(X, Y, verbose=0)


def test_a_scheduler_that_needs_arguments_says_how_to_give_them():
    with pytest.raises(ConfigurationError, match=r"functools\.partial\(StepLR"):
        compiled(lr_scheduler="StepLR").fit(X, Y, verbose=0)


# ---------------------------------------------------------------------- fit's arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"epochs": -1}, "epochs"),
        ({"epochs": "3"}, "epochs"),
        ({"validation_split": 1.0}, "below 1"),
        ({"validation_split": -0.1}, "at least 0"),
        ({"validation_split": 0.99}, "leaves 0"),
        ({"validation_data": (X, Y[:5])}, "20 samples.*5"),
        ({"validation_data": 3}, "validation_data"),
        ({"validation_freq": 0}, "validation_freq"),
        ({"validation_freq": [0]}, "validation_freq"),
        ({"verbose": 3}, "verbose"),
        ({"verbose": "loud"}, "verbose"),
        ({"shuffle": "yes"}, "shuffle"),
        ({"callbacks": [print]}, "callbacks"),
        ({"callbacks": fitkit.callbacks.History}, r"History\(\)"),
        ({"class_weight": {0: -1.0}}, "class_weight"),
        ({"sample_weight": np.ones(3)}, "sample_weight has 3"),
        ({"steps_per_epoch": 0}, "steps_per_epoch"),
        ({"initial_epoch": -1}, "initial_epoch"),
    ],
)
def test_fit_refuses_before_any_work(arguments, words):
    model = compiled()
    before = copied_state(model)
    with pytest.raises(ConfigurationError, match=words):
        model.fit(X, Y, **{"verbose": 0, **arguments})
    assert_unchanged(model, before)
    assert model.history is None


@pytest.mark.parametrize("data", [None, 3, "digits.csv", DataLoader])
def test_what_is_no_data_is_refused(data):
    for verb in ("fit", "evaluate", "predict"):
        with pytest.raises(TypeError, match="no data"):
            getattr(compiled(), verb)(data)


# ---------------------------------------------------------------------- the first batch


def with_statistics():
    return torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("arguments", "x", "y", "words"),
    [
        ({}, X[:, :3], Y, r"x has shape \(20, 3\)"),
        ({}, X, Y + 1, r"3"),
        ({}, X, Y - 1, r"-1"),
        ({}, X, None, "y"),
        ({"loss": None}, X, Y, "loss"),
        ({"loss": "sparse_categorical_crossentropy"}, X, Y, "cross_entropy"),
        ({"loss": "mse"}, X, Y.astype("float32"), r"\(20, 3\).*\(20,\)"),
        ({}, X.astype("uint8"), Y, "uint8"),
        ({}, {"a": X, "b": X}, Y, "forward.*single input"),
    ],
    ids=[
        "features",
        "label too high",
        "label below 0",
        "no y",
        "no loss",
        "logits",
        "broadcast",
        "integers",
        "several inputs",
    ],
)
def test_the_first_batch_shows_the_mistake_and_nothing_has_changed(arguments, x, y, words):
    model = compiled(with_statistics(), **arguments)
    before = copied_state(model)
    with pytest.raises(ConfigurationError, match=words):
        model.fit(x, y, verbose=0)
    assert_unchanged(model, before)
    assert model.training  # as it was before


def test_a_label_that_comes_late_is_told_before_the_first_update():
    labels = Y.copy()
    labels[-1] = 9
    model = compiled()
    before = copied_state(model)
    with pytest.raises(ConfigurationError, match="9"):
        model.fit(X, labels, batch_size=4, shuffle=False, verbose=0)
    assert_unchanged(model, before)


def test_torchs_own_error_is_the_cause():
    with pytest.raises(ConfigurationError) as caught:
        compiled().fit(X[:, :3], Y, verbose=0)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "mat1 and mat2" in str(caught.value.__cause__)


def test_an_embedding_without_that_index_is_explained():
    net = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Flatten(), torch.nn.Linear(8, 3))
    with pytest.raises(ConfigurationError, match="Embedding"):
        compiled(net).fit(np.full((20, 2), 7), Y, verbose=0)


def test_errors_of_the_users_own_code_pass_untouched():
    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        compiled(Broken()).fit(X, Y, verbose=0)


def test_empty_data_is_refused_in_every_verb():
    model = compiled()
    nothing = DataLoader(TensorDataset(torch.zeros(0, 4), torch.zeros(0)))
    for data in (np.zeros((0, 4)), nothing, iter(())):
        for verb in ("evaluate", "predict", "fit"):
            with pytest.raises(ConfigurationError, match="empty"):
                getattr(model, verb)(data, verbose=0)


def test_an_iterator_that_ends_early_warns_and_keeps_what_was_learned():
    batches = [(torch.tensor(X[i : i + 5]), torch.tensor(Y[i : i + 5])) for i in (0, 5, 10)]
    model = compiled()
    with pytest.warns(UserWarning, match="x ended in epoch 2 after 1 batches of the 2"):
        history = model.fit(iter(batches), steps_per_epoch=2, epochs=4, verbose=0)
    assert len(history.history["loss"]) == 2


def test_outputs_that_can_not_be_joined_are_told():
    batches = [torch.zeros(2, 4), torch.zeros(2, 5)]
    model = fitkit.Model(torch.nn.Identity())
    with pytest.raises(ConfigurationError, match="can't be joined"):
        model.predict(iter(batches), verbose=0)


# ---------------------------------------------------------------------- found by a reviewer


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizer": torch.nn.Linear}, "no torch.optim.Optimizer"),
        ({"lr_scheduler": torch.optim.SGD}, "optimizer's class"),
        ({"lr_scheduler": "StepLR"}, r"needs step_size.*functools\.partial\(StepLR, step_size=…\)"),
        ({"lr_scheduler": {"scheduler": "ReduceLROnPlateau", "monitor": 3}}, "monitor=3"),
        ({"jit_compile": {"mode": "nope"}}, "accepted by torch.compile"),
        ({"learning_rate": float("inf")}, "finite"),
        ({"precision": [32]}, r"precision=\[32\]"),
        ({"accelerator": None}, "accelerator=None"),
        ({"gradient_clip_algorithm": 1}, "gradient_clip_algorithm=1"),
        ({"scale_lr": np.array([1, 2])}, "scale_lr"),
    ],
)
def test_compile_refuses_these_too(arguments, words):
    model = compiled()
    before = model._fitkit.compilation
    with pytest.raises(ConfigurationError, match=words):
        model.compile(**arguments)
    assert model._fitkit.compilation is before


def test_a_rate_can_not_change_an_instance_of_an_earlier_call():
    model = fitkit.Model(torch.nn.Linear(4, 3))
    model.compile(torch.optim.SGD(model.parameters(), lr=0.1), "cross_entropy")
    with pytest.raises(ConfigurationError, match="instance"):
        model.compile(learning_rate=0.5)


def test_a_scheduler_over_another_optimizer_is_refused_at_once():
    model = fitkit.Model(torch.nn.Linear(4, 3))
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="another optimizer"):
        model.compile("sgd", lr_scheduler=torch.optim.lr_scheduler.StepLR(other, 1))


def test_an_error_in_a_factory_is_not_hidden_as_a_missing_attribute():
    model = compiled(optimizer=lambda parameters: torch.optim.Adamm(parameters))
    with pytest.raises(ConfigurationError, match="Adamm"):
        model.optimizer  # noqa: B018


def test_keras_positions_are_told_by_name():
    with pytest.raises(TypeError, match=r"fit\(\) .*By position it takes x, y.*batch_size=…"):
        compiled().fit(X, Y, 32, 10)
    with pytest.raises(TypeError, match=r"fit\(\) missing a required argument: 'x'"):
        compiled().fit()


@pytest.mark.parametrize(
    ("validation", "words"),
    [
        ((X[:, :3], Y), r"samples of shape \(3,\), but x has samples of shape \(4,\)"),
        ((X, Y + 1), "3"),
        (X, "no targets|entries"),
        (iter([(torch.tensor(X), torch.tensor(Y))]), "validation_data is an iterator"),
    ],
    ids=["features", "labels", "no targets", "iterator"],
)
def test_validation_data_are_looked_at_before_the_first_update(validation, words):
    model = compiled()
    before = copied_state(model)
    with pytest.raises(ConfigurationError, match=words):
        model.fit(X, Y, validation_data=validation, epochs=2, verbose=0)
    assert_unchanged(model, before)


def test_a_failed_train_on_batch_leaves_the_statistics_alone():
    model = compiled(with_statistics())
    before = copied_state(model)
    with pytest.raises(ConfigurationError):
        model.train_on_batch(X, Y + 5)
    assert_unchanged(model, before)


def test_batch_normalisation_of_one_sample_is_explained():
    with pytest.raises(ConfigurationError, match="FK014"):
        compiled(with_statistics()).fit(X, Y, batch_size=19, verbose=0)


def test_the_layer_that_can_not_take_a_batch_is_named():
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(6, 3))
    with pytest.raises(ConfigurationError, match=r"in its layer '1', Linear\(in_features=6"):
        compiled(net).fit(X, Y, verbose=0)


def test_an_error_that_the_net_raises_itself_stays_itself():
    class Picky(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x):
            raise ValueError("my own check: size mismatch in config")

    with pytest.raises(ValueError, match="^my own check"):
        compiled(Picky()).fit(X, Y, verbose=0)


@pytest.mark.parametrize("batch", ["text", None, [1.0, 2.0], np.array([object()])])
def test_a_batch_without_tensors_is_refused(batch):
    # None is what a collate gives that leaves a whole batch out.
    with pytest.raises(ConfigurationError, match="no tensor|dtype|0 samples"):
        compiled().fit((batch for _ in range(2)), verbose=0)


def test_a_data_set_with_targets_beside_it_is_not_split():
    data = TensorDataset(torch.tensor(X), torch.tensor(Y))
    with pytest.raises(ConfigurationError, match="second entry"):
        compiled().fit(data, Y[:3], validation_split=0.5, verbose=0)


def test_batch_shuffling_of_a_data_set_is_refused():
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return X[index], Y[index]

    with pytest.raises(ConfigurationError, match="shuffle='batch' is for arrays"):
        compiled().fit(Rows(), shuffle="batch", verbose=0)


def test_a_cosine_over_a_stream_of_unknown_length_says_what_is_missing():
    batches = ((torch.tensor(X), torch.tensor(Y)) for _ in range(3))
    with pytest.raises(ConfigurationError, match="steps_per_epoch"):
        compiled(lr_scheduler="one_cycle").fit(batches, verbose=0)


def test_a_monitored_name_that_does_not_exist_lists_those_that_do():
    plateau = {"scheduler": "ReduceLROnPlateau", "monitor": "val_los"}
    with pytest.raises(ConfigurationError, match="'val_los'.*loss, val_loss"):
        compiled(lr_scheduler=plateau).fit(X, Y, validation_data=(X, Y), verbose=0)


# ---------------------------------------------------------------------- numbers of other kinds


LONG = X.astype(np.longdouble)
MASKED = np.ma.masked_array(X, mask=X > 0)
META = torch.empty(20, 4, device="meta")
ODD = {"long": (LONG, "astype"), "masked": (MASKED, "filled"), "meta": (META, "meta tensor")}
PLACES = {
    "x": lambda model, x: model.fit(x, Y, verbose=0),
    "a tuple": lambda model, x: model.predict((X, (x,)), verbose=0),
    "a dict": lambda model, x: model.evaluate({"input": x}, Y, verbose=0),
    "y": lambda model, x: model.fit(X, {"a": Y, "b": x}, verbose=0),
    "sample_weight": lambda model, x: model.fit(X, Y, sample_weight=x[:, 0], verbose=0),
    "validation_data": lambda model, x: model.fit(X, Y, validation_data=(x, Y), verbose=0),
    "validation_split": lambda model, x: model.fit(x, Y, validation_split=0.5, verbose=0),
    "a batch": lambda model, x: model.fit([(x, Y)], verbose=0),
    "a later batch": lambda model, x: model.fit([(X, Y), (x, Y)], verbose=0),
    "a batch's y": lambda model, x: model.evaluate([(X, x)], verbose=0),
    "a batch's weights": lambda model, x: model.fit([(X, Y, x[:, 0])], verbose=0),
    "a Dataset": lambda model, x: model.fit(Rows(x, Y), verbose=0),
    "a loader": lambda model, x: model.fit(DataLoader(Rows(x, Y), 4), verbose=0),
    "one batch": lambda model, x: model.train_on_batch(x, Y),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ODD)
def test_long_doubles_masked_arrays_and_meta_tensors_are_refused(kind, place):
    value, word = ODD[kind]
    model = compiled(torch.nn.Sequential(torch.nn.Linear(4, 3)))
    before = copied_state(model)
    with pytest.raises(ConfigurationError, match=word):
        PLACES[place](model, value)
    if place != "a later batch":
        assert_unchanged(model, before)


def test_sparse_tensors_are_read_where_rows_can_be_chosen_and_else_refused():
    model, sparse = compiled(), torch.tensor(X * (X > 0)).to_sparse()
    model.fit(sparse, Y, validation_split=0.5, verbose=0)
    expected = model.predict(sparse.to_dense(), verbose=0)
    assert np.allclose(model.predict(sparse, batch_size=8, verbose=0), expected, atol=1e-6)
    for verb in ("fit", "evaluate"):
        with pytest.raises(ConfigurationError, match=r"x\.to_sparse_coo\(\), or x\.to_dense\(\)"):
            getattr(model, verb)(sparse.to_sparse_csr(), Y, verbose=0)
    with pytest.raises(ConfigurationError, match=r"sample_weight\.to_dense"):
        model.fit(X, Y, sample_weight=torch.ones(20).to_sparse(), verbose=0)
    for data in (Rows(sparse, Y), DataLoader(Rows(sparse, Y), 4)):
        with pytest.raises(ConfigurationError, match=r"Write \.to_dense\(\) in the Dataset"):
            model.fit(data, verbose=0)


@pytest.mark.parametrize("verb", ["fit", "evaluate"])
def test_a_later_batch_without_targets_or_with_too_few_is_refused(verb):
    x, y = torch.tensor(X), torch.tensor(Y)
    for loss, target in (("cross_entropy", y), ("mse", torch.randn(20, 3))):
        model = compiled(loss=loss)
        with pytest.raises(ConfigurationError, match="has only inputs"):
            getattr(model, verb)([(x, target), (x,)], verbose=0)
    with pytest.raises(ConfigurationError, match="same number of samples"):
        getattr(compiled(), verb)([(x, y), (x, y[:5])], verbose=0)


# ---------------------------------------------------------------------- what users of others write


def message(call):
    with pytest.raises(ConfigurationError) as caught:
        call()
    return str(caught.value)


def test_dpp_is_answered_with_dp_and_ddp_and_no_internal_talk():
    text = message(lambda: compiled(strategy="dpp"))
    assert "'ddp'" in text and "'dp'" in text and "fitkit.strategies" in text
    assert "contract" not in text and "later" not in text


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("fp16", "'16-mixed'"),
        ("float16", "'16-mixed'"),
        ("mixed_float16", "'16-mixed'"),
        ("mixed_bfloat16", "'bf16-mixed'"),
        ("float32", "'32-true'"),
        ("no", "'32-true'"),
        ("float64", "'64-true'"),
    ],
)
def test_accelerates_and_keras_words_for_precision_are_answered_with_ours(word, ours):
    assert f"Write {ours}" in message(lambda: compiled(precision=word))


@pytest.mark.parametrize(
    "labels",
    [
        np.array(["cat", "dog"] * 10),
        np.array(["cat", "dog"] * 10, dtype=object),
        ["cat", "dog"] * 10,
    ],
)
def test_labels_of_strings_are_to_be_numbered(labels):
    text = message(lambda: compiled().fit(X, labels, verbose=0))
    assert "classes, y = numpy.unique(y, return_inverse=True)" in text and "'cat'" in text
    assert "float32" not in text
    _, y = np.unique(labels, return_inverse=True)
    compiled().fit(X, y, verbose=0)


def test_numbers_written_as_strings_are_to_be_converted():
    text = message(lambda: compiled().fit(X.astype(str), Y, verbose=0))
    assert "x.astype('float32')" in text and "unique" not in text


def test_load_model_without_a_net_says_to_build_it():
    text = message(lambda: fitkit.load_model("m.h5"))
    assert "fitkit.load_model('m.h5', net)" in text and "no code" in text


def test_a_generator_function_that_was_not_called():
    def batches():
        yield X, Y

    text = message(lambda: compiled().fit(batches, verbose=0))
    assert "generator function" in text and "batches()" in text and "__iter__" in text
    assert "lambda" in message(lambda: compiled().fit(lambda: [(X, Y)], verbose=0))


def test_fit_without_compile_says_to_compile_first():
    text = message(lambda: fitkit.Model(torch.nn.Linear(4, 3)).fit(X, Y, verbose=0))
    assert "compile" in text and "wasn't called" in text and "before fit" in text


def test_torchs_state_dict_of_the_net_goes_into_the_model(tmp_path):
    net, model = torch.nn.Linear(4, 3), compiled()
    torch.save(net.state_dict(), tmp_path / "n.pt")
    model.load_state_dict(torch.load(tmp_path / "n.pt"))
    assert torch.equal(model.net.weight, net.weight)
    model.load_state_dict(fitkit.Model(torch.nn.Linear(4, 3)).state_dict())
    assert not torch.equal(model.net.weight, net.weight)
    with pytest.raises(RuntimeError, match=r'Missing key.*"bias"'):
        model.load_state_dict({"weight": net.weight})
    with pytest.raises(RuntimeError, match=r'Missing key.*"net.weight"'):
        model.load_state_dict({"other": net.weight})


def test_a_typo_of_a_metric_shows_five_names_and_where_the_list_is():
    text = message(lambda: compiled(metrics=["acuracy"]))
    assert "Did you mean 'accuracy'" in text and "docs/losses-and-metrics.md" in text
    assert len(text) < 500


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_images_as_keras_has_them_are_to_be_transposed(kind):
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 3))
    images = np.zeros((20, 8, 8, 1), "float32")
    text = message(lambda: compiled(net).fit(kind(images), Y, verbose=0))
    assert "x.transpose(0, 3, 1, 2)" in text and "x.permute(0, 3, 1, 2)" in text
    compiled(net).fit(kind(images.transpose(0, 3, 1, 2)), Y, verbose=0)
    wrong = np.zeros((20, 2, 8, 8), "float32")
    assert "transpose" not in message(lambda: compiled(net).fit(wrong, Y, verbose=0))


def test_99_processes_on_few_cores_bring_a_warning(monkeypatch):
    monkeypatch.setattr("fitkit.distributed.resolve.usable_cores", lambda: 2)
    with pytest.warns(UserWarning, match=r"devices=99 on the CPU.*2 cores.*Write devices=2"):
        compiled(devices=99, accelerator="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(devices=8, accelerator="cpu")
        compiled(devices=99, accelerator="cpu", strategy="dp")


def hugging_face(**columns):
    return pytest.importorskip("datasets").Dataset.from_dict(columns)


class Inputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_hugging_face_dataset_of_lists_needs_with_format_torch():
    data = hugging_face(x=X.tolist(), labels=Y.tolist())
    model = compiled(Inputs(), loss=None)
    for verb in (model.fit, model.evaluate):
        text = message(lambda verb=verb: verb(data, verbose=0))
        assert "x.with_format('torch')" in text and "['x']" in text
    assert "with_format" in message(lambda: model.fit(data, validation_split=0.5, verbose=0))
    model.fit(data.with_format("torch"), verbose=0)


def test_a_hugging_face_dataset_takes_a_validation_split():
    data = hugging_face(x=X.tolist(), labels=Y.tolist()).with_format("torch")
    model = compiled(Inputs(), loss=None)
    seen = []
    model.net.register_forward_hook(lambda m, a, k, o: seen.append(len(k["x"])), with_kwargs=True)
    history = model.fit(data, validation_split=0.25, batch_size=5, verbose=0)
    assert seen == [5, 5, 5, 5] and "val_loss" in history.history
