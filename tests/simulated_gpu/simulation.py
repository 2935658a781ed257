"""The Python side of the simulated GPUs: what torch has in a build with CUDA, and what was seen.

sitecustomize.py calls `install` in every process, so torch finds the devices when it is imported.
"""

import contextlib
import ctypes
import datetime
import functools
import importlib.abc
import importlib.util
import os
import pathlib
import re
import sys
import time
import types

import cpu_tests

KIND = os.environ.get("SIM_KIND", "cuda")
"""The type of the devices: "cuda", "mps" (one, no float64) or "npu" (known by registration)."""

events = []
"""What happened: (kind, what, the Python stack, innermost first).

Kinds: "wait" (of the host, as torch.cuda.set_sync_debug_mode sees them), "wait unseen", "race".
"""

library = None
_kept = []  # ctypes keeps no callback alive


@contextlib.contextmanager
def recorded(*kinds):
    """Collect a block's events of some kinds (none given: all) in a list, filled at its end."""
    start, seen = len(events), []
    yield seen
    seen += [event for event in events[start:] if not kinds or event[0] in kinds]


def install():
    """Let the next import of torch find the devices."""
    sys.meta_path.insert(0, _Hook())


class _Hook(importlib.abc.MetaPathFinder):
    """Calls a function before or after the import of some of torch's modules."""

    def __init__(self):
        self.after = {
            "torch": _register,
            "torch.distributed.distributed_c10d": _carry_by_gloo,
            "torch._inductor.compile_fx": _run_graphs_as_they_are,
        }
        if cpu_tests.WHERE:
            self.after["fitkit.distributed.devices"] = cpu_tests.choose_the_device

    def find_spec(self, name, path=None, target=None):
        if name == "torch.cuda" and library is None:
            _load()
            if KIND == "cuda":
                _complete(sys.modules["torch._C"], sys.modules["torch.storage"])
            elif KIND == "mps":
                sys.modules["torch._C"]._has_mps = True
                sys.modules["torch._C"]._mps_get_name = lambda: "Simulated MPS"
        if name not in self.after:
            return None
        then = self.after.pop(name)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            then(module)

        spec.loader.exec_module = exec_module
        return spec


def _load():
    """Open the library that is preloaded already, and let it report to `events`."""
    global library
    library = ctypes.CDLL(os.environ["SIM_LIBRARY"])
    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(_note)
    _kept.append(callback)
    library.sim_memory.restype = ctypes.c_size_t
    library.sim_get_stream.restype = ctypes.c_int64
    library.sim_set_stream.argtypes = ctypes.c_int, ctypes.c_int64
    library.sim_set_share.argtypes = ctypes.c_int, ctypes.c_double
    library.sim_resize.argtypes = ctypes.c_void_p, ctypes.c_size_t
    library.sim_install(callback, "\n".join(_mixing_functions()).encode(), _visible())


def _note(kind, what):
    try:
        frame, stack = sys._getframe(1), []
    except ValueError:  # a thread of autograd's or of a process group's
        frame, stack = None, []
    while frame is not None and len(stack) < 40:
        code = frame.f_code
        stack.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    events.append((kind.decode(), what.decode(), "\n".join(stack)))
    log = os.environ.get("SIM_LOG")
    if kind == b"race" and log:  # so that those of other ranks are seen
        with open(log, "a") as file:
            head = f"race in process {os.getpid()}: {what.decode()}"
            file.write("\n    ".join([head, *stack[:25]]) + "\n")


def _visible():
    """How many devices the program may see: the driver stops at the first entry that is none."""
    count = 1 if KIND == "mps" else int(os.environ.get("SIM_GPUS", 4))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if KIND != "cuda" or chosen is None:
        return count
    entries = [entry.strip() for entry in chosen.split(",")]
    good = [e.startswith(("GPU-", "MIG-")) or (e.isdigit() and int(e) < count) for e in entries]
    return [*good, False].index(False)


def _mixing_functions():
    """The functions that take a CPU tensor of no dimension beside a GPU's, by torch's own list."""
    folder = pathlib.Path(importlib.util.find_spec("torchgen").origin).parent
    text = (folder / "packaged/ATen/native/native_functions.yaml").read_text()
    entry = r"^- func: (\w+)[^\n]*\n(?:(?!- func).*\n)*?  device_check: NoCheck"
    return sorted({found[1] for found in re.finditer(entry, text, re.M)})


# ------------------------------------------------------------------ "cuda": what torch._C lacks


def _torch():
    return sys.modules["torch"]


def _lazily(function):
    """As torch's functions that make the first call of CUDA."""

    def called(*given):
        _torch().cuda._lazy_init()
        return function(*given)

    return called


def _complete(c, storage):
    """Give `torch._C` what a build with CUDA has, before `torch.cuda` is imported."""

    def set_device(index):
        if not 0 <= index < library.sim_count():
            raise c.AcceleratorError("CUDA error: invalid device ordinal")
        library.sim_set_device(index)

    def exchange_device(index):
        before = library.sim_get_device()
        if index >= 0:
            set_device(index)
        return before

    class StreamBase(c.Stream):
        cuda_stream = property(lambda self: self.stream_id)

        def __new__(cls, priority=0, stream_id=None, device_index=None, device_type=1, **_):
            if stream_id is None:
                return c.Stream.__new__(cls, device=f"cuda:{library.sim_get_device()}")
            place = {"device_index": device_index, "device_type": device_type}
            return c.Stream.__new__(cls, stream_id=stream_id, **place)

    class EventBase(c.Event):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, **_):
            return c.Event.__new__(cls, device="cuda", enable_timing=enable_timing)

        def record(self, stream=None):
            c.Event.record(self, _torch().cuda.current_stream() if stream is None else stream)
            self.time = time.perf_counter()

        def elapsed_time(self, end):
            return (end.time - self.time) * 1e3

    def initialise():
        if not library.sim_count():
            raise RuntimeError("No CUDA GPUs are available")
        library.sim_init()
        library.sim_defaults(1)
        places = [f"cuda:{index}" for index in range(library.sim_count())]
        _torch().cuda.default_generators = tuple(c.Generator(device=place) for place in places)
        library.sim_defaults(0)
        _torch().cuda._get_device_properties = _properties

    functions = {
        "_has_cuda": True,
        "_cudart": types.SimpleNamespace(
            cudaMemGetInfo=_memory_info,
            cudaError=types.SimpleNamespace(success=0),
            cudaProfilerStart=lambda: 0,
            cudaProfilerStop=lambda: 0,
        ),
        "_CudaStreamBase": StreamBase,
        "_CudaEventBase": EventBase,
        "_CudaDeviceProperties": types.SimpleNamespace,
        "_CUDAGraph": type("_CUDAGraph", (), {}),
        "_cuda_CUDAAllocator_AllocatorState": type("State", (), {}),
        "_graph_pool_handle": lambda: (0, 0),
        "_cuda_init": initialise,
        "_cuda_isInBadFork": lambda: bool(library.sim_forked()),
        "_cuda_getDeviceCount": lambda: library.sim_count(),
        "_cuda_getDevice": _lazily(lambda: library.sim_get_device()),
        "_cuda_setDevice": _lazily(set_device),
        "_cuda_exchangeDevice": _lazily(exchange_device),
        "_cuda_maybeExchangeDevice": _lazily(exchange_device),
        "_cuda_synchronize": lambda: library.sim_synchronize(library.sim_get_device()),
        "_cuda_getCurrentStream": lambda index: (library.sim_get_stream(index), index, 1),
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_setStream": lambda stream_id, device_index, device_type: library.sim_set_stream(
            device_index, stream_id
        ),
        "_cuda_getCurrentRawStream": lambda index: library.sim_get_stream(index),
        "_cuda_memoryStats": _memory_statistics,
        "_cuda_resetPeakMemoryStats": lambda index: library.sim_reset_peak(index),
        "_cuda_resetAccumulatedMemoryStats": lambda index: None,
        "_cuda_emptyCache": lambda: None,
        "_cuda_setMemoryFraction": lambda share, index: library.sim_set_share(index, share),
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_canDeviceAccessPeer": lambda one, other: True,
        "_cuda_sleep": lambda cycles: None,
        "_cuda_hasPrimaryContext": lambda index: bool(library.sim_has_context(index)),
        "_cuda_set_sync_debug_mode": lambda mode: library.sim_set_debug_mode(mode),
        "_cuda_get_sync_debug_mode": lambda: library.sim_get_debug_mode(),
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_ipc_collect": lambda: None,
        "_nccl_version": lambda: (2 << 32) | (27 << 16),
        "_nccl_version_suffix": lambda: b"",
        "_broadcast": lambda tensor, devices: [_moved(tensor, device) for device in devices],
        "_broadcast_coalesced": _broadcast_coalesced,
        "_gather": _gather,
        "_scatter": _scatter,
    }
    for name, value in functions.items():
        setattr(c, name, value)
    _complete_storages(c, storage.UntypedStorage)


def _complete_storages(c, kind):
    resize = kind.resize_

    def new(cls, *size, device=None, **other):
        torch = _torch()
        if device is None or torch.device(device).type != "cuda":
            place = {} if device is None else {"device": device}
            return c.StorageBase.__new__(cls, *size, **place, **other)
        if not size or isinstance(size[0], int):
            made = torch.empty(*size, dtype=torch.uint8)
        else:
            made = torch.tensor(list(size[0]), dtype=torch.uint8)
        return made.to(device).untyped_storage()

    def resized(self, size):
        if self.device.type != "cuda":
            return resize(self, size)
        library.sim_resize(self._cdata, size)
        return self

    kind.__new__ = new
    kind.resize_ = resized


def _properties(index):
    return types.SimpleNamespace(
        name="Simulated GPU",
        major=9,
        minor=0,
        total_memory=library.sim_memory(index, 2),
        multi_processor_count=132,
        gcnArchName="",
        uuid=f"51ca0000-0000-0000-0000-00000000000{index}",
        is_integrated=0,
        warp_size=32,
        max_threads_per_multi_processor=2048,
    )


def _memory_info(index):
    library.sim_note_context(index)
    held, _, all_of_it = (library.sim_memory(index, what) for what in range(3))
    return all_of_it - held, all_of_it


def _memory_statistics(index):
    now, most = library.sim_memory(index, 0), library.sim_memory(index, 1)
    values = {"current": now, "peak": most, "allocated": most, "freed": most - now}
    bytes_of = ["allocated", "reserved", "active", "inactive_split", "requested"]
    kinds = [f"{name}_bytes" for name in bytes_of]
    kinds += ["allocation", "segment", "active", "inactive_split"]
    return {kind: {"all": values} for kind in kinds} | {"num_alloc_retries": 0, "num_ooms": 0}


def _moved(tensor, device):
    """A copy on a device by its index: -1 is main memory, None the current device."""
    index = library.sim_get_device() if device is None else device
    return tensor.to("cpu" if index == -1 else f"cuda:{index}", non_blocking=True)


def _broadcast_coalesced(tensors, devices, buffer_size):
    return [
        [tensor if device == tensor.device.index else _moved(tensor, device) for tensor in tensors]
        for device in devices
    ]


def _gather(tensors, dim, device):
    return _torch().cat([_moved(tensor, device) for tensor in tensors], dim)


def _scatter(tensor, devices, sizes, dim, streams):
    parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(list(sizes), dim)
    return tuple(_moved(part, device) for part, device in zip(parts, devices, strict=False))


# ------------------------------------------------------------------ "npu": a type by registration


def _register(torch):
    """Name the type that torch keeps for others "npu", with the module that such a backend has."""
    if cpu_tests.WHERE:
        cpu_tests.compare_anywhere(torch)
    if KIND == "cuda":
        import cells

        _kept.append(cells.register())
    if KIND != "npu":
        return
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", _npu(torch))
    torch.utils.generate_methods_for_privateuse1_backend(
        for_module=True, for_storage=True, unsupported_dtype=None
    )


def _npu(torch):
    module = types.ModuleType("torch.npu")
    library.sim_defaults(1)
    indices = range(library.sim_count())
    generators = tuple(torch._C.Generator(device=torch.device("npu", i)) for i in indices)
    library.sim_defaults(0)

    def index_of(device):
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return library.sim_get_device() if index is None else index

    class Device:
        """A context in which a device is the current one."""

        def __init__(self, device):
            self.index = index_of(device)

        def __enter__(self):
            self.before = library.sim_get_device()
            library.sim_set_device(self.index)

        def __exit__(self, *_):
            library.sim_set_device(self.before)

    functions = {
        "is_available": lambda: library.sim_count() > 0,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: bool(library.sim_forked()),
        "_lazy_init": lambda: None,
        "device_count": lambda: library.sim_count(),
        "current_device": lambda: library.sim_get_device(),
        "set_device": lambda device: library.sim_set_device(index_of(device)),
        "device": Device,
        "synchronize": lambda device=None: library.sim_synchronize(index_of(device)),
        "default_generators": generators,
        "get_rng_state": lambda device=None: generators[index_of(device)].get_state(),
        "set_rng_state": lambda state, device=None: generators[index_of(device)].set_state(state),
        "manual_seed": lambda seed: generators[index_of(None)].manual_seed(seed),
        "manual_seed_all": lambda seed: [one.manual_seed(seed) for one in generators],
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda including_emulation=True: True,
        "memory_allocated": lambda device=None: library.sim_memory(index_of(device), 0),
        "max_memory_allocated": lambda device=None: library.sim_memory(index_of(device), 1),
        "reset_peak_memory_stats": lambda device=None: library.sim_reset_peak(index_of(device)),
        "mem_get_info": lambda device=None: _memory_info(index_of(device)),
        "empty_cache": lambda: None,
        "get_device_name": lambda device=None: "Simulated NPU",
        "Stream": functools.partial(torch.Stream, device="npu"),
        "Event": functools.partial(torch.Event, device="npu"),
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "current_stream": lambda device=None: torch.accelerator.current_stream(index_of(device)),
    }
    for name, value in functions.items():
        setattr(module, name, value)
    return module


# ------------------------------------------------------------------ what the machine can't have


def _carry_by_gloo(c10d):
    """Let gloo carry the groups "nccl" (and "hccl"), which take tensors of the device alone."""
    made = set()

    class IsMade(type):
        def __instancecheck__(cls, group):
            return id(group) in made

    class ProcessGroupNCCL(metaclass=IsMade):
        class Options:
            is_high_priority_stream = False
            config = types.SimpleNamespace()

        def __new__(cls, store, rank, size, options):
            group = c10d.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
            made.add(id(group))
            return group

    if KIND == "cuda":
        c10d.ProcessGroupNCCL = ProcessGroupNCCL
        # Torch calls these of NCCL's groups, to abort several at once.
        c10d.ProcessGroupGloo._group_start = c10d.ProcessGroupGloo._group_end = lambda group: None
        c10d.is_nccl_available = lambda: True
        c10d.default_pg_nccl_timeout = datetime.timedelta(minutes=10)
    elif KIND == "npu":

        def create(store, rank, size, timeout):
            return c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)

        c10d.Backend.register_backend("hccl", create, devices=["npu"])


def _run_graphs_as_they_are(compile_fx):
    """Run Inductor's graphs operation by operation, as there is no Triton here."""
    from torch._dynamo.backends.debugging import aot_eager

    def compiled(model, inputs, *args, **options):
        return aot_eager(model, inputs)

    compile_fx.compile_fx = compiled
