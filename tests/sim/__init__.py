"""Four simulated devices, ``sim:0`` … ``sim:3``, whose memory is the host's and whose kernels are the CPU's.

Their results are the CPU's, bit for bit. As on an accelerator, operands on two devices are an error, and autograd has a
thread for each device. Not as on one: all devices draw from the CPU's default generator, a `torch.Generator` of them is
a CPU generator, there is one stream, autocast does not know them, and tensors on them are not sparse or quantized.

To `load` them changes the whole process (`torch.accelerator` sees them): see `tests/test_on_devices.py`.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import torch

SOURCE = Path(__file__).parent / "sim.cpp"


def compiler() -> str | None:
    """The C++ compiler."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")


def missing() -> str | None:
    """Why there can be no simulated devices here."""
    if not sys.platform.startswith("linux"):
        return "simulated devices are built on Linux only"
    return None if compiler() else "no C++ compiler to build the simulated devices with"


def build() -> Path:
    """The library, built once for this source and this torch.

    A process builds in a folder of its own and moves the result into place, so nobody sees half a file; the lock is
    given up by the system when its holder dies.
    """
    import fcntl

    from torch.utils.cpp_extension import include_paths, library_paths

    options = [
        "-O1",
        "-std=c++20",
        "-shared",
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    key = repr((SOURCE.read_bytes(), torch.__version__, torch.__file__, compiler(), options))
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"fxsplit-sim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{name}.so"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as work:
                made = Path(work) / library.name
                command = [compiler(), *options, str(SOURCE), "-o", str(made)]
                command += [f"-I{path}" for path in include_paths()]
                command += [f"-L{path}" for path in library_paths()] + ["-lc10", "-ltorch_cpu"]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
                made.replace(library)
    return library


@functools.cache
def load() -> None:
    """Build the devices where that has not been done, and make them known to torch."""
    torch.utils.rename_privateuse1_backend("sim")
    library = ctypes.CDLL(str(build()))
    library.sim_start()
    torch._register_device_module("sim", _module(library))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _module(library: ctypes.CDLL) -> types.ModuleType:
    """`torch.sim`: what torch asks of the module of a device."""

    def index_of(device) -> int:
        index = device if isinstance(device, int) else torch.device(device).index
        return library.sim_current() if index is None else index

    @contextlib.contextmanager
    def on(device):
        before = library.sim_current()
        set_device(device)
        try:
            yield
        finally:
            library.sim_set(before)

    def set_device(device) -> None:
        if not 0 <= index_of(device) < library.sim_count():
            raise RuntimeError(f"there is no device {device}")
        library.sim_set(index_of(device))

    module = types.ModuleType("torch.sim")
    module.device_count, module.current_device = library.sim_count, library.sim_current
    module.device, module.set_device = on, set_device
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.synchronize = lambda device=None: None
    # The generator is the CPU's, which torch.manual_seed has seeded when it asks for this.
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device="sim": torch.get_rng_state()
    module.set_rng_state = lambda state, device="sim": torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [
        torch.bfloat16,
        torch.float16,
    ]  # torch 2.9 asks, of a checkpoint
    return module
