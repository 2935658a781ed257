"""The logger that writes event files for TensorBoard."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fitkit.arguments import check_count, check_flag, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError, missing_package
from fitkit.extras import urls
from fitkit.extras.loggers.base import Logger, Unit, pixels
from fitkit.extras.text_files import checked_place
from fitkit.random_states import kept_random_numbers
from fitkit.registry import did_you_mean
from fitkit.seams.callbacks import Logs
from fitkit.seams.files import parent

OURS = ("log_dir", "histogram_freq", "write_graph", "write_steps_per_second", "update_freq")

LEFT_OUT = {
    "write_images": "Give log_figure a picture of the weights in a callback of your own.",
    "profile_batch": "Use torch.profiler with tensorboard_trace_handler.",
    "embeddings_freq": "Use torch.utils.tensorboard's add_embedding after fit.",
    "embeddings_metadata": "Use torch.utils.tensorboard's add_embedding after fit.",
}
"""Keras's arguments that fitkit accepts only when they are off, and what to do instead."""

UPLOAD_EVERY_S = 120
"""Seconds between uploads within an epoch; torch's writer flushes local files as often."""


class TensorBoard(Logger):
    """Writes TensorBoard event files, with the same folders and names as Keras's callback.

    `log_dir` holds two runs, `train` and `validation`, so TensorBoard draws both in one chart.
    `epoch_loss` and the other epoch logs are plotted over the epoch's number, from 0.
    `batch_loss` and the other batch logs are plotted over training steps. Figures are plotted
    over epochs, unless you give a step. You find the settings as text, and under "HParams" once
    fit has ended.

    Args:
        log_dir: the folder; fit creates it when it begins. Give each training its own folder:
            curves from an older training stay in it and are drawn with the new ones. If it is a
            URL (`s3://…`), files are replaced whole, at the end of each epoch and every two
            minutes.
        histogram_freq: write histograms of all parameters every this many epochs. Default 0: none.
        write_graph: whether to write the net's modules and the connections between them. Default
            True. The net isn't run for this. If its forward can't be traced without running it,
            the graph has no arrows.
        write_steps_per_second: whether to write `epoch_steps_per_second`. Default False.
        update_freq: `"epoch"` (default), `"batch"` or a number of batches; see `Logger`.
        step: what the steps count: `"batches"` (default) or `"updates"`; see `Logger`.

    Example:
        >>> import fitkit
        >>> board = fitkit.loggers.TensorBoard("runs/first")

    Raises:
        MissingPackageError: tensorboard isn't installed.
        ArgumentTypeError, ConfigurationError: an argument is invalid, or fitkit leaves it out:
            `write_images`, `profile_batch`, `embeddings_freq`, `embeddings_metadata`.
        CheckpointError: the URL can't be written to. Missing credentials are reported when fit
            begins.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,
        write_steps_per_second: bool = False,
        update_freq: str | int = "epoch",
        *,
        step: Unit = "batches",
        **other: Any,
    ) -> None:
        _refuse(other)
        super().__init__(update_freq, step)
        self.log_dir: Path | str = checked_place(log_dir, "log_dir")
        histogram_freq = check_count("histogram_freq", histogram_freq, minimum=0)
        write_graph = check_flag("write_graph", write_graph)
        write_steps_per_second = check_flag("write_steps_per_second", write_steps_per_second)
        self.histogram_freq = histogram_freq
        self.write_graph = write_graph
        self.write_steps_per_second = write_steps_per_second
        self._settings: dict[str, Any] = {}
        self._last: dict[str, float] = {}
        self._began = (0, 0.0)
        _writer_class()

    def start(self) -> None:
        self._last = {}
        self.connection: Any = EventFiles(self.log_dir)
        if self.write_graph:
            graph = graph_of(self.model._weights_module())
            self._writer("train")._get_file_writer().add_graph(graph)

    def _writer(self, run: str) -> Any:
        """Return the writer of `train` or `validation`; create it at the first write."""
        return self.opened().writer(run, self._first_new())

    def writes_with(self) -> Any:
        """Return the `SummaryWriter`; of `TensorBoard`, that of the run `train`."""
        self.opened()
        return self._writer("train")

    def _first_new(self) -> int | None:
        """From where on to hide what a crash left of epochs that run again."""
        # Steps are numbered differently.
        return self._epoch if self.resumes and not self._every else None

    def _curve(self, name: str) -> tuple[str, str]:
        """Return the run and the tag of an epoch's value."""
        run = "validation" if name.startswith("val_") else "train"
        return run, f"epoch_{name.removeprefix('val_')}"

    def _moment(self, epoch: int, step: int) -> int:
        """Return the place of an epoch's value on the horizontal axis."""
        return epoch

    def log_hyperparameters(self, values: dict[str, Any]) -> None:
        self._settings = values
        lines = [f"| {name} | {_cell(value)} |" for name, value in values.items()]
        table = "\n".join(["| setting | value |", "|---|---|", *lines])
        self._writer("train").add_text("hyperparameters", table, 0)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._began = (self.step, time.monotonic())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        super().on_epoch_end(epoch, logs)
        if not self.model.is_global_zero:
            return
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            self._write_histograms(epoch)
        self.connection.flush()

    def log_scalars(self, values: dict[str, float], step: int, epoch: int | None) -> None:
        if epoch is None:
            for name, value in values.items():
                self._writer("train").add_scalar(name, value, step)
            self.connection.flush_now_and_then()
            return
        if self.write_steps_per_second:
            steps, passed_s = step - self._began[0], time.monotonic() - self._began[1]
            values = {**values, "steps_per_second": steps / max(passed_s, 1e-9)}
        self._last = values
        for name, value in values.items():
            run, tag = self._curve(name)
            self._writer(run).add_scalar(tag, value, self._moment(epoch, step))

    def log_figure(self, name: str, figure: Any, step: int | None = None) -> None:
        # Only batch values are plotted over steps. A resumed run drops later values by epoch.
        shown = self._moment(self._epoch, self.step) if step is None else step
        self._writer("train").add_image(name, pixels(figure), shown, dataformats="HWC")

    def _write_histograms(self, epoch: int) -> None:
        for name, parameter in self.model._weights_module().named_parameters():
            values = parameter.detach().float().flatten()
            values = values[torch.isfinite(values)]  # TensorBoard accepts finite values only
            if values.numel():
                moment = self._moment(epoch, self.step)
                self._writer("train").add_histogram(name, values.cpu().numpy(), moment)

    def finish(self, error: BaseException | None = None) -> None:
        from torch.utils.tensorboard.summary import hparams

        try:
            metrics = {f"hparam/{name}": value for name, value in self._last.items()}
            file_writer = self._writer("train")._get_file_writer()
            for summary in hparams(self._settings, metrics):
                file_writer.add_summary(summary)
            for name, value in metrics.items():
                moment = self._moment(self._epoch, self.step)
                self._writer("train").add_scalar(name, value, moment)
        finally:
            files, self.connection = self.connection, None
            files.close()


class EventFiles:
    """Holds the writers of a training's runs, for a local folder or a URL.

    TensorBoard's own writer accepts URLs, but it appends record by record. Some stores refuse to
    append, and others overwrite the file instead. So for a URL, this class writes the files to a
    private local folder and replaces each file in the store as a whole.

    Args:
        place: the folder of all runs, or its URL.

    Raises:
        CheckpointError: the URL can't be written to.
    """

    def __init__(self, place: Path | str) -> None:
        self._writers: dict[str, Any] = {}
        self._url = place.rstrip("/") if isinstance(place, str) else None
        self._folder = Path(place)
        self._sent: dict[str, int] = {}  # how many bytes of each file are at the URL
        self._sent_at_s = time.monotonic()
        if self._url is not None:
            urls.check_writable(self._url)
            self._local = tempfile.TemporaryDirectory(prefix="fitkit-", ignore_cleanup_errors=True)
            self._folder = Path(self._local.name)

    def writer(self, run: str, purge_step: int | None) -> Any:
        """Return the writer of a run; create it at the first call."""
        if run not in self._writers:
            self._writers[run] = _writer_class()(str(self._folder / run), purge_step=purge_step)
        return self._writers[run]

    def flush(self) -> None:
        """Write pending records; for a URL, upload the files that have grown.

        Raises:
            CheckpointError: a file can't be uploaded.
        """
        for writer in self._writers.values():
            writer.flush()
        self._upload()

    def flush_now_and_then(self) -> None:
        """For a URL, call `flush` if the last upload was at least `UPLOAD_EVERY_S` ago."""
        if self._url is not None and time.monotonic() - self._sent_at_s >= UPLOAD_EVERY_S:
            self.flush()

    def close(self) -> None:
        """Write pending records and close the files.

        Raises:
            CheckpointError: a file can't be uploaded.
        """
        with contextlib.ExitStack() as ending:
            if self._url is not None:
                ending.callback(self._local.cleanup)
            ending.callback(self._upload)
            for writer in self._writers.values():
                ending.callback(writer.close)

    def _upload(self) -> None:
        if self._url is None:
            return
        for path in sorted(filter(Path.is_file, self._folder.rglob("*"))):
            name, size_bytes = path.relative_to(self._folder).as_posix(), path.stat().st_size
            if size_bytes == self._sent.get(name):
                continue
            url = f"{self._url}/{name}"
            urls.make_folder(parent(url))
            with path.open("rb") as source, urls.uploading(url) as file:
                shutil.copyfileobj(source, file)
            self._sent[name] = size_bytes
        self._sent_at_s = time.monotonic()


def _refuse(other: dict[str, Any]) -> None:
    """Refuse unknown arguments; Keras's others are accepted when they are off."""
    for name, value in other.items():
        if name not in LEFT_OUT:
            suggestion = did_you_mean(name, [*OURS, *LEFT_OUT])
            raise ArgumentTypeError(
                f"TensorBoard() has no argument {name!r}.{suggestion} It takes: {', '.join(OURS)}."
            )
        if value:
            raise ConfigurationError(
                f"{name}={describe(value)}: fitkit's TensorBoard doesn't support this. "
                f"{LEFT_OUT[name]}"
            )


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise missing_package("tensorboard", "tensorboard", "TensorBoard") from None
    return SummaryWriter


def _cell(value: Any) -> str:
    """Format a setting as a cell of a Markdown table."""
    return str(value).replace("|", "\\|").replace("\n", " ")


def graph_of(net: nn.Module) -> tuple[Any, Any]:
    """Build TensorBoard's graph of a net, with empty run metadata.

    The graph has arrows if torch.fx can trace the net's forward. Otherwise it only lists the
    modules.
    """
    from tensorboard.compat.proto.config_pb2 import RunMetadata
    from tensorboard.compat.proto.graph_pb2 import GraphDef
    from tensorboard.compat.proto.versions_pb2 import VersionDef

    # A forward may do anything while it is traced. Its errors don't concern the caller.
    try:
        nodes = _followed(net)
    except Exception:
        nodes = _listed(net)
    return GraphDef(node=nodes, versions=VersionDef(producer=22)), RunMetadata()


def _node(name: str, operation: str, inputs: list[str]) -> Any:
    from tensorboard.compat.proto.node_def_pb2 import NodeDef

    return NodeDef(name=name, op=operation, input=inputs)


def _followed(net: nn.Module) -> list[Any]:
    """Make a node for each call of the traced net, with arrows from its inputs."""
    with kept_random_numbers():
        graph = fx.Tracer().trace(_copied(net))
    modules = dict(net.named_modules())
    names: dict[fx.Node, str] = {}
    used: set[str] = set()
    nodes = []
    for node in graph.nodes:
        if node.op == "call_module":
            name = str(node.target).replace(".", "/")
            operation = type(modules[str(node.target)]).__name__
        elif node.op == "get_attr":
            name, operation = str(node.target).replace(".", "/"), "Parameter"
        else:
            name = node.name
            target = node.target
            operation = target if isinstance(target, str) else getattr(target, "__name__", "call")
        if name in used:
            name = f"{name}_{node.name}"  # a module that is called again
        used.add(name)
        names[node] = name
        inputs = [names[one] for one in node.all_input_nodes]
        nodes.append(_node(name, str(operation), inputs))
    return nodes


def _copied(net: nn.Module) -> nn.Module:
    """Copy the net without its hooks; the parameters are shared.

    Tracing calls the forward with proxies in place of tensors. The original net must not store or
    count them, and its hooks must not see them.
    """
    copied = copy.deepcopy(net, {id(parameter): parameter for parameter in net.parameters()})
    for module in copied.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return copied


def _listed(net: nn.Module) -> list[Any]:
    """Make a node for each module that contains no other modules."""
    return [
        _node(name.replace(".", "/") or net._get_name(), module._get_name(), [])
        for name, module in net.named_modules()
        if not any(module.children())
    ]
