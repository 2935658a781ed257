"""An argument of a verb keeps its name, and its type, on its way into the loops."""

import dataclasses
import inspect

import torch

import fitkit
from fitkit.compilation import CompileArguments
from fitkit.training.settings import EvaluateArguments, FitArguments


def parameters_of(verb):
    found = inspect.signature(getattr(fitkit.Model, verb)).parameters
    return {name: item.annotation for name, item in found.items() if name != "self"}


def fields_of(kind):
    return {field.name: field.type for field in dataclasses.fields(kind) if field.init}


def test_compile_has_the_arguments_of_its_record_with_the_same_types():
    asked, kept = parameters_of("compile"), fields_of(CompileArguments)
    assert asked.keys() - kept.keys() == {"gpus"} and not kept.keys() - asked.keys()

    def parts(annotation):
        words = annotation.replace("dict[str, Any]", "CompilerOptions").split(" | ")
        return set(words) - {"Unset", "None"}

    assert all(parts(asked[name]) == parts(kept[name]) for name in kept)


def test_fit_evaluate_and_predict_have_those_of_theirs():
    assert parameters_of("fit").keys() - fields_of(FitArguments).keys() == {"resume_from"}
    assert fields_of(FitArguments).keys() <= parameters_of("fit").keys()
    both = parameters_of("evaluate").keys() | parameters_of("predict").keys()
    assert both - fields_of(EvaluateArguments).keys() == {
        "return_dict",
        "interval",
        "as_numpy",
        "out",
    }
    assert fields_of(EvaluateArguments).keys() <= both


def test_what_compile_was_given_is_read_by_name():
    model = fitkit.Model(torch.nn.Linear(4, 3))
    model.compile("sgd", "mse", devices=1, num_nodes=1, warmup_epochs=0.5)
    model.compile(learning_rate=0.1)
    given = model._fitkit.compilation.given
    assert (given.optimizer, given.loss, given.learning_rate) == ("sgd", "mse", 0.1)
    assert (given.devices, given.num_nodes, given.warmup_epochs) == (1, 1, 0.5)
    assert given.as_dict() == {name: getattr(given, name) for name in fields_of(CompileArguments)}
    plain = fitkit.Model(torch.nn.Linear(4, 3))._fitkit.compilation.given
    assert plain.as_dict()["num_nodes"] is None
