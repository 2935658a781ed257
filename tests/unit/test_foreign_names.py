"""What users of other libraries write, and what they are told."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

import fitkit
from fitkit.errors import ArgumentTypeError, with_code
from fitkit.foreign_names import instead, rows
from fitkit.registry import nearest

ROWS = [(place, name) for place, names in rows().items() for _, name in names]
MAKERS = ("fitkit.callbacks", "fitkit.sklearn")
X = torch.ones(4, 1)
DOCS = Path(__file__).parent.parent.parent / "docs"


def compiled():
    model = fitkit.Model(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse")
    return model


def wrongly(place, name):
    """Use a name as those write it who look for it."""
    if place == "fitkit.Model":
        getattr(compiled(), name)
    elif place.startswith("fitkit.sklearn."):
        estimator = getattr(importlib.import_module("fitkit.sklearn"), place.rpartition(".")[2])
        getattr(estimator(torch.nn.Linear(1, 1)), name)
    elif place[0].isupper():
        homes = (importlib.import_module(module) for module in MAKERS)
        kind = next(getattr(home, place) for home in homes if hasattr(home, place))
        assert name not in inspect.signature(kind).parameters
        kind(**{name: None})
    elif place.startswith("fitkit"):
        getattr(importlib.import_module(place), name)
    elif place == "callback":
        compiled().fit(X, X, callbacks=[name])
    elif place in ("lr_scheduler", "loss", "optimizer"):
        compiled().compile(**{place: name})
    elif place == "metric":
        compiled().compile(metrics=[name])
    else:
        verb = getattr(compiled(), place)
        assert name not in inspect.signature(verb).parameters
        verb(**{name: None})


@pytest.mark.parametrize("place", rows())
def test_each_name_is_not_there_and_its_error_says_what_to_write(place):
    if "Classifier" in place or "Regressor" in place:
        pytest.importorskip("sklearn")
    for _, name in rows()[place]:
        sentence = instead(place, name)
        assert sentence.endswith(".") and len(sentence) < 130, name
        with pytest.raises((AttributeError, fitkit.ConfigurationError), match=name) as caught:
            wrongly(place, name)
        assert str(caught.value).endswith(with_code(sentence, "FK093")), name


@pytest.mark.parametrize(("place", "name"), [
    ("loss", "FocalLoss"), ("loss", "Dice"), ("metric", "F1-macro"), ("optimizer", "Lion"),
    ("lr_scheduler", "cosine_decay"),
])  # fmt: skip
def test_the_spelling_of_a_name_in_quotes_does_not_matter(place, name):
    with pytest.raises(fitkit.ConfigurationError) as caught:
        wrongly(place, name)
    assert caught.value.code == "FK093"


def test_no_place_has_a_name_twice():
    assert len(ROWS) == len(set(ROWS))
    assert len(ROWS) > 80


def test_keras_workers_names_the_data_loader():
    with pytest.raises(TypeError, match=r"'workers'. Give a DataLoader\(num_workers=…\) as x"):
        compiled().fit(torch.ones(2, 1), torch.ones(2, 1), workers=4)


def test_compile_lr_names_learning_rate():
    with pytest.raises(TypeError, match=r"Write compile\(learning_rate=…\)"):
        fitkit.Model(torch.nn.Linear(1, 1)).compile("adam", lr=0.1)


def test_names_that_nobody_has_get_the_plain_error():
    with pytest.raises(AttributeError, match="^'Model' object has no attribute 'nothing'$"):
        getattr(compiled(), "nothing")  # noqa: B009
    with pytest.raises(AttributeError, match="^module 'fitkit' has no attribute 'nothing'$"):
        getattr(fitkit, "nothing")  # noqa: B009
    assert not hasattr(compiled(), "trainer")


def test_parameters_buffers_and_modules_are_found_as_torch_finds_them():
    class Own(fitkit.Model):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.register_buffer("count", torch.zeros(1))

    own = Own()
    assert own.layer is own._modules["layer"]
    assert own.weight is own._parameters["weight"]
    assert own.count is own._buffers["count"]


def test_arguments_of_a_trainer_are_answered_by_compile_and_fit():
    model = fitkit.Model(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse")
    for call in (model.compile, lambda **given: model.fit(X, X, verbose=0, **given)):
        with pytest.raises(ArgumentTypeError, match=r"Write fit\(steps_per_epoch=…\)\."):
            call(limit_train_batches=2)
        with pytest.raises(ArgumentTypeError, match=r"fit\(\[batch\], epochs=…\)\."):
            call(overfit_batches=1)
    with pytest.raises(ArgumentTypeError, match=r"Write compile\(precision=…\) before"):
        model.fit(X, X, precision="bf16-mixed")
    assert len(model.fit([(X, X)], epochs=2, verbose=0).epoch) == 2  # what is advised works


@pytest.mark.parametrize(
    "name", ["tune", "sklearn", "data", "callbacks", "loggers", "pictures", "strategies"]
)
def test_dir_lists_the_public_names_of_a_module(name):
    if name == "sklearn":
        pytest.importorskip("sklearn")
    module = importlib.import_module(f"fitkit.{name}")
    assert sorted(module.__all__) == dir(module)


def test_a_hook_of_lightnings_is_answered_with_what_fitkits_takes():
    class Watching(fitkit.Model):
        def on_validation_epoch_end(self):
            pass

    model = Watching(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match=r"Override validation_epoch_end\(self, outputs\)"):
        model.fit(X, X, verbose=0)


def test_a_subclass_may_use_a_peers_names():
    class Own(fitkit.Model):
        def __init__(self):
            super().__init__(torch.nn.Linear(1, 1))
            self.layers = [1]

    assert Own().layers == [1]


def pages_script():
    """docs/make_foreign_names.py as a module."""
    script = DOCS / "make_foreign_names.py"
    spec = importlib.util.spec_from_file_location("make_foreign_names", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_names():
    tables = pages_script().tables()
    assert tables in (DOCS / "foreign-names.md").read_text(), "run make pictures"
    names = [name for place in rows().values() for _, name in place]
    assert len(names) > 200 and all(name in tables for name in names)


@pytest.mark.parametrize(("sentence", "expected"), [
    ("Write fit(epochs=…).", "Write `fit(epochs=…)`."),
    ('Write {"floor": 0.1, "power": 1} or EMA.', 'Write `{"floor": 0.1, "power": 1}` or EMA.'),
    ("Set automatic_optimization = False.", "Set `automatic_optimization = False`."),
    ("Layers are torch.nn's (as x).", "Layers are `torch.nn`'s (as x)."),
    ("Leave it out.", "Leave it out."),
])  # fmt: skip
def test_code_in_a_sentence_is_marked_as_such(sentence, expected):
    assert pages_script().marked(sentence) == expected


class Own(fitkit.Model):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_load_from_checkpoint_of_a_class_says_what_to_write(tmp_path):
    with pytest.raises(AttributeError, match=r"'Own' has no attribute.*Build the model and"):
        Own.load_from_checkpoint("model.h5")
    assert not hasattr(Own, "load_from_checkpoint")
    trained, again = Own(), Own()
    trained.fit(torch.ones(8, 1), verbose=0)
    trained.save(tmp_path / "model.h5")
    again.load(tmp_path / "model.h5")
    assert torch.equal(again.layer.weight, trained.layer.weight)

    class Theirs(Own):
        @classmethod
        def load_from_checkpoint(cls, path):
            return path

    assert Theirs.load_from_checkpoint("path") == "path"


def test_load_model_of_a_models_own_class_names_load():
    with pytest.raises(TypeError, match=r"Write net.load\('model.h5'\)"):
        fitkit.load_model("model.h5", Own())


def test_an_unknown_argument_of_a_callback_is_answered_with_the_nearest():
    with pytest.raises(TypeError, match=r"EarlyStopping\(\) has no .*'patince'. Did you mean"):
        fitkit.callbacks.EarlyStopping(patince=3)


VERBS = [
    "compile", "fit", "evaluate", "predict", "predict_batches", "train_on_batch", "test_on_batch",
    "predict_on_batch",
]  # fmt: skip


LOOKED_FOR = [
    "weight_decay", "class_weight", "device", "momentum", "clipnorm", "seed", "amp", "fp16",
    "patience", "early_stopping", "eval_set", "random_state", "gpus", "lr", "criterion", "val_data",
    "label_smoothing", "use_gpu",
]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_what_people_look_for_at_any_verb_is_answered_at_each(verb):
    for name in LOOKED_FOR:
        if name not in inspect.signature(getattr(fitkit.Model, verb)).parameters:
            with pytest.raises(ArgumentTypeError, match=r"Write ") as caught:
                getattr(compiled(), verb)(**{name: 1})
            assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("verb", VERBS)
def test_an_argument_of_another_verb_is_answered_with_that_verb(verb):
    homes = {"compile": ("jit_compile", "lr_scheduler"), "fit": ("initial_epoch", "resume_from")}
    for home, names in homes.items():
        for name in names if verb != home else ():
            with pytest.raises(ArgumentTypeError, match=rf"Write {home}\({name}=…\)") as caught:
                getattr(compiled(), verb)(**{name: 1})
            assert caught.value.code == "FK029"


@pytest.mark.parametrize(("place", "name", "sentence"), [
    (place, name, sentence) for place in ("compile", "loss", "metric", "optimizer")
    for (_, name), sentence in rows().get(place, {}).items()
    if "lambda" in sentence or "partial(" in sentence or name in ("clipnorm", "clipvalue")
])  # fmt: skip
def test_what_is_advised_for_a_name_works(place, name, sentence):
    """The code in the sentence, run as it stands, with a number for its ellipsis."""
    import functools

    value = {"betas": "(0.9, 0.99)"}.get(name, "0.5")
    code = re.sub(r"=…, (?=[a-z])", f"={value}, ", sentence.removeprefix("Write "))
    code = code.replace("…", value).removesuffix(".").removesuffix(" for its quantile 0.9")
    code = code.partition(" for logits")[0].partition(", which")[0]
    if place == "optimizer":
        code = f"optimizer={code}"
    code = code if code.startswith("compile(") else f"compile({code})"
    model = fitkit.Model(torch.nn.Linear(1, 2 if "gaussian" in name else 1))

    def compile(optimizer="sgd", loss="mse", **arguments):
        model.compile(optimizer, loss, accelerator="cpu", **arguments)

    eval(code, {"compile": compile, "functools": functools, "torch": torch})
    y = torch.ones(4) if "gaussian" in name else torch.ones(4, 1)
    history = model.fit(X, y, verbose=0)
    assert history.history["loss"][0] == history.history["loss"][0]  # and isn't NaN


@pytest.mark.parametrize(("kind", "name"), [
    ("loss", "dice_score"), ("loss", "gaussian"), ("loss", "rmsle"), ("metrics", "mase"),
    ("metrics", "f2"), ("metrics", "brier_skill"), ("optimizer", "lion8"), ("optimizer", "adan"),
    ("optimizer", "adamp"), ("optimizer", "adamini"),
])  # fmt: skip
def test_no_name_is_suggested_that_means_something_else(kind, name):
    with pytest.raises(fitkit.ConfigurationError) as caught:
        compiled().compile(**{kind: [name] if kind == "metrics" else name})
    assert caught.value.code == "FK028" and "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(("name", "known", "expected"), [
    ("acuracy", ["accuracy", "auc"], "accuracy"),
    ("sdg", ["SGD", "Adam"], "SGD"),
    ("val_lost", ["loss", "val_loss"], "val_loss"),
    ("epsilon", ["eps", "betas"], "eps"),
    ("adm", ["SGD", "Adam"], "Adam"),
    ("CrossEntropi", ["cross_entropy", "mse"], "cross_entropy"),
    ("validation", ["epochs", "validation_data"], "validation_data"),
    ("batchsize", ["batch_size", "steps"], "batch_size"),
    ("sample_weights", ["class_weight", "sample_weight"], "sample_weight"),
    ("poly", ["cosine", "polynomial"], "polynomial"),
    ("earlystop", ["early_stopping", "timer"], "early_stopping"),
])  # fmt: skip
def test_a_slip_of_the_pen_or_a_part_of_a_name_is_answered_with_the_name(name, known, expected):
    assert nearest(name, known) == [expected]


@pytest.mark.parametrize(("given", "known"), [
    ({"loss": "mae_loss"}, "'mae'"), ({"optimizer": "AdamOptimizer"}, "'Adam'"),
])  # fmt: skip
def test_a_name_with_the_word_of_its_kind_is_answered_with_the_name(given, known):
    with pytest.raises(fitkit.ConfigurationError, match=f"Did you mean {known}"):
        compiled().compile(**given)


@pytest.mark.parametrize(("name", "other"), [
    ("class_weight", "loss_weights"), ("weight_decay", "weighted_metrics"), ("amp", "as_numpy"),
    ("brier", "huber"), ("pinball", "nll"), ("dice_loss", "bce_loss"), ("top5", "top1"),
    ("gaussian_nll", "nll"), ("mase", "mape"),
])  # fmt: skip
def test_a_name_of_another_meaning_is_not_near(name, other):
    assert nearest(name, [other]) == []
