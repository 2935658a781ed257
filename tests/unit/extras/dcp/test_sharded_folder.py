"""Folders of shards: whole or not at all, one save's, put together from any chunks, converted."""

import itertools
import json
import os
import shutil

import pytest
import torch

import fitkit
from fitkit.__main__ import main
from fitkit.callbacks.checkpoint_writer import StateCopies
from fitkit.checkpoint import (
    load_weights,
    open_checkpoint,
    remove_checkpoint,
    save_checkpoint,
    save_weights,
)
from fitkit.checkpoint.container import read_container, write_container
from fitkit.checkpoint.formats import Weights
from fitkit.distributed.collectives import Solo
from fitkit.errors import CheckpointError
from fitkit.extras.dcp import sharded_folder
from fitkit.extras.dcp.folder_by_threads import FolderByThreads
from fitkit.extras.dcp.sharded_folder import ShardedFolder, write_shards
from fitkit.extras.safetensors_file import open_tensors, write_tensors
from tests.nets import normed

FILES = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4)
        self.out.weight = self.embed.weight  # tied
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("wave", torch.randn(2, dtype=torch.complex128))  # not in safetensors
        self.register_buffer("none", torch.zeros(0, 3))

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def saved(path, module=None):
    module = module or Net()
    save_weights(path, module.state_dict())
    return module


def same(one, other):
    mine, others = one.state_dict(), other.state_dict()
    assert mine.keys() == others.keys()
    for name in mine:
        if isinstance(mine[name], torch.Tensor):
            assert torch.equal(mine[name], others[name]), name


@pytest.fixture
def cut(tmp_path):
    """A folder in which a (5, 6) tensor lies in four chunks of unequal sizes, in two files."""
    whole = torch.arange(30.0).reshape(5, 6)
    cuts = [((0, 0), (2, 4)), ((2, 0), (3, 4)), ((0, 4), (2, 2)), ((2, 4), (3, 2))]
    folder = tmp_path / "cut.dcp"
    folder.mkdir()
    digests = {}
    for number, (begin, sizes) in enumerate(cuts):
        file = f"shard-{number:05d}-model-00001-of-00001.safetensors"
        block = whole[begin[0] : begin[0] + sizes[0], begin[1] : begin[1] + sizes[1]]
        texts = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": begin}})}
        digests[file] = write_tensors(folder / file, Weights({"w": block}, {}, {}), texts)
    content = {
        "kind": "weights",
        "numbers": [],
        "files": digests,
        "weights": {"tensors": {"w": "w"}, "extra": {}, "versions": {}},
        "shards": {"w": {"shape": [5, 6], "dtype": "float32"}},
    }
    write_container(folder / "index.h5", content, [])
    return folder, whole, content


def test_all_that_a_state_dict_can_have_comes_back(tmp_path):
    module = saved(tmp_path / "w.dcp")
    other = Net()
    load_weights(tmp_path / "w.dcp/", other)
    same(other, module)
    assert other.seen == 3 and other.out.weight is other.embed.weight
    assert not any(path.suffix in (".metadata", ".distcp") for path in tmp_path.rglob("*"))


def test_chunks_of_unequal_sizes_are_put_together(cut):
    folder, whole, _ = cut
    with ShardedFolder().open(folder) as weights:
        assert torch.equal(weights.read("w"), whole)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["files"].popitem(),
        lambda content: content["files"].update({"../../etc/passwd": "0" * 64}),
        lambda content: content["shards"].clear(),
        lambda content: content["shards"]["w"].update(shape=[5, 1 << 62]),
        lambda content: content["shards"]["w"].update(shape=[0, 1 << 62, 1 << 62]),
        lambda content: content["shards"]["w"].update(shape=[30]),
        lambda content: content["shards"]["w"].update(dtype="object"),
        lambda content: content["shards"]["w"].update(dtype="int32"),
        lambda content: content.update(files=None),
    ],
)
def test_an_index_that_does_not_add_up_is_refused(cut, change):
    folder, _, content = cut
    change(content)
    write_container(folder / "index.h5", content, [])
    with pytest.raises(CheckpointError, match="is refused"), ShardedFolder().open(folder):
        pass


@pytest.mark.parametrize(
    "texts",
    [
        {},
        {"DCP_SHARDING_INFO": "[["},
        {"DCP_SHARDING_INFO": "{}"},
        *(
            {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": offsets}})}
            for offsets in ([0], [-1, 0], [1, 0], [3, 0], [0, 4], [2, 0], "00")
        ),
    ],
)
def test_a_shard_that_does_not_say_where_its_chunk_belongs_is_refused(cut, texts):
    folder, whole, content = cut
    file = next(iter(content["files"]))  # at 0, 0 in truth
    content["files"][file] = write_tensors(
        folder / file, Weights({"w": whole[:2, :4]}, {}, {}), texts
    )
    write_container(folder / "index.h5", content, [])
    with pytest.raises(CheckpointError, match="is refused"), ShardedFolder().open(folder):
        pass


def test_two_numbers_of_a_state_never_stand_for_one_tensor(cut):
    folder, _, content = cut
    content.update(kind="checkpoint", numbers=["w", "w"], state={"dict": {}})
    write_container(folder / "index.h5", content, [])
    with pytest.raises(CheckpointError, match="two numbers"), open_checkpoint(folder):
        pass


def test_one_chunk_under_several_names_is_refused(cut):
    # Each name would be read into memory of its own.
    folder, whole, content = cut
    file, names = next(iter(content["files"])), ["w", *map(str, range(100))]
    texts = {"DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": [0, 0]} for name in names})}
    tensors = Weights(dict.fromkeys(names, whole), {}, {})
    content["files"] = {file: write_tensors(folder / file, tensors, texts)}
    content["shards"] = {name: {"shape": [5, 6], "dtype": "float32"} for name in names}
    write_container(folder / "index.h5", content, [])
    with (
        pytest.raises(CheckpointError, match="one chunk under several names"),
        ShardedFolder().open(folder),
    ):
        pass


def test_a_shard_has_each_name_in_memory_of_its_own(tmp_path):
    tensor, done = torch.arange(6.0), {}
    write_shards("x.dcp", tmp_path, {"a": tensor, "b": tensor}, Solo(), done.update)
    with open_tensors(tmp_path / next(iter(done))) as shard:
        assert not shard.aliases
        assert torch.equal(shard.read("a"), tensor) and torch.equal(shard.read("b"), tensor)


def test_damaged_missing_and_foreign_shards_are_refused_and_change_nothing(tmp_path):
    path = tmp_path / "w.dcp"
    saved(path)
    shard = path / FILES[0]
    good, target = shard.read_bytes(), Net()
    before = {name: value.clone() for name, value in target.named_parameters()}
    for spoil, message in (
        (lambda: shard.write_bytes(good[:-3] + b"abc"), "damaged"),
        (lambda: shard.write_bytes(good[:50]), "damaged"),
        (shard.unlink, "is missing"),
        (
            lambda: (
                saved(tmp_path / "other.dcp"),
                shutil.copy(tmp_path / "other.dcp" / FILES[0], shard),
            ),
            "another save",
        ),
    ):
        spoil()
        with pytest.raises(CheckpointError, match=message):
            load_weights(path, target)
    for name, value in target.named_parameters():
        assert torch.equal(value, before[name])
    (path / "index.h5").unlink()
    (path / ".metadata").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="with a pickle in it"):
        load_weights(path, target)
    with pytest.raises(FileNotFoundError):
        load_weights(tmp_path / "no.dcp", target)


def test_a_failed_save_leaves_the_old_folder_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "w.dcp"
    module = saved(path)
    monkeypatch.setattr(
        "fitkit.extras.dcp.sharded_folder.write_container",
        lambda *given: (_ for _ in ()).throw(OSError(28, "No space left")),
    )
    with pytest.raises(CheckpointError, match="No space left"):
        saved(path)
    assert os.listdir(tmp_path) == ["w.dcp"]
    monkeypatch.undo()
    other = Net()
    load_weights(path, other)
    same(other, module)


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_is_replaced_and_what_killed_savers_left_is_removed(
    tmp_path, monkeypatch, exchanges
):
    if not exchanges:
        monkeypatch.setattr("fitkit.extras.dcp.unfinished_folder._exchange", lambda *names: False)
    (tmp_path / ".w.dcp.0123456789ab.fitkit-unfinished").mkdir()
    (tmp_path / ".w.dcp.0123456789ab.fitkit-unfinished" / "part").write_text("x")
    saved(tmp_path / "w.dcp")
    module = saved(tmp_path / "w.dcp")
    assert os.listdir(tmp_path) == ["w.dcp"]
    other = Net()
    load_weights(tmp_path / "w.dcp", other)
    same(other, module)


@pytest.mark.parametrize("swap", ["link", "folder with links"])
def test_who_replaces_an_unfinished_folder_changes_no_other_files(tmp_path, monkeypatch, swap):
    (tmp_path / "folder").mkdir()
    path, theirs = tmp_path / "folder" / "w.dcp", tmp_path / "theirs"
    saved(path)
    before = (path / "index.h5").read_bytes()
    shutil.copytree(path, theirs)
    for file in theirs.iterdir():
        file.write_bytes(b"theirs")
    write_shards = sharded_folder.write_shards

    def swap_first(name, place, *arguments):
        place.rename(tmp_path / "moved")
        if swap == "link":
            place.symlink_to(theirs)
        else:
            place.mkdir()
            for file in theirs.iterdir():
                (place / file.name).symlink_to(file)
        write_shards(name, place, *arguments)

    monkeypatch.setattr(sharded_folder, "write_shards", swap_first)
    with pytest.raises(CheckpointError, match="can't be written"):
        saved(path)
    assert (path / "index.h5").read_bytes() == before
    assert sorted(os.listdir(theirs)) == ["index.h5", FILES[0]]
    for file in theirs.iterdir():
        assert file.read_bytes() == b"theirs"
    # What was put there isn't removed either.
    assert len(os.listdir(path.parent)) == 2


def test_an_unfinished_folder_that_was_replaced_by_another_doesnt_get_the_name(
    tmp_path, monkeypatch
):
    path = tmp_path / "w.dcp"
    module = saved(path)
    write_shards, places = sharded_folder.write_shards, []

    def swap_after(name, place, *arguments):
        write_shards(name, place, *arguments)
        place.rename(tmp_path / "moved")
        place.mkdir()
        (place / "thesis.txt").write_text("years")
        places.append(place)

    monkeypatch.setattr(sharded_folder, "write_shards", swap_after)
    with pytest.raises(CheckpointError, match="replaced the unfinished folder") as caught:
        saved(path)
    assert str(caught.value).count("can't be written") == 1
    assert (places[0] / "thesis.txt").read_text() == "years"
    other = Net()
    load_weights(path, other)
    same(other, module)


def test_things_put_into_a_folder_amid_a_save_keep_it_from_being_replaced(tmp_path, monkeypatch):
    path, write_shards = tmp_path / "w.dcp", sharded_folder.write_shards
    saved(path)

    def put_after(*arguments):
        write_shards(*arguments)
        (path / "thesis.txt").write_text("years")

    monkeypatch.setattr(sharded_folder, "write_shards", put_after)
    with pytest.raises(CheckpointError, match=r"other things in it \(thesis\.txt\)"):
        saved(path)
    assert os.listdir(tmp_path) == ["w.dcp"]
    assert (path / "thesis.txt").read_text() == "years"


def test_a_folder_with_other_things_is_not_replaced(tmp_path):
    (tmp_path / "data.dcp").mkdir()
    (tmp_path / "data.dcp" / "thesis.txt").write_text("years")
    (tmp_path / "file.dcp").write_text("x")
    for name in ("data.dcp", "file.dcp", "no/w.dcp"):
        with pytest.raises(CheckpointError, match="can't be written"):
            saved(tmp_path / name)
    assert (tmp_path / "data.dcp" / "thesis.txt").read_text() == "years"
    saved(tmp_path / "w.dcp")
    (tmp_path / "data.dcp" / "thesis.txt").rename(tmp_path / "w.dcp" / "thesis.txt")
    with pytest.raises(CheckpointError, match=r"other things in it \(thesis\.txt\)"):
        saved(tmp_path / "w.dcp")
    with pytest.raises(OSError, match="other things"):
        remove_checkpoint(tmp_path / "w.dcp")
    (tmp_path / "w.dcp" / "thesis.txt").unlink()
    (tmp_path / "link.dcp").symlink_to(tmp_path / "w.dcp")
    remove_checkpoint(tmp_path / "link.dcp")
    saved(tmp_path / "w.dcp")
    assert sorted(os.listdir(tmp_path)) == ["data.dcp", "file.dcp", "w.dcp"]


def test_convert_goes_round_all_formats(tmp_path, capsys):
    module = normed()
    state = {"optimizer": {"step": 3, "moments": (torch.randn(4, 3),)}, "rng": b"\0\1"}
    save_checkpoint(tmp_path / "a.h5", module.state_dict(), state)
    names = ["a.h5", "b.dcp", "c.h5", "d.dcp", "e.safetensors", "f.dcp", "g.pt", "h.h5"]
    for source, target in itertools.pairwise(names):
        assert main(["convert", str(tmp_path / source), str(tmp_path / target)]) == 0
    said = capsys.readouterr().out
    assert said.count("(checkpoint)") == 3 and said.count("(weights)") == 4
    with read_container(tmp_path / "c.h5") as reader, read_container(tmp_path / "a.h5") as first:
        assert reader.document == first.document
    with fitkit.checkpoint.open_checkpoint(tmp_path / "d.dcp") as found:
        assert found.state["rng"] == b"\0\1"
        assert torch.equal(found.state["optimizer"]["moments"][0], state["optimizer"]["moments"][0])
    for name in names:
        other = normed()
        load_weights(tmp_path / name, other)
        same(other, module)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("no.h5", "b.dcp", "There is no"),
        ("w.h5", "w.h5", "into itself"),
        ("w.h5", "w.zip", "suffix='.zip' is not a known suffix"),
        ("bad.dcp", "b.h5", "isn't a checkpoint of fitkit's"),
    ],
)
def test_convert_says_what_is_wrong(tmp_path, capsys, source, target, message):
    saved(tmp_path / "w.h5")
    (tmp_path / "bad.dcp").mkdir()
    assert main(["convert", str(tmp_path / source), str(tmp_path / target)]) == 1
    assert message in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["bad.dcp", "w.h5"]


def test_inspect_checks_and_shows_a_folder(tmp_path, capsys):
    save_checkpoint(tmp_path / "a.dcp", Net().state_dict(), {"moments": torch.zeros(4, 3)})
    assert main(["inspect", str(tmp_path / "a.dcp")]) == 0
    shown = capsys.readouterr().out
    assert "embed.weight" in shown and "moments: tensor float32 (4, 3)" in shown
    (tmp_path / "a.dcp" / FILES[0]).unlink()
    assert main(["inspect", str(tmp_path / "a.dcp")]) == 1


def test_a_folder_by_a_thread_has_the_bytes_of_one_at_once(tmp_path):
    module = Net()
    state = {"moments": torch.ones(4, 3), "step": torch.tensor(3.0), "text": "x"}
    save_checkpoint(tmp_path / "once.dcp", module.state_dict(), state)
    path, done = tmp_path / "thread.dcp", []
    folder = FolderByThreads(str(path), module.state_dict(), state, Solo(), StateCopies().of)
    with torch.no_grad():  # what comes after isn't in it
        for tensor in (*module.parameters(), *module.buffers(), state["moments"]):
            tensor.zero_()
    assert not path.exists()
    folder.write(lambda: done.append(path.is_dir()))
    assert done == [True]
    names = sorted(os.listdir(tmp_path / "once.dcp"))
    assert names == sorted(os.listdir(path)) == ["index.h5", FILES[0]]
    for name in names:
        assert (tmp_path / "once.dcp" / name).read_bytes() == (path / name).read_bytes()


@pytest.mark.parametrize("note", [None, b"{", b'["x"]', b'{"../x": "0"}'])
def test_a_part_that_never_comes_or_a_foreign_note_ends_the_save(tmp_path, note):
    class OfTwo(Solo):
        """Rank 0 of two, of which the other plans no part."""

        world_size = 2

    path = tmp_path / "w.dcp"
    folder = FolderByThreads(str(path), Net().state_dict(), None, OfTwo(), StateCopies().of)
    if note is None:
        folder.stop()
    else:
        (folder._place / ".rank-00001").write_bytes(note)
    said = "the part of rank 1 never came" if note is None else "somebody has changed the note"
    with pytest.raises(CheckpointError, match=said):
        folder.write(lambda: pytest.fail("there is no folder"))
    assert os.listdir(tmp_path) == []


def test_callbacks_keep_delete_and_go_on_from_folders(tmp_path):
    x, y = torch.randn(8, 3), torch.randn(8, 1)

    def trained(epochs, *callbacks, **options):
        torch.manual_seed(0)
        model = fitkit.Model(torch.nn.Linear(3, 1))
        model.compile("adam", "mse", accelerator="cpu", devices=1)
        model.fit(
            x,
            y,
            batch_size=4,
            shuffle=False,
            epochs=epochs,
            verbose=0,
            callbacks=list(callbacks),
            **options,
        )
        return model

    def keeps():
        return fitkit.callbacks.ModelCheckpoint(
            tmp_path / "m" / "{epoch}.dcp", "loss", mode="min", save_top_k=1, save_last=True
        )

    trained(2, keeps())
    assert sorted(os.listdir(tmp_path / "m")) == ["2.dcp", "last.dcp"]
    resumed, whole = trained(4, keeps(), resume_from="last"), trained(4)
    same(resumed.net, whole.net)
    assert sorted(os.listdir(tmp_path / "m")) == ["4.dcp", "last.dcp"]

    def fails(epoch, logs):
        if epoch == 2:
            raise ArithmeticError

    backup = fitkit.callbacks.BackupAndRestore(tmp_path / "b", sharded=True)
    with pytest.raises(ArithmeticError):
        trained(4, fitkit.callbacks.LambdaCallback(on_epoch_begin=fails), backup)
    assert os.listdir(tmp_path / "b") == ["backup-000002.dcp"]
    same(trained(4, backup).net, whole.net)
    assert not (tmp_path / "b").exists()


def test_a_backup_whose_weights_alone_are_damaged_is_passed_over(tmp_path):
    x, y = torch.randn(8, 3), torch.randn(8, 1)

    def trained(fails_in=None):
        def fails(epoch, logs):
            if epoch == fails_in:
                raise ArithmeticError

        torch.manual_seed(0)
        model = fitkit.Model(torch.nn.Linear(3, 1))
        model.compile("sgd", "mse", accelerator="cpu", devices=1)  # its state has no tensors
        backup = fitkit.callbacks.BackupAndRestore(tmp_path, sharded=True, keep=2)
        model.fit(
            x,
            y,
            batch_size=4,
            epochs=4,
            verbose=0,
            callbacks=[fitkit.callbacks.LambdaCallback(on_epoch_begin=fails), backup],
        )
        return model.net

    whole = trained()
    with pytest.raises(ArithmeticError):
        trained(fails_in=3)
    shard = tmp_path / "backup-000003.dcp" / FILES[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"backup-000002\.dcp, which is older"):
        same(trained(), whole)


def test_an_old_backup_with_other_things_in_it_stays_and_the_training_goes_on(tmp_path):
    model = fitkit.Model(torch.nn.Linear(3, 1))
    model.compile("sgd", "mse", accelerator="cpu", devices=1)
    keep = tmp_path / "backup-000001.dcp" / "notes.txt"

    def note(epoch, logs):
        if epoch == 1:
            keep.write_text("the good one")

    with pytest.warns(UserWarning, match=r"backup-000001\.dcp is no longer needed, but can't be"):
        model.fit(
            torch.randn(8, 3),
            torch.randn(8, 1),
            epochs=3,
            verbose=0,
            callbacks=[
                fitkit.callbacks.LambdaCallback(on_epoch_begin=note),
                fitkit.callbacks.BackupAndRestore(tmp_path, sharded=True),
            ],
        )
    assert keep.read_text() == "the good one" and os.listdir(tmp_path) == ["backup-000001.dcp"]
