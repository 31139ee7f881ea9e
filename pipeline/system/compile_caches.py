"""Where Triton and torch.compile keep what they compile, and later load and run."""

import atexit
import getpass
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

from longhaul.kernels.native import cache_folder, who_else_can_change

logger = logging.getLogger(__name__)

TRITON = "TRITON_CACHE_DIR"
TORCH = "TORCHINDUCTOR_CACHE_DIR"


def compile_caches() -> dict[str, Path]:
    """The folders, by the variables that name others."""
    triton = Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache")
    return {
        TRITON: Path(os.environ.get(TRITON) or triton),
        TORCH: Path(os.environ.get(TORCH) or _default_of_torch()),
    }


def _default_of_torch() -> Path:
    """As torch._inductor.runtime.cache_dir_utils has it, which takes a second to import."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # The system does not know the user.
        user = f"uid_{os.getuid()}"
    user = re.sub(r'[\\/:*?"<>|]', "_", user)
    return Path(tempfile.gettempdir(), f"torchinductor_{user}")


def use_private_caches() -> None:
    """Let this process and those it starts compile into folders that nobody else can change.

    Whoever could write there could put code into it. A folder of the user's own cache takes its
    place, or one for this process alone, which a warning says.
    """
    for variable, folder in compile_caches().items():
        try:
            changer = who_else_can_change(folder)
        except OSError:  # It is not there yet.
            continue
        if changer is None:
            continue
        private = cache_folder()
        if private is None:
            private = Path(tempfile.mkdtemp(prefix="longhaul-"))
            atexit.register(shutil.rmtree, private, ignore_errors=True)
        private /= variable.partition("_")[0].lower()
        private.mkdir(mode=0o700, exist_ok=True)
        os.environ[variable] = str(private)
        logger.warning(
            "others could put code into %s: %s; what is compiled is kept in %s; %s=FOLDER names "
            "another",
            *(folder, changer, private, variable),
        )
