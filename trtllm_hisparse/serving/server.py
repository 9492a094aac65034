"""A Triton Inference Server in front of our model repository: find it, start it, stop it."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import IO, Any

import trtllm_hisparse
from trtllm_hisparse.config import HiSparseConfig
from trtllm_hisparse.errors import CheckpointError

PACKAGE = Path(trtllm_hisparse.__file__).resolve().parent
_SOURCE_TREE = PACKAGE.parent / "triton_server" / "model_repository"
_INSTALLED = Path(sys.prefix) / "share" / "trtllm-hisparse" / "model_repository"
MODEL_REPOSITORY = _SOURCE_TREE if _SOURCE_TREE.is_dir() else _INSTALLED

EXIT_TIMEOUT_S = 5
"""How long tritonserver waits for requests in flight when it is asked to stop."""
KILL_AFTER_S = EXIT_TIMEOUT_S + 3


class ServerError(RuntimeError):
    """The server cannot start or has stopped; the message says why in one line where Triton does."""


@dataclass(frozen=True)
class Installation:
    """A tritonserver and what it needs around it.

    arguments:    for its command line.
    library_dirs: for LD_LIBRARY_PATH, before what is there.
    """

    executable: Path
    arguments: tuple[str, ...] = ()
    library_dirs: tuple[str, ...] = ()


def find_installation(scratch: Path) -> Installation:
    """The tritonserver on PATH, else the one of the nvidia-pytriton wheel; links go to `scratch`."""
    system = shutil.which("tritonserver")
    if system is not None:
        return Installation(Path(system))
    wheel = importlib.util.find_spec("pytriton")
    if wheel is None or not wheel.submodule_search_locations:
        raise ServerError(
            "no tritonserver: none on PATH and nvidia-pytriton is not installed; "
            "install Triton or run: pip install 'trtllm-hisparse[server]'"
        )
    numpy = importlib.metadata.version("numpy")
    if int(numpy.split(".")[0]) >= 2:
        raise ServerError(f"numpy {numpy}: the Python backend of nvidia-pytriton needs numpy 1.x")
    package = Path(wheel.submodule_search_locations[0])
    return _wheel_installation(package / "tritonserver", package.parent / "nvidia_pytriton.libs", scratch)


def _wheel_installation(server: Path, libraries: Path, scratch: Path) -> Installation:
    """The wheel keeps one Python stub per version apart from the backend; link the right one beside it."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        raise ServerError(f"nvidia-pytriton has no Python backend stub for Python {version}")
    backend = scratch / "backends" / "python"
    backend.mkdir(parents=True)
    installed = server / "backends" / "python"
    for target in (
        installed / "libtriton_python.so",
        installed / "triton_python_backend_utils.py",
        stub,
    ):
        # Links, not copies: the stub finds its libraries relative to where it really is.
        (backend / target.name).symlink_to(target)
    executable = server / "bin" / "tritonserver"
    if not os.access(executable, os.X_OK):  # wheels are unpacked without the executable bit
        executable.chmod(executable.stat().st_mode | 0o111)
    return Installation(
        executable,
        ("--backend-directory", str(backend.parent), "--cache-directory", str(server / "caches")),
        (str(sysconfig.get_config_var("LIBDIR")), str(libraries)),
    )


@dataclass
class TritonServer:
    """A tritonserver of our own, from `start` to `stop`; a context manager.

    checkpoint:       Hugging Face checkpoint directory.
    config:           settings of the KV hierarchy.
    dtype:            float32 or bfloat16.
    host:             address to listen on; loopback unless given.
    *_port:           0 = a free one; the attribute holds the real port after `start`.
    log_file:         None = in the scratch directory, which goes when the server stops.
    model_repository: the repository whose templates are filled in.
    ready_timeout_s:  a model takes as long as its weights take to load.
    """

    checkpoint: str | Path
    config: HiSparseConfig = field(default_factory=HiSparseConfig)
    dtype: str = "float32"
    host: str = "127.0.0.1"
    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0
    log_file: Path | None = None
    model_repository: Path = MODEL_REPOSITORY
    ready_timeout_s: float = 600.0

    _scratch: Path | None = field(default=None, init=False, repr=False)
    _log: IO[bytes] | None = field(default=None, init=False, repr=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    _shm_prefix: str = field(default="", init=False, repr=False)

    @property
    def http_url(self) -> str:
        """`host:port` of the HTTP endpoints."""
        return f"{self.host}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """`host:port` of the gRPC service."""
        return f"{self.host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """`host:port` of `/metrics`."""
        return f"{self.host}:{self.metrics_port}"

    @property
    def log_path(self) -> Path:
        """Triton's log of this run."""
        assert self._log is not None
        return Path(self._log.name)

    def __enter__(self) -> "TritonServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until every model is ready.

        ServerError, with the model's or Triton's reason, if it cannot be; CheckpointError for no directory.
        """
        if self._scratch is not None:
            raise ServerError("the server has been started already")
        if not self.model_repository.is_dir():
            raise ServerError(f"model repository: no directory {self.model_repository}")
        if not Path(self.checkpoint).is_dir():
            raise CheckpointError(f"{self.checkpoint}: no such directory")
        self._scratch = Path(tempfile.mkdtemp(prefix="trtllm-hisparse-"))
        try:
            self._launch(self._scratch)
            self._wait_ready()
        except OSError as error:
            self.stop()
            raise ServerError(f"cannot start: {error}") from None
        except BaseException:
            self.stop()
            raise

    def wait(self) -> int:
        """Block until the server has stopped by itself; its exit status.

        One that has closed its endpoints can hang in its own shutdown; it gets the time `stop` gives it.
        """
        assert self._process is not None
        while self._process.poll() is None:
            try:
                socket.create_connection((self.host, self.http_port), timeout=10).close()
                time.sleep(0.5)
            except OSError:
                self._end(self._process)
        return self._process.returncode

    def metadata(self) -> dict[str, Any]:
        """What the server says of itself: `name`, `version`, `extensions`."""
        with urllib.request.urlopen(f"http://{self.http_url}/v2", timeout=10) as response:
            return dict(json.load(response))

    def error(self) -> str:
        """Why the server did not start or has stopped, from its log; one line where there is one."""
        log = self.log_path.read_text(errors="replace")
        # The message of a model's own exception, which Triton logs escaped and with a stack behind it.
        found = re.findall(r"failed to load '\w+' version \d+: \w+: (?:TritonModelException: )?(.+)", log)
        if found:
            return "; ".join(dict.fromkeys(re.split(r'\\n|"$', reason)[0] for reason in found))
        return "\n".join(log.splitlines()[-20:])

    def stop(self) -> None:
        """End the server and all it started, and remove what it left. Idempotent."""
        if self._process is not None:
            self._end(self._process)
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch)
            self._scratch = None

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            pass  # killed below
        finally:
            # A stub can outlive its server, for good; so can its shared memory.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for region in Path("/dev/shm").glob(f"{self._shm_prefix}*"):
                region.unlink(missing_ok=True)

    def _launch(self, scratch: Path) -> None:
        installation = find_installation(scratch)
        self._fill_in(scratch / "models")
        ports = (self.http_port, self.grpc_port, self.metrics_port)
        self.http_port, self.grpc_port, self.metrics_port = _free_ports(self.host, ports)
        self._shm_prefix = f"hisparse_{uuid.uuid4().hex[:12]}_"
        command = [
            str(installation.executable),
            *installation.arguments,
            *("--model-repository", str(scratch / "models")),
            "--disable-auto-complete-config",
            *("--http-address", self.host, "--http-port", str(self.http_port)),
            *("--grpc-address", self.host, "--grpc-port", str(self.grpc_port)),
            *("--metrics-address", self.host, "--metrics-port", str(self.metrics_port)),
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            *("--exit-timeout-secs", str(EXIT_TIMEOUT_S)),
        ]
        self._log = open(self.log_file or scratch / "tritonserver.log", "wb")  # noqa: SIM115 - closed in stop
        self._process = subprocess.Popen(
            command,
            env=_environment(installation),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _fill_in(self, models: Path) -> None:
        """A copy of the model repository with this run's parameters and this package."""
        shutil.copytree(self.model_repository, models, ignore=shutil.ignore_patterns("__pycache__"))
        values = {
            "checkpoint_path": str(Path(self.checkpoint).absolute()),
            "dtype": self.dtype,
            "hisparse_config": json.dumps(self.config.to_dict()),
        }
        # Protobuf's text format escapes strings as JSON does.
        quoted = {name: json.dumps(value, ensure_ascii=False)[1:-1] for name, value in values.items()}
        for path in models.glob("*/config.pbtxt"):
            path.write_text(Template(path.read_text()).substitute(quoted))
            # The stub ignores PYTHONPATH; a model's own directory is on its sys.path.
            (path.parent / "1" / PACKAGE.name).symlink_to(PACKAGE)

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.ready_timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(self.error())
            try:
                with urllib.request.urlopen(f"http://{self.http_url}/v2/health/ready", timeout=1):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise ServerError(f"not ready after {self.ready_timeout_s} s\n{self.error()}")


def _free_ports(host: str, wanted: Iterable[int]) -> list[int]:
    """These ports, a free one for each 0; ServerError for one that is taken."""
    with contextlib.ExitStack() as sockets:  # all open at once, so they differ
        ports = []
        for port in wanted:
            try:
                listener = sockets.enter_context(socket.create_server((host, port)))
            except OSError as error:
                raise ServerError(f"cannot listen on {host}:{port}: {error.strerror}") from None
            ports.append(listener.getsockname()[1])
        return ports


def _environment(installation: Installation) -> dict[str, str]:
    """The Python stub takes the packages of the first python3 on PATH: this interpreter's."""

    def prepend(name: str, *values: str) -> str:
        return os.pathsep.join([*values, *filter(None, [os.environ.get(name)])])

    environment = os.environ | {"PATH": prepend("PATH", str(Path(sys.prefix) / "bin"))}
    if installation.library_dirs:
        environment["LD_LIBRARY_PATH"] = prepend("LD_LIBRARY_PATH", *installation.library_dirs)
    return environment
